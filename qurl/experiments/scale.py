"""What a rollout batch costs at a size that is not at hand: bytes of a weight update, memory of a GPU, and seconds.

Computed from published shapes and data sheets (`qurl.roofline`); **nothing of it was run on GPUs**. A rollout batch is
one sync, the sampling of its completions, their log-probs, and the optimizer steps on them:

==================  ================================================================================================
prefill             operations over the peak rate; a group's prompt is read once (prefix cache)
decode              as many sequences at a time as keys and values have room for, for at least as many steps as the
                    longest completion has tokens; `roofline` and an overhead a step
log-probs           one forward pass (proximal), two with a reference model (KL term)
training            four forward passes' worth: forward, backward (two), recomputation (gradient checkpointing)
weight update       gather from the training GPUs, quantize, send to the engines, load
==================  ================================================================================================

TRL pads a generation batch to its longest completion, so training and log-probs cost the longest length where
sampling costs the mean one. Left out: DAPO's replaced groups, rewards, evaluation and checkpoints, which depend on the
data; FSDP's gathers, which overlap with computing; the all-reduce of tensor-parallel engines; what vLLM itself keeps.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from qurl import arguments
from qurl.experiments.recipes import GPUS, OURS, QURL, Choice
from qurl.experiments.specs import RunSpec
from qurl.quantization import FORMATS, get_format, is_quantized_name
from qurl.roofline import GPUS as RATES
from qurl.roofline import MODEL_SHAPES, ModelShape, roofline, sequence_operations

LLAMA3 = "The Llama 3 Herd of Models (arXiv 2407.21783)"
ASSUMPTIONS: dict[str, Choice] = {
    "gpu": Choice("H100-SXM", f"{OURS}; rates of its data sheet, in qurl.roofline"),
    "prompt": Choice(200, f"{OURS}: tokens of a problem with its instruction"),
    "mean_share": Choice(0.5, f"{OURS}: mean completion over the longest"),
    "decode_overhead": Choice(
        4e-3, f"seconds a step; {QURL}, Fig. 8, 7B on H100: brings the roofline of batches of 16 and 64 into 1.2–1.3"
    ),
    "utilization": Choice(0.4, f"{LLAMA3}: 38–43 % of the BF16 peak of H100, in pre-training"),
    "network": Choice(50e9, f"bytes a second between nodes; {LLAMA3}: 400 Gbit/s"),
    "nvlink": Choice(450e9, "bytes a second and direction in a node; NVIDIA H100 datasheet: 900 GB/s both"),
    "server_memory": Choice(0.9, f"{OURS}: share of a GPU that samples and does nothing else"),
}  # fmt: skip

Layout = Literal["one-node", "two-nodes"]
LAYOUTS: tuple[Layout, ...] = ("one-node", "two-nodes")
"""Training and engines share the GPUs of a node, or each has a node."""

Mode = Literal["colocate", "server"]
"""Where an engine is, as ``vllm_mode`` says it: in the training process, or behind ``qurl serve``."""

# FP32 weight and gradient, and Adam's two moments.
_STATE_BYTES = 16
# Of the FP32 weights of a model that is only read, and of DDP's copy of the gradients in buckets.
_COPY_BYTES = 4
_FORWARDS_OF_TRAINING = 4
# An engine computes in BF16 whatever is not quantized, and a server is sent that in BF16.
_COMPUTE_BYTES = 2
_ROLLOUT_BYTES = {"bf16": _COMPUTE_BYTES, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class UpdateSize:
    """Tensors and bytes of one weight update.

    Attributes
    ----------
    projections, others : int
        Parameters that are quantized, and those that stay as they are.
    codes, scales, rest : int
        Bytes of the projections' codes (or of themselves, where nothing is quantized), of their FP32 scales, and of all
        other parameters.
    """

    projections: int
    others: int
    codes: int
    scales: int
    rest: int

    @property
    def bytes(self) -> int:
        """All of it: `qurl.rollout.SyncReport.bytes` of a sync from such a model."""
        return self.codes + self.scales + self.rest


def update_size(model: torch.nn.Module, dtype: str, mode: Mode) -> UpdateSize:
    """Bytes that a sync of ``model`` hands to an engine.

    Parameters
    ----------
    model : torch.nn.Module
        Only names, shapes and dtypes of its parameters are read, so it may live on the meta device.
    dtype : {"int8", "fp8", "bf16"}
        Of the rollouts.
    mode : {"colocate", "server"}
        What is not quantized reaches an engine of the same process in the dtype that it has, and a server in BF16.

    Returns
    -------
    UpdateSize
        A tied lm_head counts once.

    Raises
    ------
    ValueError
        If ``dtype`` or ``mode`` is not known.
    """
    if dtype != "bf16":
        get_format(dtype)
    arguments.choice("mode", mode, get_args(Mode))
    projections = others = codes = scales = rest = 0
    for name, parameter in model.named_parameters():
        unquantized = parameter.numel() * _COMPUTE_BYTES if mode == "server" else parameter.nbytes
        if not is_quantized_name(name):
            others += 1
            rest += unquantized
            continue
        projections += 1
        codes += parameter.numel() if dtype in FORMATS else unquantized
        scales += 4 * parameter.shape[0] if dtype in FORMATS else 0
    return UpdateSize(projections, others, codes, scales, rest)


def model_on_meta(shape: ModelShape, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A Qwen2 model of this shape without storage; FP32 is what training keeps."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@dataclass(frozen=True)
class Workload:
    """A rollout batch, whatever it runs on.

    Attributes
    ----------
    shape : ModelShape
    completions : int
        In a rollout batch, of all processes.
    group : int
        Completions of a prompt.
    longest, limit : int
        Tokens of the longest completion, and of the longest prompt and completion together.
    micro_batch : int
        Completions in one forward pass of a training process.
    reference : bool
        Whether a KL term needs a second model.
    memory_share : float
        Of a GPU that an engine takes which shares it with training.
    batches : int
        Rollout batches of a run.
    """

    shape: ModelShape
    completions: int
    group: int
    longest: int
    limit: int
    micro_batch: int
    reference: bool
    memory_share: float
    batches: int


# By experiment; the recipe's model names do not tell a shape without a download.
SHAPES = {"gsm8k": MODEL_SHAPES["0.5B"], "deepscaler": MODEL_SHAPES["1.5B"], "dapo": MODEL_SHAPES["7B"]}


def workload(spec: RunSpec) -> Workload:
    """The rollout batch of a run of the preset "paper"."""
    fields = spec.fields()
    return Workload(
        shape=SHAPES[spec.experiment],
        completions=GPUS * fields["per_device_train_batch_size"] * fields["steps_per_generation"],
        group=fields["num_generations"],
        longest=fields["max_completion_length"],
        limit=fields["vllm_max_model_length"],
        micro_batch=fields["per_device_train_batch_size"],
        reference=fields["beta"] > 0,
        memory_share=fields["vllm_gpu_memory_utilization"],
        batches=fields["max_steps"] * fields["gradient_accumulation_steps"] // fields["steps_per_generation"],
    )


def sharded(shape: ModelShape, gpu: str | None = None) -> bool:
    """Whether weights, gradients and moments are spread over the GPUs (FSDP2), or held by each (DDP).

    They are where DDP's state, its buckets and a reference model would take more than a third of a GPU.
    """
    rates = RATES[gpu or ASSUMPTIONS["gpu"].value]
    return shape.weights * (_STATE_BYTES + 2 * _COPY_BYTES) > rates.memory / 3


def tensor_parallel(shape: ModelShape, share: float, gpu: str | None = None) -> int:
    """GPUs of an engine whose BF16 weights take at most half of its ``share`` of each: 1, 2, 4 or 8.

    The rollout dtype does not count, so that BF16 and 8 bits are compared on the same engines.
    """
    room = share * RATES[gpu or ASSUMPTIONS["gpu"].value].memory / 2
    return next((ways for ways in (1, 2, 4) if 2 * shape.weights / ways <= room), 8)


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU of a layout; on two nodes the first three are the training node's, the next two the server's.

    Attributes
    ----------
    state : float
        Weights, gradients and moments (FP32), with the reference model and DDP's buckets where there are any.
    logits : float
        Of the longest completions of a micro-batch, FP32, with their gradient.
    activations : float
        What is left for everything else of training; negative where the layout does not fit.
    engine, cache : float
        Weights of the engine, and keys and values.
    cache_tokens : int
        Tokens that the keys and values of one engine (``tensor_parallel`` GPUs) hold.
    tensor_parallel : int
    """

    state: float
    logits: float
    activations: float
    engine: float
    cache: float
    cache_tokens: int
    tensor_parallel: int


def memory(work: Workload, dtype: str, layout: Layout, gpus: int = GPUS, gpu: str | None = None) -> Memory:
    """Expected memory.

    Parameters
    ----------
    work : Workload
    dtype : {"bf16", "int8", "fp8"}
        Of the rollouts.
    layout : {"one-node", "two-nodes"}
    gpus : int
        That train; on two nodes as many sample.
    gpu : str, optional
        A key of ``qurl.roofline.GPUS``; default that of ``ASSUMPTIONS``.
    """
    total = RATES[gpu or ASSUMPTIONS["gpu"].value].memory
    shape = work.shape
    apart = layout == "two-nodes"
    share = ASSUMPTIONS["server_memory"].value if apart else work.memory_share
    ways = tensor_parallel(shape, share, gpu) if apart else 1
    spread = sharded(shape, gpu)
    copies = _COPY_BYTES * (work.reference + (not spread))
    state = shape.weights * (_STATE_BYTES + copies) / (gpus if spread else 1)
    logits = 2 * 4 * work.micro_batch * work.longest * shape.vocab_size
    engine = _engine_weights(shape, dtype) / ways
    cache = share * total - engine
    return Memory(
        state=state,
        logits=logits,
        activations=total - state - logits - (0 if apart else share * total),
        engine=engine,
        cache=cache,
        cache_tokens=max(0, int(cache * ways // shape.kv_bytes_per_token)),
        tensor_parallel=ways,
    )


def _engine_weights(shape: ModelShape, dtype: str) -> float:
    """Projections in ``dtype``, embedding and lm_head in BF16; scales are a thousandth. So much is sent to a server."""
    return _ROLLOUT_BYTES[dtype] * shape.linear_weights + _COMPUTE_BYTES * (
        shape.weights - shape.linear_weights
    )


@dataclass(frozen=True)
class BatchTime:
    """Seconds of one rollout batch, by part (head of this module).

    Attributes
    ----------
    prefill, decode, logps, training, update : float
    sequences : int
        That each engine decodes at a time, at most.
    """

    prefill: float
    decode: float
    logps: float
    training: float
    update: float
    sequences: int

    @property
    def seconds(self) -> float:
        """Of all parts: they follow each other."""
        return self.prefill + self.decode + self.logps + self.training + self.update


def batch_time(
    work: Workload, dtype: str, layout: Layout, gpus: int = GPUS, gpu: str | None = None
) -> BatchTime:
    """Expected seconds of one rollout batch; parameters as those of `memory`.

    Raises
    ------
    ValueError
        If keys and values have no room for one sequence of full length, without which vLLM does not start.
    """
    assumed = {name: choice.value for name, choice in ASSUMPTIONS.items()}
    gpu = gpu or assumed["gpu"]
    rates, shape = RATES[gpu], work.shape
    room = memory(work, dtype, layout, gpus, gpu)
    if room.cache_tokens < work.limit:
        raise ValueError(
            f"keys and values of {work.limit} tokens do not fit beside the weights ({room.cache_tokens} do): use more "
            "GPUs to an engine, a larger share of their memory, or shorter completions."
        )
    ways = room.tensor_parallel
    of_engine = work.completions / (gpus / ways)
    mean = assumed["mean_share"] * work.longest
    sequences = int(max(1, min(of_engine, room.cache_tokens // (assumed["prompt"] + mean))))
    steps = max(of_engine * mean / sequences, work.longest)
    step = roofline(
        shape,
        gpu,
        batch_size=max(1, of_engine * mean / steps),
        context=round(assumed["prompt"] + mean / 2),
        dtype=dtype,
        tensor_parallel=ways,
        overhead_seconds=assumed["decode_overhead"],
    )
    linears, rest = sequence_operations(shape, assumed["prompt"])
    peak = {"bf16": rates.bf16, "int8": rates.int8, "fp8": rates.fp8 or rates.bf16}[dtype]
    prefill = of_engine / work.group * (linears / peak + rest / rates.bf16) / ways

    forward = sum(sequence_operations(shape, assumed["prompt"] + work.longest)) * work.completions
    forward /= gpus * assumed["utilization"] * rates.bf16
    apart = layout == "two-nodes"
    update = 4 * shape.weights / assumed["nvlink"] if sharded(shape, gpu) else 0
    update += _engine_weights(shape, dtype) / assumed["network"] if apart else 0
    # A projection is read twice in FP32 to be quantized (extremes, codes), its codes are written, and the engine reads
    # and writes them: 2 · 4 + 3. All else is cast to BF16: for a server before it is sent, 4 + 3 · 2; an engine in the
    # same process casts while it writes, 4 + 2.
    quantized = shape.linear_weights if dtype in FORMATS else 0
    update += (11 * quantized + (10 if apart else 6) * (shape.weights - quantized)) / rates.bandwidth
    return BatchTime(
        prefill=prefill,
        decode=steps * step.seconds,
        logps=(1 + work.reference) * forward,
        training=_FORWARDS_OF_TRAINING * forward,
        update=update,
        sequences=sequences,
    )
