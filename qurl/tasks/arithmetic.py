"""Sums of two numbers: an endless, embedded task whose answers are exact.

Every unordered pair of operands belongs to one split for ever, decided by a hash of the pair alone: one in ten is held
out, and ``a+b`` is on the same side as ``b+a``. So no seed, size or order of drawing can leak a held-out sum into
training.
"""

import hashlib
import random
from typing import NamedTuple

SPLITS = ("train", "test")
_HELD_OUT_SHARE = 0.1


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
    if digits < 1:
        raise ValueError(f"digits={digits} is not possible: use 1 or more.")
    low, high = 10 ** (digits - 1), 10**digits
    share = _HELD_OUT_SHARE if split == "test" else 1 - _HELD_OUT_SHARE
    most = int((high - low) ** 2 * share / 2)
    if not 0 <= n <= most:
        raise ValueError(f"n={n} is out of range for split={split!r} with digits={digits}: use 0 to {most}.")
    generator = random.Random(seed)
    drawn: dict[Sum, None] = {}
    while len(drawn) < n:
        pair = Sum(generator.randrange(low, high), generator.randrange(low, high))
        if split_of(*pair) == split:
            drawn[pair] = None
    return list(drawn)
