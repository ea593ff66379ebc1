r"""Is this answer right? One policy, for training rewards and evaluation alike.

`check` finds the answer in a completion (`qurl.answers.extraction`), reads it and the gold, and compares them as
values. Integers, decimals, simple fractions and identical spellings are settled in this process; everything else
is parsed and compared, on top of math-verify, in worker processes with a hard deadline and a memory limit
(`qurl.answers.workers`), so that no completion can raise, hang or fill the memory, from whatever thread.

>>> is_correct(r"… so \boxed{\dfrac{11}{4}}", "2.75")
True
>>> check(r"\boxed{6}", r"\pm 6").why
'different values'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

from .extraction import Extraction, find_answer
from .spelling import compact, join_thousands, plain_number, same_plain, tidy, unreadable
from .workers import POOL_SIZE, WorkerFailed, pool

__all__ = ["Verdict", "check", "check_many", "extract_answer", "gold_problem", "is_correct"]

_LONGEST_ANSWER = 5_000  # characters
_NO_ANSWER = Extraction("\u2423", "whole")  # stands for no value


@dataclass(frozen=True)
class Verdict:
    """Why an answer counts as right or wrong.

    Attributes
    ----------
    correct : bool or None
        True or False; None where the gold cannot be read, so that nothing should be learnt from the row.
    extracted : str or None
        The answer found in the completion, None if there is none.
    how : str
        Where it was found: ``box``, ``answer``, ``hashes``, ``stated``, ``whole``, ``number``; or why there is
            none: ``empty``, ``unclosed box``, ``nothing found``.
    why : str
        The reason of the verdict, in words.
    gold : str or sequence of str
        The gold that decided, as given.
    timed_out : bool
        Whether the comparison was stopped at its deadline or its memory limit.
    """

    correct: bool | None
    extracted: str | None
    how: str
    why: str
    gold: str
    timed_out: bool = False


def extract_answer(text: str, *, lenient: bool = True) -> str | None:
    """The final answer in a completion, as written; None if there is none.

    Parameters
    ----------
    text : str
        The completion.
    lenient : bool
        Also accept an answer behind no marker: bold, after "answer is", the last number.
    """
    return find_answer(_string(text), lenient=lenient).text


def _string(value) -> str:
    """Anything as text that can be sent to a worker."""
    text = "" if value is None else value if isinstance(value, str) else str(value)
    return text.encode("utf-8", "replace").decode("utf-8")


def _golds(gold) -> list[str]:
    golds = [gold] if isinstance(gold, str) or not isinstance(gold, Iterable) else list(gold)
    return [_gold_text(_string(g)) for g in golds]


def _gold_text(gold: str) -> str:
    """The gold itself where a whole solution was given: its last box, or what follows GSM8K's marker."""
    if r"\boxed" in gold or r"\fbox" in gold:
        return find_answer(gold, lenient=False).text or ""
    return gold.rsplit("####", 1)[1].strip() if "####" in gold else gold.strip()


def _tolerance(tolerance) -> Fraction | None:
    if tolerance is None:
        return None
    try:
        value = Fraction(str(tolerance).strip())
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if value < 0:
        raise ValueError(
            f"tolerance is {tolerance!r}, but must be None or a number of at least 0 (an absolute error, such as 0.1)."
        )
    return value


def _at_once(answer: str, gold: str, tolerance: Fraction | None) -> tuple[bool | None, str] | None:
    """The verdict where it needs no parser, else None."""
    if problem := unreadable(gold) if len(gold) <= _LONGEST_ANSWER else "too long":
        return None, f"gold unreadable: {problem}"
    if len(answer) > _LONGEST_ANSWER:
        return False, f"answer longer than {_LONGEST_ANSWER} characters"
    one, other = tidy(gold), tidy(answer)
    if one == other or compact(one) == compact(other):
        return True, "same spelling"
    one, other = plain_number(join_thousands(one)), plain_number(join_thousands(other))
    if one and other:
        correct = same_plain(one, other, tolerance)
        return correct, "same number" if correct else "different numbers"
    return None


@dataclass
class _Job:
    """One completion on its way to a verdict."""

    found: Extraction
    golds: list[str]
    tolerance: Fraction | None
    open: list[str]
    verdict: Verdict | None = None
    problem: tuple[str, str] | None = None  # (gold, reason) of a gold that cannot be read

    def settle(self, gold: str, correct: bool | None, why: str, timed_out: bool = False) -> None:
        """Take the verdict on one of the alternative golds: the first accepted one decides."""
        if correct is None:
            self.problem = (gold, why)
        elif correct or self.verdict is None or timed_out:
            self.verdict = Verdict(correct, self.found.text, self.found.how, why, gold, timed_out)

    def result(self) -> Verdict:
        if self.verdict is None:
            gold, why = self.problem or ("", "gold unreadable: empty")
            return Verdict(None, self.found.text, self.found.how, why, gold)
        return self.verdict


def _start(prediction, gold, lenient: bool, tolerance: Fraction | None) -> _Job:
    found = find_answer(_string(prediction), lenient=lenient)
    job = _Job(found, _golds(gold), tolerance, [])
    for text in job.golds:
        if found.text is None:
            problem = unreadable(text[:_LONGEST_ANSWER])
            job.settle(
                text,
                None if problem else False,
                f"gold unreadable: {problem}" if problem else f"no answer: {found.how}",
            )
            continue
        verdict = _at_once(found.text, text, tolerance)
        if verdict is None:
            job.open.append(text)
        else:
            job.settle(text, *verdict)
        if verdict and verdict[0]:
            job.open.clear()
            break
    return job


def _finish(job: _Job) -> Verdict:
    if job.open:
        for gold, correct, why, stopped in _compare(job.found, job.open, job.tolerance):
            job.settle(gold, correct, why, stopped)
    return job.result()


def _compare(
    found: Extraction, golds: list[str], tolerance: Fraction | None
) -> list[tuple[str, bool | None, str, bool]]:
    """(gold, verdict, reason, stopped) from a worker, for each gold up to the first that accepts the answer."""
    try:
        replies = pool().ask([found.text, found.joined, golds, None if tolerance is None else str(tolerance)])
    except WorkerFailed as error:
        return [(golds[0], False, f"stopped: {error}", True)]
    return [(gold, correct, why, False) for gold, (correct, why) in zip(golds, replies, strict=False)]


def check(
    prediction: str,
    gold: str | Sequence[str],
    *,
    lenient: bool = True,
    tolerance: float | str | None = None,
) -> Verdict:
    """Compare the answer of a completion with the gold.

    Parameters
    ----------
    prediction : str
        The completion; any text. None makes it raise or take more than 2 s.
    gold : str or sequence of str
        The right answer. A string that lists several values wants all of them; a *sequence* of strings gives
            alternatives, any one of which is accepted (Minerva).
    lenient : bool
        See `extract_answer`.
    tolerance : float or str, optional
        An absolute error that the problem grants (OlympiadBench's ``error``), on top of the policy.

    Raises
    ------
    ValueError
        ``tolerance`` is not a number of at least 0.
    """
    return _finish(_start(prediction, gold, lenient, _tolerance(tolerance)))


def is_correct(prediction: str, gold: str | Sequence[str], *, lenient: bool = True) -> bool:
    """Whether a completion's answer is right. A gold that cannot be read makes nothing right."""
    return check(prediction, gold, lenient=lenient).correct is True


def check_many(
    predictions: Sequence[str],
    golds: Sequence[str | Sequence[str]],
    *,
    lenient: bool = True,
    tolerance: float | str | None = None,
) -> list[Verdict]:
    """`check` for many completions at once, on all workers; equal pairs are compared once.

    Parameters
    ----------
    predictions : sequence of str
        The completions.
    golds : sequence
        One gold (or sequence of alternatives) for each.
    lenient : bool
        See `extract_answer`.
    tolerance : float or str, optional
        See `check`.

    Raises
    ------
    ValueError
        The two lists differ in length, or ``tolerance`` is not a number of at least 0.
    """
    if len(predictions) != len(golds):
        raise ValueError(
            f"golds has {len(golds)} entries for {len(predictions)} predictions, but must have one for each prediction."
        )
    allowed = _tolerance(tolerance)
    jobs = [_start(p, g, lenient, allowed) for p, g in zip(predictions, golds, strict=True)]
    waiting: dict[tuple, list[int]] = {}
    for i, job in enumerate(jobs):
        if job.open:
            waiting.setdefault((job.found, tuple(job.golds)), []).append(i)
    if waiting:
        with ThreadPoolExecutor(POOL_SIZE, thread_name_prefix="qurl-answers") as threads:
            verdicts = threads.map(lambda same: _finish(jobs[same[0]]), waiting.values())
            for same, verdict in zip(waiting.values(), verdicts, strict=True):
                for i in same:
                    jobs[i] = verdict
    return [job if isinstance(job, Verdict) else job.result() for job in jobs]


def gold_problem(gold: str | Sequence[str]) -> str | None:
    """Why no verdict is possible with a gold, or None: for the loaders, which list such rows.

    Of several alternatives one that can be read is enough.
    """
    problems = []
    for text in _golds(gold):
        problem = unreadable(text) if len(text) <= _LONGEST_ANSWER else "too long"
        if problem is None and plain_number(join_thousands(tidy(text))) is None:
            ((_, correct, why, _),) = _compare(_NO_ANSWER, [text], None)
            problem = why.removeprefix("gold unreadable: ") if correct is None else None
        if problem is None:
            return None
        problems.append(problem)
    return "; ".join(dict.fromkeys(problems)) or "empty"
