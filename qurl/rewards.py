"""Rewards: functions as TRL's GRPO trainer calls them, one number per completion.

A reward function is called with keyword lists of equal length (``prompts``, ``completions``, ``completion_ids`` and the
columns of the data set) and returns a list of floats. ``None`` means that this completion has no reward: TRL then takes
no gradient from it. Completions are texts, or lists of messages in conversational form.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol


class RewardFunction(Protocol):
    """What TRL accepts as an element of ``reward_funcs``."""

    __name__: str

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        completion_ids: Sequence | None = None,
        **columns: Sequence,
    ) -> list[float | None]: ...


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class Accuracy:
    """1 for a right answer, 0 for a wrong one or none, None where the gold answer cannot be read.

    Parameters
    ----------
    score : callable
        ``(text of the completion, gold) -> bool or None``.

    Attributes
    ----------
    unreadable : collections.Counter
        How many completions had no reward, by gold answer.
    """

    def __init__(self, score: Callable[[str, object], bool | None]):
        self.__name__ = "accuracy"
        self.score = score
        self.unreadable: Counter[str] = Counter()

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        completion_ids: Sequence | None = None,
        **columns: Sequence,
    ) -> list[float | None]:
        rewards = []
        for completion, gold in zip(completions, columns["answer"], strict=True):
            right = self.score(completion_text(completion), gold)
            if right is None:
                self.unreadable[str(gold)] += 1
            rewards.append(None if right is None else float(right))
        return rewards
