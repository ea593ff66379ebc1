"""Weight updates of a real RL step against quantization error, with and without UAQ.

Figs. 4 and 9 of QuRL (arXiv 2602.13953); `qurl.experiments.update_claims` judges what is measured here. One
generation batch is sampled from the 8-bit copy of the policy. Then `qurl.trainer.QuRLTrainer` takes the same few
optimizer steps on it for every UAQ scale s and for SGD and AdamW, each time from the same start, in FP32:

    settings = config.settings()
    batch = sample_batch(settings)
    updates = measure_updates(settings, batch)

**One batch for all.** UAQ leaves the policy's function as it is, but to rounding only: a scale that is no power of two
moves the codes that lie on a tie, and one code suffices to part two samples. So the completions are recorded at s = 1
and replayed to every arm; `Batch.resampled` says how many would have come out the same, and how many codes moved.

**Steps.** AdamW with bias correction moves every weight by α·sign(G) in its first step, whatever the gradient's size.
The batch is therefore cut into several mini-batches, as in the paper's DAPO runs, and besides the first step the change
over all of them is reported: what the quantized policy sees at its next sync.

**Rates.** The paper argues with α = 1e-6 and G = 0.1 to 1. Where G is smaller, an SGD step of α = 1e-6 is lost in
the rounding of FP32 (`Updates.gradients` has the share), so SGD gets a rate of its own; gains do not depend on it.

Nothing is clipped or decayed: `qurl.uaq` says why the equality with learning rates ends there.
"""

import hashlib
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pydantic
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from qurl.config import QuRLConfig
from qurl.files import write_whole
from qurl.models import resolve_model
from qurl.notebook import Parameters, provenance
from qurl.quantization import is_quantized_name
from qurl.rollout import RolloutEngine, Rollouts
from qurl.tasks import Task, load_task
from qurl.trainer import QuRLTrainer
from qurl.uaq import apply_uaq, uaq_parameter_groups
from qurl.update_noise import snapshot, update_to_noise

OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}
DTYPES = ("int8", "fp8")
FIRST, BATCH = "first step", "whole batch"
LINEARS, OTHERS, NORMS = "q/k/v, gate/up", "o, down", "norms in front"
_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Settings:
    """What is measured: a preset, with the values that a user gave instead of its own.

    Attributes
    ----------
    model, task : str
    task_options : dict
        See `qurl.tasks.load_task`, but for ``n``, ``seed`` and ``split``; those of a preset are for its own task.
    scales : tuple of float
        UAQ's s; the first is 1, against which gains are taken.
    dtype : {"int8", "fp8"}
        Of the rollouts. Updates are compared with the error of both formats.
    learning_rate, sgd_learning_rate : float
        α of AdamW (the paper's), and of SGD.
    steps : int
        Optimizer steps on the batch.
    batch_size : int
        Completions per optimizer step.
    micro_batch_size : int
        Completions per forward pass.
    num_generations : int
        Completions per prompt.
    max_completion_length : int
    gradient_checkpointing : bool
    seed : int

    Raises
    ------
    ValueError
        If ``task_options`` holds what the other settings decide.
    """

    model: str
    task: str
    task_options: dict[str, Any]
    scales: tuple[float, ...]
    steps: int
    batch_size: int
    micro_batch_size: int
    num_generations: int
    max_completion_length: int
    gradient_checkpointing: bool = False
    dtype: str = "int8"
    learning_rate: float = 1e-6
    sgd_learning_rate: float = 1e-2
    seed: int = 0

    def __post_init__(self):
        decided = {
            "n": "steps, batch_size and num_generations say how many problems are used",
            "seed": "the setting seed is the task's as well",
            "split": "problems are those of the split 'train'",
        }
        for name, reason in decided.items():
            if name in self.task_options:
                raise ValueError(
                    f"task_options[{name!r}]={self.task_options[name]!r} is not possible: leave it out, as {reason}."
                )


_SCALES = (1.0, 1.25, 1.5, 2.0)
PRESETS = {
    "smoke": Settings("tiny", "arithmetic", {"digits": 3}, (1.0, 1.5), 2, 16, 16, 8, 8),
    "cpu": Settings("smollm2-135m", "arithmetic", {"digits": 2, "chat": True}, _SCALES, 4, 12, 12, 8, 24),
    # Model and task of Table 3; batch and lengths are our choice. Weights, gradients and moments of 1.5B parameters
    # take 24 GiB of the GPU in FP32.
    "paper": Settings(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepscaler", {}, _SCALES, 8, 128, 4, 8, 8192, True
    ),
}


class WeightUpdateConfig(Parameters):
    """Parameters of ``pipelines/fig_weight_update.ipynb``; what is left empty or 0 comes from the preset."""

    dtype: Literal[DTYPES] = pydantic.Field(examples=["int8"])
    model: str = pydantic.Field(examples=["smollm2-135m"])
    task: str = pydantic.Field(examples=["arithmetic"])
    learning_rate: float = pydantic.Field(gt=0, le=1e-2, allow_inf_nan=False, examples=["1e-6"])
    sgd_learning_rate: float = pydantic.Field(gt=0, le=1, allow_inf_nan=False, examples=["1e-2"])
    steps: int = pydantic.Field(ge=0, le=64, examples=["6"])
    preset: Literal[tuple(PRESETS)] = pydantic.Field(examples=["cpu"])
    seed: int = pydantic.Field(ge=0, lt=2**31, examples=["0"])
    output_dir: str = pydantic.Field(examples=["runs/weight_update"])

    def settings(self) -> Settings:
        """The preset's, with what was given in place of its own."""
        preset = PRESETS[self.preset]
        given = self.model_dump(exclude={"preset", "output_dir"})
        given = {name: value for name, value in given.items() if value or name == "seed"}
        if given.get("task", preset.task) != preset.task:
            given["task_options"] = {}
        return replace(preset, **given)

    def run_name(self) -> str:
        """Name of the folder for results: runs that measure something else never share one."""
        settings, preset = self.settings(), PRESETS[self.preset]
        labels = {
            "task": "",
            "learning_rate": "lr",
            "sgd_learning_rate": "sgd",
            "steps": "steps",
            "seed": "seed",
        }
        changed = [
            f"{label}{getattr(settings, name)}"
            for name, label in labels.items()
            if getattr(settings, name) != getattr(preset, name)
        ]
        return "-".join([self.preset, settings.model, settings.dtype, *changed])


@dataclass(frozen=True)
class Batch:
    """One generation batch, sampled at s = 1.

    Attributes
    ----------
    task : qurl.tasks.Task
        Its dataset holds the prompts of the batch and no others.
    prompts : list of list of int
    rollouts : qurl.rollout.Rollouts
        ``num_generations`` completions of each prompt.
    resampled : pandas.DataFrame
        Per s: ``equal_completions``, the share of completions that an engine with the scaled weights samples token for
        token with the same random numbers; ``codes_moved_int8`` and ``codes_moved_fp8``, shares of codes that the
        scaling itself changed (ties).
    engine : dict
        Description of the engine.
    """

    task: Task
    prompts: list[list[int]]
    rollouts: Rollouts
    resampled: pd.DataFrame
    engine: dict[str, Any]


@dataclass(frozen=True)
class Updates:
    """What `measure_updates` returns; sizes are root mean squares over a weight's elements.

    Attributes
    ----------
    layers : pandas.DataFrame
        A row per ``optimizer``, ``s``, ``window`` (first step, or whole batch), ``dtype`` and ``layer``:
        ``projection``, ``depth`` (of the decoder layer), ``weights`` (whether UAQ scales it), ``codes``,
        ``weight_rms``, ``update_rms``, ``function_update_rms`` (the update in terms of the unscaled weight),
        ``error_rms``, ``update_to_error``, ``update_to_step``, ``codes_changed`` (see `qurl.update_noise`).
    norms : pandas.DataFrame
        The same sizes of the norms in front of scaled layers, without what is quantized.
    gradients : pandas.DataFrame
        A row per ``s`` and ``layer``: ``gradient_rms`` of the first step, and ``sgd_unmoved``, the share of its
        weights that an SGD step at AdamW's rate would leave as they are in FP32.
    steps : pandas.DataFrame
        A row per ``optimizer``, ``s`` and optimizer ``step``: ``reward`` (mean over the batch), ``gradient_norm``, and
        ``update_rms`` over all quantized weights.
    magnitudes : dict
        Quantiles 5, 50 and 95 % of the absolute values of the unscaled projections' weights.
    """

    layers: pd.DataFrame
    norms: pd.DataFrame
    gradients: pd.DataFrame
    steps: pd.DataFrame
    magnitudes: dict[str, float]


def _scaled_copy(settings: Settings, s: float):
    model = AutoModelForCausalLM.from_pretrained(resolve_model(settings.model), dtype=torch.float32)
    apply_uaq(model, s)
    return model


def sample_batch(settings: Settings, report: Callable[[str], None] | None = None) -> Batch:
    """Sample the generation batch from the quantized policy, and once more from every scaled one.

    Parameters
    ----------
    settings : Settings
    report : callable, optional
        Gets a line of progress now and then.

    Returns
    -------
    Batch
    """
    say = report or (lambda line: None)
    path = resolve_model(settings.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    completions = settings.steps * settings.batch_size
    count = completions // settings.num_generations
    task = load_task(settings.task, "train", n=count, seed=settings.seed, **settings.task_options)
    task.self_check(tokenizer)
    prompts = [task.render(row, tokenizer) for row in task.dataset]
    base = _scaled_copy(settings, 1.0)
    first, rows = None, []
    with RolloutEngine(
        path,
        settings.dtype,
        max_model_len=max(map(len, prompts)) + settings.max_completion_length,
        max_num_seqs=min(completions, 256),
        seed=settings.seed,
        load_weights=False,
    ) as engine:
        for s in settings.scales:
            model = base if s == 1 else _scaled_copy(settings, s)
            engine.sync(model.named_parameters())
            engine.reseed(settings.seed)
            rollouts = engine.generate(
                prompts,
                n=settings.num_generations,
                max_tokens=settings.max_completion_length,
                temperature=_TEMPERATURE,
            )
            first = first or rollouts
            pairs = zip(first.completion_ids, rollouts.completion_ids, strict=True)
            row = {"s": s, "equal_completions": sum(a == b for a, b in pairs) / completions}
            for dtype in DTYPES:
                moved = 0.0
                if model is not base:
                    moved = update_to_noise(
                        snapshot(base.named_parameters()), model.named_parameters(), dtype
                    )
                    moved = moved.total["codes_changed"]
                row[f"codes_moved_{dtype}"] = moved
            rows.append(row)
            say(f"s = {s}: {row['equal_completions']:.0%} of {completions} completions as at s = 1")
        description = engine.description | {
            "model": settings.model
        }  # not the folder, which is of this machine
    return Batch(task, prompts, first, pd.DataFrame(rows), description)


class RecordedRollouts:
    """A trainer's generation backend that hands out the recorded completions of each prompt, in their order.

    It has the methods of `qurl.rollout.generation.QuantizedVLLMGeneration` that a trainer calls.

    Parameters
    ----------
    batch : Batch
    num_generations : int
    dtype : {"int8", "fp8"}
        Of the engine that sampled.
    """

    def __init__(self, batch: Batch, num_generations: int, dtype: str):
        self.dtype = self.train_dtype = dtype
        self.last_sync, self.last_rollouts = None, batch.rollouts
        self._left = defaultdict(list)
        for index, completion in enumerate(batch.rollouts.completion_ids):
            prompt = batch.prompts[index // num_generations]
            self._left[tuple(prompt)].append((completion, batch.rollouts.logps[index]))

    def begin(self, *, training: bool, stream: tuple[int, ...]) -> None:
        """Nothing is drawn here."""

    def sync_weights(self) -> None:
        """The policy that sampled is the recorded one."""

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """As `QuantizedVLLMGeneration.generate`; each completion is handed out once.

        Raises
        ------
        KeyError, IndexError
            If a prompt is none of the batch's, or its completions are used up.
        """
        recorded = [self._left[tuple(prompt)].pop(0) for prompt in prompts]
        ids = [completion for completion, _ in recorded]
        logps = [[[logp] for logp in values] for _, values in recorded]
        return prompts, ids, logps, [[[token] for token in completion] for completion in ids]

    def close(self) -> None:
        """There is no engine to free."""


class _RecordedTrainer(QuRLTrainer):
    """A trainer that replays a batch; everything but the engine is the real one."""

    def __init__(self, batch: Batch, *args, **options):
        self._batch = batch
        super().__init__(*args, **options)

    def _build_generation(self):
        return RecordedRollouts(self._batch, self.args.num_generations, self.args.rollout_dtype)


class _Watch(TrainerCallback):
    """Compares the weights with those before training, after the first and after the last optimizer step."""

    def __init__(self, roles: dict[str, str], s: float, rate: float):
        self.roles, self.s, self.rate = roles, s, rate
        self.layers, self.norms, self.gradients, self.steps = [], [], [], []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Keep the weights as they are before the first step."""
        self._start = snapshot(model.named_parameters())
        self._before = snapshot(model.named_parameters())
        self._start_norms = {n: p.detach().clone() for n, p in model.named_parameters() if self._is_norm(n)}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Sizes of the gradients."""
        squares = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None])
        self.steps.append({"step": state.global_step + 1, "gradient_norm": squares.sum().sqrt().item()})
        if state.global_step:
            return
        for name, weight in model.named_parameters():
            if is_quantized_name(name):
                unmoved = (weight.detach() - self.rate * weight.grad == weight).float().mean()
                self.gradients.append(
                    {"layer": name, "gradient_rms": _rms(weight.grad), "sgd_unmoved": unmoved.item()}
                )

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Sizes of the update."""
        squares, codes = 0.0, 0
        for name, weight in model.named_parameters():
            if name in self._before:
                squares += (weight - self._before[name].to(weight.device)).double().square().sum().item()
                codes += weight.numel()
        self._before = snapshot(model.named_parameters(), into=self._before)
        self.steps[-1]["update_rms"] = (squares / codes) ** 0.5
        if state.global_step == 1:
            self._compare(FIRST, model)
        if state.global_step == state.max_steps:
            self._compare(BATCH, model)

    def _is_norm(self, name: str) -> bool:
        return self.roles.get(name) == NORMS

    def _compare(self, window: str, model) -> None:
        in_function = {LINEARS: self.s, NORMS: 1 / self.s, OTHERS: 1.0}
        weight_rms = {name: _rms(weight) for name, weight in self._start.items()}
        for dtype in DTYPES:
            table = update_to_noise(self._start, model.named_parameters(), dtype).layers.reset_index()
            size = table["codes"] ** 0.5
            roles = table["layer"].map(self.roles)
            table.insert(0, "window", window)
            table.insert(1, "dtype", dtype)
            table.insert(3, "weights", roles)
            table["weight_rms"] = table["layer"].map(weight_rms)
            table["update_rms"] = table.pop("update_norm") / size
            table["error_rms"] = table.pop("error_norm") / size
            table["function_update_rms"] = table["update_rms"] * roles.map(in_function)
            self.layers.append(table)
        for name, start in self._start_norms.items():
            update = _rms(model.get_parameter(name).detach() - start)
            row = {"window": window, "layer": name, "weights": NORMS, "weight_rms": _rms(start)}
            self.norms.append(
                row | {"update_rms": update, "function_update_rms": update * in_function[NORMS]}
            )


def _rms(tensor: torch.Tensor) -> float:
    return (tensor.double().square().mean().sqrt()).item()


def _roles(model) -> dict[str, str]:
    """Which weights UAQ scales, which norms it scales inversely, and which quantized weights it leaves alone."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    roles = {name: OTHERS for name in names.values() if is_quantized_name(name)}
    for group in uaq_parameter_groups(model, learning_rate=1.0, scale=2.0):
        role = {"uaq_linears": LINEARS, "uaq_norms": NORMS}.get(group["name"])
        if role:
            roles |= {names[id(parameter)]: role for parameter in group["params"]}
    return roles


def measure_updates(
    settings: Settings,
    batch: Batch,
    report: Callable[[str], None] | None = None,
    finished: Path | None = None,
) -> Updates:
    """Take the same optimizer steps for every s with SGD and AdamW, and compare them with the quantization error.

    Parameters
    ----------
    settings : Settings
    batch : Batch
    report : callable, optional
        Gets a line of progress per arm.
    finished : pathlib.Path, optional
        Folder in which finished arms are kept, so that a measurement that was stopped goes on where it was: an arm is
        taken from there if settings, batch and commit are the same. The caller removes it when all is saved.

    Returns
    -------
    Updates
    """
    say = report or (lambda line: None)
    key = _fingerprint(settings, batch)
    base = _scaled_copy(settings, 1.0)
    roles, magnitudes = _roles(base), _magnitudes(base, settings.seed)
    del base
    tables: dict[str, list[pd.DataFrame]] = defaultdict(list)
    arms = [(optimizer, s) for optimizer in OPTIMIZERS for s in settings.scales]
    for index, (optimizer, s) in enumerate(arms):
        started = time.perf_counter()
        kept = finished / f"{optimizer}-s{s}-{key}.json" if finished else None
        if reused := bool(kept and kept.is_file()):
            frames = {name: pd.DataFrame(columns) for name, columns in json.loads(kept.read_text()).items()}
        else:
            frames = _arm_tables(settings, batch, optimizer, s, roles)
            if kept:
                finished.mkdir(parents=True, exist_ok=True)
                # JSON keeps every float as it is.
                write_whole(kept, json.dumps({name: frame.to_dict("list") for name, frame in frames.items()}))
        keys = {"optimizer": optimizer, "s": s}
        for name, frame in frames.items():
            tables[name].append(frame.assign(**keys)[[*keys, *frame.columns]])
        took = "finished before" if reused else f"{time.perf_counter() - started:.0f} s"
        say(f"[{index + 1}/{len(arms)}] {optimizer}, s = {s}: {took}")
    tables = {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}
    layers = tables["layers"]
    layers.insert(5, "depth", layers["layer"].str.extract(r"layers\.(\d+)\.", expand=False).astype(int))
    layers.insert(6, "projection", layers["layer"].str.extract(r"(\w+)\.weight$", expand=False))
    return Updates(**tables, magnitudes=magnitudes)


def _fingerprint(settings: Settings, batch: Batch) -> str:
    """Of all that an arm's numbers follow from, the code included."""
    sampled = (
        batch.prompts,
        batch.rollouts.completion_ids,
        [list(map(float, row)) for row in batch.rollouts.logps],
    )
    known = (asdict(settings), sampled, provenance()["git_commit"])
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _arm_tables(
    settings: Settings, batch: Batch, optimizer: str, s: float, roles: dict[str, str]
) -> dict[str, pd.DataFrame]:
    """The tables of `Updates` for one arm."""
    watch, reward = _train_arm(settings, batch, optimizer, s, roles)
    tables = {
        "layers": pd.concat(watch.layers),
        "norms": pd.DataFrame(watch.norms),
        "steps": pd.DataFrame(watch.steps).assign(reward=reward),
    }
    if optimizer == "sgd":  # the gradients of the first step are those of all optimizers
        tables["gradients"] = pd.DataFrame(watch.gradients)
    return tables


def _train_arm(
    settings: Settings, batch: Batch, optimizer: str, s: float, roles: dict[str, str]
) -> tuple[_Watch, float]:
    watch = _Watch(roles, s, settings.learning_rate)
    accumulation = settings.batch_size // settings.micro_batch_size
    path = str(resolve_model(settings.model))
    with tempfile.TemporaryDirectory(prefix="qurl-weight-update-") as folder:
        config = QuRLConfig(
            output_dir=folder,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.micro_batch_size,
            gradient_accumulation_steps=accumulation,
            # All optimizer steps are on one generation batch.
            steps_per_generation=settings.steps * accumulation,
            num_generations=settings.num_generations,
            max_completion_length=settings.max_completion_length,
            temperature=_TEMPERATURE,
            rollout_dtype=settings.dtype,
            uaq_scale=s,
            optim=OPTIMIZERS[optimizer],
            learning_rate=settings.sgd_learning_rate if optimizer == "sgd" else settings.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            epsilon_high=0.28,
            loss_type="dapo",
            bf16=False,
            gradient_checkpointing=settings.gradient_checkpointing,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=settings.seed,
        )
        trainer = _RecordedTrainer(
            batch,
            path,
            batch.task.reward_functions(),
            config,
            train_dataset=batch.task.dataset,
            processing_class=AutoTokenizer.from_pretrained(path),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            trainer.close()
        reward = next(row["reward"] for row in trainer.state.log_history if "reward" in row)
    return watch, reward


def _magnitudes(model, seed: int) -> dict[str, float]:
    """Quantiles of |W| over a million of the projections' weights, drawn evenly."""
    weights = [p.detach().flatten() for name, p in model.named_parameters() if is_quantized_name(name)]
    total = sum(map(len, weights))
    stride = max(1, total // 1_000_000)
    offset = random.Random(seed).randrange(stride)
    drawn = torch.cat([weight[offset::stride] for weight in weights]).abs()
    # A million, not more: torch.quantile takes at most 16 million values.
    levels = torch.tensor([0.05, 0.5, 0.95])
    low, median, high = torch.quantile(drawn, levels).tolist()
    return {"low": low, "median": median, "high": high}
