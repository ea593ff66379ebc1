"""What `qurl.trainer.QuRLTrainer` asks of a model before it trains, and of weights and rewards while it does."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers.training_args import OptimizerNames

from qurl.config import QuRLConfig

UAQ_OPTIMIZERS = {
    OptimizerNames.SGD: "sgd",
    OptimizerNames.ADAMW_TORCH: "adamw",
    OptimizerNames.ADAMW_TORCH_FUSED: "adamw",
}
"""Optimizers for which the learning rates that UAQ amounts to are known."""


class TrainingError(RuntimeError):
    """Training cannot go on: log-probs, rewards or weights are missing or not finite."""


def require_supported(model: torch.nn.Module | str, config: QuRLConfig, options: dict) -> None:
    """Refuse what quantized rollouts cannot be combined with.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel or str
    config : QuRLConfig
    options : dict
        Further arguments of [`~trl.GRPOTrainer`].

    Raises
    ------
    ValueError
        With the option and what to do instead.
    """
    if not isinstance(config, QuRLConfig):
        raise ValueError(
            f"args is a {type(config).__name__}: pass a qurl.QuRLConfig, which takes every field of GRPOConfig."
        )
    for name in ("tools", "rollout_func", "environment_factory"):
        if options.get(name):
            raise ValueError(f"{name} is not supported with quantized rollouts yet: leave it out.")
    if config.uaq_scale == 1:
        return
    if options.get("peft_config") is not None or (not isinstance(model, str) and is_peft_model(model)):
        raise ValueError(
            f"uaq_scale={config.uaq_scale} is not possible with an adapter: scale the base model with "
            "qurl.apply_uaq, save it, and train an adapter on that."
        )
    own_optimizer = options.get("optimizers", (None, None))[0] is not None
    if config.uaq_mode != "fold" and (own_optimizer or config.optim not in UAQ_OPTIMIZERS):
        raise ValueError(
            f"uaq_mode='learning_rates' is not possible with optim={config.optim.value!r} or an optimizer of your "
            f"own: its learning rates are known for {', '.join(sorted(o.value for o in UAQ_OPTIMIZERS))}."
        )


def require_finite_policy(
    model: torch.nn.Module, accelerator: Accelerator, step: int, learning_rate: float, checkpoint: str | None
) -> None:
    """Refuse to save or return a policy whose trainable parameters hold NaN or ±inf; one pass over the weights.

    Parameters
    ----------
    model : torch.nn.Module
    accelerator : accelerate.Accelerator
    step : int
        Optimizer steps taken.
    learning_rate : float
    checkpoint : str or None
        The last complete one.

    Raises
    ------
    TrainingError
        In all processes, each of which may hold a part of the weights; with the parameter and what is left intact.
    """
    spoiled = next(
        (
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not bool(torch.isfinite(parameter).all())
        ),
        None,
    )
    found = torch.tensor(float(spoiled is not None), device=accelerator.device)
    if not accelerator.reduce(found, reduction="sum"):
        return
    which = f"parameter {spoiled!r}" if spoiled else "a parameter in another process"
    left = f"the checkpoint {checkpoint} is intact" if checkpoint else "there is no earlier checkpoint"
    raise TrainingError(
        f"{which} is not finite after step {step}: the policy has diverged and is not saved, {left}; train with a "
        f"learning_rate below {learning_rate:g}."
    )


def check_rewards(rewards: torch.Tensor, names: Sequence[str], step: int) -> str | None:
    """Stop at infinite rewards; say where there are none.

    Parameters
    ----------
    rewards : torch.Tensor
        Of all processes, (completions, functions); NaN where a function gave none, which TRL takes NaN itself for.
    names : sequence of str
        Of the functions.
    step : int
        Optimizer steps taken.

    Returns
    -------
    str or None
        A warning, if no completion has a reward.

    Raises
    ------
    TrainingError
        With the function that returned ±inf, or a number that is infinite in FP32.
    """
    infinite = rewards.isinf()
    if bool(infinite.any()):
        index = int(infinite.any(0).nonzero()[0, 0])
        raise TrainingError(
            f"the reward function {names[index]!r} returned {rewards[infinite[:, index], index][0].item()} at step "
            f"{step}: return finite numbers, or None for a completion without a reward."
        )
    if bool(rewards.isnan().all()):
        return (
            f"no completion of the batch at step {step} has a reward, so that nothing is learnt from it: all of "
            f"{', '.join(map(repr, names))} returned None or NaN."
        )
    return None


def require_soft_cap(config) -> None:
    """transformers' SDPA attention leaves out the soft cap of Gemma 2, which the engine applies."""
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation != "eager":
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} leaves out the model's attn_logit_softcapping="
            f"{config.attn_logit_softcapping}, so that policy and sampler would differ: load the model with "
            "model_init_kwargs={'attn_implementation': 'eager'}."
        )


def active_dropout(model: torch.nn.Module) -> str | None:
    """What makes two training forward passes of the model differ, or None."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name}, p={module.p}"
    rate = getattr(model.config, "attention_dropout", 0) or 0
    return f"attention_dropout={rate}" if rate > 0 else None
