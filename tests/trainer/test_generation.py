"""What the trainer gives its engines: weights, lengths, random streams, adapters. Everything but vLLM is real."""

import math
import re

import pytest
import torch
from fake_engine import FakeEngine
from replay import DATA, PROMPTS, make_policy

from qurl.diagnostics import history
from qurl.rollout import RolloutError
from qurl.rollout.generation import CountingEngine
from qurl.trainer import QuRLTrainer


@pytest.fixture
def make(make_trainer, monkeypatch):
    monkeypatch.setattr("qurl.rollout.generation.CountingEngine", FakeEngine)

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


def test_evaluation_draws_the_same_numbers_whenever_it_is_made(make, tmp_path):
    """Twice in a row, in a run that was resumed within a generation batch, and without effect on training."""
    options = {
        "max_steps": 6, "steps_per_generation": 3, "gradient_accumulation_steps": 1, "save_strategy": "steps",
        "save_steps": 1,
    }  # fmt: skip
    evaluated = options | {
        "eval_data": DATA.select(range(12)), "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 4
    }  # fmt: skip

    def drawn(trainer, **training):
        """By what: (in training, step) of each batch."""
        engine, made = trainer.vllm_generation._engine("int8"), []
        sample = engine.sample

        def noted(*args, **arguments):
            made.append((trainer.model.training, trainer.state.global_step, sample(*args, **arguments)))
            return made[-1][2]

        engine.sample = noted
        trainer.train(**training)
        return [(mode, step, rollouts.completion_ids) for mode, step, rollouts in made]

    whole = make(output_dir=str(tmp_path / "whole"), **evaluated)
    rollouts = drawn(whole)
    assert [step for training, step, _ in rollouts if training] == [0, 3]
    assert sum(not training for training, *_ in rollouts) > 6  # several batches in each evaluation
    for step in (1, 2, 3):
        cut = make(output_dir=str(tmp_path / f"cut{step}"), **evaluated)
        again = drawn(cut, resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        later = [made for made in rollouts if made[1] > step or (made[0] and made[1] == step)]
        assert again == later
    assert drawn(make(output_dir=str(tmp_path / "plain"), **options)) == [
        made for made in rollouts if made[0]
    ]

    engine = whole.vllm_generation._engine("int8")
    before = len(engine.drawn)
    whole.evaluate()
    whole.evaluate()
    twice = engine.drawn[before:]
    assert twice[: len(twice) // 2] == twice[len(twice) // 2 :]


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"target_modules": ["embed_tokens", "q_proj"]}])
def test_base_weights_are_bit_for_bit_the_same_after_twenty_syncs(make, options):
    """The engine's codes move with the adapters, and the weights below them do not."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "down_proj"]} | options
    adapter = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    trainer = make(peft_config=adapter, max_steps=20)
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}
    trainer.train()
    assert trainer.vllm_generation._version == 20
    assert history(trainer)["rollout/codes_changed"].dropna().gt(0).sum() == 19
    for name, parameter in trainer.model.named_parameters():
        assert "lora_" in name or torch.equal(parameter, base[name]), name


def test_a_resumed_run_with_adapters_goes_on_bit_for_bit(make, tmp_path):
    peft = pytest.importorskip("peft")
    options = {
        "peft_config": peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "max_steps": 6, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    whole = make(output_dir=str(tmp_path / "whole"), **options)
    whole.train()
    for step in (2, 3):
        cut = make(output_dir=str(tmp_path / f"cut{step}"), **options)
        cut.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        columns = ["loss", "grad_norm", "mismatch/kl_k3"]
        assert history(cut)[columns].equals(history(whole)[columns])
        for mine, theirs in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_nan_of_one_sequence_is_handed_on_and_stays_there(tokenizer, tmp_path):
    """One token has values that overflow: only completions behind it are without log-probs, then and afterwards."""
    pytest.importorskip("vllm")
    policy = make_policy(tokenizer, head_dim=32)
    with torch.no_grad():
        embeddings = policy.model.embed_tokens.weight
        embeddings[:, 0] = 0
        embeddings[30] = torch.eye(32)[0]
        policy.model.layers[0].self_attn.v_proj.weight[:, 0] = 3e38
    policy.save_pretrained(tmp_path)
    healthy, ill = [5, 6, 7], [5, 30, 7]
    options = {"max_tokens": 6, "temperature": 0.0}
    with CountingEngine(tmp_path, "bf16", max_model_len=64, max_num_seqs=1) as engine:
        expected = engine.sample([healthy], **options)
        assert all(map(math.isfinite, expected.logps[0])) and 30 not in expected.completion_ids[0]
        mixed = engine.sample([ill, healthy, ill], **options)
        assert all(map(math.isnan, mixed.logps[0]))
        again = engine.sample([healthy], **options)
        assert (again.logps, again.completion_ids) == (expected.logps, expected.completion_ids)
        with pytest.raises(RolloutError, match="NaN log-probs"):
            engine.generate([ill], **options)
        policy.model.layers[0].self_attn.v_proj.weight.data.fill_(3e38)
        with pytest.raises(RolloutError, match="NaN log-probs"):
            engine.sync(policy.named_parameters())
