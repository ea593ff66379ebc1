"""`qurl reproduce` at the preset "smoke": real runs through papermill, then each figure and table (case N01)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from qurl.experiments import RunStore
from qurl.experiments.matrix import FIGURES, arms, runs
from qurl.notebook import project_root
from qurl.plots import windowed

ROOT = project_root()
SVG = b"<?xml"
# Some thirty processes, each with an engine.
pytestmark = pytest.mark.timeout(2400)


def qurl(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "qurl.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | environment)


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """All runs with one seed, made from another working directory into a store that does not exist yet."""
    folder = tmp_path_factory.mktemp("reproduce")
    done = qurl(
        "reproduce", "--preset", "smoke", "--seeds", "1", "--only", ",".join(FIGURES),
        "--runs-dir", str(folder / "new" / "store"), cwd=folder, MPLBACKEND="agg",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "new" / "store", done.stdout


def test_all_runs_are_there_and_say_where_they_come_from(reproduced):
    folder, told = reproduced
    wanted = runs(FIGURES, "smoke", range(1))
    store = RunStore(folder)
    assert {run.spec for run in store} == set(wanted)
    assert f"{len(wanted)} of {len(wanted)} runs finished, 0 running, 0 left" in told
    for run in store:
        result = run.result
        assert result["steps"] == (run.spec.steps or 4) and result["seed"] == 0
        assert result["git_commit"] and result["engine"]["hardware"] and result["qurl"]
        bits = {"bf16": 16, "fp8": 8}.get(run.spec.dtype, run.spec.code_bits)
        assert set(run.metrics["rollout/bits"].dropna()) == {bits}
        assert 0 <= result["accuracy"]["before"]["mean"] <= 1
        executed = nbformat.read(store.folder(run.spec) / "train.ipynb", 4)
        assert any(
            "image/png" in output.get("data", {})
            for cell in executed.cells[1:]
            for output in cell.get("outputs", ())
        )
    # The same seed, so the same start, whatever the arm; folding s = 1.5 into the weights moves their BF16 rounding.
    table = store.table()
    folded = (table["uaq_scale"] == 1.5) & (table["uaq_mode"] == "fold")
    assert table[~folded].groupby("experiment")["before"].nunique().eq(1).all()


@pytest.mark.parametrize("figure", FIGURES)
def test_figure_shows_the_numbers_of_its_runs(reproduced, figure):
    store = RunStore(reproduced[0])
    folder = reproduced[0] / figure / "smoke"
    result = json.loads((folder / "result.json").read_text())
    expected = arms(figure, "smoke")
    assert [row["arm"] for row in result["runs"]] == [arm.key for arm in expected]
    for row, arm in zip(result["runs"], expected, strict=True):
        run = store.load(arm.run("smoke", 0))
        assert row["after"] == pytest.approx(100 * run.result["accuracy"]["after"]["mean"])
    assert result["missing"] == [] and result["preset"] == "smoke"
    assert {claim["verdict"] for claim in result["claims"]} == {"not testable with this preset"}
    table = pd.read_csv(folder / f"{figure}.csv")
    if figure.startswith("tab_"):
        assert table["mean"].tolist() == pytest.approx([row["after"] for row in result["runs"]], abs=1e-3)
    else:
        arm = expected[-1]
        run = store.load(arm.run("smoke", 0))
        shown = table[(table["arm"] == arm.label) & (table["experiment"] == arm.spec["experiment"])]
        assert shown["reward"].tolist() == pytest.approx(
            windowed(run.metrics, ["reward"], multiple=2)["reward"].tolist(), abs=1e-6, nan_ok=True
        )
    assert (folder / f"{figure}.svg").read_bytes().startswith(SVG)
    pixels = np.asarray(Image.open(folder / f"{figure}.png").convert("L"))
    assert pixels.min() < 100 and (pixels < 250).mean() > 0.01  # it is not blank


def test_a_second_time_nothing_runs_and_a_deleted_run_is_repeated(reproduced, tmp_path):
    folder, _ = reproduced
    spec = arms("fig_divergence", "smoke")[0].run("smoke", 0)
    (RunStore(folder).folder(spec) / "result.json").unlink()  # as after a run that was killed while it ended
    before = {run.spec: run.result["date"] for run in RunStore(folder)}
    done = qurl(
        "reproduce", "--preset", "smoke", "--seeds", "1", "--only", "fig_divergence",
        "--runs-dir", str(folder), "--train-only", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("started")] == [
        f"started dapo/{spec.name}"
    ]
    after = {run.spec: run.result["date"] for run in RunStore(folder)}
    assert after.keys() == before.keys() | {spec}
    assert all(after[known] == date for known, date in before.items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ended_by_a_batch_system_no_run_goes_on_alone(tmp_path, number):
    """A run's kernel has a session of its own, so that it would outlive the command."""
    store, spec = RunStore(tmp_path), arms("fig_objectives", "smoke")[0].run("smoke", 0)
    command = [sys.executable, "-m", "qurl.cli", "reproduce", "--preset", "smoke", "--seeds", "1"]
    command += ["--only", "fig_objectives", "--jobs", "1", "--runs-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while store.state(spec) != "running" and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(60) == 130
        assert process.stderr.read() == "qurl: stopped; the same command goes on from here.\n"
    assert store.state(spec) == "stopped"


def test_figure_without_runs_says_how_to_make_them(tmp_path):
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(ROOT / "pipelines" / "tab_dapo.ipynb"),
        str(tmp_path / "out.ipynb"),
    ]
    command += ["-k", "python3", "-p", "preset", "smoke", "-p", "runs_dir", str(tmp_path / "none")]
    done = subprocess.run([*command, "--no-progress-bar"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "holds no finished run of tab_dapo with preset='smoke': pass -p run_missing true, or run qurl" in last
    )
