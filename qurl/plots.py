"""One function per figure: data frame in, matplotlib figure out.

Figures are built without pyplot's global state, so that a notebook shows each once and a script needs no
display. Colours are seaborn's colour-blind palette; what a mark means never rests on its colour alone.
"""

import math

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from qurl.roofline import PAPER_RANGE

_W_BINS = 61
_PALETTE = sns.color_palette("colorblind")
_PAPER, _ROOFLINE = _PALETTE[3], _PALETTE[2]
# Of a bar's number with its distance to the bar, as a share of the axis.
_LABEL_HEIGHT = 0.07
_PHASE_LABELS = {"decode": "decode only", "whole rollout": "whole rollout (sync + prefill + decode)"}
_NAMES = {
    "vllm-bf16": "BF16, vLLM as it comes",
    "bf16": "BF16, qurl's engine",
    "fp32": "FP32",
    "int8": "INT8",
    "fp8": "FP8",
}


def speedup(measured: pd.DataFrame, computed: pd.DataFrame, *, title: str = "") -> Figure:
    """Fig. 8 of arXiv 2602.13953: how many times faster 8-bit rollouts are than full-precision ones.

    Left, measured here: decoding alone and the whole rollout (weight sync, prefill and decoding), against
    each full-precision engine; bars are medians, whiskers the range over the repetitions. Right, for GPUs:
    the range that the paper reports beside the roofline at several batch sizes. Both share one axis; the
    paper's claim (20 % to 80 % faster) is the grey band.

    Parameters
    ----------
    measured : pandas.DataFrame
        From ``qurl.benchmark.speedups``, one quantized dtype.
    computed : pandas.DataFrame
        From ``qurl.roofline.paper_cases``; rows of that dtype are drawn, where the batch fits into the
        memory.
    title : str
        Model, hardware and kernel of the measurement.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        If ``measured`` does not hold exactly one quantized dtype.
    """
    dtypes = list(measured["dtype"].unique())
    if len(dtypes) != 1:
        raise ValueError(f"measured holds the dtypes {dtypes}: pass the rows of exactly one quantized dtype.")
    dtype = dtypes[0]
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(13, 5.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.15))
    shown = measured["phase"].isin(_PHASE_LABELS)
    top = max(
        measured["high"][shown].max(), computed["speedup"].max(), computed["paper_high"].max(), PAPER_RANGE[1]
    )
    # Room above the marks for the legends, which would otherwise lie on them.
    left.set_ylim(0, top * 1.45)
    _draw_measured(left, measured, dtype)
    _draw_computed(right, computed[(computed["dtype"] == dtype) & computed["fits"]], dtype)
    for axes in (left, right):
        axes.axhspan(*PAPER_RANGE, color="0.5", alpha=0.15, zorder=0, linewidth=0)
        axes.axhline(1, color="0.25", linewidth=1, zorder=1)
        axes.grid(axis="x", visible=False)
    left.set_ylabel(f"Speed-up of {_NAMES[dtype]} (times; 1 = no faster)")
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def _draw_measured(axes, measured: pd.DataFrame, dtype: str) -> None:
    shown = measured[measured["phase"].isin(_PHASE_LABELS)]
    settings = list(dict.fromkeys(zip(shown["batch_size"], shown["max_tokens"], strict=True)))
    series = [(baseline, phase) for baseline in dict.fromkeys(shown["baseline"]) for phase in _PHASE_LABELS]
    width = 0.8 / len(series)
    colours = dict(
        zip(dict.fromkeys(shown["baseline"]), (_PALETTE[0], _PALETTE[1], _PALETTE[4]), strict=False)
    )
    for index, (baseline, phase) in enumerate(series):
        rows = shown[(shown["baseline"] == baseline) & (shown["phase"] == phase)]
        rows = rows.set_index(["batch_size", "max_tokens"]).loc[settings]
        x = [position + (index - (len(series) - 1) / 2) * width for position in range(len(settings))]
        # One repetition has no range, and a whisker of length zero would look like one.
        has_range = (rows["high"] > rows["low"]).any()
        spread = [rows["speedup"] - rows["low"], rows["high"] - rows["speedup"]] if has_range else None
        whole = phase == "whole rollout"
        axes.bar(
            x,
            rows["speedup"],
            width * 0.9,
            yerr=spread,
            capsize=3,
            facecolor=colours[baseline] if whole else "white",
            edgecolor=colours[baseline],
            hatch=None if whole else "////",
            error_kw={"elinewidth": 1.2, "ecolor": "0.15"},
            zorder=2,
            label=f"{_PHASE_LABELS[phase]}, against {_NAMES[baseline]}",
        )
        for position, value, high in zip(x, rows["speedup"], rows["high"], strict=True):
            # A number that would lie across the line at 1 stands above it.
            lies_on_line = 1 - _LABEL_HEIGHT * axes.get_ylim()[1] < high < 1
            axes.annotate(
                f"{value:.2f}",
                (position, 1 if lies_on_line else high),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize="small",
            )
    lengths = {length for _, length in settings}
    one = f"; {next(iter(lengths))} new tokens" if len(lengths) == 1 else ""
    axes.set_xticks(range(len(settings)), [f"{b}" if one else f"{b}\n{t} tokens" for b, t in settings])
    axes.set_xlabel(f"Batch size (sequences{one})")
    axes.set_title("Measured here")
    axes.legend(loc="upper left", fontsize="small", framealpha=1, edgecolor="none")


def _draw_computed(axes, computed: pd.DataFrame, dtype: str) -> None:
    cases = list(dict.fromkeys(computed["case"]))
    batch_sizes = sorted(computed["batch_size"].unique())
    markers = dict(zip(batch_sizes, ("^", "s", "v", "o", "P", "X"), strict=False))
    reported = False
    for position, case in enumerate(cases):
        rows = computed[computed["case"] == case]
        axes.plot(
            [position + 0.14] * len(rows),
            rows["speedup"],
            color=_ROOFLINE,
            linestyle=":",
            linewidth=1.2,
            zorder=2,
        )
        for batch_size, value in zip(rows["batch_size"], rows["speedup"], strict=True):
            axes.plot(
                position + 0.14,
                value,
                markers[batch_size],
                markerfacecolor="white",
                markeredgecolor=_ROOFLINE,
                markersize=7,
                zorder=3,
            )
        low, high = rows["paper_low"].iloc[0], rows["paper_high"].iloc[0]
        if pd.notna(low):
            reported = True
            axes.plot(
                [position - 0.14] * 2, [low, high], color=_PAPER, linewidth=6, solid_capstyle="butt", zorder=3
            )
            axes.plot(position - 0.14, (low + high) / 2, "D", color=_PAPER, markersize=7, zorder=4)
    # "32B, 2x H100-SXM" becomes two short lines; memory size and socket stand in the GPUs' table.
    short = [
        case.replace(", ", "\n").replace("2x ", "2×").replace("-SXM", "").replace("-80G", "")
        for case in cases
    ]
    axes.set_xticks(range(len(cases)), short, fontsize="small")
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_xlabel(
        f"Model, GPU (roofline: context of {computed['context'].iloc[0]} tokens)",
    )
    axes.set_title(f"{_NAMES[dtype]} on GPUs: reported and computed, not measured here")
    handles = [
        Line2D([], [], color=_PAPER, marker="D", linewidth=6, markersize=7, label="paper (reported)")
        if reported
        else Line2D([], [], linestyle="", label=f"paper: no {_NAMES[dtype]} numbers"),
        *(
            Line2D(
                [],
                [],
                color=_ROOFLINE,
                marker=marker,
                linestyle=":",
                markerfacecolor="white",
                label=f"roofline (computed), batch {batch_size}",
            )
            for batch_size, marker in markers.items()
        ),
        Patch(color="0.5", alpha=0.15, label="paper's claim: 20–80 % faster"),
    ]
    axes.legend(handles=handles, loc="upper left", ncols=2, fontsize="small", framealpha=1, edgecolor="none")


def quantization(weight, quantized, dtype: str) -> Figure:
    """Codes of one weight and the errors they leave.

    Parameters
    ----------
    weight : torch.Tensor, shape (out, in)
        In full precision.
    quantized : qurl.quantization.QuantizedTensor
        Its codes, shape (out, in), and scales, shape (out, 1).
    dtype : {"int8", "fp8"}

    Returns
    -------
    matplotlib.figure.Figure
        Left the histogram of the codes, right error over scale against the scaled weight, for at most 4,000
        elements.
    """
    codes = quantized.codes.float()
    scaled = weight.float() / quantized.scale
    step = max(1, codes.numel() // 4000)
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(11, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
    # INT8: 5 codes to a bin. FP8: bins a little wider than the widest gap between its codes, which is 32. So no bin is
    # empty by construction; and all edges are half-integers of which none is a code, so that both signs are alike.
    bins = [-127.5 + 5 * i for i in range(52)] if dtype == "int8" else [-478.5 + 33 * i for i in range(30)]
    sns.histplot(x=codes.flatten()[::step].numpy(), bins=bins, color=_PALETTE[0], stat="percent", ax=left)
    left.set(xlabel=f"{_NAMES[dtype]} code", ylabel="Elements (%)", title="Codes")
    right.scatter(
        scaled.flatten()[::step].numpy(),
        (codes - scaled).flatten()[::step].numpy(),
        s=4,
        color=_PALETTE[0],
        linewidth=0,
        alpha=0.6,
    )
    right.set(xlabel="Weight / scale", ylabel="(Dequantized − weight) / scale", title="Rounding error")
    return figure


def logprobs(tokens: pd.DataFrame, dtype: str) -> Figure:
    """Log-probs of sampled tokens under the engine that sampled them and under full precision.

    Parameters
    ----------
    tokens : pandas.DataFrame
        Columns ``behaviour`` and ``proximal``, in nats, one row per token.
    dtype : {"int8", "fp8"}
        Of the behaviour policy.

    Returns
    -------
    matplotlib.figure.Figure
        Left one against the other with the diagonal, right the histogram of w = exp(proximal − behaviour).
    """
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
    left.scatter(tokens["behaviour"], tokens["proximal"], s=10, color=_PALETTE[0], linewidth=0, alpha=0.5)
    left.axline((0, 0), slope=1, color="0.25", linewidth=1)
    left.set(
        xlabel=f"log π_behav, {_NAMES[dtype]} (nats)",
        ylabel="log π_prox, BF16 (nats)",
        title="Sampled tokens",
    )
    w = (tokens["proximal"] - tokens["behaviour"]).map(math.exp)
    # An odd number of bins, as many on each side of w = 1, which is the centre of the middle one.
    widest = max(abs(math.log(w.min())), abs(math.log(w.max())), 0.01)
    edges = [math.exp(widest * (2 * i / _W_BINS - 1)) for i in range(_W_BINS + 1)]
    # Rounding must not leave the extremes outside.
    edges[0], edges[-1] = min(edges[0], w.min()), max(edges[-1], w.max())
    right.hist(w, bins=edges, color=_PALETTE[0])
    right.set_xscale("log")
    right.axvline(1, color="0.25", linewidth=1)
    # Ticks at the centre and the ends: the range is often so narrow that it holds no other round number than 1.
    right.set_xticks([math.exp(widest * part) for part in (-1, -0.5, 0, 0.5, 1)])
    right.xaxis.set_minor_locator(NullLocator())
    right.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    right.set(xlabel="w = π_prox / π_behav", ylabel="Tokens", title="Mismatch per token")
    return figure


def training(curves: pd.DataFrame, *, title: str = "") -> Figure:
    """Reward and mismatch over the optimizer steps of several runs.

    Lines are means over the seeds of a run's name, bands the range over its seeds.

    Parameters
    ----------
    curves : pandas.DataFrame
        One row per run, seed and step: ``run``, ``seed``, ``step``, ``reward`` (sampled, 0 to 1) and ``kl``
        (KL(behav‖prox), k3, nats per token), already smoothed.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(13, 5), layout="constrained")
        panels = figure.subplots(1, 2)
    for axes, column, label in (
        (panels[0], "reward", "reward of the sampled completions"),
        (panels[1], "kl", "KL(behaviour‖proximal), nats per token"),
    ):
        sns.lineplot(
            curves,
            x="step",
            y=column,
            hue="run",
            style="run",
            palette="colorblind",
            errorbar=lambda values: (values.min(), values.max()),
            ax=axes,
            legend=axes is panels[0],
        )
        axes.set(xlabel="optimizer step", ylabel=label)
    panels[0].set_ylim(bottom=0)
    panels[1].set_yscale("log")
    sns.move_legend(panels[0], "lower right", title=None)
    figure.suptitle(title)
    return figure
