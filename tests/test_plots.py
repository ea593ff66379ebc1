"""Figures show the numbers they are given, under labels that tell measured, reported and computed apart."""

import importlib
import json
import shutil
from itertools import combinations, pairwise

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from qurl import plots
from qurl.notebook import project_root
from qurl.plots.style import arm_colours
from qurl.quantization import FORMATS, QuantizedTensor, quantize
from qurl.roofline import paper_cases


def measured(dtype="int8", lengths=(64,)) -> pd.DataFrame:
    values = iter(range(100))
    return pd.DataFrame(
        [
            {
                "batch_size": batch_size,
                "max_tokens": length,
                "dtype": dtype,
                "phase": phase,
                "baseline": baseline,
                "fastest": baseline == "fp32",
                "speedup": 1 + (step := next(values) / 20),
                "low": 0.9 + step,
                "high": 1.2 + step,
                "repetitions": 3,
                "waited_share": 0.01,
            }
            for batch_size in (8, 64)
            for length in lengths
            for phase in ("prefill", "decode", "whole rollout")
            for baseline in ("bf16", "fp32")
        ]
    )


@pytest.mark.parametrize("lengths", [(64,), (32, 128)])
def test_speedup_bars_are_the_medians(lengths):
    table = measured(lengths=lengths)
    figure = plots.speedup(table, paper_cases(), title="tiny on a stand-in")
    left, right = figure.axes
    shown = table[table["phase"] != "prefill"]
    assert sorted(
        patch.get_height()
        for container in left.containers
        if hasattr(container, "patches")
        for patch in container.patches
    ) == pytest.approx(sorted(shown["speedup"]))
    # The whole rollout stands beside decoding, for each baseline (case E11).
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert sorted(labels) == [
        "decode only, against BF16, qurl's engine",
        "decode only, against FP32",
        "whole rollout (sync + prefill + decode), against BF16, qurl's engine",
        "whole rollout (sync + prefill + decode), against FP32",
    ]
    assert len(left.get_xticks()) == 2 * len(lengths)
    assert "INT8" in left.get_ylabel() and "Batch size" in left.get_xlabel() and "GPU" in right.get_xlabel()
    assert figure.get_suptitle() == "tiny on a stand-in"


def test_speedup_tells_sources_apart():
    figure = plots.speedup(measured(), paper_cases())
    right = figure.axes[1]
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert "paper (reported)" in labels
    assert "roofline (computed), batch 64" in labels
    # Marks differ in shape and not only in colour.
    by_marker = {}
    for line in right.lines:
        if line.get_marker() not in ("None", "", None):
            by_marker.setdefault(line.get_marker(), set()).add(
                matplotlib.colors.to_hex(line.get_markeredgecolor())
            )
    assert all(len(colours) == 1 for colours in by_marker.values())
    assert len(by_marker) == 4
    # Every paper number is drawn: the diamonds sit in the middle of each reported range.
    diamonds = sorted(float(line.get_ydata()[0]) for line in right.lines if line.get_marker() == "D")
    assert diamonds == pytest.approx(sorted([1.25] * 3 + [1.43] * 3 + [1.7, 1.865]))


def test_speedup_without_paper_numbers():
    figure = plots.speedup(measured("fp8"), paper_cases())
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert "paper: no FP8 numbers" in labels and "paper (reported)" not in labels


def test_speedup_texts_do_not_overlap():
    figure = plots.speedup(measured(), paper_cases(), title="a title")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    for axes in figure.axes:
        labels = [label.get_window_extent(renderer) for label in axes.get_xticklabels()]
        assert not any(first.overlaps(second) for first, second in pairwise(labels))
        assert axes.get_legend().get_window_extent(renderer).ymin > max(
            text.get_window_extent(renderer).ymax for text in [*axes.texts, axes.get_xticklabels()[0]]
        )


def test_speedup_wants_one_dtype():
    both = pd.concat([measured("int8"), measured("fp8")])
    with pytest.raises(ValueError, match=r"dtypes \['int8', 'fp8'\]: pass the rows of exactly one"):
        plots.speedup(both, paper_cases())


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantization_shows_codes_and_errors(dtype):
    weight = torch.linspace(-1, 1, 64).reshape(2, 32)
    quantized = quantize(weight, dtype)
    figure = plots.quantization(weight, quantized, dtype)
    points = figure.axes[1].collections[0].get_offsets().data
    expected = quantized.codes.float() - weight / quantized.scale
    assert points[:, 1] == pytest.approx(expected.flatten().numpy(), abs=1e-4)
    if dtype == "int8":
        assert abs(points[:, 1]).max() <= 0.5 + 1e-4


def test_logprobs_shows_w():
    tokens = pd.DataFrame({"behaviour": [-1.0, -2.0, -0.5], "proximal": [-1.0, -1.5, -0.75]})
    figure = plots.logprobs(tokens, "int8")
    assert figure.axes[0].collections[0].get_offsets().tolist() == [[-1, -1], [-2, -1.5], [-0.5, -0.75]]
    assert "π_behav" in figure.axes[1].get_xlabel()
    bars = figure.axes[1].patches
    assert sum(patch.get_height() for patch in bars) == 3
    # w = 1, e^0.5 and e^-0.25: as many bins on both sides of 1, which is in the middle of the middle one.
    middle = bars[len(bars) // 2]
    assert len(bars) % 2 == 1 and middle.get_height() == 1
    assert middle.get_x() * (middle.get_x() + middle.get_width()) == pytest.approx(1)

    # Ticks at e^-0.5, e^-0.25, 1, e^0.25 and e^0.5.
    figure.draw_without_rendering()
    ticks = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert ticks == ["0.607", "0.779", "1", "1.28", "1.65"]


def test_logprobs_of_policies_that_agree():
    figure = plots.logprobs(pd.DataFrame({"behaviour": [-1.0, -2.0], "proximal": [-1.0, -2.0]}), "int8")
    heights = [patch.get_height() for patch in figure.axes[1].patches]
    assert heights[len(heights) // 2] == 2 == sum(heights)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_no_code_lies_on_the_edge_of_a_bin(dtype):
    """A code on an edge counts to its right: the histogram of codes of both signs would not be symmetric."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes.view(torch.int8 if dtype == "int8" else torch.float8_e4m3fn).float()
    codes = codes[codes.abs() <= FORMATS[dtype].max_code]
    figure = plots.quantization(codes, QuantizedTensor(codes, torch.tensor([1.0])), dtype)
    heights = [patch.get_height() for patch in figure.axes[0].patches]
    assert heights == pytest.approx(heights[::-1])
    assert min(heights) > 0
    edges = {patch.get_x() for patch in figure.axes[0].patches}
    assert not edges & set(codes.tolist())


@pytest.mark.parametrize("lengths", [(64,), (32, 128)])
def test_numbers_stand_under_their_bars(lengths):
    """At the end of a whisker several times as high as its bar, a number would be read as the whisker's."""
    table = measured(lengths=lengths).assign(low=lambda rows: rows["speedup"] / 20)
    table.loc[::2, "high"] = 3 * table.loc[::2, "speedup"]
    figure = plots.speedup(table, paper_cases())
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    axes = figure.axes[0]
    bars = [
        bar for container in axes.containers if hasattr(container, "patches") for bar in container.patches
    ]
    assert len(bars) == len(axes.texts) == 8 * len(lengths)
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    for bar, text, box in zip(bars, axes.texts, boxes, strict=True):
        assert text.get_text() == f"{bar.get_height():.2f}"
        below = bar.get_window_extent(renderer)
        # Below every bar and whisker, which end at the axis; in the middle of its own bar.
        assert below.ymin - 20 < box.ymax <= below.ymin
        assert (box.xmin + box.xmax) / 2 == pytest.approx((below.xmin + below.xmax) / 2, abs=2)
    boxes += [label.get_window_extent(renderer) for label in axes.get_xticklabels()]
    assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))


def test_speedup_says_what_the_marks_are_and_what_disturbed_them():
    def title(**columns):
        return plots.speedup(measured().assign(**columns), paper_cases()).axes[0].get_title()

    assert title() == "Measured here (bars: median of 3 repetitions, whiskers: range)"
    assert title(waited_share=float("nan")) == title()
    assert title(repetitions=1) == "Measured here (one repetition)"
    assert title(waited_share=0.48).endswith("\ndisturbed by other jobs: waited 48% of the time for a core")


def test_one_repetition_has_no_whiskers():
    table = measured().assign(low=lambda rows: rows["speedup"], high=lambda rows: rows["speedup"])
    bars = [c for c in plots.speedup(table, paper_cases()).axes[0].containers if hasattr(c, "patches")]
    assert bars and all(container.errorbar is None for container in bars)
    bars = [c for c in plots.speedup(measured(), paper_cases()).axes[0].containers if hasattr(c, "patches")]
    assert all(container.errorbar is not None for container in bars)


def test_curves_draw_means_over_seeds_and_their_range():
    rows = [
        {
            "arm": arm,
            "seed": seed,
            "step": step,
            "reward": 0.1 * step + 0.02 * seed,
            "mismatch/kl_k3": 1e-3 * (1 + seed),
        }
        for arm in ("INT8, ACR", "BF16")
        for seed in (0, 1)
        for step in (1, 2, 3)
    ]
    figure = plots.curves(pd.DataFrame(rows))
    reward, kl = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["INT8, ACR", "BF16"]
    assert reward.lines[0].get_ydata() == pytest.approx([0.11, 0.21, 0.31])
    band = reward.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.1, 0.32))
    assert kl.get_yscale() == "log"


def test_arms_with_different_numbers_of_seeds_say_so():
    arms = {"INT8, ACR": (0, 1, 2), "BF16": (5,)}
    rows = [
        {"arm": arm, "seed": seed, "step": step, "reward": 0.5, "mismatch/kl_k3": 0.1}
        for arm, seeds in arms.items()
        for seed in seeds
        for step in (1, 2)
    ]
    (legend,) = plots.curves(pd.DataFrame(rows)).legends
    assert [text.get_text() for text in legend.get_texts()] == ["INT8, ACR (3 seeds)", "BF16 (1 seed)"]


def test_windows_average_all_but_the_largest_weight():
    steps = pd.RangeIndex(1, 11, name="step")
    metrics = pd.DataFrame({"reward": range(10), "mismatch/w_max": range(10)}, index=steps)
    table = plots.windowed(metrics, ["reward", "mismatch/w_max", "absent"], windows=3)
    assert table["step"].tolist() == [4, 8, 10]
    assert table["reward"].tolist() == [1.5, 5.5, 8.5]
    assert table["mismatch/w_max"].tolist() == [3, 7, 9]
    assert table["absent"].isna().all()


def test_windows_of_whole_batches_show_no_zigzag():
    """Two steps per batch, of which the first never clips: windows of three would alternate between 1/3 and 2/3."""
    metrics = pd.DataFrame({"clip": [0.0, 1.0] * 6}, index=pd.RangeIndex(1, 13, name="step"))
    table = plots.windowed(metrics, ["clip"], windows=4, multiple=2)
    assert table["step"].tolist() == [4, 8, 12]
    assert table["clip"].tolist() == [0.5] * 3


ARMS = ("BF16", "INT8, naive", "INT8, proximal", "INT8, TIS (FlashRL)", "INT8, ACR (QuRL)")


def run_table(arms=ARMS, seeds=(0, 1, 2), steps=range(1, 9), **columns) -> pd.DataFrame:
    return pd.DataFrame(
        {"arm": arm, "seed": seed, "step": step, "reward": 0.5, "mismatch/kl_k3": 0.1, **columns}
        for arm in arms
        for seed in seeds
        for step in steps
    )


def score_tables(means=(57.71, 28.04, 55.0), before=(26.0, 27.0, 28.5), seeds=3):
    labels = ["BF16", "INT8, naive", "INT8, TIS (FlashRL)"]
    mean = np.array(means)
    table = pd.DataFrame({"label": labels, "mean": mean, "low": mean - 2, "high": mean + 2, "seeds": seeds})
    runs = [
        {"label": label, "before": start, "after": mean}
        for label, mean in zip(labels, means, strict=True)
        for start in before
    ]
    return table.assign(paper=[31.67, 0.001, np.nan]), pd.DataFrame(runs)


def colours_of_lines(ax) -> set[str]:
    return {matplotlib.colors.to_hex(line.get_color()) for line in ax.lines if len(line.get_xdata())}


def test_steps_have_whole_ticks():
    """At a few steps matplotlib's own ticks would be 2.25, 2.5 ..."""
    short = run_table(steps=(1, 2, 3)).assign(experiment="dapo")
    for figure in (plots.curves(short), plots.convergence(short)):
        figure.draw_without_rendering()
        for ax in figure.axes:
            assert ax.get_xticks() == pytest.approx(np.round(ax.get_xticks()))


@pytest.mark.parametrize(
    ("seeds", "note"),
    [
        ((4,), "Line: one seed"),
        ((0, 1), "Line: mean of 2 seeds, band: range over the seeds"),
        ((0, 1, 2), "Line: mean of 3 seeds, band: range over the seeds"),
    ],
)
def test_figures_of_runs_say_what_lines_and_bands_are(seeds, note):
    table = run_table(seeds=seeds).assign(experiment="dapo")
    for figure in (plots.curves(table), plots.convergence(table)):
        assert figure.legends[0].get_title().get_text() == note


def test_convergence_has_a_panel_for_each_arm_over_bf16():
    table = run_table().assign(experiment="dapo")
    table = table[(table["arm"] != "INT8, TIS (FlashRL)") | (table["seed"] > 0)]
    assert [ax.get_title() for ax in plots.convergence(table).axes] == [
        "naive\n3 seeds, BF16: 3",
        "TIS (FlashRL)\n2 seeds, BF16: 3",
        "ACR (QuRL)\n3 seeds, BF16: 3",
    ]
    figure = plots.convergence(pd.concat([table, run_table(ARMS[:2]).assign(experiment="gsm8k")]))
    assert [len(colours_of_lines(ax)) for ax in figure.axes] == [2, 2, 2, 2]
    assert len(set.intersection(*map(colours_of_lines, figure.axes))) == 1


def test_an_arm_has_one_colour_in_all_figures():
    objectives = plots.curves(run_table(ARMS[:4]))
    divergence = plots.curves(run_table(ARMS[:2:-1]))
    first, second = (
        {
            text.get_text(): matplotlib.colors.to_hex(line.get_color())
            for figure_legend in figure.legends
            for text, line in zip(figure_legend.get_texts(), figure_legend.get_lines(), strict=True)
        }
        for figure in (objectives, divergence)
    )
    assert len(set(first.values())) == 4 and len(set(second.values())) == 2
    tis = first["INT8, TIS (FlashRL)"]
    assert second["INT8, TIS (FlashRL)"] == tis
    # As a panel of its own, as a mark of a table, and under another dtype or name.
    panels = plots.convergence(run_table().assign(experiment="dapo")).axes
    assert colours_of_lines(panels[1]) == {first["BF16"], tis}
    marks = plots.scores(*score_tables(), paper_title="").axes[0].containers
    drawn = [matplotlib.colors.to_hex(mark.lines[0].get_color()) for mark in marks[:3]]
    assert drawn == [first["BF16"], first["INT8, naive"], tis]
    names = ["dapo/cpu-fp8-tis", "FP8, TIS (FlashRL)", "BF16, ACR", "cpu-bf16-tis"]
    found = [matplotlib.colors.to_hex(colour) for colour in arm_colours(names).values()]
    assert found == [tis, tis, first["BF16"], first["BF16"]]


def test_arms_of_the_ablation_have_colours_of_their_own():
    kinds = (
        "",
        " + UAQ 1.5",
        " + rates of UAQ 1.5",
        " + UAQ 2",
        " + rates of UAQ 2",
        ", 1.5 × rate",
        ", 2 × rate",
    )
    labels = [f"INT8, ACR (QuRL){kind}" for kind in kinds]
    names = ["acr", "acr-uaq1.5", "acr-uaq1.5rates", "acr-uaq2", "acr-uaq2rates", "acr-lr1.5x", "acr-lr2x"]
    colours = list(arm_colours(labels).values())
    assert len(set(colours)) == 7
    assert list(arm_colours([f"dapo/cpu-int8-4bit-{name}" for name in names]).values()) == colours


def test_colours_of_labels_that_name_no_arm():
    colours = arm_colours(["INT8, ACR", "mine", "yours"])
    assert len(set(colours.values())) == 3


def test_scores_show_the_tables_means_and_the_start():
    table, runs = score_tables()
    figure = plots.scores(table, runs, paper_title="Table 2")
    ours, paper = figure.axes
    start = f"before training: {runs['before'].mean():.1f} %"
    assert [text.get_text() for text in ours.texts] == ["57.7", "28.0", "55.0", start]
    assert [text.xy for text in ours.texts[:3]] == [(57.71, 0), (28.04, 1), (55.0, 2)]
    (line,) = (line for line in ours.lines if line.get_linestyle() == ":")
    assert list(line.get_xdata()) == pytest.approx([runs["before"].mean()] * 2)
    assert [text.get_text() for text in paper.texts] == ["31.67", "0.001", "not in the paper"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "mean, 95 % interval over 3 seeds (Student's t)" in labels


def test_scores_of_different_numbers_of_seeds():
    table, runs = score_tables(seeds=[3, 1, 3])
    table.loc[1, ["low", "high"]] = np.nan
    figure = plots.scores(table, runs, paper_title="")
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["BF16 (3 seeds)", "INT8, naive (1 seed)", "INT8, TIS (FlashRL) (3 seeds)"]
    assert "mean, 95 % interval over the arm's seeds (Student's t)" in [
        text.get_text() for text in figure.legends[0].get_texts()
    ]
    table, runs = score_tables(seeds=1)
    labels = plots.scores(table.assign(low=np.nan, high=np.nan), runs, paper_title="").legends[0].get_texts()
    assert "mean (no interval of one seed)" in [text.get_text() for text in labels]


def test_texts_of_scores_do_not_overlap():
    table, runs = score_tables(means=(57.7, 28.0, 27.2))
    figure = plots.scores(table, runs, paper_title="", title="a title")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    for ax in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in ax.texts]
        assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))


@pytest.fixture
def training_runs(monkeypatch):
    """The module, which is not part of the installed package."""
    monkeypatch.syspath_prepend(project_root())
    return importlib.import_module("benchmarks.training_runs")


def test_committed_training_runs_are_drawn_from_their_tables(training_runs, monkeypatch, tmp_path):
    """Without the runs, which are not in git: under readable names, in rows of the same seeds; the tables stay."""
    committed = project_root() / "data" / "results" / "training_tiny"
    for name in ("result.json", "accuracy.csv", "training.csv"):
        shutil.copy(committed / name, tmp_path)
    monkeypatch.setattr("sys.argv", ["training_runs", "--output", str(tmp_path)])
    training_runs.main()
    for name in ("accuracy.csv", "training.csv"):
        assert (tmp_path / name).read_text() == (committed / name).read_text()
    results = json.loads((committed / "result.json").read_text())["runs"]
    tables = (pd.read_csv(committed / name) for name in ("accuracy.csv", "training.csv"))
    legends = {
        row.get_suptitle(): [text.get_text() for text in row.legends[0].get_texts()]
        for row in training_runs.draw(results, *tables).subfigs
    }
    assert legends == {
        "1,000 steps, seeds 0, 1, 2": ["BF16, ACR", "INT8, ACR"],
        "500 steps, seed 42": ["FP8, ACR", "INT8, decoupled", "INT8, naive", "INT8, proximal", "INT8, TIS"],
    }


def test_runs_alike_in_dtype_and_objective_keep_their_names(training_runs):
    result = {"run": {}, "engine": {"dtype": "int8", "code_bits": 8}}
    stress = {"run": {"objective": "tis"}, "engine": {"dtype": "int8", "code_bits": 4}}
    runs = {"slow-seed0": result, "slow-seed1": result, "fast-seed0": result, "hard-seed0": stress}
    assert training_runs.labels(runs) == {
        "slow": "INT8, ACR (slow)",
        "fast": "INT8, ACR (fast)",
        "hard": "INT8 4-bit codes, TIS",
    }
