"""A quantized weight, and the tokens that a quantized policy sampled."""

import math

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from qurl.plots.style import NAMES, PALETTE

_W_BINS = 61


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
    sns.histplot(x=codes.flatten()[::step].numpy(), bins=bins, color=PALETTE[0], stat="percent", ax=left)
    left.set(xlabel=f"{NAMES[dtype]} code", ylabel="Elements (%)", title="Codes")
    right.scatter(
        scaled.flatten()[::step].numpy(),
        (codes - scaled).flatten()[::step].numpy(),
        s=4,
        color=PALETTE[0],
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
    left.scatter(tokens["behaviour"], tokens["proximal"], s=10, color=PALETTE[0], linewidth=0, alpha=0.5)
    left.axline((0, 0), slope=1, color="0.25", linewidth=1)
    left.set(
        xlabel=f"log π_behav, {NAMES[dtype]} (nats)",
        ylabel="log π_prox, BF16 (nats)",
        title="Sampled tokens",
    )
    w = (tokens["proximal"] - tokens["behaviour"]).map(math.exp)
    # An odd number of bins, as many on each side of w = 1, which is the centre of the middle one.
    widest = max(abs(math.log(w.min())), abs(math.log(w.max())), 0.01)
    edges = [math.exp(widest * (2 * i / _W_BINS - 1)) for i in range(_W_BINS + 1)]
    # Rounding must not leave the extremes outside.
    edges[0], edges[-1] = min(edges[0], w.min()), max(edges[-1], w.max())
    right.hist(w, bins=edges, color=PALETTE[0])
    right.set_xscale("log")
    right.axvline(1, color="0.25", linewidth=1)
    # Ticks at the centre and the ends: the range is often so narrow that it holds no other round number than 1.
    right.set_xticks([math.exp(widest * part) for part in (-1, -0.5, 0, 0.5, 1)])
    right.xaxis.set_minor_locator(NullLocator())
    right.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    right.set(xlabel="w = π_prox / π_behav", ylabel="Tokens", title="Mismatch per token")
    return figure
