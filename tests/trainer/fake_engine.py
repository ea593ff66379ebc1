"""`CountingEngine` without vLLM: what surrounds it, such as the walk over the weights, is the real thing."""

from types import SimpleNamespace

import torch

from qurl.quantization import FORMATS, quantized_named_tensors


class FakeEngine:
    """Keeps what it is synced with, and draws completions from random numbers that `reseed` restarts."""

    def __init__(self, folder, dtype, *, code_bits, max_model_len, **_):
        self.dtype, self.code_bits, self.max_model_len = dtype, code_bits, max_model_len or 64
        self.generator, self.tensors = torch.Generator(), {}
        self.drawn: list[list[list[int]]] = []
        self.spoil = lambda logps: logps

    def reseed(self, seed):
        self.generator.manual_seed(seed)

    def sync(self, named_params, *, check):
        if self.dtype in FORMATS:
            named_params = quantized_named_tensors(named_params, self.dtype, self.code_bits)
        before, self.tensors = self.tensors, {name: tensor.detach().clone() for name, tensor in named_params}
        codes = [name for name in before if before[name].dtype is torch.int8]
        changed = sum((before[name] != self.tensors[name]).sum().item() for name in codes)
        total = sum(before[name].numel() for name in codes)
        return SimpleNamespace(seconds=0.25, codes_changed=changed / total if total else None)

    def sample(self, prompts, *, max_tokens, temperature):
        shape = (len(prompts), max_tokens)
        completions = torch.randint(5, 40, shape, generator=self.generator).tolist()
        logps = self.spoil((-3.7 + 0.1 * torch.randn(shape, generator=self.generator)).tolist())
        self.drawn.append(completions)
        return SimpleNamespace(
            completion_ids=completions, logps=logps, seconds=0.5, completion_tokens=len(prompts) * max_tokens
        )

    def close(self):
        pass
