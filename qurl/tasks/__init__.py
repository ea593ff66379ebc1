"""Problems with gold answers, their prompts and rewards.

task = load_task("arithmetic", "train", digits=2)
trainer = GRPOTrainer(train_dataset=task.dataset, reward_funcs=task.reward_functions(), ...)
"""

import functools
import inspect
import os
from typing import Any

from qurl.tasks import arithmetic, problems
from qurl.tasks.sources import SOURCES
from qurl.tasks.task import Task, TaskError

__all__ = ["TASKS", "TEST_SETS", "Task", "TaskError", "load_task"]

TASKS = ("arithmetic", *SOURCES)
# The five sets of the paper's Table 3, whose accuracies are averaged.
TEST_SETS = ("aime24", "amc", "math500", "minerva", "olympiadbench")


def load_task(name: str, split: str | None = None, /, **options: Any) -> Task:
    """Load a task.

    Parameters
    ----------
    name : str
        One of ``TASKS``, or the path of a file with problems and answers.
    split : str, optional
        "train" or "test"; default "train" where the task has it. Also by its name.
    **options
        Those of `qurl.tasks.arithmetic.load` (``digits``, ``n``, ``seed``, ``chat``) or of `qurl.tasks.problems.load`
        (``data``, ``n``, ``seed``, ``chat``, ``answer_format``).

    Returns
    -------
    Task

    Raises
    ------
    ValueError
        If the name is unknown, or an option is not known, not possible or of another type.
    FileNotFoundError
        If the data cannot be had, with what to supply.
    """
    if "split" in options:  # options often come from a file, which must not override the split in silence
        if split is not None:
            raise ValueError(
                f"split={options['split']!r} is no option of a task besides split={split!r}: leave it out."
            )
        split = options.pop("split")
    if not isinstance(name, str | os.PathLike):
        raise ValueError(
            f"task={name!r} is not known: use a name such as 'arithmetic', or the path of a file."
        )
    if split is not None and not isinstance(split, str):
        raise ValueError(f"split={split!r} is not possible: use 'train' or 'test'.")
    load = arithmetic.load if name == "arithmetic" else functools.partial(problems.load, name)
    known = inspect.signature(load).parameters
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ValueError(
            f"{unknown[0]}={options[unknown[0]]!r} is no option of task {name!r}: use "
            f"{', '.join(option for option in known if option not in ('name', 'split'))}."
        )
    return load(split, **options)
