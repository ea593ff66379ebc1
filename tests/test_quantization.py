"""Codes and scales: hand-worked values, an independent NumPy reference, properties, and the checkpoint on disk."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.torch import load_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from qurl.quantization import (
    FORMATS,
    cast_codes,
    dequantize,
    export_checkpoint,
    fake_quantize_activation,
    quantize,
    quantized_named_tensors,
)

DTYPES = list(FORMATS)
# The first call of a torch operation can be slow on a busy machine; that is no failure.
settings.register_profile("torch", deadline=None)
settings.load_profile("torch")
# Every finite E4M3 magnitude, written out from the format's definition: 8 subnormals of 2**-9, then 15 binades of 8
# steps, the last of which ends at 448 because the code after it is NaN.
E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]
)


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """Round to the nearest E4M3 number, ties to the even code, by search in the table of all of them."""
    magnitudes = np.minimum(np.abs(values.astype(np.float64)), 448)
    upper = np.searchsorted(E4M3, magnitudes).clip(max=len(E4M3) - 1)
    lower = np.maximum(upper - 1, 0)
    to_upper, to_lower = E4M3[upper] - magnitudes, magnitudes - E4M3[lower]
    take_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0))
    return np.copysign(E4M3[np.where(take_upper, upper, lower)], values)


def reference(weight: np.ndarray, dtype: str, levels: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes (as numbers) and scale of FP32 rows, from the definition."""
    absmax = np.abs(weight).max(axis=1, keepdims=True)
    scale = np.maximum(absmax / np.float32(levels), np.finfo(np.float32).tiny)
    scaled = weight / scale
    return (np.rint(scaled) if dtype == "int8" else nearest_e4m3(scaled)), scale


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


finite_rows = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=6),
    elements=st.one_of(
        st.floats(allow_nan=False, allow_infinity=False, width=32),
        st.floats(-1, 1, width=32),
        st.floats(-(2.0**-120), 2.0**-120, width=32),  # down to subnormals
    ),
)


# --- the arithmetic -----------------------------------------------------------------------------------------


def test_int8_convention_is_absmax_over_127():
    """Case Q04: /127 gives these codes, /127.5 would give -128, 51, 13, 115."""
    weight = torch.tensor([[-1.0, 0.4, 0.1, 0.9]])
    codes, scale = quantize(weight, "int8")
    assert codes.tolist() == [[-127, 51, 13, 114]]
    assert scale.item() == pytest.approx(1 / 127, rel=1e-7)
    assert codes.dtype is torch.int8 and scale.dtype is torch.float32 and scale.shape == (1, 1)


def test_fp8_scale_maps_absmax_to_448():
    codes, scale = quantize(torch.tensor([[-448.0, 1.0, 17.0, 19.0, 2.0**-10]]), "fp8")
    assert scale.item() == 1.0
    # Between 16 and 32 the step is 2: 17 and 19 are ties and go to the even code; 2**-10 ties with 0.
    assert codes.float().tolist() == [[-448.0, 1.0, 16.0, 20.0, 0.0]]


def test_int8_rounds_half_to_even():
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert quantize(weight, "int8").codes.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize("dtype", DTYPES)
@given(weight=finite_rows)
def test_codes_and_scales_equal_an_independent_reference(dtype, weight):
    codes, scale = quantize(torch.from_numpy(weight), dtype)
    expected_codes, expected_scale = reference(weight, dtype, FORMATS[dtype].max_code)
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    np.testing.assert_array_equal(codes.float().numpy(), expected_codes)


def test_every_e4m3_number_and_every_tie_between_two_of_them():
    values = np.concatenate([E4M3, (E4M3[1:] + E4M3[:-1]) / 2]).astype(np.float32)
    values = np.concatenate([values, -values])
    got = cast_codes(torch.from_numpy(values), "fp8").float().numpy()
    np.testing.assert_array_equal(got, nearest_e4m3(values))


@given(weight=finite_rows, code_bits=st.integers(2, 8))
def test_int8_error_is_at_most_half_a_step(weight, code_bits):
    """Holds for zero rows and for rows whose scale would be subnormal, too."""
    codes, scale = quantize(torch.from_numpy(weight), "int8", code_bits)
    levels = 2 ** (code_bits - 1) - 1
    assert codes.abs().max() <= levels
    error = np.abs(
        weight.astype(np.float64) - codes.numpy().astype(np.float64) * scale.numpy().astype(np.float64)
    )
    # FP32 rounds the scale and the quotient: relative 2**-24 each, of a quotient of at most `levels`.
    assert (error <= scale.numpy().astype(np.float64) * (0.5 + levels * 2.0**-22)).all()


@given(weight=finite_rows)
def test_fp8_error_is_within_three_mantissa_bits(weight):
    codes, scale = quantize(torch.from_numpy(weight), "fp8")
    weight, scale = weight.astype(np.float64), scale.numpy().astype(np.float64)
    error = np.abs(weight - codes.float().numpy() * scale)
    assert (error <= np.maximum(np.abs(weight) / 16, scale * 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(weight=finite_rows, power=st.integers(-3, 3))
def test_codes_do_not_depend_on_the_scale_of_a_row(dtype, weight, power):
    weight = np.where(np.abs(weight) < 1e-30, 0, weight.clip(-1e30, 1e30)).astype(np.float32)
    weight = torch.from_numpy(weight)
    before, after = quantize(weight, dtype), quantize(weight * 2.0**power, dtype)
    assert same_bits(before.codes, after.codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_rows_are_invisible(dtype, monkeypatch):
    weight = torch.randn(37, 24, generator=torch.Generator().manual_seed(0))
    whole = quantize(weight, dtype)
    for elements in (1, 24 * 5, 24 * 36):
        monkeypatch.setattr("qurl.quantization._CPU_BLOCK_ELEMENTS", elements)
        for part, expected in zip(quantize(weight, dtype), whole, strict=True):
            assert same_bits(part, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_promoted_first(dtype, half):
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(half)
    for got, expected in zip(quantize(weight, dtype), quantize(weight.float(), dtype), strict=True):
        assert same_bits(got, expected)


def test_transposed_views_and_parameters_with_gradients():
    weight = torch.nn.Parameter(torch.randn(8, 5))
    got, expected = quantize(weight.T, "int8"), quantize(weight.detach().T.contiguous(), "int8")
    assert same_bits(got.codes, expected.codes) and not got.scale.requires_grad


# --- rows that break quantizers -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_zero_row(dtype):
    """Case Q01."""
    weight = torch.tensor([[1.0, -2.0, 3.0, 4.0], [0.0, -0.0, 0.0, 0.0], [0.5, 0.25, -1.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = quantize(weight, dtype)
        back = dequantize(quantized)
    assert torch.isfinite(quantized.scale).all() and (quantized.scale > 0).all()
    assert (quantized.codes[1].float() == 0).all() and (back[1] == 0).all()
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-6, 1e-20, 1e-30])
def test_small_rows_keep_all_their_bits(dtype, size):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    small = weight * size
    error = (dequantize(quantize(small, dtype)) - small).abs().max() / small.abs().max()
    assert error < (0.5 / 127 if dtype == "int8" else 1 / 16) * 1.001


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_rows_have_finite_codes(dtype):
    rows = torch.tensor(
        [[2.0**-149, 0.0], [90 * 2.0**-149, -(2.0**-149)], [2.0**-126, 2.0**-127], [1e-37, -3e-38]]
    )
    quantized = quantize(rows, dtype)
    assert torch.isfinite(quantized.codes.float()).all()
    assert (quantized.scale >= torch.finfo(torch.float32).tiny).all(), (
        "engines flush subnormal scales to zero"
    )
    # Half a step of INT8; that of FP8 is 2**-10 for numbers as small against their scale, and 1/16 of the others.
    assert ((dequantize(quantized) - rows).abs() <= torch.maximum(quantized.scale / 2, rows.abs() / 16)).all()


def test_fp8_saturates_before_the_cast():
    """Case Q03: without saturation 465 and 1000 are NaN in some stacks."""
    scaled = torch.tensor([448.0, 464.0, 465.0, 1000.0, -1000.0, float("inf")])
    assert cast_codes(scaled, "fp8").float().tolist() == [448, 448, 448, 448, -448, 448]
    assert cast_codes(scaled, "int8").tolist() == [127, 127, 127, 127, -127, 127]
    assert scaled[1] == 464, "the input is left alone"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_non_finite_weight_is_refused_by_name(dtype, value, input_dtype):
    """Case Q03."""
    weight = torch.ones(3, 4, dtype=input_dtype)
    weight[2, 1] = value
    name = "model.layers.7.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=rf"{name} holds NaN or infinity"):
        list(quantized_named_tensors([(name, weight)], dtype))


def test_an_outlier_row_does_not_flush_the_others():
    """Case Q06: one scale for the whole tensor (2.232) would turn all of row 0 into zeros."""
    weight = torch.tensor([[1e-3, -1e-3, 5e-4, 2e-3], [1000.0, -500.0, 250.0, 10.0]])
    back = dequantize(quantize(weight, "fp8"))
    assert ((back - weight).abs() <= 0.0625 * weight.abs()).all()
    assert (cast_codes(weight / (1000 / 448), "fp8")[0].float() == 0).all()


# --- fewer levels, activations, errors ----------------------------------------------------------------------


@pytest.mark.parametrize(("code_bits", "levels"), [(2, 1), (3, 3), (4, 7), (8, 127)])
def test_code_bits_limit_the_levels(code_bits, levels):
    weight = torch.linspace(-2, 2, 401)[None]
    codes, scale = quantize(weight, "int8", code_bits)
    assert sorted(set(codes.flatten().tolist())) == list(range(-levels, levels + 1))
    assert scale.item() == pytest.approx(2 / levels)


@pytest.mark.parametrize("code_bits", [1, 9, 0, -3, True, 4.0, "4"])
def test_impossible_code_bits(code_bits):
    with pytest.raises(ValueError, match=r"code_bits=.* use a whole number from 2 to 8"):
        quantize(torch.ones(1, 1), "int8", code_bits)


def test_fp8_has_no_fewer_levels():
    with pytest.raises(ValueError, match=r"code_bits=3 is not possible with dtype='fp8'.*int8"):
        quantize(torch.ones(1, 1), "fp8", 3)


def test_unknown_format_names_the_known_ones():
    with pytest.raises(ValueError, match=r"dtype='fp4' .* 'int8', 'fp8'"):
        next(quantized_named_tensors([], "fp4"))


@pytest.mark.parametrize(
    "weight", [torch.ones(3), torch.ones(0, 4), torch.ones(2, 2, 2), torch.ones(2, 2).int()]
)
def test_only_matrices_of_numbers(weight):
    with pytest.raises(ValueError, match=r"q_proj.weight of shape .* non-empty floating-point matrix"):
        quantize(weight, "int8", name="q_proj.weight")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_activations_have_one_scale_per_token(dtype, x_dtype):
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).to(x_dtype)
    x[0, 1] *= 1000  # does not touch the other tokens
    got = fake_quantize_activation(x, dtype)
    assert got.shape == x.shape and got.dtype == x_dtype
    codes, scale = reference(x.float().numpy().reshape(6, 16), dtype, FORMATS[dtype].max_code)
    expected = torch.from_numpy((codes.astype(np.float32) * scale).reshape(2, 3, 16)).to(x_dtype)
    assert torch.equal(got, expected)


def test_quantizing_twice_changes_nothing():
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    for dtype in DTYPES:
        once = quantize(weight, dtype)
        assert same_bits(quantize(dequantize(once), dtype).codes, once.codes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_on_a_gpu_are_those_of_the_cpu(dtype):
    weight = (
        torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-30, 20, 512)[:, None]
    )
    for got, expected in zip(quantize(weight.cuda(), dtype), quantize(weight, dtype), strict=True):
        assert same_bits(got.cpu(), expected)


# --- streams and checkpoints --------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def tiny_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return {
        "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "llama untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
        "qwen2 with biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)),
    }[kind]()


def test_names_and_order_of_the_stream():
    params = [
        ("model.embed_tokens.weight", torch.ones(4, 2)),
        ("model.layers.0.self_attn.q_proj.weight", torch.ones(2, 2)),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(2)),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(2)),
        ("model.layers.0.mlp.down_proj.weight", torch.ones(2, 2)),
        ("lm_head.weight", torch.ones(4, 2)),
    ]
    stream = list(quantized_named_tensors(iter(params), "int8"))
    assert [name for name, _ in stream] == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.down_proj.weight_scale",
        "lm_head.weight",
    ]
    untouched = dict(params)
    for name, tensor in stream:
        if "_proj.weight" not in name:
            assert tensor is untouched[name]


def test_the_stream_holds_one_layer():
    """Parameters are taken one by one, when asked for."""
    taken = []

    def params():
        for layer in range(3):
            taken.append(layer)
            yield f"layers.{layer}.q_proj.weight", torch.ones(2, 2)

    stream = quantized_named_tensors(params(), "int8")
    next(stream), next(stream)
    assert taken == [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_peak_memory_is_that_of_one_layer(dtype):
    """In a process of its own, 24 layers of 16 MiB: the high-water mark of resident memory grows by less than one."""
    code = f"""
import resource, torch
from qurl.quantization import quantized_named_tensors
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB on Linux
layers = [(f"layers.{{i}}.up_proj.weight", torch.ones(2048, 2048)) for i in range(24)]
list(quantized_named_tensors([("q_proj.weight", torch.ones(8, 8))], {dtype!r}))  # thread pools and the like
before = peak()
for _ in quantized_named_tensors(layers, {dtype!r}):
    pass
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama tied", "llama untied", "qwen2 with biases", "gemma3"])
def test_reference_checkpoint_and_stream_are_the_same_bit_for_bit(dtype, kind, tmp_path):
    """Case Q04."""
    model = tiny_model(kind)
    saved = load_file(export_checkpoint(model, tmp_path / "q", dtype) / "model.safetensors")
    streamed = dict(quantized_named_tensors(model.named_parameters(), dtype))
    assert saved.keys() == streamed.keys()
    for name, tensor in streamed.items():
        assert same_bits(saved[name], tensor.detach()), name
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, scale = reference(module.weight.detach().numpy(), dtype, FORMATS[dtype].max_code)
            np.testing.assert_array_equal(saved[f"{name}.weight"].float().numpy(), codes)
            np.testing.assert_array_equal(saved[f"{name}.weight_scale"].numpy(), scale)
    # Heads and embeddings: full precision, no second copy when tied, no stray scale.
    assert ("lm_head.weight" in saved) == (not model.config.tie_word_embeddings)
    assert saved["model.embed_tokens.weight"].dtype is torch.float32
    assert not any("scale" in name for name in saved if "_proj" not in name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_folder_and_its_model_export_the_same(dtype, tmp_path):
    model = tiny_model("llama tied").bfloat16()
    model.save_pretrained(tmp_path / "full")
    (tmp_path / "full" / "tokenizer.json").write_text("{}")
    from_folder = export_checkpoint(tmp_path / "full", tmp_path / "a", dtype)
    from_model = export_checkpoint(LlamaForCausalLM.from_pretrained(tmp_path / "full"), tmp_path / "b", dtype)
    a, b = load_file(from_folder / "model.safetensors"), load_file(from_model / "model.safetensors")
    assert a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
    for folder in (from_folder, from_model):
        assert {file.name for file in folder.iterdir()} == {
            "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        }  # fmt: skip


def test_shards_hold_every_tensor_once(tmp_path):
    model = tiny_model("llama untied")
    one = load_file(export_checkpoint(model, tmp_path / "one", "int8") / "model.safetensors")
    many = export_checkpoint(model, tmp_path / "many", "int8", max_shard_bytes=20_000)
    weight_map = json.loads((many / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(many.glob("*.safetensors"))
    assert len(files) > 2 and {file.name for file in files} == set(weight_map.values())
    for file in files:
        for name, tensor in load_file(file).items():
            assert weight_map[name] == file.name and same_bits(tensor, one.pop(name))
    assert not one


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_config_is_valid_compressed_tensors(dtype, tmp_path):
    from compressed_tensors.quantization import QuantizationConfig

    folder = export_checkpoint(tiny_model("llama tied"), tmp_path / "q", dtype)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert config["tie_word_embeddings"] is True
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    scheme = parsed.config_groups["group_0"]
    assert parsed.format == {"int8": "int-quantized", "fp8": "float-quantized"}[dtype] and parsed.ignore == [
        "lm_head"
    ]
    assert (scheme.weights.strategy, scheme.weights.dynamic, scheme.weights.symmetric) == (
        "channel",
        False,
        True,
    )
    assert (scheme.input_activations.strategy, scheme.input_activations.dynamic) == ("token", True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transformers_reads_the_checkpoint(dtype, tmp_path):
    """An independent reader of the format sees ``codes * scale``."""
    from transformers import AutoModelForCausalLM

    model = tiny_model("qwen2 with biases")
    folder = export_checkpoint(model, tmp_path / "q", dtype)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layer = model.model.layers[1].mlp.gate_proj.weight.detach()
    got = loaded.model.layers[1].mlp.gate_proj
    assert same_bits(got.weight.detach().view(FORMATS[dtype].code_dtype), quantize(layer, dtype).codes)
    torch.testing.assert_close(
        got.weight_scale.detach().float(), quantize(layer, dtype).scale, rtol=0, atol=0
    )


def test_a_failed_export_leaves_nothing(tmp_path):
    model = tiny_model("llama tied")
    model.model.layers[1].mlp.down_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds NaN"):
        export_checkpoint(model, tmp_path / "q", "fp8")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "results.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="is not empty"):
        export_checkpoint(tiny_model("llama tied"), tmp_path, "int8")
    (tmp_path / "empty").mkdir()
    assert export_checkpoint(tiny_model("llama tied"), tmp_path / "empty", "int8").is_dir()


def test_folders_that_cannot_be_exported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        export_checkpoint(tmp_path, tmp_path / "q", "int8")
    folder = export_checkpoint(tiny_model("llama tied"), tmp_path / "q", "int8")
    with pytest.raises(ValueError, match="already quantized"):
        export_checkpoint(folder, tmp_path / "again", "int8")
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors file"):
        export_checkpoint(folder, tmp_path / "again", "int8")


def test_an_unknown_architecture_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(
        ValueError, match=r"transformer\.wte\.weight .* is neither an embedding nor one of q_proj"
    ):
        export_checkpoint(model, tmp_path / "q", "int8")


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_codes_do_not_depend_on_torchs_default_dtype(dtype):
    """vLLM loads weights with BF16 as the default, and what forgets to name FP32 computes in BF16 there."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(64, 96, generator=generator)
    expected = quantize(weight, dtype)
    torch.set_default_dtype(torch.bfloat16)
    try:
        streamed = dict(quantized_named_tensors([("q_proj.weight", weight)], dtype))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(streamed["q_proj.weight"].view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(streamed["q_proj.weight_scale"], expected.scale)
