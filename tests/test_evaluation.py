"""Scores worked by hand, every (problem, sample) exactly once however often a run is killed, and honest warnings."""

import itertools
import json
import multiprocessing
import random
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl.cli import main
from qurl.evaluation import (
    average,
    avg_at_k,
    bootstrap_interval,
    evaluate,
    load_evaluation,
    maj_at_k,
    pass_at_k,
    show_wrong,
    summarize,
)
from qurl.models import MANIFEST, resolve_model
from qurl.tasks import TASKS, TEST_SETS, load_task


class Arithmetician:
    """Stands in for the engine: answers sums of the plain task, each sample right with a given probability.

    ``stop_after`` calls it fails, as an engine does that is killed.
    """

    model, dtype, code_bits, max_num_seqs, description = "stand-in", "int8", 8, 4, {"hardware": "none"}

    def __init__(self, right=0.5, stop_after=None):
        from transformers import AutoTokenizer

        self.path = resolve_model("tiny")
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.random, self.right, self.stop_after, self.calls = random.Random(0), right, stop_after, 0

    def generate(self, prompt_ids, n, max_tokens, temperature):
        if self.calls == self.stop_after:
            raise KeyboardInterrupt
        self.calls += 1
        ids, reasons = [], []
        for prompt in prompt_ids:
            left, right = self.tokenizer.decode(prompt).rstrip("=").split("+")
            for _ in range(n):
                is_right = self.random.random() < self.right
                answer = str(int(left) + int(right) + (0 if is_right else self.random.randrange(1, 9)))
                tokens = [*self.tokenizer(answer)["input_ids"], self.tokenizer.eos_token_id][:max_tokens]
                ids.append(tokens)
                reasons.append("stop" if tokens[-1] == self.tokenizer.eos_token_id else "length")
        return SimpleNamespace(
            completion_ids=ids, finish_reasons=reasons, seconds=1.0, completion_tokens=sum(map(len, ids))
        )


@pytest.fixture(scope="module")
def task():
    return load_task("arithmetic", "test", n=16)


def samples_of(correct, **columns):
    """A frame of samples out of a table of problems × samples."""
    rows = [
        {
            "id": str(problem),
            "sample": sample,
            "problem": "1+1=",
            "gold": "2",
            "correct": right,
            "extracted": "2" if right else "3",
            "how": "whole",
            "why": "",
            "finish_reason": "stop",
            "tokens": 2,
            "completion": f"text {sample}",
        }
        for problem, row in enumerate(correct)
        for sample, right in enumerate(row)
    ]
    frame = pd.DataFrame(rows).astype({"correct": "boolean", "extracted": "string"})
    return frame.assign(**columns)


def settings_of(k, **other):
    return {"task": "arithmetic", "dtype": "int8", "k": k, "max_tokens": 5, **other}


def test_worked_scores():
    assert avg_at_k([[True, False, False, False], [True, True, False, False]]) == pytest.approx(3 / 8)
    # Of 4 samples 1 is right: 2 of them contain it in 3 of 6 pairs.
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert maj_at_k(["7", "7", "3"], [True, True, False]) == 1.0
    assert maj_at_k(["7", "3", "3"], [True, False, False]) == 0.0
    assert maj_at_k(["7", "3"], [True, False]) == 0.5
    assert maj_at_k(["7", "3", None, None, None], [True, False, False, False, False]) == 0.5
    assert maj_at_k([None, None], [False, False]) == 0.0
    # 1/2 and 0.5 are one wrong answer where told so, and outvote the right one.
    same = {frozenset(("1/2", "0.5"))}
    together = maj_at_k(["1/2", "0.5", "7"], [False, False, True], lambda a, b: frozenset((a, b)) in same)
    assert together == 0.0 and maj_at_k(["1/2", "0.5", "7"], [False, False, True]) == pytest.approx(1 / 3)


@given(n=st.integers(1, 12), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(subset) < c for subset in subsets) / len(subsets))


def test_v01_nothing_is_said_about_more_samples_than_there_are():
    with pytest.raises(ValueError, match="k=16 is not possible with n=8 samples"):
        pass_at_k(8, 0, 16)
    with pytest.raises(ValueError, match="c=9 of n=8"):
        pass_at_k(8, 9, 1)
    scores = summarize(samples_of([[False] * 8] * 3), settings_of(8)).scores
    assert [name for name in scores if name.startswith("pass")] == ["pass@1", "pass@2", "pass@4", "pass@8"]
    assert set(scores.values()) == {0.0}


def test_intervals_are_over_problems():
    # The same sample 32 times says nothing more about a problem: the interval is that of 100 problems.
    rng = np.random.default_rng(0)
    problems = rng.random(100) < 0.5
    once = summarize(samples_of([[right] for right in problems]), settings_of(1))
    often = summarize(samples_of([[right] * 32 for right in problems]), settings_of(32))
    low, high = once.intervals["avg@1"]
    assert often.intervals["avg@32"] == pytest.approx((low, high))
    # Normal approximation: 1.96 sqrt(p (1 - p) / 100).
    p = problems.mean()
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(p * (1 - p) / 100), rel=0.06)
    assert low < p < high


def test_the_interval_covers_what_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for repetition in range(200):
        low, high = bootstrap_interval([rng.random(80) < 0.3], seed=repetition)
        hits += low <= 0.3 <= high
    assert 0.90 <= hits / 200 <= 0.99


def test_average_weighs_tasks_equally():
    many = summarize(samples_of([[True]] * 90 + [[False]] * 10), settings_of(1))
    few = summarize(samples_of([[False]] * 5 + [[True]] * 5), settings_of(1))
    line = average([many, few])
    assert line["avg@1"] == pytest.approx(70.0) and line["problems"] == 110
    low, high = map(float, line["interval"].split("-"))
    # Half of the two standard errors, added in quadrature.
    error = 100 * np.hypot(np.sqrt(0.09 / 100), np.sqrt(0.25 / 10)) / 2
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    with pytest.raises(ValueError, match=r"k=\[1, 2\]"):
        average([many, summarize(samples_of([[True, True]]), settings_of(2))])


def test_every_sample_once_whatever_the_batch(task):
    evaluation = evaluate(Arithmetician(), task, k=3, max_tokens=6)
    assert len(evaluation.samples) == 48 == evaluation.counts["samples"]
    assert not evaluation.samples.duplicated(["id", "sample"]).any()
    assert evaluation.samples["id"].unique().tolist() == task.dataset["id"][:]
    right = evaluation.samples.groupby("id", sort=False)["correct"].mean()
    assert evaluation.scores["avg@3"] == pytest.approx(right.mean())
    assert (
        evaluation.samples["correct"].tolist()
        == (evaluation.samples["completion"] == evaluation.samples["gold"]).tolist()
    )


def test_killed_between_the_last_sample_and_the_result(task, tmp_path, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_parquet", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Arithmetician(), task, 2, output=tmp_path)
    monkeypatch.undo()
    engine = Arithmetician()
    evaluation = evaluate(engine, task, 2, output=tmp_path)
    assert engine.calls == 0 and evaluation.counts["samples"] == 32
    assert evaluation.settings["engine"] == {"hardware": "none"}


@pytest.mark.parametrize("stop_after", range(6))
def test_a_killed_evaluation_goes_on(task, tmp_path, stop_after):
    arguments = {"task": task, "k": 3, "max_tokens": 6, "output": tmp_path / "out"}
    with pytest.raises(KeyboardInterrupt):
        evaluate(Arithmetician(stop_after=stop_after), **arguments)
    (lines,) = [*(tmp_path / "out").glob("*.jsonl"), None][:1]
    answered = 0
    if lines:
        answered = len(lines.read_text().splitlines())
        with open(lines, "a") as stream:
            stream.write('{"id": "12+34", "samples": [{"problem": "ha')  # killed in the middle of a line
    engine = Arithmetician()
    evaluation = evaluate(engine, **arguments)
    assert answered == 3 * stop_after and engine.calls == np.ceil((16 - answered) / 3)
    assert len(evaluation.samples) == 48 and evaluation.complete
    assert not evaluation.samples.duplicated(["id", "sample"]).any()

    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name != ".lock") == [
        "result.json",
        "samples.parquet",
        "settings.json",
    ]
    engine = Arithmetician()
    again = evaluate(engine, **arguments)
    assert engine.calls == 0 and again.scores == evaluation.scores and again.intervals == evaluation.intervals
    pd.testing.assert_frame_equal(again.samples, evaluation.samples, check_dtype=False)
    assert load_evaluation(tmp_path / "out").row() == evaluation.row()


def test_another_setting_needs_another_folder(task, tmp_path):
    evaluate(Arithmetician(), task, k=1, output=tmp_path)
    for other, message in (
        ({"k": 2}, "k=1 instead of 2"),
        ({"k": 1, "max_tokens": 7}, "max_tokens=512"),
        ({"k": 1, "temperature": 1.0}, "temperature=0.6"),
        ({"k": 1, "task": load_task("arithmetic", "test", n=15)}, "holds an evaluation with data="),
    ):
        with pytest.raises(FileExistsError, match=message):
            evaluate(Arithmetician(), **{"task": task, "output": tmp_path, **other})


def test_the_same_data_elsewhere_is_the_same_evaluation(tmp_path):
    records = [{"problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10, 14)]
    finished = []
    for name in ("a", "b"):
        file = tmp_path / name / "sums.json"
        file.parent.mkdir()
        file.write_text(json.dumps(records))
        task = load_task(str(file), chat=False, answer_format="exact")
        engine = Arithmetician()
        finished.append(evaluate(engine, task, 2, output=tmp_path / "out"))
    assert engine.calls == 0 and finished[0].scores == finished[1].scores


def test_a_failed_start_does_not_occupy_its_folder(task, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        evaluate(Arithmetician(stop_after=0), task, 3, output=tmp_path)
    assert evaluate(Arithmetician(), task, 2, output=tmp_path).complete


def _shard(folder, index):
    return evaluate(
        Arithmetician(), load_task("arithmetic", "test", n=16), 4, output=folder, shard=(index, 2)
    ).complete


def test_v04_two_processes_share_a_folder(task, tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        complete = pool.starmap(_shard, [(tmp_path, 0), (tmp_path, 1)])
    assert any(complete)
    evaluation = load_evaluation(tmp_path)
    assert len(evaluation.samples) == 64 and not evaluation.samples.duplicated(["id", "sample"]).any()
    assert evaluation.samples["id"].unique().tolist() == task.dataset["id"][:]


def test_v04_one_shard_alone_is_not_complete_and_any_number_may_go_on(tmp_path):
    task = load_task("arithmetic", "test", n=15)
    first = evaluate(Arithmetician(), task, 4, output=tmp_path, shard=(0, 2))
    assert not first.complete and first.counts["problems"] == 8 and not (tmp_path / "result.json").exists()
    engine = Arithmetician()
    rest = evaluate(engine, task, 4, output=tmp_path)
    assert rest.complete and rest.counts["samples"] == 60 and engine.calls == 4  # 7 problems, 2 at a time
    assert rest.settings["engine"] == {"hardware": "none"}


def test_v06_a_length_limit_is_named():
    evaluation = evaluate(Arithmetician(right=1.0), load_task("arithmetic", "test", n=16), 2, max_tokens=2)
    assert evaluation.scores["avg@2"] == 0.0 and evaluation.counts["truncated"] == 1.0
    assert evaluation.row()["truncated"] == 100.0 and evaluation.row()["max_tokens"] == 2
    assert any(
        "100% of all samples" in line and "max_tokens=2: raise it" in line for line in evaluation.warnings
    )


@pytest.mark.parametrize(
    ("wrong_cut", "expected"), [(20, True), (19, True), (3, False)], ids=["all", "most", "few"]
)
def test_v06_truncation_is_named_when_it_explains_the_wrong_ones(wrong_cut, expected):
    # 100 problems, 20 wrong, of which some were cut off.
    samples = samples_of([[index >= 20] for index in range(100)])
    samples.loc[: wrong_cut - 1, "finish_reason"] = "length"
    lines = summarize(samples, settings_of(1)).warnings
    assert any("max_tokens=5" in line for line in lines) == expected


def test_v06_answers_that_are_not_found_are_named():
    samples = samples_of([[False, True]] * 10)
    samples.loc[~samples["correct"], "extracted"] = pd.NA
    (line,) = summarize(samples, settings_of(2)).warnings
    assert "50% of all samples and 100% of the wrong ones hold no answer" in line
    assert summarize(samples_of([[False, True]] * 10), settings_of(2)).warnings == []
    none = samples_of([[False] * 3] * 10, extracted=pd.array([pd.NA] * 30, dtype="string"))
    assert summarize(none, settings_of(3)).scores["maj@3"] == 0.0


def test_equal_samples_are_named(task):
    evaluation = evaluate(Arithmetician(right=1.0), task, 4)
    assert evaluation.counts["distinct"] == 0.25
    assert any("All 4 samples of each problem are equal" in line for line in evaluation.warnings)
    assert evaluate(Arithmetician(right=1.0), task, 1).warnings == []


def test_r03_problems_without_readable_gold_are_listed_and_left_out():
    samples = samples_of([[True, True], [False, False], [None, None]])
    evaluation = summarize(samples, settings_of(2))
    assert evaluation.scores["avg@2"] == 0.5 and evaluation.counts["problems"] == 2
    assert evaluation.counts["unreadable_golds"] == ["2"]
    assert any("cannot be read and are left out: 2" in line for line in evaluation.warnings)
    with pytest.raises(ValueError, match="no gold answer that can be read"):
        summarize(samples_of([[None]]), settings_of(1))


def test_wrong_answers_can_be_browsed(task):
    evaluation = evaluate(Arithmetician(right=0.0), task, 1)
    evaluation.samples.loc[0, "completion"] = "<script>1 < 2</script>"
    page = show_wrong(evaluation, n=3).data
    assert page.startswith("<p>16 of 16 completions of arithmetic are not right; the first 3:")
    assert page.count("<details>") == 3 and "&lt;script&gt;" in page and "<script>" not in page
    assert f"instead of {task.dataset[0]['answer']}" in page
    right = evaluate(Arithmetician(right=1.0), task, 1)
    assert "<details>" not in show_wrong(right).data


def test_impossible_requests(task):
    engine = Arithmetician()
    for arguments, message in (
        ({"k": 0}, "k=0"),
        ({"k": 2, "temperature": 0}, "k=2 with temperature=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"shard": (2, 2)}, r"shard=\(2, 2\)"),
        ({"shard": (0, 17)}, "count <= 16, the number of problems"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(engine, task, **arguments)
    with pytest.raises(ValueError, match="cannot spell prompts"):
        evaluate(engine, load_task("arithmetic", "test", n=4, chat=True))
    assert engine.calls == 0


def test_the_result_says_where_it_comes_from(task, tmp_path):
    evaluate(Arithmetician(), task, 2, output=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["settings"]["data"]["source"] == "generated"
    assert result["settings"]["engine"] == {"hardware": "none"}
    assert result["settings"]["model"] == "stand-in" and result["counts"]["samples"] == 32


def test_the_command_prints_scores_and_warnings(monkeypatch, capsys, tmp_path):
    built = []

    class Engine(Arithmetician):
        def __init__(self, model, dtype, **options):
            super().__init__(right=0.5)
            built.append((model, dtype, options))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("qurl.rollout.RolloutEngine", Engine)
    command = [
        "eval",
        "--model",
        "tiny",
        "--task",
        "arithmetic",
        "--n",
        "20",
        "--k",
        "2",
        "--max-tokens",
        "2",
    ]
    command += ["--dtype", "fp8", "--set", "digits=(2, 3)", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    out, err = capsys.readouterr()
    header, line = out.splitlines()
    assert header.split()[:4] == ["task", "dtype", "avg@2", "pass@1"]
    cells = dict(zip(header.split(), line.split(), strict=True))
    assert cells["task"] == "arithmetic" and cells["dtype"] == "fp8" and cells["truncated"] == "100.0"
    assert "20 of 20 problems" in err and "raise it" in err
    ((model, dtype, options),) = built
    assert (model, dtype) == ("tiny", "fp8") and options == {
        "max_model_len": 10,
        "max_num_seqs": 64,
        "seed": 0,
    }

    assert main(command) == 0, "finished: nothing is sampled again"
    assert len(built) == 1
    assert main([*command, "--k", "3"]) == 2
    assert "holds an evaluation with k=2 instead of 3" in capsys.readouterr().err
    for wrong, message in (
        (["--task", "gsm8k"], "is not in the local hub cache"),
        (["--task", "gsm8k", "--data", "sample", "--n", "9"], "n=9 is more than"),
        (["--task", "arithmetic", "--set", "name=1"], "--set name=1 is not possible: use --task."),
        (["--task", "arithmetic", "--set", "split=train"], "--set split=train is not possible: use --split."),
        (["--task", "arithmetic", "--set", "seed=1"], "--set seed=1 is not possible: use --seed."),
        (["--task", "arithmetic", "--set", "digits='5'"], "digits='5' is not possible"),
        (["--task", "arithmetic", "--set", "chat={[]: 1}"], "chat='{[]: 1}' is not possible"),
        (["--task", "arithmetic", "--data", "x"], "no option of task 'arithmetic'"),
    ):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert main(["eval", *wrong]) == 2
        assert message in capsys.readouterr().err
    for wrong in (["--set", "digits"], ["--shard", "2"]):
        with pytest.raises(SystemExit):
            main(["eval", "--task", "arithmetic", *wrong])


class Reader(Arithmetician):
    """Stands in for the engine: knows every answer of the given tasks and gives it in their format."""

    def __init__(self, tasks):
        from transformers import AutoTokenizer

        self.path = resolve_model("smollm2-135m")
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.completions = {}
        for task in tasks:
            for row in task.dataset:
                gold = row["answer"] if isinstance(row["answer"], str) else row["answer"][-1]
                ids = self.tokenizer(task.answer_format.obey(gold))["input_ids"]
                self.completions[tuple(task.render(row, self.tokenizer))] = ids

    def generate(self, prompt_ids, n, max_tokens, temperature):
        ids = [self.completions[tuple(prompt)] for prompt in prompt_ids for _ in range(n)]
        return SimpleNamespace(
            completion_ids=ids,
            finish_reasons=["stop"] * len(ids),
            seconds=1.0,
            completion_tokens=sum(map(len, ids)),
        )


def test_every_task_can_be_solved():
    tasks = [load_task(name, data="sample") for name in TASKS if name != "arithmetic"]
    engine = Reader(tasks)
    evaluations = [evaluate(engine, task, 2) for task in tasks]
    assert [evaluation.scores["avg@2"] for evaluation in evaluations] == [1.0] * 8
    assert average([one for one in evaluations if one.settings["task"] in TEST_SETS])["avg@2"] == 100.0
    assert all("All 2 samples of each problem are equal" in one.warnings[0] for one in evaluations)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_the_engine_scores_as_transformers_does(dtype):
    """`tiny` was scored with transformers' generate when it was made: an independent reference."""
    reference = json.loads((resolve_model("tiny") / MANIFEST).read_text())["sampled_accuracy"]
    task = load_task("arithmetic", "test", n=1000, seed=1)
    evaluation = evaluate("tiny", task, 2, max_tokens=6, temperature=1.0, dtype=dtype)
    assert len(evaluation.samples) == 2000 and evaluation.settings["engine"]["dtype"] == dtype
    low, high = bootstrap_interval([evaluation.samples.groupby("id")["correct"].mean().to_numpy()], 0.9999)
    assert low < reference["value"] < high
