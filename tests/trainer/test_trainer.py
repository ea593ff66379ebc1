"""`QuRLTrainer` on recorded rollouts: its loss against the definition and against TRL's, batches, faults, resuming."""

import copy
import math
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from replay import DATA, PROMPTS, ReplayedQuRLTrainer, make_policy, replayed_grpo_trainer, reward_of_length
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config
from trl import GRPOConfig

from qurl.config import QuRLConfig
from qurl.diagnostics import history
from qurl.objectives import OBJECTIVES, token_loss
from qurl.trainer import TrainingError, last_complete_checkpoint


def rollout_batch(trainer, rows=8):
    """A scored generation batch of the trainer, with a proximal policy that differs from the current one."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    batch = trainer._generate_and_score_completions([{"prompt": PROMPTS[i // 4]} for i in range(rows)])
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return batch


def current_logps(trainer, batch):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = trainer.model(input_ids=ids, attention_mask=attention).logits / trainer.temperature
    length = batch["completion_ids"].shape[1]
    logps = logits[:, -length - 1 : -1].log_softmax(-1)
    return logps.gather(2, batch["completion_ids"][..., None]).squeeze(2)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def aggregate(per_token, batch, loss_type, args):
    mask = batch["completion_mask"]
    masked = (per_token * mask).sum(-1)
    return {
        "grpo": (masked / mask.sum(-1)).mean(),
        "bnpo": masked.sum() / mask.sum(),
        "dr_grpo": masked.sum() / (len(mask) * args.max_completion_length),
        "dapo": masked.sum() / batch["num_items_in_batch"],
        "luspo": masked.mean(),
    }[loss_type]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_loss_and_gradient_are_those_of_the_definition(make_trainer, objective, loss_type):
    options = {"objective": objective, "loss_type": loss_type, "epsilon_high": 0.28, "num_iterations": 2}
    trainer = make_trainer(vllm_importance_sampling_clip_max=1.5, temperature=0.7, **options)
    batch = rollout_batch(trainer)
    mask = batch["completion_mask"].bool()
    behav = batch["sampling_per_token_logps"]
    prox = (batch["log_w"] + behav).masked_fill(~mask, 0)
    assert (batch["log_w"].exp()[mask] > 1.5).float().mean() > 0.2  # truncation is at work

    per_token = token_loss(
        objective,
        current_logps(trainer, batch),
        prox,
        behav,
        batch["advantages"],
        eps_low=0.2,
        eps_high=0.28,
        cap=1.5,
    )
    expected = aggregate(per_token, batch, loss_type, trainer.args)
    expected_gradient = gradients(trainer.model, expected)
    loss = trainer._compute_loss(trainer.model, batch)
    gradient = gradients(trainer.model, loss)

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradient, expected_gradient, rtol=1e-4, atol=1e-6 * expected_gradient.abs().max().item()
    )
    assert expected_gradient.abs().max() > 0


def test_kl_term_is_plain_k3(make_trainer):
    trainer = make_trainer(objective="tis", beta=0.5, num_iterations=2)
    batch = rollout_batch(trainer)
    mask, ref = batch["completion_mask"].bool(), batch["ref_per_token_logps"]
    trainer._compute_loss(trainer.model, batch)
    gap = (ref - current_logps(trainer, batch))[mask]
    assert trainer._metrics["train"]["kl"][-1] == pytest.approx((gap.exp() - gap - 1).mean().item(), rel=1e-4)


def test_clipped_shares_use_the_bounds_of_acr(make_trainer):
    shares = {}
    for objective in ("tis", "acr"):
        trainer = make_trainer(objective=objective, num_iterations=2)
        torch.manual_seed(0)
        batch = rollout_batch(trainer)
        trainer._compute_loss(trainer.model, batch)
        shares[objective] = trainer._metrics["train"]["clip_ratio/high_mean"][-1]
        if objective == "acr":
            mask = batch["completion_mask"].bool()
            ratio = (current_logps(trainer, batch) - batch["old_per_token_logps"]).exp()
            clipped = (ratio > batch["clip_high"]) & (batch["advantages"][:, None] > 0)
            assert shares["acr"] == pytest.approx(clipped[mask].float().mean().item(), abs=1e-6)
        # The bounds are TRL's own again after the loss.
        assert (trainer.epsilon_low, trainer.epsilon_high) == (0.2, 0.2)
    assert shares["acr"] < shares["tis"]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_garbage_at_masked_tokens_changes_nothing(make_trainer, objective, garbage):
    def loss_and_gradient(spoil):
        trainer = make_trainer(objective=objective, beta=0.1, num_iterations=2)
        original = trainer._get_per_token_logps_and_entropies

        def spoiled(model, *args, **options):
            logps, entropies, aux = original(model, *args, **options)
            if spoil and not logps.requires_grad:
                padding = spoiled.mask if spoiled.mask.shape == logps.shape else None
                logps = logps.masked_fill(padding, garbage)
            return logps, entropies, aux

        torch.manual_seed(0)
        rows = [{"prompt": PROMPTS[i // 4]} for i in range(8)]
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        probe = copy.deepcopy(trainer.vllm_generation.generator.get_state())
        lengths = [len(ids) for ids in trainer.vllm_generation.generate([[1]] * 8, None, 1)[1]]
        trainer.vllm_generation.generator.set_state(probe)
        spoiled.mask = torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]
        trainer._get_per_token_logps_and_entropies = spoiled
        batch = trainer._generate_and_score_completions(rows)
        del trainer._get_per_token_logps_and_entropies
        assert spoiled.mask.any()
        loss = trainer._compute_loss(trainer.model, batch)
        return loss.detach(), gradients(trainer.model, loss)

    (loss, gradient), (clean_loss, clean_gradient) = loss_and_gradient(True), loss_and_gradient(False)
    assert torch.equal(loss, clean_loss)
    assert torch.equal(gradient, clean_gradient)


def test_tis_trains_exactly_as_trl_does(make_trainer):
    """Same tokens, same C, two optimizer steps per batch: only the generation backend of stock TRL is replaced."""
    options = {"num_iterations": 2, "max_steps": 6, "epsilon_high": 0.28, "beta": 0.01, "loss_type": "dapo"}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_grad_norm": 1.0}
    correction = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    ours = make_trainer(objective="tis", **options)
    ours.train()
    stock = make_trainer(
        replayed_grpo_trainer,
        GRPOConfig,
        use_vllm=True,
        use_bias_correction_kl=False,
        **correction,
        **options,
    )
    stock.train()
    columns = ["loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean", "reward"]
    assert history(ours)[columns].equals(history(stock)[columns])
    assert history(ours)["clip_ratio/region_mean"].max() > 0
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_reused_proximal_logps_give_the_same_run(make_trainer, objective, loss_type):
    runs = {}
    for mode in ("auto", "recompute"):
        trainer = make_trainer(
            objective=objective, proximal_logps=mode, gradient_accumulation_steps=4, steps_per_generation=2,
            per_device_train_batch_size=4, loss_type=loss_type, beta=0.01,
        )  # fmt: skip
        assert trainer._reuses_proximal_logps is (mode == "auto")
        passes = []
        original = trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = lambda *a, f=original, p=passes, **o: (
            p.append(0),
            f(*a, **o),
        )[1]
        trainer.train()
        runs[mode] = (
            history(trainer),
            torch.cat([p.flatten() for p in trainer.model.parameters()]),
            len(passes),
        )
    reused, recomputed = runs["auto"], runs["recompute"]
    columns = ["loss", "grad_norm", "mismatch/kl_k3", "mismatch/w_max", "mismatch/ess"]
    torch.testing.assert_close(
        torch.tensor(reused[0][columns].values),
        torch.tensor(recomputed[0][columns].values),
        rtol=1e-4,
        atol=1e-6,
    )
    torch.testing.assert_close(reused[1], recomputed[1], rtol=1e-4, atol=1e-5)
    # Four losses and two reference passes per step; the proximal pass of both generation batches is saved.
    assert recomputed[2] - reused[2] == 4 * 2


def test_proximal_logps_are_recomputed_under_dropout(make_trainer, tokenizer):
    def policy():
        return make_policy(tokenizer, attention_dropout=0.1)

    assert not make_trainer(model=policy())._reuses_proximal_logps
    with pytest.raises(ValueError, match=r"proximal_logps='reuse'.*attention_dropout=0\.1"):
        make_trainer(model=policy(), proximal_logps="reuse")


def test_the_advice_on_dropout_holds(make_trainer, tokenizer, tmp_path):
    """TRL's disable_dropout reaches layers of dropout, but not the number that attention is called with."""
    folder = str(tmp_path / "policy")
    make_policy(tokenizer, attention_dropout=0.1).save_pretrained(folder)
    assert not make_trainer(model=folder, disable_dropout=True)._reuses_proximal_logps
    undropped = {"model_init_kwargs": {"attention_dropout": 0.0}, "proximal_logps": "reuse"}
    assert make_trainer(model=folder, **undropped)._reuses_proximal_logps
    layers = make_policy(tokenizer)
    layers.model.norm = torch.nn.Sequential(layers.model.norm, torch.nn.Dropout(0.1))
    assert not make_trainer(model=layers)._reuses_proximal_logps
    assert make_trainer(model=layers, disable_dropout=True, proximal_logps="reuse")._reuses_proximal_logps


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_gradient_does_not_depend_on_how_a_batch_is_split(make_trainer, loss_type):
    weights = []
    for per_device, accumulation in ((8, 1), (4, 2), (2, 4)):
        trainer = make_trainer(
            max_steps=2, per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation,
            steps_per_generation=accumulation, loss_type=loss_type, optim="sgd",
        )  # fmt: skip
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights[2], weights[0], rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_changes_nothing(make_trainer):
    runs = []
    for checkpointing in (False, True):
        trainer = make_trainer(gradient_checkpointing=checkpointing, num_iterations=2)
        trainer.train()
        runs.append(history(trainer)["loss"])
    assert runs[0].tolist() == pytest.approx(runs[1].tolist(), rel=1e-5)


def test_acr_with_one_step_per_batch_says_that_it_equals_tis(make_trainer, tokenizer, tmp_path):
    args = QuRLConfig(str(tmp_path), bf16=False, report_to="none", num_generations=4)
    with pytest.warns(UserWarning, match="objective='acr' equals 'tis' here"):
        ReplayedQuRLTrainer(
            make_policy(tokenizer), reward_of_length, args, train_dataset=DATA, processing_class=tokenizer
        )


def test_rewards_none_equal_groups_and_several_functions(make_trainer):
    def sometimes(completion_ids, **_):
        return [None if len(ids) < 4 else 1.0 for ids in completion_ids]

    trainer = make_trainer(rewards=[reward_of_length, sometimes], reward_weights=[1.0, 0.5])
    trainer.train()
    assert history(trainer)["loss"].notna().all()
    equal = make_trainer(rewards=lambda completion_ids, **_: [1.0] * len(completion_ids), max_steps=1)
    before = torch.cat([p.detach().flatten().clone() for p in equal.model.parameters()])
    equal.train()
    after = torch.cat([p.detach().flatten() for p in equal.model.parameters()])
    assert history(equal)["frac_reward_zero_std"].tolist() == [1.0]
    assert torch.equal(before, after)  # no weight decay by default, and no gradient


def test_case_o05_all_completions_masked_give_no_loss_and_no_gradient(make_trainer):
    trainer = make_trainer(mask_truncated_completions=True, num_iterations=2, max_steps=1)
    trainer.vllm_generation.eos_token_id = 7  # no completion ends with the policy's end token
    trainer.train()
    table = history(trainer)
    assert table["loss"].tolist() == [0.0] and table["grad_norm"].tolist() == [0.0]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_truncated_completions_leave_numerator_and_denominator(make_trainer):
    trainer = make_trainer(mask_truncated_completions=True, num_iterations=2, loss_type="dapo")
    batch = rollout_batch(trainer)
    assert batch["completion_mask"].sum(-1).eq(0).sum() == 1
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def spoil_first(count, value):
    def spoil(logps):
        flat = [(i, j) for i, row in enumerate(logps) for j in range(len(row))]
        for i, j in flat[:count]:
            logps[i][j] = value
        return logps

    return spoil


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}])
def test_many_missing_logps_stop_the_run_and_point_at_the_engine(make_trainer, value, options):
    trainer = make_trainer(**options)
    trainer.vllm_generation.spoil = spoil_first(3, value)
    with pytest.raises(TrainingError, match=r"the engine gave no finite log-prob for .* see replay\.log\."):
        trainer.train()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("iterations", [1, 2])
def test_a_token_without_logp_carries_no_gradient(make_trainer, monkeypatch, objective, iterations):
    monkeypatch.setattr("qurl.trainer.MAX_MISSING_SHARE", 0.5)
    trainer = make_trainer(objective=objective, num_iterations=iterations)
    trainer.vllm_generation.spoil = spoil_first(3, None)
    batch = rollout_batch(trainer)
    trainer._compute_loss(trainer.model, batch)
    assert batch["importance_sampling_ratio"].eq(0).sum() == 3
    assert not batch["importance_sampling_ratio"][~batch["completion_mask"].bool()].eq(0).any()
    assert 0 < trainer._metrics["train"]["mismatch/missing_share"][0] < 0.2


def test_a_diverged_policy_stops_the_run(make_trainer):
    trainer = make_trainer(num_iterations=2)
    with torch.no_grad():
        trainer.model.model.embed_tokens.weight.fill_(math.nan)
    with pytest.raises(TrainingError, match="the policy's log-probs are not finite at step 0"):
        trainer.train()


class Diverging(torch.optim.SGD):
    """Spoils one weight at its second step."""

    def step(self, *args, **options):
        super().step(*args, **options)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:
            self.param_groups[0]["params"][3].data.view(-1)[-1] = self.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_a_policy_that_is_not_finite_is_neither_saved_nor_a_success(make_trainer, tmp_path, value, strategy):
    """At the last step no further forward pass would notice."""
    trainer = make_trainer(max_steps=2, save_strategy=strategy, save_steps=1, num_iterations=2)
    name, parameter = list(trainer.model.named_parameters())[3]
    trainer.optimizer = Diverging([*trainer.model.parameters()], lr=1e-3)
    trainer.optimizer.value = value
    with pytest.raises(TrainingError, match=f"parameter '{name}' is not finite after step 2") as stopped:
        trainer.train()
    assert not parameter.isfinite().all()
    if strategy == "no":
        assert "there is no earlier checkpoint" in str(stopped.value)
        assert not list(tmp_path.glob("checkpoint-*"))
    else:
        assert f"checkpoint {tmp_path / 'checkpoint-1'} is intact" in str(stopped.value)
        assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
        saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
        assert all(tensor.isfinite().all() for tensor in saved.values())


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_infinite_reward_stops_the_run_and_names_its_function(make_trainer, value, asynchronous):
    def broken(completion_ids, **_):
        return [None, value] + [0.0] * (len(completion_ids) - 2)

    async def broken_later(completion_ids, **_):
        return broken(completion_ids)

    function = broken_later if asynchronous else broken
    shown = re.escape(str(math.copysign(math.inf, value)))
    with pytest.raises(
        TrainingError, match=f"reward function '{function.__name__}' returned {shown} at step 0"
    ):
        make_trainer(rewards=[reward_of_length, function]).train()


def test_batches_without_any_reward_are_reported_once(make_trainer):
    def none(completion_ids, **_):
        return [None] * len(completion_ids)

    def undefined(completion_ids, **_):
        return [math.nan] * len(completion_ids)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(rewards=[none, undefined], max_steps=2).train()
        make_trainer(rewards=[none, reward_of_length], max_steps=2).train()
    (told,) = [str(one.message) for one in caught if "has a reward" in str(one.message)]
    assert "all of 'none', 'undefined' returned None or NaN" in told


def test_diagnostics_are_raw_and_complete(make_trainer):
    trainer = make_trainer(num_iterations=2, max_steps=2, vllm_importance_sampling_clip_max=1.5)
    trainer.train()
    row = history(trainer).iloc[0]
    assert row["mismatch/w_max"] > 1.5 and row["sampling/importance_sampling_ratio/max"] == 1.5
    assert row["acr/upper_max"] == pytest.approx(1.2 * row["mismatch/w_max"] / 1.5, rel=1e-4)
    assert row["rollout/bits"] == 8 and row["rollout/seconds"] == 0.5 and row["rollout/sync_seconds"] == 0.25
    assert row["rollout/codes_changed"] == 0.125
    assert trainer.vllm_generation.syncs == 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_ratio_that_trl_logs_is_the_weight_of_the_objective(make_trainer, objective):
    trainer = make_trainer(objective=objective, num_iterations=2, max_steps=1)
    trainer.train()
    row = history(trainer).iloc[0]
    raw, truncated = row["mismatch/w_mean"], row["mismatch/w_trunc_mean"]
    assert row["mismatch/w_max"] > 2 and truncated < raw
    expected = {"naive": 1, "proximal": 1, "decoupled": raw}.get(objective, truncated)
    assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(expected, rel=1e-5)


def test_the_share_of_syncs_leaves_evaluation_out(make_trainer, monkeypatch):
    """Rollouts take 1 s, in evaluation 100 s; a sync takes 0.25 s of it. The policy changes at each step.

    After an evaluation its sync serves the next training batch too: the sync after that is the only one in 2 s.
    """
    clock = [0.0]
    monkeypatch.setattr("qurl.trainer.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    trainer = make_trainer(eval_data=DATA.select(range(8)), eval_strategy="steps", eval_steps=2, max_steps=6)
    generate = trainer.vllm_generation.generate

    def timed(*args, **options):
        clock[0] += 1 if trainer.model.training else 100
        return generate(*args, **options)

    monkeypatch.setattr(trainer.vllm_generation, "generate", timed)
    trainer.train()
    table = history(trainer)
    assert table["rollout/sync_share"].dropna().to_dict() == {2: 0.25, 4: 0.125, 6: 0.125}
    assert table["eval_rollout/sync_seconds"].dropna().to_dict() == {2: 0.25, 4: 0.25, 6: 0.25}
    assert "eval_rollout/sync_share" not in table


def test_weights_of_one_under_quantization_and_a_mean_far_from_one_are_reported(make_trainer):
    trainer = make_trainer(num_iterations=2, max_steps=4)
    trainer.vllm_generation.spoil = lambda logps: [[value - 3 for value in row] for row in logps]
    with pytest.warns(UserWarning, match="the mean importance weight is") as caught:
        trainer.train()
    assert sum("mean importance weight" in str(w.message) for w in caught) == 1
    with pytest.warns(UserWarning, match="exactly 1 on every token"):
        trainer._look_for_faults(torch.zeros(5), {"mismatch/w_mean": 1.0})


@pytest.mark.parametrize("action", ["warn", "stop", "full_precision"])
def test_alarm_on_the_mismatch(make_trainer, action, tmp_path, caplog):
    trainer = make_trainer(num_iterations=2, mismatch_limit=1e-6, mismatch_action=action)
    if action == "warn":
        with pytest.warns(UserWarning, match="above mismatch_limit=1e-06"):
            trainer.train()
        assert trainer.state.global_step == 4
    elif action == "stop":
        trainer.train()
        assert trainer.state.global_step == 1
        assert last_complete_checkpoint(str(tmp_path)).endswith("checkpoint-1")
    else:
        trainer.train()
        assert trainer.state.global_step == 4 and trainer.vllm_generation.train_dtype == "bf16"


@pytest.mark.parametrize("killed_at", [2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_goes_on_as_if_never_stopped(
    make_trainer, tokenizer, tmp_path, killed_at, accumulation
):
    """Within a generation batch (step 3 of two steps each) and between two: same prompts, tokens, losses, weights."""
    options = {
        "max_steps": 8, "steps_per_generation": 2 * accumulation, "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 8 // accumulation, "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    whole = make_trainer(output_dir=str(tmp_path / "whole"), **options)
    whole.train()
    first = make_trainer(output_dir=str(tmp_path / "cut"), **options)
    first.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{killed_at}"))

    table, expected = history(first), history(whole)
    columns = ["loss", "grad_norm"]
    # The recording starts anew after resuming, so only what was generated before the kill can be compared in numbers.
    assert table.index.tolist() == expected.index.tolist()
    same = killed_at + killed_at % 2
    assert table.loc[:same, columns].equals(expected.loc[:same, columns])
    generated = whole.vllm_generation.prompts[math.ceil(killed_at / 2) :]
    assert first.vllm_generation.prompts == generated
    assert first.vllm_generation.streams == whole.vllm_generation.streams[math.ceil(killed_at / 2) :]
    # The engine is given the checkpoint's weights before the first rollout.
    assert first.vllm_generation.syncs == len(generated)


def test_a_resumed_run_does_not_repeat_the_prompts_of_the_first_epoch(make_trainer, tmp_path):
    """Eight prompts in four generation batches are an epoch: the second has an order of its own."""
    options = {"max_steps": 16, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    few = DATA.select(range(8))
    whole = make_trainer(output_dir=str(tmp_path / "whole"), data=few, **options)
    whole.train()
    prompts = whole.vllm_generation.prompts
    assert len(prompts) == 8 and prompts[:4] != prompts[4:]
    for step in (8, 11):  # at the end of the first epoch, and within the second
        cut = make_trainer(output_dir=str(tmp_path / f"cut{step}"), data=few, **options)
        cut.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert cut.vllm_generation.prompts == prompts[(step + 1) // 2 :]


def test_a_run_at_its_last_step_is_not_trained_further(make_trainer):
    options = {"max_steps": 2, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    finished = make_trainer(**options)
    finished.train()
    again = make_trainer(**options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and again.vllm_generation.prompts == []
    for mine, theirs in zip(again.model.parameters(), finished.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("options", [{"rollout_dtype": "fp8"}, {"objective": "tis"}, {"num_iterations": 4}])
def test_resuming_with_another_configuration_is_refused(make_trainer, options):
    saved = {"max_steps": 2, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(**saved).train()
    with pytest.raises(ValueError, match="was made with"):
        make_trainer(**saved | {"max_steps": 4} | options).train(resume_from_checkpoint=True)


def test_the_control_arm_refuses_optimizers_it_does_not_hold_for(make_trainer):
    with pytest.raises(ValueError, match="uaq_mode='learning_rates' is not possible with optim='rmsprop'"):
        make_trainer(uaq_scale=1.5, uaq_mode="learning_rates", optim="rmsprop")


def test_half_written_checkpoints_are_passed_over(make_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "num_iterations": 2}
    make_trainer(**options).train()
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    state.write_text(state.read_text()[:50])
    assert last_complete_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        make_trainer(**options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=True)
    assert history(resumed).index.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        make_trainer(output_dir=str(tmp_path / "empty")).train(resume_from_checkpoint=True)


def test_a_checkpoint_scaled_by_uaq_is_not_scaled_again(make_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "uaq_scale": 2.0}
    trainer = make_trainer(**options)
    trainer.train()
    assert trainer.model.config.qurl_uaq_scale == 2.0
    resumed = make_trainer(**{**options, "max_steps": 3})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    with pytest.raises(ValueError, match=r"scaled by UAQ with s=2\.0, but this run with s=1\.0"):
        make_trainer(max_steps=3).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_the_control_arm_of_uaq_trains_as_uaq_does(make_trainer, optimizer):
    """Parameter groups against folded scaling, through the trainer: same losses without gradient clipping."""
    losses = {}
    for mode in ("fold", "learning_rates"):
        trainer = make_trainer(
            uaq_scale=2.0, uaq_mode=mode, optim=optimizer, max_grad_norm=0.0, num_iterations=2, max_steps=6,
            learning_rate=1e-2 if optimizer == "sgd" else 1e-3, adam_epsilon=1e-12,
        )  # fmt: skip
        trainer.train()
        losses[mode] = history(trainer)["loss"].tolist()
    assert losses["fold"] == pytest.approx(losses["learning_rates"], rel=2e-3, abs=2e-5)
    unscaled = make_trainer(optim=optimizer, max_grad_norm=0.0, num_iterations=2, max_steps=6)
    unscaled.train()
    assert history(unscaled)["loss"].tolist() != pytest.approx(losses["fold"], rel=2e-3, abs=2e-5)


def test_attention_without_the_models_soft_cap_is_refused(make_trainer, tokenizer):
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'sdpa' leaves out the model's attn_logit_softcapping=50\.0"):
        make_trainer(model=AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))
    make_trainer(model=AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_untested_options_of_trl_are_refused(tokenizer, tmp_path, name):
    args = QuRLConfig(str(tmp_path), bf16=False, report_to="none", num_generations=4)
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        ReplayedQuRLTrainer(
            make_policy(tokenizer), reward_of_length, args, train_dataset=DATA, processing_class=tokenizer,
            **{name: [print] if name == "tools" else print},
        )  # fmt: skip


def test_args_of_trl_alone_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"args is a GRPOConfig: pass a qurl\.QuRLConfig"):
        ReplayedQuRLTrainer(make_policy(tokenizer), reward_of_length, GRPOConfig(str(tmp_path), bf16=False))


def test_a_checkpoint_has_the_card_of_this_run(make_trainer, tmp_path):
    make_trainer(max_steps=1, save_strategy="steps", save_steps=1, objective="tis", num_iterations=2).train()
    card = (tmp_path / "README.md").read_text()
    assert "| objective | `tis`:" in card and "2602.13953" in card and "None" not in card
