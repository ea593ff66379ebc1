"""`QuRLTrainer`: TRL's GRPO, sampling from a quantized copy of the policy (arXiv 2602.13953).

What is replaced of `trl.GRPOTrainer`, and why:

``__init__``
    Its vLLM backend is `qurl.rollout.generation.QuantizedVLLMGeneration`.

``_generate_single_turn``
    Chooses the engine and the random numbers of the rollouts.

``_generate_and_score_completions``
    Turns the log-probs of sampler and policy into what the objective needs; dynamic sampling.

``_get_per_token_logps_and_entropies``, ``_compute_loss``
    Hand TRL's loss the clip bounds of each token, and take the proximal log-probs from the training forward pass where
    these are the same.

``create_optimizer``
    The control arm of UAQ.

``evaluation_loop``
    The same random numbers whenever a policy is evaluated, and a clock for the training alone.

``_calculate_rewards``
    Infinite rewards stop the run.

``train``, ``_get_train_sampler``, ``_save_checkpoint``
    Resuming within a generation batch, and after the first epoch; a policy that is not finite is not saved.

``create_model_card``
    What this policy was trained with.

The equations are those of `qurl.objectives`.
"""

import contextlib
import copy
import json
import logging
import math
import os
import time
import warnings
from pathlib import Path

import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import GRPOTrainer

from qurl.checks import (
    UAQ_OPTIMIZERS,
    TrainingError,
    active_dropout,
    check_rewards,
    require_finite_policy,
    require_soft_cap,
    require_supported,
)
from qurl.config import QuRLConfig
from qurl.diagnostics import k3, mismatch_stats
from qurl.dynamic_sampling import equal_groups, further_rows, prompt_key, replace_groups
from qurl.model_card import hub_id, model_card
from qurl.models import resolve_model
from qurl.objectives import anchor, clip_bounds, importance_weights, loss_weight
from qurl.processes import load_to_numbered_cpus
from qurl.rollout.generation import QuantizedVLLMGeneration
from qurl.uaq import apply_uaq, uaq_parameter_groups, uaq_scale
from qurl.update_noise import snapshot, update_to_noise

logger = logging.getLogger(__name__)

# Sampled tokens without a log-prob from the engine: up to this share they are left out of the loss, above it the run
# stops.
MAX_MISSING_SHARE = 0.01
# Any finite log-prob of a masked reference token makes exp(ref − logp) harmless, if it is below the policy's.
_MASKED_REF_LOGP = -1e4
_ROLLOUT_STATE = "qurl_rollouts_rank{}.pt"
# Of TRL's config, which calls them vllm_….
_ENGINE_OPTIONS = (
    *("mode", "server_base_url", "server_host", "server_port", "server_timeout", "group_port"),
    *("tensor_parallel_size", "enable_sleep_mode", "gpu_memory_utilization"),
)
_BITS = {"fp8": 8, "bf16": 16, "fp32": 32}


class QuRLTrainer(GRPOTrainer):
    """Trainer for Group Relative Policy Optimization with quantized rollouts.

    A drop-in for [`~trl.GRPOTrainer`]: datasets, reward functions, callbacks, PEFT and accelerate as there; tools,
    environments, images and ``rollout_func`` are refused until they are tested.

    Parameters
    ----------
    model : str or PreTrainedModel or PeftModel
        A name is anything that `qurl.models.resolve_model` takes.
    reward_funcs : callable or list of callable
    args : QuRLConfig
    **options
        As for [`~trl.GRPOTrainer`].

    Raises
    ------
    ValueError
        For options that quantized rollouts do not support.
    """

    _tag_names = ["trl", "grpo", "qurl"]  # noqa: RUF012 (TRL's own attribute)

    def __init__(self, model, reward_funcs=None, args: QuRLConfig | None = None, **options):
        require_supported(model, args, options)
        if isinstance(model, str):
            model = str(resolve_model(model))
        # TRL builds its own engine where use_vllm is set, which can neither quantize nor run on every CPU.
        args.use_vllm = False
        try:
            super().__init__(model, reward_funcs, args, **options)
        finally:
            args.use_vllm = True
        self.use_vllm = True
        if args.dynamic_sampling_max_rounds and isinstance(self.train_dataset, IterableDataset):
            raise ValueError(
                f"dynamic_sampling_max_rounds={args.dynamic_sampling_max_rounds} is not possible with an iterable "
                "dataset, which further prompts cannot be drawn from: use a dataset of known length."
            )
        if not isinstance(self.processing_class, PreTrainedTokenizerBase):
            raise ValueError("quantized rollouts are of text alone: use a decoder-only text model.")
        require_soft_cap(self.model.config)
        # TRL logs its ratio between these two limits: so it is the weight of the objective, 1, w or min(w, C).
        self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max = {
            "naive": (1.0, 1.0),
            "proximal": (1.0, 1.0),
            "decoupled": (None, math.inf),
        }.get(args.objective, (None, args.vllm_importance_sampling_clip_max))
        if args.uaq_scale != 1 and args.uaq_mode == "fold":
            apply_uaq(self.model, scale=args.uaq_scale)
        self._warned: set[str] = set()
        if args.objective == "acr" and args.proximal_is_current:
            self._warn_once(
                "tis",
                "objective='acr' equals 'tis' here: with one optimizer step per generation batch no token can be "
                "clipped. Set steps_per_generation or num_iterations to several optimizer steps per batch.",
            )
        self._reuses_proximal_logps = self._may_reuse_proximal_logps()
        self._loss_inputs: dict | None = None
        self._round = 0  # of dynamic sampling
        self._eval_batches = 0
        self._eval_start: float | None = None
        self._eval_seconds = 0.0
        self._start_over()
        self.vllm_generation = self._build_generation()

    def _start_over(self) -> None:
        """Set what a run counts, at its start and before a checkpoint is restored."""
        self._last_loaded_step, self._step, self._buffered_inputs = -1, 0, None  # TRL's
        self._batches = self._finished_epochs = 0
        self._last_sync: float | None = None
        self._weights_before: dict[str, torch.Tensor] | None = None
        self._mismatch_parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _build_generation(self) -> QuantizedVLLMGeneration:
        args = self.args
        rows = args.per_device_train_batch_size * args.steps_per_generation
        computes_in_bf16 = args.bf16 or next(self.model.parameters()).dtype == torch.bfloat16
        return QuantizedVLLMGeneration(
            dtype=args.rollout_dtype,
            code_bits=args.rollout_code_bits,
            eval_dtype=args.eval_rollout_dtype,
            bf16_weights=args.rollout_weights == "bf16"
            or (args.rollout_weights == "auto" and computes_in_bf16),
            check=args.sync_check,
            stop_token_ids=self.eos_token_ids,
            seed=args.seed,
            model=self.model,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
            transfer=args.rollout_transfer,
            call_timeout=args.rollout_timeout,
            **{name: getattr(args, f"vllm_{name}") for name in _ENGINE_OPTIONS},
            max_model_length=args.vllm_max_model_length,
            max_num_seqs=rows * args.vllm_tensor_parallel_size,
            temperature=self.temperature,
            max_completion_length=self.max_completion_length,
            logprobs=0,
        )

    def _may_reuse_proximal_logps(self) -> bool:
        """Whether the training forward pass gives the proximal log-probs: no optimizer step between, and no dropout."""
        if self.args.proximal_logps == "recompute" or not self.args.proximal_is_current:
            return False
        dropout = active_dropout(self.model)
        if dropout and self.args.proximal_logps == "reuse":
            raise ValueError(
                f"proximal_logps='reuse' is not possible with dropout ({dropout}), under which two forward passes "
                "differ: use 'auto', or switch it off, in layers of its own by disable_dropout=True, within attention "
                "by model_init_kwargs={'attention_dropout': 0.0} (or so when you load the model)."
            )
        return not dropout

    def create_optimizer(self, *args, **options):
        """TRL's, but in the control arm of UAQ over parameter groups with UAQ's learning rates (method: `qurl.uaq`)."""
        if self.args.uaq_scale == 1 or self.args.uaq_mode == "fold" or self.optimizer is not None:
            return super().create_optimizer(*args, **options)
        optimizer_class, optimizer_options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        groups = uaq_parameter_groups(
            self.model,
            self.args.learning_rate,
            self.args.uaq_scale,
            optimizer=UAQ_OPTIMIZERS[self.args.optim],
            weight_decay=self.args.weight_decay,
            eps=self.args.adam_epsilon,
        )
        self.optimizer = optimizer_class(groups, **optimizer_options)
        return self.optimizer

    # --- rollouts -------------------------------------------------------------------------------------------------

    def _generate_single_turn(self, *args, **options):
        training = self.model.training
        self._eval_batches += not training
        stream = (self._step, self._round) if training else (self.state.global_step, self._eval_batches)
        self.vllm_generation.begin(training=training, stream=stream)
        before = self.vllm_generation.last_sync
        generated = super()._generate_single_turn(*args, **options)
        self._log_rollout(synced=self.vllm_generation.last_sync is not before)
        if training and not self._round:
            self._log_update()
            self._batches += 1
        return generated

    def _bits(self) -> int:
        dtype = self.vllm_generation.dtype
        return self.args.rollout_code_bits if dtype == "int8" else _BITS[dtype]

    def _log_update(self) -> None:
        """Every so many generation batches, compare the weights with those of the batch before."""
        every = self.args.update_noise_every
        if not every or self.vllm_generation.train_dtype not in ("int8", "fp8"):
            return
        if self._weights_before is not None:
            with self.vllm_generation.named_params() as parameters:
                total = update_to_noise(
                    self._weights_before, parameters, self.args.rollout_dtype, self.args.rollout_code_bits
                ).total
            names = ("codes_changed", "update_to_error", "update_to_step")
            self._log_metrics({f"update/{name}": total[name] for name in names})
            self._weights_before = None
        if self._batches % every == 0:
            with self.vllm_generation.named_params() as parameters:
                self._weights_before = snapshot(parameters)

    def _log_rollout(self, synced: bool) -> None:
        rollouts, sync = self.vllm_generation.last_rollouts, self.vllm_generation.last_sync
        own = [rollouts.seconds, sync.seconds if synced else 0.0, rollouts.completion_tokens]
        of_all = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device))
        # The step waits for the slowest process.
        seconds, sync_seconds, _ = of_all.max(0).values.tolist()
        metrics = {
            "rollout/bits": float(self._bits()),
            "rollout/seconds": seconds,
            "rollout/tokens_per_second": of_all[:, 2].sum().item() / max(seconds, 1e-9),
        }
        if synced:
            metrics["rollout/sync_seconds"] = sync_seconds
            if sync.codes_changed is not None:
                metrics["rollout/codes_changed"] = sync.codes_changed
            now = self._training_seconds()
            if self.model.training and self._last_sync is not None:
                metrics["rollout/sync_share"] = sync_seconds / (now - self._last_sync)
            if self.vllm_generation.dtype == self.vllm_generation.train_dtype:
                self._last_sync = now
        self._log_metrics(metrics)

    def _training_seconds(self) -> float:
        """Of a clock that stands still in evaluations."""
        now = time.perf_counter() if self._eval_start is None else self._eval_start
        return now - self._eval_seconds

    def evaluation_loop(self, *args, **options):
        """transformers', whose random numbers start anew at each evaluation, and whose time is not the training's."""
        self._eval_batches, self._eval_start = 0, time.perf_counter()
        try:
            return super().evaluation_loop(*args, **options)
        finally:
            self._eval_seconds += time.perf_counter() - self._eval_start
            self._eval_start = None

    def _generate_and_score_completions(self, inputs):
        batch = self._sample(inputs)
        if self.model.training and self.args.dynamic_sampling_max_rounds:
            batch = self._replace_equal_groups(batch, inputs)
        if "old_per_token_logps" in batch:
            self._correct(batch, batch["old_per_token_logps"])
            self._log_mismatch([self._mismatch(batch)])
        every = self.args.attribute_mismatch_every
        if every and self.model.training and (self._batches - 1) % every == 0:
            self._score_in_full_precision(batch)
        return batch

    def _sample(self, inputs) -> dict:
        """TRL's rollouts, rewards and advantages, with masked values made finite."""
        reuse = self.model.training and self._reuses_proximal_logps
        # Without the correction TRL leaves out the forward pass for the proximal log-probs.
        self.vllm_importance_sampling_correction = not reuse
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction = True
        mask = batch["completion_mask"].bool()
        behav = batch["sampling_per_token_logps"]
        known = self._require_known(behav, mask)
        # TRL multiplies by the mask, under which NaN and inf would survive: masked values are made finite instead.
        batch["sampling_per_token_logps"] = behav.masked_fill(~known, 0.0)
        batch["logps_known"] = known
        if "ref_per_token_logps" in batch:
            batch["ref_per_token_logps"] = batch["ref_per_token_logps"].masked_fill(~mask, _MASKED_REF_LOGP)
        return batch

    def _calculate_rewards(self, *args, **options):
        rewards = super()._calculate_rewards(*args, **options)
        if warning := check_rewards(rewards, self.reward_func_names, self.state.global_step):
            self._warn_once("rewards", warning)
        return rewards

    def _replace_equal_groups(self, batch: dict, inputs: list[dict]) -> dict:
        """DAPO's dynamic sampling, see `qurl.dynamic_sampling`; TRL's metrics stay those of the prompts it drew."""
        size, processes = self.num_generations, self.accelerator.num_processes
        used = set(gather_object([prompt_key(row["prompt"]) for row in inputs]))
        completions, start = 0, time.perf_counter()
        rounds = 0
        for round_ in range(1, self.args.dynamic_sampling_max_rounds + 1):
            places = equal_groups(batch["advantages"], size)
            # Rewards are gathered over all processes, so that each has to sample equally many.
            most = int(self.accelerator.gather(places.sum()[None]).max())
            stream = (self.args.seed, self._step, round_)
            rows = further_rows(self.train_dataset, used, most * processes, stream)
            if not most or len(rows) < most * processes:
                break
            used |= {prompt_key(row["prompt"]) for row in rows}
            index = self.accelerator.process_index
            mine = rows[index * most : (index + 1) * most]
            logged = {name: len(values) for name, values in self._metrics["train"].items()}
            shown = copy.deepcopy(self._logs)
            self._round = rounds = round_
            try:
                extra = self._sample([dict(row) for row in mine for _ in range(size)])
            finally:
                self._round = 0
            for name, values in self._metrics["train"].items():
                del values[logged.get(name, 0) :]
            self._logs = shown
            completions += most * size * processes
            useful = (~equal_groups(extra["advantages"], size)).nonzero().flatten().tolist()
            pairs = list(zip(places.nonzero().flatten().tolist(), useful, strict=False))
            if pairs:
                batch = replace_groups(
                    batch, extra, *map(list, zip(*pairs, strict=True)), size, self._tokenizer.pad_token_id
                )
        batch["num_items_in_batch"] = self.accelerator.gather(batch["completion_mask"].sum()).sum()
        left = equal_groups(batch["advantages"], size).float().mean()
        self._log_metrics(
            {
                "dynamic_sampling/rounds": float(rounds),
                "dynamic_sampling/extra_completions": float(completions),
                "dynamic_sampling/seconds": time.perf_counter() - start,
                "dynamic_sampling/equal_groups_left": self.accelerator.gather(left[None]).mean().item(),
            }
        )
        return batch

    def _score_in_full_precision(self, batch: dict) -> None:
        """Score the sampled tokens with the same engine unquantized, to tell quantization from the engine itself."""
        prompt_mask, mask = batch["prompt_mask"].bool(), batch["completion_mask"].bool()
        lengths = mask.sum(-1).tolist()
        # Scoring takes room for one token more than sampling did.
        limit = self.vllm_generation.max_tokens_scored
        totals = (prompt_mask.sum(-1) + mask.sum(-1)).tolist()
        rows = [row for row, length in enumerate(lengths) if length and totals[row] <= limit]
        scores = self.vllm_generation.score_in_full_precision(
            [
                torch.cat(
                    [batch["prompt_ids"][row][prompt_mask[row]], batch["completion_ids"][row][mask[row]]]
                ).tolist()
                for row in rows
            ]
        )
        full = torch.zeros_like(batch["sampling_per_token_logps"])
        for row, score in zip(rows, scores, strict=True):
            full[row, : lengths[row]] = torch.tensor(score[-lengths[row] :])
        batch["full_precision_logps"], batch["scored"] = full, mask.clone()
        batch["scored"][[row for row in range(len(mask)) if row not in rows]] = False

    def _require_known(self, behav: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Sampled tokens whose log-prob the engine gave; stops the run where too many lack one."""
        known = mask & torch.isfinite(behav)
        counts = torch.stack([mask.sum(), known.sum()]).to(behav.device)
        total, found = self.accelerator.reduce(counts, reduction="sum").tolist()
        missing = (total - found) / max(total, 1)
        self._log_metrics({"mismatch/missing_share": missing})
        if missing > MAX_MISSING_SHARE:
            raise TrainingError(
                f"the engine gave no finite log-prob for {missing:.1%} of the sampled tokens (at most "
                f"{MAX_MISSING_SHARE:.0%} is tolerated): its weights overflow or its kernels are broken, see "
                f"{self.vllm_generation.log_path}."
            )
        return known

    # --- objective ------------------------------------------------------------------------------------------------

    def _correct(self, batch: dict, prox: torch.Tensor) -> None:
        """Add to a batch what TRL's loss needs for the objective: anchor log-probs, weights, and for acr the bounds.

        ``prox`` are the proximal log-probs, (B, T).
        """
        mask, known, behav = (
            batch["completion_mask"].bool(),
            batch["logps_known"],
            batch["sampling_per_token_logps"],
        )
        if not bool(torch.isfinite(prox[mask]).all()):
            raise TrainingError(
                f"the policy's log-probs are not finite at step {self.state.global_step}: its weights have diverged; "
                "go back to a checkpoint and lower the learning rate."
            )
        prox = prox.detach().masked_fill(~mask, 0.0)
        behav = torch.where(known, behav, prox)
        weights = importance_weights(prox, behav, self.args.vllm_importance_sampling_clip_max)
        batch["sampling_per_token_logps"] = behav
        batch["old_per_token_logps"] = anchor(self.args.objective, prox, behav)
        # A token whose sampling log-prob is unknown must not pass as one with w = 1: it gets no weight.
        batch["importance_sampling_ratio"] = loss_weight(self.args.objective, weights) * (known | ~mask)
        batch["log_w"] = prox - behav
        if self.args.objective == "acr":
            low, high = clip_bounds("acr", weights.r, self.epsilon_low, self.epsilon_high)
            batch["clip_low"], batch["clip_high"] = low, high

    def _compute_loss(self, model, inputs):
        self._loss_inputs = inputs
        bounds = self.epsilon_low, self.epsilon_high
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.epsilon_low, self.epsilon_high = bounds
            self._loss_inputs = None

    def _get_per_token_logps_and_entropies(self, *args, **options):
        """Within the loss, complete the batch after TRL's forward pass and before it reads weights and bounds."""
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **options)
        inputs = self._loss_inputs
        if inputs is not None:
            if "importance_sampling_ratio" not in inputs:
                self._correct(inputs, logps)
                self._collect_mismatch(inputs)
            self._log_loss_time_mismatch(inputs, logps.detach())
            if "clip_low" in inputs:
                # TRL clips to [1 − epsilon_low, 1 + epsilon_high], and counts clipped tokens by the same bounds.
                self.epsilon_low, self.epsilon_high = 1 - inputs["clip_low"], inputs["clip_high"] - 1
        return logps, entropies, aux_loss

    # --- diagnostics ----------------------------------------------------------------------------------------------

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        mode = "train" if self.model.training else "eval"
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def _mismatch(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        known = batch["logps_known"]
        return batch["log_w"][known], batch["sampling_per_token_logps"][known]

    def _collect_mismatch(self, inputs: dict) -> None:
        """Where the proximal log-probs come with the losses, wait for all parts of the generation batch."""
        self._mismatch_parts.append(self._mismatch(inputs))
        if len(self._mismatch_parts) == self.args.steps_per_generation:
            self._log_mismatch(self._mismatch_parts)
            self._mismatch_parts = []

    def _log_mismatch(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        log_w, behav = (torch.cat(column).float() for column in zip(*parts, strict=True))
        if self.accelerator.num_processes > 1:
            both = self.accelerator.pad_across_processes(torch.stack([log_w, behav], 1), pad_index=math.nan)
            both = self.accelerator.gather(both)
            log_w, behav = both[~both[:, 0].isnan()].unbind(1)
        cap = self.args.vllm_importance_sampling_clip_max
        stats = mismatch_stats(log_w, behav, cap)
        if not stats:
            return
        if self.args.objective == "acr":
            r = importance_weights(log_w, torch.zeros_like(log_w), cap).r
            upper = clip_bounds("acr", r, self.epsilon_low, self.epsilon_high)[1]
            stats |= {"acr/upper_mean": upper.mean().item(), "acr/upper_max": upper.max().item()}
        self._log_metrics(stats)
        if self.model.training:
            self._look_for_faults(log_w, stats)
            self._look_at_limit(stats["mismatch/kl_k3"])

    def _log_loss_time_mismatch(self, inputs: dict, logps: torch.Tensor) -> None:
        """What is known only with the losses: how far the policy has moved from the one that was sampled."""
        known, behav = inputs["logps_known"], inputs["sampling_per_token_logps"]
        prox = inputs["log_w"] + behav
        parts = {"mismatch/staleness_k3": (logps - prox, known)}
        if "full_precision_logps" in inputs:
            full, scored = inputs["full_precision_logps"], known & inputs["scored"]
            parts["attribution/quantization_k3"] = full - behav, scored
            parts["attribution/engine_k3"] = prox - full, scored
        sums = [(k3(part[tokens].float()).sum(), tokens.sum().float()) for part, tokens in parts.values()]
        sums = self.accelerator.reduce(
            torch.stack([torch.stack(pair) for pair in sums]), reduction="sum"
        ).tolist()
        means = (total / max(count, 1) for total, count in sums)
        self._log_metrics(dict(zip(parts, means, strict=True)))

    def _look_for_faults(self, log_w: torch.Tensor, stats: dict[str, float]) -> None:
        if self.vllm_generation.dtype in ("int8", "fp8") and not log_w.any():
            self._warn_once(
                "unquantized",
                "the importance weights are exactly 1 on every token although the rollouts are quantized: the "
                "engine's log-probs were probably replaced by the policy's.",
            )
        if not 0.5 <= stats["mismatch/w_mean"] <= 2:
            self._warn_once(
                "mean",
                f"the mean importance weight is {stats['mismatch/w_mean']:.3g} right after a sync, and should be "
                "near 1: the engine may hold other weights than the policy, or sample at another temperature.",
            )

    def _look_at_limit(self, kl: float) -> None:
        limit, action = self.args.mismatch_limit, self.args.mismatch_action
        if limit is None or kl <= limit:
            return
        step = self.state.global_step
        message = f"KL(behav‖prox) is {kl:.4g} nats per token at step {step}, above mismatch_limit={limit}"
        if action == "stop":
            logger.warning("%s: training stops with a checkpoint.", message)
            self.control.should_save = self.control.should_training_stop = True
        elif action == "full_precision" and self.vllm_generation.train_dtype in ("int8", "fp8"):
            logger.warning("%s: rollouts are in BF16 from now on.", message)
            self.vllm_generation.use_full_precision()
        else:
            self._warn_once("limit", message + ".")

    def _warn_once(self, topic: str, message: str) -> None:
        # What is warned of was gathered, so that all processes know the same.
        if topic not in self._warned and self.accelerator.is_main_process:
            self._warned.add(topic)
            warnings.warn(message, stacklevel=2)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **options):
        """Train, from the start or on from a checkpoint.

        Parameters
        ----------
        resume_from_checkpoint : str or bool, optional
            A checkpoint folder; True takes the last complete one of ``output_dir``, whatever a killed run left half
            written. Prompts, rollouts and random numbers go on where the checkpoint was made.
        **options
            As for `transformers.Trainer.train`.
        """
        self._start_over()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"output_dir={self.args.output_dir!r} holds no complete checkpoint to resume from: start without "
                    "resume_from_checkpoint."
                )
        if resume_from_checkpoint:
            state = self._restore_rollouts(Path(resume_from_checkpoint))
            if 0 < self.args.max_steps <= state.global_step:
                # transformers would take one step more.
                self._load_from_checkpoint(resume_from_checkpoint)
                self.state = state
                self._require_finite_policy()
                return TrainOutput(state.global_step, math.nan, {})
        output = super().train(resume_from_checkpoint=resume_from_checkpoint, **options)
        self._require_finite_policy()
        self._last_loaded_step = -1  # the best model may have been loaded since the last sync
        return output

    def _require_finite_policy(self) -> None:
        newest = last_complete_checkpoint(self.args.output_dir)
        rate = self.args.learning_rate
        require_finite_policy(self.model, self.accelerator, self.state.global_step, rate, newest)

    def _save_checkpoint(self, model, trial):
        """Also save where the run stands in its generation batch: before transformers writes its last file."""
        self._require_finite_policy()
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        # A folder that a killed run left must not pass as complete before it is.
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        within = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        state = {
            "step": self._step,
            "buffer": self._buffered_inputs if within else None,
            "windows": self._windows,
            "rollout_dtype": self.args.rollout_dtype,
            "in_full_precision": self.vllm_generation.train_dtype != self.args.rollout_dtype,
        }
        torch.save(state, folder / _ROLLOUT_STATE.format(self.accelerator.process_index))
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Write `qurl.model_card.model_card` beside the checkpoints."""
        if not self.is_world_process_zero():
            return
        card = model_card(
            model_name or Path(self.args.output_dir).name,
            self.args,
            base_model=hub_id(self.model.config.name_or_path),
            dataset_name=dataset_name,
            tags=[*self._tag_names, *([tags] if isinstance(tags, str) else tags or ())],
        )
        card.save(os.path.join(self.args.output_dir, "README.md"))

    def _restore_rollouts(self, folder: Path) -> TrainerState:
        """Go on within a generation batch where the checkpoint was made; returns transformers' part of it."""
        trainer_state = _trainer_state(folder)
        if trainer_state is None:
            raise ValueError(
                f"resume_from_checkpoint={str(folder)!r} is not a complete checkpoint: use another, or True for the "
                "last complete one."
            )
        config = folder / "config.json"
        saved_scale = json.loads(config.read_text()).get("qurl_uaq_scale", 1.0) if config.is_file() else 1.0
        if not is_peft_model(self.model) and saved_scale != uaq_scale(self.model):
            raise ValueError(
                f"checkpoint {str(folder)!r} is scaled by UAQ with s={saved_scale}, but this run with "
                f"s={uaq_scale(self.model)}: use the same uaq_scale."
            )
        path = folder / _ROLLOUT_STATE.format(self.accelerator.process_index)
        made, ours = len(list(folder.glob(_ROLLOUT_STATE.format("*")))), self.accelerator.num_processes
        if made != ours:
            raise ValueError(
                f"checkpoint {str(folder)!r} holds the rollouts of {made} processes and not of {ours}: resume with as "
                "many, or start a new run with it as the model."
            )
        load_to_numbered_cpus()
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        for name, ours in (("rollout_dtype", self.args.rollout_dtype), ("windows", self._windows)):
            if state[name] != ours:
                raise ValueError(
                    f"checkpoint {str(folder)!r} was made with {name}={state[name]!r}, not {ours!r}: resume with the "
                    "same configuration, or start a new run with it as the model."
                )
        self._step, self._buffered_inputs = state["step"], state["buffer"]
        self._batches = -(-self._step // (self.args.steps_per_generation * self.num_iterations))
        self._finished_epochs = int(trainer_state.epoch)
        if state["in_full_precision"]:
            self.vllm_generation.use_full_precision()
        return trainer_state

    @property
    def _windows(self) -> str:
        """How batches are cut into optimizer steps, and the objective: what a checkpoint within a batch depends on."""
        args = self.args
        return (
            f"objective {args.objective}, gradient_accumulation_steps {args.gradient_accumulation_steps}, "
            f"steps_per_generation {args.steps_per_generation}, num_iterations {args.num_iterations}"
        )

    def _get_train_sampler(self, dataset=None):
        """TRL's, whose generator draws one order per epoch: a resumed run goes past those of the finished epochs."""
        sampler = super()._get_train_sampler(dataset)
        for _ in range(self._finished_epochs if sampler.shuffle else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def close(self) -> None:
        """Free the engines; the model can still be saved. Safe to repeat."""
        self.vllm_generation.close()


def _trainer_state(checkpoint: Path) -> TrainerState | None:
    """What transformers writes last; None where a checkpoint was not written to its end."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))


def last_complete_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The newest checkpoint in a folder that was written to its end; None without one."""
    steps = {
        int(number): folder
        for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (number := folder.name.rpartition("-")[2]).isdigit()
    }
    newest_first = (steps[step] for step in sorted(steps, reverse=True))
    return next((str(folder) for folder in newest_first if _trainer_state(folder)), None)
