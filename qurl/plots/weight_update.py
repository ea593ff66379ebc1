"""Weight updates against quantization error, and what UAQ makes of them."""

from collections.abc import Sequence

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from qurl.plots.style import NAMES, PALETTE

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _BROWN = (PALETTE[index] for index in (0, 1, 2, 3, 4, 5))
_PAPER_SCALE = 1.5
_DTYPE_COLOURS = {"int8": _BLUE, "fp8": _ORANGE}
_DTYPE_MARKERS = {"int8": "o", "fp8": "s"}


def weight_update(
    layers: pd.DataFrame,
    gradients: pd.DataFrame,
    gains: pd.DataFrame,
    *,
    learning_rate: float,
    steps: int,
    paper_update: Sequence[float] = (1e-7, 1e-6),
    title: str = "",
) -> Figure:
    """Sizes of weights, errors and updates by depth; gains over s; update over error by projection; codes changed.

    Parameters
    ----------
    layers, gradients : pandas.DataFrame
        Of `qurl.experiments.weight_update.Updates`.
    gains : pandas.DataFrame
        Of `qurl.experiments.weight_update.gains`.
    learning_rate : float
        α of AdamW.
    steps : int
        Optimizer steps on the batch.
    paper_update : sequence of two floats
        The paper's range of updates.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(15, 11), layout="constrained")
        panels = figure.subplots(2, 2)
    _draw_sizes(panels[0, 0], layers, gradients, learning_rate, steps, paper_update)
    _draw_gains(panels[0, 1], gains, steps)
    _draw_ratios(panels[1, 0], layers, steps)
    _draw_codes(panels[1, 1], layers, steps)
    figure.suptitle(title)
    return figure


def _draw_sizes(axes, layers, gradients, learning_rate, steps, paper_update) -> None:
    plain = layers[(layers["s"] == 1) & (layers["optimizer"] == "adamw")]
    batch = plain[plain["window"] == "whole batch"]
    first = plain[(plain["window"] == "first step") & (plain["dtype"] == "int8")]
    depth = batch.drop_duplicates("layer").set_index("layer")["depth"]
    sgd = gradients[gradients["s"] == 1]
    sgd = sgd.assign(depth=sgd["layer"].map(depth), size=sgd["gradient_rms"] * learning_rate)
    int8, fp8 = (batch[batch["dtype"] == dtype] for dtype in ("int8", "fp8"))
    axes.axhspan(*paper_update, color="0.5", alpha=0.15, zorder=0, label="update, paper: 1e-7 to 1e-6")
    for rows, column, colour, marker, label in (
        (int8, "weight_rms", "0.25", "D", "weight"),
        (fp8, "error_rms", _ORANGE, "s", "FP8 error"),
        (int8, "error_rms", _BLUE, "o", "INT8 error"),
        (int8, "update_rms", _PURPLE, "v", f"AdamW update, {steps} steps"),
        (first, "update_rms", _GREEN, "^", "AdamW update, first step"),
        (sgd, "size", _BROWN, "P", f"SGD step α·G at α = {learning_rate:.0e}"),
    ):
        axes.plot(rows["depth"], rows[column], marker, color=colour, markersize=4, alpha=0.35, linewidth=0)
        median = rows.groupby("depth")[column].median()
        axes.plot(median.index, median, color=colour, linewidth=1.8, marker=marker, markersize=5, label=label)
    axes.set_yscale("log")
    axes.set(
        xlabel="Decoder layer",
        ylabel="Root mean square per matrix",
        title="Without UAQ: every matrix (marks), median of a layer (lines)",
    )
    axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _draw_ranges(axes, x, table: pd.DataFrame, **style) -> None:
    """A mark at the first column of ``table``, with a capped bar from its second to its third."""
    middle, low, high = (table[column] for column in table)
    yerr = [middle - low, high - middle]
    axes.errorbar(x, middle, yerr, linestyle="", markersize=7, capsize=3, elinewidth=1, zorder=3, **style)


def _draw_gains(axes, gains: pd.DataFrame, steps: int) -> None:
    series = (
        ("sgd", "q/k/v, gate/up", _RED, "o", "SGD: q/k/v, gate/up (line: s²)", -0.012),
        ("adamw", "q/k/v, gate/up", _BLUE, "s", "AdamW: q/k/v, gate/up (line: s)", 0.0),
        ("adamw", "o, down", "0.4", "D", "AdamW: o, down (line: 1)", 0.012),
        ("adamw", "norms in front", _GREEN, "^", "AdamW: norms in front (line: 1/s)", 0.0),
        ("sgd", "norms in front", _ORANGE, "v", "SGD: norms in front (line: 1/s²)", -0.012),
    )
    scales = sorted(gains["s"].unique())
    for optimizer, weights, colour, marker, label, shift in series:
        rows = gains[(gains["optimizer"] == optimizer) & (gains["weights"] == weights)]
        line = rows.drop_duplicates("s").sort_values("s")
        axes.plot(line["s"], line["predicted"], color=colour, linewidth=1.2, zorder=1)
        for window, face, offset in (("first step", colour, 0.0), ("whole batch", "white", 0.02)):
            part = rows[rows["window"] == window]
            _draw_ranges(
                axes,
                part["s"] + shift + offset,
                part[["gain", "low", "high"]],
                marker=marker,
                color=colour,
                markerfacecolor=face,
                label=label if window == "first step" else None,
            )
    axes.set_yscale("log", base=2)
    ticks = (0.25, 0.5, 1, 1.5, 2, 3, 4)
    low, high = axes.get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(shown))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(scales, [f"{s:g}" for s in scales])
    axes.set(
        xlabel="UAQ scale s",
        ylabel="Step in the function, s against 1",
        title=f"Gain: first step (filled), {steps} steps (open); bars: all layers",
    )
    axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _draw_ratios(axes, layers: pd.DataFrame, steps: int) -> None:
    rows = layers[(layers["optimizer"] == "adamw") & (layers["window"] == "whole batch")]
    projections = list(dict.fromkeys(rows["projection"]))
    scales = set(rows["s"])
    compared = (1.0, _PAPER_SCALE if _PAPER_SCALE in scales else max(scales))
    series = [(dtype, s) for dtype in ("int8", "fp8") for s in compared]
    for index, (dtype, s) in enumerate(series):
        part = rows[(rows["dtype"] == dtype) & (rows["s"] == s)]
        _draw_ranges(
            axes,
            [x + 0.18 * (index - 1.5) for x in range(len(projections))],
            part.groupby("projection")["update_to_error"].agg(["median", "min", "max"]).loc[projections],
            marker=_DTYPE_MARKERS[dtype],
            color=_DTYPE_COLOURS[dtype],
            markerfacecolor=_DTYPE_COLOURS[dtype] if s == 1 else "white",
            label=f"{NAMES[dtype]}, s = {s:g}",
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(projections)), [name.removesuffix("_proj") for name in projections])
    axes.xaxis.grid(False)
    axes.set(
        xlabel="Projection (bars: smallest and largest of all decoder layers)",
        ylabel="‖update‖ / ‖quantization error‖",
        title=f"AdamW, {steps} steps: update over error",
    )
    axes.legend(fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def _draw_codes(axes, layers: pd.DataFrame, steps: int) -> None:
    rows = layers[(layers["optimizer"] == "adamw") & (layers["window"] == "whole batch")]
    rows = rows.assign(changed=rows["codes_changed"] * rows["codes"])
    scales = sorted(rows["s"].unique())
    for (dtype, weights), part in rows.groupby(["dtype", "weights"], sort=False):
        sums = part.groupby("s")[["changed", "codes"]].sum()
        scaled = weights == "q/k/v, gate/up"
        axes.plot(
            sums.index,
            sums["changed"] / sums["codes"],
            marker=_DTYPE_MARKERS[dtype],
            color=_DTYPE_COLOURS[dtype],
            linestyle="-" if scaled else "--",
            markerfacecolor=_DTYPE_COLOURS[dtype] if scaled else "white",
            markersize=7,
            label=f"{NAMES[dtype]}: {weights}",
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.set_xticks(scales, [f"{s:g}" for s in scales])
    axes.set(
        xlabel="UAQ scale s",
        ylabel="Codes changed",
        title=f"AdamW, {steps} steps: codes that differ at the next sync",
    )
    axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
