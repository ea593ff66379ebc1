"""The preset "paper" on one node of GPUs: accelerate's config, the command, and the memory that it takes.

Computed from published shapes; never run on GPUs. Memory is per GPU, in GiB.
"""

from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from qurl.experiments.recipes import GPUS
from qurl.experiments.specs import RunSpec
from qurl.files import write_whole
from qurl.roofline import MODEL_SHAPES, ModelShape

# config.json of the Qwen2.5-0.5B, Qwen2.5-Math-1.5B (from which DeepSeek distilled) and Qwen2.5-Math-7B models.
SHAPES = {
    "gsm8k": ModelShape(896, 4864, 24, 14, 2, 64, 151936),
    "deepscaler": ModelShape(1536, 8960, 28, 12, 2, 128, 151936),
    "dapo": MODEL_SHAPES["7B"],
}
_TIED_HEAD = {"gsm8k"}  # one matrix is embedding and lm_head
# FP32 weight and gradient, and Adam's two moments.
_TRAINING_BYTES = 16
_ROLLOUT_BYTES = {"bf16": 2, "int8": 1, "fp8": 1}
_GIB = 2**30


def sharded(experiment: str) -> bool:
    """Whether weights, gradients and moments have to be spread over the GPUs (FSDP2), or fit on each (DDP)."""
    return (
        _parameters(experiment) * _TRAINING_BYTES > 40 * _GIB
    )  # half of an 80 GB GPU; the other half samples


def accelerate_config(experiment: str) -> dict[str, Any]:
    """What ``accelerate launch --config_file`` reads: one node, a process for each GPU, BF16 autocast."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded(experiment) else "MULTI_GPU",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": GPUS,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
        "debug": False,
    }
    if sharded(experiment):
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        }
    return config


def launch_command(spec: RunSpec, folder: Path) -> list[str]:
    """The run behind ``accelerate launch``, with the config that `write_config` puts into its folder."""
    words = ["accelerate", "launch", "--config_file", str(folder / "accelerate.yaml"), "-m", "qurl.cli"]
    return words + spec.command(folder)[1:]


def write_config(spec: RunSpec, folder: Path) -> Path:
    """Write accelerate's config into the folder of a run."""
    file = folder / "accelerate.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, yaml.safe_dump(accelerate_config(spec.experiment), sort_keys=False))
    return file


def memory(spec: RunSpec, gpu_memory: float = 80e9) -> pd.DataFrame:
    """Expected memory of a run of the preset "paper", GiB on each GPU.

    Parameters
    ----------
    spec : RunSpec
    gpu_memory : float
        Bytes of a GPU.

    Returns
    -------
    pandas.DataFrame
        ``part`` (index), ``GiB``: training state; logits of the longest completion (FP32, with their gradient); the
        engine's weights; keys and values that its share leaves room for; what is then left for activations. In
        ``attrs["kv_tokens"]`` the tokens that those keys and values hold.
    """
    shape, fields = SHAPES[spec.experiment], spec.fields()
    parameters = _parameters(spec.experiment)
    training = parameters * _TRAINING_BYTES / (GPUS if sharded(spec.experiment) else 1)
    tokens = fields["per_device_train_batch_size"] * fields["max_completion_length"]
    logits = 2 * 4 * tokens * shape.vocab_size
    engine = _ROLLOUT_BYTES[spec.dtype] * shape.linear_weights + 2 * (parameters - shape.linear_weights)
    cache = fields["vllm_gpu_memory_utilization"] * gpu_memory - engine
    parts = {
        "weights, gradients, moments": training,
        "logits": logits,
        "engine: weights": engine,
        "engine: keys and values": cache,
        "left for activations": gpu_memory - training - logits - engine - cache,
    }
    table = pd.DataFrame({"GiB": {part: size / _GIB for part, size in parts.items()}}).rename_axis("part")
    table.attrs["kv_tokens"] = int(cache // shape.kv_bytes_per_token)
    return table


def _parameters(experiment: str) -> int:
    shape = SHAPES[experiment]
    heads = 1 if experiment in _TIED_HEAD else 2
    return shape.linear_weights + heads * shape.hidden_size * shape.vocab_size
