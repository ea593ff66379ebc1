"""What a sync sends: a policy's parameters on their way into the engine, and the checkpoint they may come from."""

import hashlib
import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from qurl.quantization import FORMATS, is_quantized_name, quantized_named_tensors

# Projections whose codes are compared bit for bit after a sync; which ones changes from sync to sync.
CHECKED_PROJECTIONS = 4


# Its own generator: a sync must not touch the random streams of the training.
_reservoir = random.Random(0)


@dataclass(frozen=True)
class SyncReport:
    """What one sync did.

    Attributes
    ----------
    seconds : float
        All of it, the check and the reset of the prefix cache included.
    quantize_seconds, load_seconds, check_seconds : float
        Computing codes and scales (and whatever the parameter iterator does); handing them to vLLM; checking.
    bytes : int
        Handed to vLLM: codes, scales and the full-precision tensors.
    quantized_layers, full_precision_layers : int
        Linear layers of the decoder by what their kernel multiplies with; fused layers (q/k/v, gate/up) count once.
    codes_changed : float or None
        Share of the codes that differ from the sync before; None for the first, or without ``track_codes``.
    """

    seconds: float
    quantize_seconds: float
    load_seconds: float
    check_seconds: float
    bytes: int
    quantized_layers: int
    full_precision_layers: int
    codes_changed: float | None


def digest(codes: torch.Tensor, scale: torch.Tensor) -> str:
    """SHA-256 of codes (out, in) and scale (out, 1) of a projection: what processes compare that share no memory."""
    digests = hashlib.sha256(codes.detach().cpu().contiguous().view(torch.uint8).numpy())
    digests.update(scale.detach().cpu().float().contiguous().numpy())
    return digests.hexdigest()


def only_what_fits(
    named_params: Iterable[tuple[str, torch.Tensor]], shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass on the parameters that the model has, and refuse all else: vLLM would cut, skip or overwrite in silence.

    Parameters
    ----------
    named_params : iterable of (str, torch.Tensor)
    shapes : dict
        Shape of each parameter of the checkpoint.

    Raises
    ------
    ValueError
        With the name: for a parameter that is unknown, comes twice, has another shape, or is not floating point.
    """
    tied, embedding, seen = "lm_head.weight" not in shapes, None, set()
    for name, tensor in named_params:
        if name in seen:
            raise ValueError(f"parameter {name} comes twice: pass each named parameter of the policy once.")
        seen.add(name)
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.is_meta:
            raise ValueError(
                f"parameter {name} is not a floating-point tensor: pass the policy's parameters."
            )
        if name.endswith("embed_tokens.weight"):
            embedding = tensor
        if name == "lm_head.weight" and tied:
            if embedding is None or tensor.shape != embedding.shape or not torch.equal(tensor, embedding):
                raise ValueError(
                    "parameter lm_head.weight differs from the embedding or comes before it, but the model ties "
                    "the two: leave it out."
                )
            continue
        if name not in shapes:
            raise ValueError(
                f"parameter {name} is not one of the model's: pass those of the same architecture."
            )
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"parameter {name} has shape {tuple(tensor.shape)}, but the model's is {shapes[name]}: pass the "
                "parameters of the same model, whole and not sharded."
            )
        yield name, tensor


class SentTensors:
    """The iterator that a sync hands to vLLM: quantizes, and notes names, bytes, time and a sample of the codes.

    Attributes
    ----------
    codes : dict
        Codes (out, in) of each projection sent so far, as bytes in main memory; empty unless those before are given.
    source_error : BaseException or None
        What ``named_params`` itself raised.
    """

    def __init__(
        self,
        named_params,
        dtype: str,
        code_bits: int,
        previous_codes: dict | None,
        shapes: dict[str, tuple[int, ...]],
    ):
        self._shapes = shapes
        checked = only_what_fits(self._noting_errors(named_params), shapes)
        self._source = quantized_named_tensors(checked, dtype, code_bits) if dtype in FORMATS else checked
        self._previous_codes = previous_codes
        self._changed = self._codes = 0
        self._pending: tuple[str, torch.Tensor] | None = None
        self._projections = 0
        self._quantized = dtype in FORMATS
        self.source_error: BaseException | None = None
        self.codes: dict[str, torch.Tensor] = {}
        self.names: set[str] = set()
        self.sample: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.bytes, self.seconds = 0, 0.0

    def __iter__(self):
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        start = time.perf_counter()
        try:
            name, tensor = next(self._source)
            self.names.add(name)
            self.bytes += tensor.nbytes
            if self._quantized and is_quantized_name(name):
                self._pending = name, tensor
                self._count_changes(name, tensor)
            elif self._pending and name == self._pending[0] + "_scale":
                self._keep(*self._pending, tensor)
            else:
                _require_finite(name, tensor)  # quantizing has looked at the others
        finally:
            self.seconds += time.perf_counter() - start
        return name, tensor

    def _noting_errors(self, named_params) -> Iterator[tuple[str, torch.Tensor]]:
        """The caller's pairs. What goes wrong in its iterator is no fault of vLLM's and must not look like one."""
        try:
            for pair in named_params.items() if isinstance(named_params, dict) else named_params:
                if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
                    raise ValueError(
                        f"named_params holds a {type(pair).__name__} where a pair of name and tensor should be: pass "
                        "policy.named_parameters()."
                    )
                yield pair
        except GeneratorExit:
            raise
        except BaseException as error:
            self.source_error = error
            raise

    @property
    def left_out(self) -> str | None:
        """What is wrong where parameters of the checkpoint did not come: a sync must bring each."""
        missing = sorted(self._shapes.keys() - self.names)
        if not missing:
            return None
        return (
            f"the sync left out {len(missing)} parameters ({', '.join(missing[:3])}, …): pass all named parameters of "
            "the policy, adapters merged."
        )

    def report(
        self, start: float, loaded: float, layers: dict[str, str | None], sent_bytes: int | None = None
    ) -> SyncReport:
        """Of a sync that ends now.

        Parameters
        ----------
        start, loaded : float
            When it began and when everything was loaded, on the clock of ``time.perf_counter``.
        layers : dict
            Kernel of each linear layer by name, None in full precision.
        sent_bytes : int, optional
            Where they are not those of this iterator's tensors.
        """
        end = time.perf_counter()
        return SyncReport(
            seconds=end - start,
            quantize_seconds=self.seconds,
            load_seconds=loaded - start - self.seconds,
            check_seconds=end - loaded,
            bytes=self.bytes if sent_bytes is None else sent_bytes,
            quantized_layers=sum(kernel is not None for kernel in layers.values()),
            full_precision_layers=sum(kernel is None for kernel in layers.values()),
            codes_changed=self.codes_changed,
        )

    @property
    def codes_changed(self) -> float | None:
        return self._changed / self._codes if self._codes else None

    def _keep(self, name: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Reservoir sampling: one pass keeps a uniform sample, and every projection is checked sooner or later."""
        self._projections += 1
        if len(self.sample) < CHECKED_PROJECTIONS:
            self.sample[name] = codes, scale
        elif _reservoir.random() < CHECKED_PROJECTIONS / self._projections:
            del self.sample[_reservoir.choice(list(self.sample))]
            self.sample[name] = codes, scale

    def _count_changes(self, name: str, codes: torch.Tensor) -> None:
        if self._previous_codes is None:
            return
        now = codes.view(torch.uint8).cpu()
        before = self._previous_codes.get(name)
        if before is not None:
            self._changed += int((now != before).sum())
            self._codes += now.numel()
        self.codes[name] = now.clone()


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    # Extremes instead of `isfinite`: one pass without a temporary tensor, and NaN comes through in both.
    if tensor.numel() and not all(map(math.isfinite, torch.stack(tensor.detach().aminmax()).tolist())):
        raise ValueError(
            f"parameter {name} holds NaN or infinity: look for the training step that diverged, or load an intact "
            "checkpoint."
        )


def weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .safetensors file: save the model with save_pretrained.")
    return files


def checkpoint_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, tensors.get_tensor(name)


def config_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of the model that a config describes, in the order of its ``named_parameters``."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a checkpoint, by name: from the headers of its files, else from its config."""
    if not any(folder.glob("*.safetensors")):
        return config_shapes(folder)
    shapes = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes
