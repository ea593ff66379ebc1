"""Fig. 8: rollout throughput, measured here and computed for GPUs."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qurl.contention import DISTURBED
from qurl.plots.style import NAMES, PALETTE, PAPER
from qurl.roofline import PAPER_RANGE

_ROOFLINE = PALETTE[2]
# More bars than these are too narrow for numbers that lie.
_UPRIGHT = 12
_PHASE_LABELS = {"decode": "decode only", "whole rollout": "whole rollout (sync + prefill + decode)"}


def speedup(measured: pd.DataFrame, computed: pd.DataFrame, *, title: str = "") -> Figure:
    """Fig. 8 of arXiv 2602.13953: how many times faster 8-bit rollouts are than full-precision ones.

    Left, measured here: decoding alone and the whole rollout (weight sync, prefill and decoding), against
    each full-precision engine; bars and the numbers under them are medians, whiskers the range over the
    repetitions; a measurement that other jobs disturbed says so. Right, for GPUs: the range that the paper
    reports beside the roofline at several batch sizes. Both share one axis; the paper's claim (20 % to 80 %
    faster) is the grey band.

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
    left.set_ylabel(f"Speed-up of {NAMES[dtype]} (times; 1 = no faster)")
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def _draw_measured(axes, measured: pd.DataFrame, dtype: str) -> None:
    shown = measured[measured["phase"].isin(_PHASE_LABELS)]
    settings = list(dict.fromkeys(zip(shown["batch_size"], shown["max_tokens"], strict=True)))
    series = [(baseline, phase) for baseline in dict.fromkeys(shown["baseline"]) for phase in _PHASE_LABELS]
    width = 0.8 / len(series)
    upright = len(settings) * len(series) > _UPRIGHT
    colours = dict(zip(dict.fromkeys(shown["baseline"]), (PALETTE[0], PALETTE[1], PALETTE[4]), strict=False))
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
            label=f"{_PHASE_LABELS[phase]}, against {NAMES[baseline]}",
        )
        for position, value in zip(x, rows["speedup"], strict=True):
            # Under its bar: above it stands the whisker, which would take the number for its own.
            axes.annotate(
                f"{value:.2f}",
                (position, 0),
                (0, -4),
                textcoords="offset points",
                ha="center",
                va="top",
                rotation=90 if upright else 0,
                fontsize="small",
                annotation_clip=False,
            )
    lengths = {length for _, length in settings}
    one = f"; {next(iter(lengths))} new tokens" if len(lengths) == 1 else ""
    axes.set_xticks(range(len(settings)), [f"{b}" if one else f"{b}\n{t} tokens" for b, t in settings])
    axes.tick_params(axis="x", pad=34 if upright else 20)
    axes.set_xlabel(f"Batch size (sequences{one})")
    repetitions = shown["repetitions"].max()
    ranges = f"bars: median of {repetitions} repetitions, whiskers: range"
    marks = ranges if repetitions > 1 else "one repetition"
    waited = shown["waited_share"].max()
    disturbed = f"\ndisturbed by other jobs: waited {waited:.0%} of the time for a core"
    axes.set_title(f"Measured here ({marks})" + (disturbed if waited > DISTURBED else ""))
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
                [position - 0.14] * 2, [low, high], color=PAPER, linewidth=6, solid_capstyle="butt", zorder=3
            )
            axes.plot(position - 0.14, (low + high) / 2, "D", color=PAPER, markersize=7, zorder=4)
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
    axes.set_title(f"{NAMES[dtype]} on GPUs: reported and computed, not measured here")
    handles = [
        Line2D([], [], color=PAPER, marker="D", linewidth=6, markersize=7, label="paper (reported)")
        if reported
        else Line2D([], [], linestyle="", label=f"paper: no {NAMES[dtype]} numbers"),
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
