"""The ``qurl`` command: the library's functions from a shell.

A mistake of the user ends with one sentence on stderr and exit status 2; ``--traceback`` shows where it
arose.
"""

import argparse
import sys
from collections.abc import Sequence

import qurl


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
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    from qurl.doctor import diagnose, format_report, is_usable, to_json

    checks = diagnose()
    print(to_json(checks) if arguments.json else format_report(checks))
    return 0 if is_usable(checks) else 1


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
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, ImportError, FileNotFoundError, FileExistsError) as error:
        if arguments.traceback:
            raise
        print(f"qurl: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
