"""Time and bytes of a weight update of a vLLM server through shared memory: 8-bit codes against BF16.

    python -m benchmarks.server_update                    # smollm2-135m
    python -m benchmarks.server_update --model tiny --repeats 3 --output server_update.json

A server of each format runs at the same time, and updates alternate between them; the policy is FP32, as in training.
Beside them an engine of this process, which is handed tensors instead of a file. Rows are medians, with the ratio to
the server in BF16: of the bytes (codes, scales, and all else in BF16) and of the seconds from the first parameter to
the end of all checks.
"""

import statistics
from contextlib import ExitStack
from functools import partial

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from benchmarks.command import parser, save
from benchmarks.quantize import alternate
from qurl.models import resolve_model
from qurl.rollout import RolloutEngine
from qurl.rollout.served import ServedEngine
from qurl.rollout.server import RolloutServer

DTYPES = ("bf16", "int8", "fp8")


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument("--repeats", type=int, default=7, help="updates of each kind")
    options = command_line.parse_args()

    path = resolve_model(options.model)
    weights = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    reports = {}

    def update(name: str, engine) -> None:
        reports.setdefault(name, []).append(engine.sync(weights.items()))

    with ExitStack() as running:
        passes = {}
        for dtype in DTYPES:
            server = running.enter_context(
                RolloutServer(path, dtype, port=0, max_model_len=256, max_num_seqs=8)
            )
            engine = ServedEngine(
                path, dtype, code_bits=8, accelerator=Accelerator(cpu=not torch.cuda.is_available()), url=server.url,
                max_model_len=256, connect_seconds=30, call_seconds=300, transfer="auto", group_port=51216, seed=0,
            )  # fmt: skip
            passes[f"server, {dtype}"] = partial(update, f"server, {dtype}", engine)
        own = running.enter_context(
            RolloutEngine(path, "int8", max_model_len=256, max_num_seqs=8, load_weights=False)
        )
        passes["in process, int8"] = partial(update, "in process, int8", own)
        seconds = {
            name: statistics.median(values) for name, values in alternate(passes, options.repeats).items()
        }

    rows = []
    base = "server, bf16"
    for name, value in seconds.items():
        parts = reports[name][1:]
        rows.append(
            {
                "update": name,
                "MB": round(parts[0].bytes / 1e6, 1),
                "bytes_to_bf16": round(parts[0].bytes / reports[base][0].bytes, 3),
                "seconds": round(value, 3),
                "seconds_to_bf16": round(value / seconds[base], 2),
                **{
                    f"{part}_seconds": round(
                        statistics.median(getattr(p, f"{part}_seconds") for p in parts), 3
                    )
                    for part in ("quantize", "load", "check")
                },
            }
        )
    print(f"{options.model}\n{'update':18} {'MB':>8} {'to BF16':>8} {'seconds':>8} {'to BF16':>8} "
          f"{'quantize':>9} {'load':>7} {'check':>7}")  # fmt: skip
    for row in rows:
        print(f"{row['update']:18} {row['MB']:8.1f} {row['bytes_to_bf16']:8.2f} {row['seconds']:8.2f} "
              f"{row['seconds_to_bf16']:8.2f} {row['quantize_seconds']:9.2f} {row['load_seconds']:7.2f} "
              f"{row['check_seconds']:7.2f}")  # fmt: skip
    save(rows, options)


if __name__ == "__main__":
    main()
