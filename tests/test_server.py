"""A real vLLM server with quantized weights, and a trainer beside it: what it holds, what it answers, how it fails."""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback

from qurl.config import QuRLConfig
from qurl.experiments.scale import update_size
from qurl.models import resolve_model
from qurl.quantization import is_quantized_name, quantize, quantized_named_tensors
from qurl.rollout import RolloutEngine, RolloutError
from qurl.rollout.client import RolloutClient, ServerError, ServerLostError
from qurl.rollout.handover import weights_file
from qurl.rollout.served import ServedEngine
from qurl.rollout.server import RolloutServer, _cores_of, _session
from qurl.rollout.sync import digest
from qurl.training import RunArguments, train

pytestmark = pytest.mark.timeout(600)
SIZE = {"port": 0, "max_model_len": 64, "max_num_seqs": 64}


@pytest.fixture(scope="module")
def server():
    with RolloutServer("tiny", "int8", **SIZE) as server:
        yield server


@pytest.fixture(scope="module")
def weights():
    """The start weights, and others that differ in every matrix."""
    policy = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    first = {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    second = {
        name: tensor + 0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1
        else tensor
        for name, tensor in first.items()
    }
    return first, second


def engine_of(url, dtype="int8", folder=None, **changes):
    options = {
        "code_bits": 8,
        "max_model_len": 64,
        "connect_seconds": 5.0,
        "call_seconds": 60.0,
        "transfer": "auto",
        "group_port": 51216,
        "seed": 0,
    }
    return ServedEngine(
        folder or resolve_model("tiny"),
        dtype,
        accelerator=Accelerator(cpu=True),
        url=url,
        **options | changes,
    )


@pytest.fixture
def engine(server):
    engine = engine_of(server.url)
    yield engine
    engine.close()


def greedy(engine, prompts=None):
    rollouts = engine.sample(prompts or [[5 + i, 6, 7, 8] for i in range(16)], max_tokens=8, temperature=0.0)
    return rollouts.completion_ids, rollouts.logps


# --- what it holds and answers ----------------------------------------------------------------------------------------


def test_weights_there_and_back_give_the_first_answers_exactly(engine, weights):
    first, second = weights
    answers, reports = [], []
    for tensors in (first, second, first):
        reports.append(engine.sync(tensors.items()))
        answers.append(greedy(engine))
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]
    assert reports[0].codes_changed is None
    assert reports[1].codes_changed == reports[2].codes_changed > 0.3


def test_live_codes_are_those_of_the_reference(engine, weights):
    first, second = weights
    engine.sync(second.items())
    sums = {
        name: digest(*quantize(tensor, "int8")) for name, tensor in second.items() if is_quantized_name(name)
    }
    assert len(sums) == 28
    client = engine._client
    client.workers("qurl_confirm", engine._weights, sums)
    name = next(iter(sums))
    with pytest.raises(ServerError, match=f"does not hold the codes that were sent for {name}"):
        client.workers("qurl_confirm", engine._weights, {name: digest(*quantize(first[name], "int8"))})


def test_answers_like_an_engine_of_this_process(engine, weights):
    engine.sync(weights[1].items())
    with RolloutEngine("tiny", "int8", max_model_len=64, load_weights=False) as own:
        own.sync(weights[1].items())
        rollouts = own.generate([[5 + i, 6, 7, 8] for i in range(16)], max_tokens=8, temperature=0.0)
    ids, logps = greedy(engine)
    assert ids == rollouts.completion_ids
    # Batches are formed otherwise, and BF16 activations are rounded otherwise with them.
    for ours, theirs in zip(logps, rollouts.logps, strict=True):
        assert ours == pytest.approx(theirs, abs=0.05)


def test_an_update_is_codes_and_scales(engine, weights):
    first = weights[0]
    projections = {name: tensor for name, tensor in first.items() if is_quantized_name(name)}
    rest = sum(tensor.numel() for name, tensor in first.items() if name not in projections)
    codes = sum(tensor.numel() for tensor in projections.values())
    scales = sum(4 * len(tensor) for tensor in projections.values())
    report = engine.sync(first.items())
    assert report.bytes == codes + scales + 2 * rest  # BF16 would take 2 · (codes + rest)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resolve_model("tiny")))
    assert report.bytes == update_size(policy, "int8", "server").bytes
    assert (report.quantized_layers, report.full_precision_layers) == (16, 0)


def test_sampled_logps_are_those_of_the_policy(engine, weights):
    """At temperature 1, so that a wrong temperature or another sampling default of the server would show."""
    engine.sync(weights[0].items())
    policy = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    rollouts = engine.sample([[5, 6, 7, 8]] * 32, max_tokens=8, temperature=1.0)
    assert len({tuple(ids) for ids in rollouts.completion_ids}) > 8
    for ids, logps in zip(rollouts.completion_ids, rollouts.logps, strict=True):
        with torch.no_grad():
            logits = policy(torch.tensor([[5, 6, 7, 8, *ids]])).logits[0, 3:-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert logps == pytest.approx(expected.tolist(), abs=0.3)


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_before_a_sync_nothing_is_sampled(engine):
    with pytest.raises(RolloutError, match="its last sync was not finished"):
        greedy(engine)


def load(client, handover, weights, tensors):
    """As a trainer would that has got past the lock."""
    client.workers("qurl_begin", weights)
    with weights_file(handover, tensors.items()) as (name, sha256):
        client.workers("qurl_load_file", name, sha256)


def test_a_second_trainer_is_refused(engine, server, weights):
    with pytest.raises(ServerError, match="follows another trainer's policy"):
        engine_of(server.url)
    engine.close()
    other = engine_of(server.url)
    other.sync(weights[0].items())
    other.close()


def test_weights_of_another_trainer_are_found_out(engine, server, weights):
    engine.sync(weights[0].items())
    client, own = engine._client, engine._weights
    codes = dict(quantized_named_tensors(weights[1].items(), "int8"))
    load(client, server.handover, "other", codes)
    with pytest.raises(ServerLostError, match="its last sync failed"):
        greedy(engine)
    with pytest.raises(ServerError, match="weights of another trainer meanwhile"):
        client.workers("qurl_confirm", own, {})
    client.workers("qurl_confirm", "other", {})
    with pytest.raises(ServerLostError, match="given the weights of another trainer"):
        greedy(engine)
    engine.reconnect()
    engine.sync(weights[0].items())
    greedy(engine)


def test_sampling_stops_at_the_trainers_end_tokens_alone(engine, weights):
    """`tiny` ends with token 1: where the trainer calls another one the end, it is a token like others."""
    engine.sync(weights[0].items())
    engine._config["eos_token_id"] = [9]
    rollouts = engine.sample([[5, 6, 7, 8]] * 32, max_tokens=8, temperature=1.0)
    ended = [
        ids
        for ids, reason in zip(rollouts.completion_ids, rollouts.finish_reasons, strict=True)
        if reason == "stop"
    ]
    assert ended and all(ids[-1] == 9 and 9 not in ids[:-1] for ids in ended)
    assert any(1 in ids[:-1] for ids in rollouts.completion_ids)


def test_weights_that_are_not_those_that_were_sent_are_not_used(engine, server, weights):
    engine.sync(weights[0].items())
    client, file = engine._client, server.handover / f"{0:032x}.safetensors"
    save_file({"x": torch.zeros(1)}, file)
    client.workers("qurl_begin", "spoilt")
    with pytest.raises(ServerError, match="their checksum differs"):
        client.workers("qurl_load_file", file.name, "0" * 64)
    with pytest.raises(ServerLostError, match="its last sync failed"):
        greedy(engine)
    engine.sync(weights[0].items())
    assert not list(server.handover.glob("*.safetensors"))  # what was left there is gone, too


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "weights.bin", "link.safetensors"])
def test_only_files_of_its_own_folder_are_read(engine, server, tmp_path, name):
    save_file({"x": torch.zeros(1)}, tmp_path / "real.safetensors")
    link = server.handover / "link.safetensors"
    link.symlink_to(tmp_path / "real.safetensors")
    try:
        with pytest.raises(ServerError, match=r"is no file in the folder|symbolic links"):
            engine._client.workers("qurl_load_file", name, "0" * 64)
    finally:
        link.unlink()


def test_folder_of_weights_is_for_this_user_alone(server):
    assert server.handover.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "fp8"}, "rollout_dtype='int8' where this trainer has 'fp8': use qurl serve --dtype fp8"),
        ({"code_bits": 4}, "rollout_code_bits=8 where this trainer has 4: use qurl serve --dtype int8 --code-bits 4"),
        ({"transfer": "nccl"}, "started with --transfer file"),
        ({"max_model_len": 128}, "use qurl serve --max-model-len 128, or at most 64 here"),
        ({"url": "http://127.0.0.1:9", "connect_seconds": 0.1}, r"no vLLM server answers at .*:9 .* qurl serve"),
    ],
)  # fmt: skip
def test_another_server_than_the_trainer_needs(server, changes, message):
    with pytest.raises(ServerError, match=message):
        engine_of(**{"url": server.url} | changes)


def test_another_model(server, tmp_path):
    config = json.loads((resolve_model("tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(ServerError, match="its config has num_hidden_layers=4 instead of 5"):
        engine_of(server.url, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logprobs_mode", "raw_logprobs", "logprobs_mode='raw_logprobs'"),
        ("versions", {"vllm": "0.1", "qurl": "0.1.0"}, "vLLM='0.1'"),
        ("handover", "/nowhere", "runs on another machine"),
    ],
)
def test_a_server_of_another_kind(engine, monkeypatch, name, value, message):
    state = {**engine._client.workers("qurl_state")[0], name: value}
    monkeypatch.setattr(engine._client, "workers", lambda *_: [state])
    with pytest.raises(ServerError, match=message):
        engine.reconnect()


def test_parameters_that_are_not_finite_do_not_reach_the_server(engine, weights):
    engine.sync(weights[0].items())
    held = engine._weights
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=name):
        engine.sync({**weights[0], name: torch.full_like(weights[0][name], float("nan"))}.items())
    engine._client.workers("qurl_require", held)  # the server still has what it had
    with pytest.raises(RolloutError, match="sync again"):
        greedy(engine)


def test_parameters_that_are_left_out(engine, weights):
    with pytest.raises(RolloutError, match="left out 1 parameters"):
        engine.sync(list(weights[0].items())[:-1])


# --- servers that fail ------------------------------------------------------------------------------------------------


@contextmanager
def answering(status: int, body: bytes, headers: dict | None = None):
    """A server that has this to say to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            for item in (headers or {}).items():
                self.send_header(*item)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()


def test_a_stock_server_is_named_as_such():
    with (
        answering(404, b"") as url,
        pytest.raises(ServerError, match=r"not started by qurl serve|no vLLM server"),
    ):
        engine_of(url, connect_seconds=0.1)


CHOICE = {
    "index": 0,
    "prompt_token_ids": [5],
    "token_ids": [5],
    "logprobs": {"token_logprobs": [-0.5]},
    "finish_reason": "length",
}


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"index": 1},
        {"prompt_token_ids": [1, 5]},
        {"token_ids": []},
        {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5]}},
        {"token_ids": [10**9]},
        {"token_ids": [-5]},
        {"token_ids": ["5"]},
        {"token_ids": [5] * 9, "logprobs": {"token_logprobs": [-0.5] * 9}},
        {"logprobs": None},
        {"logprobs": {"token_logprobs": [None]}},
        {"logprobs": {"token_logprobs": [2.0]}},
        {"finish_reason": None},
    ],
)
def test_answers_that_are_none(monkeypatch, choice):
    client = object.__new__(RolloutClient)
    client.url, client.model, client.call_seconds = "http://127.0.0.1:9", "m", 1.0
    answer = {"choices": [CHOICE | choice] if choice else []}
    monkeypatch.setattr(client, "_post", lambda *_, **__: answer)
    with pytest.raises(ServerError, match="does not answer /v1/completions as vLLM does"):
        client.complete([[5]], max_tokens=8, vocabulary=64)
    answer["choices"] = [CHOICE]
    assert client.complete([[5]], max_tokens=8, vocabulary=64) == [CHOICE]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"data": []}'])
def test_what_is_no_server_of_vllm(body):
    with answering(200, body) as url, pytest.raises(ServerError, match="is no vLLM server"):
        engine_of(url, connect_seconds=0.1)


def test_a_redirect_is_not_followed(server):
    with (
        answering(307, b"", {"Location": f"{server.url}/health"}) as url,
        pytest.raises(ServerError, match="status 307"),
    ):
        RolloutClient(url, connect_seconds=0.1, call_seconds=5, group_port=0)


def test_a_proxy_of_the_environment_is_not_used(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    assert engine_of(server.url).max_model_len == 64


def test_a_server_that_hangs(server, engine, weights):
    engine.sync(weights[0].items())
    engine._client.call_seconds = 3.0
    processes = [server._process, *psutil.Process(server._process.pid).children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ServerError, match="has not answered /collective_rpc for 3 s and seems to hang"):
            greedy(engine)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
    engine._client.call_seconds = 60.0
    greedy(engine)


class At(TrainerCallback):
    """Do something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.action()


def run_with(url, folder, *callbacks, **changes):
    fields = {
        "max_steps": 8,
        "save_steps": 2,
        "per_device_train_batch_size": 16,
        "steps_per_generation": 2,
        "num_generations": 8,
        "max_completion_length": 8,
        "vllm_max_model_length": 32,
        "learning_rate": 1e-4,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 5.0,
    }
    config = QuRLConfig(output_dir=str(folder), **fields | changes)
    return train(RunArguments(eval_k=0), config, callbacks=list(callbacks))


def test_training_goes_on_where_the_server_comes_back_with_old_weights(tmp_path, caplog):
    """After a restart it holds its start checkpoint again, and would answer as if nothing had happened."""
    servers = [RolloutServer("tiny", "int8", **SIZE)]

    def restart():
        servers[0].close()
        servers.append(RolloutServer("tiny", "int8", **SIZE | {"port": servers[0].port}))

    try:
        result = run_with(servers[0].url, tmp_path / "run", At(4, restart))
        assert result["steps"] == 8
        assert len(servers) == 2
        assert result["engine"]["server"] == servers[0].url
        kl = [float(row["mismatch/kl_k3"]) for row in metrics(tmp_path / "run") if row.get("mismatch/kl_k3")]
        assert len(kl) == 4
        assert max(kl) < 0.01
        # It dies in the middle, and nobody starts it again.
        with pytest.raises(ServerLostError, match=f"no vLLM server answers at {servers[1].url}"):
            run_with(servers[1].url, tmp_path / "lost", At(4, lambda: servers[1]._process.kill()))
        assert (tmp_path / "lost" / "checkpoint-4" / "trainer_state.json").is_file()
        assert not (tmp_path / "lost" / "result.json").exists()
    finally:
        for server in servers:
            server.close()
            assert _session(server._process.pid) == []


def test_two_training_processes_share_a_server(server, tmp_path):
    """Each gets the completions of its own prompts: their log-probs are those of the policy on these tokens."""
    options = {
        "max_steps": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2, "num_generations": 8,
        "vllm_mode": "server", "vllm_server_base_url": server.url, "eval_k": 0, "output_dir": tmp_path / "run",
    }  # fmt: skip
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *("-m", "qurl.cli", "train"),
            *(word for name, value in options.items() for word in (f"--{name}", str(value))),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    rows = metrics(tmp_path / "run")
    assert [float(row["mismatch/kl_k3"]) < 0.01 for row in rows if row.get("mismatch/kl_k3")] == [True] * 2
    assert all(0.9 < float(row["mismatch/w_mean"]) < 1.1 for row in rows if row.get("mismatch/w_mean"))


def metrics(folder: Path):
    import csv

    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


# --- through NCCL, whose calls can be looked at without a GPU ---------------------------------------------------------


@pytest.fixture
def announced(engine, monkeypatch):
    """An engine whose server takes NCCL, and a list of what was done: (announced, received) or a worker's method."""
    calls = []

    def update(metadata, named_tensors):
        received = [
            (name, str(t.dtype).removeprefix("torch."), list(t.shape), t) for name, t in named_tensors
        ]
        calls.append((metadata, received))

    monkeypatch.setitem(engine._state, "transfer", "nccl")
    monkeypatch.setattr(engine._client, "update_named_params", update)
    monkeypatch.setattr(engine._client, "workers", lambda method, *_: calls.append(method) or [{}])
    monkeypatch.setattr(engine._client, "post", lambda path: calls.append(path) or {})
    monkeypatch.setattr(engine, "_complete", lambda *_, **__: None)
    monkeypatch.setattr(engine, "_check_layers", lambda _: None)
    return engine, calls


def test_nccl_is_told_what_comes_and_gets_codes_and_scales(announced, weights):
    engine, calls = announced
    report = engine.sync(weights[0].items())
    assert [call for call in calls if isinstance(call, str)] == [
        "/pause?mode=abort", "qurl_begin", "qurl_confirm", "/reset_prefix_cache", "/resume", "qurl_linear_layers"
    ]  # fmt: skip
    metadata, received = calls[2]
    assert [(name, dtype, shape) for name, dtype, shape, _ in received] == metadata
    assert sum(tensor.nbytes for *_, tensor in received) == report.bytes
    sent = {name: tensor for name, *_, tensor in received}
    name = "model.layers.0.mlp.up_proj.weight"
    codes, scale = quantize(weights[0][name], "int8")
    assert torch.equal(sent[name], codes) and torch.equal(sent[name + "_scale"], scale)
    assert sent["model.norm.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("fault", ["nan", "order"])
def test_nccl_is_given_all_that_was_announced_and_nothing_is_confirmed(announced, weights, fault):
    """A server in the middle of receiving would wait for ever, and its trainer with it."""
    engine, calls = announced
    tensors = dict(weights[0])
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "nan":
        tensors[name] = torch.full_like(tensors[name], float("nan"))
    else:
        tensors = {name: tensors.pop(name), **tensors}
    with pytest.raises(
        (ValueError, RolloutError), match=name if fault == "nan" else "was announced to the server"
    ):
        engine.sync(tensors.items())
    metadata, received = calls[2]
    assert [(name, dtype, shape) for name, dtype, shape, _ in received] == metadata
    assert "qurl_confirm" not in calls and calls[-1] == "/resume"
    with pytest.raises(RolloutError, match="sync again"):
        greedy(engine)


# --- starting and stopping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int9"}, "dtype='int9'"),
        ({"dtype": "bf16", "code_bits": 4}, "code_bits=4 needs dtype='int8'"),
        ({"host": "0.0.0.0"}, "host='0.0.0.0' is not possible with transfer='file'"),
        ({"host": "no.such.host.invalid"}, "is no address"),
        ({"host": "127.0.0.1:8000"}, "is no address"),
        ({"host": None}, "host=None"),
        ({"transfer": "nccl"}, "without a GPU"),
        ({"port": 70000}, "port=70000"),
        ({"max_model_len": 100_000}, "use at most 512"),
        ({"tensor_parallel_size": 2}, "does not divide the 3 attention heads"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization=2"),
    ],
)
def test_what_is_not_possible_is_said_before_anything_starts(options, message):
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        RolloutServer("tiny", **options)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged (it is no JSON object)"),
        ('{"model_type": "gpt2", "n_head": 12}', "only dense decoder-only text models"),
        ('{"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 8}', "set max_model_len"),
    ],
)
def test_a_model_that_cannot_be_served(tmp_path, config, message):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=re.escape(message)):
        RolloutServer(tmp_path, port=0)


def test_a_port_that_is_taken(server):
    with pytest.raises(ValueError, match=f"port={server.port} at host='127.0.0.1' is not free"):
        RolloutServer("tiny", **SIZE | {"port": server.port})


def test_command_stops_in_order_when_told_and_when_killed(tmp_path):
    """SIGTERM to the command; then a kill that leaves it no chance, after which its server ends all the same."""
    for number, status in ((signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)):
        command = [
            sys.executable,
            "-m",
            "qurl.cli",
            "serve",
            "--model",
            "tiny",
            "--port",
            "0",
            "--max-model-len",
            "32",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.startswith("Ready after"):
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.send_signal(number)
        assert process.wait(60) == status
        _, alive = psutil.wait_procs(family, timeout=60)
        assert alive == []
        process.stdout.close()


def test_cores_are_shared_among_the_processes_of_a_server(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    assert _cores_of(1) == {}
    assert _cores_of(2) == {"VLLM_CPU_OMP_THREADS_BIND": "0,2,4|1,3"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7})
    assert _cores_of(3) == {"VLLM_CPU_OMP_THREADS_BIND": "7|7|7"}


# --- several processes of a server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory):
    """A random model whose heads two processes can share; `tiny` has three."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=1,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model") / "four_heads"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("size", ["data_parallel_size", "tensor_parallel_size"])
def test_two_processes_of_a_server_agree(four_heads, size):
    policy = AutoModelForCausalLM.from_pretrained(four_heads, dtype=torch.float32)
    first = {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}
    second = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in first.items()}
    with RolloutServer(four_heads, "int8", **SIZE, **{size: 2}) as server:
        engine = engine_of(server.url, folder=four_heads)
        assert engine.description["processes"] == 2
        answers = []
        for tensors in (first, second, first):
            engine.sync(tensors.items())
            # The same prompt again and again: every replica answers some of them.
            ids, _ = greedy(engine, [[5, 6, 7, 8]] * 32)
            assert len({tuple(one) for one in ids}) == 1
            answers.append(ids)
        # And none draws what another does.
        drawn = engine.sample([[5, 6, 7, 8]] * 32, max_tokens=12, temperature=1.0).completion_ids
        assert len({tuple(ids) for ids in drawn}) == 32
        assert answers[0] == answers[2] != answers[1]
    with RolloutEngine(four_heads, "int8", max_model_len=64, load_weights=False) as own:
        own.sync(second.items())
        rollouts = own.generate([[5, 6, 7, 8]], max_tokens=8, temperature=0.0)
    # Two processes add the halves of a product in another order, so that a close choice may fall otherwise.
    same = [a == b for a, b in zip(answers[1][0], rollouts.completion_ids[0], strict=True)]
    assert all(same) if size == "data_parallel_size" else same[0]
