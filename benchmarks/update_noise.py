"""Time of `update_to_noise`, against copying and against quantizing the same weights in the same process.

    python -m benchmarks.update_noise                 # smollm2-135m: 210 projections
    python -m benchmarks.update_noise --model tiny --output update_noise.json

Both sides are all projections of the model in FP32 (425 MB each for SmolLM2, beyond any cache); the update is 1e-6 in
every weight. Passes alternate; rows are medians with the ratio to one copy of the weights (which is also what
a snapshot into existing memory costs) and to quantizing them once with the same format. The measure quantizes twice.
"""

import statistics

import torch
from transformers import AutoModelForCausalLM

from benchmarks.command import parser, save
from benchmarks.quantize import alternate, copy_into, quantize_each
from qurl.models import resolve_model
from qurl.quantization import FORMATS
from qurl.update_noise import snapshot, update_to_noise


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument("--repeats", type=int, default=7, help="passes of each kind")
    options = command_line.parse_args()

    model = AutoModelForCausalLM.from_pretrained(resolve_model(options.model), dtype=torch.float32)
    before = snapshot(model.named_parameters())
    after = {name: weight + 1e-6 for name, weight in before.items()}
    del model
    weights = list(before.values())
    targets = [torch.zeros_like(weight) for weight in weights]
    passes = {"copy": lambda: copy_into(weights, targets)}
    for dtype in FORMATS:
        passes[f"quantize, {dtype}"] = lambda dtype=dtype: quantize_each(weights, dtype)
        passes[f"update_to_noise, {dtype}"] = lambda dtype=dtype: update_to_noise(before, after, dtype)
    seconds = {name: statistics.median(values) for name, values in alternate(passes, options.repeats).items()}

    label = f"{options.model}, {len(weights)} projections"
    rows = []
    for name, value in seconds.items():
        row = {"weights": label, "pass": name, "ms": round(1e3 * value, 1)}
        row["ratio_to_copy"] = round(value / seconds["copy"], 2)
        if name.startswith("update_to_noise"):
            row["ratio_to_quantize"] = round(value / seconds[name.replace("update_to_noise", "quantize")], 2)
        rows.append(row)

    print(f"{label}\n{'pass':24} {'ms':>9} {'to copy':>9} {'to quantize':>12}")
    for row in rows:
        print(f"{row['pass']:24} {row['ms']:9.1f} {row['ratio_to_copy']:9.2f} "
              f"{row.get('ratio_to_quantize', ''):>12}")  # fmt: skip
    save(rows, options)


if __name__ == "__main__":
    main()
