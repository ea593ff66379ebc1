"""Fills the matrix of runs: executes ``pipelines/train.ipynb`` for each, then the figures and tables that read them.

Every run is a process of its own (papermill and its kernel), so that a crash ends one run and no other. What is
finished is skipped, what was stopped goes on, and what another orchestrator has started is left to it.
"""

import contextlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from qurl.experiments import launch
from qurl.experiments.matrix import FIGURES, MAX_SEEDS, runs
from qurl.experiments.promotion import claims_page, promote_results, results_root
from qurl.experiments.recipes import PRESETS
from qurl.experiments.specs import RunSpec
from qurl.experiments.store import RunStore
from qurl.files import write_whole
from qurl.interrupts import uninterrupted
from qurl.notebook import project_root

PIPELINES = ("fig_speedup", "fig_weight_update", *FIGURES)
# A run that takes longer than this hangs.
LIMIT_MINUTES = {"smoke": 15, "cpu": 180}
# What is expected of a run before one has finished here, seconds.
_FIRST_GUESS = {"smoke": 60, "cpu": 300}
# Checkpoints, samples and notebook of a run with the embedded model take a third of it.
_FREE_BYTES = 200 << 20
_POLL_SECONDS = 0.5


@dataclass
class _Job:
    spec: RunSpec
    process: subprocess.Popen
    log: IO
    slot: int
    claim: contextlib.ExitStack
    log_start: int  # what an earlier attempt has said stands before it
    started: float = field(default_factory=time.monotonic)
    # Its kernel has a session of its own and outlives papermill, so it is noted while papermill still is its parent.
    processes: set[psutil.Process] = field(default_factory=set)

    def note_processes(self) -> None:
        with contextlib.suppress(psutil.Error):
            self.processes |= set(psutil.Process(self.process.pid).children(recursive=True))


def train_command(spec: RunSpec, store: RunStore) -> list[str]:
    """The papermill command of a run; the executed notebook goes into its folder."""
    notebook = project_root() / "pipelines" / "train.ipynb"
    parameters = {
        name: value
        for name, value in spec.model_dump().items()
        if value != RunSpec.model_fields[name].default
    }
    command = ["papermill", str(notebook), str(store.folder(spec) / "train.ipynb"), "-k", "python3"]
    for name, value in (parameters | {"runs_dir": str(store.root)}).items():
        command += ["-p", name, str(value)]
    return [*command, "--log-output", "--no-progress-bar"]


def figure_commands(figure: str, preset: str, seeds: int, store: RunStore) -> dict[Path, list[str]]:
    """The papermill commands of a figure or table, by the folder of its results and executed notebook."""
    if figure in FIGURES:
        variants = {preset: {"seeds": seeds, "runs_dir": str(store.root)}}
    elif figure == "fig_speedup":
        repeats = {} if preset == "smoke" else {"repeats": 5}
        variants = {f"{preset}-{dtype}": {"dtype": dtype} | repeats for dtype in ("int8", "fp8")}
    else:
        variants = {preset: {}}
    commands = {}
    for variant, parameters in variants.items():
        folder = store.root / figure / variant
        command = ["papermill", str(project_root() / "pipelines" / f"{figure}.ipynb")]
        command += [str(folder / f"{figure}.ipynb"), "-k", "python3"]
        for name, value in (parameters | {"preset": preset, "output_dir": str(folder)}).items():
            command += ["-p", name, str(value)]
        commands[folder] = [*command, "--log-output", "--no-progress-bar"]
    return commands


class Orchestrator:
    """Executes runs, some at a time, each on cores of its own.

    Parameters
    ----------
    store : RunStore
    jobs : int
        Runs at a time. On two cores two runs with a core each do 1.25 times the work of one run with both.
    limit_minutes : float, optional
        After which a run is stopped; it can go on from its last checkpoint.
    report : callable
        Takes a line whenever something has changed.
    command : callable
        ``(spec, store) -> arguments`` of the Python interpreter's ``-m``.
    """

    def __init__(
        self,
        store: RunStore,
        jobs: int = 1,
        limit_minutes: float | None = None,
        report: Callable[[str], None] = print,
        command: Callable[[RunSpec, RunStore], list[str]] = train_command,
    ):
        self.store, self.jobs, self.limit_minutes = store, jobs, limit_minutes
        self.report, self.command = report, command
        self.failed: dict[RunSpec, str] = {}
        self._running: list[_Job] = []
        self._seconds: list[float] = []

    def fill(self, specs: Sequence[RunSpec]) -> bool:
        """Execute what is not finished.

        Returns
        -------
        bool
            Whether all of ``specs`` are finished now.

        Raises
        ------
        ValueError
            For unfinished runs of the preset "paper", which accelerate starts, on GPUs.
        OSError
            If the disk is full; what is finished stays.
        KeyboardInterrupt
            After the running ones have been stopped.
        """
        waiting = [spec for spec in specs if self.store.state(spec) != "finished"]
        if any(spec.preset == "paper" for spec in waiting):
            raise ValueError(
                "preset='paper' is not possible here: its runs are started by hand with accelerate on GPUs, so use "
                "smoke or cpu, or see the commands, memory and time with qurl reproduce --preset paper --dry-run."
            )
        self.store.prepare()
        for spec in waiting:
            self.store.require_recipe(spec)
        self.report(self.outlook(specs))
        try:
            while waiting or self._running:
                before = (len(waiting), len(self._running), len(self.failed))
                self._collect()
                waiting = self._start(waiting)
                if (len(waiting), len(self._running), len(self.failed)) != before:
                    self.report(self._progress(specs, waiting))
                time.sleep(_POLL_SECONDS)
        finally:
            with uninterrupted():
                for job in self._running:
                    self._ask_to_end(job)
                for job in self._running:
                    self._stop(job, "stopped")
            self._running = []
        return all(self.store.state(spec) == "finished" for spec in specs)

    def outlook(self, specs: Sequence[RunSpec]) -> str:
        """How many runs are finished and how long the others take; a damaged run raises ValueError."""
        self._seconds = [run.result["seconds"] for run in self.store.finished(specs)]
        return self._progress(specs, [spec for spec in specs if self.store.state(spec) != "finished"])

    def _start(self, waiting: list[RunSpec]) -> list[RunSpec]:
        """Start what there is room for; returns what still waits."""
        left = []
        for spec in waiting:
            if len(self._running) >= self.jobs:
                left.append(spec)
                continue
            if self.store.state(spec) == "finished":  # by another orchestrator
                continue
            claim = contextlib.ExitStack()
            if self.store.state(spec) == "running" or not claim.enter_context(self.store.claim(spec)):
                claim.close()
                left.append(spec)
                continue
            free = shutil.disk_usage(self.store.root).free
            if free < _FREE_BYTES:
                claim.close()
                raise OSError(
                    f"{self.store.root} has {free >> 20} MiB left, and a run needs {_FREE_BYTES >> 20}: make room, and "
                    "start again; what is finished stays."
                )
            self._launch(spec, claim)
        return left

    def _launch(self, spec: RunSpec, claim: contextlib.ExitStack) -> None:
        slot = min(set(range(self.jobs)) - {job.slot for job in self._running})
        log = open(self.store.folder(spec) / "train.log", "a")  # noqa: SIM115 (closed when the run ends)
        command = [sys.executable, "-m", *self.command(spec, self.store)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | self._threads(),
            start_new_session=True,  # Ctrl-C in a terminal is for the orchestrator, which stops its runs
            preexec_fn=lambda: self._pin(slot),
        )
        self._running.append(_Job(spec, process, log, slot, claim, log_start=log.tell()))
        self.report(f"started {spec.experiment}/{spec.name}")

    def _threads(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(max(1, core_count() // self.jobs))} if self.jobs > 1 else {}

    def _pin(self, slot: int) -> None:
        mine = _cores()[slot :: self.jobs]
        if self.jobs > 1 and mine:
            os.sched_setaffinity(0, mine)

    def _collect(self) -> None:
        """Note what has ended, and stop what takes too long."""
        limit = (
            60 * (self.limit_minutes or LIMIT_MINUTES[self._running[0].spec.preset]) if self._running else 0
        )
        for job in list(self._running):
            seconds = time.monotonic() - job.started
            job.note_processes()
            if job.process.poll() is None and seconds < limit:
                continue
            self._running.remove(job)
            name = f"{job.spec.experiment}/{job.spec.name}"
            if job.process.returncode is None:
                self._stop(job, f"took longer than {limit / 60:g} minutes")
            elif self.store.state(job.spec) == "finished":
                self._close(job)
                self._seconds.append(seconds)
                self.report(f"finished {name} in {seconds:.0f} s")
                continue
            else:
                self._close(job)
                self.failed[job.spec] = _last_line(job.log.name, job.log_start)
                if job.process.returncode < 0:
                    self.failed[job.spec] += f" (killed by signal {-job.process.returncode})"
            self.report(f"FAILED {name}: {self.failed[job.spec]} (log: {job.log.name})")

    def _ask_to_end(self, job: _Job) -> None:
        job.note_processes()
        with contextlib.suppress(ProcessLookupError):
            job.process.terminate()  # papermill then shuts its kernel down and keeps what was executed

    def _stop(self, job: _Job, why: str) -> None:
        self._ask_to_end(job)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(10)
        self.failed[job.spec] = why
        self._close(job)

    def _close(self, job: _Job) -> None:
        """End whatever is left of a job, and let go of it."""
        for process in job.processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(job.processes, timeout=10)
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
        job.log.close()
        job.claim.close()

    def _progress(self, specs: Sequence[RunSpec], waiting: Sequence[RunSpec]) -> str:
        # Not by their state, which a run that has just finished changes before its process has ended.
        finished = len(specs) - len(waiting) - len(self._running) - len(self.failed)
        line = f"{finished} of {len(specs)} runs finished, {len(self._running)} running, {len(waiting)} left"
        if self.failed:
            line += f", {len(self.failed)} failed"
        if waiting or self._running:
            each = statistics.fmean(self._seconds) if self._seconds else _FIRST_GUESS[specs[0].preset]
            left = each * (len(waiting) + len(self._running) / 2) / self.jobs
            line += f"; about {_duration(left)} to go"
        return line


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def core_count() -> int:
    """Cores that this process may use."""
    return len(_cores()) or os.cpu_count() or 1


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{max(1, round(seconds / 60))} min"


def _last_line(log: str, start: int = 0) -> str:
    """What a failed process said last that is not part of a notebook's cell, from a byte of its log on."""
    text = Path(log).read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    telling = [line for line in lines if line and not set(line) <= set("-^~ ")]
    errors = [line for line in telling if "Error" in line.split(":")[0]]
    return (errors or telling or ["no output"])[-1][:300]


def reproduce(
    preset: str = "cpu",
    only: Sequence[str] = (),
    seeds: int = 3,
    *,
    runs_dir: str | os.PathLike = "",
    jobs: int = 0,
    limit_minutes: float | None = None,
    dry_run: bool = False,
    train_only: bool = False,
    promote: bool | None = None,
    report: Callable[[str], None] = print,
) -> bool:
    """Make every run that the figures and tables need, then these.

    Parameters
    ----------
    preset : {"smoke", "cpu", "paper"}
    only : sequence of str
        Some of ``PIPELINES``; empty: all.
    seeds : int
        Seeds 0, 1 ... of each arm.
    runs_dir : str or path
        Of the run store; empty: ``runs`` in the project's root.
    jobs : int
        Runs at a time; 0: one a core.
    limit_minutes : float, optional
        Of a run.
    dry_run : bool
        Report the commands (preset "paper": the plan, with memory and time) and nothing else.
    train_only : bool
        Leave the figures out.
    promote : bool, optional
        Copy small results to ``data/results``, where they come from all runs of a figure and from no fewer seeds than
        what is there; default: all presets but "smoke".
    report : callable
        Takes a line.

    Returns
    -------
    bool
        Whether everything is there now.

    Raises
    ------
    ValueError
        For arguments that are not possible, and for the preset "paper" while runs of it are not finished.
    """
    figures = list(dict.fromkeys(name.strip() for name in only)) or list(PIPELINES)
    for name in figures:
        if name not in PIPELINES:
            raise ValueError(f"only={name!r} is not possible: use some of {', '.join(PIPELINES)}.")
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} is not possible: use one of {', '.join(PRESETS)}.")
    for name, value, least, most in (("seeds", seeds, 1, MAX_SEEDS), ("jobs", jobs, 0, 64)):
        if not least <= value <= most:
            raise ValueError(f"{name}={value} is not possible: use a whole number from {least} to {most}.")
    if limit_minutes is not None and not limit_minutes > 0:
        raise ValueError(
            f"limit_minutes={limit_minutes} is not possible: use a positive number, or leave it out."
        )
    store = RunStore(runs_dir)
    specs = runs([figure for figure in figures if figure in FIGURES], preset, range(seeds))
    orchestrator = Orchestrator(store, jobs or core_count(), limit_minutes, report)
    if dry_run:
        for command in _commands(specs, figures, preset, seeds, store, train_only):
            report(command)
        if specs and preset != "paper":
            report(f"# {orchestrator.outlook(specs)}")
        return True
    complete = orchestrator.fill(specs)
    if train_only:
        return complete
    promote = preset != "smoke" if promote is None else promote
    drawn = {}
    for figure in figures:
        for folder, command in figure_commands(figure, preset, seeds, store).items():
            if figure not in FIGURES and (folder / "result.json").is_file():
                report(f"{figure} is measured already: {folder} (delete it to measure anew)")
            elif not _draw(figure, folder, command, report):
                complete = False
                continue
            drawn[folder] = results_root() / figure / folder.name
    if promote:
        # Not before all are drawn: in a checkout the first copy would make the others' commit a dirty one.
        for folder, target in drawn.items():
            promote_results(folder, target, report)
        write_whole(results_root() / "claims.md", claims_page(results_root(), report))
        report(f"results: {results_root()}, all verdicts in claims.md")
    return complete


def _commands(specs, figures, preset, seeds, store, train_only) -> Iterator[str]:
    if preset == "paper":
        yield from launch.plans(dict.fromkeys(spec.experiment for spec in specs), store)
        yield "\n# Every run, on one node:"
    for spec in specs:
        note = {"finished": "  # finished", "running": "  # running"}.get(store.state(spec), "")
        command = (
            launch.train_command(spec, store.root, store.folder(spec))
            if preset == "paper"
            else train_command(spec, store)
        )
        yield shlex.join(command) + note
    if not train_only:
        for figure in figures:
            yield from map(shlex.join, figure_commands(figure, preset, seeds, store).values())


def _draw(figure: str, folder: Path, command: list[str], report: Callable[[str], None]) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    report(f"drawing {figure} in {folder}")
    log = folder / f"{figure}.log"
    with open(log, "w") as stream:
        code = subprocess.call(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    if code:
        report(f"FAILED {figure}: {_last_line(str(log))} (log: {log})")
        return False
    for claim in json.loads((folder / "result.json").read_text()).get("claims", []):
        report(f"  {claim['claim']}: {claim['verdict']}")
    return True
