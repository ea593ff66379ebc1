"""Checks of arguments: what is let through, what is refused, and the sentence that says so."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurl import arguments

LEAST, MOST = 2, 9


@given(st.integers(-(2**40), 2**40))
def test_whole_numbers_are_those_in_range(value):
    kinds = [int] + [
        kind for kind in (np.int64, np.int32) if np.iinfo(kind).min <= value <= np.iinfo(kind).max
    ]
    for kind in kinds:
        if LEAST <= value <= MOST:
            checked = arguments.whole_number("n", kind(value), LEAST, MOST)
            assert checked == value and type(checked) is int
        else:
            with pytest.raises(
                ValueError, match=f"n=.*{value}.* is not possible: use a whole number from 2 to 9."
            ):
                arguments.whole_number("n", kind(value), LEAST, MOST)


@pytest.mark.parametrize("value", [None, True, np.True_, 3.0, np.float64(3), "3", [3], float("nan"), 3 + 0j])
def test_what_is_no_whole_number(value):
    with pytest.raises(ValueError, match="use a whole number of 0 or more"):
        arguments.whole_number("n", value, 0)
    with pytest.raises(ValueError, match=r"n=.* is not possible: use whole numbers of 0 or more"):
        arguments.whole_numbers("n", [1, value], 0)


@pytest.mark.parametrize("values", [[], (), 3, "3", None])
def test_whole_numbers_want_a_list_that_is_not_empty(values):
    with pytest.raises(ValueError, match="use whole numbers from 1 to 8"):
        arguments.whole_numbers("sizes", values, 1, 8)
    assert arguments.whole_numbers("sizes", np.array([1, 8]), 1, 8) == [1, 8]


@pytest.mark.parametrize("value", [None, True, "0.5", float("nan"), -0.01, 1.01, float("inf")])
def test_numbers_out_of_range(value):
    with pytest.raises(ValueError, match=r"share=.* is not possible: use a number from 0 to 1"):
        arguments.number("share", value, 0, 1)


@pytest.mark.parametrize("value", [0, 1, 0.25, np.float32(0.25), np.int8(1)])
def test_numbers_in_range(value):
    assert arguments.number("share", value, 0, 1) == float(value)


@pytest.mark.parametrize("value", [None, ["a"], {"a"}, "c", ""])
def test_choices(value):
    with pytest.raises(ValueError, match="is not possible: use one of 'a', 'b'"):
        arguments.choice("letter", value, ("a", "b"))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=5))
def test_token_ids_come_through_in_any_container(sequences):
    expected = [list(ids) for ids in sequences]
    assert arguments.token_ids("ids", sequences) == expected
    assert arguments.token_ids("ids", iter([np.array(ids, dtype=np.int32) for ids in sequences])) == expected
    assert (
        arguments.token_ids("ids", tuple(torch.tensor(ids, dtype=torch.long) for ids in sequences))
        == expected
    )
    assert arguments.token_ids("ids", [[np.uint32(token) for token in ids] for ids in sequences]) == expected


@pytest.mark.parametrize(
    "token", [1.0, "1", None, True, np.True_, torch.tensor(True), torch.tensor(1.0), [1]]
)
def test_tokens_are_never_converted(token):
    with pytest.raises(ValueError, match=r"^ids\[1\] holds .*, which is not a token id: encode the prompt"):
        arguments.token_ids("ids", [[1], [2, token]])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("8,64", ["8", "64"]),
        (" [8, 64] ", ["8", "64"]),
        ("8", ["8"]),
        ("", []),
        ("[]", []),
        ("8,,64", ["8", "", "64"]),
    ],
)
def test_split_numbers(text, parts):
    assert arguments.split_numbers(text) == parts
