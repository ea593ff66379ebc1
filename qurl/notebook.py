"""What the notebooks of ``pipelines/`` share: checked parameters, where results go, how they are saved.

A pipeline notebook starts with two cells: the one tagged ``parameters`` holds literals, one per line; the
next calls ``begin(Config, globals())``. That checks names, types and values before anything slow, whether
they come from ``papermill -p``, from a YAML file, or from a person who edits the cell in JupyterLab.
"""

import ast
import difflib
import json
import math
import platform
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import matplotlib
import pydantic

import qurl
from qurl.arguments import split_numbers
from qurl.files import whole_file

# papermill's translator writes this above the parameters it injects.
_INJECTED = "# Parameters"


def _split(value: Any) -> Any:
    """``"8,64"`` → ``["8", "64"]``, ``8`` → ``[8]``; a list stays one."""
    if isinstance(value, str):
        return split_numbers(value)
    return [value] if isinstance(value, int | float) else value


# A parameter of several whole numbers: `-p batch_sizes 8,64`, `-p batch_sizes 8`, or a list from a YAML file.
IntList = Annotated[tuple[int, ...], pydantic.BeforeValidator(_split)]


class ParameterError(ValueError):
    """A notebook parameter is unknown or not possible. IPython shows its sentence without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"ParameterError: {self}"]


class Parameters(pydantic.BaseModel):
    """Base of a pipeline's typed config: its fields are the notebook's parameters; no others are accepted.

    Text is converted where its meaning is certain: ``"1e-6"`` to a float, ``"false"`` to a bool, ``"8"`` to
    an int.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        # Python counts True as 1; a flag given for a number is a mistake.
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("must not be true or false")
        return value


Config = TypeVar("Config", bound=Parameters)


def begin(config: type[Config], namespace: dict[str, Any]) -> Config:
    """Check a notebook's parameters and make its failing shell lines fail.

    Parameters
    ----------
    config : type
        Subclass of ``Parameters``.
    namespace : dict
        ``globals()`` of the notebook.

    Returns
    -------
    Config

    Raises
    ------
    ParameterError
        If a parameter is missing, unknown (papermill itself only warns), of the wrong type, or has a value
        that is not allowed.
    """
    declared = list(config.model_fields)
    values = {name: namespace[name] for name in declared if name in namespace}
    values |= {name: namespace.get(name) for name in _assigned_parameters(namespace.get("In", ()), declared)}
    missing = [name for name in declared if name not in values]
    if missing:
        raise ParameterError(
            f"{missing[0]} is not set: run the cell tagged 'parameters', which assigns {', '.join(declared)}."
        )
    parsed = parse(config, values)
    if "get_ipython" in namespace:
        # `!command` and `x = !command` otherwise only note a failure in `_exit_code`; the notebook goes on.
        namespace["get_ipython"]().system_raise_on_error = True
    return parsed


def parse(config: type[Config], values: dict[str, Any]) -> Config:
    """Build ``config`` from ``values``; the first fault becomes a ``ParameterError`` of one sentence."""
    try:
        return config.model_validate(values)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
    declared = config.model_fields
    name = str(fault["loc"][0]) if fault["loc"] else ""
    if fault["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, declared, n=1)
        hint = f"{close[0]}; all are " if close else ""
        sentence = f"{name} is not a parameter of this notebook: use {hint}{', '.join(declared)}."
    else:
        reason = fault["msg"].removeprefix("Value error, ")
        # "Input should be a valid integer, unable to parse string as an integer" says the same twice.
        reason = reason.replace("Input should be", "must be").split(", unable to parse")[0]
        default = declared[name].examples[0] if name in declared and declared[name].examples else None
        fix = f": pass e.g. -p {name} {default}" if default is not None else ""
        sentence = f"{name}={values.get(name)!r} {reason}{fix}." if name else f"{reason}."
    raise ParameterError(sentence) from None


def _assigned_parameters(history: list[str] | tuple[str, ...], declared: list[str]) -> list[str]:
    """Names assigned by the latest parameters cell and by what papermill injected after it.

    A notebook's namespace also holds imports and a user's scratch variables, so unknown parameters are looked
    for where parameters are written: in the last cell that annotates a declared name (``dtype: str =
    "int8"``), and in later cells that begin with papermill's comment.
    """
    names: list[str] = []
    for source in history:
        try:
            statements = ast.parse(source).body
        except SyntaxError:  # `!ls` and magics
            continue
        annotated = [
            s.target.id for s in statements if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        ]
        plain = [
            t.id
            for s in statements
            if isinstance(s, ast.Assign)
            for t in s.targets
            if isinstance(t, ast.Name)
        ]
        if not set(declared).isdisjoint(annotated):
            names = annotated + plain
        elif source.lstrip().startswith(_INJECTED):
            names += plain
    return names


def project_root() -> Path:
    """Folder of the checkout that this package belongs to, whatever the working directory.

    For an installed package without checkout: the nearest parent of the working directory with qurl's
    pyproject.toml, or else the working directory itself.
    """
    package = Path(qurl.__file__).resolve().parent.parent
    for folder in (package, Path.cwd(), *Path.cwd().parents):
        pyproject = folder / "pyproject.toml"
        if pyproject.is_file() and 'name = "qurl"' in pyproject.read_text():
            return folder
    return Path.cwd()


def absolute(folder: str, *default: str, parameter: str = "output_dir") -> Path:
    """``folder`` from the project's root on, or ``runs/<default parts>``; ParameterError for an unknown ``~user``."""
    try:
        return project_root() / (Path(folder).expanduser() if folder else Path("runs", *default))
    except RuntimeError:
        raise ParameterError(f"{parameter}={folder!r} names a user that is not known here.") from None


def output_folder(output_dir: str, *default: str, parameter: str = "output_dir") -> Path:
    """Make the folder for results, before anything slow runs.

    Parameters
    ----------
    output_dir : str
        Relative paths start at the project root and not at the working directory, which differs between
        JupyterLab, papermill and ``make``. Empty: ``runs/<default parts>``.
    *default : str
        Parts of the default path below ``runs``; slashes in them (hub ids) become dashes.
    parameter : str
        Its name in messages.

    Returns
    -------
    pathlib.Path
        Absolute.

    Raises
    ------
    ParameterError
        If it cannot be made or written to.
    """
    parts = (part.strip("/").replace("/", "-") for part in default)
    folder = absolute(output_dir, *parts, parameter=parameter)
    if folder.is_file():
        raise ParameterError(
            f"{parameter}={output_dir!r} is a file: pass a folder, which is made if it is not there."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ParameterError(
            f"{parameter}={output_dir!r} cannot be written to ({error.strerror}): pass a folder that can."
        ) from None
    return folder


def provenance(**known: Any) -> dict[str, Any]:
    """Where a result comes from: ``known`` (preset, seed ...), then date, commit, versions and platform."""
    return known | {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git_commit(),
        "qurl": qurl.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _git_commit() -> str | None:
    """Commit of the checkout, with ``-dirty`` behind it if tracked files differ; None outside a checkout."""
    command = [
        "git",
        "-C",
        str(project_root()),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def print_claims(claims: list[dict[str, Any]]) -> None:
    """A verdict per claim of the paper, with the paper's numbers and ours."""
    for claim in claims:
        print(f"{claim['claim']}: {claim['verdict']} ({claim['reason']})")
        print(f"    paper: {claim['paper']}; here: {claim['ours'] or 'nothing'}")


def save_results(folder: Path, name: str, figure, table, result: dict[str, Any], **tables) -> dict[str, Path]:
    """Write a figure, what it shows, and the result, each file complete or not at all.

    Parameters
    ----------
    folder : pathlib.Path
    name : str
        Stem of the files: ``<name>.svg``, ``<name>.png``, ``<name>.csv``.
    figure : matplotlib.figure.Figure
    table : pandas.DataFrame
        The plotted numbers.
    result : dict
        Written last, as ``result.json``: its presence says that the others are there. NaN becomes null.
    **tables : pandas.DataFrame
        More tables, each written as ``<key>.csv``.

    Returns
    -------
    dict of str to pathlib.Path
        Path by file name.
    """
    writers = {
        f"{name}.svg": lambda path: _save_svg(figure, path),
        f"{name}.png": lambda path: figure.savefig(path, format="png", dpi=150),
        f"{name}.csv": lambda path: table.to_csv(path, index=False),
        **{
            f"{key}.csv": lambda path, frame=frame: frame.to_csv(path, index=False)
            for key, frame in tables.items()
        },
        "result.json": lambda path: path.write_text(
            json.dumps(_plain(result), indent=2, allow_nan=False) + "\n"
        ),
    }
    paths = {}
    for file, write in writers.items():
        paths[file] = folder / file
        with whole_file(paths[file]) as partial:
            write(partial)
    return paths


def _save_svg(figure, path: Path) -> None:
    """Same numbers, same file: ids from a fixed salt in place of a random one, and no date."""
    with matplotlib.rc_context({"svg.hashsalt": "qurl"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _plain(value: Any) -> Any:
    """``value`` in the types of JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # numpy scalars
        value = value.item()
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run(notebook: str | Path, output: str | Path, parameters: dict[str, Any] | None = None) -> Path:
    """Execute a pipeline notebook with papermill from a program.

    As ``papermill notebook output -k python3 -p ...`` does, except that the output's folder is made first.

    Parameters
    ----------
    notebook, output : path
        Relative paths start at the working directory.
    parameters : dict, optional

    Returns
    -------
    pathlib.Path
        ``output``, absolute.

    Raises
    ------
    papermill.PapermillExecutionError
        If a cell fails; ``output`` then holds the executed part with the error in its cell.
    """
    import papermill

    output = Path(output).absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    papermill.execute_notebook(
        str(notebook),
        str(output),
        parameters or {},
        kernel_name="python3",
        progress_bar=False,
        log_output=True,
    )
    return output
