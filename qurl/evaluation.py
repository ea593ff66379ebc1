"""How often a policy answers right: avg@k, pass@k, maj@k of a task, with intervals and with what may explain them.

    evaluation = evaluate("smollm2-135m", load_task("gsm8k", "test", data="test.jsonl"), k=4, dtype="int8")
    evaluation.scores["avg@4"], show_wrong(evaluation)

An evaluation writes each problem to its folder as soon as it is answered and goes on there after an interruption; what
is finished is read and not repeated. Sampling goes through `qurl.rollout.RolloutEngine` in any of its formats, and the
judgement through `qurl.tasks.Task.check`, as in training.

Sources: pass@k as estimated without bias by Chen et al. (arXiv 2107.03374, Eq. 1); avg@k as in Table 3 of QuRL
(arXiv 2602.13953); intervals by resampling problems, not samples, which are not independent of each other.
"""

import contextlib
import html
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import pandas as pd

import qurl
from qurl.arguments import number, whole_number
from qurl.files import whole_file, write_whole
from qurl.models import resolve_model
from qurl.tasks import Task

if TYPE_CHECKING:
    from IPython.display import HTML
    from transformers import PreTrainedTokenizerBase

    from qurl.rollout import RolloutEngine, Rollouts

logger = logging.getLogger(__name__)

RESAMPLES = 4000
CONFIDENCE = 0.95
# A share of truncated samples, or of samples without an answer, from which on it explains a score.
_WARN_SHARE = 0.5
_RESULT, _SAMPLES, _SETTINGS = "result.json", "samples.parquet", "settings.json"


def avg_at_k(correct: Sequence[Sequence[bool]]) -> float:
    """Mean over problems of the share of right samples, from 0 to 1.

    Parameters
    ----------
    correct : sequence of sequence of bool
        The samples of each problem; every problem weighs the same.
    """
    return float(np.mean([np.mean(samples) for samples in correct]))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of ``k`` samples is right, estimated without bias: 1 - C(n-c, k) / C(n, k).

    Parameters
    ----------
    n : int
        Samples drawn.
    c : int
        Right ones among them.
    k : int

    Raises
    ------
    ValueError
        If ``k`` exceeds ``n``: nothing is known of more samples than there are.
    """
    if not 0 <= c <= n or n < 1:
        raise ValueError(
            f"c={c} of n={n} right samples is not possible: use 0 <= c <= n with n of 1 or more."
        )
    if not 1 <= k <= n:
        raise ValueError(f"k={k} is not possible with n={n} samples: use 1 to {n}, or draw more samples.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def maj_at_k(
    answers: Sequence[str | None], correct: Sequence[bool], same: Callable[[str, str], bool] = str.__eq__
) -> float:
    """Probability that the most frequent answer is right; answers that tie are drawn with equal chance.

    Parameters
    ----------
    answers : sequence of str or None
        One for each sample; None has no vote.
    correct : sequence of bool
    same : callable
        Whether two wrong answers are the same. Right ones are, whatever their spelling.
    """
    right = sum(correct)
    wrong: list[list] = []  # answer, votes
    for answer, is_right in zip(answers, correct, strict=True):
        if is_right or answer is None:
            continue
        group = next((group for group in wrong if same(group[0], answer)), None)
        if group:
            group[1] += 1
        else:
            wrong.append([answer, 1])
    most = max([right, *(votes for _, votes in wrong)])
    if right < most or right == 0:
        return 0.0
    return 1.0 / (1 + sum(votes == most for _, votes in wrong))


def bootstrap_interval(
    tasks: Sequence[np.ndarray], confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile intervals of the mean over problems, averaged over tasks.

    Parameters
    ----------
    tasks : sequence of numpy.ndarray
        For each task its problems' values, (problems,) or (problems, scores). Problems are resampled within their task,
        ``RESAMPLES`` times, the same ones for all scores.
    confidence : float
    seed : int

    Returns
    -------
    (numpy.ndarray, numpy.ndarray)
        Lower and upper ends, () or (scores,).
    """
    generator = np.random.default_rng(seed)
    means = 0.0
    for values in tasks:
        values = np.asarray(values, dtype=float)
        times_drawn = generator.multinomial(
            len(values), np.full(len(values), 1 / len(values)), size=RESAMPLES
        )
        means = means + times_drawn @ values / len(values)
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(means / len(tasks), ends, axis=0)
    return low, high


@dataclass(frozen=True)
class Evaluation:
    """Scores of one task with everything behind them.

    Attributes
    ----------
    settings : dict
        Task and its provenance, engine, ``k``, limits.
    scores : dict of str to float
        ``avg@k``, ``pass@j`` for powers of two up to k, ``maj@k``; from 0 to 1.
    intervals : dict of str to (float, float)
        Of each score, by bootstrap over problems.
    counts : dict
        Problems, samples, ``truncated`` and ``no_answer`` (shares of samples), ``distinct`` (share of completions that
        differ from the earlier ones of their problem), ``mean_tokens``, ``unreadable_golds`` (ids, left out of the
        scores).
    warnings : list of str
    samples : pandas.DataFrame
        One row per problem and sample: ``id``, ``sample``, ``problem``, ``gold``, ``correct`` (null where the gold
        cannot be read), ``extracted``, ``how`` and ``why`` as in `qurl.answers.Verdict`,
        ``finish_reason``, ``tokens``, ``completion``.
    complete : bool
        False while other shards of the same folder are not finished; the scores are then those of what is there.
    """

    settings: dict[str, Any]
    scores: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    counts: dict[str, Any]
    warnings: list[str]
    samples: pd.DataFrame
    complete: bool = True

    def row(self) -> dict[str, Any]:
        """One line of a table: task, scores in percent, and the shares beside them."""
        headline = f"avg@{self.settings['k']}"
        low, high = self.intervals[headline]
        return {
            "task": self.settings["task"],
            "dtype": self.settings["dtype"],
            **{name: 100 * score for name, score in self.scores.items()},
            "interval": f"{100 * low:.1f}-{100 * high:.1f}",
            "problems": self.counts["problems"],
            "truncated": 100 * self.counts["truncated"],
            "no_answer": 100 * self.counts["no_answer"],
            "max_tokens": self.settings["max_tokens"],
        }


def summarize(
    samples: pd.DataFrame,
    settings: dict[str, Any],
    same: Callable[[str, str], bool] = str.__eq__,
    complete: bool = True,
) -> Evaluation:
    """Scores, intervals and warnings of sampled and judged completions.

    Parameters
    ----------
    samples : pandas.DataFrame
        As `Evaluation.samples`.
    settings : dict
        With ``task``, ``k`` and ``max_tokens``.
    same : callable
        Whether two wrong answers are the same, for maj@k.
    complete : bool

    Raises
    ------
    ValueError
        If no problem has a gold answer that can be read.
    """
    k = settings["k"]
    unreadable = samples.loc[samples["correct"].isna(), "id"].unique().tolist()
    judged = samples[samples["correct"].notna()]
    if judged.empty:
        raise ValueError(
            f"task {settings['task']!r} has no gold answer that can be read, as {str(samples['gold'].iloc[0])!r}: give "
            "another data file."
        )
    per_problem = pd.DataFrame([_scores(rows, k, same) for _, rows in judged.groupby("id", sort=False)])
    low, high = bootstrap_interval([per_problem.to_numpy()])
    scores = {name: float(mean) for name, mean in per_problem.mean().items()}
    intervals = {
        name: (float(a), float(b)) for name, a, b in zip(per_problem.columns, low, high, strict=True)
    }
    truncated, no_answer = samples["finish_reason"] == "length", samples["extracted"].isna()
    counts = {
        "problems": int(judged["id"].nunique()),
        "samples": len(samples),
        "truncated": float(truncated.mean()),
        "no_answer": float(no_answer.mean()),
        "distinct": float(1 - samples.duplicated(["id", "completion"]).mean()),
        "mean_tokens": float(samples["tokens"].mean()),
        "unreadable_golds": unreadable,
    }
    warnings = []
    wrong = ~samples["correct"].fillna(True).astype(bool)
    for share_of, what in (
        (truncated, f"were cut off at max_tokens={settings['max_tokens']}: raise it"),
        (
            no_answer & ~truncated,
            "hold no answer in a readable format: check the prompt and the chat template",
        ),
    ):
        if share_of.mean() >= _WARN_SHARE or (wrong.any() and share_of[wrong].mean() >= _WARN_SHARE):
            warnings.append(
                f"{share_of.mean():.0%} of all samples and {share_of[wrong].mean():.0%} of the wrong ones {what}, "
                "before taking the score for the policy's ability."
            )
    if k > 1 and counts["distinct"] <= 1 / k:
        warnings.append(
            f"All {k} samples of each problem are equal: they count as one; raise the temperature."
        )
    if unreadable:
        warnings.append(
            f"{len(unreadable)} problems have a gold answer that cannot be read and are left out: "
            f"{', '.join(unreadable[:10])}."
        )
    return Evaluation(settings, scores, intervals, counts, warnings, samples.reset_index(drop=True), complete)


def _scores(rows: pd.DataFrame, k: int, same: Callable[[str, str], bool]) -> dict[str, float]:
    """The scores of one problem."""
    correct = rows["correct"].astype(bool).tolist()
    scores = {f"avg@{k}": float(np.mean(correct))}
    j = 1
    while j <= k:
        scores[f"pass@{j}"] = pass_at_k(len(correct), sum(correct), j)
        j *= 2
    if k > 1:
        answers = [None if pd.isna(answer) else answer for answer in rows["extracted"]]
        scores[f"maj@{k}"] = maj_at_k(answers, correct, same)
    return scores


def average(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The mean of the tasks' avg@k, each task weighing the same as in Table 3, as a line like `Evaluation.row`.

    Raises
    ------
    ValueError
        If the evaluations differ in ``k``.
    """
    ks = {evaluation.settings["k"] for evaluation in evaluations}
    if len(ks) != 1:
        raise ValueError(f"evaluations with k={sorted(ks)} have no common average: give those with one k.")
    name = f"avg@{ks.pop()}"
    values = []
    for evaluation in evaluations:
        judged = evaluation.samples[evaluation.samples["correct"].notna()]
        values.append(judged["correct"].astype(float).groupby(judged["id"]).mean().to_numpy())
    low, high = bootstrap_interval(values)
    return {
        "task": "average",
        "dtype": evaluations[0].settings["dtype"],
        name: 100 * float(np.mean([evaluation.scores[name] for evaluation in evaluations])),
        "interval": f"{100 * low:.1f}-{100 * high:.1f}",
        "problems": sum(evaluation.counts["problems"] for evaluation in evaluations),
    }


def evaluate(
    engine: "RolloutEngine | str | os.PathLike",
    task: Task,
    k: int = 4,
    *,
    max_tokens: int = 512,
    temperature: float = 0.6,
    output: str | os.PathLike | None = None,
    dtype: str = "bf16",
    max_num_seqs: int = 64,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
    gather: Callable[[list], list] | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    report: Callable[[str], None] = logger.info,
) -> Evaluation:
    """Sample ``k`` completions of every problem, judge them, and score the policy.

    Parameters
    ----------
    engine : RolloutEngine, str or path
        A live engine, which keeps its weights; or a model that `qurl.models.resolve_model` knows, for which an engine
        is built with ``dtype``, ``max_num_seqs`` and ``seed``, and closed.
    task : Task
    k : int
        Samples of each problem; has nothing to do with the group size of training.
    max_tokens : int
        Longest completion; what is cut off counts as it stands and is reported.
    temperature : float
        0 decodes greedily, with ``k=1``.
    output : str or path, optional
        Folder for samples.parquet and result.json. A finished one is read, an interrupted one continued, one with other
        settings refused.
    dtype : {"bf16", "fp32", "int8", "fp8"}
    max_num_seqs : int
    seed : int
    shard : (int, int)
        Index and count of this process, where several share ``output``, one for each GPU.
    gather : callable, optional
        Joins a list over all shards' processes, such as `accelerate.utils.gather_object`. All then call `evaluate`
        together and get the whole evaluation, and the first alone writes to ``output``.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        Default that of the engine's model.
    report : callable
        Takes a line after every call of the engine.

    Returns
    -------
    Evaluation

    Raises
    ------
    ValueError
        For arguments that are not possible, before anything slow; also `qurl.tasks.TaskError` where model and task do
        not fit.
    FileExistsError
        If ``output`` holds an evaluation with other settings.
    """
    k = whole_number("k", k, 1)
    max_tokens = whole_number("max_tokens", max_tokens, 1)
    temperature = number("temperature", temperature, 0, 2)
    if temperature == 0 and k > 1:
        raise ValueError(
            f"k={k} with temperature=0 draws the same sample k times: use k=1 or a temperature above 0."
        )
    index, count = shard
    most = len(task.dataset) if gather is None else count
    if not 0 <= index < count <= most:
        raise ValueError(
            f"shard={shard} is not possible: use (index, count) with 0 <= index < count <= {most}, the number of "
            "problems."
        )
    given = isinstance(engine, str | os.PathLike)
    settings = {
        "task": task.name,
        "split": task.split,
        "data": task.provenance,
        "model": str(engine if given else engine.model),
        "dtype": dtype if given else engine.dtype,
        "code_bits": 8 if given else engine.code_bits,
        "k": k,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed if given else None,
    }
    writes = output is not None and (gather is None or index == 0)
    store = _Store(Path(output), settings, shard) if writes else _Memory(settings)
    finished = store.finished()
    if gather is not None:
        finished = next((found for found in gather([finished]) if found is not None), None)
    if finished is not None:
        return finished

    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(resolve_model(engine) if given else engine.path)
    task.self_check(tokenizer)
    rows = list(task.dataset)
    mine = [row for row in rows[index::count] if row["id"] not in store.done]
    prompts = [task.render(row, tokenizer) for row in mine]
    with contextlib.ExitStack() as stack:
        if mine:
            if given:
                from qurl.rollout import RolloutEngine

                longest = max(map(len, prompts)) + max_tokens
                engine = stack.enter_context(
                    RolloutEngine(engine, dtype, max_model_len=longest, max_num_seqs=max_num_seqs, seed=seed)
                )
            store.settings = settings = settings | {"engine": engine.description}
            # Enough for the engine to stay busy while the last sequences of a call come to their end.
            step = max(1, math.ceil(2 * engine.max_num_seqs / k))
            for start in range(0, len(mine), step):
                batch = slice(start, start + step)
                rollouts = engine.generate(prompts[batch], k, max_tokens, temperature)
                texts = tokenizer.batch_decode(rollouts.completion_ids, skip_special_tokens=True)
                samples = _judge(task, mine[batch], texts, rollouts)
                for offset, row in enumerate(mine[batch]):
                    store.add(row["id"], samples[offset * k : (offset + 1) * k])
                store.flush()
                report(
                    f"{task.name}: {min(start + step, len(mine))} of {len(mine)} problems, "
                    f"{rollouts.completion_tokens / rollouts.seconds:.0f} tokens/s"
                )
    if gather is not None:
        for groups in gather([store.done]):
            store.done = groups | store.done
    return store.finish([row["id"] for row in rows], _same_answer(task))


def _judge(
    task: Task, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], rollouts: "Rollouts"
) -> list[dict]:
    """The records of all samples of ``rows``, those of the first row first."""
    repeated = [row for row in rows for _ in range(len(texts) // len(rows))]
    verdicts = task.check_many(
        texts, [row["answer"] for row in repeated], [row.get("tolerance") for row in repeated]
    )
    return [
        {
            "problem": row["problem"],
            "gold": row["answer"] if isinstance(row["answer"], str) else " | ".join(row["answer"]),
            "correct": verdict.correct,
            "extracted": verdict.extracted,
            "how": verdict.how,
            "why": verdict.why,
            "finish_reason": finish_reason,
            "tokens": len(ids),
            "completion": text,
        }
        for row, text, verdict, ids, finish_reason in zip(
            repeated, texts, verdicts, rollouts.completion_ids, rollouts.finish_reasons, strict=True
        )
    ]


def _same_answer(task: Task) -> Callable[[str, str], bool]:
    def same(left: str, right: str) -> bool:
        return left == right or bool(task.check(task.answer_format.obey(left), right).correct)

    return same


def _summarize_groups(
    groups: Mapping[str, list[dict]], ids: Sequence[str], settings: dict[str, Any], same: Callable
) -> Evaluation:
    """Of the problems that are there, in the task's order."""
    rows = [
        {"id": id, "sample": index, **sample}
        for id in ids
        if id in groups
        for index, sample in enumerate(groups[id])
    ]
    columns = {"correct": "boolean", "extracted": "string", "tokens": "int64"}
    samples = pd.DataFrame(rows).astype(columns)
    return summarize(samples, settings, same, complete=len({row["id"] for row in rows}) == len(ids))


class _Memory:
    """Samples of an evaluation without a folder."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
        self.done: dict[str, list[dict]] = {}

    def finished(self) -> None:
        return None

    def add(self, id: str, samples: list[dict]) -> None:
        self.done[id] = samples

    def flush(self) -> None:
        pass

    def finish(self, ids: list[str], same: Callable) -> Evaluation:
        return _summarize_groups(self.done, ids, self.settings, same)


class _Store(_Memory):
    """Samples in a folder: a line for each problem, appended as a whole; at the end one Parquet file.

    A process killed while it writes leaves at most one broken line, which is cut off and its problem sampled again.
    Several shards append to a file each. Who finds all problems answered writes the result.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], shard: tuple[int, int]):
        super().__init__(settings)
        self.folder = folder
        self.lines = folder / "samples-{}-of-{}.jsonl".format(*shard)
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = filelock.FileLock(folder / ".lock")
        # Through JSON, in which tuples are lists. The same data may lie elsewhere.
        wanted = _without_place(json.loads(json.dumps(settings)))
        with self.lock:
            if (folder / _SETTINGS).exists():
                found = _without_place(json.loads((folder / _SETTINGS).read_text()))
                different = [key for key in wanted if wanted[key] != found.get(key)]
                if different:
                    key = different[0]
                    raise FileExistsError(
                        f"{folder} holds an evaluation with {key}={found.get(key)!r} instead of {wanted[key]!r}: give "
                        "another folder."
                    )
            if self.lines.exists():
                content = self.lines.read_bytes()
                os.truncate(self.lines, content.rfind(b"\n") + 1)
            self._read()

    def _read(self) -> None:
        for file in sorted(self.folder.glob("samples-*-of-*.jsonl")):
            for line in file.read_text().split("\n")[:-1]:
                problem = json.loads(line)
                self.done.setdefault(problem["id"], problem["samples"])

    def finished(self) -> Evaluation | None:
        if not (self.folder / _RESULT).exists():
            return None
        return load_evaluation(self.folder)

    def add(self, id: str, samples: list[dict]) -> None:
        super().add(id, samples)
        if not (self.folder / _SETTINGS).exists():  # not before there is something to keep
            write_whole(self.folder / _SETTINGS, json.dumps(self.settings, indent=2) + "\n")
        with open(self.lines, "a") as stream:
            stream.write(json.dumps({"id": id, "samples": samples}) + "\n")

    def flush(self) -> None:
        with open(self.lines, "a") as stream:
            os.fsync(stream.fileno())

    def finish(self, ids: list[str], same: Callable) -> Evaluation:
        with self.lock:
            finished = self.finished()
            if finished is not None:  # another shard was first
                return finished
            self._read()
            # Of the engine too, which a process that found everything sampled has not built.
            self.settings = json.loads((self.folder / _SETTINGS).read_text())
            evaluation = super().finish(ids, same)
            if evaluation.complete:
                with whole_file(self.folder / _SAMPLES) as partial:
                    evaluation.samples.to_parquet(partial, index=False)
                result = {
                    key: value
                    for key, value in vars(evaluation).items()
                    if key not in ("samples", "complete")
                }
                write_whole(
                    self.folder / _RESULT, json.dumps(result | {"qurl": qurl.__version__}, indent=2) + "\n"
                )
                for file in self.folder.glob("samples-*-of-*.jsonl"):
                    file.unlink()
            return evaluation


def _without_place(settings: dict[str, Any]) -> dict[str, Any]:
    data = {key: value for key, value in settings["data"].items() if key not in ("source", "revision")}
    return settings | {"data": data}


def load_evaluation(folder: str | os.PathLike) -> Evaluation:
    """Read a finished evaluation.

    Raises
    ------
    FileNotFoundError
        If the folder holds none, or one that was interrupted.
    """
    folder = Path(folder)
    if not (folder / _RESULT).is_file():
        raise FileNotFoundError(
            f"{folder} holds no finished evaluation: run it again with output={str(folder)!r}."
        )
    result = json.loads((folder / _RESULT).read_text())
    result.pop("qurl")
    result["intervals"] = {name: tuple(ends) for name, ends in result["intervals"].items()}
    samples = pd.read_parquet(folder / _SAMPLES, dtype_backend="numpy_nullable")
    return Evaluation(**result, samples=samples)


def show_wrong(evaluation: Evaluation, n: int = 20) -> "HTML":
    """Completions that were not right, to open one by one in a notebook cell.

    Parameters
    ----------
    evaluation : Evaluation
    n : int
        At most so many, those of the first problems.

    Returns
    -------
    IPython.display.HTML
        With problem, gold answer, what was extracted and why it was not right. It needs no kernel, so it stays alive in
        a saved notebook.
    """
    from IPython.display import HTML

    wrong = evaluation.samples[~evaluation.samples["correct"].fillna(False).astype(bool)]
    parts = [
        f"<p>{len(wrong)} of {len(evaluation.samples)} completions of {evaluation.settings['task']} are not right"
    ]
    parts.append(f"; the first {n}:</p>" if len(wrong) > n else ":</p>")
    for row in wrong.head(n).to_dict("records"):
        extracted = "no answer" if pd.isna(row["extracted"]) else row["extracted"]
        title = f"{row['id']} #{row['sample']}: {extracted} instead of {row['gold']}"
        facts = f"{row['why']} ({row['how']}) · {row['finish_reason']} after {row['tokens']} tokens"
        parts.append(
            f"<details><summary>{html.escape(title)}</summary><p>{html.escape(row['problem'])}</p>"
            f"<p><em>{html.escape(facts)}</em></p>"
            f"<pre style='white-space: pre-wrap'>{html.escape(row['completion'])}</pre></details>"
        )
    return HTML("".join(parts))
