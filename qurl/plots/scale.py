"""How the parts of a rollout batch grow: measured on small models, computed for GPUs."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qurl.plots.style import NAMES, PALETTE

_COLOURS = {"decode": PALETTE[0], "training": PALETTE[1], "sync": PALETTE[2]}
_LABELS = {"decode": "rollouts", "training": "training", "sync": "weight update"}
_AXES = {
    "parameters": "Parameters",
    "length": "Tokens of the longest completion",
    "gpus": "GPUs that train, and as many that sample",
}


def scale_figure(measured: pd.DataFrame, computed: pd.DataFrame, title: str) -> Figure:
    """Seconds of rollouts, training and weight update over model size, completion length and GPUs.

    Parameters
    ----------
    measured : pandas.DataFrame
        Columns ``parameters, length, part, dtype, seconds``; rows by size are those of the shortest length, rows by
        length those of the model that has several.
    computed : pandas.DataFrame
        Columns ``by`` (one of "parameters", "length", "gpus"), ``x, part, dtype, seconds``.
    title : str
        What was measured, and on what.

    Returns
    -------
    matplotlib.figure.Figure
    """
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(13.5, 8.4), layout="constrained")
        axes = figure.subplots(2, 3)
    shortest = measured["length"].min()
    several = measured.groupby("parameters")["length"].nunique()
    by_length = measured[measured["parameters"] == several.idxmax()]
    _draw(axes[0, 0], measured[measured["length"] == shortest], "parameters", "parameters")
    _draw(axes[0, 1], by_length, "length", "length")
    axes[0, 0].set_title(f"Measured: {shortest} tokens")
    axes[0, 1].set_title(f"Measured: {several.idxmax() / 1e6:.0f}M parameters")
    axes[0, 1].set_xlabel("Tokens of a completion")
    for axis, by, setting in zip(
        axes[1], _AXES, ("8 + 8 GPUs", "7B, 8 + 8 GPUs", "7B, up to 8,192 tokens"), strict=True
    ):
        _draw(axis, computed[computed["by"] == by], "x", by)
        axis.set_title(f"Computed: {setting}")
    for row in (axes[0, :2], axes[1]):
        low = min(axis.get_ylim()[0] for axis in row)
        high = max(axis.get_ylim()[1] for axis in row)
        for axis in row:
            axis.set_ylim(low, high)
    axes[0, 0].set_ylabel(f"Seconds\n({title.split(', ')[0]})")
    axes[1, 0].set_ylabel("Seconds\n(8,192 completions)")
    axes[0, 2].set_axis_off()
    handles = [
        Line2D([], [], color=_COLOURS[part], marker="o", label=_LABELS[part], linewidth=2.5)
        for part in _COLOURS
    ]
    handles += [
        Line2D([], [], color="0.3", linestyle="-", label=NAMES["int8"]),
        Line2D([], [], color="0.3", linestyle="--", label="BF16"),
    ]
    axes[0, 2].legend(handles=handles, loc="center", frameon=False, title="Training is the same for both")
    figure.suptitle(
        f"Top: {title}. Bottom: DAPO's rollout batch, a server apart, H100, from data sheets; never run on GPUs",
        fontsize="medium",
    )
    return figure


def _draw(axis, rows: pd.DataFrame, x: str, by: str) -> None:
    for (part, dtype), of_part in rows.groupby(["part", "dtype"]):
        of_part = of_part.sort_values(x)
        axis.plot(
            of_part[x],
            of_part["seconds"],
            color=_COLOURS[part],
            linestyle="--" if dtype == "bf16" and part != "training" else "-",
            marker="o" if dtype == "int8" or part == "training" else "s",
            markersize=6,
            markerfacecolor=_COLOURS[part] if dtype == "int8" or part == "training" else "white",
            linewidth=2.5 if part == "training" else 1.8,
        )
    axis.set_xscale("log", base=10 if by == "parameters" else 2)
    axis.set_yscale("log")
    axis.set_xlabel(_AXES[by])
    ticks = sorted(rows[x].unique())
    if by == "parameters":
        axis.set_xticks(
            ticks, [f"{tick / 1e9:.2g}B" if tick >= 1e9 else f"{tick / 1e6:.0f}M" for tick in ticks]
        )
    else:
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30 if max(ticks) > 5000 else 0)
    axis.minorticks_off()
