"""The paper's experiments as data: what each sets, for every preset, and where each value comes from.

A recipe is a dictionary of the fields of `qurl.training.RunArguments` and `qurl.config.QuRLConfig`. What makes an
experiment (loss, clip range, KL, gradient clipping, temperature) is the same in every preset; model, task, lengths,
batch and the optimizer's schedule differ. A step is an optimizer step; the papers mostly count rollout batches.

``paper``
    What one would launch on GPUs.
``cpu``
    The embedded model and task, minutes a run on two cores.
``smoke``
    The same in a few steps, for tests; its numbers say nothing.
"""

from typing import Any, NamedTuple

PRESETS = ("smoke", "cpu", "paper")


class Choice(NamedTuple):
    """A value and its source."""

    value: Any
    source: str


QURL = "QuRL (arXiv 2602.13953)"
DAPO = "DAPO (arXiv 2503.14476)"
DEEPSCALER = "DeepScaleR's published training script, 8K stage"
VERL = "verl's GSM8K example"
FLASHRL = "FlashRL, which QuRL compares with"
OURS = "our choice"
GRPO_FOR_PPO = "our choice: Table 1 trains PPO with a critic; GRPO takes its place"
DAPO_7B = "verl's DAPO script for Qwen2.5-Math-7B"
EMBEDDED = "our choice, for the embedded model"

_COMMON = {
    "vllm_importance_sampling_clip_max": Choice(2.0, FLASHRL),
    "lr_scheduler_type": Choice("constant", OURS),
    "max_grad_norm": Choice(1.0, "verl's scripts; it acts in every step of the embedded model (docs/log.md)"),
    "logging_steps": Choice(1, OURS),
    "save_total_limit": Choice(1, OURS),
    "report_to": Choice("none", OURS),
}
_GRPO = {
    "loss_type": Choice("grpo", f"{QURL}: GRPO"),
    "epsilon": Choice(0.2, f"{OURS}: the usual clip range"),
    "beta": Choice(1e-3, f"{QURL}: KL to the start model, k3, 1e-3"),
    "use_bias_correction_kl": Choice(False, f"{QURL}: plain k3"),
}
ALGORITHMS: dict[str, dict[str, Choice]] = {
    "gsm8k": _COMMON
    | _GRPO
    | {
        "loss_type": Choice("grpo", GRPO_FOR_PPO),
        "temperature": Choice(1.0, VERL),
        "eval_temperature": Choice(1.0, f"{OURS}: that of training"),
    },
    "dapo": _COMMON
    | {
        "loss_type": Choice("dapo", f"{DAPO}: token mean"),
        "epsilon": Choice(0.2, DAPO),
        "epsilon_high": Choice(0.28, DAPO),
        "beta": Choice(0.0, f"{DAPO}: no KL term"),
        "temperature": Choice(1.0, DAPO),
        "eval_temperature": Choice(1.0, f"{DAPO_7B}, without its top_p of 0.7"),
    },
    "deepscaler": _COMMON
    | _GRPO
    | {
        "temperature": Choice(0.6, DEEPSCALER),
        "eval_temperature": Choice(0.6, DEEPSCALER),
    },
}
"""What each experiment is, whatever its size."""

_EIGHT_GPUS = {
    "bf16": Choice(True, OURS),
    "gradient_checkpointing": Choice(True, OURS),
    "vllm_gpu_memory_utilization": Choice(0.3, f"{OURS}: the rest is for training on the same GPU"),
    "save_steps": Choice(20, OURS),
    "eval_k": Choice(32, f"{QURL}: Avg@32"),
}
_TINY = {
    "model": Choice("tiny", EMBEDDED),
    "task": Choice("arithmetic", EMBEDDED),
    "num_generations": Choice(8, f"{DEEPSCALER}; DAPO takes 16"),
    "steps_per_generation": Choice(
        2, f"{EMBEDDED}: two optimizer steps per batch, without which nothing clips"
    ),
    "gradient_accumulation_steps": Choice(1, EMBEDDED),
    "max_completion_length": Choice(8, EMBEDDED),
    "vllm_max_model_length": Choice(32, EMBEDDED),
    "learning_rate": Choice(3e-5, f"{EMBEDDED}: of 3e-5 and 1e-4 the one that learns (docs/log.md)"),
    "bf16": Choice(False, "our choice: FP32 is faster on a CPU"),
    "gradient_checkpointing": Choice(False, EMBEDDED),
    "eval_k": Choice(1, f"{EMBEDDED}: Avg@1 of 1,000 held-out sums"),
}
_CPU = _TINY | {
    "per_device_train_batch_size": Choice(64, f"{EMBEDDED}: 16 prompts of 8 completions to a batch"),
    "max_steps": Choice(1000, EMBEDDED),
    "save_steps": Choice(250, EMBEDDED),
}
_SMOKE = _TINY | {
    "per_device_train_batch_size": Choice(16, EMBEDDED),
    "max_steps": Choice(4, EMBEDDED),
    "save_steps": Choice(4, EMBEDDED),
    "eval_options": Choice({"n": 50}, EMBEDDED),
}
# DAPO's buffer is a fifth of its longest completion.
_DAPO_EMBEDDED = {
    "overlong_buffer": Choice(2, f"{DAPO}: about a fifth of the longest completion"),
    "dynamic_sampling_max_rounds": Choice(1, f"{DAPO}, limited to one round of further prompts"),
}
SIZES: dict[str, dict[str, dict[str, Choice]]] = {
    "smoke": {"gsm8k": _SMOKE, "dapo": _SMOKE | _DAPO_EMBEDDED, "deepscaler": _SMOKE},
    "cpu": {"gsm8k": _CPU, "dapo": _CPU | _DAPO_EMBEDDED, "deepscaler": _CPU},
    "paper": {
        "gsm8k": _EIGHT_GPUS
        | {
            "model": Choice("Qwen/Qwen2.5-0.5B-Instruct", f"{QURL}: 0.5B; which one: {VERL}"),
            "task": Choice("gsm8k", f"{QURL}, Table 1"),
            "learning_rate": Choice(1e-5, f"{QURL}, Table 1"),
            "num_generations": Choice(8, GRPO_FOR_PPO),
            "per_device_train_batch_size": Choice(16, OURS),
            "gradient_accumulation_steps": Choice(4, f"{VERL}: mini-batches of 64 prompts on 8 GPUs"),
            "steps_per_generation": Choice(16, f"{VERL}: 256 prompts to a batch, so four optimizer steps"),
            "max_completion_length": Choice(512, f"{VERL}, twice its 256 tokens"),
            "vllm_max_model_length": Choice(1024, f"{VERL}: prompts of up to 512 tokens"),
            "max_steps": Choice(1_740, f"{VERL}: 15 epochs of 29 batches, each of four optimizer steps"),
            "eval_k": Choice(1, f"{QURL}, Table 1"),
        },
        "dapo": _EIGHT_GPUS
        | {
            "model": Choice(
                "models/Qwen2.5-Math-7B-32k",
                f"{QURL}: 7B; which one: {DAPO_7B}, which raises its limit of 4,096 positions to 32,768",
            ),
            "task": Choice("dapo", f"{QURL}, Table 2"),
            "eval_tasks": Choice(["aime24"], f"{QURL}, Table 2"),
            "learning_rate": Choice(1e-6, f"{QURL}, Table 2"),
            "lr_scheduler_type": Choice("constant_with_warmup", DAPO),
            "warmup_steps": Choice(160, f"{DAPO_7B}: 10 rollout batches of 16 optimizer steps"),
            "weight_decay": Choice(0.1, DAPO),
            "num_generations": Choice(16, DAPO),
            "per_device_train_batch_size": Choice(1, OURS),
            "gradient_accumulation_steps": Choice(64, f"{DAPO}: mini-batches of 512 completions on 8 GPUs"),
            "steps_per_generation": Choice(1024, f"{DAPO}: 512 prompts to a batch, so 16 optimizer steps"),
            "max_completion_length": Choice(8_192, f"{DAPO_7B}; DAPO's 32B model has 20,480"),
            "overlong_buffer": Choice(4_096, DAPO),
            "dynamic_sampling_max_rounds": Choice(9, f"{DAPO}: up to ten generation batches"),
            "vllm_max_model_length": Choice(10_240, f"{DAPO_7B}: prompts of up to 2,048 tokens"),
            "max_steps": Choice(3_200, f"{DAPO_7B}: 200 rollout batches"),
        },
        "deepscaler": _EIGHT_GPUS
        | {
            "model": Choice(
                "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", f"{DEEPSCALER}; Table 3 starts where it does"
            ),
            "task": Choice("deepscaler", f"{QURL}, Table 3"),
            "eval_tasks": Choice(
                ["aime24", "amc", "math500", "minerva", "olympiadbench"], f"{QURL}, Table 3"
            ),
            "learning_rate": Choice(1e-6, DEEPSCALER),
            "num_generations": Choice(8, DEEPSCALER),
            "per_device_train_batch_size": Choice(2, OURS),
            "gradient_accumulation_steps": Choice(32, f"{DEEPSCALER}: mini-batches of 64 prompts on 8 GPUs"),
            "steps_per_generation": Choice(
                64, f"{DEEPSCALER}: 128 prompts to a batch, so two optimizer steps"
            ),
            "max_completion_length": Choice(8_192, DEEPSCALER),
            "vllm_max_model_length": Choice(9_216, f"{DEEPSCALER}: prompts of up to 1,024 tokens"),
            "eval_max_tokens": Choice(
                32_768, f"{OURS}: Table 3's start model is as good as others measure it at this length"
            ),
            "max_steps": Choice(2_000, f"{OURS}: 1,000 rollout batches"),
        },
    },
}
"""Model, task, lengths, batch, steps and evaluation, by preset and experiment."""

EXPERIMENTS = tuple(ALGORITHMS)
GPUS = 8
"""On which the preset ``paper`` is counted; its batches are of all of them together."""

STRESS_BITS = 4
"""Code bits of the stress setting, in which the embedded model's mismatch is of the size that the paper reports."""


def recipe(experiment: str, preset: str) -> dict[str, Choice]:
    """All that an experiment sets, with sources.

    Parameters
    ----------
    experiment : {"gsm8k", "dapo", "deepscaler"}
    preset : {"smoke", "cpu", "paper"}
    """
    return ALGORITHMS[experiment] | SIZES[preset][experiment]


def recipe_table(experiment: str, preset: str) -> "pandas.DataFrame":  # noqa: F821 (imported on use)
    """`recipe` as a table: ``setting`` (the index), ``value``, ``source``."""
    import pandas

    table = pandas.DataFrame.from_dict(
        recipe(experiment, preset), orient="index", columns=["value", "source"]
    )
    return table.rename_axis("setting")
