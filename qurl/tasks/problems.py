"""Tasks from published data sets: files in, one row per different problem out, and an account of what was left out."""

import logging
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qurl import arguments
from qurl.tasks.formats import FORMATS
from qurl.tasks.records import SUFFIXES, Problem, RecordError, read_file, read_problem
from qurl.tasks.sources import SOURCES, Files, find_files
from qurl.tasks.task import Task, TaskError

logger = logging.getLogger(__name__)


def load(
    name: str,
    split: str | None = None,
    *,
    data: str | Path | None = None,
    n: int | None = None,
    seed: int = 0,
    chat: bool = True,
    answer_format: str | None = None,
) -> Task:
    """A task whose problems come from files.

    Parameters
    ----------
    name : str
        A key of `qurl.tasks.sources.SOURCES`, or the path of a file of your own.
    split : str, optional
        "train" or "test", as far as the data set has it; default the first that it has. For a file of your own a label.
    data : str or path, optional
        See `qurl.tasks.sources.find_files`.
    n : int, optional
        Only so many problems, drawn at random and kept in order; default all.
    seed : int
        Of that draw.
    chat : bool
        Ask in chat form. Turn it off for base models, which have no chat template.
    answer_format : str, optional
        A key of `qurl.tasks.formats.FORMATS`: how to ask; default as the data set's paper does, "boxed" for a file of
        your own.

    Returns
    -------
    Task
        Its ``provenance`` counts rows, duplicates and rows without problem or answer, and lists problems that come with
        different answers, of which the first is kept.

    Raises
    ------
    ValueError
        If an option is not possible.
    FileNotFoundError
        If the data cannot be had, with what to supply; without network within seconds.
    TaskError
        If no problem is left.
    RecordError
        If a file cannot be read.
    """
    if data is not None and not isinstance(data, str | os.PathLike):
        raise ValueError(
            f"data={data!r} is not possible: use the path of a file or folder, a hub id, or 'sample'."
        )
    source = SOURCES.get(name)
    if source is None:
        path = Path(name)
        if data is not None or path.suffix not in SUFFIXES:
            raise ValueError(
                f"task={name!r} is not known: use 'arithmetic', one of {', '.join(map(repr, SOURCES))}, or the path of "
                f"a file that ends in {', '.join(SUFFIXES)}."
            )
        if not path.is_file():
            raise FileNotFoundError(f"task={name!r} is no file: give the path of an existing one.")
        split = split or "test"
        files = Files((path,), name)
    else:
        split = split or next(iter(source.files))
        if split not in source.files:
            raise ValueError(
                f"split={split!r} of task {name!r} does not exist: use {' or '.join(map(repr, source.files))}."
            )
        files = None
    format_name = answer_format or (source.answer_format if source else "boxed")
    arguments.choice("answer_format", format_name, tuple(FORMATS))
    if n is not None:
        n = arguments.whole_number("n", n, 1)
    seed = arguments.whole_number("seed", seed, 0, arguments.MAX_SEED)
    arguments.switches(chat=chat)

    files = files or find_files(name, split, data)
    provenance: dict[str, Any] = {
        "source": files.source,
        "revision": files.revision,
        "sha256": files.checksums(),
    }
    problems, account = distinct(_read(files))
    provenance |= account
    if not problems:
        raise TaskError(
            f"{files.source} leaves no problem for task {name!r}: {account['rows']} rows, of which "
            f"{account['without_problem']} have no problem and {account['without_answer']} no answer; give another "
            "file."
        )
    if n is not None and n > len(problems):
        raise ValueError(f"n={n} is more than the {len(problems)} problems of task {name!r}: use fewer.")
    if n is not None:
        chosen = sorted(random.Random(seed).sample(range(len(problems)), n))
        problems = [problems[index] for index in chosen]
    provenance |= {"n": len(problems), "seed": None if n is None else seed, "answer_format": format_name}
    task_name = name if source else Path(name).stem
    return Task(task_name, split, _to_dataset(problems, format_name, chat), FORMATS[format_name], provenance)


def _read(files: Files) -> Iterable[Problem]:
    for path in files.paths:
        for index, record in enumerate(read_file(path)):
            try:
                yield read_problem(record)
            except RecordError as error:
                raise RecordError(f"{path}: entry {index} {error}") from None


def distinct(problems: Iterable[Problem]) -> tuple[list[Problem], dict[str, Any]]:
    """Keep the first of equal problems, whatever their white space, and account for the others.

    Parameters
    ----------
    problems : iterable of Problem

    Returns
    -------
    list of Problem
        In first-seen order, with unique ids: the data set's own where they are, else the position in this list.
    dict
        ``rows``, ``without_problem``, ``without_answer``, ``duplicates`` (counts) and ``conflicting``: for each problem
        with different answers its text and those answers, the kept one first.
    """
    kept: dict[str, Problem] = {}
    golds: dict[str, list[str | list[str]]] = {}
    account: dict[str, Any] = {"rows": 0, "without_problem": 0, "without_answer": 0, "duplicates": 0}
    for problem in problems:
        account["rows"] += 1
        if not problem.text:
            account["without_problem"] += 1
        elif problem.gold is None:
            account["without_answer"] += 1
        else:
            key = " ".join(problem.text.split())
            if key in kept:
                account["duplicates"] += 1
                if problem.gold not in golds[key] and not _same(problem.gold, golds[key][0]):
                    golds[key].append(problem.gold)
            else:
                kept[key], golds[key] = problem, [problem.gold]
    account["conflicting"] = [
        {"problem": kept[key].text, "answers": answers} for key, answers in golds.items() if len(answers) > 1
    ]
    if account["conflicting"]:
        logger.warning(
            "%d problems come with different answers, of which the first is kept: %s",
            len(account["conflicting"]),
            "; ".join(
                f"{entry['problem'][:60]!r}: {entry['answers']}" for entry in account["conflicting"][:3]
            ),
        )
    dropped = account["duplicates"] + account["without_problem"] + account["without_answer"]
    if dropped:
        logger.info("%d of %d rows are left out: %s", dropped, account["rows"], account)
    result = list(kept.values())
    ids = {problem.id for problem in result}
    if None in ids or len(ids) < len(result):
        result = [
            Problem(problem.text, problem.gold, str(index), problem.tolerance)
            for index, problem in enumerate(result)
        ]
    return result, account


def _same(gold: str | list[str], other: str | list[str]) -> bool:
    """Whether two spellings of gold answers, such as 97 and 097, mean the same."""
    from qurl.answers import is_correct

    spellings = [gold] if isinstance(gold, str) else gold
    return any(is_correct(f"\\boxed{{{spelling}}}", other) for spelling in spellings)


def _to_dataset(problems: list[Problem], format_name: str, chat: bool) -> Any:
    import datasets

    asked = [FORMATS[format_name].ask(problem.text) for problem in problems]
    golds: list[Any] = [problem.gold for problem in problems]
    if any(isinstance(gold, list) for gold in golds):  # a column has one type
        golds = [gold if isinstance(gold, list) else [gold] for gold in golds]
    columns = {
        "prompt": [[{"role": "user", "content": text}] for text in asked] if chat else asked,
        "answer": golds,
        "id": [problem.id for problem in problems],
        "problem": [problem.text for problem in problems],
    }
    if any(problem.tolerance for problem in problems):
        columns["tolerance"] = [problem.tolerance for problem in problems]
    return datasets.Dataset.from_dict(columns)
