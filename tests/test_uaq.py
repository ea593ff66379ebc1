"""UAQ: the function stays, only targets and their norms change, the rest is refused, and learning rates equal it."""

import copy
import types

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from qurl.quantization import fake_quantize_activation, quantize
from qurl.uaq import apply_uaq, uaq_parameter_groups, uaq_scale, undo_uaq

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 71,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
PRE_NORMS = {"input_layernorm": "qkv", "post_attention_layernorm": "gate_up"}
GEMMA_NORMS = {"input_layernorm": "qkv", "pre_feedforward_layernorm": "gate_up"}
# Configuration, class, the norms that feed targets, and whether norms multiply by 1 + weight.
ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", PRE_NORMS, False),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", PRE_NORMS, False),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", PRE_NORMS, False),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", PRE_NORMS, True),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA_NORMS, True),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA_NORMS, True),
}
LINEARS = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
TOKENS = torch.randint(3, 71, (2, 12), generator=torch.Generator().manual_seed(1))


def build(config: str, model: str, unit_offset: bool = False, **options):
    """A model whose every parameter is random, norms and biases too, and whose outputs are far from uniform."""
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SHAPE, **options}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(0, 0.3)
            if "norm" in name and not unit_offset:
                parameter.add_(1)
    return made.eval()


def policy(architecture: str, **options):
    config, model, _, unit_offset = ARCHITECTURES[architecture]
    return build(config, model, unit_offset, **options)


def in_float64(model, unit_offset: bool = False):
    """The model in float64 throughout: transformers computes norms in FP32 whatever the parameters are."""

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return x * (1 + self.weight) if unit_offset else x * self.weight

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)
    model.set_attn_implementation("sdpa")  # eager attention has its softmax in FP32
    return model.double()


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS, use_cache=False).logits


def largest_difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def snapshot(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scale", [1.5, 2.0, 4.0])
def test_logits_stay(architecture, scale):
    model = policy(architecture)
    before = logits(model)
    apply_uaq(model, scale)
    if scale == 1.5:
        assert largest_difference(logits(model), before) < 1e-5
    else:
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scale", [1.5, 0.3])
def test_logits_stay_in_float64(architecture, scale):
    options = {"attn_logit_softcapping": None} if architecture == "gemma2" else {}  # which SDPA does not have
    model = in_float64(policy(architecture, **options), ARCHITECTURES[architecture][3])
    before = logits(model)
    apply_uaq(model, scale)
    assert largest_difference(logits(model), before) < 1e-13


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("targets", [("qkv", "gate_up"), ("qkv",), ("gate_up",)])
def test_only_targets_and_their_norms_change(architecture, targets):
    """Biases, q/k norms, post-norms, the other projections, embedding and head keep every bit."""
    _, _, norms, unit_offset = ARCHITECTURES[architecture]
    model = policy(architecture)
    before = snapshot(model)
    apply_uaq(model, 1.5, targets)
    scaled = set()
    for name, parameter in model.named_parameters():
        _, module, kind = name.rsplit(".", 2)
        if kind == "weight" and any(module in LINEARS[target] for target in targets):
            torch.testing.assert_close(parameter, before[name] / 1.5, rtol=2e-7, atol=0)
            scaled.add(name)
        elif norms.get(module) in targets:
            expected = 1.5 * (1 + before[name]) - 1 if unit_offset else 1.5 * before[name]
            torch.testing.assert_close(parameter, expected, rtol=2e-7, atol=2e-7)
            scaled.add(name)
        else:
            assert torch.equal(parameter, before[name]), name
    # Two layers, each with 3 or 2 linears and a norm per target.
    assert len(scaled) == 2 * sum(len(LINEARS[target]) + 1 for target in targets)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_undo(architecture):
    unit_offset = ARCHITECTURES[architecture][3]
    for scale in (1.5, 2.0):
        model = policy(architecture)
        before, function = snapshot(model), logits(model)
        apply_uaq(model, scale, ["gate_up"])
        undo_uaq(model)
        assert uaq_scale(model) == 1.0 and "qurl" not in str(model.config.to_dict())
        for name, parameter in model.named_parameters():
            exact = scale == 2.0 and not (unit_offset and "norm" in name)
            torch.testing.assert_close(
                parameter, before[name], rtol=0 if exact else 3e-7, atol=0 if exact else 3e-7
            )
        assert torch.equal(logits(model), function) or scale == 1.5
    with pytest.raises(ValueError, match="no UAQ to undo"):
        undo_uaq(model)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_a_checkpoint_loads_in_transformers_and_cannot_be_scaled_twice(architecture, tmp_path):
    model = policy(architecture)
    before = logits(model)
    apply_uaq(model, 2.0, ["qkv"])
    with pytest.raises(ValueError, match=r"scaled already .*qurl_uaq_scale=2\.0"):
        apply_uaq(model, 1.5)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded), before)
    assert uaq_scale(loaded) == 2.0 and loaded.config.qurl_uaq_targets == ["qkv"]
    for again in (apply_uaq, lambda model: uaq_parameter_groups(model, 1e-3)):
        with pytest.raises(ValueError, match="scaled already"):
            again(loaded)
    undo_uaq(loaded)
    apply_uaq(loaded, 1.5)
    assert uaq_scale(loaded) == 1.5


def test_a_scale_of_one_is_off_for_any_model():
    model = build("GPT2Config", "GPT2LMHeadModel")
    apply_uaq(model, 1.0)
    assert uaq_scale(model) == 1.0
    groups = uaq_parameter_groups(model, 1e-3, 1.0)
    assert [group["name"] for group in groups] == ["decayed", "not_decayed"]


@pytest.mark.parametrize("scale", [0, -1.5, float("nan"), float("inf"), 1e4, 1e-4, True, "1.5", None])
def test_impossible_scales(scale):
    with pytest.raises(ValueError, match=r"^scale=.* from 1/1024 to 1024"):
        apply_uaq(None, scale)


@pytest.mark.parametrize("targets", [(), ("o",), ("qkv", "qkv"), "down"])
def test_impossible_targets(targets):
    with pytest.raises(ValueError, match=r"^targets=.*'qkv', 'gate_up'"):
        apply_uaq(None, 1.5, targets)


class AdaptedLinear(nn.Linear):
    """A linear with a low-rank term on the same input, as adapters add it."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight, self.down = linear.weight, nn.Parameter(torch.randn(2, linear.in_features))

    def forward(self, x):
        return super().forward(x) + (x @ self.down.T) @ torch.ones(2, self.out_features)


def with_adapter():
    model = policy("llama")
    model.model.layers[1].self_attn.q_proj = AdaptedLinear(model.model.layers[1].self_attn.q_proj)
    return model


def with_a_reader(read):
    """A Llama of which something besides the linears uses the norm's output."""
    model = policy("llama")
    layer = model.model.layers[1]
    layer.input_layernorm.register_forward_hook(lambda module, inputs, output: setattr(layer, "kept", output))
    layer.register_forward_hook(lambda module, inputs, output: read(output, layer.kept))
    return model


def with_a_shared_weight():
    model = policy("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


class SquaredNorm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x * self.weight**2


def with_another_norm():
    model = policy("llama")
    model.model.layers[0].input_layernorm = SquaredNorm(model.model.layers[0].input_layernorm.weight)
    return model


def on_meta():
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
REFUSED = {
    "olmo2, normed after": (
        lambda: build("Olmo2Config", "Olmo2ForCausalLM"),
        r"layers\.0\.self_attn\.q_proj does not read the output of a norm",
    ),
    "layer norm with bias": (
        lambda: build("StableLmConfig", "StableLmForCausalLM"),
        "a norm with a weight and no bias",
    ),
    "fused projections": (
        lambda: build("Phi3Config", "Phi3ForCausalLM"),
        "0 modules q_proj in 2 decoder layers",
    ),
    "experts": (lambda: build("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **MOE), "0 modules gate_proj"),
    "no such modules": (lambda: build("GPT2Config", "GPT2LMHeadModel"), "0 modules q_proj"),
    "adapter": (with_adapter, r"q_proj is not a plain nn\.Linear"),
    "sum": (lambda: with_a_reader(lambda output, kept: output + kept), r"input_layernorm is also read by \("),
    "cat": (
        lambda: with_a_reader(lambda output, kept: torch.cat([output, kept])[:2] * 1),
        r"input_layernorm is also read by \(cat\)",
    ),
    "shared weight": (with_a_shared_weight, "does not use the weight of .*up_proj once"),
    "other norm": (with_another_norm, r"layers\.0\.input_layernorm is proportional neither"),
    "bf16": (lambda: policy("llama").bfloat16(), r"torch\.bfloat16 .* full precision"),
    "meta": (on_meta, "on the meta device"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("function", [apply_uaq, lambda model: uaq_parameter_groups(model, 1e-3)])
def test_what_cannot_be_proven_is_refused_and_left_alone(case, function):
    make, reason = REFUSED[case]
    model = make()
    before = snapshot(model)
    with pytest.raises(ValueError, match=reason):
        function(model)
    assert uaq_scale(model) == 1.0
    for name, parameter in model.named_parameters():
        assert parameter.is_meta or torch.equal(parameter, before[name])


def test_a_norm_shared_by_all_targets_is_scaled_once_or_not_at_all():
    """Cohere's attention and MLP run in parallel behind one norm."""
    model = build("CohereConfig", "CohereForCausalLM")
    before = logits(model)
    with pytest.raises(ValueError, match=r"input_layernorm is also read by"):
        apply_uaq(model, 2.0, ["qkv"])
    apply_uaq(model, 2.0)
    assert torch.equal(logits(model), before)


def test_reading_a_model_leaves_its_mode_and_the_random_numbers():
    model = policy("llama", attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    apply_uaq(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


# Optimizer steps of a real model, in float64: UAQ, and the groups that are to equal it.
RATE = 0.003
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=RATE),
    "sgd, momentum": lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=RATE, eps=1e-8),
    # So large that it decides the size of most updates.
    "adamw, large eps": lambda groups: torch.optim.AdamW(groups, lr=RATE, eps=1e-2),
    "adamw, eps to 0": lambda groups: torch.optim.AdamW(groups, lr=RATE, eps=1e-30),
}
EPS = {"adamw": 1e-8, "adamw, large eps": 1e-2, "adamw, eps to 0": 1e-30}


def train(model, optimizer, steps):
    """The model's logits after each step on next-token prediction, with a schedule that halves the rates."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 ** (1 / 3))
    after = []
    for step in range(steps):
        tokens = TOKENS.roll(step, 1)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        schedule.step()
        after.append(logits(model))
    return after


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_uaq_is_a_learning_rate(architecture, name):
    """Same function after one step and after five; a run with ordinary rates, or with the other power, is elsewhere."""
    unit_offset = ARCHITECTURES[architecture][3]
    kind, decay = name.split(",")[0], 0.1
    start = policy(architecture, tie_word_embeddings=False)
    runs = {}
    for run in ("uaq", "groups", "ordinary", "other power"):
        model = in_float64(copy.deepcopy(start), unit_offset)
        scale = {"uaq": 1.0, "groups": 1.5, "ordinary": 1.0, "other power": 1.5}[run]
        if run == "other power":
            scale = scale**2 if kind == "adamw" else scale**0.5
        groups = uaq_parameter_groups(model, RATE, scale, kind, decay, EPS.get(name, 1e-8))
        if run == "uaq":
            apply_uaq(model, 1.5)
        runs[run] = train(model, OPTIMIZERS[name](groups), 5)

    tolerance = 1e-12 if kind == "sgd" else 1e-9
    for uaq, control in zip(runs["uaq"], runs["groups"], strict=True):
        assert largest_difference(control, uaq) < tolerance
    for other in ("ordinary", "other power"):
        assert largest_difference(runs[other][0], runs["uaq"][0]) > 1e-4


def test_groups_by_hand():
    """α = 0.01, λ = 0.1, s = 2: linears at 0.04 (SGD) or 0.02 (Adam), norms at 0.0025 or 0.005, decay αλ = 0.001."""
    model = policy("qwen2", tie_word_embeddings=False)
    model.model.embed_tokens.weight.requires_grad_(False)
    for optimizer, linears, norms in (("sgd", 0.04, 0.0025), ("adamw", 0.02, 0.005)):
        groups = {g["name"]: g for g in uaq_parameter_groups(model, 0.01, 2.0, optimizer, 0.1, eps=1e-6)}
        assert {name: group["lr"] for name, group in groups.items()} == pytest.approx(
            {"uaq_linears": linears, "uaq_norms": norms, "decayed": 0.01, "not_decayed": 0.01}
        )
        decay = {name: group["lr"] * group["weight_decay"] for name, group in groups.items()}
        assert decay == pytest.approx(
            {"uaq_linears": 1e-3, "uaq_norms": 0, "decayed": 1e-3, "not_decayed": 0}
        )
        # Per layer 5 linears, 2 norms; o and down, plus lm_head; 3 biases, plus the last norm.
        assert {name: len(group["params"]) for name, group in groups.items()} == {
            "uaq_linears": 10, "uaq_norms": 4, "decayed": 5, "not_decayed": 7,
        }  # fmt: skip
        assert ("eps" in groups["uaq_norms"]) == (optimizer == "adamw")
    assert [groups[n]["eps"] for n in ("uaq_linears", "uaq_norms", "decayed")] == pytest.approx(
        [5e-7, 2e-6, 1e-6]
    )
    with pytest.raises(ValueError, match=r"optimizer='adafactor'.*'adamw' or 'sgd'"):
        uaq_parameter_groups(model, 0.01, 2.0, "adafactor")


def test_gradient_clipping_ends_the_equality():
    """What the module says of clipping: the norm over all gradients is another one, so the runs part."""
    start = in_float64(policy("llama"))
    after = []
    for scale, control in ((1.5, False), (1.0, True)):
        model = copy.deepcopy(start)
        groups = uaq_parameter_groups(model, 0.01, 1.5 if control else 1.0, "sgd")
        apply_uaq(model, scale)
        optimizer = torch.optim.SGD(groups, lr=0.01)
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        after.append(logits(model))
    assert largest_difference(*after) > 1e-6


# Codes of W / s are codes of W.
CODES = [("int8", 8), ("int8", 4), ("int8", 2), ("fp8", 8)]
rows = arrays(
    "float32", (3, 8), elements=st.floats(-1000, 1000, width=32).filter(lambda x: not 0 < abs(x) < 1e-3)
)


@pytest.mark.parametrize(("dtype", "code_bits"), CODES)
@given(values=rows, power=st.integers(-10, 10))
@settings(max_examples=50, deadline=None)
def test_powers_of_two_keep_every_code(dtype, code_bits, values, power):
    weight, scale = torch.from_numpy(values), 2.0**power
    one, other = quantize(weight, dtype, code_bits), quantize(weight / scale, dtype, code_bits)
    assert torch.equal(other.codes.view(torch.uint8), one.codes.view(torch.uint8))
    nonzero = weight.any(1)
    assert torch.equal(other.scale[nonzero] * scale, one.scale[nonzero])


@pytest.mark.parametrize(("dtype", "code_bits"), CODES)
@pytest.mark.parametrize("scale", [1.5, 0.7])
def test_codes_of_the_scaled_weight_are_its_codes(dtype, code_bits, scale):
    """Up to ties: a rounding of W / s moves a quotient by about 1e-5 of a step, so about one code in 10,000 at most."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    one, other = quantize(weight, dtype, code_bits), quantize(weight / scale, dtype, code_bits)
    assert (one.codes.float() != other.codes.float()).float().mean() < 1e-4
    torch.testing.assert_close(other.scale * scale, one.scale, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_so_are_those_of_the_input(dtype):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fake_quantize_activation(4 * x, dtype), 4 * fake_quantize_activation(x, dtype))


def test_a_scale_shared_with_an_unscaled_layer_ends_the_equality():
    """With one scale for (q, o) by their common maximum, q alone divided by 2 gets other codes: 1.5 / 127 a step."""
    q, o = torch.tensor([[1.0, 0.3]]), torch.tensor([[1.5, 0.1]])
    shared = torch.cat([q, o], 1)  # one row, hence one scale
    scaled = torch.cat([q / 2, o], 1)
    assert quantize(shared, "int8").codes[0, :2].tolist() == [85, 25]  # 84.67, 25.4
    assert quantize(scaled, "int8").codes[0, :2].tolist() == [42, 13]  # 42.33, 12.7


@pytest.mark.timeout(240)
def test_a_scaled_checkpoint_starts_an_engine_and_samples_as_the_unscaled_policy(tmp_path):
    """INT8, s = 2: the same codes and activations twice as large, so every log-prob is the same bit for bit."""
    pytest.importorskip("vllm", reason="needs vLLM: pip install 'qurl[cpu]'")
    from qurl.rollout import RolloutEngine

    unscaled = policy("qwen3")
    scaled = copy.deepcopy(unscaled)
    apply_uaq(scaled, 2.0)
    scaled.save_pretrained(tmp_path)
    prompts = [row.tolist() for row in TOKENS]
    with RolloutEngine(tmp_path, "int8", max_model_len=48, max_num_seqs=4) as engine:
        results = []
        for model in (None, unscaled, scaled):
            if model is not None:
                engine.sync(model.named_parameters())
            rollouts = engine.generate(prompts, max_tokens=16, temperature=0.0, ignore_eos=True)
            results.append((rollouts.completion_ids, rollouts.logps))
    assert results[0] == results[1] == results[2]
