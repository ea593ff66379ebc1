"""What the commands of the benchmarks have in common: their options, and the file that the rows go to."""

import argparse
import json
from pathlib import Path

import torch

from qurl.doctor import check_cores, check_memory, check_system
from qurl.notebook import provenance


def parser(description: str) -> argparse.ArgumentParser:
    """Options ``--model`` and ``--output``, to which a benchmark adds its own."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--model", default="smollm2-135m", help="a name, folder or hub id that qurl.models resolves"
    )
    options.add_argument("--output", type=Path, help="json file for the rows")
    return options


def save(rows: list[dict], options: argparse.Namespace) -> None:
    """Write the rows to ``options.output``, if asked for, with the options and where they were measured."""
    if options.output is None:
        return
    parameters = {name: value for name, value in vars(options).items() if name != "output"}
    result = provenance(parameters=parameters, torch=torch.__version__, threads=torch.get_num_threads())
    result["hardware"] = [check().value for check in (check_system, check_cores, check_memory)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
