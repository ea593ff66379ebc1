"""Run by test_shared_engine.py in each of two processes that share one engine; prints what it found as JSON."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl.models import resolve_model
from qurl.rollout.generation import QuantizedVLLMGeneration


def main(folder: str, output: str) -> None:
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accelerator = Accelerator(cpu=True)
    generation = QuantizedVLLMGeneration(
        model=policy, accelerator=accelerator, processing_class=AutoTokenizer.from_pretrained(resolve_model("tiny")),
        dtype="int8", code_bits=8, eval_dtype="same", bf16_weights=False, check=True, stop_token_ids=[1], seed=0,
        tensor_parallel_size=2, max_model_length=64, max_num_seqs=16, max_completion_length=6, temperature=1.0,
    )  # fmt: skip
    rank = accelerator.process_index
    # Other prompts in each process, and another number of them.
    prompts = [[5 + 10 * rank + index, 6, 7] for index in range(3 + rank)]
    found = []
    for change in (0.0, 0.02, -0.02):
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for parameter in policy.parameters():
                parameter += change * torch.randn(parameter.shape, generator=generator)
        generation.sync_weights()
        generation.begin(training=True, stream=(0, 0))
        _, ids, logps, _ = generation.generate(prompts, None, 1)
        found.append([ids, logps])
    generation.close()
    Path(output, f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
