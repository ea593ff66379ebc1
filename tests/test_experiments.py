"""Recipes, run store, orchestrator and verdicts; the runs themselves are in tests/test_reproduce.py."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple

import pandas as pd
import pytest

from qurl import notebook
from qurl.experiments import EXPERIMENTS, PRESETS, RunSpec, RunStore, TrainConfig, recipe, recipe_table
from qurl.experiments.figures import CLAIMS, FigureConfig, read_runs
from qurl.experiments.matrix import FIGURES, arms, runs
from qurl.experiments.orchestrator import Orchestrator, reproduce, train_command
from qurl.experiments.paper import DEEPSCALER_SETS, TABLES
from qurl.experiments.promotion import claims_page, promote_results
from qurl.experiments.recipes import GPUS
from qurl.experiments.results import Claim, collect, judge, mean_interval, measures, scores
from qurl.experiments.store import Run

# Recipes and specs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_recipe_constructs_and_can_clip(experiment, preset, tmp_path):
    run, config = RunSpec(experiment=experiment, preset=preset).arguments(tmp_path)
    assert config.optimizer_steps_per_batch >= 2  # with one nothing clips, and acr equals tis
    assert config.optimizer_steps_per_batch == RunSpec(experiment=experiment, preset=preset).steps_per_batch
    assert all(choice.source for choice in recipe(experiment, preset).values())
    assert recipe_table(experiment, preset).loc["model", "value"] == run.model
    shared = {
        "loss_type",
        "epsilon",
        "epsilon_high",
        "beta",
        "vllm_importance_sampling_clip_max",
        "temperature",
    }
    shared |= {"eval_temperature", "max_grad_norm"}
    paper = recipe(experiment, "paper")
    for name in shared & paper.keys():  # the size differs, the algorithm does not
        assert recipe(experiment, preset)[name] == paper[name]


@pytest.mark.parametrize(
    ("experiment", "prompts", "steps"), [("gsm8k", 256, 4), ("dapo", 512, 16), ("deepscaler", 128, 2)]
)
def test_batches_of_the_paper_on_eight_gpus(experiment, prompts, steps):
    """256 prompts in 4 mini-batches, 512 in 16, 128 in 2: the published scripts' numbers, from TRL's fields."""
    values = RunSpec(experiment=experiment, preset="paper").fields()
    completions = GPUS * values["per_device_train_batch_size"] * values["steps_per_generation"]
    assert completions / values["num_generations"] == prompts
    assert values["steps_per_generation"] / values["gradient_accumulation_steps"] == steps


def test_paper_settings_that_the_method_states():
    dapo, gsm8k = (RunSpec(experiment=name, preset="paper").fields() for name in ("dapo", "gsm8k"))
    assert (dapo["epsilon"], dapo["epsilon_high"], dapo["beta"]) == (0.2, 0.28, 0)
    assert dapo["learning_rate"] == 1e-6 and gsm8k["learning_rate"] == 1e-5
    assert dapo["dynamic_sampling_max_rounds"] and dapo["overlong_buffer"] == 4096
    assert gsm8k["beta"] == 1e-3 and dapo["eval_k"] == 32


def test_names_tell_runs_apart_and_leave_defaults_out():
    base = {"experiment": "dapo"}
    variants = [
        {},
        {"preset": "smoke"},
        {"dtype": "fp8"},
        {"code_bits": 4},
        {"objective": "tis"},
        {"uaq_scale": 1.5},
        {"uaq_scale": 1.5, "uaq_mode": "learning_rates"},
        {"learning_rate_factor": 2.0},
        {"steps": 3000},
        {"seed": 1},
    ]
    variants += [{"learning_rate_factor": factor} for factor in (1.2345678, 1.2345679, 1e-7)]
    variants += [{"uaq_scale": 1e-7, "uaq_mode": mode} for mode in ("fold", "learning_rates")]
    made = [RunSpec(**base, **variant) for variant in variants]
    names = [spec.name for spec in made]
    assert len(set(names)) == len(names)
    assert names[0] == "cpu-int8-acr-seed0"
    made.append(RunSpec(**base, code_bits=4, uaq_scale="1.5", uaq_mode="learning_rates", steps=10, seed=2))
    assert made[-1].name == "cpu-int8-4bit-acr-uaq1.5rates-10steps-seed2"
    for spec in made:
        assert RunSpec.from_name("dapo", spec.name) == spec


@pytest.mark.parametrize(
    "name", ["cpu", "cpu-int8-acr", "cpu-int8-acr-uaq1.50-seed0", "cpu-int8-8bit-acr-seed0"]
)
def test_what_is_no_name_of_a_run(name):
    with pytest.raises(ValueError, match="is no name of a run"):
        RunSpec.from_name("dapo", name)


def test_a_notebook_does_not_train_a_share_of_the_papers_batch():
    """The preset counts on a process for each GPU; one would train an eighth and keep it under the run's name."""
    with pytest.raises(notebook.ParameterError, match="preset='paper' counts its batches on 8 processes"):
        notebook.parse(TrainConfig, {"experiment": "dapo", "preset": "paper"})
    values = {"preset": "paper", "seeds": 1, "run_missing": True, "runs_dir": "", "output_dir": ""}
    with pytest.raises(notebook.ParameterError, match="run_missing=True is not possible with preset='paper'"):
        notebook.parse(FigureConfig, values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"experiment": "gsm"}, "experiment='gsm' must be 'gsm8k', 'dapo' or 'deepscaler'"),
        ({"experiment": "dapo", "dtype": "fp8", "code_bits": 4}, "code_bits=4 needs dtype='int8', not 'fp8'"),
        (
            {"experiment": "dapo", "uaq_mode": "learning_rates"},
            "uaq_mode='learning_rates' needs a uaq_scale",
        ),
        ({"experiment": "dapo", "seed": -1}, "seed=-1 must be greater than or equal to 0"),
    ],
)
def test_impossible_specs_are_refused_in_one_sentence(values, sentence):
    with pytest.raises(notebook.ParameterError, match=sentence):
        notebook.parse(RunSpec, values)


def test_fields_hold_what_the_arm_changes(tmp_path):
    spec = RunSpec(
        experiment="gsm8k", objective="tis", learning_rate_factor=1.5, uaq_scale=2, steps=7, seed=3
    )
    run, config = spec.arguments(tmp_path)
    assert config.learning_rate == pytest.approx(1.5 * recipe("gsm8k", "cpu")["learning_rate"].value)
    assert (config.objective, config.uaq_scale, config.max_steps, config.seed) == ("tis", 2.0, 7, 3)
    assert run.task == "arithmetic"


def test_the_command_gives_the_same_run(tmp_path):
    """`qurl train` with the words of the command parses to the very same fields."""
    from qurl.config import QuRLConfig
    from qurl.training import RunArguments, TrlParser

    spec = RunSpec(experiment="deepscaler", preset="paper", uaq_scale=1.5)
    parsed_run, parsed = TrlParser([RunArguments, QuRLConfig]).parse_args_and_config(
        spec.command(tmp_path)[2:]
    )
    run, config = spec.arguments(tmp_path)
    assert parsed_run == run
    different = {
        name
        for name, value in config.to_dict().items()
        if value != parsed.to_dict()[name] and name not in ("disable_tqdm", "logging_dir")
    }
    assert different == set()


# Matrix ------------------------------------------------------------------------------------------------------------


def test_matrix_of_the_issue():
    dapo = {arm.key: arm.spec for arm in arms("tab_dapo", "cpu")}
    assert set(dapo) == {
        "bf16", "int8-naive", "int8-proximal", "int8-decoupled", "int8-tis", "int8-acr",
        "int8-acr-uaq1.5", "int8-acr-uaq1.5rates",
    }  # fmt: skip
    assert {spec["code_bits"] for key, spec in dapo.items() if key != "bf16"} == {4}
    assert all("4-bit codes" in arm.label for arm in arms("tab_dapo", "cpu") if arm.key != "bf16")
    gsm8k = [arm.spec["code_bits"] for arm in arms("tab_gsm8k", "cpu")]
    assert set(gsm8k) == {8}
    assert [arm.spec["steps"] for arm in arms("fig_divergence", "cpu")] == [3000, 3000]
    assert all(arm.spec["code_bits"] == 8 for figure in FIGURES for arm in arms(figure, "paper"))


@pytest.mark.parametrize("figure", FIGURES)
def test_every_uaq_arm_has_its_control(figure):
    """Without it UAQ cannot be told from a learning rate (method.md, section 3)."""
    keys = {(arm.spec["experiment"], arm.key) for arm in arms(figure, "cpu")}
    folded = {(experiment, key) for experiment, key in keys if "uaq" in key and not key.endswith("rates")}
    assert {(experiment, f"{key}rates") for experiment, key in folded} <= keys


def test_runs_are_each_once_and_by_seed():
    wanted = runs(["fig_objectives", "tab_dapo"], "cpu", range(2))
    assert len(wanted) == len(set(wanted)) == 16
    assert [spec.seed for spec in wanted] == [0] * 8 + [1] * 8


@pytest.mark.parametrize("figure", FIGURES)
def test_claims_and_papers_numbers_are_of_arms_that_run(figure):
    keys = {(arm.spec["experiment"], arm.key) for arm in arms(figure, "cpu")}
    for experiment, claim in CLAIMS[figure]:
        sides = {side for side in (claim.left, claim.right) if isinstance(side, str)}
        assert {(experiment, side) for side in sides} <= keys
    assert set(TABLES.get(figure, ())) <= {arm.key for arm in arms(figure, "paper")}


def test_means_of_table_3():
    for arm, accuracy in TABLES["tab_deepscaler"].items():
        sets = DEEPSCALER_SETS[arm].values()
        assert sum(sets) / len(sets) == pytest.approx(accuracy, abs=0.02)


# Store -------------------------------------------------------------------------------------------------------------

SPEC = RunSpec(experiment="dapo", preset="smoke", seed=5)


def test_states_of_a_run(tmp_path, finish_run):
    store = RunStore(tmp_path)
    assert store.state(SPEC) == "missing"
    folder = store.folder(SPEC)
    assert folder == tmp_path / "dapo" / SPEC.name
    hold = "import time\nfrom pathlib import Path\nfrom qurl.training import alone\n"
    hold += f"with alone(Path({str(folder)!r})):\n"
    process = subprocess.Popen(
        [sys.executable, "-c", hold + " print('held', flush=True); time.sleep(60)"], stdout=-1
    )
    assert process.stdout.readline() == b"held\n"
    assert store.state(SPEC) == "running"
    process.kill()
    process.wait()
    assert store.state(SPEC) == "stopped"
    finish_run(store, SPEC)
    assert store.state(SPEC) == "finished"
    assert store.load(SPEC).metrics.index.name == "step"
    assert store.table()[["seed", "after"]].to_dict("records") == [{"seed": 5, "after": 50.0}]


def test_reading_a_store_makes_no_folder(tmp_path):
    store = RunStore(tmp_path / "typo")
    assert store.state(SPEC) == "missing" and list(store) == [] and not store.root.exists()
    store.root.touch()
    with pytest.raises(notebook.ParameterError, match=r"runs_dir=.*typo' is a file"):
        store.prepare()


def test_damaged_and_missing_files_are_told(tmp_path, finish_run):
    store = RunStore(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no finished run: qurl reproduce makes it"):
        store.load(SPEC)
    finish_run(store, SPEC)
    (store.folder(SPEC) / "metrics.csv").unlink()
    with pytest.raises(FileNotFoundError, match="gone from a finished run: delete the folder"):
        store.load(SPEC)
    finish_run(store, SPEC.model_copy(update={"seed": 6}))
    for damaged in ("{", "[]", "null", "{}"):
        (store.folder(SPEC) / "result.json").write_text(damaged)
        with pytest.raises(ValueError, match="damaged run"):
            store.load(SPEC)
        assert [run.spec.seed for run in store] == [6]  # one bad run does not hide the others


def test_a_folder_copied_under_another_name_is_not_a_run(tmp_path, finish_run):
    store = RunStore(tmp_path)
    finish_run(store, SPEC)
    shutil.copytree(store.folder(SPEC), store.folder(SPEC).with_name("copy"))
    assert [run.spec for run in store] == [SPEC]


# Orchestrator, with stand-ins for the runs --------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
from pathlib import Path
from filelock import FileLock
folder, seconds, log = Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
with FileLock(folder / ".lock", timeout=0):
    with open(log, "a") as stream:
        stream.write(f"{folder.name} {os.environ.get('OMP_NUM_THREADS')}\\n")
    if seconds < 0:
        raise ValueError("learning_rate=nan is not possible.")
    time.sleep(seconds)
    (folder / "metrics.csv").write_text("step,reward\\n1,0.5\\n")
    (folder / "result.json").write_text(json.dumps({"seconds": seconds, "steps": 1}))
"""


@pytest.fixture
def standin(tmp_path, monkeypatch):
    """Commands of runs that take ``seconds`` (fail if negative) and note their start in a file."""
    (tmp_path / "standin.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def command_of(seconds):
        def command(spec, store):
            took = seconds(spec) if callable(seconds) else seconds
            return ["standin", str(store.folder(spec)), str(took), str(tmp_path / "started")]

        return command

    command_of.started = lambda: (tmp_path / "started").read_text().splitlines()
    return command_of


def specs(count: int) -> list[RunSpec]:
    return [RunSpec(experiment="dapo", preset="smoke", seed=seed) for seed in range(count)]


def test_fill_executes_what_is_missing_and_tells_progress(tmp_path, standin, finish_run):
    store, lines = RunStore(tmp_path / "runs"), []
    finish_run(store, specs(3)[0])
    orchestrator = Orchestrator(store, 1, report=lines.append, command=standin(0.1))
    assert orchestrator.fill(specs(3))
    assert [line.split()[0] for line in standin.started()] == [spec.name for spec in specs(3)[1:]]
    assert lines[0].startswith("1 of 3 runs finished, 0 running, 2 left; about 2 min to go")
    assert lines[-1] == "3 of 3 runs finished, 0 running, 0 left"
    counts = [list(map(int, re.findall(r"\d+", line)[:4])) for line in lines if "runs finished" in line]
    assert len(counts) >= 4 and all(
        finished + running + left == total for finished, total, running, left in counts
    )
    assert orchestrator.fill(specs(3)) and len(standin.started()) == 2  # nothing is repeated


def test_two_orchestrators_share_the_work(tmp_path, standin):
    """Started at once on the same runs: each run is executed once, and both end with all of them finished."""
    script = (
        "import sys\n"
        "from qurl.experiments import RunSpec, RunStore\n"
        "from qurl.experiments.orchestrator import Orchestrator\n"
        "command = lambda spec, store: ['standin', str(store.folder(spec)), '1.5', sys.argv[2]]\n"
        "wanted = [RunSpec(experiment='dapo', preset='smoke', seed=seed) for seed in range(4)]\n"
        "sys.exit(not Orchestrator(RunStore(sys.argv[1]), 1, command=command).fill(wanted))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "runs"), str(tmp_path / "started")]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert sorted(line.split()[0] for line in standin.started()) == sorted(spec.name for spec in specs(4))


def test_a_failed_run_is_told_and_the_others_go_on(tmp_path, standin):
    store, lines = RunStore(tmp_path / "runs"), []
    command = standin(lambda spec: -1 if spec.seed == 0 else 0.1)
    orchestrator = Orchestrator(store, 1, report=lines.append, command=command)
    assert not orchestrator.fill(specs(2))
    assert [store.state(spec) for spec in specs(2)] == ["stopped", "finished"]
    (failed,) = [line for line in lines if line.startswith("FAILED")]
    assert "learning_rate=nan is not possible." in failed and "train.log" in failed
    assert "1 failed" in lines[-1]


# As papermill and a kernel: the lock is held by a process in a session of its own that no signal to the parent reaches.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "standin", *sys.argv[1:]], start_new_session=True)
child.wait()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["hangs", "its papermill is killed"])
def test_no_process_of_a_run_is_left(tmp_path, standin, killed):
    (tmp_path / "parent.py").write_text(PARENT)
    store, lines = RunStore(tmp_path / "runs"), []
    limit = 0.1 if not killed else 10
    orchestrator = Orchestrator(
        store, 1, limit, report=lines.append, command=lambda *run: ["parent", *standin(3600)(*run)[1:]]
    )
    if killed:

        def kill():
            while not (tmp_path / "started").exists():
                time.sleep(0.1)
            time.sleep(1.5)  # for the orchestrator to see the child
            orchestrator._running[0].process.kill()

        threading.Thread(target=kill, daemon=True).start()
    start = time.monotonic()
    assert not orchestrator.fill(specs(1))
    assert time.monotonic() - start < 60
    assert store.state(specs(1)[0]) == "stopped"  # nothing holds it any more
    if not killed:
        assert any("took longer than 0.1 minutes" in line for line in lines)


def test_a_killed_run_can_go_on(tmp_path, standin):
    store = RunStore(tmp_path / "runs")
    process = subprocess.Popen([sys.executable, "-m", *standin(3600)(specs(1)[0], store)])
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert store.state(specs(1)[0]) == "stopped"
    assert Orchestrator(store, 1, command=standin(0.1)).fill(specs(1))


def test_a_full_disk_stops_before_the_next_run(tmp_path, standin, monkeypatch, finish_run):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 5 << 20))
    store = RunStore(tmp_path / "runs")
    finish_run(store, specs(2)[0])
    with pytest.raises(OSError, match="has 5 MiB left, and a run needs 200: make room"):
        Orchestrator(store, 1, command=standin(0.1)).fill(specs(2))
    assert store.state(specs(2)[0]) == "finished"


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one core"
)
def test_runs_at_a_time_share_the_cores(tmp_path, standin):
    assert Orchestrator(RunStore(tmp_path / "runs"), 2, command=standin(0.5)).fill(specs(2))
    threads = str(len(os.sched_getaffinity(0)) // 2)
    assert [line.split()[1] for line in standin.started()] == [threads] * 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"only": ["fig_9"]}, "only='fig_9' is not possible: use some of fig_speedup, "),
        ({"preset": "gpu"}, "preset='gpu' is not possible: use one of smoke, cpu, paper."),
        ({"seeds": 0}, "seeds=0 is not possible: use a whole number from 1 to 100."),
        ({"seeds": 5_000_000_000}, "seeds=5000000000 is not possible"),
        ({"jobs": -1}, "jobs=-1 is not possible: use a whole number from 0 to 64."),
        ({"limit_minutes": float("nan")}, "limit_minutes=nan is not possible: use a positive number"),
    ],
)
def test_reproduce_refuses_in_one_sentence(tmp_path, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        reproduce(**arguments, runs_dir=tmp_path)


def test_paper_is_a_plan_and_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    lines = []
    with pytest.raises(
        ValueError, match=r"^preset='paper' .* qurl reproduce --preset paper --dry-run\.$"
    ) as refusal:
        reproduce("paper", ["tab_dapo"], 1, runs_dir=tmp_path, report=lines.append)
    assert str(refusal.value).count(". ") == 0
    assert not lines and not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("preset", "fix"),
    [
        (
            "cpu",
            r"pass -p run_missing true, or run qurl reproduce --preset cpu --only tab_dapo --seeds 1 --runs-dir \S+\.$",
        ),
        ("paper", r"see qurl reproduce --preset paper --only tab_dapo --seeds 1 --runs-dir \S+ --dry-run\.$"),
    ],
)
def test_a_figure_without_runs_says_what_makes_them(tmp_path, preset, fix):
    config = {"preset": preset, "seeds": 1, "run_missing": False}
    with pytest.raises(ValueError, match=fix):
        read_runs("tab_dapo", FigureConfig(**config, runs_dir=str(tmp_path), output_dir=str(tmp_path)))


def test_finished_runs_of_the_paper_count(tmp_path, finish_run):
    """Started by hand, in one process for each GPU; figures are then drawn from them."""
    store = RunStore(tmp_path)
    spec = RunSpec(experiment="dapo", preset="paper")
    finish_run(store, spec)
    assert Orchestrator(store, 1).fill([spec])


def test_dry_run_lists_commands_that_papermill_understands(tmp_path, finish_run):
    lines = []
    finish_run(RunStore(tmp_path), RunSpec(experiment="dapo", preset="smoke", dtype="bf16", objective="tis"))
    reproduce("smoke", ["tab_dapo"], 1, runs_dir=tmp_path, dry_run=True, report=lines.append)
    assert len(lines) == 10 and lines[0].endswith("# finished")
    # The finished run took a minute.
    assert re.fullmatch(r"# 1 of 8 runs finished, 0 running, 7 left; about \d+ min to go", lines[9])
    assert (
        lines[1].startswith("papermill ") and "-p objective naive" in lines[1] and "code_bits 4" in lines[1]
    )
    assert "pipelines/tab_dapo.ipynb" in lines[8] and "-p seeds 1" in lines[8]
    words = train_command(specs(1)[0], RunStore(tmp_path))
    parameters = dict(zip(words[words.index("-p") + 1 :: 3], words[words.index("-p") + 2 :: 3], strict=False))
    assert parameters["experiment"] == "dapo" and "seed" not in parameters  # defaults are left out
    assert not list(tmp_path.rglob("train.log"))


# Results -----------------------------------------------------------------------------------------------------------


def test_interval_of_three_seeds():
    """Values 1, 2, 3: mean 2, standard error 1/√3, and t(0.975; 2) = 4.302653."""
    mean, low, high = mean_interval([1, 2, 3])
    assert (mean, high - mean, mean - low) == pytest.approx(
        (2, 4.302653 / 3**0.5, 4.302653 / 3**0.5), rel=1e-6
    )
    assert pd.isna(mean_interval([1])[1])


def test_measures_of_a_run(tmp_path, finish_run):
    store = RunStore(tmp_path)
    finish_run(store, SPEC, after=0.75, kl=(0.002, 0.024))
    told = measures(store.load(SPEC))
    assert told["gain"] == pytest.approx(50) and told["after"] == 75
    assert (told["kl_first"], told["kl_last"], told["kl_growth"]) == pytest.approx((0.002, 0.024, 12))
    assert told["clip_peak"] == pytest.approx(1) and told["w_max"] == 3


def test_windows_of_a_run_that_logs_w_rarely(tmp_path):
    steps = pd.RangeIndex(1, 41, name="step")
    metrics = pd.DataFrame(
        {"reward": 0.5, "mismatch/w_max": [9.0 if s == 7 else None for s in steps]}, index=steps
    )
    run = Run(SPEC, {"accuracy": {}, "steps": 40, "seconds": 1.0}, metrics)
    assert measures(run)["w_max"] == 9


def rows(**values: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"experiment": "dapo", "arm": arm, "label": arm, "seed": seed, "after": value}
            for arm, seeds in values.items()
            for seed, value in enumerate(seeds)
        ]
    )


@pytest.mark.parametrize(
    ("a", "relation", "b", "verdict"),
    [
        ([60, 61, 62], ">", [50, 51, 52.5], "reproduced"),
        ([60, 61, 62], "<", [50, 51, 52.5], "not reproduced"),
        ([60, 51, 62], ">", [50, 61, 52], "undecided"),
        ([60, 61, 62], "=", [59, 62, 62], "no difference shown"),
        ([60, 61, 62], "=", [50, 51, 52.5], "they differ"),
        ([60], ">", [50], "undecided"),
    ],
)
def test_verdicts(a, relation, b, verdict):
    claim = Claim("a and b", "1 against 0", "after", "a", relation, "b")
    assert judge(rows(a=a, b=b), claim, "cpu")["verdict"] == verdict


def test_pairing_by_seed_sees_what_the_spread_hides():
    """Seeds differ by 20 points and arms by 1: only the paired difference is beyond chance."""
    told = judge(rows(a=[31, 51.1, 70.9], b=[30, 50, 70]), Claim("", "", "after", "a", ">", "b"), "cpu")
    assert told["verdict"] == "reproduced" and told["difference"] == pytest.approx(1)


def test_no_verdict_at_smoke_and_without_runs():
    claim = Claim("a and c", "", "after", "a", ">", "c")
    assert judge(rows(a=[1, 2], c=[0, 0]), claim, "smoke")["verdict"] == "not testable with this preset"
    told = judge(rows(a=[1, 2]), claim, "cpu")
    assert told["verdict"] == "undecided" and "no finished run of c" in told["reason"]


def test_arms_that_are_the_same_run_are_told():
    """ACR is TIS until a weight above C meets a clipped token; then there is nothing to compare."""
    claim = Claim("", "", "after", "a", ">", "b")
    runs = rows(a=[50, 61, 52], b=[50, 60, 53]).assign(kl_last=[0.1, 0.2, 0.3, 0.1, 0.25, 0.3], w_max=3.0)
    assert judge(runs, claim, "cpu")["reason"].endswith("under 2 of 3 seeds both arms are the same run")
    runs["kl_last"] = range(6)
    assert "same run" not in judge(runs, claim, "cpu")["reason"]


def test_arms_without_a_common_seed_are_not_judged():
    runs = rows(a=[50, 61], b=[50, 60]).assign(seed=[0, 1, 2, 3])
    told = judge(runs, Claim("", "", "after", "a", ">", "b"), "cpu")
    assert told["verdict"] == "undecided" and "no seed in common" in told["reason"]


def test_not_reproduced_is_the_opposite_and_undecided_neither():
    claim = Claim("", "", "after", "a", ">", "b")
    opposite = judge(rows(a=[50, 51, 52], b=[60, 61, 62.5]), claim, "cpu")
    assert (opposite["verdict"], opposite["reason"]) == ("not reproduced", "the opposite is shown")
    nothing = judge(rows(a=[50, 61, 52], b=[60, 51, 62]), claim, "cpu")
    assert (nothing["verdict"], nothing["reason"]) == ("undecided", "the interval holds a difference of 0")
    assert "held-out accuracy, a minus b: -3.33 points (" in nothing["ours"]


def test_a_ratio_is_told_as_one():
    """Student's t with two degrees of freedom at 95 %: 4.303 standard errors, of 0.5 / √3 here."""
    claim = Claim("", "", "kl_growth", "a", ">", 1.0)
    runs = rows(a=[2.0, 2.5, 3.0]).rename(columns={"after": "kl_growth"})
    told = judge(runs, claim, "cpu")
    assert told["ours"] == "KL(behav‖prox), last tenth over first, a: 2.5 times (1.26 to 3.74, 3 seeds)"
    assert told["verdict"] == "reproduced" and told["difference"] == 1.5
    runs["kl_growth"] = [0.9, 2.5, 3.0]
    assert judge(runs, claim, "cpu")["reason"] == "the interval holds 1"


def test_collect_and_scores(tmp_path, finish_run):
    store = RunStore(tmp_path)
    for seed, after in enumerate((0.5, 0.7)):
        finish_run(
            store, RunSpec(experiment="gsm8k", preset="smoke", objective="tis", seed=seed), after=after
        )
    results = collect(store, "tab_gsm8k", "smoke", 2)
    assert len(results.runs) == 2 and len(results.missing) == 12
    assert set(results.curves["arm"]) == {"INT8, TIS (FlashRL)"}
    table = scores(results.runs, paper=TABLES["tab_gsm8k"])
    assert table[["arm", "mean", "seeds", "paper"]].to_dict("records") == [
        {"arm": "int8-tis", "mean": 60.0, "seeds": 2, "paper": 51.40}
    ]


def test_fewer_runs_do_not_replace_results_of_more(tmp_path):
    """`qurl reproduce --seeds 1` on a fresh clone must leave the committed results of three seeds alone."""
    new, kept, said = tmp_path / "new", tmp_path / "kept", []
    new.mkdir()
    for result, taken in (
        ({"seeds": 3, "missing": []}, True),
        ({"seeds": 1, "missing": []}, False),
        ({"seeds": 3, "missing": ["cpu-bf16-tis-seed2"]}, False),
        ({"seeds": 5, "missing": []}, True),
    ):
        before = (kept / "result.json").read_text() if kept.exists() else ""
        (new / "result.json").write_text(json.dumps(result))
        promote_results(new, kept, said.append)
        assert (kept / "result.json").read_text() == (json.dumps(result) if taken else before)
    assert len(said) == 2 and "has 3 seeds, this figure 1" in said[0] and "1 runs of this figure" in said[1]


def test_claims_page_shows_every_verdict(tmp_path):
    claims = [
        {
            "claim": "ACR is better",
            "paper": "2 against 1",
            "ours": "+1",
            "verdict": "reproduced",
            "reason": "so",
        },
        {
            "claim": "UAQ adds",
            "paper": "3",
            "ours": "",
            "verdict": "not testable with this preset",
            "reason": "no",
        },
    ]
    folder = tmp_path / "tab_dapo" / "cpu"
    folder.mkdir(parents=True)
    runs = [
        {"experiment": "dapo", "arm": "int8-acr", "label": "INT8 4-bit codes, ACR (QuRL)", "seed": seed}
        for seed in range(3)
    ]
    (folder / "result.json").write_text(json.dumps({"claims": claims, "runs": runs}))
    page = claims_page(tmp_path)
    assert "\ndapo: `int8-acr` is INT8 4-bit codes, ACR (QuRL).\n\n| claim |" in page
    assert "\n## [tab_dapo/cpu](tab_dapo/cpu), stress setting\n" in page
    assert (
        "\n| [tab_dapo/cpu](tab_dapo/cpu), stress setting | 1 | 0 | 0 | 1 | 0 |\n" in page
    )  # how many of each
    assert "| ACR is better | 2 against 1 | +1 | **reproduced**: so |" in page
    assert "| UAQ adds | 3 | – | **not testable with this preset**: no |" in page
