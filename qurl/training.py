"""One training run from a model's name and a task's: what ``qurl train`` and the notebooks call.

A run is a folder: ``config.yaml`` (what was asked for), ``metrics.csv`` (a row per logged step), ``result.json``
(accuracy before and after, timings, provenance; written last), ``samples-*/`` (the completions behind the accuracies),
checkpoints, and ``policy/``, the trained model. A run that was stopped goes on from its last complete checkpoint, a
finished one is read. Of several processes the main one writes them.
"""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PrinterCallback, TrainerCallback
from trl import TrlParser

from qurl.arguments import number, whole_number
from qurl.config import QuRLConfig
from qurl.diagnostics import history
from qurl.evaluation import Evaluation, bootstrap_interval, evaluate, load_evaluation
from qurl.files import write_whole
from qurl.models import resolve_model
from qurl.notebook import provenance
from qurl.processes import is_first_to_fail, on_main, one_voice
from qurl.rewards import SoftOverlong
from qurl.rollout import RolloutEngine, RolloutError
from qurl.tasks import Task, load_task
from qurl.tasks.sources import SOURCES
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
    "disable_tqdm": True,  # its bar prints every metric of every step; `ProgressLines` says what counts
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
        overlong_buffer (`int`, *optional*, defaults to `0`):
            Tokens before `max_completion_length` over which DAPO's soft over-long penalty is added to the reward.
        eval_tasks (`list[str]`, *optional*):
            Tasks that judge the policy, each with its test split, or files with problems; default the held-out problems
            of `task`, of which a file has none.
        eval_options (`dict` or `str`, *optional*):
            Options of these tasks; those of `task` where they differ from `task_options`.
        eval_k (`int`, *optional*, defaults to `1`):
            Samples per held-out problem before and after training; 0 leaves both evaluations out.
        eval_temperature (`float`, *optional*, defaults to `1.0`):
            Of these samples, which BF16 rollouts draw whatever the dtype of training.
        eval_max_tokens (`int`, *optional*, defaults to `0`):
            Longest completion of these samples; 0: `max_completion_length`. Prompts have as much room as in training.
    """

    model: str = field(default="tiny", metadata={"help": "Embedded model, folder or hub id."})
    task: str = field(default="arithmetic", metadata={"help": "Name of the task."})
    task_options: dict | str | None = field(default=None, metadata={"help": "Options of the task, as JSON."})
    overlong_buffer: int = field(
        default=0, metadata={"help": "Tokens over which DAPO's over-long penalty grows; 0: none."}
    )
    eval_tasks: list[str] = field(
        default_factory=list,
        metadata={"help": "Tasks or files of the evaluations; none: the task's held-out problems."},
    )
    eval_options: dict | str | None = field(
        default=None, metadata={"help": "Options of the held-out task where they differ, as JSON."}
    )
    eval_k: int = field(
        default=1, metadata={"help": "Samples per held-out problem before and after; 0: none."}
    )
    eval_temperature: float = field(default=1.0, metadata={"help": "Temperature of these samples."})
    eval_max_tokens: int = field(
        default=0, metadata={"help": "Longest completion of these samples, tokens; 0: as in training."}
    )

    def __post_init__(self):
        self.task_options = _options("task_options", self.task_options)
        self.eval_options = _options("eval_options", self.eval_options)
        if isinstance(self.eval_tasks, str):
            self.eval_tasks = [self.eval_tasks]
        self.eval_k = whole_number("eval_k", self.eval_k, 0)
        self.overlong_buffer = whole_number("overlong_buffer", self.overlong_buffer, 0)
        self.eval_temperature = number("eval_temperature", self.eval_temperature, 0.01, 2)
        self.eval_max_tokens = whole_number("eval_max_tokens", self.eval_max_tokens, 0)


def _options(name: str, value: dict | str | None) -> dict[str, Any]:
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
    if parsed is not None and not isinstance(parsed, dict):
        raise ValueError(f"{name}={value!r} is not possible: give a JSON object such as '{{\"digits\": 2}}'.")
    for key in ("name", "split"):
        if key in (parsed or {}):
            raise ValueError(f"{name}={value!r} is not possible: {key} is no option of a task; leave it out.")
    return parsed or {}


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
        if not state.is_world_process_zero or not logs or "reward" not in logs:
            return
        if now - self._last < self.seconds:
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
    run: RunArguments,
    config: QuRLConfig,
    callbacks: list[TrainerCallback] | None = None,
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
        For anything that is not possible, before the engine starts; also where the folder holds another run, or
        another process trains in it.
    """
    _require_all_processes(config)
    if config.resume_from_checkpoint is not None:
        raise ValueError(
            f"resume_from_checkpoint={config.resume_from_checkpoint!r} is not possible: a run goes on from the last "
            "complete checkpoint in its output_dir by itself; leave it out."
        )
    folder = Path(config.output_dir)
    asked = _asked(run, config)
    finished = on_main(lambda: _finished(folder, asked))
    if finished is not None:
        return finished

    path = resolve_model(run.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    task = load_task(run.task, "train", **run.task_options)
    judges = _held_out(run, task) if run.eval_k else []
    for each in (task, *judges):
        each.self_check(tokenizer)
    rewards = [*task.reward_functions()]
    if run.overlong_buffer:
        rewards.append(SoftOverlong(config.max_completion_length, run.overlong_buffer))
    model = AutoConfig.from_pretrained(path)
    for judge in judges:
        _check_lengths(judge, tokenizer, run, config, model)
    dataset, too_long = _fitting(task, tokenizer, config)

    with contextlib.ExitStack() as stack:
        on_main(lambda: stack.enter_context(alone(folder)))
        trainer = QuRLTrainer(
            str(path),
            rewards,
            config,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[ProgressLines(), MetricsFile(), *(callbacks or [])],
        )
        stack.callback(trainer.close)
        trainer.remove_callback(PrinterCallback)
        on_main(lambda: write_whole(folder / "config.yaml", yaml.safe_dump(asked, sort_keys=False)))
        before = _judge(trainer, judges, run, config, folder / "samples-before")
        checkpoint = on_main(lambda: last_complete_checkpoint(folder))
        if checkpoint is not None:
            logger.info("Going on from %s.", checkpoint)
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.state.global_step < trainer.state.max_steps:
            raise TrainingError(
                f"training stopped at step {trainer.state.global_step} of {trainer.state.max_steps}, with a "
                f"checkpoint in {folder}: the log above says why."
            )
        trainer.save_model(str(folder / "policy"))
        after = _judge(trainer, judges, run, config, folder / "samples-after")

        def write_result() -> dict[str, Any]:
            table = history(trainer)
            result = {
                "run": asked,
                "accuracy": _accuracy(before, after),
                "steps": trainer.state.global_step,
                # Of all steps, also those before a run was stopped.
                "seconds": float(table["step_time"].mean() * trainer.state.global_step),
                "resumed": checkpoint is not None,
                "prompts_left_out": too_long,
                "engine": trainer.vllm_generation.description | {"model": run.model},
                "task": task.provenance,
                **provenance(seed=config.seed),
            }
            write_whole(folder / "metrics.csv", table.to_csv())
            write_whole(folder / "result.json", json.dumps(result, indent=2, default=str) + "\n")
            return result

        return on_main(write_result)


def _require_all_processes(config: QuRLConfig) -> None:
    """Refuse to go on alone where accelerate was asked for several processes, which MPI alone would start."""
    if (
        config.world_size == 1
        and os.environ.get("ACCELERATE_USE_CPU") == "True"
        and "MASTER_PORT" in os.environ
    ):
        raise ValueError(
            "accelerate launch --cpu has started one process, whatever --num_processes says, since it takes MPI for "
            "several: use torchrun --standalone --nproc_per_node=2 -m qurl.cli train, or leave --num_processes out."
        )


def _finished(folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a finished run with these parameters, None where there is something to do."""
    file = folder / "result.json"
    if not file.is_file():
        _same_run(folder, asked)
        return None
    result = _read_json(file)
    if not {"run", "accuracy", "steps", "seconds"} <= result.keys():
        raise ValueError(f"{file} is not the result of a run: choose another output_dir.")
    _require_same(folder, asked, result["run"])
    logger.info("%s is finished: it is read and not repeated.", folder)
    return result


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the folder of a run, and hold it against other processes; a killed one holds it no longer."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # An orchestrator that asks for the run's state holds the lock for a moment.
        with FileLock(folder / ".lock", timeout=1):
            yield
    except Timeout:
        raise ValueError(
            f"output_dir={str(folder)!r} is being trained by another process: wait for it, or choose another folder."
        ) from None


def _prompt_lengths(task: Task, tokenizer) -> list[int]:
    return [len(task.render(row, tokenizer)) for row in task.dataset]


def _fitting(task: Task, tokenizer, config: QuRLConfig) -> tuple[Any, int]:
    """The task's prompts that leave room for a completion, and how many do not: verl's recipes filter them too."""
    if config.vllm_max_model_length is None:
        return task.dataset, 0
    longest = config.vllm_max_model_length - config.max_completion_length
    fits = [index for index, length in enumerate(_prompt_lengths(task, tokenizer)) if length <= longest]
    left_out = len(task.dataset) - len(fits)
    if not fits:
        raise ValueError(
            f"vllm_max_model_length={config.vllm_max_model_length} leaves {longest} tokens for a prompt beside "
            f"max_completion_length={config.max_completion_length}, and every prompt of task {task.name!r} is longer: "
            "use a larger one."
        )
    if left_out:
        logger.warning(
            "%d of %d prompts are longer than %d tokens and left out.", left_out, len(task.dataset), longest
        )
    return task.dataset.select(fits) if left_out else task.dataset, left_out


def _check_lengths(
    task: Task, tokenizer, run: RunArguments, config: QuRLConfig, model: PreTrainedConfig
) -> None:
    """A problem that is left out would change the score, so a held-out prompt that does not fit is refused."""
    longest_prompt = max(_prompt_lengths(task, tokenizer))
    room = longest_prompt
    if config.vllm_max_model_length is not None:
        room = max(room, config.vllm_max_model_length - config.max_completion_length)
    positions = getattr(model, "max_position_embeddings", None)
    if run.eval_max_tokens and positions and room + run.eval_max_tokens > positions:
        raise ValueError(
            f"eval_max_tokens={run.eval_max_tokens} and {room} tokens for prompts exceed the {positions} positions of "
            f"the model: use at most {positions - room}."
        )
    if config.vllm_max_model_length is None:
        return
    needed = longest_prompt + config.max_completion_length
    if needed > config.vllm_max_model_length:
        raise ValueError(
            f"vllm_max_model_length={config.vllm_max_model_length} is too short for task {task.name!r}, whose longest "
            f"prompt and completion take {needed} tokens: use {needed} or more."
        )


def _held_out(run: RunArguments, task: Task) -> list[Task]:
    """The tasks that judge the policy; refused where all their problems are trained on, as with a file of one's own."""
    fix = "give the held-out problems with --eval_tasks, or leave both evaluations out with --eval_k 0"
    if run.eval_tasks:
        judges = [load_task(name, "test", **run.eval_options) for name in run.eval_tasks]
    elif run.task in SOURCES and "test" not in SOURCES[run.task].files:
        raise ValueError(f"task={run.task!r} has no test split that could judge the policy: {fix}.")
    else:
        judges = [load_task(run.task, "test", **{**run.task_options, **run.eval_options})]
    trained = _problems(task)
    for judge in judges:
        shared = trained & _problems(judge)
        if len(shared) == len(judge.dataset):
            name = f"eval_tasks={judge.name!r}" if run.eval_tasks else f"task={run.task!r}"
            raise ValueError(f"{name} would judge the policy by the problems it is trained on: {fix}.")
        if shared:
            logger.warning(
                "%d of the %d held-out problems of %s are trained on.",
                len(shared),
                len(judge.dataset),
                judge.name,
            )
    return judges


def _problems(task: Task) -> set[str]:
    """Bare texts, whatever their white space."""
    return {" ".join(text.split()) for text in task.dataset["problem"]}


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
    # More processes make a batch larger. One is not named, as in the folders of earlier versions.
    processes = {"processes": config.world_size} if config.world_size > 1 else {}
    return {**dataclasses.asdict(run), **changed, **processes}


_PLACE_AND_DERIVED = {
    "output_dir",
    "logging_dir",
    "generation_batch_size",
    "use_cpu",
    "run_name",
    "disable_tqdm",
    "hub_token",
    "dataloader_pin_memory",
    "ddp_find_unused_parameters",
    "report_to",
    "include_for_metrics",
    "debug",
    "pad_to_multiple_of",
}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and the run is finished anew.") from None


def _same_run(folder: Path, asked: dict[str, Any]) -> None:
    """Raise where the folder holds a run with other parameters."""
    file = folder / "config.yaml"
    if not file.is_file():
        return
    try:
        there = dict(yaml.safe_load(file.read_text()))
    except (yaml.YAMLError, TypeError, ValueError):
        raise ValueError(f"{file} is damaged: delete the folder, or choose another output_dir.") from None
    _require_same(folder, asked, there)


def _require_same(folder: Path, asked: dict[str, Any], there: dict[str, Any]) -> None:
    # An earlier version did not name fields that it did not have.
    usual = {"processes": 1} | dataclasses.asdict(RunArguments())
    asked, there = usual | asked, usual | there
    differing = [name for name in sorted(asked.keys() | there.keys()) if asked.get(name) != there.get(name)]
    if differing:
        name = differing[0]
        raise ValueError(
            f"output_dir={str(folder)!r} holds a run with {name}={there.get(name)!r}, not {asked.get(name)!r}: choose "
            "another folder."
        )


def _judge(
    trainer: QuRLTrainer, tasks: list[Task], run: RunArguments, config: QuRLConfig, output: Path
) -> list[Evaluation]:
    """Sampled accuracy of the trainer's policy in BF16: the same judge for every rollout dtype.

    Each process samples its share of the problems, so that none waits long enough for the others to run into the
    time-out of a collective.
    """
    folders = [output / task.name if len(tasks) > 1 else output for task in tasks]
    if on_main(lambda: all((folder / "result.json").is_file() for folder in folders)):
        return on_main(lambda: [load_evaluation(folder) for folder in folders])
    # A stopped evaluation was of an engine that is gone.
    on_main(lambda: shutil.rmtree(output, ignore_errors=True))
    generation, index = trainer.vllm_generation, config.process_index
    max_tokens = run.eval_max_tokens or config.max_completion_length
    longest = config.vllm_max_model_length
    with RolloutEngine(
        generation.folder,
        "bf16",
        max_model_len=longest and longest - config.max_completion_length + max_tokens,
        max_num_seqs=256,
        seed=config.seed + index,
        load_weights=False,
    ) as engine:
        with generation.named_params() as parameters:
            engine.sync(parameters)
        return [
            evaluate(
                engine,
                task,
                run.eval_k,
                max_tokens=max_tokens,
                temperature=run.eval_temperature,
                output=folder,
                seed=config.seed,
                shard=(index, config.world_size),
                gather=gather_object,
                tokenizer=trainer.processing_class,
            )
            for task, folder in zip(tasks, folders, strict=True)
        ]


def _accuracy(before: list[Evaluation], after: list[Evaluation]) -> dict[str, Any]:
    """Mean accuracy over the tasks before and after and the gain, each with its 95 % interval over problems."""
    if not before:
        return {}
    scores = {
        name: [evaluation.samples.groupby("id")["correct"].mean().astype(float) for evaluation in evaluations]
        for name, evaluations in (("before", before), ("after", after))
    }
    # The same problems before and after: the gain is paired, which makes its interval narrower.
    scores["gain"] = [a - b for b, a in zip(scores["before"], scores["after"], strict=True)]
    accuracy: dict[str, Any] = {"problems": sum(map(len, scores["gain"]))}
    for name, tasks in scores.items():
        low, high = bootstrap_interval([values.to_numpy() for values in tasks])
        means = [float(values.mean()) for values in tasks]
        accuracy[name] = {
            "mean": sum(means) / len(means),
            "interval": [float(low), float(high)],
        }
        if len(means) > 1:
            accuracy[name]["tasks"] = dict(zip((e.settings["task"] for e in before), means, strict=True))
    return accuracy


class _Parser(TrlParser):
    """TRL's parser, which reports a mistake in one line, without the usage of all options in front of it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n" if is_first_to_fail() else None)


def main(argv: list[str]) -> int:
    """``qurl train``: the fields of `RunArguments` and `QuRLConfig` as options, also from ``--config FILE.yaml``.

    Of several processes the main one prints the summary, and the first that fails says why.

    Returns
    -------
    int
        Exit status: 0 success, 1 when training could not go on.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_main else logging.ERROR, format="%(message)s")
    try:
        with one_voice():
            run, config = _parse(argv)
            result = train(run, config)
    except (TrainingError, RolloutError) as error:
        print(f"qurl train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if is_main:
            print("qurl train: stopped; the same command goes on from its last checkpoint.", file=sys.stderr)
        return 130
    if config.distributed_state.is_main_process:
        print(summary(result, config.output_dir))
    config.distributed_state.destroy_process_group()
    return 0


def _parse(argv: list[str]) -> tuple[RunArguments, QuRLConfig]:
    own = [*RunArguments.__annotations__, *QuRLConfig.__annotations__]
    parser = _Parser(
        [RunArguments, QuRLConfig],
        prog="qurl train",
        usage="%(prog)s [--config FILE.yaml] [--FIELD VALUE ...]",
        description=f"Train a policy with quantized rollouts. Fields of qurl's own: {', '.join(own)}. The others are "
        "those of TRL's GRPOConfig and of transformers' TrainingArguments. Defaults train the embedded model on sums.",
    )
    parser.set_defaults(**TINY_DEFAULTS)
    parser.set_defaults(
        output_dir="runs/train",
        # Every trainable parameter of a dense model or adapter is used; looking for others takes time and warns of it.
        ddp_find_unused_parameters=False,
    )
    try:
        return parser.parse_args_and_config(argv)
    except yaml.YAMLError as error:
        parser.error(f"the file of --config is no YAML: {' '.join(str(error).split())}")


def summary(result: dict[str, Any], folder: str | os.PathLike) -> str:
    """A run in a few lines."""
    lines = [f"{result['steps']} steps in {result['seconds']:.0f} s, {folder}"]
    for name in ("before", "after", "gain"):
        if score := result["accuracy"].get(name):
            low, high = (100 * bound for bound in score["interval"])
            unit = "points" if name == "gain" else "%"
            lines.append(
                f"{name:>6}: {100 * score['mean']:.1f} {unit} ({low:.1f} to {high:.1f}) of held-out samples"
            )
    return "\n".join(lines)
