"""Problems with gold answers, their prompts and rewards.

task = load_task("arithmetic", "train", digits=2)
trainer = GRPOTrainer(train_dataset=task.dataset, reward_funcs=task.reward_functions(), ...)
"""

import functools
import inspect
from typing import Any

from qurl.tasks import arithmetic, problems
from qurl.tasks.sources import SOURCES
from qurl.tasks.task import Task, TaskError

__all__ = ["TASKS", "TEST_SETS", "Task", "TaskError", "load_task"]

TASKS = ("arithmetic", *SOURCES)
# The five sets of the paper's Table 3, whose accuracies are averaged.
TEST_SETS = ("aime24", "amc", "math500", "minerva", "olympiadbench")


def load_task(name: str, split: str | None = None, **options: Any) -> Task:
    """Load a task.

    Parameters
    ----------
    name : str
        One of ``TASKS``, or the path of a file with problems and answers.
    split : str, optional
        "train" or "test"; default "train" where the task has it.
    **options
        Those of `qurl.tasks.arithmetic.load` (``digits``, ``n``, ``seed``, ``chat``) or of `qurl.tasks.problems.load`
        (``data``, ``n``, ``seed``, ``chat``, ``answer_format``).

    Returns
    -------
    Task

    Raises
    ------
    ValueError
        If the name is unknown, or an option is not possible.
    FileNotFoundError
        If the data cannot be had, with what to supply.
    """
    load = arithmetic.load if name == "arithmetic" else functools.partial(problems.load, name)
    known = inspect.signature(load).parameters
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ValueError(
            f"{unknown[0]}={options[unknown[0]]!r} is no option of task {name!r}: use "
            f"{', '.join(option for option in known if option not in ('name', 'split'))}."
        )
    return load(split, **options)
