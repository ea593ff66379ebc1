"""What a run store takes for a finished run, and what it refuses, in a sentence that names the folder."""

import json

import pytest
import yaml

from qurl import notebook
from qurl.experiments import RunSpec, RunStore
from qurl.experiments.figures import FigureConfig, read_runs
from qurl.experiments.orchestrator import Orchestrator
from qurl.experiments.promotion import claims_page, promote_results
from qurl.experiments.results import collect
from qurl.plots import convergence, curves
from qurl.training import RunArguments, _asked, train

SPEC = RunSpec(experiment="dapo", preset="smoke", seed=5)


@pytest.fixture
def store(tmp_path, finish_run):
    store = RunStore(tmp_path / "store")
    finish_run(store, SPEC)
    return store


def rewrite(store: RunStore, **changes) -> None:
    file = store.folder(SPEC) / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"learning_rate": 1e-4}, "learning_rate=0.0001, where the recipe has 3e-05"),
        ({"beta": 0.1}, "beta=0.1, where the recipe has 0.0"),
        ({"num_iterations": 4}, "num_iterations=4, where the recipe has 1"),  # no recipe names it
        ({"processes": 4}, "processes=4, where the recipe has 1"),
    ],
)
def test_a_run_of_another_recipe_is_not_taken_for_this_one(store, change, sentence):
    """Recipes change; a figure that mixes runs from before and after says nothing."""
    recorded = _asked(*SPEC.arguments(store.root)) | change
    rewrite(store, run=recorded)
    (store.folder(SPEC) / "config.yaml").write_text(yaml.safe_dump(recorded))
    if sentence is None:
        store.require_recipe(SPEC)
        assert store.load(SPEC).spec == SPEC
        return
    with pytest.raises(ValueError, match=f"{SPEC.name} was trained with {sentence}: delete the folder"):
        store.load(SPEC)
    # The same of one that was stopped: before anything starts, since the run could only tell to choose another folder.
    (store.folder(SPEC) / "result.json").unlink()
    with pytest.raises(ValueError, match=f"{SPEC.name} was trained with {sentence}: delete the folder"):
        Orchestrator(store, 1).fill([SPEC])


@pytest.mark.parametrize(
    "change",
    [{"run": None}, {"run": []}, {"seconds": None}, {"engine": None}, {"accuracy": {"after": None}}],
    ids=str,
)
def test_a_damaged_result_is_named_and_left_out(store, caplog, change):
    rewrite(store, **change)
    with pytest.raises(ValueError, match=f"{SPEC.name} holds a damaged run .*delete the folder"):
        store.load(SPEC)
    assert list(store) == [] and "left out" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "\n".join(text.splitlines()[:6]),  # cut behind a row
        lambda text: text.splitlines()[0],
        lambda text: text.replace("0.4", "high", 1),
    ],
    ids=["cut", "header alone", "text"],
)
def test_damaged_metrics_are_named(store, damage):
    """Cut behind a row they would pass for those of a shorter run."""
    file = store.folder(SPEC) / "metrics.csv"
    file.write_text(damage(file.read_text()))
    with pytest.raises(ValueError, match=r"holds a damaged run .*metrics\.csv"):
        store.load(SPEC)


def test_several_test_sets_are_columns(store):
    rewrite(store, accuracy={"after": {"mean": 0.5, "tasks": {"amc": 0.4, "aime24": 0.6}}})
    row = store.table().iloc[0]
    assert (row["after"], row["after:amc"], row["after:aime24"]) == (50.0, 40.0, 60.0)


@pytest.mark.parametrize(
    ("runs_dir", "sentence"),
    [("~nobody-of-this-name/runs", "names a user that is not known here"), ("a{b}", "has braces")],
)
def test_impossible_stores(tmp_path, runs_dir, sentence):
    with pytest.raises(notebook.ParameterError, match=f"runs_dir=.*{sentence}"):
        RunStore(runs_dir if runs_dir.startswith("~") else tmp_path / runs_dir).prepare()


def test_the_command_of_a_figure_names_its_store(tmp_path):
    """Without it the command would train for hours into another store."""
    config = {"preset": "cpu", "seeds": 1, "run_missing": False, "output_dir": ""}
    with pytest.raises(ValueError, match=f"--seeds 1 --runs-dir {tmp_path}"):
        read_runs("tab_dapo", FigureConfig(**config, runs_dir=str(tmp_path)))


def test_damaged_results_do_not_end_a_command(tmp_path):
    """One damaged file among the kept results is told; the rest is written."""
    said, new = [], tmp_path / "new"
    new.mkdir()
    (new / "result.json").write_text('{"seeds": 3}')
    good = {"claim": "c", "paper": "p", "ours": "o", "verdict": "reproduced", "reason": "r"}
    for name, text in (("a", '{"se'), ("b", "[]"), ("c", '{"seeds": null}'), ("d", '{"claims": [{}]}')):
        kept = tmp_path / "kept" / name / "cpu"
        kept.mkdir(parents=True)
        (kept / "result.json").write_text(text)
        promote_results(new, kept, said.append)
        assert (kept / "result.json").read_text() == text
    (tmp_path / "kept" / "e" / "cpu").mkdir(parents=True)
    (tmp_path / "kept" / "e" / "cpu" / "result.json").write_text(json.dumps({"claims": [good]}))
    page = claims_page(tmp_path / "kept", said.append)
    assert "| c | p | o | **reproduced**: r |" in page
    assert len(said) == 8 and all("is damaged and left out" in line for line in said)


@pytest.mark.parametrize("text", ["{}", '{"claims": []}'])
def test_a_folder_of_something_else_is_not_a_finished_run(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    run, config = SPEC.arguments(tmp_path)
    with pytest.raises(ValueError, match="is not the result of a run: choose another output_dir"):
        train(run, config)


def test_a_result_without_its_config_is_compared_too(store):
    run, config = SPEC.arguments(store.folder(SPEC))
    rewrite(store, run=_asked(run, config) | {"objective": "naive"})
    with pytest.raises(ValueError, match="holds a run with objective='naive'"):
        train(run, config)


def test_longest_completion_of_an_evaluation_is_checked_before_anything_starts(tmp_path):
    _, config = SPEC.arguments(tmp_path / "run")
    with pytest.raises(ValueError, match=r"eval_max_tokens=100000 .* 512 positions .*use at most 488"):
        train(RunArguments(eval_max_tokens=100_000), config)
    assert not (tmp_path / "run").exists()


def test_negative_rewards_and_bf16_alone_are_drawn(store, finish_run):
    """DAPO's over-long penalty makes rewards negative; a figure may have BF16's runs alone."""
    spec = RunSpec(experiment="dapo", preset="smoke", dtype="bf16", objective="tis")
    finish_run(store, spec)
    table = collect(store, "tab_dapo", "smoke", 1).curves
    assert set(table["arm"]) == {"BF16"}
    for figure in (curves(table.assign(reward=-0.6)), convergence(table.assign(reward=-0.6))):
        low, high = figure.axes[0].get_ylim()
        assert low < -0.6 < high
        assert len(figure.axes[0].get_lines()) > 0
    assert convergence(table).axes[0].get_ylim()[0] == 0
