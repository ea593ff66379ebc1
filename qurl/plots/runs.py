"""Training runs over their steps."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure


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
