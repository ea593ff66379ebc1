"""Roofline: hand-worked bytes, operations and times; an independent count of weights; limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl.benchmark import roofline as roofline_of_benchmark
from qurl.experiments.scale import model_on_meta
from qurl.roofline import (
    GPU,
    GPUS,
    MODEL_SHAPES,
    PAPER_SPEEDUPS,
    ModelShape,
    expected_speedup,
    paper_cases,
    roofline,
    sequence_operations,
)

# One layer, hidden 4, MLP 8, 2 heads and 1 KV head of width 2, 10 words:
# q 4x4, k and v 2x4 each, o 4x4, gate, up and down 8x4 each = 16 + 16 + 16 + 96 = 144 weights; lm_head 40.
SMALL = ModelShape(4, 8, 1, 2, 1, 2, 10)
# 100 bytes/s, 1,000 BF16 and 2,000 INT8 operations/s, no FP8.
SLOW = GPU(1e6, 100.0, 1000.0, 2000.0, None, "made up")


def test_hand_worked_memory_bound():
    # Batch 1, context 5: linears 288 bytes (2.88 s) against 288 operations (0.288 s); lm_head 80 bytes (0.8 s) against
    # 80 operations; keys and values 5 x 2 x 2 x 2 bytes = 40 (0.4 s) against 4 x 5 x 2 x 2 = 80 operations (0.08 s).
    step = roofline(SMALL, SLOW, batch_size=1, context=5)
    assert (step.weight_bytes, step.kv_bytes, step.operations) == (368, 40, 288 + 80 + 80)
    assert step.linear_seconds == pytest.approx(2.88)
    assert step.lm_head_seconds == pytest.approx(0.8)
    assert step.attention_seconds == pytest.approx(0.4)
    assert step.seconds == pytest.approx(4.08)
    # INT8 halves the linears and nothing else.
    assert roofline(SMALL, SLOW, batch_size=1, context=5, dtype="int8").seconds == pytest.approx(1.44 + 1.2)


def test_hand_worked_compute_bound():
    # Batch 20: linears 2 x 20 x 144 = 5,760 operations: 5.76 s in BF16, 2.88 s in INT8; bytes take 2.88 s and 1.44 s.
    bf16 = roofline(SMALL, SLOW, batch_size=20, context=0)
    assert bf16.linear_seconds == pytest.approx(5.76)
    assert roofline(SMALL, SLOW, batch_size=20, context=0, dtype="int8").linear_seconds == pytest.approx(2.88)
    # Without FP8 units only the bytes shrink: the same 5,760 operations at the BF16 rate.
    assert roofline(SMALL, SLOW, batch_size=20, context=0, dtype="fp8").linear_seconds == pytest.approx(5.76)


def test_overhead_and_tensor_parallel():
    one = roofline(SMALL, SLOW, batch_size=3, context=7)
    two = roofline(SMALL, SLOW, batch_size=3, context=7, tensor_parallel=2)
    assert two.seconds == pytest.approx(one.seconds / 2)
    assert two.weight_bytes == one.weight_bytes / 2
    late = roofline(SMALL, SLOW, batch_size=3, context=7, overhead_seconds=1.5)
    assert late.seconds == pytest.approx(one.seconds + 1.5)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_shapes_against_transformers(name):
    """Weights counted by transformers itself on a model without storage."""
    shape = MODEL_SHAPES[name]
    model = model_on_meta(shape)
    assert ModelShape.from_config(model.config) == shape
    linears = sum(p.numel() for n, p in model.named_parameters() if n.endswith("_proj.weight"))
    assert shape.linear_weights == linears
    assert shape.lm_head_weights == model.lm_head.weight.numel()
    assert shape.weights == pytest.approx(model.num_parameters(), rel=1e-3)
    # The model cards say 0.49, 1.78, 7.61, 14.7 and 32.5 billion.
    billions = {"0.5B": 0.49, "1.5B": 1.78, "7B": 7.61, "14B": 14.7, "32B": 32.5}[name]
    assert model.num_parameters() == pytest.approx(billions * 1e9, rel=0.01)


@given(
    model=st.sampled_from(sorted(MODEL_SHAPES)),
    gpu=st.sampled_from(sorted(GPUS)),
    dtype=st.sampled_from(["int8", "fp8"]),
    batch_size=st.integers(1, 4096),
    context=st.integers(0, 32768),
    tensor_parallel=st.integers(1, 8),
    overhead=st.floats(0, 1),
)
def test_speedup_is_between_one_and_two(model, gpu, dtype, batch_size, context, tensor_parallel, overhead):
    """8 bits halve at most what the linears take; overhead only pulls the ratio towards 1."""
    step = {"batch_size": batch_size, "context": context, "tensor_parallel": tensor_parallel}
    bare = expected_speedup(model, gpu, dtype=dtype, **step)
    assert 1 - 1e-9 <= bare < 2
    assert expected_speedup(model, gpu, dtype=dtype, overhead_seconds=overhead, **step) <= bare + 1e-9


@given(batch_size=st.integers(1, 1024), context=st.integers(0, 8192))
def test_time_never_falls_with_batch_or_context(batch_size, context):
    def seconds(b, c):
        return roofline("7B", "H200", batch_size=b, context=c, dtype="int8").seconds

    assert seconds(batch_size, context) <= min(
        seconds(batch_size + 1, context), seconds(batch_size, context + 1)
    )


def test_forward_pass_against_counting_token_by_token():
    """SMALL: 144 weights in linears, 40 in lm_head; token t attends to t tokens with 2 heads of width 2."""
    linears, rest = sequence_operations(SMALL, 5)
    assert linears == 5 * 2 * 144
    attention = sum(4 * context * 2 * 2 for context in (1, 2, 3, 4, 5))
    # 2 T² stands for 2 T (T + 1): the diagonal is a T-th of it.
    assert rest == 5 * 2 * 40 + attention * 5 / 6


def test_small_batches_come_close_to_two_where_lm_head_is_small():
    assert expected_speedup("32B", "H100-SXM", dtype="int8", batch_size=1, context=0) > 1.9


def test_gpus_without_fp8_units():
    assert GPUS["A6000"].fp8 is None
    assert GPUS["A100-80G"].fp8 is None
    assert GPUS["H100-SXM"].fp8 == GPUS["H200"].fp8 == GPUS["H200"].int8
    for name, gpu in GPUS.items():
        # Dense rates: INT8 at twice BF16 on all four. A sparse figure in one column would break this.
        assert gpu.int8 == pytest.approx(2 * gpu.bf16, rel=1e-3), name
        assert gpu.source


def test_fits():
    # 14.8e9 weights in BF16 on 48e9 bytes: 14.77e9 x 2 = 29.5e9, so 18e9 are left: 94,000 tokens at 196,608 bytes.
    assert MODEL_SHAPES["14B"].kv_bytes_per_token == 196_608
    assert roofline("14B", "A6000", batch_size=16, context=2048).fits
    assert not roofline("14B", "A6000", batch_size=64, context=2048).fits
    assert not roofline("32B", "A6000", batch_size=1, context=0).fits


def test_paper_cases():
    cases = paper_cases()
    assert set(cases["gpu"]) == set(GPUS)
    assert set(cases["model"]) == {"7B", "14B", "32B"}
    reported = cases[(cases["dtype"] == "int8") & cases["paper_low"].notna()]
    assert reported["case"].nunique() == len(PAPER_SPEEDUPS) == 8
    row = cases[(cases["case"] == "32B, 2x H100-SXM") & (cases["dtype"] == "int8")].iloc[0]
    assert (row["paper_low"], row["paper_high"], row["tensor_parallel"]) == (1.83, 1.9, 2)
    # The paper has neither FP8 throughput nor an H200.
    assert cases.loc[(cases["dtype"] == "fp8") | (cases["gpu"] == "H200"), "paper_low"].isna().all()
    first = cases.iloc[0]
    assert math.isclose(
        first["speedup"],
        expected_speedup("7B", "A6000", dtype="int8", batch_size=int(first["batch_size"]), context=2048),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": "70B"},
            "model='70B' is not known: use '0.5B', '1.5B', '7B', '14B', '32B' or pass its numbers",
        ),
        ({"gpu": "A40"}, "gpu='A40' is not known: use 'A6000', "),
        ({"dtype": "int4"}, "dtype='int4' is not known here: use one of 'bf16', 'int8', 'fp8'"),
        ({"batch_size": 0}, "batch_size=0 is not possible: use 1 or more"),
        ({"context": -1}, "context=-1 is not possible: use 0 or more"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 is not possible: use 1 or more"),
        ({"overhead_seconds": -0.1}, "overhead_seconds=-0.1 is not possible: use 0 or more"),
    ],
)
def test_refused(change, message):
    arguments = {"model": "7B", "gpu": "H200", "batch_size": 1, "context": 1} | change
    with pytest.raises(ValueError, match=message):
        roofline(arguments.pop("model"), arguments.pop("gpu"), **arguments)


def test_one_function_under_both_names():
    assert roofline_of_benchmark is roofline
