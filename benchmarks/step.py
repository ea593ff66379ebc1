"""A whole GRPO step (sync, rollout, training) with quantized rollouts, against TRL alone and full-precision rollouts.

    python -m benchmarks.step                                   # smollm2-135m, 32 completions of up to 128 tokens
    python -m benchmarks.step --model tiny --completions 128 --max-tokens 8 --rounds 5

All arms live in one process and take turns; each turn is one generation batch with two optimizer steps in FP32. "trl"
is stock GRPOTrainer, which samples with transformers' generate (it cannot sync into vLLM on a CPU). "int8, reused
logps" takes one optimizer step per batch and its proximal log-probs from the training forward pass; "int8, recomputed"
is the same with the forward pass of its own. Times are medians over rounds, after a turn that warms up; ratios are of
the same round. CPU seconds, over all threads, tell more than seconds where other jobs share the machine.
"""

import statistics
import tempfile
import time
import warnings

import pandas as pd
from transformers import AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.command import parser, save
from qurl.config import QuRLConfig
from qurl.models import resolve_model
from qurl.tasks import load_task
from qurl.trainer import QuRLTrainer

TWO_STEPS = {"gradient_accumulation_steps": 1, "steps_per_generation": 2}
ONE_STEP = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
ARMS = {
    "trl": (GRPOTrainer, GRPOConfig, TWO_STEPS),
    "fp32": (QuRLTrainer, QuRLConfig, TWO_STEPS | {"rollout_dtype": "fp32"}),
    "bf16": (QuRLTrainer, QuRLConfig, TWO_STEPS | {"rollout_dtype": "bf16"}),
    "int8": (QuRLTrainer, QuRLConfig, TWO_STEPS | {"rollout_dtype": "int8"}),
    "int8, recomputed": (QuRLTrainer, QuRLConfig, ONE_STEP | {"proximal_logps": "recompute"}),
    "int8, reused logps": (QuRLTrainer, QuRLConfig, ONE_STEP | {"proximal_logps": "reuse"}),
}


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument(
        "--completions", type=int, default=32, help="per generation batch, a multiple of 16"
    )
    command_line.add_argument("--max-tokens", type=int, default=128, help="longest completion")
    command_line.add_argument("--rounds", type=int, default=2, help="timed generation batches of each arm")
    command_line.add_argument("--arms", default=";".join(ARMS), help="which, separated by semicolons")
    options = command_line.parse_args()

    path = resolve_model(options.model)
    chat = AutoTokenizer.from_pretrained(path).chat_template is not None and options.model != "tiny"
    task = load_task("arithmetic", "train", n=2000, digits=2 if chat else 3, chat=chat)
    trainers = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in options.arms.split(";"):
            trainer_class, config_class, extra = ARMS[arm]
            optimizer_steps = extra["steps_per_generation"] // extra["gradient_accumulation_steps"]
            config = config_class(
                output_dir=folder, max_steps=optimizer_steps, per_device_train_batch_size=options.completions // 2,
                num_generations=8, max_completion_length=options.max_tokens, bf16=False, gradient_checkpointing=False,
                vllm_max_model_length=64 + options.max_tokens, learning_rate=1e-6, report_to="none",
                logging_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True, **extra,
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="objective='acr' equals")
                trainer = trainer_class(
                    str(path), task.reward_functions(), config, train_dataset=task.dataset
                )
            trainer.remove_callback(PrinterCallback)
            trainers[arm] = trainer
        rows = []
        for round_ in range(options.rounds + 1):
            rows += [turn(arm, trainer, round_) for arm, trainer in trainers.items()]
            save(rows, options)  # a round of a large model takes minutes
        for trainer in trainers.values():
            if isinstance(trainer, QuRLTrainer):
                trainer.close()

    table = pd.DataFrame([row for row in rows if row["round"]])
    table = table.astype({"rollout_seconds": float, "sync_seconds": float})  # None of "trl"
    seconds = table.pivot(index="round", columns="arm", values="seconds")
    print(
        f"{options.model}, {options.completions} completions of up to {options.max_tokens} tokens, FP32 training"
    )
    for arm in trainers:
        of_arm = table[table["arm"] == arm].median(numeric_only=True)
        ratios = {other: statistics.median(seconds[other] / seconds[arm]) for other in trainers}
        versus = "  ".join(f"{other}: {ratio:.2f}" for other, ratio in ratios.items() if other != arm)
        print(
            f"{arm:20} {of_arm['seconds']:7.2f} s  CPU {of_arm['cpu_seconds']:7.2f}  "
            f"rollout {of_arm['rollout_seconds']:6.2f}  sync {of_arm['sync_seconds']:5.2f}  "
            f"tokens {of_arm['tokens']:6.0f}  | faster than  {versus}"
        )


def turn(arm: str, trainer, round_: int) -> dict:
    """One generation batch with its optimizer steps; the same prompts in each arm of a round."""
    trainer.args.seed = round_
    start, cpu_start = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    log = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    return {
        "round": round_,
        "arm": arm,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rollout_seconds": log.get("rollout/seconds"),
        "sync_seconds": log.get("rollout/sync_seconds"),
        "tokens": round(log["completions/mean_length"] * trainer.args.generation_batch_size),
    }


if __name__ == "__main__":
    main()
