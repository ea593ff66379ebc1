"""Updates against quantization noise: hand-worked layers, a NumPy reference, invariance, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantization import E4M3, reference
from transformers import LlamaConfig, LlamaForCausalLM

from qurl import update_noise
from qurl.quantization import FORMATS, quantize
from qurl.update_noise import snapshot, update_to_noise

Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
CODES = [("int8", 8), ("int8", 3), ("fp8", 8)]


def test_int8_by_hand():
    """Scale 1 (absmax 127), so a step is 1; codes 127, 10, 0, -4 with errors 0, 0.25, 0, 0.5, ties going to even codes.

    After the update 10.5 is a tie too and stays 10, 0.25 stays 0, and -4.75 becomes -5: one code of four.
    """
    before = torch.tensor([[127.0, 10.25, 0.0, -3.5]])
    after = before + torch.tensor([[0.0, 0.25, 0.25, -1.25]])
    layers, total = update_to_noise({Q: before}, {Q: after}, "int8")
    row = layers.loc[Q]
    assert row["codes"] == 4 and row["codes_changed"] == 0.25
    assert row["update_norm"] == pytest.approx(math.sqrt(0.0625 + 0.0625 + 1.5625))
    assert row["error_norm"] == pytest.approx(math.sqrt(0.0625 + 0.25))
    assert row["update_to_error"] == pytest.approx(math.sqrt(1.6875 / 0.3125))
    assert row["update_to_step"] == pytest.approx(1.75 / 4)
    assert total == pytest.approx(row.to_dict())


def test_fp8_by_hand():
    """Scale 1 (absmax 448). Steps: 32 at 448 (2^8 .. 2^9), 1/8 at 1.05 and -1.95, 2^-9 at 0.001 and at 0."""
    before = torch.tensor([[448.0, 1.05, -1.95, 0.001, 0.0]])
    after = before + torch.tensor([[16.0, 0.0625, -0.125, 2.0**-9, 0.0]])
    # 464 (with a scale of 464/448) stays the largest code; the others are divided by 1.0357 before they are rounded:
    # 1.0741 -> 1.125 (was 1), -2.0034 -> -2 (was -2), 0.00285 -> 2^-9 (was 2^-9, for 0.001 rounds up), 0 -> 0.
    layers, _ = update_to_noise({Q: before}, {Q: after}, "fp8")
    assert layers.loc[Q, "codes_changed"] == pytest.approx(1 / 5)
    # -1.95 has the code -2, whose binade has steps of 1/4.
    assert layers.loc[Q, "update_to_step"] == pytest.approx((16 / 32 + 0.5 + 0.125 / 0.25 + 1 + 0) / 5)
    assert layers.loc[Q, "error_norm"] == pytest.approx(math.hypot(0.05, 0.05, 2.0**-9 - 0.001), rel=1e-4)


def test_a_zero_that_changes_its_sign_is_the_same_fp8_code():
    before, after = torch.tensor([[448.0, 1e-6]]), torch.tensor([[448.0, -1e-6]])
    assert update_to_noise({Q: before}, {Q: after}, "fp8").total["codes_changed"] == 0


def test_every_fp8_code_is_read_as_torch_reads_it():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    codes = codes.view(torch.float8_e4m3fn)
    read = torch.empty(len(codes))
    update_noise._read_codes(codes, read)
    assert torch.equal(read, codes.float())


def independent(before: np.ndarray, after: np.ndarray, dtype: str, levels: float) -> dict:
    """The figures in float64 from their definitions, with steps looked up in the table of all E4M3 numbers."""
    codes, scale = reference(before, dtype, levels)
    new_codes, _ = reference(after, dtype, levels)
    before, after, scale = (values.astype(np.float64) for values in (before, after, scale))
    step = np.ones_like(before)
    if dtype == "fp8":
        position = np.searchsorted(E4M3, np.abs(codes)).clip(max=len(E4M3) - 2)
        top = np.abs(codes) == E4M3[-1]
        step = np.where(top, E4M3[-1] - E4M3[-2], E4M3[position + 1] - E4M3[position])
    update, error = np.linalg.norm(after - before), np.linalg.norm(before - codes * scale)
    return {
        "codes": before.size,
        "codes_changed": (codes != new_codes).mean(),
        "update_norm": update,
        "error_norm": error,
        "update_to_error": update / error,
        "update_to_step": (np.abs(after - before) / (step * scale)).mean(),
    }


@pytest.mark.parametrize(("dtype", "code_bits"), CODES)
@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e-2])
def test_against_numpy(dtype, code_bits, size, monkeypatch):
    """Weights of 0.02, in blocks of several, one and part of the rows; BF16 as well as FP32 before the update."""
    monkeypatch.setattr(update_noise, "_CPU_BLOCK_ELEMENTS", 150)
    generator = torch.Generator().manual_seed(0)
    before = {
        name: 0.02 * torch.randn(shape, generator=generator)
        for name, shape in ((Q, (40, 48)), (UP, (7, 200)))
    }
    after = {name: w + size * torch.randn(w.shape, generator=generator) for name, w in before.items()}
    layers, total = update_to_noise(before, after, dtype, code_bits)
    levels = FORMATS[dtype].levels(code_bits)
    for name in before:
        expected = independent(before[name].numpy(), after[name].numpy(), dtype, levels)
        assert layers.loc[name].to_dict() == pytest.approx(expected, rel=1e-4)
    count = layers["codes"]
    assert total["codes"] == 40 * 48 + 7 * 200
    for mean in ("codes_changed", "update_to_step"):
        assert total[mean] == pytest.approx((layers[mean] * count).sum() / count.sum())
    assert total["update_to_error"] == pytest.approx(
        np.linalg.norm(layers["update_norm"]) / np.linalg.norm(layers["error_norm"])
    )


def test_half_precision_is_read_in_fp32():
    """BF16 weights: 1 + 2^-7 is the number after 1, and the difference must not be rounded to BF16."""
    before = torch.tensor([[127.0, 1.0], [0.0, 1.0]]).bfloat16()
    after = torch.tensor([[126.5, 1.0 + 2**-7], [-0.0, 1.0]]).bfloat16()
    layers, _ = update_to_noise({Q: before}, {Q: after})
    assert layers.loc[Q, "update_norm"] == pytest.approx(math.hypot(0.5, 2**-7))
    mixed, _ = update_to_noise({Q: before}, {Q: after.float()})
    assert mixed.equals(layers)


@pytest.mark.parametrize(("dtype", "code_bits"), CODES)
@given(seed=st.integers(0, 1000), power=st.integers(-8, 8))
@settings(max_examples=25, deadline=None)
def test_ratios_do_not_depend_on_the_unit(dtype, code_bits, seed, power):
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(4, 16, generator=generator)
    after = before + 0.01 * torch.randn(4, 16, generator=generator)
    _, one = update_to_noise({Q: before}, {Q: after}, dtype, code_bits)
    _, other = update_to_noise({Q: before * 2.0**power}, {Q: after * 2.0**power}, dtype, code_bits)
    for figure in ("codes_changed", "update_to_error", "update_to_step"):
        assert other[figure] == one[figure]


@pytest.mark.parametrize(("dtype", "code_bits"), CODES)
def test_uaq_and_a_higher_learning_rate_look_alike(dtype, code_bits):
    """An Adam step U on W / 2 has the figures of the step 2 U on W: UAQ reaches the codes as its control arm does."""
    generator = torch.Generator().manual_seed(0)
    weight, step = torch.randn(32, 64, generator=generator), 1e-3 * torch.randn(32, 64, generator=generator)
    _, uaq = update_to_noise({Q: weight / 2}, {Q: weight / 2 + step}, dtype, code_bits)
    _, control = update_to_noise({Q: weight}, {Q: weight + 2 * step}, dtype, code_bits)
    _, plain = update_to_noise({Q: weight}, {Q: weight + step}, dtype, code_bits)
    for figure in ("codes_changed", "update_to_error", "update_to_step"):
        assert uaq[figure] == pytest.approx(control[figure], rel=1e-3)
        assert uaq[figure] > 1.3 * plain[figure]
    assert uaq["update_to_error"] == pytest.approx(2 * plain["update_to_error"], rel=1e-3)


def test_steps_of_the_papers_size_change_one_code_in_a_thousand():
    """Updates of 1e-6 on rows of 0.02: a step is about 0.08 / 127 = 6e-4, so about 1e-6 / 6e-4 of the codes change."""
    before = 0.02 * torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    _, total = update_to_noise({Q: before}, {Q: before + 1e-6}, "int8")
    assert 1e-3 < total["update_to_step"] < 3e-3
    assert total["codes_changed"] == pytest.approx(total["update_to_step"], rel=0.3)


def test_no_update_and_no_error():
    """Nothing moved: no code changed and a ratio of 0; weights that are codes have no error to compare with."""
    weight = torch.tensor([[127.0, 3.5]])
    _, total = update_to_noise({Q: weight}, {Q: weight.clone()})
    assert total["codes_changed"] == total["update_to_error"] == total["update_to_step"] == 0
    exact = torch.tensor([[127.0, 3.0]])
    assert math.isnan(update_to_noise({Q: exact}, {Q: exact.clone()}).total["update_to_error"])
    assert update_to_noise({Q: exact}, {Q: exact + 0.25}).total["update_to_error"] == math.inf


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
        )
    )


def test_a_step_of_a_model(model):
    """One SGD step: every projection is a row; the codes that changed are those of `quantize`."""
    before = snapshot(model.named_parameters())
    tokens = torch.arange(10)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    layers, total = update_to_noise(before, model.named_parameters())
    assert list(layers.index) == list(before) and len(layers) == 2 * 7
    changed = 0
    for name, parameter in model.named_parameters():
        if name in before:
            difference = quantize(parameter, "int8").codes != quantize(before[name], "int8").codes
            assert layers.loc[name, "codes_changed"] == pytest.approx(difference.float().mean().item())
            changed += difference.sum().item()
    assert total["codes_changed"] == pytest.approx(changed / layers["codes"].sum()) and changed > 0
    streamed, _ = update_to_noise(iter(before.items()), model.named_parameters())
    assert streamed.equals(layers)


def test_a_snapshot_copies_projections_and_its_memory_is_used_again(model):
    kept = snapshot(model.named_parameters())
    assert len(kept) == 14 and not any(tensor.requires_grad for tensor in kept.values())
    addresses = {name: tensor.data_ptr() for name, tensor in kept.items()}
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 1
    assert not torch.equal(kept[UP], model.model.layers[0].mlp.up_proj.weight)
    again = snapshot(model.named_parameters(), into=kept)
    assert torch.equal(again[UP], model.model.layers[0].mlp.up_proj.weight)
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == addresses


W = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {Q: W}, f"after holds {Q} of shape \\(2, 3\\), but before holds nothing"),
        ([], {Q: W}, "but before holds nothing"),
        ({Q: W, UP: W}, {Q: W + 1}, f"before holds {UP}, but after does not"),
        ([(Q, W), (UP, W)], {Q: W + 1}, f"before holds {UP}, but after does not"),
        ([(UP, W), (Q, W)], {Q: W + 1, UP: W}, f"before holds {UP} of shape"),
        ({Q: W.T}, {Q: W}, r"before holds .* of shape \(3, 2\)"),
        ({Q: W}, {Q: W}, r"share the memory of .*snapshot\(model\.named_parameters\(\)\)"),
        ({"model.norm.weight": W}, {"model.norm.weight": W + 1}, "hold no projection"),
        ({Q: W}, {Q: W * math.nan}, f"{Q} holds NaN or infinity"),
    ],
)
def test_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        update_to_noise(before, after)


def test_formats_are_checked_before_anything_is_read():
    def untouched():
        raise AssertionError("read")
        yield

    with pytest.raises(ValueError, match="dtype='int4'"):
        update_to_noise(untouched(), untouched(), "int4")
    with pytest.raises(ValueError, match="code_bits=3"):
        update_to_noise(untouched(), untouched(), "fp8", 3)
