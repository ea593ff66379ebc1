"""The embedded task: deterministic, and held-out sums never meet training sums."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl.tasks.arithmetic import Sum, split_of, sums

PINNED = {
    "test": [(623, 597), (949, 410), (356, 645), (417, 201)],
    "train": [(964, 494), (876, 530), (141, 365), (514, 902)],
}


def test_prompt_and_answer():
    assert (Sum(123, 456).prompt, Sum(123, 456).answer) == ("123+456=", "579")
    assert Sum(999, 999).answer == "1998"


def test_the_split_is_pinned():
    """A change of the rule would silently put sums that `tiny` was trained on into the held-out split."""
    assert sums("test", 4, seed=0) == PINNED["test"]
    assert sums("train", 4, seed=0) == PINNED["train"]


@given(left=st.integers(1, 9999), right=st.integers(1, 9999))
def test_both_orders_are_on_the_same_side(left, right):
    assert split_of(left, right) == split_of(right, left)


@pytest.mark.parametrize(("digits", "tolerance"), [(1, 0.1), (2, 0.02), (3, 0.002)])
def test_one_pair_in_ten_is_held_out(digits, tolerance):
    low, high = 10 ** (digits - 1), 10**digits
    pairs = [(left, right) for left in range(low, high) for right in range(left, high)]
    assert sum(split_of(*pair) == "test" for pair in pairs) / len(pairs) == pytest.approx(0.1, abs=tolerance)


def test_splits_are_disjoint_whatever_the_seeds():
    def unordered(split):
        return {tuple(sorted(pair)) for seed in range(3) for pair in sums(split, 2000, seed=seed)}

    assert not unordered("train") & unordered("test")


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_draws_are_different_in_range_and_repeatable(split, digits):
    n = 4 if digits == 1 else 200
    drawn = sums(split, n, seed=5, digits=digits)
    assert len(set(drawn)) == n
    assert all(len(str(operand)) == digits for pair in drawn for operand in pair)
    assert all(split_of(*pair) == split for pair in drawn)
    assert drawn == sums(split, n, seed=5, digits=digits) != sums(split, n, seed=6, digits=digits)
    assert drawn[: n // 2] == sums(split, n // 2, seed=5, digits=digits), (
        "a longer draw starts like a shorter one"
    )


def test_impossible_requests():
    with pytest.raises(ValueError, match="split='dev' is not known: use one of 'train', 'test'"):
        sums("dev", 1)
    with pytest.raises(ValueError, match="digits=0"):
        sums("train", 1, digits=0)
    with pytest.raises(ValueError, match=r"n=40501 is out of range .* use 0 to 40500"):
        sums("test", 40_501)
    with pytest.raises(ValueError, match="n=-1"):
        sums("test", -1)
