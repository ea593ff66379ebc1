"""The preset "paper" on GPUs: accelerate's config, the commands of both layouts, and what they are expected to cost.

One node: each of eight processes trains on a GPU and samples from an engine on the same GPU. Two nodes: eight processes
train, and a server (``qurl serve``) samples on the other node. Never run on GPUs; the numbers are those of
`qurl.experiments.scale`.
"""

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from qurl.experiments.recipes import GPUS
from qurl.experiments.scale import (
    ASSUMPTIONS,
    LAYOUTS,
    SHAPES,
    Layout,
    batch_time,
    memory,
    sharded,
    workload,
)
from qurl.experiments.specs import RunSpec
from qurl.experiments.store import RunStore

SERVER_HOST = "10.0.0.2"
"""Stands for the server's address in the private network of both nodes."""

SERVER_PORT = 8000
# Loading a checkpoint and compiling take longer than TRL's 240 seconds.
_SERVER_TIMEOUT = 900
_GIB = 2**30

# A checkpoint that has to be made before it can be trained, by experiment.
_PREPARATION = {
    "dapo": (
        "hf download Qwen/Qwen2.5-Math-7B --local-dir models/Qwen2.5-Math-7B-32k",
        'sed -i \'s/"max_position_embeddings": 4096/"max_position_embeddings": 32768/\' '
        "models/Qwen2.5-Math-7B-32k/config.json",
    )
}


def accelerate_config(experiment: str) -> dict[str, Any]:
    """What ``accelerate launch --config_file`` reads: one node that trains, a process for each GPU, BF16 autocast."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded(SHAPES[experiment]) else "MULTI_GPU",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": GPUS,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
        "debug": False,
    }
    if sharded(SHAPES[experiment]):
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            # Every process reads the checkpoint: its first sync must find weights, not what the main process will send.
            "fsdp_cpu_ram_efficient_loading": False,
        }
    return config


def config_text(experiment: str) -> str:
    """`accelerate_config` as the file's text."""
    return yaml.safe_dump(accelerate_config(experiment), sort_keys=False)


def config_file(root: Path, experiment: str) -> Path:
    """Where the commands below look for `config_text`: one file for all runs of an experiment."""
    return root / "accelerate" / f"{experiment}.yaml"


def server_fields(host: str = SERVER_HOST) -> dict[str, Any]:
    """Fields of `QuRLConfig` that send the rollouts of a run to a server on another node."""
    return {
        "vllm_mode": "server",
        "vllm_server_host": host,
        "vllm_server_port": SERVER_PORT,
        "vllm_server_timeout": _SERVER_TIMEOUT,
        "rollout_transfer": "nccl",
    }


def train_command(spec: RunSpec, root: Path, folder: Path, layout: Layout = "one-node") -> list[str]:
    """A run behind ``accelerate launch``.

    Parameters
    ----------
    spec : RunSpec
    root, folder : Path
        Of the run store, and of the run.
    layout : {"one-node", "two-nodes"}
    """
    words = [
        "accelerate",
        "launch",
        "--config_file",
        str(config_file(root, spec.experiment)),
        "-m",
        "qurl.cli",
    ]
    words += spec.command(folder)[1:]
    if layout == "two-nodes":
        for name, value in server_fields().items():
            words += [f"--{name}", str(value)]
    return words


def server_command(spec: RunSpec) -> list[str]:
    """The server of a run on two nodes: as many engines as its eight GPUs hold."""
    work = workload(spec)
    ways = memory(work, spec.dtype, "two-nodes").tensor_parallel
    options = {
        "model": spec.fields()["model"],
        "dtype": spec.dtype,
        "host": SERVER_HOST,
        "port": SERVER_PORT,
        "max-model-len": work.limit,
        "max-num-seqs": work.completions // (GPUS // ways),
        "tensor-parallel-size": ways,
        "data-parallel-size": GPUS // ways,
        "gpu-memory-utilization": ASSUMPTIONS["server_memory"].value,
        "transfer": "nccl",
    }
    words = ["qurl", "serve"]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return words


def plan_table(spec: RunSpec) -> pd.DataFrame:
    """Expected memory and time of a run of the preset "paper", BF16 rollouts beside the run's.

    Parameters
    ----------
    spec : RunSpec

    Returns
    -------
    pandas.DataFrame
        Rows by ``part`` and ``unit``: GiB of each GPU (on two nodes the training state, logits and activations lie on
        one node, weights, keys and values of the engine on the other), tokens and sequences of full length that the
        keys and values of one engine hold, sequences that it decodes at a time, seconds of a rollout batch by part,
        hours of the whole run. Columns by ``layout`` and ``rollouts``.
    """
    work, columns = workload(spec), {}
    for layout in LAYOUTS:
        for dtype in dict.fromkeys(("bf16", spec.dtype)):
            room, time = memory(work, dtype, layout), batch_time(work, dtype, layout)
            columns[layout, dtype] = {
                ("weights, gradients, moments", "GiB"): room.state / _GIB,
                ("logits", "GiB"): room.logits / _GIB,
                ("left for activations", "GiB"): room.activations / _GIB,
                ("engine: weights", "GiB"): room.engine / _GIB,
                ("engine: keys and values", "GiB"): room.cache / _GIB,
                ("engine: tokens kept", "tokens"): room.cache_tokens,
                ("engine: of full length", "sequences"): room.cache_tokens // work.limit,
                ("engine: decoded at a time", "sequences"): time.sequences,
                ("prefill", "s"): time.prefill,
                ("decode", "s"): time.decode,
                ("log-probs", "s"): time.logps,
                ("training", "s"): time.training,
                ("weight update", "s"): time.update,
                ("a rollout batch", "s"): time.seconds,
                (f"{work.batches:,} rollout batches", "h"): work.batches * time.seconds / 3600,
            }
    table = pd.DataFrame(columns)
    table.index.names, table.columns.names = ("part", "unit"), ("layout", "rollouts")
    return table


def plan(spec: RunSpec, root: Path, folder: Path) -> Iterator[str]:
    """The launch of a run in both layouts, to read and to paste into a shell: estimates, config and commands.

    Parameters
    ----------
    spec : RunSpec
    root, folder : Path
        Of the run store, and of the run.

    Yields
    ------
    str
        Lines of a shell script; what is to be read is a comment in it.
    """
    work, fields = workload(spec), spec.fields()
    yield ""
    yield (
        f"# {spec.experiment}: {fields['model']}, {work.completions // work.group:,} prompts of {work.group} "
        f"completions, up to {work.longest:,} tokens, {GPUS} × {ASSUMPTIONS['gpu'].value} a node."
    )
    yield "# Computed, never run on GPUs; memory of each GPU, time of a rollout batch with its optimizer steps:"
    table = plan_table(spec).map(_shown).reset_index()
    yield from (f"#   {line}".rstrip() for line in table.to_string(index=False).splitlines())
    yield from _PREPARATION.get(spec.experiment, ())
    file = config_file(root, spec.experiment)
    yield f"mkdir -p {shlex.quote(str(file.parent))}"
    yield f"cat > {shlex.quote(str(file))} <<'END'\n{config_text(spec.experiment)}END"
    yield "# One node:"
    yield shlex.join(train_command(spec, root, folder))
    yield f"# Two nodes; {SERVER_HOST} stands for the server's address in their private network. On the server's:"
    yield shlex.join(server_command(spec))
    yield "# On the training node, where accelerate's config lies:"
    yield shlex.join(train_command(spec, root, folder, "two-nodes"))


def plans(experiments: Iterable[str], store: RunStore) -> Iterator[str]:
    """`plan` of an INT8 run of each experiment, and below them what all estimates assume."""
    for experiment in experiments:
        spec = RunSpec(experiment=experiment, preset="paper")
        yield from plan(spec, store.root, store.folder(spec))
    yield ""
    yield "# Assumed in all of this (the formulas stand in qurl/experiments/scale.py):"
    for name, choice in ASSUMPTIONS.items():
        yield f"#   {name}: {_shown(choice.value)} ({choice.source})"


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
