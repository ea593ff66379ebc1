"""Drawing tokens on a CPU with one random number per sequence instead of one per entry of the vocabulary.

vLLM draws by the exponential trick: argmax(p_v / E_v) over the vocabulary, E_v ~ Exp(1), so 49,152 random numbers for
one token of SmolLM2: a quarter of an INT8 decode step (``docs/log.md``). Inversion needs a single uniform number: the
token is the first whose cumulative probability exceeds it. The distribution is the same, the random stream is not.
"""

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from qurl.rollout.kernels import sample, unavailable

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


def _leaves_logits_alone(processor) -> bool:
    """Whether one of vLLM's own logits processors has nothing to do for the current batch; False for unknown ones."""
    active = {
        "MinPLogitsProcessor": "min_p_count",
        "LogitBiasLogitsProcessor": "biases",
        "MinTokensLogitsProcessor": "min_toks",
    }
    attribute = active.get(type(processor).__name__)
    return attribute is not None and not getattr(processor, attribute)


class InversionSampler(Sampler):
    """vLLM's sampler, drawing by inversion where a batch asks for temperature and the tokens' log-probs alone."""

    def __init__(self, logprobs_mode: str, seed: int):
        super().__init__(logprobs_mode)
        # Its own: the process's generator belongs to the training, which may seed it anew at every step.
        self._generator = torch.Generator().manual_seed(seed)
        self._compiled = unavailable("int8") is None

    def reseed(self, seed: int) -> None:
        """Restart the random numbers."""
        self._generator.manual_seed(seed)

    def forward(
        self, logits, sampling_metadata, predict_bonus_token=False, logprobs_mode_override=None
    ) -> SamplerOutput:
        """Replaces the stock method: same arguments, same return."""
        if not self._is_plain(logits, sampling_metadata, logprobs_mode_override):
            return super().forward(logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)
        temperature = sampling_metadata.temperature
        uniform = torch.rand(len(logits), dtype=torch.float64, generator=self._generator)
        if self._compiled:
            tokens, logps, ranks = sample(logits, temperature, uniform)
        else:
            logprobs = (logits.float() / temperature[:, None]).log_softmax(dim=-1)
            tokens = sample_by_inversion(logprobs.exp(), uniform)
            logps = logprobs.gather(1, tokens[:, None]).squeeze(1)
            ranks = (logprobs >= logps[:, None]).sum(-1)
        tokens = tokens.to(torch.int32)[:, None]
        return SamplerOutput(
            sampled_token_ids=tokens, logprobs_tensors=LogprobsTensors(tokens, logps[:, None], ranks)
        )

    def _is_plain(self, logits: torch.Tensor, metadata, logprobs_mode_override) -> bool:
        holder = metadata.thinking_budget_state_holder
        processors = (*metadata.logitsprocs.argmax_invariant, *metadata.logitsprocs.non_argmax_invariant)
        return (
            metadata.all_random
            and (logprobs_mode_override or self.logprobs_mode) == "processed_logprobs"
            and metadata.max_num_logprobs == 0
            and not metadata.logprob_token_ids
            and metadata.top_k is None
            and metadata.top_p is None
            and not metadata.generators
            and metadata.no_penalties
            and metadata.allowed_token_ids_mask is None
            and not metadata.bad_words_token_ids
            and not (holder is not None and holder.has_tracked_requests())
            and all(map(_leaves_logits_alone, processors))
            and logits.stride(-1) == 1
            and logits.dtype in (torch.bfloat16, torch.float32)
        )
