"""`qurl train` in two processes with real engines, as launchers start it: one folder, one voice, resumed after a kill.

`tests/trainer/test_two_processes.py` compares two processes with one on the same tokens.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
import yaml

from qurl.training import alone

pytest.importorskip("vllm")

# --standalone picks a free port; --master_port=0 would be taken literally, and waited for.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TRAIN = ["-m", "qurl.cli", "train"]
SMALL = ["--max_steps", "4", "--per_device_train_batch_size", "16", "--task_options", '{"n": 256}']


def kill(process: subprocess.Popen) -> None:
    """With the processes that a launcher has started, each of which leads a session of its own."""
    for started in [*psutil.Process(process.pid).children(recursive=True), process]:
        started.kill()
    process.wait()


def launch(*arguments, launcher=TORCHRUN, timeout=240) -> subprocess.CompletedProcess:
    """Run to its end; what takes too long is killed with all processes that the launcher has started."""
    command = [*launcher, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def launched_by_accelerate(*options):
    return [sys.executable, "-m", "accelerate.commands.launch", *options, "--num_processes", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run in two processes that report what they hold after each sync, and what it printed."""
    folder = tmp_path_factory.mktemp("distributed")
    command = [
        str(Path(__file__).with_name("observed_training.py")),
        "--output_dir",
        str(folder / "run"),
        *SMALL,
    ]
    done = launch(*command, "--eval_options", '{"n": 15}', "--eval_k", "4", "--save_steps", "2")
    assert done.returncode == 0, done.stderr[-5000:]
    return folder / "run", done.stdout


def test_both_engines_hold_the_codes_of_the_policy_after_each_sync(finished):
    folder, _ = finished
    ranks = [json.loads((folder.parent / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 4  # of BF16 evaluations before and after, and of two generation batches
    quantized = [sync for sync in ranks[0] if sync["dtype"] == "int8"]
    assert len(quantized) == 2 and quantized[0]["engine"] != quantized[1]["engine"]
    for sync in quantized:
        assert sync["projections"] == 28  # seven in each of four layers
        assert sync["engine"] == sync["policy"]


def test_the_folder_is_written_once_and_complete(finished):
    folder, output = finished
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "README.md", "config.yaml", "metrics.csv", "result.json", "policy", "checkpoint-4", "samples-before",
        "samples-after",
    }  # fmt: skip
    assert yaml.safe_load((folder / "config.yaml").read_text())["processes"] == 2
    assert pd.read_csv(folder / "metrics.csv")["step"].tolist() == [1, 2, 3, 4]
    assert output.count("of held-out samples") == 3  # before, after, gain
    result = json.loads((folder / "result.json").read_text())
    assert result["accuracy"]["problems"] == 15
    for name in ("samples-before", "samples-after"):
        samples = pd.read_parquet(folder / name / "samples.parquet")
        assert len(samples) == 60 and not samples.duplicated(["id", "sample"]).any()


@pytest.mark.slow
def test_a_finished_run_is_read_behind_accelerates_launcher_too(finished):
    folder, _ = finished
    options = ["--output_dir", str(folder), *SMALL, "--eval_options", '{"n": 15}', "--eval_k", "4"]
    done = launch(*TRAIN, *options, "--save_steps", "2", launcher=launched_by_accelerate("--multi_gpu"))
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("4 steps in") == 1
    assert done.stderr.count("is finished: it is read and not repeated.") == 1


def assert_said_once(done, sentence):
    """Torch's launcher reports with a traceback of its own that its children failed."""
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if sentence in line]
    assert len(lines) == 1 and lines[0].startswith("qurl"), done.stderr[-5000:]
    assert done.stderr.count("Traceback") == 1


def test_a_held_folder_is_refused_in_one_sentence(tmp_path):
    """The main process alone asks for the lock; both end."""
    with alone(tmp_path / "held"):
        done = launch(*TRAIN, *SMALL, "--output_dir", str(tmp_path / "held"))
    assert_said_once(done, "is being trained by another process")
    assert not (tmp_path / "held" / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--learning_rate", "fast"], "argument --learning_rate"),
        (["--objective", "ppo"], "objective='ppo' is not possible"),
        (["--learning_rate", "1"], "holds a run with eval_k=4, not 1"),
    ],
    ids=["parser", "configuration", "folder"],
)
def test_what_is_wrong_in_all_processes_is_said_once(finished, options, sentence):
    folder, _ = finished
    assert_said_once(launch(*TRAIN, *SMALL, "--output_dir", str(folder), *options), sentence)


@pytest.mark.slow
def test_one_process_of_several_that_were_asked_for_is_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("of machines without a GPU")
    done = launch(
        *TRAIN, "--output_dir", str(tmp_path / "run"), launcher=launched_by_accelerate("--cpu")
    )  # fmt: skip
    assert_said_once(done, "accelerate launch --cpu has started one process")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_process_that_fails_ends_both(tmp_path):
    """The other waits in a collective, and is neither left there nor heard."""
    script = str(Path(__file__).with_name("observed_training.py"))
    begin = time.monotonic()
    done = launch(
        script, "--output_dir", str(tmp_path / "run"), *SMALL, "--eval_k", "0", "--run_name", "fails"
    )
    assert time.monotonic() - begin < 120
    assert_said_once(done, "qurl train: the engine of process 1 is gone.")
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_a_killed_run_of_two_processes_resumes(tmp_path):
    options = [
        "--max_steps",
        "40",
        "--save_steps",
        "5",
        "--eval_k",
        "0",
        "--per_device_train_batch_size",
        "16",
    ]
    command = [*TORCHRUN, *TRAIN, "--output_dir", str(tmp_path / "run"), *options]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while not list((tmp_path / "run").glob("checkpoint-*/trainer_state.json")):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        kill(first)
    alone_again = launch(*TRAIN, "--output_dir", str(tmp_path / "run"), *options, launcher=[sys.executable])
    assert alone_again.returncode == 2 and "holds a run with processes=2, not 1" in alone_again.stderr
    second = launch(*TRAIN, "--output_dir", str(tmp_path / "run"), *options)
    assert second.returncode == 0, second.stderr[-5000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["resumed"] and result["steps"] == 40
    assert pd.read_csv(tmp_path / "run" / "metrics.csv")["step"].tolist() == list(range(1, 41))
