"""What happened in a step: mismatch between sampler and policy before truncation, and which tokens were clipped.

`METRICS` defines each number that `qurl.trainer.QuRLTrainer` adds to TRL's log, with its unit.
"""

import torch

METRICS = {
    "mismatch/kl_k1": "KL(behav‖prox), nats per token: mean of −log w",
    "mismatch/kl_k3": "KL(behav‖prox), nats per token: mean of w − 1 − log w, never negative",
    "mismatch/w_mean": "mean of w = π_prox/π_behav before truncation; 1 in expectation",
    "mismatch/w_max": "largest w of the generation batch",
    "mismatch/w_q50": "median of w",
    "mismatch/w_q99": "0.99 quantile of w",
    "mismatch/w_q999": "0.999 quantile of w",
    "mismatch/w_trunc_mean": "mean of min(w, C)",
    "mismatch/truncated_share": "share of tokens with w > C",
    "mismatch/ess": "effective sample size over tokens, (Σw)² / (N·Σw²), in (0, 1]",
    "mismatch/perplexity_gap": "perplexity of the sampled tokens under the proximal minus under the behaviour policy",
    "mismatch/missing_share": "share of sampled tokens without a log-prob from the engine; without weight in the loss",
    "acr/upper_mean": "mean of the upper clip bound (1+ε_high)/r",
    "acr/upper_max": "largest upper clip bound",
    "rollout/bits": "bits per weight of the projections that sampled: 2 to 8 (rollout_code_bits), 16 or 32",
    "rollout/sync_seconds": "quantize, load and check, seconds in the slowest process",
    "rollout/seconds": "sampling, seconds in the slowest process",
    "rollout/tokens_per_second": "sampled tokens of all processes over the sampling seconds of the slowest",
    "rollout/sync_share": "sync seconds over the seconds since the sync before, evaluations left out",
    "rollout/codes_changed": "share of codes that differ from the sync before",
    "mismatch/staleness_k3": "KL(prox‖current policy), k3, nats per token; 0 at the first optimizer step of a batch",
    "attribution/quantization_k3": "behaviour policy against the same engine in BF16, k3 on the sampled tokens, nats",
    "attribution/engine_k3": "engine in BF16 against the training forward pass, k3 on the sampled tokens, nats",
    "dynamic_sampling/rounds": "rounds of further prompts that a generation batch took",
    "dynamic_sampling/extra_completions": "completions sampled in these rounds, over all processes",
    "dynamic_sampling/seconds": "their cost with rewards and log-probs, seconds",
    "dynamic_sampling/equal_groups_left": "share of groups that still have equal rewards",
    "update/codes_changed": "share of codes changed by the optimizer steps of one generation batch",
    "update/update_to_error": "norm of those weight updates over the norm of the quantization error",
    "update/update_to_step": "mean size of those weight updates in quantization steps",
}


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """The k3 estimator exp(x) − 1 − x of KL(p‖q), per token, with x = log q/p under samples of p; never negative."""
    return torch.expm1(log_ratio) - log_ratio


def _quantile(ordered: torch.Tensor, share: float) -> float:
    """Linear interpolation between the neighbours, as torch.quantile does."""
    position = share * (len(ordered) - 1)
    below = int(position)
    low, high = ordered[below].item(), ordered[min(below + 1, len(ordered) - 1)].item()
    return low + (high - low) * (position - below)


def mismatch_stats(log_w: torch.Tensor, behav: torch.Tensor, cap: float) -> dict[str, float]:
    """Mismatch between the proximal and the behaviour policy, before truncation.

    Parameters
    ----------
    log_w : torch.Tensor
        log π_prox − log π_behav of the sampled tokens, shape (N,): masked tokens left out.
    behav : torch.Tensor
        log π_behav of the same tokens, shape (N,).
    cap : float
        C.

    Returns
    -------
    dict
        The "mismatch/…" entries of `METRICS` that follow from w; empty without tokens.
    """
    if not len(log_w):
        return {}
    log_w, behav = log_w.detach().double(), behav.detach().double()
    # FP64 holds exp of everything that FP32 log-probs can differ by, up to 709.
    w = log_w.clamp(max=700).exp()
    ordered = w.sort().values  # torch.quantile takes at most 2^24 numbers
    q50, q99, q999 = (_quantile(ordered, share) for share in (0.5, 0.99, 0.999))
    # The largest w is divided out, so that no square overflows.
    scaled = w / w.max()
    return {
        "mismatch/kl_k1": -log_w.mean().item(),
        "mismatch/kl_k3": (w - 1 - log_w if log_w.max() > 1 else k3(log_w)).mean().item(),
        "mismatch/w_mean": w.mean().item(),
        "mismatch/w_max": w.max().item(),
        "mismatch/w_q50": q50,
        "mismatch/w_q99": q99,
        "mismatch/w_q999": q999,
        "mismatch/w_trunc_mean": w.clamp(max=cap).mean().item(),
        "mismatch/truncated_share": (w > cap).double().mean().item(),
        "mismatch/ess": (scaled.sum() ** 2 / (len(w) * (scaled**2).sum())).item(),
        "mismatch/perplexity_gap": ((-(behav + log_w).mean()).exp() - (-behav.mean()).exp()).item(),
    }


def clip_stats(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    low: torch.Tensor | float,
    high: torch.Tensor | float,
) -> dict[str, float]:
    """Shares of tokens where the clip binds: outside a bound, on the side where the minimum is the clipped term.

    Parameters
    ----------
    ratio : torch.Tensor
        Current over anchor policy, (B, T).
    advantages : torch.Tensor
        (B,) or (B, T).
    mask : torch.Tensor
        1 for the tokens that count, (B, T).
    low, high : torch.Tensor or float
        Bounds actually used, as from `qurl.objectives.clip_bounds`.

    Returns
    -------
    dict
        "low", "high" and "total", shares in [0, 1] of the unmasked tokens; the gradient is zero exactly there.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    mask = mask.bool()
    count = max(int(mask.sum()), 1)
    below = (ratio < low) & (advantages < 0) & mask
    above = (ratio > high) & (advantages > 0) & mask
    shares = {"low": int(below.sum()) / count, "high": int(above.sum()) / count}
    return shares | {"total": shares["low"] + shares["high"]}


def history(trainer_or_log) -> "pandas.DataFrame":  # noqa: F821 (imported on use)
    """Log of a run as a table: one row per optimizer step that was logged, one column per metric.

    Parameters
    ----------
    trainer_or_log : transformers.Trainer or list of dict
        A trainer, or its ``state.log_history``.

    Returns
    -------
    pandas.DataFrame
        Indexed by "step"; what was logged for the same step several times (training, evaluation) is merged.
    """
    import pandas

    log = getattr(getattr(trainer_or_log, "state", None), "log_history", trainer_or_log)
    table = pandas.DataFrame(log)
    return table.groupby("step").first() if len(table) else table
