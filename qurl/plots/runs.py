"""Training runs over their steps."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from qurl.plots.style import PAPER, arm_colours

_PANELS = {
    "reward": "Reward of the sampled completions",
    "mismatch/kl_k3": "KL(behaviour‖proximal),\nnats per token",
    "mismatch/w_max": "Largest w = π_prox / π_behav",
    "clip_ratio/region_mean": "Tokens at which the clip binds",
    "clip_ratio/high_mean": "Tokens clipped at the upper bound",
    "rollout/codes_changed": "Codes that change from sync to sync",
}
_LOGARITHMIC = {"mismatch/kl_k3", "mismatch/w_max"}
_SHARES = {"clip_ratio/region_mean", "clip_ratio/high_mean", "rollout/codes_changed"}
# Within a window the largest weight is the largest one, and not a mean of largest ones.
_EXTREMES = {"mismatch/w_max"}
_WINDOWS = 40
# Behind a number, so that no line runs through it.
_HALO = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}


def windowed(
    metrics: pd.DataFrame, columns: Sequence[str], windows: int = _WINDOWS, *, multiple: int = 1
) -> pd.DataFrame:
    """Means of a run's metrics over windows of steps; of the largest w, the maximum.

    Parameters
    ----------
    metrics : pandas.DataFrame
        Indexed by "step", one row per logged step.
    columns : sequence of str
        Those that the run has not logged come out as NaN.
    windows : int
        Into how many the steps are split, at most.
    multiple : int
        A window's steps are a multiple of this. With that of the optimizer steps of a batch, what differs between a
        batch's first step, at which nothing is clipped, and its others does not show as a zigzag.

    Returns
    -------
    pandas.DataFrame
        ``step`` (the last one of a window) and ``columns``.
    """
    width = max(1, -(-int(metrics.index.max()) // windows))
    width = -(-width // multiple) * multiple
    last = np.minimum(-(-metrics.index.to_numpy() // width) * width, metrics.index.max())
    known = metrics.reindex(columns=list(columns))
    table = known.groupby(last).agg({name: "max" if name in _EXTREMES else "mean" for name in columns})
    return table.rename_axis("step").reset_index()


def _count(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def _note(seeds: pd.Series) -> str:
    """What lines and bands are, for arms of so many seeds."""
    if seeds.nunique() > 1:
        return "Line: mean over the seeds of an arm, band: range over them"
    count = seeds.iloc[0]
    return "Line: one seed" if count == 1 else f"Line: mean of {count} seeds, band: range over the seeds"


def _draw_arms(ax, table: pd.DataFrame, metric: str) -> None:
    """A line for each arm, the mean over its seeds, with the range over them as a band; no legend."""
    arms = list(dict.fromkeys(table["arm"]))
    sns.lineplot(
        table,
        x="step",
        y=metric,
        hue="arm",
        style="arm",
        hue_order=arms,
        style_order=arms,
        palette=arm_colours(arms),
        errorbar=lambda values: (values.min(), values.max()),
        ax=ax,
    )
    ax.get_xaxis().get_major_locator().set_params(integer=True)


def _legend(parent, handles: list, labels: list[str], note: str, **options) -> None:
    """A legend below all panels, under a line that says what lines and bands are."""
    parent.legend(
        handles,
        labels,
        title=note,
        title_fontsize="medium",
        loc="outside lower center",
        frameon=False,
        handlelength=3,
        **options,
    )


def curves(
    table: pd.DataFrame,
    panels: Sequence[str] = ("reward", "mismatch/kl_k3"),
    *,
    title: str = "",
    references: dict[str, Sequence[tuple[float, str]]] | None = None,
    legend_columns: int = 4,
) -> Figure:
    """Metrics of runs over their optimizer steps, a panel each.

    Lines are means over the seeds of an arm, bands the range over its seeds; line styles tell the arms apart without
    colour. Arms with different numbers of seeds say how many they have.

    Parameters
    ----------
    table : pandas.DataFrame
        One row per arm, seed and window: ``arm``, ``seed``, ``step`` and a column for each of ``panels``, as from
        `windowed`. Optionally ``row``: arms with the same one share a row of panels, of which it is the title.
    panels : sequence of str
        Metrics of `qurl.diagnostics.METRICS` or of TRL.
    title : str
    references : dict, optional
        By panel: values that the paper reports, with their labels, drawn as dashed lines.
    legend_columns : int

    Returns
    -------
    matplotlib.figure.Figure
    """
    rows = dict(iter(table.groupby("row", sort=False))) if "row" in table else {"": table}
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(5.2 * len(panels), 0.6 + 4.6 * len(rows)), layout="constrained")
        parents = figure.subfigures(len(rows), 1, squeeze=False)[:, 0] if len(rows) > 1 else [figure]
        for parent, (name, part) in zip(parents, rows.items(), strict=True):
            parent.suptitle(name, fontsize="medium")
            _draw_panels(parent, part, panels, references or {}, legend_columns)
    if len(rows) == 1:
        title = ": ".join(filter(None, (title, *rows)))
    figure.suptitle(title)
    return figure


def _draw_panels(
    parent, table: pd.DataFrame, panels: Sequence[str], references: dict, legend_columns: int
) -> None:
    """A row of panels with its legend."""
    axes = parent.subplots(1, len(panels), squeeze=False)[0]
    seeds = table.groupby("arm")["seed"].nunique()
    if seeds.nunique() > 1:
        table = table.assign(arm=table["arm"].map(lambda arm: f"{arm} ({_count(seeds[arm])})"))
    for ax, name in zip(axes, panels, strict=True):
        _draw_arms(ax, table, name)
        ax.set(xlabel="Optimizer step", ylabel=_PANELS.get(name, name))
        for value, label in references.get(name, ()):
            ax.axhline(value, color=PAPER, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
            # At the right edge, above the line and within the panel.
            ax.annotate(
                label,
                (1, value),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize="small",
                color=PAPER,
            )
        if name in _LOGARITHMIC:
            ax.set_yscale("log")
        elif not (table[name] < 0).any():
            ax.set_ylim(bottom=0)
        if name in _SHARES:
            ax.yaxis.set_major_formatter(PercentFormatter(1))
    _legend(parent, *axes[0].get_legend_handles_labels(), _note(seeds), ncols=legend_columns)
    for ax in axes:
        ax.get_legend().remove()


def scores(table: pd.DataFrame, seeds: pd.DataFrame, *, paper_title: str, title: str = "") -> Figure:
    """A table of the paper as a figure: held-out accuracy of each arm here, beside what the paper reports.

    Parameters
    ----------
    table : pandas.DataFrame
        From `qurl.experiments.results.scores`: ``label``, ``mean``, ``low``, ``high`` (NaN without interval),
        ``seeds``, ``paper`` (NaN where the paper has no such arm), all but the seeds in %; optionally ``paper_other``,
        another reading of the paper.
    seeds : pandas.DataFrame
        A row per run: ``label``, ``before``, ``after``.
    paper_title : str
        Of the paper's panel: other model, other task, so no common axis.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    rows = np.arange(len(table))
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(13, 2.2 + 0.55 * len(rows)), layout="constrained")
        ours, paper = figure.subplots(1, 2, sharey=True, width_ratios=(1.4, 1))
    _draw_ours(ours, table, seeds)
    paper.scatter(table["paper"], rows, marker="s", s=52, color=PAPER, label="reported", zorder=3)
    if "paper_other" in table:
        label = "another reading of it"
        paper.scatter(
            table["paper_other"],
            rows,
            marker="s",
            s=52,
            facecolors="none",
            edgecolors=PAPER,
            label=label,
        )
    for row, value in zip(rows, table["paper"], strict=True):
        if np.isnan(value):
            paper.annotate(
                "not in the paper",
                (0.5, row),
                xycoords=("axes fraction", "data"),
                ha="center",
                va="center",
                fontsize="small",
                color="0.4",
                bbox=_HALO,
            )
        else:
            _number(paper, value, row, f"{value:.4g}")
    paper.margins(x=0.18)
    paper.set(xlabel="Accuracy (%)", title=f"The paper\n{paper_title}")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title)
    return figure


def _number(ax, value: float, row: int, text: str) -> None:
    """Above its mark; no line runs through it."""
    ax.annotate(
        text,
        (value, row),
        xytext=(0, 7),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize="small",
        bbox=_HALO,
        zorder=4,
    )


def _draw_ours(ax, table: pd.DataFrame, seeds: pd.DataFrame) -> None:
    """Means with intervals, the seeds behind them, and the accuracy before training."""
    rows = dict(zip(table["label"], range(len(table)), strict=True))
    start = seeds["before"].mean()
    ax.axvline(start, color="black", linestyle=":", linewidth=1.6, zorder=1)
    ax.scatter(
        seeds["after"],
        seeds["label"].map(rows),
        s=22,
        facecolors="none",
        edgecolors="0.45",
        label="one seed",
        zorder=2,
    )
    counts = table["seeds"]
    same = counts.nunique() == 1
    over = _count(counts.iloc[0]) if same else "the arm's seeds"
    interval = (
        f", 95 % interval over {over} (Student's t)" if (counts > 1).any() else " (no interval of one seed)"
    )
    colours = arm_colours(table["label"])
    for arm in table.itertuples():
        ax.errorbar(
            arm.mean,
            rows[arm.label],
            xerr=None if np.isnan(arm.low) else [[arm.mean - arm.low], [arm.high - arm.mean]],
            fmt="D",
            markersize=7,
            capsize=4,
            color=colours[arm.label],
            zorder=3,
        )
        _number(ax, arm.mean, rows[arm.label], f"{arm.mean:.1f}")
    # In the legend without colour, which is that of an arm.
    ax.errorbar(
        [np.nan], [0], xerr=[0], fmt="D", markersize=7, capsize=4, color="0.2", label=f"mean{interval}"
    )
    # A row above the first one for the label of the start.
    ax.set_ylim(len(rows) - 0.5, -1.1)
    left = start < np.mean(ax.get_xlim())
    ax.annotate(
        f"before training: {start:.1f} %",
        (start, -0.82),
        xytext=(5 if left else -5, 0),
        textcoords="offset points",
        ha="left" if left else "right",
        va="center",
        fontsize="small",
    )
    ax.set(xlabel="Held-out accuracy after training (%)", title="Here")
    labels = table["label"] if same else table["label"] + counts.map(lambda count: f" ({_count(count)})")
    ax.set_yticks(range(len(rows)), labels)


def run_curves(metrics: pd.DataFrame, *, title: str = "", steps_per_batch: int = 1) -> Figure:
    """`curves` of one run: reward, mismatch and clipping.

    Parameters
    ----------
    metrics : pandas.DataFrame
        Indexed by "step", one row per logged step.
    title : str
    steps_per_batch : int
        Optimizer steps on one batch of rollouts, which a window does not cut.

    Returns
    -------
    matplotlib.figure.Figure
    """
    panels = ("reward", "mismatch/kl_k3", "clip_ratio/region_mean")
    return curves(
        windowed(metrics, panels, multiple=steps_per_batch).assign(arm="this run", seed=0),
        panels,
        title=title,
    )


_EXPERIMENTS = {"dapo": "DAPO", "gsm8k": "GSM8K", "deepscaler": "DeepScaleR"}
# Drawn elsewhere: the first two by fig_objectives, UAQ's control arm by the tables.
_NOT_OF_CONVERGENCE = r"proximal|decoupled|rates of UAQ"


def convergence(table: pd.DataFrame, *, title: str = "") -> Figure:
    """Figs. 5 to 7 of arXiv 2602.13953: reward over the steps, each arm in a panel of its own, over BF16's.

    A row of panels for each experiment and dtype, a column for each of naive, TIS, ACR and ACR with UAQ.

    Parameters
    ----------
    table : pandas.DataFrame
        ``experiment``, ``arm`` (its label: the dtype, a comma, the rest), ``seed``, ``step``, ``reward``.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    table = table[~table["arm"].str.contains(_NOT_OF_CONVERGENCE)]
    seeds = table.groupby(["experiment", "arm"], sort=False)["seed"].nunique()
    # A place for each arm; BF16 alone has one of its own.
    arms = [key for key in seeds.index if key[1] != "BF16"] or list(seeds.index)
    split = {(experiment, arm): (experiment, *arm.partition(", ")[::2]) for experiment, arm in arms}
    rows = list(dict.fromkeys((experiment, dtype) for experiment, dtype, _ in split.values()))
    columns = list(dict.fromkeys(objective for *_, objective in split.values()))
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        size = (1 + 3.4 * max(len(columns), 2), 1.5 + 2.6 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
        figure.supylabel(_PANELS["reward"])
        grey = Line2D([], [], color=arm_colours(["BF16"])["BF16"])
        _legend(figure, [grey], ["BF16, in each panel"], _note(seeds))
    shown = {}
    for (experiment, arm), (_, dtype, objective) in split.items():
        place = rows.index((experiment, dtype)), columns.index(objective)
        ax = shown[place] = axes[place]
        about = table[(table["experiment"] == experiment) & table["arm"].isin(["BF16", arm])]
        _draw_arms(ax, about, "reward")
        ax.get_legend().remove()
        counts = f"\n{_count(seeds[experiment, arm])}, BF16: {seeds.get((experiment, 'BF16'), 0)}"
        ax.set(title=objective + (counts if seeds.nunique() > 1 else ""), xlabel="", ylabel="")
    for (row, column), ax in np.ndenumerate(axes):
        if (row, column) not in shown:
            ax.remove()
            continue
        # An axis has its labels where no panel follows to the left, or below.
        if not any((row, other) in shown for other in range(column)):
            ax.set_ylabel("\n".join((_EXPERIMENTS[rows[row][0]], rows[row][1])), visible=True)
            ax.tick_params(labelleft=True)
        if not any((other, column) in shown for other in range(row + 1, len(rows))):
            ax.set_xlabel("Optimizer step", visible=True)
            ax.tick_params(labelbottom=True)
    if not (table["reward"] < 0).any():
        shown[min(shown)].set_ylim(bottom=0)
    figure.suptitle(title)
    return figure
