"""Time of a decode step's projections in W8A8, against BF16 by oneDNN in the same process.

    python -m benchmarks.linear_kernels               # smollm2-135m: 30 layers of 4 projections
    python -m benchmarks.linear_kernels --model tiny --output linear_kernels.json

One pass is what the linears of one decode step cost for M sequences: q, k, v and gate, up fused as in vLLM, every layer
with weights of its own, so that they come from memory as in a model (212 MB in BF16 for SmolLM2). Quantizing the
activations is part of each W8A8 pass. Passes alternate; rows are medians, with the time as a ratio to BF16.
GOP/s counts 2 M N K operations; GB/s counts the weights as they are stored: 1 byte each in W8A8, 2 in BF16, 4 in FP32
and in the FP32 fallback. vLLM's own FP8 (`torch._scaled_mm`) is far slower: after a warm-up one layer is run once,
for M = 64, and its time multiplied by the number of layers.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from benchmarks.quantize import alternate
from qurl.models import resolve_model
from qurl.quantization import FORMATS, quantize
from qurl.rollout.kernels import PackedLinear, unavailable
from qurl.rollout.kernels.vllm_linear import _FP32Linear

Linear = Callable[[torch.Tensor], torch.Tensor]
SCALED_MM_TOKENS = 64


class Kernel(NamedTuple):
    """How a projection becomes a product, and the bytes that the product reads for each weight."""

    make: Callable[[torch.Tensor], Linear]
    weight_bytes: int


def projection_shapes(config) -> dict[str, tuple[int, int]]:
    """(out, in) of each projection of a decoder layer, fused as vLLM runs them."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, key = head * config.num_attention_heads, head * config.num_key_value_heads
    return {
        "qkv": (query + 2 * key, config.hidden_size),
        "o": (config.hidden_size, query),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }


def onednn(dtype: torch.dtype) -> Callable[[torch.Tensor], Linear]:
    def make(weight: torch.Tensor) -> Linear:
        handler = ops.create_onednn_mm(weight.to(dtype).t(), 32)
        return lambda x: ops.onednn_mm(handler, x, None)

    return make


def onednn_int8(weight: torch.Tensor) -> Linear:
    """As vLLM's ``CPUInt8ScaledMMLinearKernel`` calls it."""
    codes, scale = quantize(weight, "int8")
    handler = ops.create_onednn_scaled_mm(codes.t(), scale, torch.bfloat16, True, False, 32)

    def product(x: torch.Tensor, _owned: torch.Tensor = scale) -> torch.Tensor:  # oneDNN points to the scale
        x_codes, x_scale, _ = ops.onednn_scaled_int8_quant(x)
        out = torch.empty((len(x), handler.n), dtype=x.dtype)
        return ops.onednn_scaled_mm(handler, x_codes, out, x_scale, None, None, None)

    return product


def scaled_mm_fp8(weight: torch.Tensor) -> Linear:
    """As vLLM's ``ChannelWiseTorchFP8ScaledMMLinearKernel`` computes it, the first that runs here without qurl."""
    codes, scale = quantize(weight, "fp8")
    quant = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
    one = torch.ones(1)

    def product(x: torch.Tensor) -> torch.Tensor:
        x_codes, x_scale = quant(x)
        sums = torch._scaled_mm(x_codes, codes.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        return (sums * x_scale * scale.t()).to(x.dtype)

    return product


def qurl(dtype: str) -> Callable[[torch.Tensor], Linear]:
    def make(weight: torch.Tensor) -> Linear:
        return PackedLinear(*quantize(weight, dtype))

    return make


def kernels() -> dict[str, Kernel]:
    """Those that this machine can run, BF16 first."""
    table = {
        "bf16 onednn": Kernel(onednn(torch.bfloat16), 2),
        "fp32 onednn": Kernel(onednn(torch.float32), 4),
        "int8 vllm onednn": Kernel(onednn_int8, 1),
    }
    for dtype in FORMATS:
        if reason := unavailable(dtype):
            print(f"{dtype} qurl is left out: {reason}")
        else:
            table[f"{dtype} qurl"] = Kernel(qurl(dtype), 1)
    table["fp8 fp32 fallback"] = Kernel(lambda weight: _FP32Linear(*quantize(weight, "fp8")), 4)
    return table


def decode_step(linears: list[Linear], inputs: list[torch.Tensor]) -> None:
    for product, x in zip(linears, inputs, strict=True):
        product(x)


def scaled_mm_step(layer: list[torch.Tensor], inputs: list[torch.Tensor], layers: int) -> float:
    """Seconds of a step by vLLM's own FP8, from one layer."""
    with set_current_vllm_config(VllmConfig()):
        linears = [scaled_mm_fp8(weight) for weight in layer]
    decode_step(linears, inputs[: len(layer)])  # the first call takes seconds to set itself up
    start = time.perf_counter()
    decode_step(linears, inputs[: len(layer)])
    return layers * (time.perf_counter() - start)


def measure(weights: list[torch.Tensor], layers: int, tokens: list[int], repeats: int) -> list[dict]:
    table = kernels()
    models = {name: [kernel.make(weight) for weight in weights] for name, kernel in table.items()}
    weight_count = sum(weight.numel() for weight in weights)
    rows = []
    for m in tokens:
        generator = torch.Generator().manual_seed(m)
        inputs = [torch.randn(m, weight.shape[1], generator=generator) for weight in weights]
        half = [x.bfloat16() for x in inputs]
        passes = {
            name: lambda linears=linears, x=inputs if name == "fp32 onednn" else half: decode_step(linears, x)
            for name, linears in models.items()
        }
        seconds = alternate(passes, repeats)
        if m == SCALED_MM_TOKENS:
            layer = weights[: len(weights) // layers]
            seconds[f"fp8 vllm, 1 layer x {layers}"] = [scaled_mm_step(layer, half, layers)]
        bf16 = statistics.median(seconds["bf16 onednn"])
        for name, values in seconds.items():
            median = statistics.median(values)
            weight_bytes = table[name].weight_bytes if name in table else 1
            rows.append({
                "tokens": m,
                "kernel": name,
                "ms": round(1e3 * median, 2),
                "ms_min": round(1e3 * min(values), 2),
                "ms_max": round(1e3 * max(values), 2),
                "ratio_to_bf16": round(median / bf16, 3),
                "gop_per_s": round(2e-9 * m * weight_count / median, 1),
                "weight_gb_per_s": round(1e-9 * weight_bytes * weight_count / median, 1),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="a name, folder or hub id that qurl.models resolves"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 8, 64, 512], help="M, sequences of a step"
    )
    parser.add_argument("--repeats", type=int, default=9, help="passes of each kind")
    parser.add_argument("--output", type=Path, help="json file for the rows")
    options = parser.parse_args()
    config = AutoConfig.from_pretrained(resolve_model(options.model))
    shapes = projection_shapes(config)
    generator = torch.Generator().manual_seed(0)
    weights = [
        0.02 * torch.randn(shape, generator=generator)
        for _ in range(config.num_hidden_layers)
        for shape in shapes.values()
    ]
    rows = measure(weights, config.num_hidden_layers, options.tokens, options.repeats)

    print(f"{options.model}: {config.num_hidden_layers} layers of "
          + ", ".join(f"{name} {k}->{n}" for name, (n, k) in shapes.items()))  # fmt: skip
    print(
        f"{'tokens':>6} {'kernel':22} {'ms':>9} {'min':>9} {'max':>9} {'ratio':>7} {'GOP/s':>8} {'GB/s':>7}"
    )
    for row in rows:
        print("{tokens:6} {kernel:22} {ms:9.2f} {ms_min:9.2f} {ms_max:9.2f} {ratio_to_bf16:7.3f} {gop_per_s:8.1f} "
              "{weight_gb_per_s:7.1f}".format(**row))  # fmt: skip
    if options.output:
        result = {
            "model": options.model,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "shapes": shapes,
            "rows": rows,
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
