"""Run by test_two_processes.py in each of two processes: one batch with dynamic sampling, and two steps on it."""

import faulthandler
import hashlib
import json
import sys
from pathlib import Path

import torch
from replay import DATA, ReplayedQuRLTrainer
from transformers import AutoTokenizer

from qurl.config import QuRLConfig
from qurl.diagnostics import history
from qurl.models import resolve_model


def digest(model: torch.nn.Module) -> str:
    digests = hashlib.sha256()
    for parameter in model.parameters():
        digests.update(parameter.detach().numpy().tobytes())
    return digests.hexdigest()


def reward(prompts, **_):
    """Differs within the groups of the prompts that add 22 alone: 8 of 32."""
    return [float(i % 2) if "+22=" in prompt else 1.0 for i, prompt in enumerate(prompts)]


def main(policy: str, output: str) -> None:
    # A collective that waits for ever shows where, and ends its process; torch's launcher then ends the other one.
    faulthandler.dump_traceback_later(30, exit=True)
    config = QuRLConfig(
        output_dir=output, max_steps=2, per_device_train_batch_size=8, num_generations=4, num_iterations=2,
        max_completion_length=8, bf16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, dynamic_sampling_max_rounds=8, learning_rate=1e-3,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    trainer = ReplayedQuRLTrainer(policy, reward, config, train_dataset=DATA, processing_class=tokenizer)
    rank = trainer.accelerator.process_index
    trainer.vllm_generation.generator.manual_seed(rank + 1)
    batches = []
    sample = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda rows: (batches.append(sample(rows)), batches[-1])[1]
    before = digest(trainer.model)
    trainer.train()
    (batch,) = batches
    drawn = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in trainer.vllm_generation.prompts]
    result = {
        "processes": trainer.accelerator.num_processes,
        "rewarded": tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=True),
        "drawn": drawn,
        "advantages": batch["advantages"].tolist(),
        "tokens": batch["completion_mask"].sum().item(),
        "num_items_in_batch": batch["num_items_in_batch"].item(),
        "weights": [before, digest(trainer.model)],
        "metrics": json.loads(history(trainer).iloc[0].dropna().to_json()),
    }
    Path(output, f"rank{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
