"""Data as it really is: any published layout, duplicates, nulls, conflicts; prompts as TRL renders them."""

import gzip
import hashlib
import inspect
import json
import re
import time
from types import SimpleNamespace

import httpx
import huggingface_hub
import numpy as np
import pandas as pd
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from trl import GRPOTrainer

from qurl.models import resolve_model
from qurl.tasks import TASKS, TEST_SETS, TaskError, load_task
from qurl.tasks.formats import FORMATS
from qurl.tasks.records import RecordError
from qurl.tasks.sources import SOURCES, DataUnavailableError

SETS = tuple(SOURCES)


@pytest.fixture(scope="module")
def smollm2():
    return AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def tiny():
    return AutoTokenizer.from_pretrained(resolve_model("tiny"))


def trl_prompt_ids(prompt, tokenizer):
    """What GRPOTrainer computes, by its own method."""
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        chat_template=None,
        chat_template_kwargs={},
        tools=None,
        environment_factories=None,
        _is_vlm=False,
    )
    return GRPOTrainer._tokenize_prompts(trainer, [prompt])[0][0]


def score(task, completion, gold):
    return task.check(completion, gold).correct


# Layouts


@pytest.mark.parametrize("name", SETS)
def test_sample_sets_load_in_their_published_layout(name):
    task = load_task(name, data="sample")
    assert task.dataset.column_names[:4] == ["prompt", "answer", "id", "problem"]
    assert len(task.dataset) == 8 == len(set(task.dataset["id"]))
    assert task.provenance["conflicting"] == []
    (user,) = task.dataset[0]["prompt"]
    assert user["role"] == "user" and user["content"].count(task.dataset[0]["problem"]) == 1
    assert user["content"] == task.answer_format.ask(task.dataset[0]["problem"])


def test_sample_sets_are_those_that_were_written(root):
    folder = root / "data" / "tasks"
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert len(sums) == 9
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def test_answers_of_every_type_become_text():
    golds = {name: load_task(name, data="sample").dataset["answer"][:] for name in SETS}
    assert golds["aime24"][1] == "013", "as published: the leading zero is no matter of the loader"
    assert golds["amc"][:2] == ["142", "13"]  # floats in the file
    assert golds["gsm8k"][4:] == ["2100", "103", "10000", "-13"]
    assert golds["minerva"][:2] == [["10"], ["6 \\times 10^8", "6e8"]]  # alternatives
    assert golds["olympiadbench"][:3] == ["$0$,$1$", "$(1,3),(3,1)$", "4"]  # all wanted
    assert load_task("olympiadbench", data="sample").dataset["tolerance"][:] == [None] * 6 + [0.1, None]


def test_the_same_problems_load_from_every_layout(tmp_path):
    records = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(3)]
    (tmp_path / "array.json").write_text("\ufeff" + json.dumps(records))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    (tmp_path / "lines.jsonl").write_text("\r\n".join(map(json.dumps, records)))
    pd.DataFrame(records).to_parquet(tmp_path / "table.parquet")
    pd.DataFrame(records).to_csv(tmp_path / "table.csv", index=False)
    verl = [
        {
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"ground_truth": record["answer"], "style": "rule"},
        }
        for record in records
        for text in [FORMATS["answer_line"].ask(record["problem"])]
    ]
    pd.DataFrame(verl).to_parquet(tmp_path / "verl.parquet")
    processed = [
        {"prompt": record["problem"], "solution": record["answer"], "reward_model": entry["reward_model"]}
        for record, entry in zip(records, verl, strict=True)
    ]
    pd.DataFrame(processed).to_parquet(tmp_path / "processed.parquet")
    solutions = [
        {"problem": record["problem"], "solution": rf"It is $\boxed{{{record['answer']}}}$."}
        for record in records
    ]
    (tmp_path / "solutions.json").write_text(json.dumps(solutions))
    capital = [
        {"ID": str(i), "Problem": record["problem"], "Answer": i + 1} for i, record in enumerate(records)
    ]
    (tmp_path / "capital.jsonl").write_text("\n".join(map(json.dumps, capital)))
    for file in tmp_path.iterdir():
        task = load_task(str(file))
        assert task.dataset["problem"][:] == ["What is 0 + 1?", "What is 1 + 1?", "What is 2 + 1?"], file
        assert task.dataset["answer"][:] == ["1", "2", "3"], file
        assert task.name == file.stem and task.answer_format.name == "boxed"


@given(problem=st.text(min_size=1).map(str.strip).filter(bool), name=st.sampled_from([*FORMATS]))
def test_a_prompt_put_around_a_problem_comes_off_again(problem, name):
    answer_format = FORMATS[name]
    assert answer_format.problem_of(answer_format.ask(problem)) == problem
    assert answer_format.problem_of(f"\n{answer_format.ask(problem)} ") == problem


def test_own_prompts_of_a_layout_are_not_repeated():
    task = load_task("dapo", data="sample")
    text = task.dataset[0]["prompt"][0]["content"]
    assert text.count("Remember to put your answer") == 1 and text.startswith(
        "Solve the following math problem"
    )
    assert task.dataset[0]["problem"] == "Find the number of positive multiples of $7$ below $1000$."
    boxed = load_task("dapo", data="sample", answer_format="boxed").dataset[0]["prompt"][0]["content"]
    assert "Remember" not in boxed and boxed.endswith("\\boxed{}.")


@pytest.mark.parametrize(
    ("name", "split", "path", "rows"),
    [
        ("gsm8k", "train", "gsm8k", 7473),
        ("gsm8k", "test", "", 1319),
        ("gsm8k", "test", "gsm8k/test.jsonl", 1319),
        ("math500", "test", "deepscaler", 500),
        ("aime24", "test", "deepscaler/test/aime.json", 30),
        ("amc", "test", "", 83),
        ("minerva", "test", "deepscaler/test", 272),
        ("olympiadbench", "test", "deepscaler", 675),
    ],
)
def test_the_real_sets_load_whole(shared, name, split, path, rows):
    task = load_task(name, split, data=shared / "data" / path)
    assert len(task.dataset) == rows == task.provenance["rows"] and task.provenance["conflicting"] == []
    assert all(len(digest) == 64 for digest in task.provenance["sha256"].values())


def test_the_real_training_set_has_nulls_and_duplicates(shared):
    task = load_task("deepscaler", data=shared / "data" / "deepscaler")
    account = task.provenance
    assert (account["rows"], account["without_answer"], account["duplicates"]) == (8449, 4, 289)
    # 97 and 097, 83 and 83°: other spellings of one answer are no conflict.
    assert len(task.dataset) == 8156 == account["n"] and account["conflicting"] == []
    assert sorted(account["sha256"]) == ["aime.json", "math.json"]


# Duplicates, nulls, conflicts


def test_d01_dapo_repeats_and_conflicts(tmp_path, caplog):
    ask = FORMATS["answer_line"].ask
    texts = [
        ("How many?", "3"),
        ("How  many? ", "3"),
        ("How far?", "4"),
        ("How far?", "5"),
        ("How old?", "6"),
    ]
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": ask(text), "role": "user"}],
            "reward_model": {"ground_truth": gold, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"uuid-{text.strip()}"},
        }
        for text, gold in texts * 100
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "dapo-math-17k.parquet")
    with caplog.at_level("INFO"):
        task = load_task("dapo", data=tmp_path)
    assert task.dataset["problem"][:] == ["How many?", "How far?", "How old?"]
    assert task.dataset["answer"][:] == ["3", "4", "6"]
    assert task.provenance["rows"] == 500 and task.provenance["duplicates"] == 497
    assert task.provenance["conflicting"] == [{"problem": "How far?", "answers": ["4", "5"]}]
    assert (
        "1 problems come with different answers" in caplog.text
        and "497 of 500 rows are left out" in caplog.text
    )


def test_d01_aime24_repeated_32_times_is_30_problems(tmp_path):
    records = [
        {"prompt": [{"role": "user", "content": f"Problem {i}"}], "answer": f"{i:03d}"} for i in range(30)
    ]
    pd.DataFrame(records * 32).to_parquet(tmp_path / "aime-2024.parquet")
    task = load_task("aime24", data=tmp_path)
    assert len(task.dataset) == 30 and task.provenance["duplicates"] == 30 * 31


def test_nulls_are_counted_and_an_empty_set_is_no_run(tmp_path):
    file = tmp_path / "set.jsonl"
    records = [
        {"problem": "1?", "answer": None},
        {"problem": "2?", "answer": float("nan")},
        {"problem": "3?", "answer": "  "},
        {"problem": "4?", "answer": []},
        {"problem": None, "answer": "5"},
        {"problem": " ", "answer": 6},
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(TaskError, match=r"no problem .* 6 rows, of which 2 have no problem and 4 no answer"):
        load_task(str(file))
    file.write_text("\n".join(map(json.dumps, [*records, {"problem": "7?", "answer": 0.0}])))
    task = load_task(str(file))
    assert task.dataset["answer"][:] == ["0"], "zero is an answer"
    assert task.provenance["without_answer"] == 4 and task.provenance["without_problem"] == 2
    for empty in ("", "[]"):
        file.write_text(empty)
        with pytest.raises(TaskError, match="0 rows"):
            load_task(str(file))


def test_ids_are_unique_whatever_the_file_says(tmp_path):
    file = tmp_path / "set.json"
    file.write_text(
        json.dumps([{"id": 7, "problem": "a", "answer": 1}, {"id": 7, "problem": "b", "answer": 2}])
    )
    assert load_task(str(file)).dataset["id"][:] == ["0", "1"]
    file.write_text(
        json.dumps([{"id": 7, "problem": "a", "answer": 1}, {"id": 0, "problem": "b", "answer": 2}])
    )
    assert load_task(str(file)).dataset["id"][:] == ["7", "0"]


def test_files_that_cannot_be_read_are_named(tmp_path):
    for name, content, message in (
        ("a.jsonl", b'{"problem": "1?", "answer"', "download it again"),
        ("b.parquet", b"PAR1 and then nothing", "download it again"),
        ("c.json", b"[1, 2]", "entry 0 is no object"),
        (
            "d.json",
            b'[{"text": "1?", "answer": 1}]',
            "entry 0 has no problem: name its column one of problem",
        ),
        ("e.json", b'[{"problem": "1?", "result": 1}]', "entry 0 has no answer: name its column one of"),
        ("f.jsonl", gzip.compress(b"{}"), "download it again"),
        ("g.csv", "problem,answer\nCafé?,1\n".encode("latin-1"), "probably Latin-1 .* save it as UTF-8"),
        ("h.csv", "problem,answer\nCafé?,1\n".encode("utf-16"), "probably UTF-16, save it as UTF-8"),
        ("i.json", '[{"problem": "Café?"}]'.encode("cp1252"), "probably Latin-1 .* save it as UTF-8"),
        ("j.json", b'[{"problem": ["x"], "answer": 1}]', r"entry 0 has problem=\['x'\]: give a text"),
        ("k.json", b'[{"problem": {"x": 1}, "answer": 1}]', "entry 0 has problem="),
        ("l.json", b'[{"prompt": [{"role": "user", "content": ["x"]}], "answer": 1}]', "has prompt="),
        ("m.json", b'[{"problem": "1?", "answer": {"x": 1}}]', "entry 0 has the answer"),
        ("n.json", b'[{"problem": "1?", "answer": [["x"]]}]', "entry 0 has the answer"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecordError, match=message) as error:
            load_task(str(tmp_path / name))
        assert name in str(error.value)


def test_a_draw_is_repeatable_and_keeps_the_order():
    ids = [load_task("gsm8k", "test", data="sample", n=4, seed=seed).dataset["id"][:] for seed in (0, 0, 1)]
    assert ids[0] == ids[1] == sorted(ids[0]) != ids[2] == sorted(ids[2])
    with pytest.raises(ValueError, match="n=9 is more than the 8 problems"):
        load_task("gsm8k", data="sample", n=9)


# Hub


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise httpx.ConnectError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("name", SETS)
def test_without_network_it_stops_in_seconds_and_says_what_to_supply(no_network, name):
    start = time.monotonic()
    with pytest.raises(DataUnavailableError) as error:
        load_task(name)
    assert time.monotonic() - start < 5
    message = str(error.value)
    assert SOURCES[name].hub_id in message and SOURCES[name].supply in message and "data='sample'" in message
    assert message.count(". ") == 0, "one sentence"


def test_the_cache_serves_offline_and_the_result_names_its_commit(no_network):
    repository = no_network / "datasets--openai--gsm8k"
    commit = "c" * 40
    folder = repository / "snapshots" / commit / "main"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    pd.DataFrame({"question": ["1+1?"], "answer": ["It is 2.\n#### 2"]}).to_parquet(
        folder / "test-00000-of-00001.parquet"
    )
    task = load_task("gsm8k", "test")
    assert task.dataset["answer"][:] == ["2"]
    assert task.provenance["source"] == "hub: openai/gsm8k" and task.provenance["revision"] == commit
    assert list(task.provenance["sha256"]) == ["test-00000-of-00001.parquet"]
    with pytest.raises(DataUnavailableError, match="holds none of main/train"):
        load_task("gsm8k", "train")


def test_the_hub_is_asked_for_plain_files_at_the_commit_it_resolved(monkeypatch, tmp_path):
    asked = {}

    def download(**arguments):
        asked.update(arguments)
        folder = tmp_path / arguments["revision"]
        folder.mkdir()
        (folder / "test.jsonl").write_text('{"problem": "1+1?", "answer": "2", "unique_id": "x"}')
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: SimpleNamespace(sha="d" * 40))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    task = load_task("math500")
    assert task.provenance["revision"] == "d" * 40 and task.dataset["id"][:] == ["x"]
    assert asked["repo_type"] == "dataset" and asked["repo_id"] == "HuggingFaceH4/MATH-500"
    assert "test.jsonl" in asked["allow_patterns"]


def test_d05_a_dead_id_names_alternatives(monkeypatch):
    def gone(*_, **__):
        response = httpx.Response(404, request=httpx.Request("GET", "http://hub"))
        raise RepositoryNotFoundError("gone", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", gone)
    with pytest.raises(DataUnavailableError) as error:
        load_task("aime24")
    assert "HTTP 404" in str(error.value) and "data='BytedTsinghua-SIA/AIME-2024'" in str(error.value)
    assert SOURCES["aime24"].supply in str(error.value)
    with pytest.raises(DataUnavailableError, match="try data='openai/gsm8k'"):
        load_task("gsm8k", data="someone/gsm8k")


def test_d05_every_default_is_a_plain_file_data_set():
    import qurl.tasks.problems
    import qurl.tasks.sources

    for module in (qurl.tasks.problems, qurl.tasks.sources):
        assert "trust_remote_code" not in inspect.getsource(module)
    for source in SOURCES.values():
        assert source.hub_id.count("/") == 1
        assert source.hub_id not in ("hendrycks/competition_math", "lighteval/MATH"), "withdrawn"
        for patterns in source.files.values():
            assert all(pattern.rsplit(".", 1)[1] in ("json", "jsonl", "parquet") for pattern in patterns)


# Prompts and answers


@pytest.mark.parametrize("name", [name for name in TASKS if name != "arithmetic"])
def test_r08_a_right_answer_in_the_tasks_own_format_is_rewarded(name, smollm2):
    task = load_task(name, data="sample")
    task.self_check(smollm2)
    plain = load_task(name, data="sample", chat=False)
    plain.self_check(smollm2)
    (reward,) = task.reward_functions()
    for row in task.dataset:
        golds = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        completions = [[{"role": "assistant", "content": task.answer_format.obey(gold)}] for gold in golds]
        columns = {key: [value] * len(golds) for key, value in row.items() if key != "prompt"}
        assert reward(prompts=[row["prompt"]] * len(golds), completions=completions, **columns) == [
            1.0
        ] * len(golds)


def test_r08_every_way_of_giving_31():
    completions = ["So it is.\n\nAnswer: $31$", "So it is.\n#### 31", r"\boxed{31}", "31"]
    for name, strict in (("dapo", True), ("gsm8k", False), ("math500", True)):
        task = load_task(name, data="sample")
        assert task.lenient is not strict
        assert [score(task, text, "31") for text in completions] == [True, True, True, not strict], name


@pytest.mark.parametrize(
    "completion",
    [
        "It costs $1,400, in total.",
        "$1,400.00",
        "#### 1400" + " well" * 120,
        "#### 1400\nQuestion: What is 3 + 4?\nAnswer: it is\n#### 7",
        r"\boxed{1{,}400}",
        "1 400 dollars",
        "350*4=<<350*4=1400>>1400\n#### 1,400",
    ],
)
def test_d06_gsm8k_answers(completion):
    task = load_task("gsm8k", "test", data="sample")
    assert task.dataset["answer"][3] == "1400", "the gold behind #### 1,400"
    assert score(task, completion, "1400") is True


def test_d06_a_marker_without_a_number_is_no_answer():
    verdict = load_task("gsm8k", data="sample").check("#### ,", "1400")
    assert verdict.correct is False and verdict.extracted is None


def test_self_check_finds_what_does_not_fit(tiny, smollm2):
    load_task("arithmetic", n=2).self_check(tiny)
    load_task("arithmetic", n=2, chat=True).self_check(smollm2)
    with pytest.raises(TaskError, match="cannot spell prompts of task 'gsm8k'"):
        load_task("gsm8k", data="sample").self_check(tiny)
    unreadable = load_task("math500", data="sample")
    dataset = unreadable.dataset.remove_columns("answer").add_column("answer", ["see figure"] * 8)
    with pytest.raises(
        TaskError, match=r"no gold answer .* in its first 8 rows \('see figure': .*correct the"
    ):
        type(unreadable)("math500", "test", dataset, unreadable.answer_format).self_check(smollm2)
    golds = ["see figure", "N/A", *unreadable.dataset["answer"][2:]]
    dataset = unreadable.dataset.remove_columns("answer").add_column("answer", golds)
    type(unreadable)("math500", "test", dataset, unreadable.answer_format).self_check(smollm2)
    base = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    base.chat_template = None
    with pytest.raises(TaskError, match="chat=False"):
        load_task("gsm8k", data="sample").self_check(base)
    load_task("gsm8k", data="sample", chat=False).self_check(base)


def test_e08_prompt_ids_are_those_of_trl(tiny, smollm2):
    for task, tokenizer in (
        (load_task("arithmetic", n=3), tiny),
        (load_task("arithmetic", n=3, chat=True), smollm2),
        (load_task("gsm8k", data="sample", chat=False), smollm2),
        (load_task("dapo", data="sample"), smollm2),
    ):
        for row in task.dataset:
            assert task.render(row, tokenizer) == trl_prompt_ids(row["prompt"], tokenizer)


def with_start_token(template):
    """A tokenizer like Llama's: it puts a start token before every text, and so may its chat template."""
    from tokenizers import processors

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    tokenizer.bos_token = "<|endoftext|>"
    start = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start[0]} $A", special_tokens=[start]
    )
    tokenizer.chat_template = template
    return tokenizer


def test_e08_one_start_token():
    body = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    chat, plain = load_task("gsm8k", data="sample"), load_task("gsm8k", data="sample", chat=False)
    tokenizer = with_start_token("{{ bos_token }}" + body)
    for task in (chat, plain):
        ids = task.render(task.dataset[0], tokenizer)
        assert ids == trl_prompt_ids(task.dataset[0]["prompt"], tokenizer)
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    doubled = with_start_token("{{ bos_token }}{{ bos_token }}" + body)
    with pytest.raises(TaskError, match="two start tokens"):
        chat.render(chat.dataset[0], doubled)


# Arithmetic


def test_arithmetic_levels_take_turns():
    task = load_task("arithmetic", "test", digits=(1, 2, 3), n=8)
    assert task.dataset["level"][:] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert all(
        len(problem.split("+")[0]) == level
        for problem, level in zip(task.dataset["problem"], task.dataset["level"], strict=True)
    )
    assert len(load_task("arithmetic", "train", digits=1).dataset) == 36, "as many as there are"
    for options, message in (
        ({"digits": ()}, "digits"),
        ({"digits": (2, 2)}, "digits"),
        ({"n": 1, "digits": (1, 2)}, "n=1"),
    ):
        with pytest.raises(ValueError, match=message):
            load_task("arithmetic", **options)


def test_arithmetic_splits_never_share_a_sum():
    for chat in (False, True):
        train, test = (
            load_task("arithmetic", split, digits=2, seed=3, chat=chat).dataset for split in ("train", "test")
        )
        unordered = [{tuple(sorted(id.split("+"))) for id in dataset["id"]} for dataset in (train, test)]
        assert not unordered[0] & unordered[1]


def test_plain_arithmetic_counts_nothing_but_the_sum():
    (reward,) = load_task("arithmetic", n=1).reward_functions()
    completions = ["579", "0579", "579 ", " 579", "5790", "57", "", "579=", "five"]
    rewards = reward(prompts=["123+456="] * 9, completions=completions, answer=["579"] * 9)
    assert rewards == [1.0] + [0.0] * 8


def test_chat_arithmetic_takes_the_last_number():
    task = load_task("arithmetic", "test", digits=2, n=2, chat=True)
    assert task.dataset[0]["prompt"][0]["content"].startswith("Calculate 50 + 88 and ")
    completions = ["50 + 88 = 138", "The answer is 138.", "138", "139", "I think it is 50"]
    assert [score(task, text, "138") for text in completions] == [True, True, True, False, False]


# Requests


def test_impossible_requests(tmp_path):
    for arguments, error, message in (
        ({"name": "gsm9k"}, ValueError, "task='gsm9k' is not known: use 'arithmetic', one of 'gsm8k'"),
        ({"name": "gsm8k", "digits": 3}, ValueError, "digits=3 is no option of task 'gsm8k': use data, n"),
        ({"name": "arithmetic", "data": "x"}, ValueError, "data='x' is no option of task 'arithmetic'"),
        ({"name": "math500", "split": "train"}, ValueError, "split='train' of task 'math500' .* use 'test'"),
        ({"name": "gsm8k", "split": "dev"}, ValueError, "use 'train' or 'test'"),
        ({"name": "gsm8k", "data": "sample", "n": 0}, ValueError, "n=0"),
        ({"name": "gsm8k", "data": "sample", "answer_format": "x"}, ValueError, "answer_format='x'"),
        (
            {"name": "gsm8k", "data": str(tmp_path / "no.jsonl")},
            FileNotFoundError,
            "does not exist: give test.jsonl",
        ),
        ({"name": "gsm8k", "data": tmp_path}, FileNotFoundError, "holds no file of 'gsm8k', split 'train'"),
        ({"name": "no.jsonl"}, FileNotFoundError, "task='no.jsonl' is no file"),
    ):
        with pytest.raises(error, match=message):
            load_task(arguments.pop("name"), **arguments)


@pytest.mark.parametrize("task", ["arithmetic", "gsm8k"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("n", value) for value in ("5", 2.0, True, -1)),
        *(("seed", value) for value in ("0", 1.0, None, -1)),
        *(("chat", value) for value in ("no", 1, None)),
    ],
)
def test_options_of_another_type_are_refused_in_one_sentence(task, option, value):
    with pytest.raises(ValueError, match=rf"{option}={re.escape(repr(value))} is not possible: use .*\.$"):
        load_task(task, **{option: value})


@pytest.mark.parametrize("digits", [200, 0, "2", 2.0, None, True, (2, "3"), (2, 200), (), (2, 2)])
def test_digits_that_are_none_are_refused(digits):
    with pytest.raises(ValueError, match=rf"digits={re.escape(repr(digits))} is not possible: .*\.$"):
        load_task("arithmetic", digits=digits)


def test_the_longest_sums_and_numbers_of_numpy_are_possible():
    assert len(load_task("arithmetic", digits=100, n=1).dataset[0]["problem"]) == 202
    task = load_task("arithmetic", digits=np.int64(2), n=np.int64(3), seed=np.int64(1))
    assert task.dataset["level"][:] == [2, 2, 2] and json.dumps(task.provenance)


def test_names_splits_and_data_of_another_type_are_refused():
    for name, options, message in (
        (5, {}, "task=5 is not known"),
        (["gsm8k"], {}, "task=.* is not known"),
        ("gsm8k", {"data": 5}, "data=5 is not possible: use the path"),
        ("gsm8k", {"answer_format": ["boxed"]}, "answer_format=.* is not possible"),
        ("gsm8k", {"split": 5}, "split=5 is not possible"),
        ("gsm8k", {"name": "x"}, "name='x' is no option of task 'gsm8k'"),
        ("arithmetic", {"name": "x"}, "name='x' is no option of task 'arithmetic'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_task(name, **options)
    with pytest.raises(ValueError, match="split='test' is no option of a task besides split='train'"):
        load_task("arithmetic", "train", **{"split": "test"})
    assert load_task("arithmetic", split="test", n=1).split == "test"


def test_the_five_test_sets():
    assert set(TEST_SETS) <= set(TASKS) and len(TEST_SETS) == 5
    assert {SOURCES[name].answer_format for name in TEST_SETS} == {"boxed"}
