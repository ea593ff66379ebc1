"""Run by test_distributed.py in each of two processes: `qurl train`, noting what an engine holds after each sync.

With ``--run_name fails`` the engine of process 1 fails at the second batch.
"""

import faulthandler
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from qurl.quantization import quantized_named_tensors
from qurl.rollout import RolloutEngine, RolloutError
from qurl.training import main


def digest(tensors: list[torch.Tensor]) -> str:
    digests = hashlib.sha256()
    for tensor in tensors:
        digests.update(tensor.float().numpy().tobytes())
    return digests.hexdigest()


def observe(syncs: list[dict]) -> None:
    sync = RolloutEngine.sync

    def observed(engine, named_params, **options):
        given = [(name, tensor.clone()) for name, tensor in named_params]
        report = sync(engine, iter(given), **options)
        note = {"dtype": engine.dtype}
        if engine.quantized:
            wanted = dict(quantized_named_tensors(given, engine.dtype, engine.code_bits))
            names = [name for name in wanted if name + "_scale" in wanted]
            held = [tensor for name in names for tensor in engine.codes_and_scale(name)]
            note["policy"] = digest([wanted[name + end] for name in names for end in ("", "_scale")])
            note |= {"projections": len(names), "engine": digest(held)}
        syncs.append(note)
        return report

    RolloutEngine.sync = observed


def fail_at_second_batch() -> None:
    generate, calls = RolloutEngine.generate, []

    def failing(engine, prompt_ids, *args, **options):
        calls.extend([1] * (len(prompt_ids) > 1))  # the check after a sync decodes one token
        if len(calls) == 2 and PartialState().process_index == 1:
            raise RolloutError("the engine of process 1 is gone.")
        return generate(engine, prompt_ids, *args, **options)

    RolloutEngine.generate = failing


if __name__ == "__main__":
    # A collective that waits for ever shows where, and ends its process; torch's launcher then ends the other one.
    faulthandler.dump_traceback_later(200, exit=True)
    made: list[dict] = []
    observe(made)
    if "fails" in sys.argv:
        fail_at_second_batch()
    folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
    status = main(sys.argv[1:])
    (folder.parent / f"rank{os.environ['RANK']}.json").write_text(json.dumps(made))
    sys.exit(status)
