"""The engine against independent references: a fresh vLLM that loaded an exported checkpoint, and transformers."""

import copy
import logging
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qurl.quantization import export_checkpoint, is_quantized_name, quantize

pytest.importorskip("vllm", reason="needs vLLM: pip install 'qurl[cpu]'")
from qurl.rollout import RolloutEngine, RolloutError
from qurl.rollout.engine import _environment
from qurl.rollout.log import new_log_path, output_to

LENGTH = 320
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 515,  # no multiple of a kernel's block
    "max_position_embeddings": 512,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}
# Tied head, no biases; untied head, biases on q, k and v; norms of q and k; norms of 1 + weight and GeGLU; caps on
# logits and sliding windows.
ARCHITECTURES = {
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2-untied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SHAPE)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, query_pre_attn_scalar=32)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, query_pre_attn_scalar=32)),
}
# The first two cover every branch of ours; of the others INT8 alone is quick enough for each run of the tests.
CASES = [
    pytest.param(
        dtype,
        architecture,
        marks=[] if index < 2 or dtype == "int8" else pytest.mark.slow,
        id=f"{dtype}-{architecture}",
    )
    for dtype in ("int8", "fp8", "bf16", "fp32")
    for index, architecture in enumerate(ARCHITECTURES)
]
PROMPTS = [[1, 5, 9, 200, 33], [1, 400], [1, *list(range(10, 270))]]


def random_policy(architecture: str, seed: int):
    """A policy whose every parameter (norms and biases too) depends on ``seed``, and whose outputs are not uniform."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture]()
    # Gemma multiplies embeddings by √hidden_size: without this the tied head would only repeat the last token.
    embedding = 0.3 / SHAPE["hidden_size"] ** 0.5 if architecture.startswith("gemma") else 0.3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (embedding if "embed" in name else 0.12))
    return model.to(torch.bfloat16).eval()


def greedy(engine):
    rollouts = engine.generate(PROMPTS, max_tokens=24, temperature=0.0, ignore_eos=True)
    return rollouts.completion_ids, rollouts.logps


def greedy_of_fresh_vllm(folder, dtype, log):
    """A new engine with none of ours between the checkpoint and the weights: vLLM's own loader."""
    from vllm import LLM, SamplingParams

    with output_to(log), _environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"):
        llm = LLM(
            str(folder),
            dtype="float32" if dtype == "fp32" else "bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=LENGTH,
            max_num_seqs=64,
            kv_cache_memory_bytes=1 << 26,
            logprobs_mode="processed_logprobs",
            worker_extension_cls="qurl.rollout.worker.RolloutWorker",
        )
        llm.llm_engine.engine_core._finalizer.detach()  # it would end the process groups of the other engines
        llm.collective_rpc("qurl_use_fast_ops", args=(0,))  # the same arithmetic around the products
        parameters = SamplingParams(
            max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], parameters, use_tqdm=False)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    logps = [
        [position[token].logprob for token, position in zip(row, output.outputs[0].logprobs, strict=True)]
        for row, output in zip(ids, outputs, strict=True)
    ]
    return ids, logps


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Per architecture the folder of W0, and W0 and W1 in memory."""
    made = {}
    for architecture in ARCHITECTURES:
        w0, w1 = random_policy(architecture, 0), random_policy(architecture, 1)
        folder = tmp_path_factory.mktemp(architecture)
        w0.save_pretrained(folder)
        made[architecture] = folder, w0, w1
    return made


@pytest.fixture(scope="module")
def int8_engine(policies):
    with RolloutEngine(
        policies["qwen2-untied"][0], "int8", max_model_len=LENGTH, max_num_seqs=8, track_codes=True
    ) as engine:
        yield engine


@pytest.mark.parametrize(("dtype", "architecture"), CASES)
def test_synced_engine_equals_a_fresh_one(policies, dtype, architecture, tmp_path):
    """Cases E01, E02: W0 → W1 → W0, with a prompt of several cache blocks that stays cached between the syncs."""
    folder, w0, w1 = policies[architecture]
    with RolloutEngine(folder, dtype, max_model_len=LENGTH, max_num_seqs=64) as engine:
        first = greedy(engine)
        assert greedy(engine) == first  # now from the prefix cache
        report = engine.sync(w1.named_parameters())
        second = greedy(engine)
        if dtype in ("int8", "fp8"):
            assert (report.quantized_layers, report.full_precision_layers) == (8, 0)
            for name, weight in w1.named_parameters():
                if is_quantized_name(name):
                    codes, scale = engine.codes_and_scale(name)
                    expected = quantize(weight, dtype)
                    assert torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8)), name
                    assert torch.equal(scale, expected.scale), name
        engine.sync(w0.named_parameters())
        third = greedy(engine)
    assert third == first
    assert second != first

    fresh = tmp_path / "w1"
    if dtype in ("int8", "fp8"):
        export_checkpoint(w1, fresh, dtype)
    else:
        w1.save_pretrained(fresh)
    assert greedy_of_fresh_vllm(fresh, dtype, tmp_path / "log") == second


@pytest.mark.parametrize(
    ("architecture", "temperature"),
    [("llama-tied", 0.6), *((architecture, 1.0) for architecture in ARCHITECTURES)],
)
def test_log_probs_are_those_of_transformers_after_temperature(policies, architecture, temperature):
    """Cases E06, E08: the engine's log-probs of its samples, against FP32 transformers on the very same ids."""
    folder, *_ = policies[architecture]
    # transformers' default attention leaves out the soft cap of Gemma 2.
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with RolloutEngine(folder, "fp32", max_model_len=LENGTH, max_num_seqs=8) as engine:
        rollouts = engine.generate(PROMPTS, n=2, max_tokens=12, temperature=temperature)
        scored = engine.score(PROMPTS)
    prompts = [ids for ids in PROMPTS for _ in range(2)]
    assert len(rollouts.completion_ids) == 6
    for prompt, completion, logps in zip(prompts, rollouts.completion_ids, rollouts.logps, strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logps), expected, atol=2e-4, rtol=0)
    for prompt, logps in zip(PROMPTS, scored, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logps), expected, atol=2e-4, rtol=0)


def test_a_failed_sync_is_never_sampled_from(policies, int8_engine):
    """A weight that is not finite in the middle of a sync, then missing parameters; each time a good sync mends it."""
    _, w0, w1 = policies["qwen2-untied"]
    int8_engine.sync(w0.named_parameters())
    before = greedy(int8_engine)

    broken = copy.deepcopy(w1)
    name = "model.layers.1.self_attn.k_proj.weight"
    with torch.no_grad():
        broken.get_parameter(name)[3, 5] = float("nan")
    with pytest.raises(ValueError, match=name):
        int8_engine.sync(broken.named_parameters())
    with pytest.raises(RolloutError, match=r"refuses to generate.*sync again"):
        int8_engine.generate(PROMPTS)
    int8_engine.sync(w0.named_parameters())
    assert greedy(int8_engine) == before

    # Tensors that are not quantized are looked at as well: bias, norm, embedding.
    for name, value in (
        ("model.layers.1.self_attn.k_proj.bias", float("inf")),
        ("model.layers.0.input_layernorm.weight", float("nan")),
        ("model.embed_tokens.weight", float("-inf")),
    ):
        broken = copy.deepcopy(w1)
        with torch.no_grad():
            broken.get_parameter(name).view(-1)[-1] = value
        with pytest.raises(ValueError, match=f"parameter {name} holds NaN or infinity"):
            int8_engine.sync(broken.named_parameters())
        with pytest.raises(RolloutError, match="refuses"):
            int8_engine.generate(PROMPTS)

    incomplete = [(n, p) for n, p in w1.named_parameters() if "layers.0.mlp.up_proj" not in n]
    with pytest.raises(RolloutError, match=r"left out 1 parameters \(model.layers.0.mlp.up_proj.weight"):
        int8_engine.sync(incomplete)
    with pytest.raises(RolloutError, match="refuses"):
        int8_engine.score(PROMPTS)

    def dies_half_way():
        yield from list(w1.named_parameters())[:9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        int8_engine.sync(dies_half_way())
    with pytest.raises(RolloutError, match="refuses"):
        int8_engine.generate(PROMPTS)
    int8_engine.sync(w0.named_parameters())
    assert greedy(int8_engine) == before


@pytest.mark.parametrize(
    "fault", [OSError("disk gone\nat sector 7"), RuntimeError("all-gather"), KeyError("layer")]
)
def test_an_error_of_the_callers_iterator_is_not_vllms(policies, int8_engine, fault):
    """A trainer that gathers parameters while it yields them finds its own exception, not one about vLLM's log."""
    _, w0, _ = policies["qwen2-untied"]

    def dies_half_way():
        yield from list(w0.named_parameters())[:9]
        raise fault

    with pytest.raises(type(fault)) as raised:
        int8_engine.sync(dies_half_way())
    assert raised.value is fault
    with pytest.raises(RolloutError) as refused:
        int8_engine.generate(PROMPTS)
    first_line = str(fault).splitlines()[0]
    assert str(refused.value) == (
        f"This engine refuses to generate: its last sync failed ({type(fault).__name__}: {first_line}): sync again."
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "named_params is a NoneType and holds no pairs: pass policy.named_parameters()"),
        (torch.nn.Linear(2, 2), "named_params is a Linear and holds no pairs"),
        (
            torch.nn.Linear(2, 2).parameters(),
            "named_params holds a Parameter where a pair of name and tensor",
        ),
        (["model.norm.weight"], "named_params holds a str where a pair"),
    ],
)
def test_what_is_no_stream_of_parameters_is_refused(int8_engine, given, sentence):
    with pytest.raises(ValueError, match=sentence):
        int8_engine.sync(given)


def test_an_engine_recovers_from_weights_that_overflow(policies):
    """Finite weights whose products are not: NaN reaches the cache of keys and values, and must not stay there."""
    folder, w0, w1 = policies["qwen2-untied"]
    huge = copy.deepcopy(w1)
    with torch.no_grad():
        for layer in huge.model.layers:
            layer.self_attn.v_proj.weight.fill_(3e38)
    with RolloutEngine(folder, "bf16", max_model_len=LENGTH, max_num_seqs=4) as engine:
        expected, scores = greedy(engine), engine.score(PROMPTS)
        engine.sync(huge.named_parameters(), check=False)
        with pytest.raises(RolloutError, match="NaN log-probs"):
            engine.score(PROMPTS)
        with pytest.raises(RolloutError, match="refuses to generate: it returned NaN log-probs"):
            engine.generate(PROMPTS)
        engine.sync(huge.named_parameters(), check=False)
        with pytest.raises(RolloutError, match="NaN log-probs"):
            greedy(engine)
        with pytest.raises(RolloutError, match="NaN log-probs"):
            engine.sync(huge.named_parameters())
        engine.sync(w0.named_parameters())
        assert (greedy(engine), engine.score(PROMPTS)) == (expected, scores)


def test_calls_from_two_threads_take_turns(policies, int8_engine):
    _, w0, _ = policies["qwen2-untied"]
    int8_engine.sync(w0.named_parameters())
    expected = greedy(int8_engine)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: greedy(int8_engine), range(8))) == [expected] * 8


def test_the_check_after_a_sync_finds_wrong_weights(policies, int8_engine):
    """Codes flipped, and scales spoiled, behind the engine's back."""
    _, w0, w1 = policies["qwen2-untied"]
    int8_engine.sync(w0.named_parameters())
    name = "model.layers.0.self_attn.v_proj.weight"
    right = quantize(w0.get_parameter(name), "int8")
    assert int8_engine._call("qurl_mismatched", {name: right}) == []
    codes = right.codes.clone()
    codes[7, 7] ^= 1
    assert int8_engine._call("qurl_mismatched", {name: (codes, right.scale)}) == [name]
    other = quantize(w1.get_parameter(name), "int8")
    assert int8_engine._call("qurl_mismatched", {name: (right.codes, other.scale)}) == [name]


NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda p: p | {NAME: torch.cat([p[NAME], p[NAME]])},
            r"k_proj.weight has shape \(128, 128\), but the model's is",
        ),
        (
            lambda p: p | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(128)},
            "o_proj.bias is not one of the model's",
        ),
        (
            lambda p: p | {"model.norm.weight": torch.ones(128, dtype=torch.int64)},
            "model.norm.weight is not a floating",
        ),
        (
            lambda p: [*p.items(), ("model.norm.weight", p["model.norm.weight"])],
            "model.norm.weight comes twice",
        ),
        (
            lambda p: p | {"model.norm.weight": torch.ones(128, device="meta")},
            "model.norm.weight is not a floating",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused(policies, int8_engine, change, sentence):
    """vLLM would cut surplus rows off, skip unknown names and take one of two in silence."""
    _, w0, _ = policies["qwen2-untied"]
    changed = change(dict(w0.named_parameters()))
    with pytest.raises(ValueError, match=sentence):
        int8_engine.sync(changed)
    with pytest.raises(RolloutError, match="refuses"):
        int8_engine.generate([[1]])
    int8_engine.sync(dict(w0.named_parameters()))


def test_a_tied_head_must_equal_the_embedding(policies):
    folder, w0, _ = policies["llama-tied"]
    parameters = dict(w0.named_parameters())
    embedding = parameters["model.embed_tokens.weight"]
    with RolloutEngine(folder, "bf16", max_model_len=LENGTH, max_num_seqs=4) as engine:
        expected = greedy(engine)
        engine.sync(parameters | {"lm_head.weight": embedding.clone()})
        assert greedy(engine) == expected
        with pytest.raises(ValueError, match=r"lm_head.weight differs from the embedding"):
            engine.sync(parameters | {"lm_head.weight": 3 * embedding})


def test_the_callers_random_numbers_are_its_own(policies, int8_engine):
    """A trainer seeds at will: rollouts neither repeat with it nor change its stream."""
    folder, w0, _ = policies["qwen2-untied"]
    int8_engine.sync(w0.named_parameters())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = int8_engine.generate([[1, 5]] * 4, max_tokens=16).completion_ids
    with RolloutEngine(folder, "bf16", max_model_len=64, max_num_seqs=2):
        pass
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(5)
    assert int8_engine.generate([[1, 5]] * 4, max_tokens=16).completion_ids != first


def test_share_of_codes_changed(policies, int8_engine):
    _, w0, _ = policies["qwen2-untied"]
    int8_engine.sync(w0.named_parameters())
    moved = copy.deepcopy(w0)
    weight = moved.get_parameter("model.layers.0.self_attn.q_proj.weight")
    with torch.no_grad():
        weight[:64] = -weight[:64]
    nonzero = (quantize(weight[:64], "int8").codes != 0).sum().item()
    total = sum(p.numel() for n, p in w0.named_parameters() if is_quantized_name(n))
    assert int8_engine.sync(moved.named_parameters()).codes_changed == pytest.approx(nonzero / total)
    assert int8_engine.sync(moved.named_parameters()).codes_changed == 0
    # A sync that fails half-way does not count: the next is compared with the last one that succeeded.
    with pytest.raises(RolloutError, match="left out"):
        int8_engine.sync(list(w0.named_parameters())[:9])
    assert int8_engine.sync(moved.named_parameters()).codes_changed == 0


def test_completions_stop_at_every_end_token(policies, int8_engine):
    _, w0, _ = policies["qwen2-untied"]
    int8_engine.sync(w0.named_parameters())
    rollouts = int8_engine.generate([[1, 5]] * 300, max_tokens=200, temperature=2.0)
    ends = {
        ids[-1]
        for ids, why in zip(rollouts.completion_ids, rollouts.finish_reasons, strict=True)
        if why == "stop"
    }
    assert ends == {2, 7}
    assert not any({2, 7} & set(ids[:-1]) for ids in rollouts.completion_ids)
    assert all(
        len(ids) == len(logps) for ids, logps in zip(rollouts.completion_ids, rollouts.logps, strict=True)
    )
    assert rollouts.completion_tokens == sum(map(len, rollouts.completion_ids))


def test_requests_that_the_fast_sampler_cannot_serve_go_to_vllms(policies, int8_engine):
    """A least length bans the end tokens for a while, and a temperature of zero draws nothing."""
    int8_engine.sync(policies["qwen2-untied"][1].named_parameters())
    rollouts = int8_engine.generate([[1, 5]] * 200, max_tokens=40, min_tokens=12, temperature=2.0)
    assert not any({2, 7} & set(ids[:12]) for ids in rollouts.completion_ids)
    assert min(map(len, rollouts.completion_ids)) >= 12
    assert greedy(int8_engine) == greedy(int8_engine)


@pytest.mark.parametrize("cache", ["a file", "a read-only folder"])
def test_the_log_goes_elsewhere_where_the_cache_cannot_be_written(tmp_path, monkeypatch, caplog, cache):
    place = tmp_path / "cache"
    if cache == "a file":
        place.write_text("")
    else:
        monkeypatch.setattr(
            "qurl.rollout.log.Path.mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "read-only"))
        )
    monkeypatch.setenv("QURL_CACHE", str(place))
    path = new_log_path()
    assert place not in path.parents
    with output_to(path):
        print("kept")
    assert path.read_text().endswith("kept\n")
    assert f"{place} cannot be written" in caplog.text and str(path) in caplog.text


def test_an_interrupted_call_leaves_nothing_behind(policies, int8_engine, monkeypatch):
    """Stopping a cell in Jupyter while the engine samples: the next call gets its own answers, and a sync works."""
    _, w0, _ = policies["qwen2-untied"]
    int8_engine.sync(w0.named_parameters())
    expected = greedy(int8_engine)
    core = int8_engine._llm.llm_engine
    step, steps = core.step, []

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    def interrupt(*_):
        raise KeyboardInterrupt

    runner = core.model_executor.driver_worker.model_runner
    for target, name, replacement in ((core, "step", interrupted), (runner, "sample_tokens", interrupt)):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, replacement)
            with pytest.raises(KeyboardInterrupt):
                int8_engine.generate([[1, 9, 9]] * 20, n=2, max_tokens=30)
        assert greedy(int8_engine) == expected
    int8_engine.sync(w0.named_parameters())
    assert greedy(int8_engine) == expected


def test_the_engines_seed_decides_the_samples(policies):
    folder, *_ = policies["llama-tied"]

    def sampled(seed):
        with RolloutEngine(folder, "bf16", max_model_len=64, max_num_seqs=4, seed=seed) as engine:
            return engine.generate([[1, 5]] * 4, max_tokens=16).completion_ids

    first = sampled(1)
    assert sampled(1) == first
    assert sampled(2) != first


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dtype": "fp4"}, "dtype='fp4' is not possible: use one of 'bf16', 'fp32', 'int8', 'fp8'"),
        ({"dtype": "fp8", "code_bits": 4}, "code_bits=4 is not possible with dtype='fp8'"),
        ({"dtype": "bf16", "code_bits": 4}, "full precision and takes neither"),
        ({"dtype": "int8", "code_bits": 9}, "code_bits=9"),
        ({"code_bits": True}, "code_bits=True is not possible"),
        ({"dtype": ["int8"]}, r"dtype=\['int8'\] is not possible: use one of"),
        ({"model": None}, "model=None is not possible: use a name such as"),
        ({"model": ""}, "model='' is not possible"),
        ({"seed": -1}, "seed=-1 is not possible: use a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296 is not possible"),
        ({"seed": None}, "seed=None is not possible"),
        ({"seed": 1.0}, "seed=1.0 is not possible"),
        ({"seed": True}, "seed=True is not possible"),
        ({"max_num_seqs": None}, "max_num_seqs=None is not possible: use a whole number from 1 to 4096"),
        ({"max_num_seqs": True}, "max_num_seqs=True is not possible"),
        ({"max_num_seqs": 4097}, "max_num_seqs=4097 is not possible"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 is not possible"),
        ({"max_model_len": np.True_}, "max_model_len=.*True.* is not possible"),
        (
            {"gpu_memory_utilization": 1.5},
            "gpu_memory_utilization=1.5 is not possible: use a number from 0.01 to 1",
        ),
        ({"gpu_memory_utilization": "half"}, "gpu_memory_utilization='half' is not possible"),
        ({"track_codes": "no"}, "track_codes='no' is not possible: use True or False"),
        ({"enforce_eager": 0}, "enforce_eager=0 is not possible: use True or False"),
        ({"max_model_len": 1.5}, "max_model_len=1.5 is not possible"),
        ({"max_model_len": 10**6}, "max_model_len=1000000 exceeds what"),
        ({"kernels": "mine"}, "kernels='mine' is not possible"),
        ({"compute_dtype": "fp64"}, "compute_dtype='fp64' is not possible"),
    ],
)
def test_impossible_engines_are_refused_before_vllm_starts(policies, arguments, sentence, monkeypatch):
    monkeypatch.setattr("vllm.LLM", lambda **_: pytest.fail("vLLM was started"))
    with pytest.raises(ValueError, match=sentence):
        RolloutEngine(**({"model": policies["llama-tied"][0]} | arguments))


def test_quantized_and_sparse_models_are_refused(policies, tmp_path):
    export_checkpoint(policies["llama-tied"][1], tmp_path / "int8", "int8")
    with pytest.raises(ValueError, match="already quantized"):
        RolloutEngine(tmp_path / "int8")
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text(
        '{"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}'
    )
    with pytest.raises(ValueError, match="MixtralForCausalLM is not supported"):
        RolloutEngine(tmp_path / "moe")


@pytest.mark.parametrize(
    ("prompts", "arguments", "sentence"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 515]], {}, "outside 0..514"),
        ([[-1]], {}, "outside 0..514"),
        ([[1] * 300], {"max_tokens": 100}, "exceed max_model_len=320"),
        ([[1]], {"max_tokens": 0}, "max_tokens=0"),
        ([[1]], {"n": 0}, "n=0"),
        ([[1]], {"n": True}, "n=True is not possible"),
        ([[1]], {"max_tokens": 8.0}, "max_tokens=8.0 is not possible: use a whole number of 1 or more"),
        (
            [[1]],
            {"max_tokens": 8, "min_tokens": 9},
            "min_tokens=9 is not possible: use a whole number from 0 to 8",
        ),
        ([[1]], {"min_tokens": -1}, "min_tokens=-1 is not possible"),
        ([[1]], {"ignore_eos": "yes"}, "ignore_eos='yes' is not possible"),
        ([[1, 2.0]], {}, r"prompt_ids\[0\] holds 2.0, which is not a token id"),
        ([[1], [True]], {}, r"prompt_ids\[1\] holds True, which is not a token id"),
        (["12"], {}, r"prompt_ids\[0\]='12' is not a list of token ids: encode the prompt"),
        (["1", "2"], {}, "encode the prompt with the model's tokenizer"),
        ("12", {}, "prompt_ids='12' is not possible: use a list of lists"),
        ([1, 2], {}, r"prompt_ids\[0\]=1 is not a list of token ids"),
        ([torch.tensor([1.0])], {}, r"prompt_ids\[0\] holds 1.0"),
        (
            [[1]],
            {"temperature": 0.005},
            "temperature=0.005 is not possible: use 0 for greedy decoding, or 0.01 to 2",
        ),
        ([[1]], {"temperature": True}, "temperature=True"),
        ([[1]], {"temperature": "hot"}, "temperature='hot'"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_impossible_requests_are_refused(policies, int8_engine, prompts, arguments, sentence):
    int8_engine.sync(policies["qwen2-untied"][1].named_parameters())
    with pytest.raises(ValueError, match=sentence):
        int8_engine.generate(prompts, **arguments)
    assert int8_engine.generate([]).completion_ids == []


@pytest.mark.parametrize("seed", [-1, None, 1.0, True, 2**32])
def test_impossible_seeds_are_refused(int8_engine, seed):
    with pytest.raises(
        ValueError, match=f"seed={seed} is not possible: use a whole number from 0 to 4294967295"
    ):
        int8_engine.reseed(seed)


def test_numbers_of_numpy_and_arrays_of_tokens_are_as_good(policies, int8_engine):
    int8_engine.sync(policies["qwen2-untied"][1].named_parameters())
    expected = int8_engine.generate([[1, 5, 9]] * 2, max_tokens=4, temperature=0.0).completion_ids
    for prompts in (
        np.array([[1, 5, 9]] * 2),
        torch.tensor([[1, 5, 9]] * 2),
        [list(np.array([1, 5, 9])), list(torch.tensor([1, 5, 9]))],
    ):
        rollouts = int8_engine.generate(
            prompts, n=np.int64(1), max_tokens=np.int32(4), temperature=np.float32(0)
        )
        assert rollouts.completion_ids == expected


@pytest.mark.parametrize(
    ("before", "shell"),
    [
        ("sys.stdout = sys.stderr = None", ""),
        ("sys.stdout.close(); sys.stderr.close()", ""),
        ("", " >&- 2>&-"),
    ],
)
def test_a_process_without_standard_streams(policies, tmp_path, before, shell):
    """As under pythonw, in a daemon, or after a caller closed them."""
    folder, *_ = policies["llama-tied"]
    result = tmp_path / "result"
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\n{before}\n"
        "from qurl.rollout import RolloutEngine\n"
        f"with RolloutEngine({str(folder)!r}, 'bf16', max_model_len=64, max_num_seqs=2) as engine:\n"
        "    ids = engine.generate([[1, 5]], max_tokens=3, ignore_eos=True).completion_ids\n"
        f"open({str(result)!r}, 'w').write(str(len(ids[0])))\n"
    )
    subprocess.run(f"{sys.executable} {script}{shell}", shell=True, check=True, timeout=120)
    assert result.read_text() == "3"


def test_start_up_noise_goes_to_the_log(policies, capfd):
    logging.getLogger("vllm").setLevel(logging.INFO)
    with RolloutEngine(policies["llama-tied"][0], "bf16", max_model_len=64, max_num_seqs=2) as engine:
        engine.generate([[1, 5]], max_tokens=2)
        log = engine.log_path.read_text()
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert "KV cache" in log


def test_closing_an_engine_leaves_the_others_working(policies, int8_engine):
    """vLLM's engines in one process share its process groups."""
    folder, w0, _ = policies["qwen2-untied"]
    int8_engine.sync(w0.named_parameters())
    before = greedy(int8_engine)
    with RolloutEngine(folder, "bf16", max_model_len=64, max_num_seqs=2) as other:
        other.generate([[1, 5]], max_tokens=2)
        assert greedy(int8_engine) == before
    assert greedy(int8_engine) == before
    int8_engine.sync(w0.named_parameters())


def test_a_closed_engine_gives_its_memory_back(policies):
    """Weights and cache: a training that closes one engine and makes another must not hold both."""
    folder, w0, _ = policies["llama-tied"]
    with RolloutEngine(folder, "int8", max_model_len=64, max_num_seqs=2, track_codes=True) as engine:
        engine.sync(w0.named_parameters())
        engine.generate([[1, 5]], max_tokens=2)
        runner = engine._llm.llm_engine.model_executor.driver_worker.model_runner
        alive = [weakref.ref(module) for module in runner.get_model().modules()]
        alive += [weakref.ref(cache) for cache in runner.kv_caches]
        del runner
    assert [reference() for reference in alive if reference() is not None] == []


@pytest.mark.parametrize("end", ["", "engine.close()"])
def test_a_process_ends_in_silence(policies, tmp_path, end):
    """An engine left open is closed at exit, and nothing complains of what it leaves."""
    script = (
        "from qurl.rollout import RolloutEngine\n"
        f"engine = RolloutEngine({str(policies['llama-tied'][0])!r}, 'bf16', max_model_len=64, max_num_seqs=2)\n"
        f"engine.generate([[1, 5]], max_tokens=2)\n{end}\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_closed_engine_refuses(policies):
    engine = RolloutEngine(
        policies["llama-tied"][0], "bf16", max_model_len=64, max_num_seqs=2, load_weights=False
    )
    with pytest.raises(RolloutError, match="no weights yet: call sync first"):
        engine.generate([[1]])
    engine.close()
    engine.close()
    for use in (lambda: engine.generate([[1]]), lambda: engine.sync([]), lambda: engine.description):
        with pytest.raises(RolloutError, match="closed"):
            use()


def test_another_kernel_is_never_taken_in_silence(policies, monkeypatch, caplog):
    class Started(Exception):
        pass

    def start(**_):
        raise Started

    monkeypatch.setattr("vllm.LLM", start)
    monkeypatch.setattr("qurl.rollout.engine.unavailable", lambda dtype: f"there is no compiler ({dtype})")
    for dtype, asked in (("fp8", "fp8"), ("bf16", "int8")):
        caplog.clear()
        with pytest.raises(RolloutError, match="vLLM failed to start"):
            RolloutEngine(policies["llama-tied"][0], dtype)
        assert caplog.messages == [
            "qurl's CPU kernels are replaced by slower ones of libraries, since there is no compiler "
            f"({asked})."
        ]
