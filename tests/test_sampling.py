"""Drawing tokens by inversion: the distribution must be the model's, to rounding."""

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: pip install 'qurl[cpu]'")
from qurl.rollout import kernels
from qurl.rollout.sampling import BLOCK, sample_by_inversion


def intervals(probs: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """The definition in FP64, without blocks."""
    cumulative = np.cumsum(probs.astype(np.float64))
    return np.searchsorted(cumulative, uniform * cumulative[-1], side="right")


@pytest.mark.parametrize("vocabulary", [5, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 77])
def test_each_uniform_number_falls_into_its_tokens_interval(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    probs = torch.rand(vocabulary, generator=generator).pow(6)
    uniform = torch.linspace(0, 1 - 2**-53, 997, dtype=torch.float64)
    drawn = sample_by_inversion(probs.repeat(len(uniform), 1), uniform).numpy()
    expected = intervals(probs.numpy(), uniform.numpy())
    # FP32 sums of blocks move an interval's end by rounding, so that a number next to it may fall to the neighbour.
    assert np.mean(drawn == expected) > 0.995
    assert np.abs(drawn - expected).max() <= 1


def test_known_intervals():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]] * 6)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert sample_by_inversion(probs, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_tokens_without_probability_are_never_drawn():
    probs = torch.zeros(4, 2 * BLOCK + 10)
    probs[0, -1] = probs[1, 0] = probs[2, BLOCK] = 1.0
    probs[3, BLOCK - 1] = probs[3, BLOCK + 5] = 1e-30  # tiny sums, and ends of blocks
    for value in (0.0, 0.3, 0.5, 1 - 2**-53):
        drawn = sample_by_inversion(probs, torch.full((4,), value, dtype=torch.float64))
        assert (probs.gather(1, drawn[:, None]) > 0).all(), value


def test_frequencies_follow_the_probabilities():
    generator = torch.Generator().manual_seed(3)
    probs = torch.softmax(2 * torch.randn(600, generator=generator), 0)
    draws = 200_000
    uniform = torch.rand(draws, dtype=torch.float64, generator=generator)
    counts = torch.zeros(600)
    for part in uniform.split(5_000):
        counts += torch.bincount(sample_by_inversion(probs.expand(len(part), -1), part), minlength=600)
    expected = draws * probs
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert (
        abs(chi_square - 599) < 5 * (2 * 599) ** 0.5
    )  # mean and 5 standard deviations of chi² with 599 degrees


compiled = pytest.mark.skipif(
    kernels.unavailable("int8") is not None, reason=f"no compiled kernels: {kernels.unavailable('int8')}"
)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 5, BLOCK, 3 * BLOCK + 77])
def test_compiled_sampler_against_the_definition(vocabulary, dtype):
    """Tokens by intervals, log-probs after temperature in FP64, ranks by counting; with a row stride and -inf."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(200, vocabulary + 3, generator=generator)).to(dtype)[:, :vocabulary]
    logits[::3, vocabulary // 2 + 1 :] = -torch.inf
    temperature = torch.linspace(0.3, 2, 200)
    uniform = torch.rand(200, dtype=torch.float64, generator=generator)
    uniform[0], uniform[1] = 0, 1 - 2**-53
    tokens, logps, ranks = kernels.sample(logits, temperature, uniform)
    expected = (logits.double() / temperature.double()[:, None]).log_softmax(-1)
    drawn = [intervals(row.exp().numpy(), u) for row, u in zip(expected, uniform.numpy(), strict=True)]
    assert (tokens == torch.tensor(drawn).clamp(max=vocabulary - 1)).float().mean() > 0.99
    own = expected.gather(1, tokens[:, None])
    assert torch.isfinite(own).all()
    torch.testing.assert_close(logps.double(), own[:, 0], atol=2e-5, rtol=0)
    assert torch.equal(ranks, (logits >= logits.gather(1, tokens[:, None])).sum(-1))


@compiled
def test_compiled_sampler_shows_broken_logits():
    logits = torch.zeros(4, 300)
    logits[1, 7], logits[2, 299], logits[3] = torch.nan, torch.inf, -torch.inf
    _, logps, _ = kernels.sample(logits, torch.ones(4), torch.full((4,), 0.5, dtype=torch.float64))
    assert torch.isnan(logps).tolist() == [False, True, True, True]
