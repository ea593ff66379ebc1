"""Roofline of one decode step: the speed-up that 8-bit codes can give on a GPU that is not at hand.

A decode step advances each of B sequences by one token. It reads every weight once, and the keys and values
of all B contexts; it does two operations per weight and sequence. Each of its three parts takes as long as
the slower of its memory traffic and its arithmetic (Williams et al., "Roofline: an insightful visual
performance model", 2009):

=================  =======================  ==============================  =====================
part               bytes                    operations                      rate of arithmetic
=================  =======================  ==============================  =====================
linears            codes or BF16, once      2 B x weights                   8-bit or BF16
lm_head            BF16, once               2 B x weights                   BF16
attention          BF16 keys and values     4 B x context x heads x width   BF16
=================  =======================  ==============================  =====================

Only the linears change with the rollout dtype, as in the paper (arXiv 2602.13953): embeddings, norms, lm_head
and the KV cache stay in BF16. So the expected speed-up is close to 2 while weights dominate, and falls as the
batch and its contexts grow. **It is an upper bound and not a prediction.** Left out: quantizing the
activations (reads and writes them once more), kernels that reach less than the data sheet, launch gaps,
sampling, scheduling, and the all-reduce of tensor parallelism. What is left out costs both dtypes about the
same time, which pulls a measured ratio towards 1; ``overhead_seconds`` puts a number on it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

# A100 and A6000 have no FP8 units: vLLM then computes in BF16 on FP8 weights (weight-only), so it saves
# bytes, not operations.
_BYTES_PER_WEIGHT = {"bf16": 2, "int8": 1, "fp8": 1}
_BYTES_BF16 = 2


@dataclass(frozen=True)
class GPU:
    """Peak rates of one GPU, dense (data sheets head their tables with twice these, for 2:4 sparsity).

    Attributes
    ----------
    memory : float
        Bytes.
    bandwidth : float
        Memory bandwidth, bytes per second.
    bf16, int8 : float
        Operations per second with BF16 inputs and FP32 sums, and with INT8 inputs.
    fp8 : float or None
        The same for FP8 inputs; None where the chip has no such units.
    source : str
        Title of the data sheet.
    """

    memory: float
    bandwidth: float
    bf16: float
    int8: float
    fp8: float | None
    source: str


GPUS = {
    "A6000": GPU(
        48e9, 768e9, 154.8e12, 309.7e12, None, "NVIDIA RTX A6000 datasheet; NVIDIA Ampere GA102 whitepaper"
    ),
    "A100-80G": GPU(80e9, 2039e9, 312e12, 624e12, None, "NVIDIA A100 80GB SXM datasheet (1758950-r4)"),
    "H100-SXM": GPU(80e9, 3350e9, 989.4e12, 1978.9e12, 1978.9e12, "NVIDIA H100 Tensor Core GPU datasheet"),
    "H200": GPU(141e9, 4800e9, 989.4e12, 1978.9e12, 1978.9e12, "NVIDIA H200 Tensor Core GPU datasheet (SXM)"),
}


@dataclass(frozen=True)
class ModelShape:
    """What of a decoder-only transformer with gated MLP counts for a decode step.

    Attributes
    ----------
    hidden_size, intermediate_size, layers, heads, kv_heads, head_dim, vocab_size : int
        As in the model's config.json.
    tied : bool
        Whether one matrix is embedding and lm_head.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False

    @classmethod
    def from_config(cls, config) -> "ModelShape":
        """Read it from a transformers config (Llama, Qwen2, Qwen3 and the like)."""
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            tied=config.tie_word_embeddings,
        )

    @property
    def linear_weights(self) -> int:
        """Weights of the linears that are quantized: q, k, v, o, gate, up and down of all layers."""
        attention = 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def lm_head_weights(self) -> int:
        """Weights of the output layer, which stays in BF16."""
        return self.hidden_size * self.vocab_size

    @property
    def weights(self) -> int:
        """All weights but norms and biases, which are less than a thousandth."""
        return self.linear_weights + (1 if self.tied else 2) * self.lm_head_weights

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, in BF16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES_BF16


# config.json of Qwen2.5-0.5B, of DeepSeek-R1-Distill-Qwen-1.5B (its lm_head is untied from Qwen2.5-Math-1.5B's
# embedding), and of Qwen2.5-{7B,14B,32B}, the models of the paper's Fig. 8; Qwen2.5-Math-7B has the shape of "7B".
MODEL_SHAPES = {
    "0.5B": ModelShape(896, 4864, 24, 14, 2, 64, 151936, tied=True),
    "1.5B": ModelShape(1536, 8960, 28, 12, 2, 128, 151936),
    "7B": ModelShape(3584, 18944, 28, 28, 4, 128, 152064),
    "14B": ModelShape(5120, 13824, 48, 40, 8, 128, 152064),
    "32B": ModelShape(5120, 27648, 64, 40, 8, 128, 152064),
}


@dataclass(frozen=True)
class DecodeStep:
    """Bytes, operations and seconds of one decode step on one GPU of the tensor-parallel group.

    Attributes
    ----------
    weight_bytes, kv_bytes, operations : float
        Per GPU and step.
    linear_seconds, lm_head_seconds, attention_seconds, seconds : float
        Of the three parts; ``seconds`` is their sum and the overhead.
    fits : bool
        Whether weights (embeddings included) and keys and values fit into the GPU's memory.
    """

    weight_bytes: float
    kv_bytes: float
    operations: float
    linear_seconds: float
    lm_head_seconds: float
    attention_seconds: float
    seconds: float
    fits: bool


def roofline(
    model: str | ModelShape,
    gpu: str | GPU,
    *,
    batch_size: int,
    context: int,
    dtype: str = "bf16",
    tensor_parallel: int = 1,
    overhead_seconds: float = 0.0,
) -> DecodeStep:
    """Least time of one decode step (see the head of this module for what is counted and what is left out).

    Parameters
    ----------
    model : str or ModelShape
        A key of ``MODEL_SHAPES``, or a shape.
    gpu : str or GPU
        A key of ``GPUS``, or its rates.
    batch_size : int
        Sequences that decode together.
    context : int
        Tokens before the new one, mean over the sequences.
    dtype : {"bf16", "int8", "fp8"}
        Of the linears. FP8 on a GPU without FP8 units counts as weight-only: 8-bit traffic, BF16 arithmetic.
    tensor_parallel : int
        GPUs that share each layer; their all-reduce is not counted.
    overhead_seconds : float
        Added to the step whatever the dtype.

    Returns
    -------
    DecodeStep

    Raises
    ------
    ValueError
        If a name is unknown or a size is below 1 (``context`` and ``overhead_seconds``: below 0).
    """
    shape = _by_name("model", model, MODEL_SHAPES)
    rates = _by_name("gpu", gpu, GPUS)
    if dtype not in _BYTES_PER_WEIGHT:
        raise ValueError(
            f"dtype={dtype!r} is not known here: use one of {', '.join(map(repr, _BYTES_PER_WEIGHT))}."
        )
    sizes = {"batch_size": (batch_size, 1), "context": (context, 0), "tensor_parallel": (tensor_parallel, 1)}
    for name, (value, least) in {**sizes, "overhead_seconds": (overhead_seconds, 0)}.items():
        if value < least:
            raise ValueError(f"{name}={value} is not possible: use {least} or more.")

    peak = {"bf16": rates.bf16, "int8": rates.int8, "fp8": rates.fp8 or rates.bf16}[dtype]
    linear_bytes = shape.linear_weights * _BYTES_PER_WEIGHT[dtype] / tensor_parallel
    linear_operations = 2 * batch_size * shape.linear_weights / tensor_parallel
    lm_head_bytes = shape.lm_head_weights * _BYTES_BF16 / tensor_parallel
    lm_head_operations = 2 * batch_size * shape.lm_head_weights / tensor_parallel
    kv_bytes = batch_size * context * shape.kv_bytes_per_token / tensor_parallel
    attention_operations = (
        4 * batch_size * context * shape.layers * shape.heads * shape.head_dim / tensor_parallel
    )

    linear = max(linear_bytes / rates.bandwidth, linear_operations / peak)
    lm_head = max(lm_head_bytes / rates.bandwidth, lm_head_operations / rates.bf16)
    attention = max(kv_bytes / rates.bandwidth, attention_operations / rates.bf16)
    # The embedding table is held but not read: a step looks up B rows. Tied or not, it is counted once more
    # than lm_head.
    held = linear_bytes + 2 * lm_head_bytes + kv_bytes
    return DecodeStep(
        weight_bytes=linear_bytes + lm_head_bytes,
        kv_bytes=kv_bytes,
        operations=linear_operations + lm_head_operations + attention_operations,
        linear_seconds=linear,
        lm_head_seconds=lm_head,
        attention_seconds=attention,
        seconds=linear + lm_head + attention + overhead_seconds,
        fits=held <= rates.memory,
    )


def expected_speedup(model: str | ModelShape, gpu: str | GPU, *, dtype: str, **step) -> float:
    """Time of a BF16 decode step over that of a ``dtype`` one; ``step``: other arguments of ``roofline``."""
    return (
        roofline(model, gpu, dtype="bf16", **step).seconds / roofline(model, gpu, dtype=dtype, **step).seconds
    )


def sequence_operations(shape: ModelShape, tokens: int) -> tuple[float, float]:
    """Operations of one forward pass over a sequence, causal attention.

    Parameters
    ----------
    shape : ModelShape
    tokens : int
        Length of the sequence.

    Returns
    -------
    (float, float)
        Of the linears that are quantized, 2 a weight and token; and of lm_head and attention, which stay in BF16. A
        token with t tokens up to itself takes 4 t x heads x head_dim a layer for scores and weighted sum; over the
        sequence that adds up to 2 x tokens**2.
    """
    attention = 2 * tokens**2 * shape.layers * shape.heads * shape.head_dim
    return 2.0 * tokens * shape.linear_weights, 2.0 * tokens * shape.lm_head_weights + attention


@dataclass(frozen=True)
class ReportedSpeedup:
    """A range read off the paper's Fig. 8: rollout throughput, INT8 over BF16 (1.2 means 20 % faster)."""

    model: str
    gpu: str
    tensor_parallel: int
    low: float
    high: float

    @property
    def case(self) -> str:
        """Label such as ``32B, 2x H100-SXM``."""
        return f"{self.model}, {f'{self.tensor_parallel}x ' if self.tensor_parallel > 1 else ''}{self.gpu}"


PAPER_SOURCE = "QuRL, arXiv 2602.13953, Fig. 8 (INT8 against BF16; FP8 KV cache not used)"
# The abstract's claim: rollouts 20 % to 80 % faster.
PAPER_RANGE = (1.2, 1.8)
# One range is reported per model where the paper gives no number per GPU.
PAPER_SPEEDUPS = (
    *(ReportedSpeedup("7B", gpu, 1, 1.2, 1.3) for gpu in ("A6000", "A100-80G", "H100-SXM")),
    *(ReportedSpeedup("14B", gpu, 1, 1.3, 1.56) for gpu in ("A6000", "A100-80G", "H100-SXM")),
    ReportedSpeedup("32B", "A100-80G", 2, 1.7, 1.7),
    ReportedSpeedup("32B", "H100-SXM", 2, 1.83, 1.9),
)


def paper_cases(
    dtypes: Iterable[str] = ("int8", "fp8"), batch_sizes: Iterable[int] = (16, 64, 256), context: int = 2048
) -> pd.DataFrame:
    """The roofline beside the paper's numbers, for each case of Fig. 8 and the same models on H200.

    Parameters
    ----------
    dtypes : iterable of str
    batch_sizes : iterable of int
        The paper's batch is not known to us: the spread over these stands for it.
    context : int
        Tokens, mean over a rollout.

    Returns
    -------
    pandas.DataFrame
        One row per case, dtype and batch size: ``case, model, gpu, tensor_parallel, dtype, batch_size,
        context, speedup`` (roofline), ``fits`` (the BF16 model and its keys and values fit into the memory,
        so that such a batch can be run at all), ``paper_low, paper_high`` (NaN where the paper has no number:
        H200, FP8).
    """
    cases = [*PAPER_SPEEDUPS]
    models = dict.fromkeys(case.model for case in PAPER_SPEEDUPS)
    cases += [ReportedSpeedup(model, "H200", 1, float("nan"), float("nan")) for model in models]
    batch_sizes = list(batch_sizes)
    rows = []
    for case in cases:
        for dtype in dtypes:
            for batch_size in batch_sizes:
                step = {"batch_size": batch_size, "context": context, "tensor_parallel": case.tensor_parallel}
                reported = dtype == "int8"
                rows.append(
                    {
                        "case": case.case,
                        "model": case.model,
                        "gpu": case.gpu,
                        "dtype": dtype,
                        **step,
                        "speedup": expected_speedup(case.model, case.gpu, dtype=dtype, **step),
                        "fits": roofline(case.model, case.gpu, dtype="bf16", **step).fits,
                        "paper_low": case.low if reported else float("nan"),
                        "paper_high": case.high if reported else float("nan"),
                    }
                )
    return pd.DataFrame(rows)


def _by_name(parameter: str, value, known: dict):
    if not isinstance(value, str):
        return value
    if value not in known:
        raise ValueError(
            f"{parameter}={value!r} is not known: use {', '.join(map(repr, known))} or pass its numbers."
        )
    return known[value]
