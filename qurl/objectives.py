"""The five objectives of QuRL (arXiv 2602.13953) on tensors of shape (B, T): completions by tokens.

Three policies meet in each sampled token: the current one, π_θ; the proximal one, π_prox, in full precision at the
moment the batch was sampled; and the behaviour policy, π_behav, the quantized copy that sampled it. All log-probs are
those of the sampled token, after temperature. With

    R = π_θ / π_prox      w = π_prox / π_behav      r = min(1, C / w)      S(x, lo, hi) = min(x·A, clip(x, lo, hi)·A)

the objective per token, to be maximised, is

    naive      S(π_θ/π_behav, 1−ε_low, 1+ε_high)              Eq. 3
    proximal   S(R, 1−ε_low, 1+ε_high)                        Eq. 1 with a full-precision denominator
    decoupled  w · S(R, 1−ε_low, 1+ε_high)                    Eq. 4
    tis        min(w, C) · S(R, 1−ε_low, 1+ε_high)            Eq. 5, truncated importance sampling
    acr        min(w, C) · S(R, 1−ε_low, (1+ε_high)/r)        Eq. 9, adaptive clipping range

`token_loss` is the readable definition; `qurl.trainer` trains through TRL's loss with `anchor`, `loss_weight` and
`clip_bounds`, and a test holds loss and gradient of the two equal.
"""

from typing import NamedTuple

import torch

OBJECTIVES = ("naive", "proximal", "decoupled", "tis", "acr")

# exp(88) is just below the largest FP32 number: beyond it a ratio is held there instead of becoming inf.
_MAX_LOG_RATIO = 88.0


class ImportanceWeights(NamedTuple):
    """Correction from the behaviour to the proximal policy; each of shape (B, T), without gradient.

    Attributes
    ----------
    w : torch.Tensor
        π_prox / π_behav.
    w_trunc : torch.Tensor
        min(w, C).
    r : torch.Tensor
        min(1, C / w) ∈ (0, 1]: how far truncation shrinks the clipping range (Eqs. 7–8).
    """

    w: torch.Tensor
    w_trunc: torch.Tensor
    r: torch.Tensor


def check_objective(objective: str) -> None:
    """Raise ValueError unless ``objective`` is one of `OBJECTIVES`."""
    if objective not in OBJECTIVES:
        raise ValueError(
            f"objective={objective!r} is not known: use one of {', '.join(map(repr, OBJECTIVES))}."
        )


def importance_weights(prox: torch.Tensor, behav: torch.Tensor, cap: float) -> ImportanceWeights:
    """Importance weights of the proximal policy over the behaviour policy, raw and truncated.

    Parameters
    ----------
    prox, behav : torch.Tensor
        Log-probs of the sampled tokens, any equal shape.
    cap : float
        C, at which w is truncated; positive.

    Returns
    -------
    ImportanceWeights
        Computed in FP32 and in log space: a log-ratio of any size gives finite numbers.

    Raises
    ------
    ValueError
        If ``cap`` is not a positive finite number.
    """
    if not 0 < cap < float("inf"):
        raise ValueError(f"cap={cap} is not possible: use a positive, finite number such as 2.0.")
    log_w = (prox.detach().float() - behav.detach().float()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    log_cap = torch.log(torch.as_tensor(cap, dtype=log_w.dtype, device=log_w.device))
    w = log_w.exp()
    return ImportanceWeights(w, w.clamp(max=cap), (log_cap - log_w).clamp(max=0).exp())


def anchor(objective: str, prox: torch.Tensor, behav: torch.Tensor) -> torch.Tensor:
    """Log-probs of the policy whose ratio to π_θ is clipped: π_behav for "naive", π_prox for all others."""
    check_objective(objective)
    return behav if objective == "naive" else prox


def loss_weight(objective: str, weights: ImportanceWeights) -> torch.Tensor:
    """Factor in front of the clipped surrogate, (B, T): 1, w or min(w, C)."""
    check_objective(objective)
    if objective == "decoupled":
        return weights.w
    if objective in ("tis", "acr"):
        return weights.w_trunc
    return torch.ones_like(weights.w)


def clip_bounds(
    objective: str, r: torch.Tensor, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bound of the clipped ratio per token.

    Parameters
    ----------
    objective : str
    r : torch.Tensor
        From `importance_weights`.
    eps_low, eps_high : float
        ε of both sides.

    Returns
    -------
    low, high : torch.Tensor
        Shape of ``r``, without gradient: 1−ε_low, and 1+ε_high, or (1+ε_high)/r for "acr" (Eq. 9).
    """
    check_objective(objective)
    r = r.detach()
    high = torch.full_like(r, 1 + eps_high)
    return torch.full_like(r, 1 - eps_low), high / r if objective == "acr" else high


def token_loss(
    objective: str,
    logps: torch.Tensor,
    prox: torch.Tensor,
    behav: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    cap: float,
) -> torch.Tensor:
    """Minus the objective, per token.

    Parameters
    ----------
    objective : {"naive", "proximal", "decoupled", "tis", "acr"}
    logps : torch.Tensor
        Of the current policy, (B, T), with gradient.
    prox, behav : torch.Tensor
        Of the proximal and the behaviour policy, (B, T); taken as constants.
    advantages : torch.Tensor
        (B,) or (B, T).
    eps_low, eps_high : float
    cap : float
        C.

    Returns
    -------
    torch.Tensor
        (B, T); the gradient flows through ``logps`` alone. Masking and averaging are the caller's.

    Raises
    ------
    ValueError
        For an unknown objective or an impossible cap.
    """
    weights = importance_weights(prox, behav, cap)
    low, high = clip_bounds(objective, weights.r, eps_low, eps_high)
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    ratio = (logps - anchor(objective, prox, behav).detach()).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    return -loss_weight(objective, weights) * surrogate
