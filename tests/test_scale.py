"""Sizes, memory and seconds of what is not at hand: hand-worked, against real syncs, and as commands that parse."""

import subprocess
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from qurl.config import QuRLConfig
from qurl.experiments import EXPERIMENTS, RunSpec, RunStore, launch
from qurl.experiments.orchestrator import reproduce
from qurl.experiments.recipes import GPUS
from qurl.experiments.scale import (
    ASSUMPTIONS,
    LAYOUTS,
    SHAPES,
    UpdateSize,
    Workload,
    batch_time,
    memory,
    model_on_meta,
    sharded,
    tensor_parallel,
    update_size,
    workload,
)
from qurl.models import resolve_model
from qurl.quantization import PROJECTIONS, export_checkpoint, is_quantized_name
from qurl.rollout import RolloutEngine
from qurl.rollout.sync import SentTensors
from qurl.roofline import MODEL_SHAPES, ModelShape

# One layer, hidden 4, MLP 8, 2 heads and 1 KV head of width 2, 10 words: 144 weights in projections of
# 4 + 2 + 2 + 4 (q, k, v, o) + 8 + 8 + 4 (gate, up, down) = 32 rows. The rest: embedding and lm_head of 40 each, three
# norms of 4, biases of q, k and v of 4 + 2 + 2 = 100 numbers in 2 + 3 + 3 tensors.
SMALL = ModelShape(4, 8, 1, 2, 1, 2, 10)

# Weight updates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "dtype", "codes", "scales", "rest"),
    [
        ("server", "int8", 144, 128, 200),
        ("server", "fp8", 144, 128, 200),
        ("server", "bf16", 288, 0, 200),
        # What is not quantized as training keeps it, in FP32; the engine casts it.
        ("colocate", "int8", 144, 128, 400),
        ("colocate", "fp8", 144, 128, 400),
        ("colocate", "bf16", 576, 0, 400),
    ],
)
def test_update_hand_worked(mode, dtype, codes, scales, rest):
    size = update_size(model_on_meta(SMALL), dtype, mode)
    assert size == UpdateSize(projections=7, others=8, codes=codes, scales=scales, rest=rest)
    assert size.bytes == codes + scales + rest
    of_bf16 = update_size(model_on_meta(SMALL, torch.bfloat16), dtype, mode)
    assert of_bf16 == update_size(model_on_meta(SMALL), dtype, "server")


def test_tied_head_counts_once():
    tied = ModelShape(4, 8, 1, 2, 1, 2, 10, tied=True)
    assert update_size(model_on_meta(tied), "int8", "server").rest == 200 - 80


@pytest.mark.parametrize(
    ("name", "layers", "billions"), [("1.5B", 28, 1.777), ("7B", 28, 7.616), ("32B", 64, 32.76)]
)
def test_updates_of_published_models(name, layers, billions):
    """Seven projections a layer are quantized, and the parameters are those of the model cards."""
    shape, model = MODEL_SHAPES[name], model_on_meta(MODEL_SHAPES[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.num_parameters() == pytest.approx(billions * 1e9, rel=1e-3)
    assert shape.weights == pytest.approx(model.num_parameters(), rel=1e-3)
    quantized = [parameter for parameter, _ in model.named_parameters() if is_quantized_name(parameter)]
    assert len(quantized) == layers * len(PROJECTIONS)
    size = update_size(model, "int8", "server")
    assert (size.projections, size.codes) == (len(quantized), shape.linear_weights)
    # A scale for each row: 4 bytes against at least 896 codes.
    assert size.scales < size.codes / 200
    assert update_size(model, "bf16", "server").codes == 2 * size.codes


def test_half_the_bytes_hand_worked():
    """7B: 28 × (2 × 3,584 × 128 × 32 + 3 × 3,584 × 18,944) codes; embedding and lm_head of 152,064 × 3,584 stay."""
    size = update_size(model_on_meta(MODEL_SHAPES["7B"]), "int8", "server")
    codes = 28 * (2 * 3584 * 128 * 32 + 3 * 3584 * 18_944)
    rows = 28 * (3584 + 2 * 512 + 3584 + 2 * 18_944 + 3584)
    assert (size.codes, size.scales) == (codes, 4 * rows)
    norms_and_biases = 57 * 3584 + 28 * (3584 + 2 * 512)
    assert size.rest == 2 * (2 * 152_064 * 3584 + norms_and_biases)


def test_unknown_dtype_and_mode():
    with pytest.raises(ValueError, match="dtype='int4' is not a quantized format"):
        update_size(model_on_meta(SMALL), "int4", "server")
    with pytest.raises(ValueError, match="mode='two-nodes' is not possible: use one of 'colocate', 'server'"):
        update_size(model_on_meta(SMALL), "int8", "two-nodes")


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_size_is_that_of_what_is_sent_and_of_the_checkpoint(dtype, tied, tmp_path):
    """The same shape with storage, through a sync in this process and the exported checkpoint, FP32 and all."""
    shape = ModelShape(64, 160, 2, 4, 2, 16, 97, tied=tied)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_on_meta(shape).config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    sent = SentTensors(model.named_parameters(), dtype, 8, None, shapes)
    tensors = dict(sent)
    size = update_size(model_on_meta(shape), dtype, "colocate")
    assert size.bytes == sent.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert size.projections * 2 + size.others == len(tensors)
    folder = export_checkpoint(model, tmp_path / "quantized", dtype)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # Headers of safetensors: names and shapes, at most 200 bytes a tensor.
    assert size.bytes < stored < size.bytes + 200 * (len(tensors) + 1)


def test_size_is_what_a_real_sync_reports():
    """In this process; tests/test_server.py has the sync of a server."""
    policy = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    with RolloutEngine("tiny", "int8", max_model_len=32, max_num_seqs=4, load_weights=False) as engine:
        report = engine.sync(policy.named_parameters())
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(policy.config, dtype=torch.float32)
    assert report.bytes == update_size(meta, "int8", "colocate").bytes


# Memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "billions", "bytes_per_parameter"),
    # DDP holds all 16 bytes, a bucket of gradients and, for the KL term, a second model; FSDP spreads them over 8.
    [("gsm8k", 0.494, 16 + 4 + 4), ("deepscaler", 1.777, (16 + 4) / 8), ("dapo", 7.616, 16 / 8)],
)
def test_memory_of_the_papers_models(experiment, billions, bytes_per_parameter):
    work = workload(RunSpec(experiment=experiment, preset="paper"))
    int8, bf16 = (memory(work, dtype, "one-node") for dtype in ("int8", "bf16"))
    assert int8.state == pytest.approx(billions * 1e9 * bytes_per_parameter, rel=1e-3)
    assert sum((int8.state, int8.logits, int8.activations, int8.engine, int8.cache)) == pytest.approx(80e9)
    assert int8.activations > 10e9  # it fits
    # INT8 saves a byte for each weight of the linears, which become keys and values.
    saved = SHAPES[experiment].linear_weights
    assert bf16.engine - int8.engine == pytest.approx(saved) == int8.cache - bf16.cache


def test_memory_of_dapo_hand_worked():
    """8,192 × 152,064 logits × 4 bytes, twice; 0.3 × 80 GB less the engine, at 57,344 bytes a token."""
    work = workload(RunSpec(experiment="dapo", preset="paper"))
    room = memory(work, "int8", "one-node")
    assert room.logits == 8_192 * 152_064 * 8
    engine = 28 * (2 * 3584 * 128 * 32 + 3 * 3584 * 18_944) + 2 * 2 * 152_064 * 3584
    assert room.engine == engine
    assert room.cache_tokens == (24e9 - engine) // (2 * 28 * 4 * 128 * 2) == 266_718
    apart = memory(work, "int8", "two-nodes")
    assert apart.cache_tokens == (72e9 - engine) // 57_344
    assert apart.activations == pytest.approx(80e9 - apart.state - apart.logits)


def test_engines_grow_with_the_model():
    """32B: 65.5 GB of BF16 need two GPUs (as in Fig. 8); codes, embedding and lm_head take 17.2 GB of each."""
    assert [tensor_parallel(MODEL_SHAPES[name], 0.9) for name in ("7B", "14B", "32B")] == [1, 1, 2]
    assert tensor_parallel(MODEL_SHAPES["32B"], 0.3) == 8
    work = Workload(MODEL_SHAPES["32B"], 8192, 16, 8192, 10_240, 1, False, 0.3, 1)
    assert memory(work, "int8", "two-nodes").engine == pytest.approx(17.16e9, rel=1e-3)
    assert memory(work, "bf16", "two-nodes").cache_tokens == (144e9 - 65_525_514_240) // 262_144
    assert memory(work, "int8", "two-nodes").activations < 5e9  # 32B does not train on one node
    assert sharded(MODEL_SHAPES["1.5B"]) and not sharded(MODEL_SHAPES["0.5B"])


# Time ------------------------------------------------------------------------------------------------------------

DAPO = workload(RunSpec(experiment="dapo", preset="paper"))


def test_dapo_on_two_nodes_hand_worked():
    """1,103,772 tokens hold 256 sequences of 200 + 4,096; 1,024 completions to a GPU take 16,384 steps.

    A step with a mean context of 200 + 2,048: 6.525e9 codes and 1.09e9 bytes of lm_head at 3.35e12 bytes/s are 1.948
    and 0.325 ms, keys and values 256 × 2,248 × 57,344 bytes 9.851 ms, overhead 4 ms: 16.125 ms. A forward pass over
    200 + 8,192 tokens: 2 × 8,392 × 7.070e9 + 2 × 8,392² × 28 × 3,584 = 1.328e14 operations, times 8,192 completions
    over 8 × 0.4 × 989.4e12: 343.6 s.
    """
    time = batch_time(DAPO, "int8", "two-nodes")
    assert time.sequences == 256
    assert time.decode == pytest.approx(16_384 * 16.125e-3, rel=1e-3)
    assert time.logps == pytest.approx(343.6, rel=1e-3)
    assert time.training == pytest.approx(4 * 343.6, rel=1e-3)
    # 64 prompts a GPU of 200 tokens: 2.61e12 operations at the INT8 rate and 0.23e12 at the BF16 rate each.
    assert time.prefill == pytest.approx(64 * (2.610e12 / 1978.9e12 + 0.226e12 / 989.4e12), rel=1e-2)
    # Gather 4 × 7.615e9 bytes at 450e9 a second; 8.705e9 sent at 50e9; 11 × 6.525e9 + 10 × 1.090e9 at 3,350e9.
    assert time.update == pytest.approx(0.0677 + 0.1741 + 0.0247, rel=1e-3)
    assert time.seconds == pytest.approx(
        time.prefill + time.decode + time.logps + time.training + time.update
    )
    # On one node nothing is sent, and an engine casts what is not quantized while it loads it.
    int8, bf16 = (batch_time(DAPO, dtype, "one-node").update for dtype in ("int8", "bf16"))
    assert int8 == pytest.approx(0.0677 + (11 * 6.525e9 + 6 * 1.090e9) / 3350e9, rel=1e-3)
    assert bf16 == pytest.approx(0.0677 + 6 * 7.615e9 / 3350e9, rel=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_two_nodes_send_what_a_server_is_sent(dtype, monkeypatch):
    """Over a network so slow that nothing else counts: its bytes are those of the model but for scales and norms."""
    monkeypatch.setitem(ASSUMPTIONS, "network", ASSUMPTIONS["network"]._replace(value=1.0))
    size = update_size(model_on_meta(DAPO.shape), dtype, "server")
    assert batch_time(DAPO, dtype, "two-nodes").update == pytest.approx(size.bytes, rel=2e-3)


def test_a_batch_that_fits_at_once_takes_as_many_steps_as_its_longest_completion():
    """8 completions on 8 GPUs: one each, half of the steps empty on average, never below one sequence."""
    work = Workload(MODEL_SHAPES["7B"], 8, 8, 1000, 1200, 1, False, 0.3, 1)
    time = batch_time(work, "bf16", "two-nodes")
    assert time.sequences == 1
    weights = 2 * (MODEL_SHAPES["7B"].linear_weights + MODEL_SHAPES["7B"].lm_head_weights)
    step = (weights + (200 + 250) * 57_344) / 3350e9 + 4e-3
    assert time.decode == pytest.approx(1000 * step)


def test_kl_term_costs_a_forward_pass_and_a_model():
    with_reference = replace(DAPO, reference=True)
    assert batch_time(with_reference, "int8", "one-node").logps == pytest.approx(
        2 * batch_time(DAPO, "int8", "one-node").logps
    )
    extra = memory(with_reference, "int8", "one-node").state - memory(DAPO, "int8", "one-node").state
    assert extra == pytest.approx(4 * DAPO.shape.weights / 8)


@given(
    completions=st.integers(64, 8192),
    longest=st.integers(16, 16_384),
    dtype=st.sampled_from(["int8", "fp8"]),
    layout=st.sampled_from(LAYOUTS),
    model=st.sampled_from(["0.5B", "1.5B", "7B"]),
)
def test_eight_bits_are_never_slower_and_more_gpus_never_slower(completions, longest, dtype, layout, model):
    def seconds(dtype, gpus):
        work = Workload(MODEL_SHAPES[model], completions, 8, longest, longest + 200, 1, True, 0.4, 1)
        return batch_time(work, dtype, layout, gpus)

    eight, sixteen, bf16 = seconds(dtype, 8), seconds(dtype, 16), seconds("bf16", 8)
    # Whole sequences are counted: a step more of them at a time may cost a step's worth.
    assert eight.decode <= bf16.decode * 1.01
    # Within one memory quantizing costs more than the copy that it shortens.
    assert (eight.update < bf16.update) == (layout == "two-nodes")
    assert eight.training == bf16.training
    assert sixteen.training == pytest.approx(eight.training / 2)
    assert sixteen.decode <= eight.decode * 1.01


def test_without_room_for_one_sequence():
    work = Workload(MODEL_SHAPES["32B"], 64, 8, 8192, 9216, 1, False, 0.3, 1)
    with pytest.raises(
        ValueError, match=r"keys and values of 9216 tokens do not fit beside the weights \(0 do\)"
    ):
        batch_time(work, "bf16", "one-node")


def test_overhead_of_a_step_is_that_of_the_papers_speedup():
    from qurl.roofline import expected_speedup

    overhead = ASSUMPTIONS["decode_overhead"].value
    for batch_size in (16, 64):
        step = {"batch_size": batch_size, "context": 2048, "overhead_seconds": overhead}
        assert 1.2 <= expected_speedup("7B", "H100-SXM", dtype="int8", **step) <= 1.3
    assert all(choice.source for choice in ASSUMPTIONS.values())


# Launch ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(tmp_path, request):
    """An experiment's run of the preset "paper", with accelerate's config written where its command looks."""
    spec = RunSpec(experiment=request.param, preset="paper")
    file = launch.config_file(tmp_path, request.param)
    file.parent.mkdir(parents=True)
    file.write_text(launch.config_text(request.param))
    return spec, tmp_path


@pytest.mark.parametrize("launched", EXPERIMENTS, indirect=True)
def test_accelerate_understands_config_and_command(launched, monkeypatch):
    """Through accelerate's own loader, parser, validation and environment, to the plugin that a process then makes."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    spec, root = launched
    assert load_config_from_file(str(launch.config_file(root, spec.experiment))).num_processes == GPUS
    words = launch.train_command(spec, root, root / "run")
    assert words[:2] == ["accelerate", "launch"]
    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
    assert (options.num_processes, options.mixed_precision, options.module) == (GPUS, "bf16", True)
    assert (options.training_script, options.training_script_args[0]) == ("qurl.cli", "train")
    assert options.use_fsdp == (spec.experiment != "gsm8k") and options.multi_gpu == (
        spec.experiment == "gsm8k"
    )
    if options.use_fsdp:
        for name, value in prepare_multi_gpu_env(options).items():
            if name.startswith("FSDP_"):
                monkeypatch.setenv(name, value)
        plugin = FullyShardedDataParallelPlugin()
        assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
        assert plugin.cpu_ram_efficient_loading is False


@pytest.mark.parametrize("launched", EXPERIMENTS, indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_train_command_makes_the_config_in_each_of_eight_processes(launched, layout, monkeypatch):
    """With `qurl train`'s own parser; only the number of processes is not this machine's."""
    from qurl.training import _parse

    monkeypatch.setattr(QuRLConfig, "world_size", GPUS)
    spec, root = launched
    words = launch.train_command(spec, root, root / "run", layout)
    run, config = _parse(words[words.index("train") + 1 :])
    work = workload(spec)
    assert config.generation_batch_size == work.completions
    assert config.generation_batch_size // config.num_generations * config.num_generations == work.completions
    assert (config.num_generations, config.max_completion_length) == (work.group, work.longest)
    assert config.optimizer_steps_per_batch * work.batches == config.max_steps
    assert run.model == spec.fields()["model"]
    if layout == "two-nodes":
        for name, value in launch.server_fields().items():
            assert getattr(config, name) == value
    else:
        assert config.vllm_mode == "colocate"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_server_command_goes_with_the_run(experiment):
    from qurl.cli import build_parser

    spec = RunSpec(experiment=experiment, preset="paper", dtype="fp8")
    words = launch.server_command(spec)
    options = build_parser().parse_args(words[1:])
    assert (options.model, options.dtype, options.transfer) == (spec.fields()["model"], "fp8", "nccl")
    assert (options.host, options.port) == (launch.SERVER_HOST, launch.SERVER_PORT)
    assert options.tensor_parallel_size * options.data_parallel_size == GPUS
    assert options.max_num_seqs * options.data_parallel_size == workload(spec).completions
    assert options.max_model_len == spec.fields()["vllm_max_model_length"]


def test_plan_table_shows_where_the_bottleneck_moves():
    """DAPO: on one node decoding in BF16 is as long as training, and INT8 halves it; with a server training leads."""
    table = launch.plan_table(RunSpec(experiment="dapo", preset="paper"))
    assert list(table.columns) == [(layout, dtype) for layout in LAYOUTS for dtype in ("bf16", "int8")]
    decode, training = table.loc[("decode", "s")], table.loc[("training", "s")]
    assert 0.45 < decode["one-node", "int8"] / decode["one-node", "bf16"] < 0.55
    assert decode["two-nodes", "bf16"] < training["two-nodes", "bf16"] / 4
    parts = ["prefill", "decode", "log-probs", "training", "weight update"]
    assert table.xs("s", level="unit").loc[parts].sum().tolist() == pytest.approx(
        table.loc[("a rollout batch", "s")].tolist()
    )
    of_bf16 = launch.plan_table(RunSpec(experiment="dapo", preset="paper", dtype="bf16"))
    assert of_bf16.columns.get_level_values("rollouts").unique().tolist() == ["bf16"]


def test_dry_run_prints_plans_that_a_shell_reads(tmp_path):
    lines = []
    tables = ["tab_dapo", "tab_deepscaler", "tab_gsm8k"]
    reproduce("paper", tables, 1, runs_dir=tmp_path / "of all", dry_run=True, report=lines.append)
    script = "\n".join(lines)
    assert not list((tmp_path / "of all").rglob("*"))
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    for experiment in EXPERIMENTS:
        assert f"# {experiment}: " in script
    # What writes accelerate's config, run as it stands.
    writes = [line for line in lines if line.startswith(("mkdir", "cat"))]
    subprocess.run(["bash", "-e"], input="\n".join(writes), text=True, check=True)
    store = RunStore(tmp_path / "of all")
    for experiment in EXPERIMENTS:
        assert launch.config_file(store.root, experiment).read_text() == launch.config_text(experiment)
    assert sum("qurl serve" in line for line in lines) == len(EXPERIMENTS)
    assert sum("--vllm_mode server" in line for line in lines) == len(EXPERIMENTS)


# Page and figure -------------------------------------------------------------------------------------------------


def test_page_shows_what_is_computed(root):
    """Tables of docs/scale.md against the functions that they come from."""
    text = (root / "docs" / "scale.md").read_text()
    tables = [launch.plan_table(RunSpec(experiment=name, preset="paper")) for name in ("dapo", "deepscaler")]

    def cells(row: str) -> list[float]:
        line = next(line for line in text.splitlines() if line.startswith(f"| {row}"))
        return [float(cell.strip(" *").replace(",", "")) for cell in line.split("|")[3:-1]]

    def expected(*parts: tuple[str, str]) -> list[float]:
        return [value for table in tables for value in sum(table.loc[part] for part in parts)]

    for row, parts in {
        "left for activations": [("left for activations", "GiB")],
        "engine: weights": [("engine: weights", "GiB")],
        "engine: keys and values": [("engine: keys and values", "GiB")],
        "sequences of full length": [("engine: of full length", "sequences")],
        "prefill and decode": [("prefill", "s"), ("decode", "s")],
        "log-probs and training": [("log-probs", "s"), ("training", "s")],
        "weight update": [("weight update", "s")],
        "**a rollout batch**": [("a rollout batch", "s")],
    }.items():
        unit = 1 if max(expected(*parts)) >= 100 else 0.1 if max(expected(*parts)) > 1 else 0.01
        assert cells(row) == pytest.approx(expected(*parts), abs=0.51 * unit), row
    for name in ("1.5B", "7B", "32B"):
        model = model_on_meta(MODEL_SHAPES[name])
        size, bf16 = (update_size(model, dtype, "server") for dtype in ("int8", "bf16"))
        numbers = [size.codes / 1e9, size.scales / 1e6, size.rest / 1e9, size.bytes / 1e9, bf16.bytes / 1e9]
        shown = [f"{number:.2f}" if place != 1 else f"{number:.1f}" for place, number in enumerate(numbers)]
        seconds = f"{size.bytes / 50e9:.2f} ({bf16.bytes / 50e9:.2f}) s"
        row = [name, f"{size.projections}, {size.others}", *shown, seconds]
        assert f"| {' | '.join(row)} |" in text
    colocated = [
        update_size(model_on_meta(DAPO.shape), dtype, "colocate").bytes for dtype in ("int8", "bf16")
    ]
    assert "{:.2f} GB in INT8, {:.2f} GB in BF16".format(*(size / 1e9 for size in colocated)) in text


@pytest.mark.parametrize(
    ("row", "changes", "gpus"),
    [
        ("1.5B, 8 + 8 GPUs", {"shape": MODEL_SHAPES["1.5B"]}, 8),
        ("7B", {}, 8),
        ("14B", {"shape": MODEL_SHAPES["14B"]}, 8),
        ("32B (training does not fit 8 GPUs; time as if it did)", {"shape": MODEL_SHAPES["32B"]}, 8),
        ("7B, up to 512 tokens", {"longest": 512}, 8),
        ("7B, up to 32,768 tokens", {"longest": 32_768, "limit": 34_816}, 8),
        ("7B, 32 + 32 GPUs", {}, 32),
        ("7B, 256 + 256 GPUs", {}, 256),
    ],
)
def test_page_shows_how_cost_grows(root, row, changes, gpus):
    """Rollouts, training and weight update of the last table of docs/scale.md."""
    lines = (root / "docs" / "scale.md").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"| {row} |") and "→" in line)
    work = replace(DAPO, **changes)
    bf16, int8 = (batch_time(work, dtype, "two-nodes", gpus) for dtype in ("bf16", "int8"))
    training = bf16.logps + bf16.training
    expected = (bf16.prefill + bf16.decode, int8.prefill + int8.decode, training, bf16.update, int8.update)
    shown = line.replace(",", "").replace("→", "|").split("|")[2:-1]
    for cell, seconds in zip(shown, expected, strict=True):
        decimals = len(cell.strip().partition(".")[2])
        assert float(cell) == pytest.approx(seconds, abs=0.51 * 10**-decimals)


def test_figure_has_a_line_for_each_part_and_dtype():
    import pandas as pd

    from qurl.plots.scale import scale_figure

    parts = [("decode", "bf16"), ("decode", "int8"), ("sync", "bf16"), ("sync", "int8"), ("training", "fp32")]
    measured = pd.DataFrame(
        {"parameters": parameters, "length": length, "part": part, "dtype": dtype, "seconds": length / 10}
        for parameters, length in ((10e6, 32), (30e6, 32), (30e6, 128), (90e6, 32))
        for part, dtype in parts
    )
    computed = pd.DataFrame(
        {"by": by, "x": x, "part": part, "dtype": dtype, "seconds": x}
        for by in ("parameters", "length", "gpus")
        for x in (8, 16)
        for part, dtype in parts
    )
    figure = scale_figure(measured, computed, "16 completions, somewhere")
    by_size, by_length, _, *rest = figure.axes
    assert [len(axis.lines) for axis in (by_size, by_length, *rest)] == [5] * 5
    assert by_size.lines[0].get_xdata().tolist() == [10e6, 30e6, 90e6]
    assert by_length.lines[0].get_xdata().tolist() == [32, 128]
    assert "Measured: 32 tokens" in by_size.get_title()
    assert all(axis.get_xlabel() and axis.get_yscale() == "log" for axis in (by_size, by_length, *rest))
