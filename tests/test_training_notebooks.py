"""Notebooks 40, 50 and 90, executed: the numbers they record, and that their figures are there."""

import base64
import io
import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from qurl import notebook
from qurl.diagnostics import history
from qurl.experiments import RunSpec, RunStore
from qurl.exploration.training import LiveCurves, matching_runs, run_curves_table

# Beside other jobs a notebook takes many times as long.
pytestmark = pytest.mark.timeout(900)

ROOT = notebook.project_root() / "notebooks"


def execute(name: str, folder, **parameters) -> nbformat.NotebookNode:
    return nbformat.read(notebook.run(ROOT / f"{name}.ipynb", folder / f"{name}.ipynb", parameters), 4)


def printed(executed) -> str:
    outputs = [output for cell in executed.cells for output in cell.get("outputs", ())]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join(texts)


def pictures(executed) -> list[np.ndarray]:
    found = [
        output["data"]["image/png"]
        for cell in executed.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("L")) for png in found]


def test_train_notebook(tmp_path):
    """The figure follows the run, and the table of metrics is the run's own."""
    executed = execute("40_train", tmp_path, steps=20, output_dir=str(tmp_path / "run"), code_bits=4)
    log = pd.read_csv(tmp_path / "run" / "metrics.csv", index_col="step")
    assert log.index.max() == 20
    text = printed(executed)
    first = log["reward"].head(2).mean()
    assert re.search(rf"reward +{first:.4f}", text)
    assert set(log["rollout/bits"].dropna()) == {4}
    (picture,) = pictures(executed)  # one, drawn anew, and not a trail of pictures
    assert (picture < 250).mean() > 0.01
    assert "'loss'" not in text


@pytest.fixture(scope="module")
def own_task(tmp_path_factory):
    """Notebook 90 executed, and the folder in whose ``runs`` it left its files, as it does in a project."""
    folder = tmp_path_factory.mktemp("project")
    output_dir = folder / "runs" / "90_your_own_task"
    return execute("90_your_own_task", folder, steps=120, output_dir=str(output_dir)), folder


def test_own_task_notebook(own_task):
    """The new task is learned: sums with a carry in every column, from about 22 %, on problems that were held out."""
    executed, folder = own_task
    text = printed(executed)
    before, after = map(float, re.search(r"before: ([\d.]+) %, after: ([\d.]+) %", text).groups())
    assert 10 < before < 40
    assert after > before + 10
    # Digits are compared from the last one, over the longer of the two: 304 has three of the four digits of 1304.
    credit = {"1304": (1, 1), "1404": (0, 0.75), "304": (0, 0.75), "13040": (0, 0), "": (0, 0)}
    shown = {
        text: tuple(map(float, pair))
        for text, *pair in re.findall(r"^(\d*) +([\d.]+) +([\d.]+)$", text, re.M)
    }
    assert credit.items() <= shown.items()
    train, test = (
        pd.read_json(folder / "runs" / "90_your_own_task" / f"sums_{name}.jsonl", lines=True)
        for name in ("train", "test")
    )
    assert not set(train["problem"]) & set(test["problem"])
    for a, b in train["problem"].str.extract(r"(\d+)\+(\d+)=").to_numpy()[:50]:
        assert all(int(x) + int(y) > 9 for x, y in zip(a, b, strict=True))


def test_commands_of_own_task_notebook(own_task):
    """They run as they stand, but for two steps, where the notebook left its files; the test file judges."""
    executed, folder = own_task
    (block,) = re.findall(r"```bash\n(.*?)```", executed.cells[-1].source, re.S)
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(re.sub(r"--max_steps \d+", "--max_steps 2", line))
        # In a process of its own, since a command ends with the process groups that engines of this one live in.
        done = subprocess.run(
            [sys.executable, "-m", "qurl.cli", *words[1:]], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((folder / "runs" / "train" / "sums" / "result.json").read_text())
    assert result["accuracy"]["problems"] == 500


def test_compare_notebook(tmp_path, finish_run):
    store = RunStore(tmp_path / "store")
    for seed, objective in ((0, "tis"), (1, "tis"), (0, "acr")):
        finish_run(store, RunSpec(experiment="dapo", preset="smoke", objective=objective, seed=seed))
    executed = execute("50_compare_runs", tmp_path, runs_dir=str(tmp_path / "store"), pattern="dapo/*")
    assert "3 runs" in printed(executed)
    (picture,) = pictures(executed)
    assert (picture < 250).mean() > 0.01


def test_runs_by_pattern_and_seeds_as_one_arm(tmp_path, finish_run):
    store = RunStore(tmp_path)
    for seed in (0, 1):
        finish_run(store, RunSpec(experiment="dapo", preset="smoke", seed=seed), kl=(0.01 * (1 + seed), 0.02))
    with pytest.raises(
        notebook.ParameterError, match="pattern='gsm8k/\\*' matches none of the 2 finished runs"
    ):
        matching_runs(store, "gsm8k/*")
    table = run_curves_table(matching_runs(store, ""))
    assert set(table["arm"]) == {"dapo/smoke-int8-acr"} and set(table["seed"]) == {0, 1}
    assert table.groupby("seed")["mismatch/kl_k3"].first().tolist() == pytest.approx([0.01, 0.02])


def test_live_curves_draw_at_most_every_so_many_seconds(monkeypatch):
    class Handle:
        drawn = 0

        def update(self, figure):
            Handle.drawn += 1

    class State:
        log_history = [{"step": 1, "reward": 0.5, "mismatch/kl_k3": 0.01}]  # noqa: RUF012
        global_step, max_steps = 1, 10

    monkeypatch.setattr("IPython.display.display", lambda figure, display_id: Handle())
    assert len(history(State.log_history)) == 1
    live, args = (
        LiveCurves(seconds=3600),
        SimpleNamespace(optimizer_steps_per_batch=2),
    )
    for _ in range(3):
        live.on_log(args, State, None)
    assert Handle.drawn == 0  # the first drawing is the display itself, the others come too soon
    live.on_train_end(args, State, None)
    assert Handle.drawn == 1
