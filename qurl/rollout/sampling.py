"""Drawing tokens on a CPU with one random number per sequence instead of one per entry of the vocabulary.

vLLM draws by the exponential trick: argmax(p_v / E_v) over the vocabulary, E_v ~ Exp(1), so 49,152 random numbers for
one token of SmolLM2: a quarter of an INT8 decode step (``docs/log.md``). Inversion needs a single uniform number: the
token is the first whose cumulative probability exceeds it. The distribution is the same, the random stream is not.
"""

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

# Entries of the vocabulary summed at once: a row of 49,152 becomes 192 sums to search, then one block of 256.
BLOCK = 256


def sample_by_inversion(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token whose interval of cumulative probability holds ``uniform``, per row.

    Parameters
    ----------
    probs : torch.Tensor
        Shape (B, V), FP32, non-negative; rows need not sum to one.
    uniform : torch.Tensor
        Shape (B,), FP64 in [0, 1).

    Returns
    -------
    torch.Tensor
        Shape (B,), int64. A token of probability zero is never returned. Cumulative sums are FP64 over FP32 sums of
        blocks, so a token's frequency differs from its probability by no more than FP32 rounding.
    """
    batch, vocabulary = probs.shape
    whole = vocabulary - vocabulary % BLOCK
    sums = probs[:, :whole].view(batch, -1, BLOCK).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], dim=1)
    block, fraction = _search(sums, uniform)
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)
    inside = probs.gather(1, columns.clamp(max=vocabulary - 1)).masked_fill_(columns >= vocabulary, 0)
    offset, _ = _search(inside, fraction)
    return block * BLOCK + offset


def _search(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index (B,) of the weight whose cumulative interval holds ``uniform``, and where in it that lies, in [0, 1)."""
    cumulative = weights.cumsum(1, dtype=torch.float64)
    target = uniform * cumulative[:, -1]
    index = torch.searchsorted(cumulative, target[:, None], right=True)
    # uniform * total may round up to the total: the last weight that is not zero is meant.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    index = torch.minimum(index, last)
    width = weights.gather(1, index).double()
    start = cumulative.gather(1, index) - width
    fraction = ((target[:, None] - start) / width).clamp_(0, 1 - 2**-53)
    return index.squeeze(1), fraction.squeeze(1)


class InversionSampler(TopKTopPSampler):
    """vLLM's sampler on a CPU, drawing by inversion where neither top-k, top-p nor a seed per request is asked for."""

    def forward_cpu(self, logits, generators, k, p):
        """Replaces the stock method: same arguments, same return (token ids (B,), processed logits or log-probs)."""
        if k is not None or p is not None or generators or self.logprobs_mode != "processed_logprobs":
            return super().forward_cpu(logits, generators, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        uniform = torch.rand(len(logits), dtype=torch.float64, device=logits.device)
        return sample_by_inversion(torch.exp(logprobs, out=logits), uniform), logprobs
