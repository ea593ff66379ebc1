"""What the trainer gives its engines: weights, lengths, random streams, adapters. Everything but vLLM is real."""

import re

import pytest
from fake_engine import FakeEngine
from replay import DATA, PROMPTS

from qurl.diagnostics import history
from qurl.trainer import QuRLTrainer


@pytest.fixture
def make(make_trainer, monkeypatch):
    monkeypatch.setattr("qurl.rollout.generation.RolloutEngine", FakeEngine)

    def make(**options):
        return make_trainer(trainer=QuRLTrainer, **options)

    return make


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_updates_are_compared_on_the_weights_that_are_quantized(make, weights):
    """What changed in the codes of the engine, sync after sync, is what the update is said to have changed.

    Steps of 1e-4 on weights of 0.02 are far below BF16's spacing there for many weights, so the two casts differ.
    """
    trainer = make(
        rollout_weights=weights, update_noise_every=1, num_iterations=2, max_steps=6, learning_rate=1e-4
    )
    trainer.train()
    table = history(trainer)[["rollout/codes_changed", "update/codes_changed"]].dropna()
    assert len(table) == 2
    assert table["update/codes_changed"].tolist() == pytest.approx(
        table["rollout/codes_changed"].tolist(), rel=1e-12
    )
    assert (table > 0).all(axis=None)


def test_a_prompt_that_does_not_fit_is_refused_in_the_users_terms(make):
    long = DATA.select([0] * 4).map(lambda row: {"prompt": PROMPTS[0] * 4})
    trainer = make(data=long, vllm_max_model_length=24)
    tokens = len(trainer.processing_class(PROMPTS[0] * 4)["input_ids"])
    sentence = (
        f"a prompt of {tokens} tokens and max_completion_length=8 exceed vllm_max_model_length=24: raise "
        "vllm_max_model_length (the model's own limit is 64), lower max_completion_length, or leave out prompts of "
        "more than 16 tokens."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        trainer.train()


def test_a_length_beyond_the_models_is_refused(make):
    with pytest.raises(ValueError, match=r"^vllm_max_model_length=65 exceeds .* use at most 64\.$"):
        make(vllm_max_model_length=65)
