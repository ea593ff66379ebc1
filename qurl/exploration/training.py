"""Notebooks 40, 50 and 90: a run that is watched, runs that are compared, a task of one's own."""

import fnmatch
import time
from collections.abc import Sequence
from typing import Literal

import pandas as pd
import pydantic
from transformers import TrainerCallback

from qurl.diagnostics import history
from qurl.experiments.results import curves as run_windows
from qurl.experiments.store import Run, RunStore
from qurl.notebook import ParameterError, Parameters
from qurl.plots import curves, windowed


class LiveTrainConfig(Parameters):
    """Parameters of ``notebooks/40_train.ipynb``."""

    model: str = pydantic.Field(examples=["tiny"])
    dtype: Literal["int8", "fp8", "bf16"] = pydantic.Field(examples=["int8"])
    objective: Literal["naive", "proximal", "decoupled", "tis", "acr"] = pydantic.Field(examples=["acr"])
    code_bits: int = pydantic.Field(ge=2, le=8, examples=[8])
    steps: int = pydantic.Field(ge=2, examples=[200])
    seed: int = pydantic.Field(ge=0, lt=2**32, examples=[0])
    output_dir: str = pydantic.Field(examples=["runs/40_train"])


class CompareConfig(Parameters):
    """Parameters of ``notebooks/50_compare_runs.ipynb``."""

    pattern: str = pydantic.Field(examples=["dapo/cpu-*-seed0"])
    runs_dir: str = pydantic.Field(examples=["runs"])


class OwnTaskConfig(Parameters):
    """Parameters of ``notebooks/90_your_own_task.ipynb``."""

    steps: int = pydantic.Field(ge=2, examples=[100])
    seed: int = pydantic.Field(ge=0, lt=2**32, examples=[0])
    output_dir: str = pydantic.Field(examples=["runs/90_your_own_task"])


class LiveCurves(TrainerCallback):
    """A figure below the cell that follows a run while it trains.

    Parameters
    ----------
    panels : sequence of str
        Metrics that `qurl.plots.curves` draws.
    seconds : float
        Between two drawings, each of which takes about a third of a second.
    """

    def __init__(
        self,
        panels: Sequence[str] = ("reward", "mismatch/kl_k3", "clip_ratio/region_mean"),
        seconds: float = 5.0,
    ):
        self.panels, self.seconds = tuple(panels), seconds
        self._handle, self._last = None, 0.0

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Draw anew, if the last drawing is long enough ago."""
        if time.monotonic() - self._last >= self.seconds:
            self._draw(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        """Draw the whole run."""
        self._draw(args, state)

    def _draw(self, args, state) -> None:
        from IPython.display import display

        table = history(state.log_history)
        if not len(table) or "reward" not in table:
            return
        steps_per_batch = max(1, int(args.optimizer_steps_per_batch))
        figure = curves(
            windowed(table, self.panels, multiple=steps_per_batch).assign(arm="this run", seed=0),
            self.panels,
            title=f"Step {state.global_step} of {state.max_steps}",
        )
        # As wide as a notebook's column, which would scale a wider figure down until its labels cannot be read.
        figure.set_size_inches(4.4 * len(self.panels), 4.6)
        if self._handle is None:
            self._handle = display(figure, display_id=True)
        else:
            self._handle.update(figure)
        self._last = time.monotonic()


def matching_runs(store: RunStore, pattern: str) -> dict[str, Run]:
    """Finished runs whose ``<experiment>/<name>`` matches a shell pattern, by that name; all with an empty pattern.

    Raises
    ------
    ParameterError
        If there is none.
    """
    runs = {f"{run.spec.experiment}/{run.spec.name}": run for run in store}
    chosen = {name: run for name, run in runs.items() if fnmatch.fnmatchcase(name, pattern or "*")}
    if not chosen:
        raise ParameterError(
            f"pattern={pattern!r} matches none of the {len(runs)} finished runs in {store.root}: make some with "
            "qurl reproduce, or with pipelines/train.ipynb."
        )
    return chosen


def arm_name(name: str, run: Run) -> str:
    """A run's name in `matching_runs` without its seed."""
    return name.removesuffix(f"-seed{run.spec.seed}")


def run_curves_table(runs: dict[str, Run]) -> pd.DataFrame:
    """Windows of several runs' metrics, for `qurl.plots.curves`; runs that differ in the seed alone are one arm."""
    tables = []
    for name, run in runs.items():
        tables.append(run_windows(run).assign(arm=arm_name(name, run), seed=run.spec.seed))
    return pd.concat(tables, ignore_index=True)
