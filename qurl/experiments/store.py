"""Where runs are kept: ``runs/<experiment>/<name computed from the parameters>/``.

A run's folder holds ``config.yaml``, ``metrics.csv``, ``result.json`` (written last: a run with it is finished), the
executed notebook, its log, samples and checkpoints, as `qurl.training.train` leaves them.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from filelock import FileLock, Timeout

from qurl.experiments.specs import RunSpec
from qurl.notebook import ParameterError, absolute, output_folder

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """A finished run: its parameters, what ``result.json`` holds, and a row per logged step."""

    spec: RunSpec
    result: dict[str, Any]
    metrics: pd.DataFrame


class RunStore:
    """The runs below one folder.

    Parameters
    ----------
    root : str or path, optional
        Relative paths start at the project's root; default ``runs``. Reading makes no folder.
    """

    def __init__(self, root: str | os.PathLike = ""):
        self.root = absolute(str(root), parameter="runs_dir")

    def prepare(self) -> None:
        """Make the folder; ParameterError if it cannot be written to, or papermill would take it for a pattern."""
        if set("{}") & set(str(self.root)):
            raise ParameterError(
                f"runs_dir={str(self.root)!r} has braces, which papermill fills in: use another."
            )
        output_folder(str(self.root), parameter="runs_dir")

    def folder(self, spec: RunSpec) -> Path:
        """Of a run, whether it is there or not."""
        return self.root / spec.experiment / spec.name

    def state(self, spec: RunSpec) -> str:
        """ "finished", "running" (in any process of this machine), "stopped" (goes on where it was) or "missing"."""
        folder = self.folder(spec)
        if (folder / "result.json").is_file():
            return "finished"
        if not (folder / ".lock").is_file():
            return "missing"
        try:
            with FileLock(folder / ".lock", timeout=0):
                return "stopped"
        except Timeout:
            return "running"
        except OSError:  # of somebody else, who alone may lock and go on with it
            return "stopped"

    @contextlib.contextmanager
    def claim(self, spec: RunSpec) -> Iterator[bool]:
        """Hold the right to start a run; False where another orchestrator holds it. A killed one holds it no longer."""
        folder = self.folder(spec)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".claim", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def load(self, spec: RunSpec) -> Run:
        """A finished run.

        Raises
        ------
        FileNotFoundError
            If it is not finished, or a file of it is gone, with the command that makes it.
        """
        folder = self.folder(spec)
        try:
            result = _read_result(folder)
            metrics = _read_metrics(folder, result["steps"])
        except FileNotFoundError as error:
            if (folder / "result.json").is_file():
                raise FileNotFoundError(
                    f"{error.filename} is gone from a finished run: delete the folder, and the run is repeated."
                ) from None
            raise FileNotFoundError(f"{folder} holds no finished run: qurl reproduce makes it.") from None
        except ValueError as error:
            raise ValueError(
                f"{folder} holds a damaged run ({error}): delete the folder, and it is repeated."
            ) from None
        _require_recipe(folder, spec, result.get("run"))
        return Run(spec, result, metrics)

    def require_recipe(self, spec: RunSpec) -> None:
        """ValueError where the folder holds a run that was begun with other settings than the recipe's."""
        folder = self.folder(spec)
        with contextlib.suppress(
            OSError, yaml.YAMLError
        ):  # not begun; or damaged, which the run itself tells
            _require_recipe(folder, spec, yaml.safe_load((folder / "config.yaml").read_text()))

    def finished(self, specs: Iterable[RunSpec]) -> list[Run]:
        """Those of ``specs`` that are finished, in their order."""
        return [self.load(spec) for spec in specs if self.state(spec) == "finished"]

    def __iter__(self) -> Iterator[Run]:
        """All finished runs of the store; damaged ones are named in the log and left out."""
        for file in sorted(self.root.glob("*/*/result.json")):
            try:
                spec = RunSpec.from_name(file.parent.parent.name, file.parent.name)
            except ValueError:  # a figure, or a run of one's own
                continue
            try:
                yield self.load(spec)
            except (OSError, ValueError) as error:
                logger.warning("left out: %s: %s", file.parent, error)

    def table(self) -> pd.DataFrame:
        """One row per finished run: its parameters, accuracy before and after (in %), steps, seconds and commit."""
        return pd.DataFrame([summary_row(run) for run in self])


def _require_recipe(folder: Path, spec: RunSpec, recorded: Any) -> None:
    if isinstance(recorded, dict) and (other := spec.difference(recorded)):
        raise ValueError(f"{folder} was trained with {other}: delete the folder, and the run is repeated.")


def _read_result(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    kinds = {"steps": int, "seconds": int | float, "accuracy": dict, "run": dict, "engine": dict}
    if (
        not isinstance(result, dict)
        or any(
            not isinstance(result.get(name), kind)
            for name, kind in kinds.items()
            if name in result or name in ("steps", "seconds")
        )
        or not all(
            isinstance(score, dict)
            for name, score in result.get("accuracy", {}).items()
            if name != "problems"
        )
    ):
        raise ValueError("its result.json is not that of a run")
    return result


def _read_metrics(folder: Path, steps: int) -> pd.DataFrame:
    metrics = pd.read_csv(folder / "metrics.csv", index_col="step")
    if not len(metrics) or metrics.index.max() != steps or "reward" not in metrics:
        raise ValueError(f"its metrics.csv does not end at step {steps}")
    if text := [name for name in metrics if not pd.api.types.is_numeric_dtype(metrics[name])]:
        raise ValueError(f"the column {text[0]} of its metrics.csv is not of numbers")
    return metrics


def summary_row(run: Run) -> dict[str, Any]:
    """A run in one row; accuracies in %."""
    about = {name: run.result.get(name) for name in ("steps", "seconds", "date", "git_commit")}
    return run.spec.model_dump() | accuracies(run.result) | about


def accuracies(result: dict[str, Any]) -> dict[str, float]:
    """``before``, ``after`` and ``gain`` of a run in %, and with several test sets ``after:NAME`` of each."""
    accuracy = result.get("accuracy") or {}
    scores = {name: 100 * accuracy[name]["mean"] for name in ("before", "after", "gain") if name in accuracy}
    sets = accuracy.get("after", {}).get("tasks", {})
    return scores | {f"after:{name}": 100 * value for name, value in sets.items()}
