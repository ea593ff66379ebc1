"""Checks of arguments, shared by the engine, the benchmark, the command line and the notebooks.

Each raises a ``ValueError`` of one sentence that names the parameter, its value and what is allowed. Numbers of numpy
count as numbers; ``True`` and ``False`` do not, although Python takes them for 1 and 0.
"""

import os
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

# numpy's generators, which vLLM seeds too, take no larger one.
MAX_SEED = 2**32 - 1
# Sequences sampled at once: each needs one of the tokens of a step, of which vLLM's default on a CPU allows so many.
MAX_SEQUENCES = 4096


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _limits(least: float, most: float | None) -> str:
    return f"of {least} or more" if most is None else f"from {least} to {most}"


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as an int, if it is a whole number from ``least`` to ``most``."""
    if not _is_number(value, Integral) or value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value!r} is not possible: use a whole number {_limits(least, most)}.")
    return int(value)


def whole_numbers(name: str, values: Any, least: int, most: int | None = None) -> list[int]:
    """``values`` as a list of ints, if they are whole numbers from ``least`` to ``most``; at least one."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None
    if not listed or any(
        not _is_number(value, Integral) or value < least or (most is not None and value > most)
        for value in listed
    ):
        raise ValueError(f"{name}={values!r} is not possible: use whole numbers {_limits(least, most)}.")
    return list(map(int, listed))


def number(name: str, value: Any, least: float, most: float) -> float:
    """``value`` as a float, if it is a number from ``least`` to ``most``; NaN is in no range."""
    if not _is_number(value, Real) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} is not possible: use a number from {least} to {most}.")
    return float(value)


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """``value``, if it is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r} is not possible: use one of {', '.join(map(repr, allowed))}.")
    return value


def switches(**values: Any) -> None:
    """Each is ``True`` or ``False``: a text such as "no" would count as true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is not possible: use True or False.")


def model_name(value: Any) -> str | os.PathLike:
    """``value``, if `qurl.models.resolve_model` can look it up: a text that is not empty, or a path."""
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ValueError(
            f"model={value!r} is not possible: use a name such as 'smollm2-135m', a folder or a hub id."
        )
    return value


def token_ids(name: str, sequences: Any) -> list[list[int]]:
    """Sequences of token ids as lists of ints.

    Parameters
    ----------
    name : str
        Of the parameter.
    sequences : iterable of iterables of int
        Lists, numpy arrays or tensors of whole numbers. Nothing is converted: a float or a text in their place is a
        mistake upstream, such as a prompt that was not encoded.

    Raises
    ------
    ValueError
        With the index of the sequence.
    """
    if isinstance(sequences, str | bytes) or not isinstance(sequences, Iterable):
        raise ValueError(f"{name}={sequences!r} is not possible: use a list of lists of token ids.")
    return [_ids(f"{name}[{index}]", ids) for index, ids in enumerate(sequences)]


def _ids(name: str, ids: Any) -> list[int]:
    shown = ids
    if hasattr(ids, "tolist"):  # numpy arrays and tensors: a number of theirs costs more than one of Python's
        ids = ids.tolist()
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ValueError(
            f"{name}={shown!r} is not a list of token ids: encode the prompt with the model's tokenizer."
        )
    ids = list(ids)
    for position, token in enumerate(ids):
        if type(token) is int:
            continue
        value = token.tolist() if hasattr(token, "tolist") else token
        if not _is_number(value, Integral):
            raise ValueError(
                f"{name} holds {value!r}, which is not a token id: encode the prompt with the model's tokenizer."
            )
        ids[position] = int(value)
    return ids


def split_numbers(text: str) -> list[str]:
    """The parts of a text such as "8,64" (brackets and blanks are allowed), each to be read as a whole number.

    An empty text has no parts; an empty part ("8,,64") stays, so that whoever reads the parts refuses it.
    """
    text = text.strip().strip("[]()").strip()
    return [part.strip() for part in text.split(",")] if text else []
