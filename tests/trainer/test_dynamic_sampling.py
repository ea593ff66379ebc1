"""Groups of equal rewards are replaced by groups of further prompts."""

import pytest
import torch
from datasets import Dataset
from replay import PROMPTS, ReplayedQuRLTrainer

from qurl.config import QuRLConfig
from qurl.diagnostics import history
from qurl.dynamic_sampling import equal_groups, further_rows, replace_groups


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 0.7, 1.2])
def test_equal_groups_are_found_although_their_mean_is_rounded(reward):
    rewards = torch.tensor([[reward] * 8, [0.0, 1.0] * 4])
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    assert equal_groups(advantages, 8).tolist() == [True, False]


def test_further_rows_are_new_distinct_and_the_same_again():
    dataset = Dataset.from_dict({"prompt": ["a", "b", "c", "c", "d"], "answer": list("12345")})
    rows = further_rows(dataset, {"a"}, 3, (0, 7, 1))
    assert sorted(row["prompt"] for row in rows) == ["b", "c", "d"]
    assert further_rows(dataset, {"a"}, 3, (0, 7, 1)) == rows
    assert further_rows(dataset, {"a", "b", "c"}, 3, (0, 7, 1)) == [{"prompt": "d", "answer": "5"}]
    orders = {
        tuple(row["prompt"] for row in further_rows(dataset, set(), 4, (0, step, 1))) for step in range(20)
    }
    assert len(orders) > 5


def test_groups_keep_their_padding():
    batch = {
        "prompt_ids": torch.tensor([[1], [1], [2], [2]]),
        "completion_ids": torch.tensor([[3, 4], [3, 9], [5, 6], [5, 9]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]]),
        "advantages": torch.tensor([0.0, 0.0, 1.0, -1.0]),
        "num_items_in_batch": torch.tensor(6),
    }
    extra = {
        "prompt_ids": torch.tensor([[7, 8], [7, 8]]),
        "completion_ids": torch.tensor([[5, 5, 5], [6, 9, 9]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "advantages": torch.tensor([2.0, -2.0]),
        "num_items_in_batch": torch.tensor(4),
    }
    merged = replace_groups(batch, extra, [0], [0], 2, pad_token_id=9)
    assert merged["prompt_ids"].tolist() == [[7, 8], [7, 8], [9, 2], [9, 2]]
    assert merged["completion_ids"].tolist() == [[5, 5, 5], [6, 9, 9], [5, 6, 9], [5, 9, 9]]
    assert merged["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert merged["advantages"].tolist() == [2, -2, 1, -1]
    assert batch["advantages"].tolist() == [0, 0, 1, -1]  # the original is left as it was


def by_prompt(useful):
    """Rewards that differ within the group of some prompts alone."""

    def reward(prompts, completion_ids, **_):
        return [
            float(i % 2) if prompt in useful else 1.0
            for i, (prompt, _) in enumerate(zip(prompts, completion_ids, strict=True))
        ]

    return reward


@pytest.mark.parametrize(
    "iterations", [1, 2]
)  # with the proximal log-probs of the training forward pass, and without
def test_equal_groups_are_replaced_up_to_the_limit(make_trainer, iterations):
    trainer = make_trainer(
        rewards=by_prompt(set(PROMPTS[1::2])),
        num_iterations=iterations,
        dynamic_sampling_max_rounds=8,
        max_steps=1,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [{"prompt": PROMPTS[0]}] * 4 + [{"prompt": PROMPTS[1]}] * 4
    batch = trainer._generate_and_score_completions(rows)
    assert not equal_groups(batch["advantages"], 4).any()
    decode = trainer.processing_class.decode
    prompts = [
        decode(ids[mask.bool()], skip_special_tokens=True)
        for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    assert prompts[0] in PROMPTS[3::2]  # a further one, neither of the two that were drawn
    assert prompts[4] == PROMPTS[1]
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    metrics = trainer._metrics["train"]
    assert metrics["reward"] == [0.75]  # of what was drawn first, unfiltered: 1 and the mean of 0 and 1
    assert metrics["dynamic_sampling/extra_completions"] == [4 * metrics["dynamic_sampling/rounds"][0]]
    assert metrics["dynamic_sampling/equal_groups_left"] == [0]
    loss = trainer._compute_loss(trainer.model, batch)
    assert torch.isfinite(loss)


def test_the_limit_and_the_end_of_the_training_set_are_respected(make_trainer):
    trainer = make_trainer(
        rewards=by_prompt(set()), num_iterations=2, dynamic_sampling_max_rounds=3, max_steps=2
    )
    trainer.train()
    table = history(trainer)
    assert table["dynamic_sampling/rounds"].dropna().tolist() == [3]
    assert table["dynamic_sampling/equal_groups_left"].dropna().tolist() == [1]
    trainer.train_dataset = trainer.train_dataset.select(range(2))
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS[:2] for _ in range(4)])
    assert len(batch["advantages"]) == 8


def test_each_round_draws_its_own_random_numbers(make_trainer):
    trainer = make_trainer(
        rewards=by_prompt(set()), num_iterations=2, dynamic_sampling_max_rounds=2, max_steps=1
    )
    trainer.train()
    assert [stream for _, stream in trainer.vllm_generation.streams] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scale_rewards": "batch"}, "scale_rewards='batch'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
    ],
)
def test_normalization_over_replaced_groups_is_refused(tmp_path, options, named):
    with pytest.raises(ValueError, match=named):
        QuRLConfig(str(tmp_path), report_to="none", dynamic_sampling_max_rounds=1, **options)


def test_an_iterable_dataset_is_refused(make_trainer, tmp_path, policy_folder, tokenizer):
    args = QuRLConfig(
        str(tmp_path), report_to="none", num_generations=4, dynamic_sampling_max_rounds=1, max_steps=1
    )
    stream = Dataset.from_dict({"prompt": PROMPTS}).to_iterable_dataset()
    with pytest.raises(ValueError, match="not possible with an iterable dataset"):
        ReplayedQuRLTrainer(
            policy_folder, by_prompt(set()), args, train_dataset=stream, processing_class=tokenizer
        )
