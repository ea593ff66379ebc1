"""Where the files of a data set come from: the hub, its cache on this machine, a local file or folder, own samples.

The hub's data sets are taken as plain files at one commit, never through loading scripts. No revision is pinned here,
because none could be verified; a result records the commit that was resolved and the SHA-256 sums of its files.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import qurl
from qurl.tasks.records import SUFFIXES

HUB_TIMEOUT_SECONDS = 3
SAMPLE = "sample"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class DataUnavailableError(FileNotFoundError):
    """The data cannot be had now; the message says which file to supply."""


@dataclass(frozen=True)
class Source:
    """A data set known by name.

    Attributes
    ----------
    hub_id : str
    files : dict of str to tuple of str
        For each split, glob patterns below the root of the data set, tried in turn: those of the hub, then those of
        other copies that are in use.
    alternatives : tuple of str
        Other hub ids with the same problems.
    answer_format : str
        How its paper asks for the answer.
    supply : str
        The file to get where there is no network.
    """

    hub_id: str
    files: dict[str, tuple[str, ...]]
    alternatives: tuple[str, ...]
    answer_format: str
    supply: str


SOURCES = {
    "gsm8k": Source(
        "openai/gsm8k",
        {
            split: (f"main/{split}-*.parquet", f"gsm8k/{split}.jsonl", f"{split}.jsonl", f"{split}*.parquet")
            for split in ("train", "test")
        },
        (),
        "hashes",
        "test.jsonl and train.jsonl of the repository openai/grade-school-math",
    ),
    "deepscaler": Source(
        "agentica-org/DeepScaleR-Preview-Dataset",
        {"train": ("deepscaler.json", "train/*.json", "deepscaler/train/*.json", "*.parquet")},
        (),
        "boxed",
        "deepscaler.json, or the folder train/ with the JSON files of the DeepScaleR repository",
    ),
    "dapo": Source(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        {"train": ("data/dapo-math-17k.parquet", "dapo-math-17k.parquet", "en/*.parquet", "*.parquet")},
        ("open-r1/DAPO-Math-17k-Processed",),
        "answer_line",
        "dapo-math-17k.parquet",
    ),
    "math500": Source(
        "HuggingFaceH4/MATH-500",
        {"test": ("test.jsonl", "test/math.json", "math.json", "deepscaler/test/math.json")},
        (),
        "boxed",
        "test.jsonl of MATH-500, or test/math.json of the DeepScaleR repository",
    ),
    "aime24": Source(
        "HuggingFaceH4/aime_2024",
        {
            "test": (
                "data/train-*.parquet",
                "test/aime.json",
                "aime.json",
                "deepscaler/test/aime.json",
                "aime*24*.parquet",
                "data/aime*24*.parquet",
                "aime*24*.jsonl",
                "test*.jsonl",
                "test*.parquet",
            )
        },
        ("BytedTsinghua-SIA/AIME-2024", "Maxwell-Jia/AIME_2024", "math-ai/aime24"),
        "boxed",
        "aime-2024.parquet of DAPO, or test/aime.json of the DeepScaleR repository",
    ),
    "amc": Source(
        "AI-MO/aimo-validation-amc",
        {"test": ("data/train-*.parquet", "test/amc.json", "amc.json", "deepscaler/test/amc.json")},
        (),
        "boxed",
        "test/amc.json of the DeepScaleR repository",
    ),
    "minerva": Source(
        "math-ai/minervamath",
        {
            "test": (
                "test.jsonl",
                "test*.parquet",
                "data/test*.parquet",
                "test/minerva.json",
                "minerva.json",
                "deepscaler/test/minerva.json",
            )
        },
        ("knoveleng/Minerva-Math",),
        "boxed",
        "test/minerva.json of the DeepScaleR repository",
    ),
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        {
            "test": (
                "OE_TO_maths_en_COMP/*.parquet",
                "OlympiadBench/OE_TO_maths_en_COMP/*.parquet",
                "test/olympiad_bench.json",
                "olympiad_bench.json",
                "deepscaler/test/olympiad_bench.json",
                "test.jsonl",
                "data/*.parquet",
            )
        },
        ("math-ai/olympiadbench", "knoveleng/OlympiadBench"),
        "boxed",
        "test/olympiad_bench.json of the DeepScaleR repository",
    ),
}


@dataclass(frozen=True)
class Files:
    """The files of one split.

    Attributes
    ----------
    paths : tuple of pathlib.Path
    source : str
        As a result records it.
    revision : str or None
        The hub's commit.
    """

    paths: tuple[Path, ...]
    source: str
    revision: str | None = None

    def checksums(self) -> dict[str, str]:
        """SHA-256 sum by file name."""
        sums = {}
        for path in self.paths:
            with open(path, "rb") as stream:
                sums[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
        return sums


def find_files(name: str, split: str, data: str | Path | None = None) -> Files:
    """The files of a data set.

    Parameters
    ----------
    name : str
        A key of ``SOURCES``.
    split : str
        One that the source has.
    data : str or path, optional
        A file; a folder that holds the data set in any published layout; "sample" for a few problems of this project in
        that layout; or another hub id. Default: the source's own hub id, from the hub or from its cache.

    Raises
    ------
    FileNotFoundError
        If a path does not exist, or a folder holds no file of the split.
    DataUnavailableError
        If the hub cannot be reached within seconds and its cache does not hold the files, or it refuses the id.
    """
    source = SOURCES[name]
    if data is None:
        return _from_hub(name, source.hub_id, source.files[split])
    if str(data) == SAMPLE:
        folder = Path(qurl.__file__).resolve().parent.parent / "data" / "tasks" / name
        if not folder.is_dir():
            raise DataUnavailableError(
                "data='sample' lies in data/tasks of the repository, which this installation does not have: install "
                "qurl from a clone (pip install -e .)."
            )
        return Files(_in_folder(folder, source.files[split], name, split), f"{SAMPLE}: data/tasks/{name}")
    path = Path(data).expanduser()
    if path.is_file():
        return Files((path,), str(data))
    if path.is_dir():
        return Files(_in_folder(path, source.files[split], name, split), str(data))
    if isinstance(data, str) and _HUB_ID.fullmatch(data) and not path.suffix:
        return _from_hub(name, data, (*source.files[split], f"{split}*", f"*/{split}*", "data/*"))
    raise FileNotFoundError(f"data={str(data)!r} does not exist: give {source.supply}.")


def _in_folder(folder: Path, patterns: tuple[str, ...], name: str, split: str) -> tuple[Path, ...]:
    for pattern in patterns:
        found = sorted(path for path in folder.glob(pattern) if path.is_file() and path.suffix in SUFFIXES)
        if found:
            return tuple(found)
    raise FileNotFoundError(
        f"{folder} holds no file of {name!r}, split {split!r}: give the file itself, or {SOURCES[name].supply}."
    )


def _from_hub(name: str, hub_id: str, patterns: tuple[str, ...]) -> Files:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    source = SOURCES[name]
    supply = f"pass data=FILE with {source.supply}, or data={SAMPLE!r} for a few problems of this project"
    download = {"repo_id": hub_id, "repo_type": "dataset", "allow_patterns": list(patterns)}
    try:
        # snapshot_download asks without a timeout of ours, so whether the hub answers is found out first.
        info = huggingface_hub.HfApi().repo_info(hub_id, repo_type="dataset", timeout=HUB_TIMEOUT_SECONDS)
        folder = Path(huggingface_hub.snapshot_download(**download, revision=info.sha))
    except (httpx.TransportError, OfflineModeIsEnabled):
        try:
            folder = Path(huggingface_hub.snapshot_download(**download, local_files_only=True))
        except LocalEntryNotFoundError:
            raise DataUnavailableError(
                f"data set {hub_id!r} of task {name!r} is not in the local hub cache and the hub cannot be reached: "
                f"{supply}."
            ) from None
    except HfHubHTTPError as error:
        others = [repr(other) for other in (source.hub_id, *source.alternatives) if other != hub_id]
        other = f"try data={' or '.join(others)}, " if others else ""
        raise DataUnavailableError(
            f"data set {hub_id!r} of task {name!r} is refused by the hub (HTTP {error.response.status_code}): "
            f"{other}{supply}."
        ) from None
    try:
        paths = _in_folder(folder, patterns, name, "any")
    except FileNotFoundError:
        raise DataUnavailableError(
            f"data set {hub_id!r} of task {name!r} holds none of {', '.join(patterns)}: {supply}."
        ) from None
    return Files(paths, f"hub: {hub_id}", revision=folder.name)
