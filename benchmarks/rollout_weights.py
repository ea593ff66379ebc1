"""Which weights to quantize, the parameters or their BF16 cast: KL(behav‖prox) on the same sampled tokens.

    python -m benchmarks.rollout_weights --model runs/train/smollm2-int8-acr-seed0/policy

For a policy in FP32 whose weights are not BF16 numbers (a trained one). Tokens are sampled from an INT8 or FP8 engine
that was given either; the proximal log-probs come from a forward pass in FP32, and in BF16 autocast. Standard errors
over sequences.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl.diagnostics import k3
from qurl.models import resolve_model
from qurl.quantization import is_quantized_name
from qurl.rollout import RolloutEngine
from qurl.tasks import load_task


@torch.no_grad()
def logps_of(model, prompts, completions, bf16: bool) -> list[torch.Tensor]:
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.float().log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a name, folder or hub id that qurl.models resolves")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()

    path = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    task = load_task("arithmetic", "test", digits=2, chat=True, n=options.sequences)
    prompts = [task.render(row, tokenizer) for row in task.dataset]
    print("dtype  quantized from  KL to FP32 forward   KL to BF16 forward   (k3, nats per token)")
    for dtype in ("int8", "fp8"):
        for source in ("fp32", "bf16"):
            with RolloutEngine(
                path, dtype, max_model_len=256, max_num_seqs=128, load_weights=False
            ) as engine:
                engine.sync(
                    (name, p.to(torch.bfloat16) if source == "bf16" and is_quantized_name(name) else p)
                    for name, p in model.named_parameters()
                )
                rollouts = engine.generate(prompts, max_tokens=options.max_tokens, temperature=1.0)
            figures = []
            for bf16 in (False, True):
                prox = logps_of(model, prompts, rollouts.completion_ids, bf16)
                sums = torch.stack(
                    [k3(p - torch.tensor(b)).sum() for p, b in zip(prox, rollouts.logps, strict=True)]
                )
                lengths = torch.tensor([float(len(b)) for b in rollouts.logps])
                kl = sums.sum() / lengths.sum()
                error = ((sums - kl * lengths).pow(2).sum().sqrt() / lengths.sum()).item()
                figures.append(f"{kl.item():.5f} ± {error:.5f}")
            print(f"{dtype:6} {source:15} {figures[0]:20} {figures[1]:20}", flush=True)


if __name__ == "__main__":
    main()
