"""CPU kernels of W8A8 linears against a float64 reference, and their life inside vLLM's layers."""

import gc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from qurl.quantization import FORMATS, QuantizedTensor, dequantize, quantize
from qurl.rollout import kernels
from qurl.rollout.kernels import PackedLinear, unavailable

pytest.importorskip("vllm")
import vllm.platforms
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import PlatformEnum

from qurl.rollout import plugin

if not vllm.platforms.current_platform.is_cpu():
    pytest.skip("needs vLLM for CPUs", allow_module_level=True)
from qurl.rollout.kernels.vllm_linear import FP8Linear, Int8Linear, _FP32Linear

# Below, at and above one tile of 12 tokens, two tiles and a bit, and more than one chunk of 192.
TOKENS = (1, 2, 11, 12, 13, 25, 200)
# (out, in): whole blocks; remainders of 32 and 16 outputs, and of 4, 2 and 16 inputs; a layer of SmolLM2.
SHAPES = ((32, 64), (33, 61), (47, 18), (17, 31), (1, 1), (96, 579), (960, 576))


def require(dtype: str) -> None:
    """Skip where the machine cannot have the compiled kernel; source that does not compile is a failure."""
    if reason := unavailable(dtype):
        assert "could not compile" not in reason, reason
        pytest.skip(f"{dtype}: {reason}")


@pytest.fixture(params=FORMATS)
def dtype(request) -> str:
    require(request.param)
    return request.param


@pytest.fixture
def uncached(tmp_path, monkeypatch):
    """An empty cache folder, and no memory of what was compiled before and after the test."""
    monkeypatch.setenv("QURL_CACHE", str(tmp_path))
    kernels._library.cache_clear()
    kernels.unavailable.cache_clear()
    yield tmp_path
    kernels._library.cache_clear()
    kernels.unavailable.cache_clear()


@pytest.fixture
def no_compiler(uncached, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(uncached / "empty"))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_product(
    x: torch.Tensor, weight: QuantizedTensor, dtype: str, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """W8A8 product in float64, and a bound on the error of FP32 arithmetic before the last rounding.

    A chain of n FP32 roundings of numbers that sum to S in magnitude errs by at most n u S / (1 - n u), u = 2**-24
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). INT8 sums are exact: n = 4 for the
    conversion of the sum, the product of the scales, its product with the sum, and the bias. Products of E4M3 codes are
    exact too, but each of the ``in`` additions rounds: n = in + 3.
    """
    tokens = quantize(x.reshape(-1, x.shape[-1]), dtype)
    a, w = tokens.codes.float().double(), weight.codes.float().double()
    scale = tokens.scale.double() * weight.scale.double().t()
    offset = torch.zeros(len(w), dtype=torch.float64) if bias is None else bias.double()
    value = (a @ w.t()) * scale
    roundings = 4 if dtype == "int8" else x.shape[-1] + 3
    terms = value.abs() if dtype == "int8" else (a.abs() @ w.abs().t()) * scale
    nu = roundings * 2.0**-24
    return value + offset, nu / (1 - nu) * (terms + offset.abs())


def bf16_ulp(values: torch.Tensor) -> torch.Tensor:
    """Distance of neighbouring BF16 numbers (8 significant bits) in the binade of each value; 0 for 0."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.where(mantissa == 0, 0.0, torch.ldexp(torch.ones_like(mantissa), exponent - 8))


def assert_rounded_once(out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Check ``out`` against `exact_product`; returns where it is not the correctly rounded value.

    In FP32 the result lies within the bound. In BF16 it lies within the bound and half an ulp, and within one ulp of
    the correctly rounded value, unless the sum cancels so far that the bound itself exceeds half an ulp.
    """
    out, exact, bound = (tensor.reshape(-1) for tensor in (out, exact, bound))
    error = (out.double() - exact).abs()
    if out.dtype == torch.float32:
        assert (error <= bound).all(), f"error {error.max():.3g}, allowed {bound[error.argmax()]:.3g}"
        return error > bound
    rounded = exact.bfloat16()
    assert (error <= bound + bf16_ulp(out) / 2).all()
    ulp = bf16_ulp(rounded)
    settled = bound < ulp / 2
    assert ((out.double() - rounded.double()).abs() <= ulp)[settled].all()
    return out != rounded


@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_the_reference_rounded_once(dtype, shape, with_bias, input_dtype):
    weight = quantize(random(*shape), dtype)
    bias = random(shape[0], seed=1) if with_bias else None
    product = PackedLinear(*weight)
    different = []
    for tokens in TOKENS:
        x = random(tokens, shape[1], seed=tokens, dtype=input_dtype)
        out = product(x, bias)
        assert out.shape == (tokens, shape[0]) and out.dtype == input_dtype
        different.append(assert_rounded_once(out, *exact_product(x, weight, dtype, bias)))
    different = torch.cat(different)
    # FP32 errors are about 1e-4 of a BF16 ulp, so at most 1 result in 1000 lies that near to a rounding boundary.
    assert different.sum() <= max(1, 1e-3 * different.numel())


def test_views_are_read_in_place_or_copied(dtype):
    product = PackedLinear(*quantize(random(40, 61), dtype))
    base = random(30, 130, seed=3, dtype=torch.bfloat16)
    views = {
        "row stride": base[:, 5:66],
        "every other row": base[::2, :61],
        "one row for all": base[:1, :61].expand(7, 61),
        "column stride": base[:, 1:123:2],
        "transposed": random(61, 14, seed=4, dtype=torch.bfloat16).t(),
        "three axes": random(2, 9, 70, seed=5)[:, 1:8, :61],
        "one token": base[3, :61],
        "no token": base[:0, :61],
    }
    for name, x in views.items():
        expected = product(x.clone(memory_format=torch.contiguous_format).reshape(-1, 61))
        out = product(x)
        assert out.shape == (*x.shape[:-1], 40), name
        assert torch.equal(out.reshape(-1, 40), expected), name


def test_a_token_does_not_depend_on_the_others(dtype):
    product = PackedLinear(*quantize(random(70, 90), dtype))
    x = random(25, 90, seed=1, dtype=torch.bfloat16)
    assert torch.equal(product(x), torch.cat([product(token[None]) for token in x]))


# The token's scale is 1 in all cases, because its absolute maximum is the largest code.
@pytest.mark.parametrize(
    ("dtype", "values", "codes"),
    [
        ("int8", [127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.6], [127, 0, 2, 2, 0, -2, 126, -127]),
        # 16..32 in steps of 2, 256..448 in steps of 32: ties go to the even mantissa.
        ("fp8", [448, 17, 19, -17, 432, -448, 20.9], [448, 16, 20, -16, 448, -448, 20]),
        # Below 2**-6 in steps of 2**-9: the smallest normal number, the largest subnormal, the smallest, and ties.
        (
            "fp8",
            [448, 2**-6, 7 * 2**-9, 7.5 * 2**-9, 2**-9, 2**-10, 1.5 * 2**-9, -2.5 * 2**-9, 0.51 * 2**-9],
            [448, 2**-6, 7 * 2**-9, 2**-6, 2**-9, 0, 2**-8, -(2**-8), 2**-9],
        ),
        ("fp8", [448, 1.0625 * 2**-6, 1.1875 * 2**-6, 2**-30], [448, 2**-6, 1.25 * 2**-6, 0]),
    ],
)
def test_activation_codes_by_hand(dtype, values, codes):
    """An identity as weight shows the codes of the activation."""
    require(dtype)
    assert _identity(dtype, len(values))(torch.tensor([values]).float()).tolist() == [codes]


def _identity(dtype: str, size: int) -> PackedLinear:
    return PackedLinear(torch.eye(size).to(FORMATS[dtype].code_dtype), torch.ones(size, 1))


@settings(max_examples=200, deadline=None)
@given(
    x=arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    exponent=st.integers(-120, 0),
)
def test_activation_codes_are_those_of_quantize(x, exponent):
    """Bit for bit, from the smallest FP32 numbers to the largest: two different codes give two different products."""
    x = torch.from_numpy(x) * 2.0**exponent
    for dtype in FORMATS:
        if unavailable(dtype) is None:
            assert torch.equal(_identity(dtype, x.shape[1])(x), dequantize(quantize(x, dtype)))


def test_quotients_above_the_largest_code_saturate(dtype):
    """absmax / (absmax / levels) can exceed ``levels`` by a rounding."""
    x = random(100_000, 1, seed=7)
    levels = FORMATS[dtype].max_code
    scale = quantize(x, dtype).scale
    assert ((x / scale).abs() > levels).any()
    assert torch.equal(_identity(dtype, 1)(x), x.sign() * levels * scale)


def test_zero_rows_and_zero_tokens_give_the_bias(dtype):
    w, x, bias = random(35, 50), random(14, 50, seed=1), random(35, seed=2)
    w[3] = w[34] = 0
    x[0] = x[13] = 0
    product = PackedLinear(*quantize(w, dtype))
    out = product(x, bias)
    assert torch.equal(out[[0, 13]], bias.expand(2, -1))
    assert torch.equal(out[:, [3, 34]], bias[[3, 34]].expand(14, -1))
    assert product(x)[0].count_nonzero() == 0


@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_outliers(dtype, input_dtype):
    w, x = 1e-3 * random(48, 100), 1e-3 * random(13, 100, seed=1)
    w[5, 7] = x[2, 9] = x[3, 7] = 1e4
    x[4] *= 1e-20
    x = x.to(input_dtype)
    weight = quantize(w, dtype)
    assert_rounded_once(PackedLinear(*weight)(x), *exact_product(x, weight, dtype))


BROKEN = pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])


@BROKEN
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_broken_token_gives_nan_and_no_other_does(dtype, input_dtype, value):
    product = PackedLinear(*quantize(random(40, 37), dtype))
    _check_broken_token(product, random(14, 37, seed=1, dtype=input_dtype), value)


@BROKEN
def test_a_broken_token_gives_nan_without_the_compiled_kernel(value):
    _check_broken_token(_FP32Linear(*quantize(random(40, 37), "fp8")), random(14, 37, seed=1), value)


def _check_broken_token(product, x: torch.Tensor, value: float) -> None:
    whole = product(x)
    for position in (0, 20, 36):
        broken = x.clone()
        broken[5, position] = value
        out = product(broken)
        assert out[5].isnan().all()
        others = torch.arange(len(x)) != 5
        assert torch.equal(out[others], whole[others])


def test_half_precision_is_refused(dtype):
    product = PackedLinear(*quantize(random(8, 8), dtype))
    with pytest.raises(TypeError, match=r"x of torch\.float16 cannot be multiplied: use torch\.bfloat16 or"):
        product(random(2, 8, dtype=torch.float16))


@pytest.mark.parametrize("shape", [(1, 1), (31, 5), (32, 4), (33, 3), (100, 257)], ids=str)
def test_codes_and_scale_come_back_bit_for_bit(dtype, shape):
    weight = quantize(random(*shape), dtype)
    codes, scale = PackedLinear(*weight).codes_and_scale()
    assert codes.dtype == weight.codes.dtype and torch.equal(scale, weight.scale)
    assert torch.equal(codes.view(torch.uint8), weight.codes.view(torch.uint8))


def test_all_fp8_codes_survive_packing():
    require("fp8")
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F].view(torch.float8_e4m3fn).reshape(2, -1)  # without the two NaN
    back, _ = PackedLinear(codes, torch.ones(2, 1)).codes_and_scale()
    assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_fp32_fallback_meets_the_same_bound(input_dtype):
    weight, bias = quantize(random(96, 579), "fp8"), random(96, seed=1)
    product = _FP32Linear(*weight)
    x = random(2, 25, 579, seed=2, dtype=input_dtype)
    out = product(x, bias)
    assert out.shape == (2, 25, 96) and out.dtype == input_dtype
    assert_rounded_once(out, *exact_product(x, weight, "fp8", bias))
    codes, scale = product.codes_and_scale()
    assert torch.equal(codes.float(), weight.codes.float()) and torch.equal(scale, weight.scale)


def test_runs_on_the_threads_of_torch(dtype):
    """A second OpenMP runtime would start threads of its own beside torch's, two for each core."""
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            assert kernels._library().omp_get_max_threads() == number
    finally:
        torch.set_num_threads(threads)


# --- as layers of vLLM


def vllm_kernel(dtype: str):
    """The kernel that vLLM makes for a W8A8 layer with channel and token scales."""
    if dtype == "int8":
        names = "weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"
        return Int8Linear(Int8ScaledMMLinearLayerConfig(False, True, True), names)
    config = FP8ScaledMMLinearLayerConfig(
        kFp8StaticChannelSym, kFp8DynamicTokenSym, (40, 61), torch.bfloat16, torch.bfloat16
    )
    with set_current_vllm_config(VllmConfig()):
        return FP8Linear(config, ("weight", "weight_scale", "input_scale", "input_scale_ub"))


class Layer(torch.nn.Module):
    """What a kernel sees of a linear layer. vLLM stores FP8 codes as (in, out)."""

    def __init__(self, weight: QuantizedTensor):
        super().__init__()
        self.bias = self.input_scale = self.input_zero_point = None
        self.logical_widths = [len(weight.codes)]
        self.load(weight)

    def load(self, weight: QuantizedTensor) -> None:
        codes = weight.codes.clone()
        codes = codes if codes.dtype == torch.int8 else codes.t()
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(weight.scale.clone(), requires_grad=False)


@contextmanager
def default_dtype(dtype: torch.dtype):
    """vLLM prepares its oneDNN kernels for the default dtype, which it sets to the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_reloads(dtype: str, allowed_difference: float) -> object:
    """W0, W1, W0 in one layer, whose tensors are overwritten and dropped after each load, as vLLM's reload may do."""
    weights = [quantize(random(40, 61, seed=seed), dtype) for seed in (0, 1)]
    x, bias = random(13, 61, seed=2, dtype=torch.bfloat16), random(40, seed=3, dtype=torch.bfloat16)
    layer, kernel = Layer(weights[0]), vllm_kernel(dtype)
    outs = []
    with default_dtype(torch.bfloat16):
        for number in (0, 1, 0):
            layer.load(weights[number])
            kernel.process_weights_after_loading(layer)
            fresh = kernel.apply_weights(layer, x, bias)
            # The registered tensors go, and what is allocated next takes their place.
            layer.weight_scale = torch.nn.Parameter(torch.full((40, 1), float("nan")), requires_grad=False)
            gc.collect()
            noise = [torch.full((40, 1), float("nan"), dtype=torch.float32) for _ in range(200)]
            noise += [torch.full((40, 61), 77, dtype=torch.int8) for _ in range(50)]
            outs.append(kernel.apply_weights(layer, x, bias))
            assert torch.equal(outs[-1], fresh)
            del noise
            exact, _ = exact_product(x, weights[number], dtype, bias)
            assert (outs[-1].double() - exact).norm() <= allowed_difference * exact.norm()
            codes, scale = kernel.codes_and_scale()
            assert torch.equal(codes.float(), weights[number].codes.float())
            assert torch.equal(scale, weights[number].scale)
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])
    return kernel


# One rounding to BF16 errs by at most 2**-9 of each value, hence of the norm; ties and sums add a little of that.
ROUNDING = 2**-8


def test_layers_survive_reloads(dtype):
    kernel = _check_reloads(dtype, ROUNDING)
    assert isinstance(kernel._product, PackedLinear)


def test_int8_layers_without_a_compiler_survive_reloads(no_compiler):
    kernel = _check_reloads("int8", ROUNDING)
    assert kernel._product is None and kernel.description == "INT8 W8A8 (vLLM)"


def test_fp8_layers_without_a_compiler_survive_reloads(no_compiler):
    kernel = _check_reloads("fp8", ROUNDING)
    assert isinstance(kernel._product, _FP32Linear)
    assert kernel.description == "FP8 W8A8 emulated (oneDNN, FP32)"


# --- compilation


def test_missing_compiler_is_one_sentence(dtype, no_compiler):
    assert unavailable(dtype) == (
        "no C compiler was found (looked for cc, gcc, clang, g++): install gcc"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "lacks"), [("int8", "avx512_vnni"), ("fp8", "avx512_bf16, avx512vbmi")], ids=["int8", "fp8"]
)
def test_missing_instructions_are_named(uncached, monkeypatch, dtype, lacks):
    monkeypatch.setattr(kernels, "cpu_flags", lambda: frozenset({"avx512f", "avx512bw"}))
    reason = unavailable(dtype)
    assert reason.startswith("the processor lacks avx512vl, ") and lacks in reason


def test_compile_error_is_one_sentence(dtype, uncached, monkeypatch):
    compiler = uncached / "broken-cc"
    compiler.write_text(
        "#!/bin/sh\nprintf 'x' >> \"$0.runs\"\necho 'omp.h: no such file' >&2\necho more >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    reason = unavailable(dtype)
    assert reason == f"{compiler} could not compile the CPU kernels: omp.h: no such file"
    runs = Path(f"{compiler}.runs")
    before = runs.read_text()
    assert unavailable(dtype) == reason and runs.read_text() == before  # not tried again for every layer
    assert not (uncached / "kernels").exists()


# --- vLLM's choice of kernels


@pytest.fixture
def choices(monkeypatch) -> list[dict]:
    """vLLM's tables of kernels, as they are without the plugin; the test's own copies."""
    tables = []
    for name in ("_POSSIBLE_INT8_KERNELS", "_POSSIBLE_FP8_KERNELS"):
        table = {
            platform: [kernel for kernel in order if kernel not in (Int8Linear, FP8Linear)]
            for platform, order in getattr(linear, name).items()
        }
        monkeypatch.setattr(linear, name, table)
        tables.append(table)
    return tables


def test_register_puts_each_kernel_first_once(choices):
    before = [{platform: list(order) for platform, order in table.items()} for table in choices]
    for _ in range(3):
        plugin.register()
    for table, old, kernel in zip(choices, before, (Int8Linear, FP8Linear), strict=True):
        assert table == old | {PlatformEnum.CPU: [kernel, *old[PlatformEnum.CPU]]}


def test_register_leaves_other_platforms_alone(choices, monkeypatch):
    before = [{platform: list(order) for platform, order in table.items()} for table in choices]
    monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: False, raising=False)
    plugin.register()
    assert choices == before
    assert FP8Linear.is_supported() == (False, "requires a CPU.")


def fp8_config(weight_key=kFp8StaticChannelSym, activation_key=kFp8DynamicTokenSym):
    return FP8ScaledMMLinearLayerConfig(
        weight_key, activation_key, (40, 61), torch.bfloat16, torch.bfloat16
    )  # fmt: skip


SUITABLE = [
    pytest.param(Int8Linear, Int8ScaledMMLinearLayerConfig(False, True, True), id="int8"),
    pytest.param(FP8Linear, fp8_config(), id="fp8"),
]


@pytest.mark.parametrize(("kernel", "config"), SUITABLE)
def test_an_engine_can_switch_the_kernels_off(kernel, config):
    assert kernel.can_implement(config) == (True, None)
    for setting, expected in ((False, False), (True, True)):
        with set_current_vllm_config(VllmConfig(additional_config={"qurl_kernels": setting})):
            possible, reason = kernel.can_implement(config)
        assert possible is expected
        assert expected or reason == "switched off by additional_config['qurl_kernels']"
    with set_current_vllm_config(VllmConfig()):
        assert kernel.can_implement(config)[0]


@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        pytest.param(Int8Linear, Int8ScaledMMLinearLayerConfig(True, True, True), id="int8, static tokens"),
        pytest.param(Int8Linear, Int8ScaledMMLinearLayerConfig(False, False, True), id="int8, tensor weight"),
        pytest.param(Int8Linear, Int8ScaledMMLinearLayerConfig(False, True, False), id="int8, zero points"),
        pytest.param(FP8Linear, fp8_config(weight_key=kFp8StaticTensorSym), id="fp8, tensor weight"),
        pytest.param(FP8Linear, fp8_config(activation_key=kFp8StaticTensorSym), id="fp8, static tokens"),
        pytest.param(
            FP8Linear, fp8_config(activation_key=kFp8DynamicTensorSym), id="fp8, tensor activations"
        ),
    ],
)
def test_other_schemes_are_left_to_vllm(kernel, config):
    possible, reason = kernel.can_implement(config)
    assert not possible and reason.startswith("only channel scales for weights and dynamic")
