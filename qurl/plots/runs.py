"""Training runs over their steps."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

_PANELS = {
    "reward": "Reward of the sampled completions",
    "mismatch/kl_k3": "KL(behaviour‖proximal), nats per token",
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


def windowed(metrics: pd.DataFrame, columns: Sequence[str], windows: int = _WINDOWS) -> pd.DataFrame:
    """Means of a run's metrics over windows of steps; of the largest w, the maximum.

    Parameters
    ----------
    metrics : pandas.DataFrame
        Indexed by "step", one row per logged step.
    columns : sequence of str
        Those that the run has not logged come out as NaN.
    windows : int
        Into how many the steps are split.

    Returns
    -------
    pandas.DataFrame
        ``step`` (the last one of a window) and ``columns``.
    """
    width = max(1, -(-int(metrics.index.max()) // windows))
    last = np.minimum(-(-metrics.index.to_numpy() // width) * width, metrics.index.max())
    known = metrics.reindex(columns=list(columns))
    table = known.groupby(last).agg({name: "max" if name in _EXTREMES else "mean" for name in columns})
    return table.rename_axis("step").reset_index()


def curves(
    table: pd.DataFrame,
    panels: Sequence[str] = ("reward", "mismatch/kl_k3"),
    *,
    title: str = "",
    legend_columns: int = 3,
) -> Figure:
    """Metrics of runs over their optimizer steps, a panel each.

    Lines are means over the seeds of an arm, bands the range over its seeds; line styles tell the arms apart without
    colour.

    Parameters
    ----------
    table : pandas.DataFrame
        One row per arm, seed and window: ``arm``, ``seed``, ``step`` and a column for each of ``panels``, as from
        `windowed`.
    panels : sequence of str
        Metrics of `qurl.diagnostics.METRICS` or of TRL.
    title : str
    legend_columns : int

    Returns
    -------
    matplotlib.figure.Figure
    """
    arms = list(dict.fromkeys(table["arm"]))
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(6.2 * len(panels), 5.4), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, name in zip(axes, panels, strict=True):
        sns.lineplot(
            table,
            x="step",
            y=name,
            hue="arm",
            style="arm",
            hue_order=arms,
            style_order=arms,
            palette=sns.color_palette("colorblind", len(arms)),
            errorbar=lambda values: (values.min(), values.max()),
            ax=ax,
            legend=ax is axes[0],
        )
        ax.set(xlabel="Optimizer step", ylabel=_PANELS.get(name, name))
        if name in _LOGARITHMIC:
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
        if name in _SHARES:
            ax.yaxis.set_major_formatter(PercentFormatter(1))
    if legend := axes[0].get_legend():
        handles, labels = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
        legend.remove()
        if len(arms) > 1:
            figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=legend_columns,
                frameon=False,
                handlelength=3,
            )
    figure.suptitle(title)
    return figure


def run_curves(metrics: pd.DataFrame, *, title: str = "") -> Figure:
    """`curves` of one run: reward, mismatch and clipping.

    Parameters
    ----------
    metrics : pandas.DataFrame
        Indexed by "step", one row per logged step.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    panels = ("reward", "mismatch/kl_k3", "clip_ratio/region_mean")
    return curves(windowed(metrics, panels).assign(arm="this run", seed=0), panels, title=title)
