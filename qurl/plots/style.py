"""Colours and names that all figures share: a mark means the same wherever it is drawn."""

import seaborn as sns

PALETTE = sns.color_palette("colorblind")
NAMES = {
    "vllm-bf16": "BF16, vLLM as it comes",
    "bf16": "BF16, qurl's engine",
    "fp32": "FP32",
    "int8": "INT8",
    "fp8": "FP8",
}
