"""CPU kernels of decoding, compiled on first use, with a library's kernels where that is not possible.

``w8a8.c`` (linear layers) and ``decode.c`` (attention, SwiGLU, sampling) are plain C with AVX-512 intrinsics. They are
compiled for this machine's processor within about three seconds and kept under ``<cache>/kernels``, named by source,
compiler and processor. They run on the OpenMP threads that torch has started, whose library they share.
"""

import contextlib
import ctypes
import functools
from pathlib import Path

import torch

from qurl.quantization import FORMATS
from qurl.rollout.kernels.build import KernelUnavailableError, load_library

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("w8a8.c", "decode.c"))
_HEADER = Path(__file__).with_name("simd.h")
# Outputs per block of packed weights: COLUMNS in w8a8.c.
_COLUMNS = 32
_REQUIRED = ("avx512f", "avx512bw", "avx512vl")
_REQUIRED_FOR = {"int8": ("avx512_vnni",), "fp8": ("avx512_bf16", "avx512vbmi")}


def cpu_flags() -> frozenset[str]:
    """Instruction sets of the processor, as Linux names them; empty where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


@functools.cache  # asked for each layer; a compiler that fails does so slowly
def unavailable(dtype: str) -> str | None:
    """Why the compiled kernel for ``dtype`` cannot be used on this machine; None if it can."""
    missing = [flag for flag in (*_REQUIRED, *_REQUIRED_FOR[dtype]) if flag not in cpu_flags()]
    if missing:
        return f"the processor lacks {', '.join(missing)}"
    try:
        _library()
    except KernelUnavailableError as error:
        return str(error)
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled functions, with their signatures."""
    library = load_library(_SOURCES, [_HEADER], machine=cpu_flags())
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.linear.argtypes = [integer, pointer, long, integer, long, long, *[pointer] * 5, long, pointer]
    library.linear.restype = integer
    library.pack.argtypes = [integer, pointer, long, long, pointer, pointer]
    library.pack.restype = None
    library.silu_and_mul.argtypes = [pointer, integer, long, long, pointer]
    library.silu_and_mul.restype = None
    library.decode_attention.argtypes = [
        *[pointer, long] * 3,
        integer,
        *[long] * 4,
        ctypes.c_float,
        pointer,
        *[long] * 3,
        pointer,
        long,
        *[pointer] * 3,
    ]
    library.decode_attention.restype = integer
    library.sample.argtypes = [pointer, integer, long, long, long, *[pointer] * 5]
    library.sample.restype = None
    return library


@functools.cache
def _tables() -> torch.Tensor:
    """Low bytes, then high bytes, of the BF16 values of the 128 E4M3 codes without a sign."""
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes.to(torch.bfloat16).view(torch.uint8).view(-1, 2).t().contiguous()


class PackedLinear:
    """A quantized linear layer in the layout of ``w8a8.c``; it owns all that its product reads.

    Parameters
    ----------
    codes : torch.Tensor
        Shape (out, in), int8 or float8_e4m3fn, on the CPU.
    scale : torch.Tensor
        Shape (out, 1), FP32.

    Raises
    ------
    KernelUnavailableError
        If the compiled kernels cannot be had.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor):
        self.dtype = next(name for name, fmt in FORMATS.items() if fmt.code_dtype == codes.dtype)
        library = _library()
        self._linear = library.linear
        self.out_features, self.in_features = codes.shape
        per_group = 4 if self.dtype == "int8" else 2
        self._groups = -(-self.in_features // per_group)
        padded = -(-self.out_features // _COLUMNS) * _COLUMNS
        self._packed = _aligned(padded * self._groups * per_group)
        self._start = torch.empty(padded, dtype=torch.int32)
        self._scale = torch.zeros(padded, dtype=torch.float32)
        self._scale[: self.out_features] = scale.reshape(-1)
        codes = codes.contiguous()
        library.pack(
            self.dtype == "fp8",
            codes.data_ptr(),
            *codes.shape,
            self._packed.data_ptr(),
            self._start.data_ptr(),
        )
        self._pointers = (
            self._packed.data_ptr(),
            self._start.data_ptr(),
            self._scale.data_ptr(),
            _tables().data_ptr(),
        )

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """q(x) · Wᵀ, scaled, plus the FP32 bias (out,), rounded once to x's dtype: (..., in) to (..., out)."""
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"x of {x.dtype} cannot be multiplied: use torch.bfloat16 or torch.float32.")
        rows = x.reshape(-1, self.in_features)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = torch.empty((len(rows), self.out_features), dtype=x.dtype)
        failed = self._linear(
            self.dtype == "fp8",
            rows.data_ptr(),
            rows.stride(0),
            x.dtype == torch.bfloat16,
            len(rows),
            self.in_features,
            *self._pointers,
            None if bias is None else bias.data_ptr(),
            self.out_features,
            out.data_ptr(),
        )
        if failed:
            raise MemoryError(f"no memory to quantize an input of shape {tuple(x.shape)}")
        return out.view(*x.shape[:-1], self.out_features)

    def codes_and_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (out, in) and scale (out, 1), read back from the packed weights."""
        if self.dtype == "int8":
            blocks = self._packed.view(-1, self._groups, _COLUMNS, 4).transpose(1, 2)
        else:
            # Output 16 a + 4 b + c lies at (b, a, c): see `expand` in w8a8.c.
            blocks = self._packed.view(-1, self._groups, 4, 2, 4, 2).permute(0, 3, 2, 4, 1, 5)
        codes = blocks.reshape(len(self._scale), -1)[: self.out_features, : self.in_features]
        return codes.contiguous().view(FORMATS[self.dtype].code_dtype), self._scale[: self.out_features, None]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(x[..., :d]) * x[..., d:]`` of a contiguous x (..., 2 d), BF16 or FP32, rounded once: (..., d).

    Raises
    ------
    KernelUnavailableError
        If the compiled kernels cannot be had.
    """
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype)
    _library().silu_and_mul(
        x.data_ptr(), x.dtype == torch.bfloat16, out.numel() // max(width, 1), width, out.data_ptr()
    )
    return out


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one new token per sequence, whose key and value are written to vLLM's paged cache first.

    Scores, softmax and sums are FP32, rounded once.

    Parameters
    ----------
    query : torch.Tensor
        Shape (B, heads * head_size), BF16 or FP32 like key, value and cache; contiguous within a row.
    key, value : torch.Tensor
        Shape (B, kv_heads * head_size), contiguous within a row.
    cache : torch.Tensor
        Shape (blocks, kv_heads, block_size, 2 * head_size), block and head size multiples of 32. vLLM's layout for
        AVX-512: within a block and head the keys (head_size, block_size), then the values (block_size, head_size).
    table : torch.Tensor
        Shape (B, n), int32: the blocks of each sequence, contiguous within a row.
    lengths : torch.Tensor
        Shape (B,), int32: tokens of each sequence, the new one included.
    slots : torch.Tensor
        Shape (B,), int64: block * block_size + offset of the new token.
    scale : float
        Of the scores.

    Returns
    -------
    torch.Tensor
        Shape (B, heads * head_size).

    Raises
    ------
    KernelUnavailableError
        If the compiled kernels cannot be had.
    """
    rows, width = query.shape
    _, kv_heads, block_size, head_size = cache.shape
    head_size //= 2
    out = torch.empty((rows, width), dtype=query.dtype)
    failed = _library().decode_attention(
        query.data_ptr(),
        query.stride(0),
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        query.dtype == torch.bfloat16,
        rows,
        width // head_size,
        kv_heads,
        head_size,
        scale,
        cache.data_ptr(),
        cache.stride(0),
        cache.stride(1),
        block_size,
        table.data_ptr(),
        table.stride(0),
        lengths.data_ptr(),
        slots.data_ptr(),
        out.data_ptr(),
    )
    if failed:
        raise MemoryError(f"no memory for the attention scores of {rows} sequences")
    return out


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row by inversion (`qurl.rollout.sampling`), in one go from logits to log-prob.

    Parameters
    ----------
    logits : torch.Tensor
        Shape (B, V), BF16 or FP32, contiguous within a row.
    temperature : torch.Tensor
        Shape (B,), FP32, positive.
    uniform : torch.Tensor
        Shape (B,), FP64 in [0, 1).

    Returns
    -------
    tokens, logps, ranks : torch.Tensor
        Each of shape (B,): int64; FP32, after temperature; int64, 1 for the likeliest token.

    Raises
    ------
    KernelUnavailableError
        If the compiled kernels cannot be had.
    """
    rows = len(logits)
    tokens, ranks = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    logps = torch.empty(rows, dtype=torch.float32)
    _library().sample(
        logits.data_ptr(),
        logits.dtype == torch.bfloat16,
        *logits.shape,
        logits.stride(0),
        temperature.data_ptr(),
        uniform.data_ptr(),
        tokens.data_ptr(),
        logps.data_ptr(),
        ranks.data_ptr(),
    )
    return tokens, logps, ranks


def _aligned(size: int) -> torch.Tensor:
    """Bytes that begin on a cache line, as ``w8a8.c`` loads them."""
    buffer = torch.empty(size + 64, dtype=torch.uint8)
    start = -buffer.data_ptr() % 64
    return buffer[start : start + size]
