"""The five objectives: worked values of the paper and of public bug reports, and what must hold for any tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurl.objectives import OBJECTIVES, anchor, clip_bounds, importance_weights, loss_weight, token_loss

EPS = {"eps_low": 0.2, "eps_high": 0.2}

log_ratios = st.floats(-8, 8)
advantages = st.floats(-3, 3)


def loss(objective, *, w, ratio, advantage, cap=2.0, eps_low=0.2, eps_high=0.2):
    """Loss of one token whose proximal log-prob is −1, with a given w and R."""
    prox = torch.tensor([[-1.0]], dtype=torch.float64)
    logps = prox + math.log(ratio)
    behav = prox - math.log(w)
    advantage = torch.tensor([advantage], dtype=torch.float64)
    options = {"eps_low": eps_low, "eps_high": eps_high, "cap": cap}
    return token_loss(objective, logps, prox, behav, advantage, **options).item()


@pytest.mark.parametrize(
    ("objective", "w", "ratio", "advantage", "expected"),
    [
        # method.md, worked values: r = 0.5, upper bound 2.4.
        ("acr", 4, 1.5, 1, -3.0),
        ("tis", 4, 1.5, 1, -2.4),
        ("acr", 4, 1.5, -1, 3.0),
        ("tis", 4, 1.5, -1, 3.0),
        ("acr", 1.25, 1.5, 1, -1.5),
        ("tis", 1.25, 1.5, 1, -1.5),
        # The same token under the others: w · 1.2, 1.2, and R̂ = wR = 6, clipped at 1.2.
        ("decoupled", 4, 1.5, 1, -4.8),
        ("proximal", 4, 1.5, 1, -1.2),
        ("naive", 4, 1.5, 1, -1.2),
        ("naive", 4, 1.5, -1, 6.0),
    ],
)
def test_worked_values(objective, w, ratio, advantage, expected):
    assert loss(objective, w=w, ratio=ratio, advantage=advantage) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, -1.4657), (-1.0, 1.6487)])
def test_case_o01_the_proximal_ratio_is_clipped_and_w_multiplies(advantage, expected):
    tokens = [torch.tensor([[value]]) for value in (-0.5, -0.8, -1.0)]
    got = token_loss("decoupled", *tokens, torch.tensor([advantage]), **EPS, cap=2.0)
    assert got.item() == pytest.approx(expected, abs=5e-5)


@given(log_w=log_ratios, log_ratio=log_ratios, advantage=advantages)
def test_acr_equals_tis_where_the_weight_is_not_truncated_and_for_negative_advantages(
    log_w, log_ratio, advantage
):
    if log_w > math.log(2.0) and advantage > 0:
        return
    token = {"w": math.exp(log_w), "ratio": math.exp(log_ratio), "advantage": advantage}
    assert loss("acr", **token) == pytest.approx(loss("tis", **token), rel=1e-5, abs=1e-9)


@given(log_w=log_ratios, log_ratio=log_ratios, advantage=st.floats(0, 3))
def test_acr_undoes_the_shrunken_range_of_tis_and_no_more(log_w, log_ratio, advantage):
    token = {"w": math.exp(log_w), "ratio": math.exp(log_ratio), "advantage": advantage}
    assert loss("acr", **token) <= loss("tis", **token) + 1e-9
    # min(w, C)·(1+ε)/r = w·(1+ε) where w > C: the bound of the whole term is that of the untruncated objective.
    assert loss("acr", **token) >= loss("decoupled", **token) - 1e-4 * abs(loss("decoupled", **token)) - 1e-9


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(log_ratio=log_ratios, advantage=advantages)
def test_all_are_ppo_where_sampler_and_policy_agree(objective, log_ratio, advantage):
    ratio = math.exp(log_ratio)
    ppo = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    got = loss(objective, w=1.0, ratio=ratio, advantage=advantage, eps_high=0.28)
    assert got == pytest.approx(ppo, rel=1e-6, abs=1e-9)


@given(log_w=st.floats(-1e4, 1e4), cap=st.floats(0.1, 1e3))
def test_weights_are_finite_and_consistent_for_any_mismatch(log_w, cap):
    weights = importance_weights(torch.tensor([[log_w]]), torch.zeros(1, 1), cap)
    w, w_trunc, r = (value.item() for value in weights)
    assert math.isfinite(w) and 0 < r <= 1
    assert w_trunc == pytest.approx(min(w, cap), rel=1e-6)
    if log_w < 80:
        assert r * max(w, cap) == pytest.approx(cap, rel=1e-4)


def test_a_weight_of_a_million_stays_finite():
    for objective in OBJECTIVES:
        assert math.isfinite(loss(objective, w=1e6, ratio=1.5, advantage=1.0))
    assert loss("acr", w=1e6, ratio=1.5, advantage=1.0) == pytest.approx(-3.0, rel=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_gradient_flows_through_weights_and_bounds(objective, advantage):
    generator = torch.Generator().manual_seed(0)
    prox, behav, logps = (
        torch.randn(2, 5, dtype=torch.float64, generator=generator) / 4 - 2 for _ in range(3)
    )
    prox.requires_grad_()
    behav.requires_grad_()
    logps.requires_grad_()
    options = {"eps_low": 0.2, "eps_high": 0.28, "cap": 1.1}
    advantages = torch.full((2,), advantage, dtype=torch.float64)
    token_loss(objective, logps, prox, behav, advantages, **options).sum().backward()
    assert prox.grad is None and behav.grad is None

    step, finite = 1e-6, torch.empty_like(logps)
    for index in range(logps.numel()):
        shift = torch.zeros(logps.numel(), dtype=torch.float64)
        shift[index] = step
        shift = shift.view_as(logps)
        up, down = (
            token_loss(objective, logps.detach() + s, prox, behav, advantages, **options).sum()
            for s in (shift, -shift)
        )
        finite.view(-1)[index] = (up - down).detach() / (2 * step)
    torch.testing.assert_close(logps.grad, finite, rtol=1e-5, atol=1e-7)


def test_bounds_of_acr_widen_upwards_only():
    r = torch.tensor([1.0, 0.5, 0.1])
    low, high = clip_bounds("acr", r, 0.2, 0.28)
    torch.testing.assert_close(low, torch.full((3,), 0.8))
    torch.testing.assert_close(high, torch.tensor([1.28, 2.56, 12.8]))
    low, high = clip_bounds("tis", r, 0.2, 0.28)
    torch.testing.assert_close(high, torch.full((3,), 1.28))


def test_anchor_and_weight_per_objective():
    prox, behav = torch.tensor([-1.0]), torch.tensor([-3.0])
    weights = importance_weights(prox, behav, 2.0)
    w = math.exp(2)
    expected = {"naive": (-3, 1), "proximal": (-1, 1), "decoupled": (-1, w), "tis": (-1, 2), "acr": (-1, 2)}
    for objective, (log_prob, weight) in expected.items():
        assert anchor(objective, prox, behav).item() == log_prob
        assert loss_weight(objective, weights).item() == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("function", [lambda o: clip_bounds(o, torch.ones(1), 0.2, 0.2)])
def test_an_unknown_objective_is_named(function):
    with pytest.raises(ValueError, match=r"objective='ppo' is not known: use one of 'naive'.*'acr'"):
        function("ppo")


@pytest.mark.parametrize("cap", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_cap_is_named(cap):
    with pytest.raises(ValueError, match="cap="):
        importance_weights(torch.zeros(1), torch.zeros(1), cap)
