"""The command ``qurl eval``."""

import argparse
import ast
import sys
from pathlib import Path


def add_eval_command(commands: argparse._SubParsersAction) -> None:
    """Add the command with its options."""
    parser = commands.add_parser("eval", help="accuracy of a policy: avg@k, pass@k, maj@k with intervals")
    parser.add_argument(
        "--model", default="smollm2-135m", help="embedded model, folder or hub id (default: %(default)s)"
    )
    parser.add_argument(
        "--task",
        required=True,
        metavar="NAME[,NAME]",
        help="tasks, or a file of your own; 'test-sets' for the five of Table 3 and their average",
    )
    parser.add_argument(
        "--data", metavar="PATH", help="file, folder or hub id with the problems, or 'sample'"
    )
    parser.add_argument("--split", default="test", help="'train' or 'test' (default: %(default)s)")
    parser.add_argument("--n", type=int, help="so many problems of each task, drawn at random; default all")
    parser.add_argument("--k", type=int, default=4, help="samples of each problem (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="longest completion (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.6, help="0 decodes greedily, with --k 1 (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32", "int8", "fp8"),
        default="bf16",
        help="of the rollout engine (default: %(default)s)",
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=64, help="sequences decoded at once (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draw of problems and of sampling (default: %(default)s)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="further options of the task, such as digits=2, chat=True or answer_format=boxed",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="keep samples and result there, and go on after an interruption",
    )
    parser.add_argument(
        "--shard", type=_shard, default=(0, 1), metavar="I/N", help="this of N processes with one --output"
    )
    parser.set_defaults(run=_run)


def _option(text: str) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE such as digits=2")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError):
        return key, value


def _shard(text: str) -> tuple[int, int]:
    try:
        index, count = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no I/N such as 0/2") from None
    return index, count


def _run(arguments: argparse.Namespace) -> int:
    import pandas as pd

    from qurl.evaluation import average, evaluate
    from qurl.tasks import TEST_SETS, load_task

    names = TEST_SETS if arguments.task == "test-sets" else arguments.task.split(",")
    for key, option in (("name", "--task"), ("split", "--split"), ("seed", "--seed")):
        if key in dict(arguments.set):
            raise ValueError(f"--set {key}={dict(arguments.set)[key]} is not possible: use {option}.")
    options = dict(arguments.set) | {"seed": arguments.seed}
    options |= {
        key: value for key, value in (("data", arguments.data), ("n", arguments.n)) if value is not None
    }
    # All before the first is run: a missing file must not turn up after an hour.
    tasks = [load_task(name, arguments.split, **options) for name in names]
    evaluations = [
        evaluate(
            arguments.model,
            task,
            arguments.k,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            output=arguments.output / task.name if arguments.output and len(tasks) > 1 else arguments.output,
            dtype=arguments.dtype,
            max_num_seqs=arguments.max_num_seqs,
            seed=arguments.seed,
            shard=arguments.shard,
            report=lambda line: print(line, file=sys.stderr),
        )
        for task in tasks
    ]
    lines = [evaluation.row() for evaluation in evaluations]
    if len(evaluations) > 1:
        lines.append(average(evaluations))
    print(pd.DataFrame(lines).to_string(index=False, float_format="{:.1f}".format, na_rep=""))
    for evaluation in evaluations:
        for warning in evaluation.warnings:
            print(f"{evaluation.settings['task']}: {warning}", file=sys.stderr)
        if not evaluation.complete:
            print(f"{evaluation.settings['task']}: other shards are not finished yet.", file=sys.stderr)
    return 0
