"""One training run from a model's name and a task's: what ``qurl train`` and the notebooks call.

A run is a folder: ``config.yaml`` (what was asked for), ``metrics.csv`` (a row per logged step), ``result.json``
(accuracy before and after, timings, provenance; written last), ``samples-*/`` (the completions behind the accuracies),
checkpoints, and ``policy/``, the trained model. A run that was stopped goes on from its last complete checkpoint, a
finished one is read.
"""

import dataclasses
import json
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import TrlParser

from qurl.config import QuRLConfig
from qurl.diagnostics import history
from qurl.evaluation import Evaluation, bootstrap_interval, evaluate, load_evaluation, write_whole
from qurl.models import resolve_model
from qurl.notebook import provenance
from qurl.rollout import RolloutEngine, RolloutError
from qurl.tasks import Task, load_task
from qurl.trainer import QuRLTrainer, TrainingError, last_complete_checkpoint

logger = logging.getLogger(__name__)

# For the embedded model on three-digit sums; a larger model brings its own lengths, batch and learning rate.
TINY_DEFAULTS = {
    "max_steps": 1000,
    "per_device_train_batch_size": 64,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_completion_length": 8,
    "vllm_max_model_length": 32,
    "learning_rate": 3e-5,
    "lr_scheduler_type": "constant",
    "epsilon_high": 0.28,
    "loss_type": "dapo",
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_steps": 200,
    "save_total_limit": 1,
    "report_to": "none",
}


@dataclass
class RunArguments:
    """What a run trains, and how it is judged.

    Parameters:
        model (`str`, *optional*, defaults to `"tiny"`):
            Embedded model, folder or hub id.
        task (`str`, *optional*, defaults to `"arithmetic"`):
            See `qurl.tasks.load_task`.
        task_options (`dict` or `str`, *optional*):
            Options of the task, also as JSON: `'{"digits": 2, "chat": true}'`.
        eval_options (`dict` or `str`, *optional*):
            Options of the held-out task where they differ from `task_options`.
        eval_k (`int`, *optional*, defaults to `1`):
            Samples per held-out problem before and after training; 0 leaves both evaluations out.
        eval_temperature (`float`, *optional*, defaults to `1.0`):
            Of these samples, which BF16 rollouts draw whatever the dtype of training.
    """

    model: str = field(default="tiny", metadata={"help": "Embedded model, folder or hub id."})
    task: str = field(default="arithmetic", metadata={"help": "Name of the task."})
    task_options: dict | str | None = field(default=None, metadata={"help": "Options of the task, as JSON."})
    eval_options: dict | str | None = field(
        default=None, metadata={"help": "Options of the held-out task where they differ, as JSON."}
    )
    eval_k: int = field(
        default=1, metadata={"help": "Samples per held-out problem before and after; 0: none."}
    )
    eval_temperature: float = field(default=1.0, metadata={"help": "Temperature of these samples."})

    def __post_init__(self):
        self.task_options = _options("task_options", self.task_options)
        self.eval_options = _options("eval_options", self.eval_options)
        if self.eval_k < 0:
            raise ValueError(f"eval_k={self.eval_k} is not possible: use 0 for none, or a number of samples.")


def _options(name: str, value: dict | str | None) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = ()
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} is not possible: give a JSON object such as '{{\"digits\": 2}}'.")
    return value or {}


class ProgressLines(TrainerCallback):
    """A line every ten seconds, for papermill's log and for terminals: step, reward, mismatch, time left."""

    def __init__(self, seconds: float = 10.0):
        self.seconds = seconds
        self._last = self._start = self._first_step = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self._start, self._first_step = time.monotonic(), state.global_step
        self._last = self._start

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Report, if the last line is long enough ago."""
        now = time.monotonic()
        if not logs or "reward" not in logs or now - self._last < self.seconds:
            return
        self._last = now
        done = state.global_step - self._first_step
        left = (now - self._start) / max(done, 1) * (state.max_steps - state.global_step)
        kl = logs.get("mismatch/kl_k3")
        mismatch = "" if kl is None else f", KL(behav‖prox) {kl:.2g}"
        logger.info(
            "step %d of %d: reward %.3f%s, %.0f s left",
            state.global_step,
            state.max_steps,
            logs["reward"],
            mismatch,
            left,
        )


class MetricsFile(TrainerCallback):
    """``metrics.csv`` beside each checkpoint, so that a stopped run can be looked at."""

    def on_save(self, args, state, control, **kwargs):
        """Write the history so far."""
        if state.is_world_process_zero:
            write_whole(Path(args.output_dir) / "metrics.csv", history(state.log_history).to_csv())


def train(
    run: RunArguments, config: QuRLConfig, callbacks: list[TrainerCallback] | None = None
) -> dict[str, Any]:
    """Train a policy and measure its held-out accuracy before and after.

    Parameters
    ----------
    run : RunArguments
    config : QuRLConfig
        ``output_dir`` is the folder of the run.
    callbacks : list of transformers.TrainerCallback, optional

    Returns
    -------
    dict
        What ``result.json`` holds.

    Raises
    ------
    ValueError
        For anything that is not possible, before the engine starts; also where the folder holds another run.
    """
    if config.world_size > 1:
        raise ValueError(
            "qurl train runs in one process: use QuRLTrainer in a script of your own for several."
        )
    folder = Path(config.output_dir)
    asked = _asked(run, config)
    finished = folder / "result.json"
    _same_run(folder, asked)
    if finished.is_file():
        logger.info("%s is finished: it is read and not repeated.", folder)
        return json.loads(finished.read_text())

    path = resolve_model(run.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    task = load_task(run.task, "train", **run.task_options)
    task.self_check(tokenizer)
    held_out = load_task(run.task, "test", **{**run.task_options, **run.eval_options}) if run.eval_k else None

    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", yaml.safe_dump(asked, sort_keys=False))
    trainer = QuRLTrainer(
        str(path),
        task.reward_functions(),
        config,
        train_dataset=task.dataset,
        processing_class=tokenizer,
        callbacks=[ProgressLines(), MetricsFile(), *(callbacks or [])],
    )
    trainer.remove_callback(PrinterCallback)
    try:
        scores = {}
        if held_out:
            scores["before"] = _judge(trainer, held_out, run, config, folder / "samples-before")
        start = time.perf_counter()
        checkpoint = last_complete_checkpoint(folder)
        trainer.train(resume_from_checkpoint=checkpoint)
        seconds = time.perf_counter() - start
        if trainer.state.global_step < trainer.state.max_steps:
            raise TrainingError(
                f"training stopped at step {trainer.state.global_step} of {trainer.state.max_steps}, with a "
                f"checkpoint in {folder}: the log above says why."
            )
        trainer.save_model(str(folder / "policy"))
        if held_out:
            scores["after"] = _judge(trainer, held_out, run, config, folder / "samples-after")
        table = history(trainer)
        result = {
            "run": asked,
            "accuracy": _accuracy(scores),
            "steps": trainer.state.global_step,
            "seconds": seconds,
            "resumed": checkpoint is not None,
            "engine": trainer.vllm_generation.description | {"model": run.model},
            "task": task.provenance,
            **provenance(seed=config.seed),
        }
    finally:
        trainer.close()
    if trainer.accelerator.is_main_process:
        write_whole(folder / "metrics.csv", table.to_csv())
        write_whole(finished, json.dumps(result, indent=2, default=str) + "\n")
    return result


def _asked(run: RunArguments, config: QuRLConfig) -> dict[str, Any]:
    """The run's parameters that differ from the defaults, without its place."""
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config)
    }
    values = json.loads(json.dumps(config.to_dict(), default=str))
    changed = {
        name: value
        for name, value in values.items()
        if name not in _PLACE_AND_DERIVED and value != defaults.get(name, value)
    }
    return {**dataclasses.asdict(run), **changed}


_PLACE_AND_DERIVED = {
    "output_dir",
    "logging_dir",
    "generation_batch_size",
    "use_cpu",
    "run_name",
    "disable_tqdm",
    "hub_token",
    "dataloader_pin_memory",
    "report_to",
    "include_for_metrics",
    "debug",
    "pad_to_multiple_of",
}


def _same_run(folder: Path, asked: dict[str, Any]) -> None:
    """Raise where the folder holds a run with other parameters."""
    file = folder / "config.yaml"
    if not file.is_file():
        return
    there = yaml.safe_load(file.read_text())
    differing = [name for name in sorted(asked.keys() | there.keys()) if asked.get(name) != there.get(name)]
    if differing:
        name = differing[0]
        raise ValueError(
            f"output_dir={str(folder)!r} holds a run with {name}={there.get(name)!r}, not {asked.get(name)!r}: choose "
            "another folder."
        )


def _judge(
    trainer: QuRLTrainer, task: Task, run: RunArguments, config: QuRLConfig, output: Path
) -> Evaluation:
    """Sampled accuracy of the trainer's policy in BF16: the same judge for every rollout dtype."""
    if (output / "result.json").is_file():
        return load_evaluation(output)
    shutil.rmtree(output, ignore_errors=True)  # a stopped evaluation was of an engine that is gone
    generation = trainer.vllm_generation
    with RolloutEngine(
        generation.folder,
        "bf16",
        max_model_len=config.vllm_max_model_length,
        max_num_seqs=256,
        seed=config.seed,
        load_weights=False,
    ) as engine:
        with generation.named_params() as parameters:
            engine.sync(parameters)
        return evaluate(
            engine,
            task,
            run.eval_k,
            max_tokens=config.max_completion_length,
            temperature=run.eval_temperature,
            output=output,
            seed=config.seed,
            tokenizer=trainer.processing_class,
        )


def _accuracy(evaluations: dict[str, Evaluation]) -> dict[str, Any]:
    """Mean accuracy before and after and the gain, each with its 95 % interval over problems."""
    if not evaluations:
        return {}
    per_problem = {
        name: evaluation.samples.groupby("id", sort=False)["correct"].mean().astype(float)
        for name, evaluation in evaluations.items()
    }
    # The same problems before and after: the gain is paired, which makes its interval narrower.
    per_problem["gain"] = per_problem["after"] - per_problem["before"]
    scores = {}
    for name, values in per_problem.items():
        low, high = bootstrap_interval([values.to_numpy()])
        scores[name] = {"mean": float(values.mean()), "interval": [float(low), float(high)]}
    return {"problems": len(values), **scores}


class _Parser(TrlParser):
    """TRL's parser, which reports a mistake in one line, without the usage of all options in front of it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: list[str]) -> int:
    """``qurl train``: the fields of `RunArguments` and `QuRLConfig` as options, also from ``--config FILE.yaml``.

    Returns
    -------
    int
        Exit status: 0 success, 1 when training could not go on.
    """
    parser = _Parser([RunArguments, QuRLConfig], prog="qurl train")
    parser.set_defaults(**TINY_DEFAULTS)
    if "--output_dir" not in argv and "--config" not in argv:
        parser.set_defaults(output_dir="runs/train")
    run, config = parser.parse_args_and_config(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        result = train(run, config)
    except (TrainingError, RolloutError) as error:
        print(f"qurl train: {error}", file=sys.stderr)
        return 1
    print(summary(result, config.output_dir))
    return 0


def summary(result: dict[str, Any], folder: str | os.PathLike) -> str:
    """A run in a few lines."""
    lines = [f"{result['steps']} steps in {result['seconds']:.0f} s, {folder}"]
    for name in ("before", "after", "gain"):
        if score := result["accuracy"].get(name):
            low, high = (100 * bound for bound in score["interval"])
            lines.append(
                f"{name:>6}: {100 * score['mean']:.1f} % ({low:.1f} to {high:.1f}) of held-out samples"
            )
    return "\n".join(lines)
