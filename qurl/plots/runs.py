"""Training runs over their steps."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from qurl.plots.style import PALETTE

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


def _draw_arms(ax, table: pd.DataFrame, metric: str, legend: bool = True) -> None:
    """A line for each arm, the mean over its seeds, with the range over them as a band.

    Arms with different numbers of seeds say how many they have: one seed is no mean and has no band.
    """
    seeds = table.groupby("arm")["seed"].nunique()
    if seeds.nunique() > 1:
        names = {arm: f"{arm} ({count} seed{'s' * (count > 1)})" for arm, count in seeds.items()}
        table = table.assign(arm=table["arm"].map(names))
    arms = list(dict.fromkeys(table["arm"]))
    sns.lineplot(
        table,
        x="step",
        y=metric,
        hue="arm",
        style="arm",
        hue_order=arms,
        style_order=arms,
        palette=sns.color_palette("colorblind", len(arms)),
        errorbar=lambda values: (values.min(), values.max()),
        ax=ax,
        legend="auto" if legend else False,
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
    colour.

    Parameters
    ----------
    table : pandas.DataFrame
        One row per arm, seed and window: ``arm``, ``seed``, ``step`` and a column for each of ``panels``, as from
        `windowed`.
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
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(6.2 * len(panels), 5.4), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, name in zip(axes, panels, strict=True):
        _draw_arms(ax, table, name, legend=ax is axes[0])
        ax.set(xlabel="Optimizer step", ylabel=_PANELS.get(name, name))
        for value, label in (references or {}).get(name, ()):
            ax.axhline(value, color="0.35", linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
            # At the right edge, above the line and within the panel.
            ax.annotate(
                label,
                (1, value),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize="small",
                color="0.25",
            )
        if name in _LOGARITHMIC:
            ax.set_yscale("log")
        elif not (table[name] < 0).any():
            ax.set_ylim(bottom=0)
        if name in _SHARES:
            ax.yaxis.set_major_formatter(PercentFormatter(1))
    if legend := axes[0].get_legend():
        handles, labels = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
        legend.remove()
        if len(labels) > 1:
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


def scores(table: pd.DataFrame, seeds: pd.DataFrame, *, paper_title: str, title: str = "") -> Figure:
    """A table of the paper as a figure: held-out accuracy of each arm here, beside what the paper reports.

    Parameters
    ----------
    table : pandas.DataFrame
        From `qurl.experiments.results.scores`: ``label``, ``mean``, ``low``, ``high`` (NaN without interval), ``paper``
        (NaN where the paper has no such arm), all in %; optionally ``paper_other``, another reading of the paper.
    seeds : pandas.DataFrame
        A row per run: ``label``, ``after``.
    paper_title : str
        Of the paper's panel: other model, other task, so no common axis.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    labels = list(table["label"])
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(13, 1.6 + 0.5 * len(labels)), layout="constrained")
        ours, paper = figure.subplots(1, 2, sharey=True, width_ratios=(1.4, 1))
    rows = np.arange(len(labels))
    ours.scatter(
        seeds["after"],
        seeds["label"].map(dict(zip(labels, rows, strict=True))),
        s=22,
        facecolors="none",
        edgecolors="0.45",
        label="one seed",
        zorder=2,
    )
    errors = np.vstack([table["mean"] - table["low"], table["high"] - table["mean"]])
    ours.errorbar(
        table["mean"],
        rows,
        xerr=np.nan_to_num(errors),
        fmt="D",
        markersize=7,
        capsize=4,
        color=PALETTE[0],
        label="mean, 95 % interval over seeds",
        zorder=3,
    )
    ours.set(xlabel="Held-out accuracy (%)", title="Here")
    ours.set_yticks(rows, labels)
    ours.set_ylim(len(labels) - 0.5, -0.5)
    paper.scatter(table["paper"], rows, marker="s", s=52, color=PALETTE[3], label="reported", zorder=3)
    if "paper_other" in table:
        label = "another reading of it"
        paper.scatter(
            table["paper_other"],
            rows,
            marker="s",
            s=52,
            facecolors="none",
            edgecolors=PALETTE[3],
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
            )
        else:
            paper.annotate(
                f"{value:.4g}",
                (value, row),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize="small",
            )
    paper.margins(x=0.18)
    paper.set(xlabel="Accuracy (%)", title=f"The paper\n{paper_title}")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    return figure


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


_PANEL_TITLES = {"dapo": "DAPO", "gsm8k": "GSM8K", "deepscaler": "DeepScaleR"}


def convergence(table: pd.DataFrame, *, title: str = "") -> Figure:
    """Figs. 5 to 7 of arXiv 2602.13953: reward over the steps, a panel for each experiment and dtype.

    Parameters
    ----------
    table : pandas.DataFrame
        ``experiment``, ``arm`` (its label, which begins with the dtype), ``seed``, ``step``, ``reward``. BF16 is drawn
        in every panel of its experiment.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    dtypes = table["arm"].str.extract(r"^(\w+)")[0]
    panels = [
        (experiment, dtype)
        for experiment, dtype in dict.fromkeys(zip(table["experiment"], dtypes, strict=True))
        if dtype != "BF16" or (dtypes[table["experiment"] == experiment] == "BF16").all()
    ]
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(6.6 * max(len(panels), 1), 7), layout="constrained")
        axes = figure.subplots(1, max(len(panels), 1), sharey=True, squeeze=False)[0]
    for ax, (experiment, dtype) in zip(axes, panels, strict=False):
        shown = table[(table["experiment"] == experiment) & dtypes.isin(["BF16", dtype])]
        _draw_arms(ax, shown, "reward")
        ax.set(
            xlabel="Optimizer step",
            ylabel=_PANELS["reward"],
            title=f"{_PANEL_TITLES[experiment]}, {dtype}",
        )
        # Below the panel: eight curves leave no room within it.
        sns.move_legend(ax, "upper center", bbox_to_anchor=(0.5, -0.14), ncols=1, title=None, frameon=False)
    if not (table["reward"] < 0).any():
        axes[0].set_ylim(bottom=0)
    figure.suptitle(title)
    return figure
