"""Configuration of `qurl.trainer.QuRLTrainer`: TRL's `GRPOConfig` with the fields of quantized rollouts.

Every combination that has no defined meaning is refused here, at construction, naming the fields and the fix.
"""

import math
import re
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from trl import GRPOConfig

from qurl import arguments
from qurl.objectives import OBJECTIVES

ROLLOUT_DTYPES = ("int8", "fp8", "bf16", "fp32")
EVAL_ROLLOUT_DTYPES = ("same", "bf16", "fp32")
PROXIMAL_LOGPS = ("auto", "recompute", "reuse")
ROLLOUT_WEIGHTS = ("auto", "fp32", "bf16")
ROLLOUT_TRANSFERS = ("auto", "file", "nccl")
MISMATCH_ACTIONS = ("warn", "stop", "full_precision")
UAQ_MODES = ("fold", "learning_rates")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
# Losses of TRL without a clipped surrogate: there is no bound that acr could adapt.
LOSSES_WITHOUT_CLIPPING = ("cispo", "sapo", "vespo")
# Fields of TRL and transformers that they take as they come, to fail after minutes or to train on nonsense.
_COUNTS = (
    "num_generations",
    "num_iterations",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "max_completion_length",
    "ref_model_sync_steps",
)
_COUNTS_OR_NONE = ("steps_per_generation", "generation_batch_size", "num_generations_eval")
_LEAST = {"num_generations": 2}  # advantages compare the completions of a group
_POSITIVE = (
    "num_train_epochs",
    "adam_epsilon",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
_POSITIVE_OR_NONE = ("delta", "off_policy_mask_threshold")
_NOT_NEGATIVE = (
    "learning_rate",
    "weight_decay",
    "warmup_steps",
    "max_grad_norm",
    "epsilon",
    "beta",
    "entropy_coef",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
)
_NOT_NEGATIVE_OR_NONE = ("epsilon_high", "router_aux_loss_coef")
# From 0 to so much; Adam divides by 1 − β.
_SHARES = {
    "top_entropy_quantile": 1,
    "ref_model_mixup_alpha": 1,
    "adam_beta1": 0.999999,
    "adam_beta2": 0.999999,
}


@dataclass
class QuRLConfig(GRPOConfig):
    r"""
    Configuration class for the [`QuRLTrainer`].

    This class includes the parameters of [`~trl.GRPOConfig`] and those of quantized rollouts, after
    [QuRL](https://huggingface.co/papers/2602.13953). C of the paper is `vllm_importance_sampling_clip_max` (2.0 here),
    its ε are `epsilon` and `epsilon_high`. Defaults that differ from TRL's: `use_vllm=True`,
    `vllm_importance_sampling_mode="token_truncate"`, `vllm_importance_sampling_clip_max=2.0`,
    `vllm_server_host="127.0.0.1"` and `use_bias_correction_kl=False` (the paper's KL term is plain k3).

    Parameters:
        > Parameters that control the rollouts

        rollout_dtype (`str`, *optional*, defaults to `"int8"`):
            Number format of the decoder projections in the sampling copy: `"int8"`, `"fp8"`, `"bf16"` or `"fp32"`.
        rollout_code_bits (`int`, *optional*, defaults to `8`):
            Fewer code levels of the same INT8 kernels, ±(2^(b−1)−1): the stress setting.
        rollout_weights (`str`, *optional*, defaults to `"auto"`):
            What is quantized: the `"fp32"` parameters, or their `"bf16"` cast. `"auto"` takes the ones that the
            proximal log-probs are computed with: the cast where the forward pass runs in BF16.
        eval_rollout_dtype (`str`, *optional*, defaults to `"same"`):
            Number format of the rollouts of evaluation: `"same"`, `"bf16"` or `"fp32"` (a second engine).
        rollout_transfer (`str`, *optional*, defaults to `"auto"`):
            With `vllm_mode="server"`, how weights get there: a `"file"` in this machine's memory, or `"nccl"` from GPU
            to GPU. `"auto"` takes what the server was started with.
        rollout_timeout (`float`, *optional*, defaults to `900.0`):
            With `vllm_mode="server"`, seconds after which a call that was not answered counts as hanging.
        sync_check (`bool`, *optional*, defaults to `True`):
            Compare a sample of layers with what was sent after each sync, and decode one token.

        > Parameters that control the objective

        objective (`str`, *optional*, defaults to `"acr"`):
            `"naive"` (Eq. 3), `"proximal"` (Eq. 1), `"decoupled"` (Eq. 4), `"tis"` (Eq. 5) or `"acr"` (Eq. 9).
        proximal_logps (`str`, *optional*, defaults to `"auto"`):
            `"recompute"` the proximal log-probs in a forward pass of their own, or `"reuse"` those of the training
            forward pass, which is possible where no optimizer step lies between the two and no dropout is active.
            `"auto"` reuses them where that is so.
        dynamic_sampling_max_rounds (`int`, *optional*, defaults to `0`):
            Replace groups of equal rewards by groups of further prompts, in at most so many rounds (0: off), after
            [DAPO](https://huggingface.co/papers/2503.14476).
        uaq_scale (`float`, *optional*, defaults to `1.0`):
            s of Update-Aware Quantization (the paper uses 1.5); 1.0 is off.
        uaq_mode (`str`, *optional*, defaults to `"fold"`):
            `"fold"` scales weights and norms as the paper does; `"learning_rates"` is the control arm: parameter
            groups with the learning rates that UAQ amounts to.

        > Parameters that control the diagnostics

        update_noise_every (`int`, *optional*, defaults to `0`):
            Compare the weight update with the quantization error every so many syncs (0: never); keeps a copy of
            the projections in main memory.
        attribute_mismatch_every (`int`, *optional*, defaults to `0`):
            Split the mismatch into engine, quantization and staleness every so many generation batches (0: never);
            needs a full-precision engine beside the quantized one.
        mismatch_limit (`float`, *optional*):
            Largest KL(behav‖prox), k3 in nats per token, of a generation batch.
        mismatch_action (`str`, *optional*, defaults to `"warn"`):
            Above the limit: `"warn"` once, `"stop"` with a checkpoint, or sample in `"full_precision"` from then on.
    """

    use_vllm: bool = field(
        default=True, metadata={"help": "Rollouts come from vLLM; cannot be switched off."}
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate", metadata={"help": "Set by the objective: token_truncate only."}
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=2.0, metadata={"help": "C, at which the importance weights are truncated."}
    )
    use_bias_correction_kl: bool = field(
        default=False, metadata={"help": "Multiply the KL term by the policy ratio; the paper does not."}
    )
    rollout_dtype: str = field(
        default="int8", metadata={"help": "Number format of the rollouts: int8, fp8, bf16 or fp32."}
    )
    rollout_code_bits: int = field(
        default=8, metadata={"help": "Below 8 (int8 only): fewer code levels, the stress setting."}
    )
    rollout_weights: str = field(
        default="auto", metadata={"help": "Weights that are quantized: auto, fp32 or bf16."}
    )
    eval_rollout_dtype: str = field(
        default="same", metadata={"help": "Number format of evaluation's rollouts: same, bf16 or fp32."}
    )
    vllm_server_host: str = field(
        default="127.0.0.1", metadata={"help": "Of the vLLM server; TRL's default, 0.0.0.0, is no address."}
    )
    rollout_transfer: str = field(
        default="auto", metadata={"help": "Weights to a server: file, nccl, or auto (as it was started)."}
    )
    rollout_timeout: float = field(
        default=900.0, metadata={"help": "Seconds after which a call of a server counts as hanging."}
    )
    sync_check: bool = field(default=True, metadata={"help": "Check the engine's weights after each sync."})
    objective: str = field(default="acr", metadata={"help": "naive, proximal, decoupled, tis or acr."})
    proximal_logps: str = field(default="auto", metadata={"help": "auto, recompute or reuse."})
    dynamic_sampling_max_rounds: int = field(
        default=0, metadata={"help": "Rounds in which groups of equal rewards are replaced; 0: off."}
    )
    uaq_scale: float = field(default=1.0, metadata={"help": "s of update-aware quantization; 1.0 is off."})
    uaq_mode: str = field(
        default="fold", metadata={"help": "fold, or learning_rates for the control arm of UAQ."}
    )
    update_noise_every: int = field(
        default=0, metadata={"help": "Syncs between comparisons of update and quantization error; 0: never."}
    )
    attribute_mismatch_every: int = field(
        default=0, metadata={"help": "Generation batches between attributions of the mismatch; 0: never."}
    )
    mismatch_limit: float | None = field(
        default=None, metadata={"help": "Largest KL(behav‖prox), k3 in nats per token."}
    )
    mismatch_action: str = field(
        default="warn", metadata={"help": "Above the limit: warn, stop or full_precision."}
    )

    def __post_init__(self):
        self._check_choices()
        self._check_numbers()
        self._check_numbers_of_trl()
        self._check_correction()
        # transformers asks for this word before it trains in BF16, its default here, on a machine without accelerator.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        super().__post_init__()
        self._check_objective()
        self._check_proximal_logps()
        self._check_dynamic_sampling()
        self._check_sampling()
        self._check_engine()

    @property
    def optimizer_steps_per_batch(self) -> float:
        """Optimizer steps on one generation batch; below 1 where several batches are accumulated into a step."""
        return self.steps_per_generation * self.num_iterations / self.gradient_accumulation_steps

    @property
    def proximal_is_current(self) -> bool:
        """Whether no optimizer step lies between sampling a batch and any of its losses, so that π_θ = π_prox there."""
        return self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0

    def _check_choices(self) -> None:
        for name, allowed in (
            ("rollout_dtype", ROLLOUT_DTYPES),
            ("eval_rollout_dtype", EVAL_ROLLOUT_DTYPES),
            ("rollout_weights", ROLLOUT_WEIGHTS),
            ("objective", OBJECTIVES),
            ("proximal_logps", PROXIMAL_LOGPS),
            ("uaq_mode", UAQ_MODES),
            ("mismatch_action", MISMATCH_ACTIONS),
            ("loss_type", LOSS_TYPES),
            ("importance_sampling_level", ("token", "sequence")),
            ("multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum")),
        ):
            arguments.choice(name, getattr(self, name), allowed)
        if not isinstance(self.scale_rewards, bool):  # TRL's older spelling of "group" and "none"
            arguments.choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        arguments.switches(sync_check=self.sync_check)

    def _check_numbers(self) -> None:
        self.rollout_code_bits = arguments.whole_number("rollout_code_bits", self.rollout_code_bits, 2, 8)
        if self.rollout_code_bits != 8 and self.rollout_dtype != "int8":
            raise ValueError(
                f"rollout_code_bits={self.rollout_code_bits} needs rollout_dtype='int8', not {self.rollout_dtype!r}: "
                "fewer code levels exist for INT8 alone."
            )
        for name in ("update_noise_every", "attribute_mismatch_every", "dynamic_sampling_max_rounds"):
            setattr(self, name, arguments.whole_number(name, getattr(self, name), 0))
        self.uaq_scale = _positive("uaq_scale", self.uaq_scale, "1.0 for off")
        if self.mismatch_limit is not None:
            self.mismatch_limit = _positive("mismatch_limit", self.mismatch_limit, "or None for no limit")
        self.temperature = arguments.number("temperature", self.temperature, 0.01, 2)

    def _check_numbers_of_trl(self) -> None:
        for name in (*_COUNTS, *_COUNTS_OR_NONE):
            if name in _COUNTS or getattr(self, name) is not None:
                setattr(self, name, arguments.whole_number(name, getattr(self, name), _LEAST.get(name, 1)))
        if self.max_steps != -1 or isinstance(self.max_steps, float):
            try:
                # transformers trains one step where none is asked for.
                self.max_steps = arguments.whole_number("max_steps", self.max_steps, 1)
            except ValueError:
                raise ValueError(
                    f"max_steps={self.max_steps!r} is not possible: use a whole number of 1 or more, or -1 to train "
                    "for num_train_epochs."
                ) from None
        self.seed = arguments.whole_number("seed", self.seed, 0, arguments.MAX_SEED)
        if self.data_seed is not None:
            self.data_seed = arguments.whole_number("data_seed", self.data_seed, 0, arguments.MAX_SEED)
        for name in (*_POSITIVE, *_POSITIVE_OR_NONE):
            if name in _POSITIVE or getattr(self, name) is not None:
                fix = f"such as {type(self).__dataclass_fields__[name].default or 4.0}"
                setattr(self, name, _positive(name, getattr(self, name), fix))
        for name in (*_NOT_NEGATIVE, *_NOT_NEGATIVE_OR_NONE):
            value = getattr(self, name)
            if name in _NOT_NEGATIVE or value is not None:
                if not _is_finite(value) or value < 0:
                    raise ValueError(f"{name}={value!r} is not possible: use a finite number of 0 or more.")
                setattr(self, name, float(value))
        if (
            self.warmup_steps
            and str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)) == "constant"
        ):
            raise ValueError(
                f"warmup_steps={self.warmup_steps:g} has no effect with lr_scheduler_type='constant': use "
                "'constant_with_warmup', or leave it out."
            )
        for name, most in _SHARES.items():
            setattr(self, name, arguments.number(name, getattr(self, name), 0, most))
        weights = self.reward_weights
        if weights is not None and (
            not isinstance(weights, list | tuple) or not weights or not all(map(_is_finite, weights))
        ):
            raise ValueError(
                f"reward_weights={weights!r} is not possible: use a list of finite numbers, one for each reward "
                "function, or None for 1.0 each."
            )

    def _check_correction(self) -> None:
        """The objective decides how the mismatch is corrected; TRL's own switches must not contradict it."""
        if not self.use_vllm:
            raise ValueError(
                "use_vllm=False is not possible, since quantized rollouts are sampled by vLLM: leave it out, or use "
                "TRL's GRPOTrainer."
            )
        if not self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction=False is not possible: use objective='naive' or 'proximal' for a "
                "run without correction."
            )
        if self.vllm_importance_sampling_mode != "token_truncate":
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} is not possible, since "
                f"objective={self.objective!r} decides the correction: leave it out, or use TRL's GRPOTrainer."
            )
        if self.vllm_importance_sampling_clip_min is not None:
            raise ValueError(
                f"vllm_importance_sampling_clip_min={self.vllm_importance_sampling_clip_min} is not possible: no "
                "objective truncates small weights; leave it out."
            )
        # TRL writes the deprecated one over the other.
        deprecated = self.vllm_importance_sampling_cap is not None
        name = "vllm_importance_sampling_cap" if deprecated else "vllm_importance_sampling_clip_max"
        fix = "such as 2.0"
        if self.objective == "decoupled":
            fix += ", above which objective='decoupled' counts weights without truncating them"
        setattr(self, name, _positive(name, getattr(self, name), fix))

    def _check_objective(self) -> None:
        if self.objective != "acr":
            return
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"objective='acr' has no meaning with importance_sampling_level={self.importance_sampling_level!r}, "
                "since its clip bound is one per token: use importance_sampling_level='token', or objective='tis'."
            )
        if self.delta is not None:
            raise ValueError(
                f"objective='acr' has no meaning with delta={self.delta}, a second upper limit below which its bound "
                "would be lost: leave delta out, or use objective='tis'."
            )
        if self.loss_type in LOSSES_WITHOUT_CLIPPING:
            raise ValueError(
                f"objective='acr' has no meaning with loss_type={self.loss_type!r}, which does not clip a ratio: use "
                "loss_type='dapo', 'grpo', 'bnpo', 'dr_grpo' or 'luspo', or objective='tis'."
            )

    def _check_dynamic_sampling(self) -> None:
        if not self.dynamic_sampling_max_rounds:
            return
        for name, value, allowed in (
            ("scale_rewards", self.scale_rewards, ("group", "none")),
            ("multi_objective_aggregation", self.multi_objective_aggregation, ("sum_then_normalize",)),
        ):
            if value not in allowed:
                raise ValueError(
                    f"dynamic_sampling_max_rounds={self.dynamic_sampling_max_rounds} is not possible with {name}="
                    f"{value!r}, which normalizes over groups that are then replaced: use {allowed[0]!r}."
                )
        rows = self.per_device_train_batch_size * self.steps_per_generation
        if rows % self.num_generations:
            raise ValueError(
                f"dynamic_sampling_max_rounds={self.dynamic_sampling_max_rounds} needs whole groups in each process: "
                f"make per_device_train_batch_size · steps_per_generation, {rows}, a multiple of num_generations="
                f"{self.num_generations}."
            )

    def _check_proximal_logps(self) -> None:
        if self.proximal_logps == "reuse" and not self.proximal_is_current:
            raise ValueError(
                f"proximal_logps='reuse' is not possible with steps_per_generation={self.steps_per_generation}, "
                f"num_iterations={self.num_iterations} and gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}, where the policy changes within a generation batch: use 'auto'."
            )

    def _check_sampling(self) -> None:
        """Log-probs are those of a softmax at a temperature; what reshapes that distribution breaks the ratios."""
        neutral = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0,)}
        for name, values in neutral.items():
            value = getattr(self, name)
            if value not in values:
                raise ValueError(
                    f"{name}={value} changes the sampled distribution after the logits, so that the log-probs of "
                    f"policy and sampler are not of the same distribution: leave it at {values[0]}."
                )
        if self.vllm_structured_outputs_regex is not None:
            raise ValueError(
                "vllm_structured_outputs_regex changes the sampled distribution after the logits, so that the "
                "log-probs of policy and sampler are not of the same distribution: leave it out."
            )
        if self.generation_kwargs:
            raise ValueError(
                f"generation_kwargs={self.generation_kwargs!r} is not possible: sampling is temperature alone, set by "
                "temperature and max_completion_length; leave it out."
            )
        if self.attribute_mismatch_every and self.temperature != 1:
            raise ValueError(
                f"attribute_mismatch_every={self.attribute_mismatch_every} needs temperature=1.0, not "
                f"{self.temperature}: the engine scores given tokens at temperature 1 alone."
            )

    def _check_engine(self) -> None:
        arguments.choice("vllm_mode", self.vllm_mode, ("colocate", "server"))
        arguments.choice("rollout_transfer", self.rollout_transfer, ROLLOUT_TRANSFERS)
        for name in ("rollout_timeout", "vllm_server_timeout"):
            setattr(self, name, arguments.number(name, getattr(self, name), 0.1, 1e6))
        for name in ("vllm_server_port", "vllm_group_port"):
            setattr(self, name, arguments.whole_number(name, getattr(self, name), 1, 65535))
        for name, pattern, example in (
            (
                "vllm_server_base_url",
                r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?/?",
                "http://127.0.0.1:8000",
            ),
            ("vllm_server_host", r"[\w.-]+|(?=.*:.*:)[0-9a-fA-F:.]+", "127.0.0.1, without a port"),
        ):
            value = getattr(self, name)
            if value is None and name == "vllm_server_base_url":
                continue
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise ValueError(f"{name}={value!r} is not possible: use an address such as {example}.")
        if self.vllm_mode == "server" and self.world_size > 1 and self.ddp_timeout < 2 * self.rollout_timeout:
            raise ValueError(
                f"rollout_timeout={self.rollout_timeout:g} is too long for ddp_timeout={self.ddp_timeout}, after which "
                "processes that wait for the one that asks the server give up: use at most half of it."
            )
        if self.vllm_mode == "server" and self.mismatch_action == "full_precision":
            raise ValueError(
                "mismatch_action='full_precision' is not possible with vllm_mode='server', whose format is fixed: use "
                "'warn' or 'stop'."
            )
        size = arguments.whole_number("vllm_tensor_parallel_size", self.vllm_tensor_parallel_size, 1)
        for name, value, off in (
            ("vllm_tensor_parallel_size", size, 1),
            ("vllm_enable_sleep_mode", self.vllm_enable_sleep_mode, False),
        ):
            if self.vllm_mode == "server" and value != off:
                raise ValueError(
                    f"{name}={value} is not possible with vllm_mode='server': the server is told by qurl serve."
                )
        if size > 1 and self.attribute_mismatch_every:
            raise ValueError(
                f"attribute_mismatch_every={self.attribute_mismatch_every} is not possible with "
                f"vllm_tensor_parallel_size={size}, whose processes score other sequences each: use 0, or 1 process."
            )
        if self.vllm_enable_sleep_mode and not torch.cuda.is_available():
            raise ValueError("vllm_enable_sleep_mode=True needs a GPU, whose memory it frees: leave it out.")
        if self.vllm_max_model_length is not None:
            least = self.max_completion_length + 1
            arguments.whole_number("vllm_max_model_length", self.vllm_max_model_length, least)
        if self.fp16:
            raise ValueError(
                "fp16=True is not supported, since the engine computes in BF16: use bf16=True, or bf16=False for FP32."
            )
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "use_transformers_continuous_batching=True is not possible, since vLLM samples: leave it out."
            )


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _positive(name: str, value: Any, fix: str) -> float:
    """``value`` as a float, if it is a positive, finite number."""
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{name}={value!r} is not possible: use a positive number, {fix}.")
    return float(value)
