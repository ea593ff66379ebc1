"""Mismatch before truncation, and which tokens are clipped."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurl.diagnostics import clip_stats, history, k3, mismatch_stats
from qurl.objectives import token_loss


def stats_of(ratios, cap=2.0):
    log_w = torch.tensor(ratios, dtype=torch.float64).log()
    return mismatch_stats(log_w, torch.full_like(log_w, -1.0), cap)


def test_case_o07_raw_and_truncated_ratios():
    stats = stats_of([0.5, 1.0, 3.0, 8.0])
    assert stats["mismatch/w_mean"] == pytest.approx(3.125)
    assert stats["mismatch/w_max"] == pytest.approx(8)
    assert stats["mismatch/truncated_share"] == 0.5
    assert stats["mismatch/w_trunc_mean"] == pytest.approx(1.375)
    # (Σw)² / (N·Σw²) = 12.5² / (4 · 74.25)
    assert stats["mismatch/ess"] == pytest.approx(156.25 / 297)
    assert stats["mismatch/kl_k1"] == pytest.approx(-math.log(12) / 4)
    assert stats["mismatch/kl_k3"] == pytest.approx(2.125 - math.log(12) / 4)
    assert stats["mismatch/w_q50"] == pytest.approx(2.0)


def test_perplexities_of_a_hand_made_case():
    # Behaviour: mean log-prob −1, perplexity e; proximal: −1 + mean log w = −1.5, perplexity e^1.5.
    stats = stats_of([math.exp(-1.0), 1.0])
    assert stats["mismatch/perplexity_gap"] == pytest.approx(math.exp(1.5) - math.e)


@given(st.lists(st.floats(-300, 300), min_size=1, max_size=20))
def test_statistics_are_finite_and_in_range_for_any_mismatch(log_w):
    log_w = torch.tensor(log_w, dtype=torch.float64)
    stats = mismatch_stats(log_w, torch.full_like(log_w, -400.0), 2.0)
    ranges = {
        "kl_k3": (0, math.inf),
        "ess": (0, 1 + 1e-12),
        "truncated_share": (0, 1),
        "w_trunc_mean": (0, 2),
    }
    for name, (low, high) in ranges.items():
        assert low <= stats[f"mismatch/{name}"] <= high
    assert stats["mismatch/w_q50"] <= stats["mismatch/w_q99"] <= stats["mismatch/w_max"]


def test_k3_keeps_small_mismatches():
    """x²/2 to leading order; w − 1 − log w in FP32 would be rounding alone."""
    assert k3(torch.tensor(1e-5, dtype=torch.float64)).item() == pytest.approx(5e-11, rel=1e-4)
    assert stats_of([1 + 1e-7] * 3)["mismatch/kl_k3"] == pytest.approx(5e-15, rel=1e-2)


def test_no_tokens_give_no_statistics():
    assert mismatch_stats(torch.empty(0), torch.empty(0), 2.0) == {}


def test_case_o04_clip_shares_count_where_the_gradient_vanishes():
    ratio = torch.tensor([[0.5, 1.5, 0.5, 1.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    shares = clip_stats(ratio, advantages, torch.ones(1, 4), 0.8, 1.2)
    assert shares == {"low": 0.25, "high": 0.25, "total": 0.5}

    logps = ratio.log().requires_grad_()
    zero = torch.zeros_like(ratio)
    token_loss("tis", logps, zero, zero, advantages, eps_low=0.2, eps_high=0.2, cap=2.0).sum().backward()
    assert (logps.grad == 0).tolist() == [[False, True, True, False]]


def test_clip_shares_use_the_bounds_of_each_token_and_leave_masked_tokens_out():
    ratio, advantages = torch.tensor([[1.5, 1.5, 9.0]]), torch.tensor([1.0])
    high = torch.tensor([[1.2, 2.4, 1.2]])
    assert clip_stats(ratio, advantages, torch.tensor([[1, 1, 0]]), 0.8, high)["high"] == 0.5
    assert clip_stats(ratio, advantages, torch.zeros(1, 3), 0.8, high)["total"] == 0


def test_history_merges_what_was_logged_at_the_same_step():
    log = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}, {"step": 2, "eval_reward": 0.75}]
    table = history(log)
    assert table.index.tolist() == [1, 2]
    assert table.loc[2].tolist() == [0.25, 0.75]
    assert history([]).empty
