"""Dynamic sampling of DAPO (arXiv 2503.14476): groups of equal rewards make room for groups of further prompts.

A group of equal rewards has advantages of zero and teaches nothing. Its place in the generation batch is given to a
group of another prompt of the training set, and again, up to a number of rounds.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn import functional


def equal_groups(advantages: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Which groups have one advantage throughout: that of equal rewards.

    Parameters
    ----------
    advantages : torch.Tensor
        Shape (groups · num_generations,), the members of a group one after the other.
    num_generations : int

    Returns
    -------
    torch.Tensor
        Shape (groups,), bool.
    """
    # Equal rewards give equal advantages, but not exactly zero: the mean of equal numbers is rounded.
    groups = advantages.view(-1, num_generations)
    return (groups == groups[:, :1]).all(1)


def prompt_key(prompt: str | list[dict[str, Any]]) -> str:
    """A text that is equal for equal prompts."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


def further_rows(dataset, used: Iterable[str], count: int, stream: tuple[int, ...]) -> list[dict[str, Any]]:
    """Rows of the training set whose prompts are not in use yet, in an order of their own.

    Parameters
    ----------
    dataset : datasets.Dataset
    used : iterable of str
        `prompt_key` of the prompts that must not come again.
    count : int
        Rows wanted.
    stream : tuple of int
        Names the draw within the run: the same stream gives the same rows, after resuming as well.

    Returns
    -------
    list of dict
        ``count`` rows, or fewer where the training set has no more.
    """
    used, rows = set(used), []
    for index in np.random.default_rng(np.random.SeedSequence(stream)).permutation(len(dataset)):
        if len(rows) == count:
            break
        row = dataset[int(index)]
        key = prompt_key(row["prompt"])
        if key not in used:
            used.add(key)
            rows.append(row)
    return rows


def replace_groups(
    batch: dict[str, torch.Tensor],
    extra: dict[str, torch.Tensor],
    places: list[int],
    groups: list[int],
    num_generations: int,
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    """Put groups of one generation batch into places of another.

    Parameters
    ----------
    batch, extra : dict of torch.Tensor
        As TRL's trainer makes them: tensors of one row per completion, prompts padded on the left, all else on the
        right; numbers without rows are left as they are.
    places : list of int
        Groups of ``batch`` that are replaced.
    groups : list of int
        Groups of ``extra`` that take their places, as many.
    num_generations : int
    pad_token_id : int

    Returns
    -------
    dict of torch.Tensor
        A new batch, padded to the longer of both.
    """
    to = _rows(places, num_generations)
    from_ = _rows(groups, num_generations)
    merged = dict(batch)
    for name, old in batch.items():
        if not isinstance(old, torch.Tensor) or old.dim() == 0:
            continue
        new = extra[name]
        if old.dim() == 2:
            length = max(old.shape[1], new.shape[1])
            value = pad_token_id if name in ("prompt_ids", "completion_ids") else 0
            left = name.startswith("prompt_")
            old, new = (_pad(tensor, length, value, left) for tensor in (old, new))
        merged[name] = old.clone()
        merged[name][to] = new[from_]
    return merged


def _rows(groups: list[int], num_generations: int) -> list[int]:
    return [group * num_generations + member for group in groups for member in range(num_generations)]


def _pad(tensor: torch.Tensor, length: int, value: int, left: bool) -> torch.Tensor:
    missing = length - tensor.shape[1]
    return functional.pad(tensor, (missing, 0) if left else (0, missing), value=value)
