"""Symmetric 8-bit weights with one scale per output channel, and the checkpoint they are kept in.

A weight ``W`` of shape (out, in) becomes codes of the same shape and an FP32 scale of shape (out, 1):

    scale = max(absmax(row) / levels, smallest normal FP32)     codes = saturate(round(row / scale))

with ``levels`` = 127 for INT8 and 448, the largest finite E4M3 value, for FP8; rounding is half to even, and FP8
saturates before the cast, because casts above 448 give NaN in some stacks. Everything is computed in FP32 with true
division (a multiplication by 1/scale rounds twice and moves ties), so the codes do not depend on the device.
The bound that follows for INT8 is ``|W - codes * scale| <= scale / 2``.

The floor at the smallest *normal* number (1.2e-38) gives all-zero rows a positive scale, and keeps the bound for
rows so small that absmax / levels would be subnormal, which engines flush to zero. No trained row comes near it: rows
of 1e-6 keep all 8 bits.

Differences from compressed-tensors, whose checkpoint format this is: its own helpers divide by 127.5 and floor scales
at the eps of the weight's dtype, which loses rows of 1e-6. Only the format is taken from there.

Quantized are the projections of the decoder layers (``PROJECTIONS``). Embeddings, norms, biases and ``lm_head`` stay in
full precision. The reference, the saved checkpoint and the tensors that a live engine receives all come out of
one function. It works on blocks of rows that stay in the processor's cache, and costs two to four copies of the FP32
weight (``python -m benchmarks.quantize``).

Source: QuRL (arXiv 2602.13953): W8A8 rollouts, per output channel for weights, per token for activations.
"""

import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_QUANTIZED_NAME = re.compile(rf"(^|\.)({'|'.join(PROJECTIONS)})\.weight$")
_FULL_PRECISION_NAME = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# 4 MiB of FP32: a block, its scaled copy and its codes stay in the last-level cache of current CPUs, and each
# operation is long enough to hide its launch. On 2 cores blocks of a quarter of that cost up to 20 % more.
_CPU_BLOCK_ELEMENTS = 1 << 20
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*",
    "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class QuantFormat:
    """An 8-bit number format for weights and activations.

    Attributes
    ----------
    name : str
        The value of ``rollout_dtype`` that selects it.
    code_dtype : torch.dtype
        Storage type of the codes.
    max_code : float
        Largest magnitude of a code; the scale maps a row's absolute maximum onto it.
    number_type : str
        "int" or "float", as compressed-tensors names it.
    checkpoint_format : str
        Name of the compressed-tensors checkpoint format.
    """

    name: str
    code_dtype: torch.dtype
    max_code: float
    number_type: str
    checkpoint_format: str

    def levels(self, code_bits: int = 8) -> float:
        """Largest code magnitude when only ``code_bits`` of the 8 bits are used: 2**(code_bits - 1) - 1 for INT8.

        Raises
        ------
        ValueError
            If ``code_bits`` is not in 2..8, or is below 8 for FP8.
        """
        if isinstance(code_bits, bool) or not isinstance(code_bits, int) or not 2 <= code_bits <= 8:
            raise ValueError(f"code_bits={code_bits!r} is not possible: use a whole number from 2 to 8.")
        if code_bits == 8:
            return self.max_code
        if self.number_type != "int":
            raise ValueError(
                f"code_bits={code_bits} is not possible with dtype={self.name!r}: use code_bits=8, or dtype='int8' "
                "for fewer code levels."
            )
        return float(2 ** (code_bits - 1) - 1)


FORMATS = {
    "int8": QuantFormat("int8", torch.int8, 127.0, "int", "int-quantized"),
    "fp8": QuantFormat("fp8", torch.float8_e4m3fn, 448.0, "float", "float-quantized"),
}


class QuantizedTensor(NamedTuple):
    """Codes of shape (out, in) in the format's storage type, and their FP32 scale of shape (out, 1)."""

    codes: torch.Tensor
    scale: torch.Tensor


def get_format(dtype: str) -> QuantFormat:
    """The format called ``dtype``; ValueError with the known names if there is none."""
    if dtype not in FORMATS:
        raise ValueError(
            f"dtype={dtype!r} is not a quantized format: use one of {', '.join(map(repr, FORMATS))}."
        )
    return FORMATS[dtype]


def cast_codes(scaled: torch.Tensor, dtype: str, code_bits: int = 8) -> torch.Tensor:
    """Saturate values that are already divided by a scale, round them half to even, and store them as codes.

    Parameters
    ----------
    scaled : torch.Tensor
        FP32, any shape and size of values.
    dtype : {"int8", "fp8"}
    code_bits : int
        See `quantize`.

    Returns
    -------
    torch.Tensor
        Codes of the same shape: 448, 465 and 1000 all become 448 in FP8.
    """
    fmt = get_format(dtype)
    levels = fmt.levels(code_bits)
    codes = torch.empty(scaled.shape, dtype=fmt.code_dtype, device=scaled.device)
    _round_into(codes, scaled.clamp(-levels, levels))
    return codes


def _round_into(codes: torch.Tensor, scaled: torch.Tensor) -> None:
    """Store values within the range of ``codes``, rounded half to even; ``scaled`` is overwritten."""
    if codes.dtype is torch.int8:
        scaled.round_()  # the cast to integers truncates; the one to E4M3 rounds half to even by itself
    codes.copy_(scaled)


class _Scratch:
    """FP32 working memory that is kept from one weight to the next.

    Fresh memory would cost more than the arithmetic: the system clears every page of it first.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def get(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Uninitialized, of shape (rows, columns)."""
        if self._memory.numel() < rows * columns or self._memory.device != device:
            self._memory = torch.empty(rows * columns, dtype=torch.float32, device=device)
        return self._memory[: rows * columns].view(rows, columns)


def quantize(weight: torch.Tensor, dtype: str, code_bits: int = 8, name: str = "weight") -> QuantizedTensor:
    """Quantize a weight symmetrically with one scale per output channel (row).

    Parameters
    ----------
    weight : torch.Tensor
        Shape (out, in), floating point, any device. It is read in FP32; half precision is promoted exactly.
    dtype : {"int8", "fp8"}
    code_bits : int
        2..8, below 8 only for INT8: the codes are limited to ±(2**(code_bits - 1) - 1) and stored in 8 bits,
        so the same kernels run with a larger error (the stress setting).
    name : str
        What errors call the weight.

    Returns
    -------
    QuantizedTensor
        On the device of ``weight``, without gradient.

    Raises
    ------
    ValueError
        If ``weight`` is not a non-empty matrix of floating-point numbers, or holds NaN, infinity or values
        beyond the FP32 range.
    """
    return _quantize(weight, dtype, code_bits, name, _Scratch())


@torch.no_grad()
def _quantize(
    weight: torch.Tensor, dtype: str, code_bits: int, name: str, scratch: _Scratch
) -> QuantizedTensor:
    fmt = get_format(dtype)
    levels = fmt.levels(code_bits)
    if weight.ndim != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise ValueError(
            f"{name} of shape {tuple(weight.shape)} and dtype {weight.dtype} cannot be quantized: "
            "a non-empty floating-point matrix (out, in) is needed."
        )
    rows, columns = weight.shape
    # An accelerator is faster with one launch per operation over the whole layer.
    block_elements = _CPU_BLOCK_ELEMENTS if weight.device.type == "cpu" else weight.numel()
    block_rows = min(rows, max(1, block_elements // columns))
    working = scratch.get(block_rows, columns, weight.device)
    codes = torch.empty((rows, columns), dtype=fmt.code_dtype, device=weight.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=weight.device)
    # A tensor, because torch on CUDA turns a division by a number into a multiplication by its reciprocal.
    divisor = torch.tensor(levels, dtype=torch.float32, device=weight.device)
    for start in range(0, rows, block_rows):
        block = weight[start : start + block_rows]
        block_scale = scale[start : start + block_rows]
        scaled = working[: len(block)]
        if block.dtype is not torch.float32:
            block = scaled.copy_(block)
        # amax and amin pass NaN on; together they are far faster than aminmax or an infinity norm over rows.
        absmax = torch.maximum(block.amax(1, keepdim=True), block.amin(1, keepdim=True).neg_())
        torch.div(absmax, divisor, out=block_scale).clamp_(min=_SMALLEST_SCALE)
        # A row's quotients exceed `levels` by less than one rounding, which ends at `levels` in both formats:
        # saturation is exact without a pass of its own.
        torch.div(block, block_scale, out=scaled)
        _round_into(codes[start : start + block_rows], scaled)
    if not math.isfinite(scale.max()):
        raise ValueError(
            f"{name} holds NaN or infinity and cannot be quantized to {dtype}: "
            "look for the training step that diverged, or load an intact checkpoint."
        )
    return QuantizedTensor(codes, scale)


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``codes * scale``, computed in FP32 and rounded once to ``dtype``; shape (out, in)."""
    return (quantized.codes.float() * quantized.scale).to(dtype)


def fake_quantize_activation(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """What a W8A8 layer sees of its input: quantized with one dynamic scale per token, and dequantized.

    Parameters
    ----------
    x : torch.Tensor
        Shape (..., features), floating point.
    dtype : {"int8", "fp8"}

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``x``, without gradient.
    """
    tokens = quantize(x.reshape(-1, x.shape[-1]), dtype, name="activation")
    return dequantize(tokens, x.dtype).view(x.shape)


def is_quantized_name(name: str) -> bool:
    """Whether the parameter ``name`` is the weight of a decoder projection (`PROJECTIONS`), hence quantized."""
    return _QUANTIZED_NAME.search(name) is not None


def quantized_named_tensors(
    named_params: Iterable[tuple[str, torch.Tensor]], dtype: str, code_bits: int = 8
) -> Iterator[tuple[str, torch.Tensor]]:
    """Turn full-precision parameters into the tensors that a quantized engine loads, one layer at a time.

    Parameters
    ----------
    named_params : iterable of (str, torch.Tensor)
        Read once, in order; at most one parameter and its codes are held.
    dtype : {"int8", "fp8"}
    code_bits : int
        See `quantize`.

    Yields
    ------
    (str, torch.Tensor)
        For a projection its ``….weight`` codes, then its ``….weight_scale`` of shape (out, 1); other pairs unchanged.

    Raises
    ------
    ValueError
        When a projection cannot be quantized, with its name; see `quantize`.
    """
    get_format(dtype).levels(code_bits)
    scratch = _Scratch()
    for name, tensor in named_params:
        if is_quantized_name(name):
            codes, scale = _quantize(tensor, dtype, code_bits, name, scratch)
            yield name, codes
            yield name + "_scale", scale
        else:
            yield name, tensor


def checkpoint_quantization_config(dtype: str) -> dict:
    """The ``quantization_config`` entry of config.json: W8A8, channel weights, dynamic token activations."""
    fmt = get_format(dtype)
    numbers = {"num_bits": 8, "type": fmt.number_type, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt.checkpoint_format,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    }


def export_checkpoint(
    model: "torch.nn.Module | str | os.PathLike",
    directory: str | os.PathLike,
    dtype: str,
    code_bits: int = 8,
    max_shard_bytes: int = 4 << 30,
) -> Path:
    """Write a quantized checkpoint in compressed-tensors format, which stock vLLM loads.

    Parameters
    ----------
    model : transformers.PreTrainedModel or path
        A causal language model, or the folder of one (config.json and safetensors). Tokenizer files are copied from
        that folder (for a model: from the folder it was loaded from, if it was).
    directory : path
        Where to write: absent or empty. It appears complete or not at all.
    dtype : {"int8", "fp8"}
    code_bits : int
        See `quantize`.
    max_shard_bytes : int
        Bytes per safetensors file, and so the memory that writing needs.

    Returns
    -------
    pathlib.Path
        ``directory``.

    Raises
    ------
    ValueError
        When a weight cannot be quantized, with its name, or the architecture has matrices that are neither projections
        nor embeddings.
    FileExistsError
        If ``directory`` is not empty.
    FileNotFoundError
        If ``model`` is a folder without config.json or safetensors files.
    """
    get_format(dtype).levels(code_bits)
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"directory={str(directory)!r} is not empty: choose another one or remove it.")
    if isinstance(model, torch.nn.Module):
        source = Path(model.config.name_or_path) if model.config.name_or_path else None
        config = json.loads(model.config.to_json_string(use_diff=False))
        # As save_pretrained does: the config of a model in memory need not know either.
        config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
        named_params = model.named_parameters()
    else:
        source = Path(model)
        config = _read_config(source)
        named_params = _stored_tensors(source)
    if config.get("quantization_config"):
        raise ValueError(
            f"model={str(source)!r} is already quantized: start from its full-precision checkpoint."
        )
    if config.get("tie_word_embeddings"):
        # The head of a tied model is its embedding; some checkpoints store it twice.
        named_params = ((name, tensor) for name, tensor in named_params if name != "lm_head.weight")

    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    try:
        tensors = quantized_named_tensors(_known_matrices(named_params), dtype, code_bits)
        _save_sharded(tensors, partial, max_shard_bytes)
        if source is not None and source.is_dir():
            for pattern in _TOKENIZER_FILES:
                for file in source.glob(pattern):
                    shutil.copyfile(file, partial / file.name)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(partial)
        config["quantization_config"] = checkpoint_quantization_config(dtype)
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


def _read_config(folder: Path) -> dict:
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"model={str(folder)!r} has no config.json: give the folder of a transformers checkpoint."
        )
    return json.loads(file.read_text())


def _stored_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a folder's safetensors files, each read when its turn comes."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"model={str(folder)!r} has no *.safetensors file: save the model with save_pretrained."
        )
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.offset_keys():
                yield name, tensors.get_tensor(name)


def _known_matrices(named_params: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass parameters on, refusing linears that the checkpoint would declare quantized without holding their codes."""
    for name, tensor in named_params:
        if tensor.ndim > 1 and not is_quantized_name(name) and not _FULL_PRECISION_NAME.search(name):
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} is neither an embedding nor one of {', '.join(PROJECTIONS)}: "
                "export decoder-only text models of the Llama, Qwen2, Qwen3 or Gemma kind."
            )
        yield name, tensor


def _save_sharded(
    named_tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, max_shard_bytes: int
) -> None:
    """Write safetensors files of at most ``max_shard_bytes`` (or one tensor), with an index if there are several."""
    shards: list[list[str]] = []
    total_bytes = shard_bytes = 0
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(shard, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in named_tensors:
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            shard_bytes = 0
        shard[name] = tensor.detach().cpu().contiguous()
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()

    if len(shards) == 1:
        os.replace(folder / "0.safetensors", folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"{number}.safetensors", folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
