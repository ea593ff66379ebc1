"""What UAQ changes, and what it does not, measured on a step of training: ``notebooks/30_uaq.ipynb``."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import pydantic
import torch
from torch import nn

from qurl.notebook import Parameters
from qurl.objectives import token_loss
from qurl.quantization import is_quantized_name, quantize
from qurl.uaq import apply_uaq, uaq_parameter_groups, undo_uaq
from qurl.update_noise import snapshot, update_to_noise

ARMS = ("plain", "uaq", "control", "higher rate")
# What the groups of `uaq_parameter_groups` hold, in words.
GROUP_NAMES = {
    "uaq_linears": "linears behind norms",
    "uaq_norms": "norms in front of them",
    "decayed": "other matrices",
    "not_decayed": "other norms",
}


class UaqConfig(Parameters):
    """Parameters of ``notebooks/30_uaq.ipynb``."""

    model: str = pydantic.Field(examples=["tiny"])
    scale: float = pydantic.Field(ge=1, le=4, examples=["1.5"])
    learning_rate: float = pydantic.Field(gt=0, le=1e-2, examples=["3e-5"])
    sgd_learning_rate: float = pydantic.Field(gt=0, le=10, examples=["0.01"])
    seed: int = pydantic.Field(ge=0, lt=2**31, examples=["0"])


def arithmetic_batch(tokenizer, sums: int = 64, seed: int = 0) -> dict[str, torch.Tensor]:
    """Three-digit sums, each with its right answer (A = +1) and the answer off by one (A = −1).

    Returns
    -------
    dict
        ``input_ids`` and ``mask`` (1 on completion tokens), (2 · sums, T); ``advantages``, (2 · sums,).
    """
    from qurl.tasks import load_task

    task = load_task("arithmetic", "train", n=sums, seed=seed)
    rows, masks = [], []
    for row in task.dataset:
        prompt = task.render(row, tokenizer)
        for answer in (row["answer"], str(int(row["answer"]) + 1)):
            completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            rows.append(torch.tensor(prompt + completion))
            masks.append(torch.tensor([0] * len(prompt) + [1] * len(completion)))
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True, padding_value=tokenizer.eos_token_id),
        "mask": pad(masks, batch_first=True),
        "advantages": torch.tensor([1.0, -1.0]).repeat(sums),
    }


def policy_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean of the ACR loss over the completion tokens, at the first step after an exact sampler (R = w = 1)."""
    ids = batch["input_ids"]
    logits = model(ids, use_cache=False).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    fixed = logps.detach()
    loss = token_loss("acr", logps, fixed, fixed, batch["advantages"], eps_low=0.2, eps_high=0.2, cap=2.0)
    mask = batch["mask"][:, 1:]
    return (loss * mask).sum() / mask.sum()


def take_step(
    policy: nn.Module,
    batch: Mapping[str, torch.Tensor],
    arm: str,
    scale: float,
    optimizer: str,
    learning_rate: float,
    dtype: str = "int8",
    steps: int = 1,
) -> tuple[dict[str, torch.Tensor], float]:
    """Train a copy of the policy for one step, or a few, in one of the ``ARMS``.

    Parameters
    ----------
    policy : transformers.PreTrainedModel
        Not scaled, best in FP64, where a small update on a large weight is exact; left as it is.
    batch : mapping
        See `arithmetic_batch`.
    arm : {"plain", "uaq", "control", "higher rate"}
        The policy as it is; scaled by `qurl.uaq.apply_uaq`; unscaled with `qurl.uaq.uaq_parameter_groups`; unscaled
        with ``scale`` times the learning rate on every parameter, which is what the paper's Table 4 compares UAQ to.
    scale : float
        s.
    optimizer : {"adamw", "sgd"}
        Without weight decay and gradient clipping.
    learning_rate : float
    dtype : {"int8", "fp8"}
    steps : int

    Returns
    -------
    update : dict of str to torch.Tensor
        Change of each parameter in terms of the unscaled policy: UAQ is taken back after the steps.
    codes_changed : float
        Share of the codes that the steps changed, in the weights that a rollout engine would have got.
    """
    if arm not in ARMS:
        raise ValueError(f"arm={arm!r} is not known: use one of {', '.join(map(repr, ARMS))}.")
    model = copy.deepcopy(policy)
    if arm == "uaq":
        apply_uaq(model, scale)
    groups = uaq_parameter_groups(
        model,
        learning_rate * (scale if arm == "higher rate" else 1),
        scale if arm == "control" else 1.0,
        optimizer,
    )
    optimizers = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    stepper = optimizers[optimizer](groups)
    before = snapshot(model.named_parameters())
    for _ in range(steps):
        stepper.zero_grad()
        policy_loss(model, batch).backward()
        stepper.step()
    codes_changed = update_to_noise(before, model.named_parameters(), dtype).total["codes_changed"]
    if arm == "uaq" and scale != 1.0:
        undo_uaq(model)
    start = dict(policy.named_parameters())
    update = {name: (after - start[name]).detach() for name, after in model.named_parameters()}
    return update, codes_changed


def step_gains(
    policy: nn.Module,
    batch: Mapping[str, torch.Tensor],
    scales: Sequence[float],
    learning_rates: Mapping[str, float],
    arms: Sequence[str] = ("uaq", "control", "higher rate"),
    dtype: str = "int8",
    steps: int = 1,
) -> pd.DataFrame:
    """How many times larger one step is than without UAQ, per group of parameters.

    Parameters
    ----------
    policy, batch, arms, dtype, steps
        See `take_step`.
    scales : sequence of float
    learning_rates : mapping
        Learning rate by optimizer ("adamw", "sgd").

    Returns
    -------
    pandas.DataFrame
        ``optimizer``, ``arm``, ``scale``, ``group`` (a value of ``GROUP_NAMES``), ``gain`` (norm of the group's update
        over that of the plain arm), ``codes_changed`` and ``codes_changed_plain`` (shares over all codes), and
        ``from_control`` (distance to the control arm's update of all parameters, relative to its norm).
    """
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    groups = {
        group["name"]: [names[id(parameter)] for parameter in group["params"]]
        for group in uaq_parameter_groups(policy, 1.0, 2.0)
    }

    def norm(update: Mapping[str, torch.Tensor], members: Iterable[str]) -> float:
        return math.sqrt(sum(update[name].square().sum().item() for name in members))

    rows = []
    for optimizer, learning_rate in learning_rates.items():
        plain, plain_codes = take_step(policy, batch, "plain", 1.0, optimizer, learning_rate, dtype, steps)
        for scale in scales:
            stepped = {
                arm: take_step(policy, batch, arm, scale, optimizer, learning_rate, dtype, steps)
                for arm in dict.fromkeys((*arms, "control"))
            }
            control, _ = stepped["control"]
            for arm in arms:
                update, codes = stepped[arm]
                distance = {name: update[name] - control[name] for name in update}
                rows += [
                    {
                        "optimizer": optimizer,
                        "arm": arm,
                        "scale": scale,
                        "group": GROUP_NAMES[group],
                        "gain": norm(update, members) / norm(plain, members),
                        "codes_changed": codes,
                        "codes_changed_plain": plain_codes,
                        "from_control": norm(distance, distance) / norm(control, control),
                    }
                    for group, members in groups.items()
                ]
    return pd.DataFrame(rows)


@torch.no_grad()
def codes_moved_by_uaq(policy: nn.Module, scales: Sequence[float], dtype: str = "int8") -> pd.DataFrame:
    """How many codes UAQ changes by itself, before any training.

    Returns
    -------
    pandas.DataFrame
        Per scale: ``codes`` of the scaled linears, ``changed`` (their number whose code differs from the unscaled
        policy's), and ``scale_ratio_error``: largest relative deviation of the quantization scales from theirs over s.
    """
    weights = dict(policy.named_parameters())
    rows = []
    for scale in scales:
        model = copy.deepcopy(policy)
        apply_uaq(model, scale)
        counts = {"codes": 0, "changed": 0, "scale_ratio_error": 0.0}
        for name, weight in model.named_parameters():
            if not is_quantized_name(name) or torch.equal(weight, weights[name]):
                continue
            ours, theirs = quantize(weight, dtype, name=name), quantize(weights[name], dtype, name=name)
            deviation = (ours.scale * scale / theirs.scale - 1).abs().max().item()
            counts["codes"] += ours.codes.numel()
            counts["changed"] += int((ours.codes.float() != theirs.codes.float()).sum())
            counts["scale_ratio_error"] = max(counts["scale_ratio_error"], deviation)
        rows.append({"scale": scale, **counts})
    return pd.DataFrame(rows)
