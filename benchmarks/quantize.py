"""Time of quantizing a model's weights, against copying the same FP32 bytes in the same process.

    python -m benchmarks.quantize                     # smollm2-135m: 210 projections
    python -m benchmarks.quantize --model tiny --output quantize.json

Each pass goes over all projections of the model in FP32 (425 MB for SmolLM2, beyond any cache).
Passes of the copy and of the formats alternate; rows are medians, with the ratio to the copy into memory that
exists, the fastest copy there is; like a clone, quantizing allocates what it returns. Requirement: at most 4 times the
copy for the FP32 weights of a model. The last rows hold one large layer, of the size that a 7B model has.
"""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from benchmarks.command import parser, save
from qurl.models import resolve_model
from qurl.quantization import FORMATS, is_quantized_name, quantized_named_tensors

LARGE_LAYER = (18944, 3584)  # gate_proj of Qwen2.5-7B


def copy_into(weights: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for weight, target in zip(weights, targets, strict=True):
        target.copy_(weight)


def quantize_each(weights: list[torch.Tensor], dtype: str, code_bits: int = 8) -> None:
    """One weight after the other, as a sync does; codes are dropped at once."""
    for _ in quantized_named_tensors((("q_proj.weight", weight) for weight in weights), dtype, code_bits):
        pass


def alternate(passes: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each pass, in turns, after one warm-up."""
    seconds = {name: [] for name in passes}
    for repeat in range(repeats + 1):
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(label: str, weights: list[torch.Tensor], repeats: int) -> list[dict]:
    targets = [torch.zeros_like(weight) for weight in weights]
    passes = {
        "copy": lambda: copy_into(weights, targets),
        "clone": lambda: [weight.clone() for weight in weights],
    }
    passes |= {dtype: lambda dtype=dtype: quantize_each(weights, dtype) for dtype in FORMATS}
    passes["int8, 3 bits"] = lambda: quantize_each(weights, "int8", 3)
    half = [weight.bfloat16() for weight in weights]
    passes |= {f"{dtype} from bf16": lambda dtype=dtype: quantize_each(half, dtype) for dtype in FORMATS}
    seconds = alternate(passes, repeats)
    fp32_bytes = sum(weight.nbytes for weight in weights)
    copy = statistics.median(seconds["copy"])
    return [
        {
            "weights": label,
            "pass": name,
            "ms": round(1e3 * statistics.median(values), 2),
            "ms_min": round(1e3 * min(values), 2),
            "ms_max": round(1e3 * max(values), 2),
            "fp32_gb_per_s": round(fp32_bytes / statistics.median(values) / 1e9, 2),
            "ratio_to_copy": round(statistics.median(values) / copy, 2),
        }
        for name, values in seconds.items()
    ]


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument("--repeats", type=int, default=7, help="passes of each kind")
    options = command_line.parse_args()
    model = AutoModelForCausalLM.from_pretrained(resolve_model(options.model), dtype=torch.float32)
    weights = [parameter.detach() for name, parameter in model.named_parameters() if is_quantized_name(name)]
    rows = measure(f"{options.model}, {len(weights)} projections", weights, options.repeats)
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(LARGE_LAYER, generator=generator)
    rows += measure("one layer {}x{}".format(*LARGE_LAYER), [large], options.repeats)

    print(f"{'weights':34} {'pass':16} {'ms':>9} {'min':>9} {'max':>9} {'FP32 GB/s':>10} {'ratio':>6}")
    for row in rows:
        print("{weights:34} {pass:16} {ms:9.2f} {ms_min:9.2f} {ms_max:9.2f} {fp32_gb_per_s:10.2f} "
              "{ratio_to_copy:6.2f}".format(**row))  # fmt: skip
    save(rows, options)


if __name__ == "__main__":
    main()
