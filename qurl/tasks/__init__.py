"""Problems with gold answers, their prompts and rewards.

task = load_task("arithmetic", "test", digits=2, n=100)
trainer = GRPOTrainer(train_dataset=task.dataset, reward_funcs=task.reward_functions(), ...)
"""

from typing import Any

from qurl.tasks import arithmetic
from qurl.tasks.task import Task, TaskError

__all__ = ["TASKS", "Task", "TaskError", "load_task"]

TASKS = ("arithmetic",)


def load_task(name: str, split: str = "train", **options: Any) -> Task:
    """Load a task.

    Parameters
    ----------
    name : str
        "arithmetic".
    split : {"train", "test"}
    **options
        For "arithmetic" those of `qurl.tasks.arithmetic.load`: ``digits``, ``n``, ``seed``, ``chat``.

    Returns
    -------
    Task

    Raises
    ------
    ValueError
        If the name is unknown, or an option is not possible.
    """
    if name == "arithmetic":
        return arithmetic.load(split, **options)
    raise ValueError(f"task={name!r} is not known: use one of {', '.join(map(repr, TASKS))}.")
