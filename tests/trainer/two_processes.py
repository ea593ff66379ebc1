"""Run by test_two_processes.py in each of two processes, and in part in one: what they report is compared there."""

import copy
import faulthandler
import hashlib
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate.utils import gather_object
from fake_engine import FakeEngine
from peft import LoraConfig, get_peft_model
from replay import DATA, Replay, ReplayedQuRLTrainer, make_policy
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer, TrainerCallback

from qurl.checks import TrainingError, require_finite_policy
from qurl.config import QuRLConfig
from qurl.diagnostics import history
from qurl.evaluation import evaluate
from qurl.models import resolve_model
from qurl.quantization import quantized_named_tensors
from qurl.rollout import generation
from qurl.rollout.generation import QuantizedVLLMGeneration
from qurl.tasks import load_task
from qurl.trainer import QuRLTrainer

OPTIONS = {
    "max_steps": 4, "per_device_train_batch_size": 8, "num_generations": 4, "num_iterations": 2,
    "max_completion_length": 8, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "bf16": False,
    "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "use_cpu": True, "ddp_find_unused_parameters": False,
}  # fmt: skip
LORA = {
    "r": 4,
    "target_modules": ["q_proj", "down_proj"],
    "task_type": "CAUSAL_LM",
    "init_lora_weights": False,
}


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digests = hashlib.sha256()
    for name, tensor in sorted(tensors):
        digests.update(name.encode() + tensor.detach().numpy().tobytes())
    return digests.hexdigest()


def codes(named_params: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of what an engine is to hold for a whole model: its codes, scales and unquantized weights."""
    return digest(quantized_named_tensors(named_params, "int8"))


def tokenizer_of_tiny():
    return AutoTokenizer.from_pretrained(resolve_model("tiny"))


# Dynamic sampling ---------------------------------------------------------------------------------------------------


def of_one_number(prompts, **_):
    """Differs within the groups of the prompts that add 22 alone: 8 of 32."""
    return [float(i % 2) if "+22=" in prompt else 1.0 for i, prompt in enumerate(prompts)]


def sample_dynamically(policy: str, output: Path) -> dict:
    """One batch with dynamic sampling, and two steps on it."""
    config = QuRLConfig(
        **OPTIONS | {"max_steps": 2, "learning_rate": 1e-3}, output_dir=output, dynamic_sampling_max_rounds=8
    )
    tokenizer = tokenizer_of_tiny()
    trainer = ReplayedQuRLTrainer(
        policy, of_one_number, config, train_dataset=DATA, processing_class=tokenizer
    )
    trainer.vllm_generation.generator.manual_seed(trainer.accelerator.process_index + 1)
    batches = []
    sample = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda rows: (batches.append(sample(rows)), batches[-1])[1]
    before = digest(trainer.model.named_parameters())
    trainer.train()
    (batch,) = batches
    drawn = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in trainer.vllm_generation.prompts]
    return {
        "processes": trainer.accelerator.num_processes,
        "rewarded": tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=True),
        "drawn": drawn,
        "advantages": batch["advantages"].tolist(),
        "tokens": batch["completion_mask"].sum().item(),
        "num_items_in_batch": batch["num_items_in_batch"].item(),
        "weights": [before, digest(trainer.model.named_parameters())],
        "metrics": json.loads(history(trainer).iloc[0].dropna().to_json()),
    }


# The same tokens in one process and in two --------------------------------------------------------------------------


class SharedReplay(Replay):
    """Draws completions of several lengths for all processes, and gives each its part."""

    def __init__(self, eos_token_id: int, index: int, count: int):
        super().__init__(eos_token_id, length=8)
        self.index, self.count = index, count

    def generate(self, prompts, *arguments, **options):
        _, completions, logps, ids = super().generate(prompts * self.count, *arguments, **options)
        self.prompts[-1] = prompts
        mine = slice(self.index * len(prompts), (self.index + 1) * len(prompts))
        self.last_rollouts.completion_tokens = sum(map(len, completions[mine]))
        return prompts, completions[mine], logps[mine], ids


class SharedReplayTrainer(QuRLTrainer):
    def _build_generation(self):
        accelerator = self.accelerator
        return SharedReplay(self.eos_token_ids[0], accelerator.process_index, accelerator.num_processes)


class Gradients(TrainerCallback):
    """All gradients before each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.steps.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))


def of_sum(completion_ids, **_):
    """Differs within a group and needs no model."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def train_on_the_same_tokens(policy: str, output: Path, batch_size: int, **options) -> dict:
    """Two batches of 16 completions over all processes, two optimizer steps on each."""
    config = QuRLConfig(**OPTIONS | {"per_device_train_batch_size": batch_size} | options, output_dir=output)
    gradients = Gradients()
    trainer = SharedReplayTrainer(
        policy,
        of_sum,
        config,
        train_dataset=DATA,
        processing_class=tokenizer_of_tiny(),
        callbacks=[gradients],
    )
    trainer.train()
    return {
        "prompts": trainer.vllm_generation.prompts,
        "gradients": torch.stack(gradients.steps),
        "weights": torch.cat([p.detach().flatten() for p in trainer.model.parameters()]),
        "metrics": history(trainer).reset_index().to_dict("list"),
    }


WAYS = {
    "acr": {"epsilon_high": 0.28, "loss_type": "dapo"},
    "acr, sequence mean": {"epsilon_high": 0.28, "loss_type": "grpo"},
    "decoupled, accumulated": {
        "objective": "decoupled", "loss_type": "dapo", "per_device_train_batch_size": 4,
        "steps_per_generation": 2, "gradient_accumulation_steps": 2,
    },
    "tis, reused": {"objective": "tis", "loss_type": "dapo", "num_iterations": 1, "max_steps": 2},
}  # fmt: skip


# Real weights, on their way into an engine without vLLM -------------------------------------------------------------


def trainer_with_engine(policy: str, output: Path, **options) -> QuRLTrainer:
    adapter = options.pop("peft_config", None)
    config = QuRLConfig(**OPTIONS | options, output_dir=output)
    return QuRLTrainer(
        policy, of_sum, config, train_dataset=DATA, processing_class=tokenizer_of_tiny(), peft_config=adapter
    )


def engine_of(trainer: QuRLTrainer) -> FakeEngine:
    return trainer.vllm_generation._engine("int8")


def resume(policy: str, output: Path) -> dict:
    """A run, and the same one resumed at the end of a batch and within one."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    result = {}
    for step in (0, 2, 3):
        trainer = trainer_with_engine(policy, output / f"from{step}", **options)
        held = []
        engine = engine_of(trainer)
        sample = engine.sample

        def noted(*args, engine=engine, sample=sample, held=held, **arguments):
            held.append(digest(engine.tensors.items()))
            return sample(*args, **arguments)

        engine.sample = noted
        checkpoint = output / "from0" / f"checkpoint-{step}" if step else None
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        weights = load_file(checkpoint / "model.safetensors") if checkpoint else {}
        result[str(step)] = {
            "weights": digest(trainer.model.named_parameters()),
            "held": held,
            "checkpoint": codes(weights.items()),
            "logged": history(trainer)[["loss", "grad_norm", "mismatch/kl_k3"]].to_dict("list"),
        }
    return result


def refuse_another_number(policy: str, checkpoint: Path, output: Path) -> str:
    try:
        trainer_with_engine(policy, output).train(resume_from_checkpoint=str(checkpoint))
    except ValueError as error:
        return str(error)
    return "accepted"


def base_weights(model: torch.nn.Module) -> str:
    return digest((name, tensor) for name, tensor in model.named_parameters() if "lora_" not in name)


def train_adapter(policy: str, output: Path) -> dict:
    trainer = trainer_with_engine(policy, output, peft_config=LoraConfig(**LORA))
    before = base_weights(trainer.model)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    merged = copy.deepcopy(trainer.model).merge_and_unload()
    return {
        "base": [before, base_weights(trainer.model)],
        "adapter": digest((n, p) for n, p in trainer.model.named_parameters() if "lora_" in n),
        "engine": digest(engine_of(trainer).tensors.items()),
        "merged": codes(merged.named_parameters()),
        "still_merged": any(getattr(module, "merged_adapters", None) for module in trainer.model.modules()),
    }


def process_under_fsdp() -> SimpleNamespace:
    """What is needed of an accelerator that has FSDP2 on: accelerate itself has it on accelerators alone."""
    state = torch.distributed

    def reduce(tensor, reduction):
        state.all_reduce(tensor)
        return tensor

    return SimpleNamespace(
        process_index=state.get_rank(),
        num_processes=state.get_world_size(),
        device=torch.device("cpu"),
        wait_for_everyone=state.barrier,
        reduce=reduce,
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=SimpleNamespace(fsdp_version=2)),
    )


def shard(with_adapter: bool) -> dict:
    """Syncs of a sharded model before and after an optimizer step, beside those of a whole one."""
    tokenizer = tokenizer_of_tiny()
    ids = torch.arange(5, 21).view(2, 8)
    result = {"sharded": [], "whole": []}

    def model():
        torch.manual_seed(0)
        policy = make_policy(tokenizer)
        return get_peft_model(policy, LoraConfig(**LORA)) if with_adapter else policy

    def step(policy):
        trained = [p for p in policy.parameters() if p.requires_grad]
        torch.optim.SGD(trained, lr=0.5).step(policy(input_ids=ids, labels=ids).loss.backward())

    whole, sharded = model(), model()
    accelerator = process_under_fsdp()
    generation_of = partial(
        QuantizedVLLMGeneration, dtype="int8", code_bits=8, eval_dtype="same", bf16_weights=False, check=True,
        stop_token_ids=[2], seed=0, max_completion_length=8, logprobs=0, processing_class=tokenizer,
    )  # fmt: skip
    made = generation_of(model=sharded, accelerator=accelerator)
    inner = sharded.get_base_model() if with_adapter else sharded
    for layer in inner.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    result["own_share"] = sum(p.to_local().numel() for p in sharded.parameters())
    result["all"] = sum(p.numel() for p in sharded.parameters())
    before = [
        (name, p.full_tensor().clone()) for name, p in sharded.named_parameters() if "lora_" not in name
    ]
    for _ in range(2):
        made.sync_weights()
        result["sharded"].append(digest(made._engine("int8").tensors.items()))
        reference = copy.deepcopy(whole).merge_and_unload() if with_adapter else whole
        result["whole"].append(codes(reference.named_parameters()))
        if with_adapter:
            after = dict(sharded.named_parameters())
            assert all(torch.equal(after[name].full_tensor(), tensor) for name, tensor in before)
        step(whole)
        step(sharded)
    result["verdicts"] = [verdict_on(sharded, accelerator)]
    if accelerator.process_index:
        spoiled = [p for p in sharded.parameters() if p.requires_grad][-1]
        spoiled.detach().to_local().fill_(torch.nan)
    result["verdicts"].append(verdict_on(sharded, accelerator))
    return result


def verdict_on(policy: torch.nn.Module, accelerator) -> str:
    try:
        require_finite_policy(policy, accelerator, 2, 0.5, None)
    except TrainingError as error:
        return str(error)
    return "finite"


# Evaluation ---------------------------------------------------------------------------------------------------------


class Guesser:
    """Stands in for the engine: answers every problem with a number of its own."""

    model, dtype, code_bits, max_num_seqs, description = "stand-in", "int8", 8, 4, {"hardware": "none"}

    def __init__(self):
        self.path, self.tokenizer, self.asked = resolve_model("tiny"), tokenizer_of_tiny(), 0

    def generate(self, prompt_ids, n, max_tokens, temperature):
        self.asked += len(prompt_ids)
        ids = [self.tokenizer(str(sample))["input_ids"] for _ in prompt_ids for sample in range(n)]
        return SimpleNamespace(
            completion_ids=ids, finish_reasons=["stop"] * len(ids), seconds=1.0, completion_tokens=len(ids)
        )


def judge(output: Path) -> dict:
    """Case V04, a number of problems that both processes do not share evenly, and one less than processes."""
    rank = torch.distributed.get_rank()
    result = {}
    for problems in (16, 15, 1):
        task, engine = load_task("arithmetic", "test", n=problems), Guesser()
        evaluations = [
            evaluate(
                engine, task, 4, output=output / str(problems), shard=(rank, 2), gather=gather_object
            )
            for _ in range(2)
        ]  # fmt: skip
        first, again = evaluations
        result[str(problems)] = {
            "asked": engine.asked,
            "pairs": first.samples[["id", "sample"]].to_numpy().tolist(),
            "wanted": [[id, sample] for id in task.dataset["id"] for sample in range(4)],
            "complete": first.complete and again.complete,
            "same": first.scores == again.scores,
        }
    return result


def main(policy: str, output: str, of_one_process: str) -> None:
    # A collective that waits for ever shows where, and ends its process; torch's launcher then ends the other one.
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    generation.CountingEngine = FakeEngine
    folder = Path(output)
    result = {
        "dynamic": sample_dynamically(policy, folder),
        "resumed": resume(policy, folder),
        "refused": refuse_another_number(policy, Path(of_one_process), folder),
        "adapter": train_adapter(policy, folder),
        "sharded": shard(with_adapter=False),
        "sharded_adapter": shard(with_adapter=True),
        "evaluated": judge(folder / "evaluations"),
    }
    rank = torch.distributed.get_rank()
    replayed = {way: train_on_the_same_tokens(policy, folder, 8, **options) for way, options in WAYS.items()}
    torch.save(replayed, folder / f"rank{rank}.pt")
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
