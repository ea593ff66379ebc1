"""The CPU kernels as vLLM's linear kernels, made for weights that are loaded again and again.

vLLM's layer-wise reload lets a layer process its new weights, copies the registered results into the old tensors and
drops the new ones. vLLM's INT8 kernel for CPUs breaks there: oneDNN has kept a pointer to the dropped scale, and every
log-prob is NaN afterwards. These kernels own whatever their product reads, so a reload can do no harm, and give their
codes back for the check after a sync. On the layer stays the scale, which nothing reads.
"""

import torch
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels.linear.scaled_mm.cpu import (
    CPUFP8W8A8ScaledMMLinearKernel,
    CPUInt8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.platforms import current_platform

from qurl.quantization import FORMATS, cast_codes
from qurl.rollout.kernels import PackedLinear, unavailable


def _switched_off() -> bool:
    config = get_current_vllm_config_or_none()
    return config is not None and (config.additional_config or {}).get("qurl_kernels") is False


class _FP32Linear:
    """FP8 without the compiled kernel: codes multiplied in FP32, where their products are exact, and rounded once."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor):
        self._codes, self._scale = codes, scale
        self._handler = ops.create_onednn_mm(codes.float().t(), 32)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        # As `quantize`, which refuses NaN and infinity: here, as in w8a8.c, they turn their token's outputs into NaN.
        absmax = rows.abs().amax(1, keepdim=True)
        scale = (absmax / FORMATS["fp8"].max_code).clamp_(min=torch.finfo(torch.float32).tiny)
        codes = cast_codes(rows / scale, "fp8")
        out = ops.onednn_mm(self._handler, codes.float(), None).mul_(scale * self._scale.t())
        if bias is not None:
            out += bias
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    def codes_and_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._codes, self._scale


class Int8Linear(CPUInt8ScaledMMLinearKernel):
    """W8A8 INT8: the compiled kernel, or vLLM's own where that is better (AMX) or the only one, safe over reloads."""

    description = "INT8 W8A8 (qurl, AVX512-VNNI)"
    emulated = False

    @classmethod
    def can_implement(cls, c) -> tuple[bool, str | None]:
        if _switched_off():
            return False, "switched off by additional_config['qurl_kernels']"
        if not c.is_channelwise or c.is_static_input_scheme or not c.input_symmetric:
            return False, "only channel scales for weights and dynamic symmetric token scales for activations"
        return super().can_implement(c)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        codes, scale = layer.weight.data, layer.weight_scale.data
        if torch.cpu._is_amx_tile_supported() or unavailable("int8"):
            self.description = "INT8 W8A8 (vLLM)"
            self._codes_and_scale = codes.clone(), scale.clone()
            super().process_weights_after_loading(layer)
            self._scale_of_handler = (
                layer.weight_scale.data
            )  # oneDNN's handler points to it and does not own it
            self._product = None
            return
        self._product = PackedLinear(codes, scale)
        layer.weight = None

    def apply_weights(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._product is None:
            return super().apply_weights(layer, x, bias)
        return self._product(x, None if bias is None else bias.float())

    def codes_and_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (out, in) and FP32 scale (out, 1) of the last load."""
        return self._codes_and_scale if self._product is None else self._product.codes_and_scale()


class FP8Linear(FP8ScaledMMLinearKernel):
    """W8A8 FP8 for processors without FP8 arithmetic, in place of a fallback of vLLM's that is several times slower."""

    description = "FP8 W8A8 emulated (qurl, AVX512-BF16)"
    emulated = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not current_platform.is_cpu():
            return False, "requires a CPU."
        if CPUFP8W8A8ScaledMMLinearKernel.is_supported(compute_capability)[0]:
            return False, "the processor has FP8 arithmetic of its own."
        return True, None

    @classmethod
    def can_implement(cls, c) -> tuple[bool, str | None]:
        if _switched_off():
            return False, "switched off by additional_config['qurl_kernels']"
        weight, activation = c.weight_quant_key.scale, c.activation_quant_key.scale
        if (
            not weight.group_shape.is_per_channel()
            or activation.static
            or not activation.group_shape.is_per_token()
        ):
            return False, "only channel scales for weights and dynamic token scales for activations"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        codes, scale = layer.weight.data.t(), layer.weight_scale.data.reshape(-1, 1)
        if unavailable("fp8"):
            self.description = "FP8 W8A8 emulated (oneDNN, FP32)"
            self._product = _FP32Linear(codes.clone(), scale.clone())
        else:
            self._product = PackedLinear(codes, scale)
        layer.weight = None

    def apply_weights(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x, None if bias is None else bias.float())

    def apply_scaled_mm(self, **_) -> torch.Tensor:
        raise RuntimeError("apply_weights multiplies by itself and does not call apply_scaled_mm.")

    def codes_and_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (out, in) and FP32 scale (out, 1) of the last load."""
        return self._product.codes_and_scale()
