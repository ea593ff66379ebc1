"""Train the embedded model ``tiny``: a Llama of 1.8M parameters that solves a third of 3-digit sums.

    python data/models/train_tiny.py --output data/models/tiny

It takes about two minutes on two cores. Training stops at the first check where 28-38 % of held-out sums, sampled at
temperature 1, are right: a policy that reinforcement learning can still improve. The learning rate follows the
first part of a 1,600-step schedule at whose end the model solves nearly all sums.
"""

import argparse
import math
import os
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qurl.models import write_manifest
from qurl.tasks.arithmetic import Sum, sums

SEED = 0
BATCH_SIZE = 256
LEARNING_RATE = 1e-3
SCHEDULE_STEPS = 1600
CHECK_EVERY = 10  # steps
CHECK_SUMS = 1000
TARGET_ACCURACY = (0.28, 0.38)
REPORT_SUMS = 4000
MAX_ANSWER_TOKENS = 5  # four digits and the end

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/=^%()[]{}<>.,:?!#$\\ \nabcdefghijklmnopqrstuvwxyz"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 64 in all; nothing is added in front of or behind a text."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        # Messages are simply joined, so that code for chat models runs on this one too.
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Heads of 64, because vLLM's CPU attention knows no smaller size that suits a hidden size of 192."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def loss_on_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: list[Sum]
) -> torch.Tensor:
    """Mean cross-entropy of the answers' characters and their end; the operands are random and not learnt."""
    texts = [problem.prompt + problem.answer + tokenizer.eos_token for problem in batch]
    inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    prompt_tokens = torch.tensor([[len(problem.prompt)] for problem in batch])
    is_answer = torch.arange(inputs.input_ids.shape[1]) >= prompt_tokens
    labels = inputs.input_ids.masked_fill(~is_answer | (inputs.attention_mask == 0), -100)
    return model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, labels=labels).loss


@torch.no_grad()
def sampled_accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Sum], seed: int
) -> float:
    """Share of ``problems`` (prompts of one length) answered exactly, sampled once each at temperature 1."""
    prompts = tokenizer([problem.prompt for problem in problems], return_tensors="pt")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=MAX_ANSWER_TOKENS)
    completions = output[:, prompts.input_ids.shape[1] :]
    ended = (completions == tokenizer.eos_token_id).any(1).tolist()
    answers = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return sum(
        end and answer == problem.answer
        for end, answer, problem in zip(ended, answers, problems, strict=True)
    ) / len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder to write; an existing one is replaced"
    )
    output = parser.parse_args().output

    torch.manual_seed(SEED)
    torch.set_num_threads(2)  # the number of threads decides the order of sums, and so the last bits
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} symbols", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / SCHEDULE_STEPS))
    )
    check = sums("test", CHECK_SUMS, seed=1)
    for step in range(1, SCHEDULE_STEPS + 1):
        loss = loss_on_answers(model, tokenizer, sums("train", BATCH_SIZE, seed=step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % CHECK_EVERY == 0:
            accuracy = sampled_accuracy(model, tokenizer, check, seed=step)
            print(
                f"step {step}: loss {loss.item():.3f}, {accuracy:.1%} of {CHECK_SUMS} held-out sums",
                flush=True,
            )
            if accuracy >= TARGET_ACCURACY[0]:
                break
    if not TARGET_ACCURACY[0] <= accuracy <= TARGET_ACCURACY[1]:
        raise SystemExit(f"No check fell into {TARGET_ACCURACY}: lower CHECK_EVERY or change SEED.")

    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    # What counts is the policy as stored and as trained further: BF16 weights, FP32 arithmetic.
    stored = LlamaForCausalLM.from_pretrained(partial, dtype=torch.float32)
    accuracy = sampled_accuracy(stored, tokenizer, sums("test", REPORT_SUMS, seed=2), seed=2)
    write_manifest(
        partial,
        source="python data/models/train_tiny.py",
        licence="Apache-2.0",
        steps=step,
        sampled_accuracy={
            "value": accuracy,
            "split": "test",
            "n": REPORT_SUMS,
            "seed": 2,
            "temperature": 1.0,
        },
    )
    shutil.rmtree(output, ignore_errors=True)
    os.replace(partial, output)
    print(f"{accuracy:.1%} of {REPORT_SUMS} held-out sums right at temperature 1, written to {output}")


if __name__ == "__main__":
    main()
