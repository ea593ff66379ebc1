"""Errors of codes, what stays in BF16, and the mismatch of a real engine: ``notebooks/10_quantization.ipynb``."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pandas as pd
import pydantic
import torch
from torch import nn

from qurl.notebook import Parameters
from qurl.quantization import (
    FORMATS,
    PROJECTIONS,
    dequantize,
    fake_quantize_activation,
    is_quantized_name,
    quantize,
)


class QuantizationConfig(Parameters):
    """Parameters of ``notebooks/10_quantization.ipynb``."""

    model: str = pydantic.Field(examples=["smollm2-135m"])
    dtype: Literal[tuple(FORMATS)] = pydantic.Field(examples=["int8"])
    code_bits: int = pydantic.Field(ge=2, le=8, examples=["3"])
    max_tokens: int = pydantic.Field(ge=2, le=512, examples=["32"])
    seed: int = pydantic.Field(ge=0, lt=2**31, examples=["0"])


def format_name(dtype: str, code_bits: int = 8) -> str:
    """How figures and tables call a setting: "INT8", "FP8", "INT8, 3 bits used"."""
    return dtype.upper() + (f", {code_bits} bits used" if code_bits < 8 else "")


def _relative_error(approximation: torch.Tensor, exact: torch.Tensor) -> float:
    return ((approximation - exact).norm() / exact.norm()).item()


def _place(name: str) -> dict[str, Any]:
    """Decoder layer and projection of a weight or module, from its name."""
    (projection,) = re.findall("|".join(PROJECTIONS), name)
    return {"layer": int(re.search(r"layers\.(\d+)\.", name)[1]), "projection": projection}


@torch.no_grad()
def weight_errors(
    named_params: Iterable[tuple[str, torch.Tensor]], settings: Sequence[tuple[str, int]]
) -> pd.DataFrame:
    """Error that quantization leaves in each projection.

    Parameters
    ----------
    named_params : iterable of (str, torch.Tensor)
    settings : sequence of (dtype, code_bits)

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``projection``, ``format``, ``code_bits`` and ``error`` = ‖W − Ŵ‖ / ‖W‖, Frobenius norms.
    """
    rows = []
    for name, weight in named_params:
        if not is_quantized_name(name):
            continue
        for dtype, bits in settings:
            error = _relative_error(dequantize(quantize(weight, dtype, bits, name)), weight.float())
            rows.append(
                {**_place(name), "format": format_name(dtype, bits), "code_bits": bits, "error": error}
            )
    return pd.DataFrame(rows)


@torch.no_grad()
def activation_errors(
    model: nn.Module, input_ids: Sequence[int], dtypes: Sequence[str] = tuple(FORMATS)
) -> pd.DataFrame:
    """Error that quantization leaves in what each projection reads, with one scale per token.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    input_ids : sequence of int
        One sequence, run through the model once in its own precision.
    dtypes : sequence of {"int8", "fp8"}

    Returns
    -------
    pandas.DataFrame
        ``layer``, ``projection``, ``format``; ``error`` = ‖x − x̂‖ / ‖x‖ of a token, and ``peak`` = max |x| over the
        root mean square of x, both as medians over the tokens.
    """
    rows = []

    def record(name: str) -> Callable:
        def hook(_, arguments: tuple[torch.Tensor]) -> None:
            x = arguments[0][0].float()  # (tokens, features)
            peak = (x.abs().amax(1) / x.square().mean(1).sqrt()).median().item()
            for dtype in dtypes:
                errors = (fake_quantize_activation(x, dtype) - x).norm(dim=1) / x.norm(dim=1)
                rows.append(
                    {
                        **_place(name),
                        "format": format_name(dtype),
                        "error": errors.median().item(),
                        "peak": peak,
                    }
                )

        return hook

    hooks = [
        module.register_forward_pre_hook(record(name))
        for name, module in model.named_modules()
        if is_quantized_name(f"{name}.weight")
    ]
    try:
        model(torch.tensor([list(input_ids)], device=model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return pd.DataFrame(rows)


def precision_table(model: nn.Module) -> pd.DataFrame:
    """What is quantized, what stays in BF16, and the memory that it takes.

    Returns
    -------
    pandas.DataFrame
        A row per part: ``parameters``, ``share``, ``sampled_in``, and megabytes in BF16 and in the 8-bit copy (codes of
        one byte, FP32 scales).
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():  # a tied head is its embedding, and counted once
        quantized = is_quantized_name(name)
        part = (
            "projections"
            if quantized
            else "norms and biases"
            if parameter.ndim == 1
            else "embedding and lm_head"
        )
        row = parts.setdefault(
            part,
            {
                "parameters": 0,
                "sampled_in": "8 bits" if quantized else "BF16",
                "bf16_mb": 0.0,
                "copy_mb": 0.0,
            },
        )
        row["parameters"] += parameter.numel()
        row["bf16_mb"] += parameter.numel() * 2 / 1e6
        row["copy_mb"] += (
            (parameter.numel() + 4 * len(parameter)) / 1e6 if quantized else parameter.numel() * 2 / 1e6
        )
    table = pd.DataFrame(parts).T.infer_objects()
    table.insert(1, "share", table["parameters"] / table["parameters"].sum())
    return table.sort_values("parameters", ascending=False)


@torch.no_grad()
def sampled_logps(
    policy: nn.Module, sequences: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Log-probs at temperature 1 of the completion that ends each sequence, in the policy's own precision."""
    rows = []
    for sequence, completion in zip(sequences, completions, strict=True):
        ids = torch.tensor([list(sequence)], device=policy.device)
        logps = policy(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        rows.append(logps.gather(1, ids[0, 1:, None])[-len(completion) :, 0].tolist())
    return rows


def engine_mismatch(
    policy: nn.Module,
    model: str,
    prompts: Sequence[Sequence[int]],
    dtype: str,
    code_bits: int = 8,
    *,
    max_tokens: int = 32,
    seed: int = 0,
) -> pd.DataFrame:
    """Sample from the engine at temperature 1 and score its tokens with the policy that is trained.

    Parameters
    ----------
    policy : transformers.PreTrainedModel
        In full precision.
    model : str
        Where the engine finds the policy's configuration; its weights come from ``policy``.
    prompts : sequence of sequence of int
        Token ids.
    dtype : {"int8", "fp8", "bf16", "fp32"}
        "bf16" shows what an engine differs in without any quantization.
    code_bits : int
    max_tokens, seed : int

    Returns
    -------
    pandas.DataFrame
        A row per sampled token: ``format``, ``sequence``, ``behaviour`` (log π_behav), ``proximal`` (log π_prox),
        ``log_w``, ``w``, and ``k3`` = w − 1 − log w, whose mean estimates KL(behav‖prox); nats.
    """
    from qurl.rollout import RolloutEngine

    longest = max(map(len, prompts)) + max_tokens
    with RolloutEngine(
        model,
        dtype,
        code_bits=code_bits,
        max_model_len=longest + 1,
        max_num_seqs=len(prompts),
        seed=seed,
        load_weights=False,
    ) as engine:
        engine.sync(policy.named_parameters())
        rollouts = engine.generate(prompts, max_tokens=max_tokens)
    completions = rollouts.completion_ids
    sequences = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    tokens = pd.DataFrame(
        [
            {
                "format": format_name(dtype, code_bits),
                "sequence": index,
                "behaviour": behaviour,
                "proximal": proximal,
            }
            for index, rows in enumerate(
                zip(rollouts.logps, sampled_logps(policy, sequences, completions), strict=True)
            )
            for behaviour, proximal in zip(*rows, strict=True)
        ]
    )
    tokens["log_w"] = tokens["proximal"] - tokens["behaviour"]
    tokens["w"] = tokens["log_w"].map(math.exp)
    tokens["k3"] = tokens["log_w"].map(math.expm1) - tokens["log_w"]
    return tokens
