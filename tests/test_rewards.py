"""Rewards with worked values, called as TRL calls them."""

import inspect

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_callable_name

from qurl.models import resolve_model
from qurl.rewards import Accuracy, Format, SoftOverlong, WeightedSum
from qurl.tasks import load_task
from qurl.tasks.formats import FORMATS


def chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def boxed():
    return load_task("math500", data="sample")


def reward(function, completions, **columns):
    ids = columns.pop("completion_ids", None)
    return function(prompts=["?"] * len(completions), completions=completions, completion_ids=ids, **columns)


def test_r09_boundaries_of_the_over_long_penalty():
    penalty = SoftOverlong(max_tokens=200, buffer=40)
    lengths = [160, 161, 180, 200, 201]
    ids = [[0] * length for length in lengths]
    # Tokens count, not characters: every text has one.
    assert reward(penalty, ["x"] * 5, completion_ids=ids) == pytest.approx([0, -0.025, -0.5, -1, -1])
    # DAPO's own: 16,384 free tokens, 4,096 of ramp.
    dapo = SoftOverlong(max_tokens=20_480, buffer=4096)
    assert [dapo.penalty(n) for n in (0, 16_384, 18_432, 20_480, 30_000)] == [0, 0, -0.5, -1, -1]
    # A buffer as wide as the limit begins at once; a wider one would punish the empty completion.
    assert SoftOverlong(40, 40).penalty(0) == 0 and SoftOverlong(40, 40).penalty(1) == -0.025
    for buffer in (41, 0, -1):
        with pytest.raises(ValueError, match=f"buffer={buffer} is not possible with max_tokens=40"):
            SoftOverlong(40, buffer)
    with pytest.raises(ValueError, match="completion_ids=None"):
        reward(penalty, ["x"])


@given(limit=st.integers(1, 500), data=st.data())
def test_the_penalty_never_rises_with_length(limit, data):
    penalty = SoftOverlong(limit, data.draw(st.integers(1, limit)))
    values = [penalty.penalty(n) for n in range(limit + 10)]
    assert values == sorted(values, reverse=True)
    assert values[limit - penalty.buffer] == 0 and set(values[limit:]) == {-1.0}


def test_accuracy_of_texts_and_of_messages(boxed):
    (accuracy,) = boxed.reward_functions()
    texts = [r"so \boxed{56}", r"\boxed{57}", "56", r"\boxed{56"]
    for completions in (texts, [chat(text) for text in texts]):
        assert reward(accuracy, completions, answer=["56"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_alternatives_and_tolerances_reach_the_judgement(boxed):
    (accuracy,) = boxed.reward_functions()
    answers = [["6 \\times 10^8", "6e8"], ["1", "2"], ["1", "2"]]
    completions = [r"\boxed{600000000}", r"\boxed{2}", r"\boxed{3}"]
    assert reward(accuracy, completions, answer=answers) == [1.0, 1.0, 0.0]
    tolerances = [0.1, None, 0.1, 0.5]
    completions = [r"\boxed{83.35}", r"\boxed{83.35}", r"\boxed{83.5}", r"\boxed{83.5}"]
    assert reward(accuracy, completions, answer=["83.3"] * 4, tolerance=tolerances) == [1.0, 0.0, 0.0, 1.0]


def test_r03_an_unreadable_gold_gives_no_reward_and_is_counted(boxed):
    (accuracy,) = boxed.reward_functions()
    completions = [r"\boxed{3}", r"\boxed{3}", r"\boxed{3}", "no answer"]
    golds = ["", "see figure", "3", "see figure"]
    assert reward(accuracy, completions, answer=golds) == [None, None, 1.0, None]
    assert accuracy.unreadable == {"": 1, "see figure": 2}
    assert boxed.reward_functions()[0].unreadable == {}, "each run counts its own"


def test_format_of_each_way_of_asking():
    for answer_format in FORMATS.values():
        obeys = Format(answer_format.pattern)
        assert reward(obeys, [answer_format.obey("12"), chat(answer_format.obey("-3"))]) == [1.0, 1.0]
        assert reward(obeys, ["", "I do not know it."]) == [0.0, 0.0], answer_format.name
    assert reward(Format("^<think>.*</think>.+$"), ["<think>a\nb</think> c", "<think>a c"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="is no regular expression"):
        Format("(")


def test_weighted_sum(boxed):
    (accuracy,) = boxed.reward_functions()
    total = WeightedSum([accuracy, SoftOverlong(10, 4)], [1.0, 0.5])
    ids = [[0] * 8, [0] * 10, [0] * 10]
    completions = [r"\boxed{1}", r"\boxed{2}", r"\boxed{1}"]
    rewards = reward(total, completions, completion_ids=ids, answer=["1", "1", "see figure"])
    assert rewards == [0.75, -0.5, None]
    assert total.__name__ == "accuracy+soft_overlong"
    with pytest.raises(ValueError, match=r"weights=\[1\.0\] do not fit 2 reward functions"):
        WeightedSum([accuracy, accuracy], [1.0])


def test_trl_names_them_in_its_metrics(boxed):
    functions = [*boxed.reward_functions(), Format("x"), SoftOverlong(10, 4)]
    assert [get_callable_name(function) for function in functions] == ["accuracy", "format", "soft_overlong"]
    for function in functions:
        assert list(inspect.signature(function).parameters)[:3] == [
            "prompts",
            "completions",
            "completion_ids",
        ]


def test_accuracy_takes_any_judge():
    def starts_alike(texts, golds, tolerances):
        return [
            type("Verdict", (), {"correct": text.startswith(gold)})
            for text, gold in zip(texts, golds, strict=True)
        ]

    assert reward(Accuracy(starts_alike), ["ab", "b"], answer=["a", "a"]) == [1.0, 0.0]


def train_one_step(folder, dataset, functions):
    """One optimizer step of stock GRPO on `tiny`; its log and the largest change of a parameter."""
    path = resolve_model("tiny")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=6,
        learning_rate=1e-3,
        logging_steps=1,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        report_to="none",
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
    )
    from transformers import AutoTokenizer

    trainer = GRPOTrainer(
        model, functions, config, train_dataset=dataset, processing_class=AutoTokenizer.from_pretrained(path)
    )
    trainer.train()
    change = max((a - b).abs().max().item() for a, b in zip(before, trainer.model.parameters(), strict=True))
    return trainer, trainer.state.log_history[0], change


def test_trl_trains_with_them_as_they_stand(tmp_path):
    task = load_task("arithmetic", n=50)
    trainer, log, change = train_one_step(
        tmp_path, task.dataset, [*task.reward_functions(), SoftOverlong(6, 2)]
    )
    assert 0 < log["rewards/accuracy/mean"] < 1 and -1 <= log["rewards/soft_overlong/mean"] <= 0
    assert log["rewards/accuracy/unreadable_golds"] == 0 and change > 0
    assert len(trainer._logs["extra"]["extracted"]) == 16 == len(trainer._logs["prompt"])


def test_r03_trl_learns_nothing_from_an_unreadable_gold(tmp_path, boxed):
    dataset = datasets.Dataset.from_dict(
        {"prompt": ["1+2="] * 4, "answer": ["see figure"] * 4, "id": [*"0123"]}
    )
    _, log, change = train_one_step(tmp_path, dataset, boxed.reward_functions())
    assert log["rewards/accuracy/unreadable_golds"] == 1 and change == 0
