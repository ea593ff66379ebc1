"""What the paper reports (QuRL, arXiv 2602.13953), by table and arm: accuracies in %."""

TABLES: dict[str, dict[str, float]] = {
    # Table 1: GSM8K, PPO, 0.5B.
    "tab_gsm8k": {
        "bf16": 55.35,
        "int8-naive": 48.78,
        "int8-tis": 51.40,
        "int8-acr": 53.55,
        "fp8-naive": 0.0,
        "fp8-tis": 53.60,
        "fp8-acr": 54.28,
    },
    # Table 2: AIME 2024, DAPO, 7B, Avg@32.
    "tab_dapo": {
        "bf16": 31.67,
        "int8-naive": 0.001,
        "int8-tis": 30.29,
        "int8-acr": 30.63,
        "int8-acr-uaq1.5": 31.25,
        "fp8-tis": 32.60,
        "fp8-acr-uaq1.5": 33.27,
    },
    # Table 3: DeepScaleR, GRPO, Avg@32, mean of five sets. The start model has 48.80.
    "tab_deepscaler": {
        "bf16": 56.40,
        "int8-naive": 52.31,
        "int8-tis": 53.80,
        "int8-acr": 54.79,
        "int8-acr-uaq1.5": 55.48,
    },
    # Table 4: as Table 2.
    "tab_uaq_ablation": {
        "int8-acr-uaq1.5": 31.25,
        "int8-acr": 30.63,
        "int8-acr-uaq2": 29.15,
        "int8-acr-lr1.5x": 29.06,
        "int8-acr-lr2x": 26.66,
    },
}

TABLE_TITLES = {
    "tab_gsm8k": "Table 1: GSM8K, PPO, 0.5B",
    "tab_dapo": "Table 2: AIME 2024, DAPO, 7B, Avg@32",
    "tab_deepscaler": "Table 3: GRPO, 1.5B, five sets, Avg@32",
    "tab_uaq_ablation": "Table 4: AIME 2024, DAPO, 7B, Avg@32",
}

TABLE_4_OTHER_READING: dict[str, float] = {
    "int8-acr": 27.88,
    "int8-acr-uaq2": 29.62,
    "int8-acr-lr1.5x": 26.56,
    "int8-acr-lr2x": 25.81,
}
"""Table 4 can be read in two ways; in this one s = 2 is better than s = 1."""

TABLE_2_AVG1: dict[str, float] = {
    "bf16": 33.33,
    "int8-naive": 0.0,
    "int8-tis": 26.66,
    "int8-acr": 33.33,
    "int8-acr-uaq1.5": 33.33,
    "fp8-acr": 36.66,
}
"""Table 2's single samples (Avg@1)."""

DEEPSCALER_SETS: dict[str, dict[str, float]] = {
    "start model": {
        "aime24": 28.54,
        "amc": 62.58,
        "math500": 82.90,
        "minerva": 26.38,
        "olympiadbench": 43.58,
    },
    "bf16": {"aime24": 40.73, "amc": 73.45, "math500": 87.71, "minerva": 30.56, "olympiadbench": 49.59},
    "int8-naive": {"aime24": 33.95, "amc": 68.75, "math500": 84.90, "minerva": 28.12, "olympiadbench": 45.85},
    "int8-tis": {"aime24": 36.77, "amc": 70.55, "math500": 85.88, "minerva": 28.44, "olympiadbench": 47.33},
    "int8-acr": {"aime24": 39.06, "amc": 70.48, "math500": 86.48, "minerva": 29.20, "olympiadbench": 48.75},
    "int8-acr-uaq1.5": {
        "aime24": 40.52,
        "amc": 71.34,
        "math500": 87.20,
        "minerva": 29.22,
        "olympiadbench": 49.13,
    },
}
"""Table 3 by test set."""

KL_STABLE, KL_COLLAPSE = 0.002, 0.025
"""Fig. 3: KL(behav‖prox) under TIS, early and when training collapses after about 1,000 steps."""

NAIVE_CLIPPED_SHARE = 0.015
"""Fig. 2: the peak of the share of clipped tokens under the naive objective."""
