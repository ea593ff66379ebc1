"""Recorded rollouts in place of an engine, so that trainers can be compared on the same tokens."""

from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOTrainer

from qurl.trainer import QuRLTrainer

PROMPTS = [f"{a}+{b}=" for a in range(10, 18) for b in range(20, 24)]
DATA = Dataset.from_dict({"prompt": PROMPTS})


def reward_of_length(completion_ids, **_):
    """Something that differs within a group and needs no model."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_policy(tokenizer, seed=0, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Replay:
    """A generation backend that draws completions and log-probs from a generator of its own.

    ``behav`` maps (prompt ids, completion ids) to the sampler's log-probs; by default a noise around −1.
    """

    def __init__(self, eos_token_id: int, length: int = 6, seed: int = 0, vocabulary: int = 40):
        self.eos_token_id, self.length, self.vocabulary = eos_token_id, length, vocabulary
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.train_dtype = "int8"
        self.log_path = "replay.log"
        self.syncs, self.streams, self.prompts = 0, [], []
        self.last_sync = self.last_rollouts = None
        self.spoil = lambda logps: logps

    def begin(self, *, training, stream):
        self.streams.append((training, stream))

    def use_full_precision(self):
        self.train_dtype = self.dtype = "bf16"

    def sync_weights(self):
        self.syncs += 1
        self.last_sync = SimpleNamespace(seconds=0.25, codes_changed=0.125)

    def generate(self, prompts, images, num_generations, profiler=None):
        self.prompts.append(prompts)
        draw = {"generator": self.generator}
        lengths = torch.randint(2, self.length + 1, (len(prompts),), **draw).tolist()
        # The last completion is cut off, the others end.
        completions = [torch.randint(5, self.vocabulary, (n,), **draw).tolist() for n in lengths]
        for completion in completions[:-1]:
            completion[-1] = self.eos_token_id
        logps = [(-3.7 + torch.randn(n, **draw)).tolist() for n in lengths]
        self.last_rollouts = SimpleNamespace(seconds=0.5, completion_tokens=sum(lengths))
        return prompts, completions, [[[value] for value in row] for row in self.spoil(logps)], None

    def close(self):
        pass


class ReplayedQuRLTrainer(QuRLTrainer):
    """`QuRLTrainer` without an engine."""

    def _build_generation(self):
        return Replay(self.eos_token_ids[0])


def replayed_grpo_trainer(model, rewards, args, **options) -> GRPOTrainer:
    """Stock `GRPOTrainer` fed from the same recording: its own loss and correction, another backend."""
    args.use_vllm = False
    trainer = GRPOTrainer(model, rewards, args, **options)
    args.use_vllm = trainer.use_vllm = True
    backend = Replay(trainer.eos_token_ids[0])
    trainer.vllm_generation, trainer._last_loaded_step = backend, -1
    return trainer
