"""Sums of two numbers: an endless, embedded task whose answers are exact.

Every unordered pair of operands belongs to one split for ever, decided by a hash of the pair alone: one in ten is held
out, and ``a+b`` is on the same side as ``b+a``. So no seed, size or order of drawing can leak a held-out sum into
training.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qurl import arguments
from qurl.tasks.formats import FORMATS
from qurl.tasks.task import Task

SPLITS = ("train", "test")
MAX_DIGITS = 100
_HELD_OUT_SHARE = 0.1
_DEFAULT_N = {"train": 10_000, "test": 1000}


class Sum(NamedTuple):
    """The problem ``left + right``."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the model reads, as ``123+456=``."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """What it should write, as ``579``."""
        return str(self.left + self.right)


def split_of(left: int, right: int) -> str:
    """The split that the pair belongs to, in either order: "train" or "test"."""
    pair = f"{min(left, right)}+{max(left, right)}".encode()
    uniform = int.from_bytes(hashlib.sha256(pair).digest()[:8], "big") / 2**64
    return "test" if uniform < _HELD_OUT_SHARE else "train"


def sums(split: str, n: int, seed: int = 0, digits: int = 3) -> list[Sum]:
    """Draw ``n`` different sums of one split.

    Parameters
    ----------
    split : {"train", "test"}
    n : int
        At most half of the split, which keeps drawing fast: 364,500 (train) or 40,500 (test) for three digits.
    seed : int
        The same seed gives the same sums in the same order.
    digits : int
        Decimal digits of both operands, without leading zeros: 3 means 100..999.

    Raises
    ------
    ValueError
        If the split is unknown, ``digits`` is below 1 or ``n`` is out of range.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not known: use one of {', '.join(map(repr, SPLITS))}.")
    digits = arguments.whole_number("digits", digits, 1, MAX_DIGITS)
    low, high = 10 ** (digits - 1), 10**digits
    most = _most(split, digits)
    if not 0 <= n <= most:
        raise ValueError(f"n={n} is out of range for split={split!r} with digits={digits}: use 0 to {most}.")
    generator = random.Random(seed)
    drawn: dict[Sum, None] = {}
    while len(drawn) < n:
        pair = Sum(generator.randrange(low, high), generator.randrange(low, high))
        if split_of(*pair) == split:
            drawn[pair] = None
    return list(drawn)


def _most(split: str, digits: int) -> int:
    share = _HELD_OUT_SHARE if split == "test" else 1 - _HELD_OUT_SHARE
    return int((9 * 10 ** (digits - 1)) ** 2 * share / 2)


def load(
    split: str | None = None,
    *,
    digits: int | Sequence[int] = 3,
    n: int | None = None,
    seed: int = 0,
    chat: bool = False,
) -> Task:
    """The task "arithmetic".

    Parameters
    ----------
    split : {"train", "test"}, optional
        Default "train".
    digits : int or sequence of int
        Difficulty: decimal digits of both operands, at most 100. Several levels take turns, and are told apart by the
        column ``level``.
    n : int, optional
        Number of problems; default 10,000 (train) or 1,000 (test), or as many as there are.
    seed : int
    chat : bool
        Ask for "12 + 34" in chat form, and count the last number of the reply. Otherwise ``12+34=``, to be
        continued by the digits of the sum and nothing else.

    Returns
    -------
    Task
    """
    import datasets

    split = split or "train"
    # A text is one value, which is refused, and not a row of digits.
    several = isinstance(digits, Iterable) and not isinstance(digits, str | bytes)
    check = arguments.whole_numbers if several else arguments.whole_number
    checked = check("digits", digits, 1, MAX_DIGITS)
    levels = checked if several else [checked]
    seed = arguments.whole_number("seed", seed, 0, arguments.MAX_SEED)
    arguments.switches(chat=chat)
    if len(set(levels)) < len(levels):
        raise ValueError(f"digits={digits!r} is not possible: give one or more different numbers of digits.")
    shares = [None] * len(levels)
    if n is not None:
        n = arguments.whole_number("n", n, 1)
        if n < len(levels):
            raise ValueError(f"n={n} is not possible with {len(levels)} levels: use {len(levels)} or more.")
        shares = [(n + len(levels) - 1 - index) // len(levels) for index in range(len(levels))]
    drawn = []
    for level, share in zip(levels, shares, strict=True):
        if share is None and split in SPLITS:
            share = min(_DEFAULT_N[split] // len(levels), _most(split, level))
        # Rank within the level first: levels take turns.
        drawn += [(rank, level, problem) for rank, problem in enumerate(sums(split, share, seed, level))]
    answer_format = FORMATS["number" if chat else "exact"]
    rows = []
    for _, level, problem in sorted(drawn, key=lambda item: item[0]):
        text = f"{problem.left} + {problem.right}" if chat else problem.prompt
        asked = answer_format.ask(text)
        rows.append(
            {
                "prompt": [{"role": "user", "content": asked}] if chat else asked,
                "answer": problem.answer,
                "id": f"{problem.left}+{problem.right}",
                "problem": text,
                "level": level,
            }
        )
    provenance = {"source": "generated", "digits": list(levels), "n": len(rows), "seed": seed, "chat": chat}
    return Task("arithmetic", split, datasets.Dataset.from_list(rows), answer_format, provenance)
