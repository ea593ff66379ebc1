"""Engines that share: a layer with other processes, and the GPU's memory with the training."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qurl.config import QuRLConfig
from qurl.rollout import RolloutEngine


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_share_one_engine(tmp_path):
    """Each gets its own completions; their log-probs are the policy's, so that no process has another's part."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=1,
        bos_token_id=None, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    policy = LlamaForCausalLM(config)
    policy.save_pretrained(tmp_path / "policy")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = str(Path(__file__).with_name("tensor_parallel.py"))
    done = subprocess.run(
        [*launcher, script, str(tmp_path / "policy"), str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in range(2):
        start, moved, back = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert start[0] != moved[0]
        # There and back in FP32 leaves rounding, far below a code.
        assert [len(ids) for ids in start[0]] == [len(ids) for ids in back[0]]
        for index, (ids, logps) in enumerate(zip(*start, strict=True)):
            prompt = [5 + 10 * rank + index, 6, 7]
            with torch.no_grad():
                logits = policy(torch.tensor([prompt + ids])).logits[0, 2:-1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert [logp for [logp] in logps] == pytest.approx(expected.tolist(), abs=0.3)


class Sleeper:
    """Notes what is asked of vLLM."""

    def __init__(self):
        self.calls = []

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def wake_up(self):
        self.calls.append("wake_up")


@pytest.fixture
def sleeper(tmp_path):
    """An engine around a vLLM that only notes."""
    engine = object.__new__(RolloutEngine)
    engine._llm, engine.log_path = Sleeper(), tmp_path / "log"
    engine.sleeps, engine._asleep, engine._unusable = True, False, None
    yield engine
    engine._llm = None


def test_sleep_frees_memory_once_and_the_next_call_takes_it_back(sleeper):
    sleeper.sleep()
    sleeper.sleep()
    assert sleeper._llm.calls == [("sleep", 1)]
    with pytest.raises(ValueError, match="prompt_ids"):
        sleeper.generate("text")
    assert sleeper._llm.calls[1:] == ["wake_up"]
    sleeper.sleep()
    with pytest.raises(ValueError, match="holds no pairs"):
        sleeper.sync(5)
    sleeper.wake()
    sleeper.wake()
    assert sleeper._llm.calls[1:] == ["wake_up", ("sleep", 1), "wake_up"]


def test_an_engine_that_cannot_sleep_stays_awake(sleeper):
    sleeper.sleeps = False
    sleeper.sleep()
    assert sleeper._llm.calls == []


def test_trainer_lets_its_engine_sleep_between_rollouts():
    from qurl.rollout.generation import QuantizedVLLMGeneration

    generation = object.__new__(QuantizedVLLMGeneration)
    order = []
    rollouts = SimpleNamespace(completion_ids=[[7]], logps=[[-0.1]])
    engine = SimpleNamespace(
        sample=lambda *_, **__: order.append("sample") or rollouts,
        sleep=lambda: order.append("sleep"),
        max_model_len=8,
    )
    generation._engines, generation.mode, generation.train_dtype = {"int8": engine}, "colocate", "int8"
    generation.dtype, generation._version, generation._synced = "int8", 1, {"int8": 1}
    generation._group, generation.max_completion_length, generation.temperature = None, 4, 1.0
    generation.enable_sleep_mode = True
    generation.generate([[5, 6]], None, 1)
    assert order == ["sample", "sleep"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_sleep_needs_a_gpu():
    with pytest.raises(ValueError, match="enable_sleep_mode=True needs a GPU"):
        RolloutEngine("tiny", enable_sleep_mode=True)
    with pytest.raises(ValueError, match="vllm_enable_sleep_mode=True needs a GPU"):
        QuRLConfig(vllm_enable_sleep_mode=True)


def test_sharing_a_layer_needs_processes():
    with pytest.raises(ValueError, match="torchrun --nproc_per_node=3"):
        RolloutEngine("tiny", tensor_parallel_size=3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_weights_survive_sleep_on_a_gpu(dtype):
    prompts = [[5, 6, 7, 8]] * 4
    with RolloutEngine("smollm2-135m", dtype, max_model_len=256, enable_sleep_mode=True) as engine:
        before = engine.generate(prompts, max_tokens=16, temperature=0.0)
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > awake + 2**30  # keys and values at least
        after = engine.generate(prompts, max_tokens=16, temperature=0.0)
        assert after.completion_ids == before.completion_ids
        engine.sleep()
        engine.load_checkpoint(engine.path)
        again = engine.generate(prompts, max_tokens=16, temperature=0.0)
        assert again.completion_ids == before.completion_ids


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL joins no two processes on one GPU")
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_weights_reach_a_server_through_nccl(dtype, monkeypatch):
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from qurl.models import resolve_model
    from qurl.rollout.served import ServedEngine
    from qurl.rollout.server import RolloutServer

    path = resolve_model("smollm2-135m")
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to("cuda:0")
    first = {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}
    second = {name: tensor * 1.01 for name, tensor in first.items()}
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", "1"
    )  # read by the server's process; this one has its GPUs already
    with RolloutServer(path, dtype, port=0, max_model_len=256, transfer="nccl") as server:
        engine = ServedEngine(
            path, dtype, code_bits=8, accelerator=Accelerator(), url=server.url, max_model_len=256,
            connect_seconds=10, call_seconds=120, transfer="auto", group_port=51216, seed=0,
        )  # fmt: skip
        answers = []
        for tensors in (first, second, first):
            engine.sync(tensors.items())
            answers.append(engine.sample([[5, 6, 7, 8]], max_tokens=16, temperature=0.0).completion_ids)
        assert answers[0] == answers[2] != answers[1]
        engine.close()
