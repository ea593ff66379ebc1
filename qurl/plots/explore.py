"""Figures of the notebooks 10 to 30: errors of codes, where the gradient lives, what a UAQ step does."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator, PercentFormatter

from qurl.plots.style import PALETTE

_OBJECTIVES = {
    "naive": "naive (Eq. 3)",
    "proximal": "proximal (Eq. 1)",
    "decoupled": "decoupled (Eq. 4)",
    "tis": "TIS (Eq. 5)",
    "acr": "ACR (Eq. 9)",
}
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
# Where the paper's KL(behav‖prox) starts, and where its TIS run collapses (Fig. 3).
_PAPER_KL = {"paper, start": 0.002, "paper, TIS collapses": 0.025}
_CLIPPED = "0.55"
_FORMATS = {"BF16": "0.45", "INT8": PALETTE[0], "FP8": PALETTE[1]}


def _figure(width: float, height: float, *grid: int, **options):
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(*grid, **options)


def weight_errors(errors: pd.DataFrame) -> Figure:
    """Error of each projection over the layers, one panel per format, each with an axis of its own.

    Parameters
    ----------
    errors : pandas.DataFrame
        From `qurl.exploration.codes.weight_errors`.

    Returns
    -------
    matplotlib.figure.Figure
    """
    formats = list(dict.fromkeys(errors["format"]))
    figure, panels = _figure(4.4 * len(formats) + 1.6, 4.2, 1, len(formats), squeeze=False)
    for axes, name in zip(panels[0], formats, strict=True):
        rows = errors[errors["format"] == name]
        sns.lineplot(
            rows,
            x="layer",
            y="error",
            hue="projection",
            style="projection",
            markers=True,
            markersize=5,
            palette="colorblind",
            legend=axes is panels[0][-1],
            ax=axes,
        )
        # Axes of their own, from zero: the errors of INT8 and of 3 bits differ by 40 times.
        axes.set(title=f"{name}: median {rows['error'].median():.2%}", xlabel="Decoder layer", ylabel="")
        axes.set_ylim(0, rows["error"].max() * 1.15)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    panels[0][0].set_ylabel("Relative error ‖W − Ŵ‖ / ‖W‖")
    sns.move_legend(panels[0][-1], "center left", bbox_to_anchor=(1, 0.5), title=None, frameon=False)
    return figure


def code_levels(errors: pd.DataFrame) -> Figure:
    """Error over the bits that INT8 codes use, with FP8 beside it.

    Parameters
    ----------
    errors : pandas.DataFrame
        From `qurl.exploration.codes.weight_errors`, INT8 at several ``code_bits``, and FP8.

    Returns
    -------
    matplotlib.figure.Figure
        Points are medians over all projections, bars their range.
    """
    figure, axes = _figure(7, 4.2)
    floating = errors["format"] == "FP8"
    by_bits = errors[~floating].groupby("code_bits")["error"].agg(["min", "median", "max"])
    axes.errorbar(
        by_bits.index,
        by_bits["median"],
        [by_bits["median"] - by_bits["min"], by_bits["max"] - by_bits["median"]],
        color=PALETTE[0],
        marker="o",
        capsize=3,
        label="INT8 codes limited to ±(2^(bits−1) − 1)",
    )
    axes.axhline(errors[floating]["error"].median(), color=PALETTE[1], linestyle="--", label="FP8 (E4M3)")
    axes.set(xlabel="Bits used (code_bits)", ylabel="Relative error ‖W − Ŵ‖ / ‖W‖", yscale="log")
    axes.set_xticks(list(by_bits.index))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.legend(frameon=True)
    return figure


def activation_errors(errors: pd.DataFrame) -> Figure:
    """Error of what the projections read: by projection, and over how far the largest feature stands out.

    Parameters
    ----------
    errors : pandas.DataFrame
        From `qurl.exploration.codes.activation_errors`.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, (left, right) = _figure(13, 4.4, 1, 2, sharey=True, width_ratios=(1.2, 1))
    style = {"hue": "format", "palette": _FORMATS}
    # q, k and v read the same vector, and so do gate and up.
    readers = {
        "q_proj": "q, k, v",
        "o_proj": "o",
        "gate_proj": "gate, up",
        "down_proj": "down",
    }
    shown = errors[errors["projection"].isin(readers)].assign(read_by=errors["projection"].map(readers))
    sns.boxplot(shown, x="read_by", y="error", order=readers.values(), ax=left, fliersize=3, **style)
    left.set(xlabel="Read by the projection", ylabel="Relative error ‖x − x̂‖ / ‖x‖ per token", yscale="log")
    left.legend(title=None)
    sns.scatterplot(shown, x="peak", y="error", style="format", ax=right, legend=True, **style)
    peaks = np.geomspace(shown["peak"].min(), shown["peak"].max())
    right.plot(
        peaks,
        peaks / 127 / np.sqrt(12),
        color="0.25",
        linewidth=1,
        label="INT8, computed: peak / (127 √12)",
    )
    right.set(xlabel="Peak of a token: max |x| / root mean square", xscale="log")
    right.xaxis.set_minor_locator(NullLocator())
    right.set_xticks(_round_ticks(shown["peak"].min(), shown["peak"].max()))
    right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.legend(title=None, loc="upper left")
    left.set_yticks(_round_ticks(shown["error"].min() / 1.5, shown["error"].max() * 1.5))
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    return figure


def _round_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 … within the range."""
    ticks = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def mismatch(tokens: pd.DataFrame, kl: pd.DataFrame) -> Figure:
    """Mismatch between sampler and trained policy, per setting of the engine.

    Parameters
    ----------
    tokens : pandas.DataFrame
        From `qurl.exploration.codes.engine_mismatch`, one setting or several.
    kl : pandas.DataFrame
        Indexed by ``format``: ``kl`` and its ``standard_error``, nats per token.

    Returns
    -------
    matplotlib.figure.Figure
        Left the share of tokens whose |log w| exceeds a value, right KL(behav‖prox) beside the paper's.
    """
    figure, (left, right) = _figure(13, 4.6, 1, 2, width_ratios=(1.15, 1))
    dashes = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
    for index, name in enumerate(kl.index):
        sizes = np.sort(tokens.loc[tokens["format"] == name, "log_w"].abs())
        share = 1 - np.arange(len(sizes)) / len(sizes)
        colour = _FORMATS.get(name) or PALETTE[2 + index % (len(PALETTE) - 2)]
        style = {"color": colour, "linestyle": dashes[index % len(dashes)]}
        left.step(sizes, share, where="post", label=name, **style)
        right.errorbar(
            kl.loc[name, "kl"],
            index,
            xerr=[
                [min(kl.loc[name, "standard_error"], 0.9 * kl.loc[name, "kl"])],
                [kl.loc[name, "standard_error"]],
            ],
            color=style["color"],
            marker="o",
            capsize=4,
        )
    left.set(
        xscale="log",
        yscale="log",
        xlabel="x (nats)",
        ylabel="Share of tokens with |log w| ≥ x",
        title="w = π_prox / π_behav, per token",
    )
    left.set_xlim(left=1e-4)
    left.axvline(np.log(2), color="black", linewidth=0.8, label="upright line: w = 2 or ½")
    left.legend(loc="lower left", frameon=True)
    for (label, value), linestyle in zip(_PAPER_KL.items(), (":", "--"), strict=True):
        right.axvline(value, color="0.25", linestyle=linestyle, label=f"{label}: {value:g}")
    right.set_yticks(range(len(kl)), kl.index)
    right.set_ylim(len(kl) - 0.4, -0.6)
    right.set(xscale="log", xlabel="KL(behav‖prox), k3, nats per token (± standard error)", title="KL")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)
    return figure


def objectives(curves: pd.DataFrame, *, w: float, advantage: float, cap: float) -> Figure:
    """The five objectives over R: the surrogate above, its gradient below.

    Where a curve is thick and coloured the token has a gradient; where it is thin, dashed and shaded the clip has
    taken it.

    Parameters
    ----------
    curves : pandas.DataFrame
        From `qurl.exploration.gradients.objective_curves`.
    w, advantage, cap : float
        What the curves were computed for, for the title.

    Returns
    -------
    matplotlib.figure.Figure
    """
    names = list(dict.fromkeys(curves["objective"]))
    figure, (top, bottom) = _figure(14, 5.6, 2, len(names), sharex=True, sharey="row")
    for index, name in enumerate(names):
        rows = curves[curves["objective"] == name]
        ratio, live = rows["ratio"].to_numpy(), rows["gradient"].to_numpy() != 0
        for axes, column in ((top[index], "value"), (bottom[index], "gradient")):
            values = rows[column].to_numpy()
            axes.plot(ratio, np.where(live, values, np.nan), color=PALETTE[0], linewidth=3)
            axes.plot(ratio, np.where(live, np.nan, values), color=_CLIPPED, linewidth=1.4, linestyle="--")
            axes.fill_between(
                ratio, 0, 1, where=~live, transform=axes.get_xaxis_transform(), color="0.5", alpha=0.15, lw=0
            )
            axes.axvline(1, color="0.25", linewidth=0.8)
            axes.axhline(0, color="0.25", linewidth=0.8)
            axes.set_xlim(0, ratio.max())
        top[index].set_title(_OBJECTIVES[name])
        bottom[index].set_xlabel("R = π_θ / π_prox")
    top[0].set_ylabel("Objective")
    bottom[0].set_ylabel("Gradient by log π_θ")
    handles = [
        Line2D([], [], color=PALETTE[0], linewidth=3, label="has a gradient"),
        Line2D([], [], color=_CLIPPED, linestyle="--", label="clipped: gradient 0"),
        Patch(color="0.5", alpha=0.15, label="range of R without gradient"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        f"w = {w:.3g},  A = {advantage:+.3g},  C = {cap:.3g},  r = min(1, C/w) = {min(1, cap / w):.3g}"
    )
    return figure


def gradient_map(grid: pd.DataFrame, *, cap: float, eps_high: float) -> Figure:
    """Which tokens have a gradient under TIS and ACR, over w and R; a panel for each sign of the advantage.

    Parameters
    ----------
    grid : pandas.DataFrame
        From `qurl.exploration.gradients.gradient_map`: ``advantage``, ``w``, ``ratio``, ``tis``, ``acr``.
    cap, eps_high : float
        For the lines at w = C and at R = (1+ε_high)/r.

    Returns
    -------
    matplotlib.figure.Figure
    """
    advantages = list(dict.fromkeys(grid["advantage"]))
    figure, panels = _figure(12.5, 4.8, 1, len(advantages), sharey=True, squeeze=False)
    figure.get_layout_engine().set(wspace=0.05)
    colours = ("0.88", "#a9d3ee", PALETTE[1], PALETTE[4])
    labels = ("no gradient", "gradient: TIS and ACR", "gradient: ACR only", "gradient: TIS only")
    present = set()
    for axes, advantage in zip(panels[0], advantages, strict=True):
        rows = grid[grid["advantage"] == advantage]
        kind = np.select([rows["tis"] & rows["acr"], rows["acr"], rows["tis"]], [1, 2, 3], default=0)
        table = rows.assign(kind=kind).pivot(index="ratio", columns="w", values="kind")
        present |= set(kind)
        axes.pcolormesh(
            table.columns,
            table.index,
            table.to_numpy(),
            cmap=ListedColormap(colours),
            vmin=-0.5,
            vmax=3.5,
            rasterized=True,
        )
        w = table.columns.to_numpy()
        if advantage > 0:
            bound = (1 + eps_high) * np.maximum(1, w / cap)
            axes.plot(w, bound, color="0.15", linewidth=1.5)
        axes.axvline(cap, color="0.15", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.25, 0.5, 1, 2, 4, 8, 16])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(table.index.min(), table.index.max())
        axes.set(title=f"A = {advantage:+g}".replace("-", "−"), xlabel="w = π_prox / π_behav")
        axes.grid(visible=False)
    panels[0][0].set_ylabel("R = π_θ / π_prox")
    handles = [
        Patch(facecolor=colours[kind], edgecolor="0.5", label=labels[kind]) for kind in sorted(present)
    ]
    handles += [
        Line2D([], [], color="0.15", linestyle="--", linewidth=1, label=f"w = C = {cap:g}"),
        Line2D([], [], color="0.15", linewidth=1.5, label="R = (1 + ε_high) / r"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def step_gains(gains: pd.DataFrame, learning_rates: Mapping[str, float]) -> Figure:
    """What a step is with UAQ, in terms of the unscaled policy, beside its control arm.

    Parameters
    ----------
    gains : pandas.DataFrame
        From `qurl.exploration.uaq_step.step_gains`.
    learning_rates : mapping
        By optimizer.

    Returns
    -------
    matplotlib.figure.Figure
        Left per optimizer the gain of the linears behind norms and of the norms, with the powers of s that the algebra
        gives; right the share of codes that the step changed.
    """
    optimizers = list(dict.fromkeys(gains["optimizer"]))
    count = len(optimizers)
    figure, panels = _figure(4.6 * (count + 1), 5, 1, count + 1)
    groups = {"linears behind norms": (PALETTE[0], 1), "norms in front of them": (PALETTE[1], -1)}
    scales = np.array(sorted(gains["scale"].unique()))
    fine = np.geomspace(scales.min(), scales.max())
    markers = {"uaq": "o", "control": "x"}
    for axes, optimizer in zip(panels, optimizers, strict=False):
        power = 2 if optimizer == "sgd" else 1
        for group, (colour, sign) in groups.items():
            exponent = sign * power
            axes.plot(fine, fine**exponent, color=colour, linewidth=1.2, alpha=0.7)
            label = {1: "s", -1: "1/s", 2: "s²", -2: "1/s²"}[exponent]
            axes.annotate(
                label,
                (fine[-1], fine[-1] ** exponent),
                (8, -4),
                textcoords="offset points",
                color=colour,
            )
            for arm, marker in markers.items():
                rows = gains[
                    (gains["optimizer"] == optimizer) & (gains["group"] == group) & (gains["arm"] == arm)
                ]
                axes.plot(
                    rows["scale"],
                    rows["gain"],
                    marker,
                    color=colour,
                    markersize=11 if arm == "uaq" else 6,
                    markerfacecolor="none",
                    markeredgewidth=1.6,
                )
        axes.axhline(1, color="0.25", linewidth=0.8)
        axes.set(title=_OPTIMIZERS[optimizer], xscale="log", yscale="log")
        axes.set_xlabel("UAQ scale s")
        axes.set_xticks(scales)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in (1 / 16, 1 / 9, 1 / 4, 1 / 2, 1, 2, 4, 9, 16) if low < tick < high])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axes.margins(x=0.15)
    panels[0].set_ylabel("Size of the step, times that without UAQ")
    handles = [Line2D([], [], color=colour, label=group) for group, (colour, _) in groups.items()]
    handles += [
        Line2D(
            [], [], color="0.25", marker="o", markersize=10, markerfacecolor="none", linestyle="", label="UAQ"
        ),
        Line2D([], [], color="0.25", marker="x", linestyle="", label="control: learning rates alone"),
    ]
    _draw_codes_changed(panels[-1], gains, optimizers, learning_rates)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _draw_codes_changed(axes, gains: pd.DataFrame, optimizers: list[str], learning_rates: Mapping) -> None:
    shown = gains.drop_duplicates(["optimizer", "arm", "scale"])
    styles = {
        "uaq": {"marker": "o", "linestyle": "-", "markersize": 10, "markerfacecolor": "none"},
        "control": {"marker": "x", "linestyle": ""},
        "higher rate": {"marker": "^", "linestyle": ":"},
    }
    for index, optimizer in enumerate(optimizers):
        for arm, style in styles.items():
            rows = shown[(shown["optimizer"] == optimizer) & (shown["arm"] == arm)]
            axes.plot(rows["scale"], rows["codes_changed"], color=PALETTE[2 + 2 * index], **style)
    scales = sorted(shown["scale"].unique())
    axes.set_xticks(scales, [f"{scale:g}" for scale in scales])
    axes.set(title="Codes that the step changed", xlabel="UAQ scale s", ylabel="Share of all codes")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set_ylim(bottom=0)
    handles = [
        Line2D(
            [],
            [],
            color=PALETTE[2 + 2 * index],
            linewidth=3,
            label=f"{_OPTIMIZERS[optimizer]}, α = {learning_rates[optimizer]:g}",
        )
        for index, optimizer in enumerate(optimizers)
    ]
    handles.append(
        Line2D([], [], color="0.25", marker="^", linestyle=":", label="rate × s everywhere (Table 4)")
    )
    axes.legend(handles=handles, fontsize="small", loc="upper left")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.35)
