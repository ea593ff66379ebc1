"""Colours and names that all figures share: a mark means the same wherever it is drawn."""

import itertools
import re
from collections.abc import Sequence

import seaborn as sns

PALETTE = sns.color_palette("colorblind")
NAMES = {
    "vllm-bf16": "BF16, vLLM as it comes",
    "bf16": "BF16, qurl's engine",
    "fp32": "FP32",
    "int8": "INT8",
    "fp8": "FP8",
}
PAPER = PALETTE[3]
# By what a label or a run's name says of its arm, the first match. Arms beside ACR are darker where they are its
# controls, and lighter for a scale or rate of 2: lightness tells them apart without colour.
_ARMS = {
    r"\bbf16\b": "0.35",
    r"rates of uaq 2\b|uaq2rates\b": sns.set_hls_values(PALETTE[5], l=0.4),
    r"rates\b": sns.set_hls_values(PALETTE[5], l=0.25),
    r"uaq ?2\b": sns.set_hls_values(PALETTE[5], l=0.72),
    r"uaq": PALETTE[5],
    r"\b2 × rate|\blr2x": sns.set_hls_values(PALETTE[0], l=0.7),
    r"× rate|\blr[\d.]+x": sns.set_hls_values(PALETTE[0], l=0.15),
    r"\bnaive\b": PALETTE[1],
    r"\bproximal\b": PALETTE[9],
    r"\bdecoupled\b": PALETTE[4],
    r"\btis\b": PALETTE[2],
    r"\bacr\b": PALETTE[0],
}


def arm_colours(labels: Sequence[str]) -> dict:
    """A colour for each arm, in every figure the same; what is left of the palette for labels that name no arm."""
    known = {
        label: next((colour for words, colour in _ARMS.items() if re.search(words, label.lower())), None)
        for label in labels
    }
    left = itertools.cycle([colour for colour in PALETTE if colour not in [*known.values(), PAPER]])
    return {label: colour or next(left) for label, colour in known.items()}
