"""Does an optimizer step reach the quantized policy? Updates of the weights against their quantization error.

An update of 1e-7 on a weight of 1e-2 hardly ever changes an 8-bit code, so the policy that samples stands still while
the one that is trained moves (QuRL, arXiv 2602.13953, Figs. 4 and 9). For a weight W (out, in), its codes and scale
Q(W), and the weight W' after one step or several:

    codes_changed     share of codes in which Q(W') and Q(W) differ
    update_to_error   ||W' - W|| / ||W - dequantize(Q(W))||, Frobenius norms
    update_to_step    mean of |W' - W| / step, where step is the distance between neighbouring codes at W

The step of INT8 is the row's scale. That of FP8 (E4M3) grows with the code c: scale · 2^(floor(log2 |c|) - 3), and
scale · 2^-9 below |c| = 2^-6. All three are without unit, and do not change when W and W' are multiplied by one number.

    before = snapshot(model.named_parameters())       # a copy of the projections in main memory
    optimizer.step()
    layers, total = update_to_noise(before, model.named_parameters(), "int8")

Weights are read in FP32 and in blocks of rows that stay in the processor's cache; besides the snapshot no copy of a
layer is made (on an accelerator: working memory of one layer). Cost: ``python -m benchmarks.update_noise``.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import pandas as pd
import torch

from qurl.quantization import get_format, is_quantized_name, quantized_named_tensors

_CPU_BLOCK_ELEMENTS = 1 << 18  # 1 MiB of FP32: weights, update, error and step of a block share the cache
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class UpdateToNoise(NamedTuple):
    """What `update_to_noise` returns.

    Attributes
    ----------
    layers : pandas.DataFrame
        One row per quantized weight, indexed by its name (``layer``): ``codes`` (their number), ``codes_changed``,
        ``update_norm``, ``error_norm``, ``update_to_error``, ``update_to_step``.
    total : dict
        The same figures over all weights together: shares and means over all codes, norms over all weights.
    """

    layers: pd.DataFrame
    total: dict[str, float]


@torch.no_grad()
def snapshot(
    named_params: NamedTensors, into: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Copy the weights that are quantized to main memory, in their own precision.

    Parameters
    ----------
    named_params : mapping, or iterable of (str, torch.Tensor)
        Parameters of a policy; those that stay in full precision are skipped.
    into : dict, optional
        An earlier snapshot, whose memory is used again.

    Returns
    -------
    dict
    """
    into = {} if into is None else into
    for name, tensor in _projections(named_params):
        kept = into.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = into[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        kept.copy_(tensor.detach())
    return into


@torch.no_grad()
def update_to_noise(
    before: NamedTensors, after: NamedTensors, dtype: str = "int8", code_bits: int = 8
) -> UpdateToNoise:
    """Share of codes that an update changed, and its size against quantization error and step, per weight and in total.

    Parameters
    ----------
    before : mapping, or iterable of (str, torch.Tensor)
        The weights before the update, on any device, such as a `snapshot`. An iterable is read in step with ``after``
        and must have its order.
    after : mapping, or iterable of (str, torch.Tensor)
        The weights after it, with the same names and shapes. Read once, one at a time; it is quantized where it
        lies. Parameters that stay in full precision are skipped on both sides.
    dtype : {"int8", "fp8"}
    code_bits : int
        See `qurl.quantization.quantize`.

    Returns
    -------
    UpdateToNoise
        A ratio to an error of zero (every weight is exactly a code) is inf, or NaN where the update is zero too.

    Raises
    ------
    ValueError
        If names or shapes of ``before`` and ``after`` differ, no weight is quantized, a weight holds NaN or infinity
        (with its name), or ``before`` is the live parameters themselves, whose update would always be zero.
    """
    get_format(dtype).levels(code_bits)
    names, counts, sums = [], [], []
    for name, old, new in _pairs(before, after):
        names.append(name)
        counts.append(old.numel())
        sums.append(_layer_sums(name, old.to(new.device), new, dtype, code_bits))
    if not names:
        raise ValueError(
            "before and after hold no projection of a decoder layer: pass model.named_parameters()."
        )
    # One transfer for all layers: an accelerator is not waited for in between.
    sums = torch.stack(sums).cpu()
    table = _figures(pd.DataFrame(sums.numpy(), columns=_SUMS, index=pd.Index(names, name="layer")), counts)
    whole = pd.DataFrame(sums.sum(0, keepdim=True).numpy(), columns=_SUMS)
    return UpdateToNoise(table, _figures(whole, [sum(counts)]).iloc[0].to_dict())


_SUMS = ["changed", "squared_update", "squared_error", "steps"]


def _figures(sums: pd.DataFrame, counts: list[int]) -> pd.DataFrame:
    update, error = sums["squared_update"] ** 0.5, sums["squared_error"] ** 0.5
    return pd.DataFrame(
        {
            "codes": counts,
            "codes_changed": sums["changed"] / counts,
            "update_norm": update,
            "error_norm": error,
            "update_to_error": update / error,
            "update_to_step": sums["steps"] / counts,
        }
    )


def _projections(named_params: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    pairs = named_params.items() if isinstance(named_params, Mapping) else named_params
    return ((name, tensor) for name, tensor in pairs if is_quantized_name(name))


def _pairs(before: NamedTensors, after: NamedTensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, before, after) of every quantized weight; ValueError as soon as the two do not belong together."""
    lookup = dict(_projections(before)) if isinstance(before, Mapping) else None
    stream = None if lookup is not None else _projections(before)
    for name, new in _projections(after):
        if lookup is not None:
            old_name, old = name, lookup.pop(name, None)
        else:
            old_name, old = next(stream, (None, None))
        if old is None or old_name != name or old.shape != new.shape:
            found = "nothing" if old is None else f"{old_name} of shape {tuple(old.shape)}"
            raise ValueError(
                f"after holds {name} of shape {tuple(new.shape)}, but before holds {found}: pass the parameters of "
                "one model, whole and in the same order."
            )
        if old.data_ptr() == new.data_ptr():
            raise ValueError(
                f"before and after share the memory of {name}, so no update can be seen: take before with "
                "snapshot(model.named_parameters())."
            )
        yield name, old, new
    left = next(iter(lookup), None) if lookup is not None else next(stream, (None, None))[0]
    if left is not None:
        raise ValueError(f"before holds {left}, but after does not: pass the parameters of one model.")


def _layer_sums(name: str, old: torch.Tensor, new: torch.Tensor, dtype: str, code_bits: int) -> torch.Tensor:
    """`_SUMS` of one weight, FP64, on its device."""
    elements = _CPU_BLOCK_ELEMENTS if new.device.type == "cpu" else new.numel()
    rows = min(len(new), max(1, elements // new.shape[1]))
    blocks = list(zip(old.split(rows), new.split(rows), strict=True))
    # Rows have scales of their own, so a block has the codes that it has within the whole weight.
    quantized = quantized_named_tensors(
        ((name, block) for pair in blocks for block in pair), dtype, code_bits
    )
    # Fresh memory for every block would cost as much as the arithmetic.
    values, working = torch.empty((2, rows, new.shape[1]), dtype=torch.float32, device=new.device)
    total = torch.zeros(len(_SUMS), dtype=torch.float64, device=new.device)
    for old_block, new_block in blocks:
        codes, scale, new_codes, _ = (tensor for _, tensor in islice(quantized, 4))
        value, work = values[: len(codes)], working[: len(codes)]
        _read_codes(codes, value)
        # Error and update are in units of the row's scale, so that squares of updates of 1e-7 stay normal numbers.
        torch.div(old_block, scale, out=work)
        error = torch.linalg.vector_norm(work.sub_(value), dim=1)
        work.copy_(new_block).sub_(old_block).div_(scale)
        update = torch.linalg.vector_norm(work, dim=1)
        if dtype == "fp8":
            work.div_(_spacing(value))
        steps = work.abs_().sum(1)  # in half the time of vector_norm(ord=1)
        scale = scale.double()[:, 0]
        sums = [(update * scale).square(), (error * scale).square(), steps.double()]
        total += torch.stack([_count_changed(codes, new_codes).double(), *(row.sum() for row in sums)])
    return total


def _count_changed(codes: torch.Tensor, new_codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype is torch.int8:
        return (codes != new_codes).count_nonzero()
    codes, new_codes = codes.view(torch.uint8), new_codes.view(torch.uint8)
    nonzero = (codes | new_codes) & 0x7F  # FP8 has two zeros, which are one code here
    return ((codes != new_codes) & (nonzero != 0)).count_nonzero()


def _read_codes(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Write the value of each code to ``out`` (FP32).

    torch converts E4M3 one by one on a CPU, ten times slower than this: sign, 4 bits of exponent and 3 of fraction are
    put where FP32 has them, and the exponent's bias of 7 is made one of 127 (a product that is exact).
    """
    if codes.dtype is torch.int8:
        out.copy_(codes)
        return
    bits = out.view(torch.int32).copy_(codes.view(torch.int8))
    bits <<= 24
    bits >>= 4  # the sign fills 4 bits, of which the mask leaves the first
    bits &= _SIGN_EXPONENT_FRACTION
    out.mul_(2.0**120)


_SIGN_EXPONENT_FRACTION = 0x87F00000 - (1 << 32)


def _spacing(values: torch.Tensor) -> torch.Tensor:
    """Distance between neighbouring E4M3 numbers at ``values`` (FP32, overwritten); 2**-9 below 2**-6."""
    bits = values.view(torch.int32)
    bits &= 0x7F800000  # only the exponent stays: 2**floor(log2 |value|), and 0 for 0
    return values.clamp_(min=2.0**-6).mul_(2.0**-3)
