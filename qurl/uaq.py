"""Update-Aware Quantization (UAQ): an invariant scaling before training, and the learning rates that equal it.

A linear layer behind a norm does not change when its weight is divided by s and the norm's weight multiplied by s:

    W x = (W / s) (s x),    s x = norm(h; s g)    where x = norm(h; g)

UAQ (QuRL, arXiv 2602.13953, s = 1.5) does this once, before training, to q/k/v and gate/up. The paper's argument: the
quantization error of W / s is s times smaller, and the gradient on it s times larger, so an update has a better chance
of changing an 8-bit code.

**What that amounts to.** With one absmax scale per output channel and one per token, quantization is scale-equivariant:
the codes of W / s are the codes of W, and those of s x are those of x. The quantized policy, and its error as a
function, are those of the unscaled model. What changes is the size of a step. With W' = W / s, g' = s g the chain rule
gives G' = dL/dW' = s G and dL/dg' = (dL/dg) / s, and a step on W' is, in terms of W = s W',

    SGD   W' -= α s G                          W -= s² α G                          norms: α / s²
    Adam  W' -= α s m / (s sqrt(v) + eps)      W -= s α m / (sqrt(v) + eps / s)     norms: α / s, eps s

(m, v: the moments of G). A weight decay shrinks W' and W by the same factor 1 - αλ, hence is λ divided by the group's
multiplier of α. `uaq_parameter_groups` returns these groups: the control arm of every UAQ experiment, without
which UAQ cannot be told from a higher learning rate on some layers.

**Where the equality ends**: gradient clipping, once it acts (the norm over all gradients is another one; per-value
clipping too); optimizers that are neither linear in the gradient nor invariant to its scale; decay of norms that
multiply by 1 + w (they shrink towards 1; norms are never decayed here, nor by transformers' Trainer); adapters, whose
input grows by s while their weights do not shrink; and rounding (BF16 activations of s x, unless s is a power of
two). Equal codes end with static activation scales, scales shared across differently scaled layers (per tensor over a
fused q/k/v/o, block scales across rows that are not all scaled), and roundings that are not scale-equivariant
(power-of-two scales, a floor on scales). Rounding acts on codes too: a power of two keeps every code, whereas s = 1.5
moves some whose quotient lies on a tie: 0.08 % of SmolLM2's (expanded from 4 bits, hence on a grid), fewer than 0.01 %
of random ones. Equality and ends are tests in ``tests/test_uaq.py``.

**How a model is read.** Nothing is known per architecture. One forward pass of two tokens records which norm's output
each of the linears reads, and everything else that reads it. A model is refused unless each target is a plain
``nn.Linear`` whose input is the output of one norm, which nothing but targets reads, and the norm's output is
proportional to its weight, or to 1 + weight as in Gemma. So q/k norms, post-norms and biases stay as they are.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

TARGETS = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
_MAX_SCALE = 1024.0  # beyond it or its inverse FP32 weights would come near the smallest numbers


@dataclass(frozen=True)
class _Fold:
    """A norm and the linears that read its output, all of them."""

    norm: nn.Module
    norm_offset: float  # the norm multiplies by offset + weight: 0 in Llama and Qwen, 1 in Gemma
    linears: tuple[nn.Linear, ...]

    @torch.no_grad()
    def scale_by(self, scale: float) -> None:
        weight = self.norm.weight
        # In the norm's own order of operations, so that a power of two ends in exactly `scale` times its output.
        weight.copy_((self.norm_offset + weight) * scale - self.norm_offset)
        for linear in self.linears:
            linear.weight.div_(scale)


def apply_uaq(
    model: "transformers.PreTrainedModel",  # noqa: F821
    scale: float = 1.5,
    targets: Iterable[str] = ("qkv", "gate_up"),
) -> None:
    """Divide the weights behind norms by ``scale`` and multiply the norms by it, in place; the function stays the same.

    Call it on the full-precision parameters, before optimizer, adapters, sharding and any cast. The scale and the
    targets are noted in ``model.config`` (``qurl_uaq_scale``, ``qurl_uaq_targets``) and saved with every checkpoint,
    which stock transformers and vLLM load as usual.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in FP32 or FP64.
    scale : float
        s, between 1/1024 and 1024; 1.0 does nothing. Powers of two from 1 leave every logit bit for bit the same;
        others change it by rounding.
    targets : iterable of {"qkv", "gate_up"}

    Raises
    ------
    ValueError
        For another ``scale`` or target; for a model that is scaled already, not in full precision, or whose
        structure does not prove the scaling invariant (see the module's docstring). The model is unchanged then.

    Notes
    -----
    QuRL (arXiv 2602.13953) uses s = 1.5, and none (1.0) with learning rates of 1e-5.
    """
    scale, targets = _checked_scale(scale), _checked_targets(targets)
    if scale == 1.0:
        return
    _refuse_scaled(model)
    for fold in _find_folds(model, targets):
        fold.scale_by(scale)
    model.config.qurl_uaq_scale = scale
    model.config.qurl_uaq_targets = list(targets)


def undo_uaq(model: "transformers.PreTrainedModel") -> None:  # noqa: F821
    """Take the scaling noted in ``model.config`` back, in place, and remove the note.

    It works on trained models too. Weights that were not trained since come back to rounding (one or two units in the
    last place), and exactly where the scale is a power of two; of Gemma's norms then 1 + weight comes back exactly.

    Raises
    ------
    ValueError
        If ``model`` carries no scaling, or `apply_uaq` would refuse it for its structure or precision.
    """
    scale = uaq_scale(model)
    if scale == 1.0:
        raise ValueError(
            "model.config has no qurl_uaq_scale, so there is no UAQ to undo: call apply_uaq first, or leave the "
            "model as it is."
        )
    for fold in _find_folds(model, _checked_targets(model.config.qurl_uaq_targets)):
        fold.scale_by(1 / scale)
    del model.config.qurl_uaq_scale, model.config.qurl_uaq_targets


def uaq_scale(model: "transformers.PreTrainedModel") -> float:  # noqa: F821
    """The scale that ``model`` (or the checkpoint it was loaded from) carries; 1.0 without UAQ."""
    return getattr(model.config, "qurl_uaq_scale", 1.0)


def uaq_parameter_groups(
    model: "transformers.PreTrainedModel",  # noqa: F821
    learning_rate: float,
    scale: float = 1.5,
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    targets: Iterable[str] = ("qkv", "gate_up"),
) -> list[dict]:
    """Parameter groups that train an unscaled model exactly as UAQ trains a scaled one.

    The learning rate of the targets is multiplied by s² (SGD, with or without momentum) or s (Adam), that of the norms
    in front of them divided by it; Adam's eps is divided and multiplied by s. Derivation, and where the equality ends,
    in the module's docstring.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model as `apply_uaq` wants it, not scaled.
    learning_rate : float
        α, of the parameters that UAQ leaves alone. Schedulers multiply all groups alike and so keep the equality.
    scale : float
        s of the UAQ run to reproduce; 1.0 gives ordinary groups, for any model.
    optimizer : {"adamw", "sgd"}
        What the groups are for: ``torch.optim.AdamW`` (or ``Adam`` without weight decay), or ``torch.optim.SGD``.
    weight_decay : float
        λ of the UAQ run. As in transformers' Trainer it applies to matrices, not to norms and biases.
    eps : float
        Of the UAQ run's AdamW.
    targets : iterable of {"qkv", "gate_up"}

    Returns
    -------
    list of dict
        ``params``, ``lr``, ``weight_decay``, for AdamW ``eps``, and ``name`` ("uaq_linears", "uaq_norms", "decayed",
        "not_decayed"); each parameter with ``requires_grad`` in one group, in the model's order; no empty group.

    Raises
    ------
    ValueError
        As `apply_uaq`, and for another ``optimizer``.
    """
    if optimizer not in ("adamw", "sgd"):
        raise ValueError(
            f"optimizer={optimizer!r} has no learning rates that equal UAQ: use 'adamw' or 'sgd', or UAQ itself."
        )
    scale, targets = _checked_scale(scale), _checked_targets(targets)
    folds = []
    if scale != 1.0:
        _refuse_scaled(model)
        folds = _find_folds(model, targets)
    linears = {id(linear.weight) for fold in folds for linear in fold.linears}
    norms = {id(fold.norm.weight) for fold in folds}
    members = {"decayed": [], "not_decayed": [], "uaq_linears": [], "uaq_norms": []}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in linears:
            members["uaq_linears"].append(parameter)
        elif id(parameter) in norms:
            members["uaq_norms"].append(parameter)
        else:
            members["decayed" if parameter.ndim > 1 else "not_decayed"].append(parameter)

    gradient_growth = {"uaq_linears": scale, "uaq_norms": 1 / scale}
    groups = []
    for name, parameters in members.items():
        growth = gradient_growth.get(name, 1.0)
        multiplier = growth**2 if optimizer == "sgd" else growth
        decay = weight_decay / multiplier if name in ("uaq_linears", "decayed") else 0.0
        group = {"params": parameters, "lr": learning_rate * multiplier, "weight_decay": decay, "name": name}
        if optimizer == "adamw":
            group["eps"] = eps / growth
        if parameters:
            groups.append(group)
    return groups


def _checked_scale(scale: float) -> float:
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not 1 / _MAX_SCALE <= scale <= _MAX_SCALE:
        raise ValueError(
            f"scale={scale!r} is not possible: use a number from 1/{_MAX_SCALE:.0f} to {_MAX_SCALE:.0f}; the paper's "
            "is 1.5, and 1.0 is off."
        )
    return float(scale)


def _checked_targets(targets: Iterable[str]) -> tuple[str, ...]:
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    if not names or len(set(names)) < len(names) or not set(names) <= set(TARGETS):
        raise ValueError(f"targets={targets!r} is not possible: name each of {tuple(TARGETS)} at most once.")
    return names


def _refuse_scaled(model: nn.Module) -> None:
    if uaq_scale(model) != 1.0:
        raise ValueError(
            f"model is scaled already (model.config.qurl_uaq_scale={uaq_scale(model)}): train it as it is, or call "
            "undo_uaq first."
        )


class _Readers(TorchFunctionMode):
    """While active, notes every torch function that is handed a watched tensor (norm outputs and target weights).

    Tensors are known by identity: a view, a copy or a sum is already a reader. `readers` holds, per key of a watched
    tensor, the key of the target whose ``F.linear`` read it, or the function's name in parentheses.
    """

    def __init__(self, weights: dict[str, nn.Parameter]):
        super().__init__()
        # By id, and with the tensor: the id of a freed one comes again.
        self._watched: dict[int, tuple[str, torch.Tensor]] = {}
        self._weight_names = {id(weight): name for name, weight in weights.items()}
        self.readers: dict[str, list[str]] = defaultdict(list)
        for name, weight in weights.items():
            self.watch(name, weight)

    def watch(self, key: str, tensor: torch.Tensor) -> None:
        self._watched[id(tensor)] = key, tensor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name != "__get__":  # .shape, .dtype and the like read no values
            is_linear = func is nn.functional.linear and len(args) >= 2
            reader = self._weight_names.get(id(args[1])) if is_linear else None
            values = [*args, *kwargs.values()]
            for value in values:
                if isinstance(
                    value, (list, tuple)
                ):  # as torch.cat gets them; the loop goes on over what is added
                    values += value
                elif id(value) in self._watched:
                    self.readers[self._watched[id(value)][0]].append(reader or f"({name})")
        return func(*args, **kwargs)


def _find_folds(model: nn.Module, targets: tuple[str, ...]) -> list[_Fold]:
    """The norms in front of the targets, proven by a forward pass of two tokens; ValueError if that fails."""
    linears = _target_linears(model, targets)
    norms = {
        name: module
        for name, module in model.named_modules()
        if [n for n, _ in module.named_parameters()] == ["weight"] and module.weight.ndim == 1
    }
    calls: dict[str, int] = defaultdict(int)
    trace = _Readers({name: linear.weight for name, linear in linears.items()})

    def watch_output(name):
        def hook(module, inputs, output):
            calls[name] += 1
            trace.watch(name, output)

        return hook

    modes = {module: module.training for module in model.modules()}
    hooks = [norm.register_forward_hook(watch_output(name)) for name, norm in norms.items()]
    model.eval()  # no dropout, hence no random numbers drawn
    try:
        with torch.no_grad(), trace:
            model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training

    norm_of: dict[str, str] = {}
    for norm_name in norms:
        for reader in trace.readers[norm_name]:
            if reader in linears:
                norm_of[reader] = norm_name
    for name in linears:
        if trace.readers[name] != [name]:
            raise _refusal(
                model, f"a forward pass does not use the weight of {name} once, in a product of its own"
            )
        if name not in norm_of:
            raise _refusal(model, f"{name} does not read the output of a norm with a weight and no bias")
    folds = []
    for norm_name in dict.fromkeys(norm_of.values()):
        readers = trace.readers[norm_name]
        others = [reader for reader in readers if reader not in linears]
        if others or calls[norm_name] != 1:
            also = f"also read by {others[0]}" if others else "used more than once"
            raise _refusal(model, f"the output of {norm_name} is {also}")
        norm = norms[norm_name]
        _refuse_reduced(f"{norm_name}.weight", norm.weight)
        offset = _norm_offset(model, norm_name, norm)
        folds.append(_Fold(norm, offset, tuple(linears[name] for name in readers)))
    return folds


def _target_linears(model: nn.Module, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linears to scale, by name: all that `targets` say, in every decoder layer, in full precision."""
    layers = model.config.get_text_config().num_hidden_layers
    linears = {}
    for target in targets:
        for suffix in TARGETS[target]:
            found = {n: m for n, m in model.named_modules() if n.rpartition(".")[2] == suffix}
            if len(found) != layers:
                raise _refusal(model, f"it has {len(found)} modules {suffix} in {layers} decoder layers")
            linears |= found
    for name, module in linears.items():
        if type(module) is not nn.Linear:
            raise _refusal(model, f"{name} is not a plain nn.Linear (adapters and sharding come after UAQ)")
        _refuse_reduced(f"{name}.weight", module.weight)
    return linears


def _refuse_reduced(name: str, weight: torch.Tensor) -> None:
    if weight.dtype not in (torch.float32, torch.float64) or weight.is_meta or weight.numel() == 0:
        state = "on the meta device" if weight.is_meta else f"{weight.dtype} of {weight.numel()} numbers"
        raise ValueError(
            f"{name} is {state}, but UAQ scales whole parameters in full precision: load the model with "
            "dtype=torch.float32 and apply UAQ before it is sharded."
        )


def _norm_offset(model: nn.Module, name: str, norm: nn.Module) -> float:
    """0 if the norm's output is proportional to its weight, 1 if to 1 + weight; ValueError if to neither."""
    weight = norm.weight.detach()
    probe = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype, device=weight.device)[None]

    def output(w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.func.functional_call(norm, {"weight": w}, probe).double()

    zero = output(torch.zeros_like(weight))
    offset = 0.0 if not zero.any() else 1.0
    expected = 2 * output(weight)
    difference = (output((offset + weight) * 2 - offset) - expected).abs().max()
    if not difference <= 1e-5 * expected.abs().max():
        raise _refusal(model, f"the output of {name} is proportional neither to its weight nor to 1 + weight")
    return offset


def _refusal(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"UAQ cannot be proven to leave {type(model).__name__} unchanged: {reason}; use scale=1.0 (UAQ off), or a "
        "full-precision model of the Llama, Qwen2, Qwen3 or Gemma kind."
    )
