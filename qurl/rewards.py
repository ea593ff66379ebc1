"""Rewards: functions as TRL's GRPO trainer calls them, one number per completion.

A reward function is called with keyword lists of equal length (``prompts``, ``completions``, ``completion_ids`` and
the columns of the data set) and returns a list of floats. ``None`` means that this completion has no reward.
Completions are texts, or lists of messages in conversational form.

    reward_funcs=[*task.reward_functions(), SoftOverlong(max_tokens=20_480, buffer=4096)], reward_weights=[1.0, 1.0]

does the same as the single function ``WeightedSum([...], [1.0, 1.0])``, but for completions without a reward: TRL
adds up what is left of them, ``WeightedSum`` gives none.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class RewardFunction(Protocol):
    """What TRL accepts as an element of ``reward_funcs``."""

    __name__: str

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Sequence,
    ) -> list[float | None]: ...


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class Accuracy:
    """1 for a right answer, 0 for a wrong one or none, None where the gold answer cannot be read.

    A gold that cannot be read must not be rewarded with 1, as a bare math-verify call does: without a reward the whole
    group has no gradient. In TRL's logs, the column ``extracted`` of the completions holds the answers found and the
    metric ``rewards/accuracy/unreadable_golds`` the share of completions without a reward.

    Parameters
    ----------
    check_many : callable
        ``(texts, golds, tolerances) -> verdicts``, as `qurl.tasks.Task.check_many`; the attribute ``correct`` of a
        verdict is True, False or None.

    Attributes
    ----------
    unreadable : collections.Counter
        How many completions had no reward, by gold answer.
    """

    def __init__(self, check_many: Callable[..., list[Any]]):
        self.__name__ = "accuracy"
        self.check_many = check_many
        self.unreadable: Counter[str] = Counter()

    def __call__(self, prompts, completions, completion_ids=None, **columns) -> list[float | None]:
        golds = columns["answer"]
        verdicts = self.check_many(
            [completion_text(completion) for completion in completions], golds, columns.get("tolerance")
        )
        skipped = [gold for verdict, gold in zip(verdicts, golds, strict=True) if verdict.correct is None]
        self.unreadable.update(map(str, skipped))
        if "log_extra" in columns:  # a trainer's: its table of completions shows what a reward was given for
            columns["log_extra"]("extracted", [verdict.extracted for verdict in verdicts])
            columns["log_metric"]("rewards/accuracy/unreadable_golds", len(skipped) / len(golds))
        return [None if verdict.correct is None else float(verdict.correct) for verdict in verdicts]


class Format:
    """1 where a completion obeys a format, else 0.

    Parameters
    ----------
    pattern : str
        Regular expression that must occur in the text; ``.`` matches line breaks too. Anchor it with ``^`` and ``$``
        where the whole text must obey.
    """

    def __init__(self, pattern: str):
        self.__name__ = "format"
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern={pattern!r} is no regular expression ({error}): correct it.") from None

    def __call__(self, prompts, completions, completion_ids=None, **columns) -> list[float]:
        return [
            float(self.pattern.search(completion_text(completion)) is not None) for completion in completions
        ]


class SoftOverlong:
    """DAPO's soft over-long punishment (arXiv 2503.14476, Eq. 13), in tokens.

    0 up to ``max_tokens - buffer``, then falling linearly to -1 at ``max_tokens``, and -1 beyond.

    Parameters
    ----------
    max_tokens : int
        Expected longest completion; end tokens count.
    buffer : int
        Width of the ramp, from 1 to ``max_tokens``. DAPO: 4,096 of 20,480.

    Raises
    ------
    ValueError
        If the two are not possible together.
    """

    def __init__(self, max_tokens: int, buffer: int):
        self.__name__ = "soft_overlong"
        if not 1 <= buffer <= max_tokens:
            raise ValueError(
                f"buffer={buffer} is not possible with max_tokens={max_tokens}: use 1 to {max_tokens}, or leave "
                "the penalty out."
            )
        self.max_tokens, self.buffer = max_tokens, buffer

    def penalty(self, tokens: int) -> float:
        """For a completion of so many tokens: from 0 to -1."""
        return -min(max(tokens - (self.max_tokens - self.buffer), 0) / self.buffer, 1.0)

    def __call__(self, prompts, completions, completion_ids=None, **columns) -> list[float]:
        if completion_ids is None:
            raise ValueError(
                "completion_ids=None is not possible for soft_overlong, which counts tokens: pass the token ids."
            )
        return [self.penalty(len(ids)) for ids in completion_ids]


class WeightedSum:
    """One reward out of several; none where one of them has none.

    Parameters
    ----------
    functions : sequence of RewardFunction
    weights : sequence of float
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float]):
        if not functions or len(functions) != len(weights):
            raise ValueError(
                f"weights={list(weights)} do not fit {len(functions)} reward functions: give one weight for each."
            )
        self.functions, self.weights = list(functions), list(weights)
        self.__name__ = "+".join(function.__name__ for function in functions)

    def __call__(self, prompts, completions, completion_ids=None, **columns) -> list[float | None]:
        rewards = [
            function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
            for function in self.functions
        ]
        return [
            None if None in row else sum(w * reward for w, reward in zip(self.weights, row, strict=True))
            for row in zip(*rewards, strict=True)
        ]
