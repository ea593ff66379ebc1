"""However `qurl reproduce` ends, no run goes on alone: stand-ins that take their time to end."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from qurl.experiments import RunSpec, RunStore
from qurl.experiments.orchestrator import Orchestrator

# It notes its process, and ends two seconds after it was asked to.
SLOW = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), os._exit(1)))
Path(sys.argv[1], f"pid-{os.getpid()}").touch()
time.sleep(600)
"""
COMMAND = """
import sys
from qurl.experiments import RunSpec, RunStore
from qurl.experiments.orchestrator import Orchestrator
from qurl.interrupts import end_in_order
end_in_order()
wanted = [RunSpec(experiment="dapo", preset="smoke", seed=seed) for seed in range(2)]
command = lambda spec, store: ["slow", str(store.root)]
try:
    Orchestrator(RunStore(sys.argv[1]), 2, report=lambda line: print(line, flush=True), command=command).fill(wanted)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def orchestrated(tmp_path):
    """``orchestrated(runs=2)``: the command, and what it has started; everything is gone afterwards."""
    (tmp_path / "slow.py").write_text(SLOW)
    root, started = tmp_path / "runs", []

    def hear_ctrl_c():  # a shell's background job would ignore it, and hand that down
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def run(runs: int = 2, **options):
        options = {"preexec_fn": hear_ctrl_c} | options
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(root)],
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
            **options,
        )
        started.append(psutil.Process(process.pid))
        deadline = time.monotonic() + 120
        while len(list(root.glob("pid-*"))) < runs and time.monotonic() < deadline:
            time.sleep(0.1)
        started.extend(psutil.Process(int(file.name.split("-")[1])) for file in root.glob("pid-*"))
        return process, started[1:]

    yield run
    for process in started:
        if process.is_running():
            process.kill()


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGHUP), (signal.SIGHUP,)],
    ids=lambda numbers: "-".join(number.name for number in numbers),
)
def test_a_second_signal_leaves_no_run_behind(orchestrated, numbers):
    process, runs = orchestrated(stdout=subprocess.DEVNULL)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.3)
    assert process.wait(60) == 130
    assert len(runs) == 2 and not any(run.is_running() for run in runs)


def test_a_reader_that_goes_away_leaves_no_run_behind(orchestrated):
    """``qurl reproduce | head -1``."""
    process, _ = orchestrated(runs=0, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 1  # as any command whose output cannot be written
    time.sleep(0.5)
    assert not [
        found for found in psutil.process_iter(["cmdline"]) if "slow" in (found.info["cmdline"] or [])
    ]


def test_nohup_keeps_its_effect(orchestrated):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process, runs = orchestrated(stdout=subprocess.DEVNULL, preexec_fn=ignore)
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None and all(run.is_running() for run in runs)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130


def test_a_killed_run_is_not_told_by_what_an_earlier_attempt_said(tmp_path, monkeypatch):
    spec, store, lines = RunSpec(experiment="dapo", preset="smoke"), RunStore(tmp_path / "runs"), []
    (tmp_path / "once.py").write_text(
        "import os, signal, sys\nfrom pathlib import Path\nmark = Path(sys.argv[1])\n"
        "if mark.exists():\n print('step 5 of 9', flush=True)\n os.kill(os.getpid(), signal.SIGKILL)\n"
        "mark.touch()\nraise ValueError('learning_rate=nan is not possible')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    for _ in range(2):
        orchestrator = Orchestrator(
            store, 1, report=lines.append, command=lambda *_: ["once", str(tmp_path / "mark")]
        )
        assert not orchestrator.fill([spec])
    first, second = [line for line in lines if line.startswith("FAILED")]
    assert "learning_rate=nan is not possible" in first
    assert "step 5 of 9 (killed by signal 9)" in second and "learning_rate" not in second
