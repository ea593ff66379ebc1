"""What runs inside vLLM's worker: loading a policy's weights into the live model, and looking at what it holds.

vLLM mixes `RolloutWorker` into its worker class (``worker_extension_cls``), in this process and in servers alike, and
calls its methods through ``collective_rpc``.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import vllm
from safetensors.torch import load_file
from vllm.platforms import current_platform

from qurl.rollout.sync import digest


def kernel_of(layer: torch.nn.Module):
    """vLLM's quantized linear kernel of a layer, or None for a layer in full precision."""
    scheme = getattr(layer, "scheme", None)
    return getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)


def codes_and_scale(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (out, in) and FP32 scale (out, 1) that a quantized layer multiplies with, however its kernel packs them.

    Raises
    ------
    TypeError
        If the kernel keeps its weights in a form that cannot be read back.
    """
    kernel = kernel_of(layer)
    if hasattr(kernel, "codes_and_scale"):
        return kernel.codes_and_scale()
    if not isinstance(layer.weight, torch.Tensor):
        raise TypeError(f"{type(kernel).__name__} does not give its codes back")
    # vLLM's other kernels keep a (in, out) view of the (out, in) codes.
    return layer.weight.t(), layer.weight_scale.reshape(-1, 1)


def _rms_norm(norm: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None):
    """``RMSNorm.forward_native`` in one operator: FP32 inside, rounded once; the residual is updated in place."""
    # The operators walk over rows that lie one after the other; a head's share of fused q, k and v does not.
    if residual is None:
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, norm.weight, norm.variance_epsilon)
        return out
    if not (x.is_contiguous() and residual.is_contiguous()):
        return norm.forward_native(x, residual)
    torch.ops._C.fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    return x, residual


class RolloutWorker:
    """Methods added to vLLM's worker. ``self.model_runner`` and ``self.vllm_config`` are vLLM's."""

    # Which sync the weights are of: the trainer's name for it. None from the start, and after a load that failed.
    qurl_weights: str | None = None
    # The sync that has begun.
    qurl_loading: str | None = None

    def qurl_forget_step(self) -> None:
        """Drop what an interrupt left between running the model and drawing tokens; vLLM would stumble over it."""
        self.model_runner.execute_model_state = None

    def qurl_release(self) -> None:
        """Forget what the last reload noted of each layer: its tensors, through which the layer would stay alive."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for module in self.model_runner.get_model().modules():
            LAYERWISE_INFO.pop(module, None)

    def qurl_clear_kv_cache(self) -> None:
        """Overwrite the cached keys and values with zeros; the prefix cache must be reset before the next request.

        NaN would outlive the sequence that left it: attention multiplies what lies behind the end of the next sequence
        in that block by zero, instead of skipping it.
        """
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def qurl_use_fast_ops(self, seed: int) -> None:
        """On a CPU, take the operations around the products from compiled code; on a GPU vLLM does so itself.

        Tokens are drawn by inversion (`qurl.rollout.sampling`); norms run in vLLM's own fused CPU operator, which its
        eager mode leaves aside for about ten torch operations; SwiGLU in one pass; attention to one new token per
        sequence as in `qurl.rollout.kernels.vllm_attention`. Only this engine's objects change.
        """
        if not current_platform.is_cpu():
            return
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.layernorm import RMSNorm

        from qurl.rollout.kernels import silu_and_mul, unavailable
        from qurl.rollout.kernels.vllm_attention import use_decode_attention
        from qurl.rollout.sampling import InversionSampler

        compiled_activation = unavailable("int8") is None

        sampler = InversionSampler(self.model_runner.sampler.logprobs_mode, self._qurl_own_seed(seed))
        self.model_runner.sampler = sampler
        for module in self.model_runner.get_model().modules():
            if type(module) is SiluAndMul and compiled_activation:
                module._forward_method = silu_and_mul
            elif isinstance(module, Attention):
                use_decode_attention(module)
            elif type(module) is RMSNorm and module.has_weight and module.variance_size_override is None:
                module._forward_method = functools.partial(_rms_norm, module)

    def qurl_reseed(self, seed: int) -> None:
        """Restart the sampler's random numbers, where they are its own; on a GPU those of a server's process."""
        seed = self._qurl_own_seed(seed)
        if (reseed := getattr(self.model_runner.sampler, "reseed", None)) is not None:
            reseed(seed)
        elif "qurl_server" in self.vllm_config.additional_config:
            torch.cuda.manual_seed(seed)

    def _qurl_own_seed(self, seed: int) -> int:
        """Replicas must not draw the same completions; processes that share a layer must."""
        replica = self.vllm_config.parallel_config.data_parallel_index
        return seed if not replica else int(np.random.SeedSequence([seed, replica]).generate_state(1)[0])

    def qurl_load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors named and shaped as in a checkpoint of the engine's format into the live model.

        This is vLLM's layer-wise reload, which keeps the addresses that captured graphs read from. A failure half-way
        leaves a mixture of old and new weights in a model that can be loaded again.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner = self.model_runner
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(runner.model_config.dtype)  # kernels are prepared for the default dtype
        try:
            with torch.device(runner.device):  # whatever the caller's default device is
                runner.reload_weights(weights_iterator=named_tensors)
            self._qurl_refresh_tied_head()
        except BaseException:
            for module in runner.get_model().modules():
                _forget_partial_load(module)
            finalize_layerwise_reload(runner.get_model(), runner.model_config)
            raise
        finally:
            torch.set_default_dtype(default_dtype)

    def _qurl_refresh_tied_head(self) -> None:
        """Prepare the output head again where it shares the embedding's weight.

        The reload writes that weight through the embedding and passes the head over, whose CPU kernel multiplies with a
        packed copy made when the engine started.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        modules = list(self.model_runner.get_model().modules())
        heads = [m for m in modules if isinstance(m, ParallelLMHead)]
        embedded = {m.weight.data_ptr() for m in modules if type(m) is VocabParallelEmbedding}
        for head in heads:
            if head.weight.data_ptr() in embedded:
                head.quant_method.process_weights_after_loading(head)

    # --- of a server, whose trainer talks to it in JSON ---------------------------------------------------------------

    def qurl_state(self) -> dict:
        """What a trainer compares with its own before it trusts a server: model, formats, versions, weights."""
        config = self.vllm_config
        model = config.model_config
        return {
            # Through JSON, as the trainer's own: tuples and enumerations come back as lists and texts.
            "config": json.loads(model.hf_text_config.to_json_string(use_diff=False)),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "compute_dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "weights": self.qurl_weights,
            "versions": {"qurl": importlib.metadata.version("qurl"), "vllm": vllm.__version__},
            **config.additional_config["qurl_server"],
            **self.qurl_kernel(),
        }

    def qurl_begin(self, weights: str) -> None:
        """From now on this process holds no sync's weights, until ``weights`` are confirmed."""
        self.qurl_weights, self.qurl_loading = None, weights

    def qurl_load_file(self, name: str, sha256: str) -> None:
        """`qurl_load_weights` from a safetensors file that the trainer has put into the server's own folder.

        Raises
        ------
        ValueError
            Where the name leads elsewhere, or the file is not the one whose checksum was sent.
        """
        path = Path(self.vllm_config.additional_config["qurl_server"]["handover"], name)
        if Path(name).name != name or path.suffix != ".safetensors":
            raise ValueError(f"{name!r} is no file in the folder of this server.")
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise ValueError(f"the weights in {name!r} are not those that were sent: their checksum differs.")
        self.qurl_load_weights(load_file(path).items())

    def qurl_confirm(self, weights: str, sent: dict[str, str]) -> None:
        """Name the weights that were loaded last, if they are what was sent: `qurl_require` accepts them from then on.

        Parameters
        ----------
        weights : str
            The trainer's name for this sync.
        sent : dict
            `qurl.rollout.sync.digest` of codes and scale of some projections. Compared where this process holds whole
            ones; of a tensor-parallel group each holds a part.

        Raises
        ------
        RuntimeError
            With the names of the layers that are wrong.
        """
        self.qurl_weights = None
        if self.qurl_loading != weights:
            raise RuntimeError("this server has been given the weights of another trainer meanwhile.")
        if bad := self.qurl_bad_scales():
            raise RuntimeError(
                f"the scales of {', '.join(bad[:3])} are not finite and positive after the sync."
            )
        if self.vllm_config.parallel_config.tensor_parallel_size == 1:
            wrong = [name for name, sum_ in sent.items() if digest(*self.qurl_codes_and_scale(name)) != sum_]
            if wrong:
                raise RuntimeError(
                    f"the server does not hold the codes that were sent for {', '.join(wrong)}."
                )
        self.qurl_weights = weights

    def qurl_require(self, weights: str) -> None:
        """Raise in every process of the server that holds other weights than those of the sync ``weights``."""
        if self.qurl_weights != weights:
            raise RuntimeError(
                "this server has no weights of a trainer: it was started again, or its last sync failed."
                if self.qurl_weights is None
                else "this server has been given the weights of another trainer."
            )

    def qurl_linear_layers(self) -> dict[str, str | None]:
        """Kernel class name of every linear layer by module name; None where the weights are in full precision."""
        return {
            name: type(kernel).__name__ if (kernel := kernel_of(layer)) else None
            for name, layer in self._qurl_linears()
        }

    def qurl_kernel(self) -> dict:
        """Name of the quantized linear kernel, and whether it emulates a number format that this machine lacks."""
        kernels = [kernel for _, layer in self._qurl_linears() if (kernel := kernel_of(layer))]
        if not kernels:
            return {"linear_kernel": "full precision", "emulated": False}
        kernel = kernels[0]
        return {
            "linear_kernel": getattr(kernel, "description", type(kernel).__name__),
            "emulated": bool(getattr(kernel, "emulated", False)),
        }

    def qurl_bad_scales(self) -> list[str]:
        """Names of the quantized layers with a scale that is not finite and positive."""
        bad = []
        for name, layer in self._qurl_linears():
            if kernel_of(layer) is not None:
                scale = layer.weight_scale
                if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                    bad.append(name)
        return bad

    def qurl_mismatched(self, sent: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
        """Which of the sent projections (name → codes, scale) the live model does not hold bit for bit."""
        wrong = []
        for name, (codes, scale) in sent.items():
            layer, rows = self._qurl_find(name)
            live_codes, live_scale = codes_and_scale(layer)
            codes, scale = (
                self._qurl_part(name, layer, codes),
                self._qurl_part(name, layer, scale, is_scale=True),
            )
            same_codes = torch.equal(_bits(live_codes[rows]).cpu(), _bits(codes).cpu())
            if not (same_codes and torch.equal(live_scale[rows].float().cpu(), scale.float().cpu())):
                wrong.append(name)
        return wrong

    def qurl_codes_and_scale(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (out, in) and scale (out, 1) of the checkpoint's projection ``name``, read from the live model."""
        layer, rows = self._qurl_find(name)
        codes, scale = codes_and_scale(layer)
        return codes[rows].cpu().clone(), scale[rows].float().cpu().clone()

    def _qurl_linears(self) -> Iterator[tuple[str, torch.nn.Module]]:
        from vllm.model_executor.layers.linear import LinearBase

        for name, module in self.model_runner.get_model().named_modules():
            if isinstance(module, LinearBase):
                yield name, module

    def _qurl_find(self, name: str) -> tuple[torch.nn.Module, slice]:
        """The live layer with a checkpoint's projection, and its rows there: q, k, v share a layer, and gate and up."""
        model = self.model_runner.get_model()
        module_name = re.sub(r"\.weight$", "", name)
        parent, _, leaf = module_name.rpartition(".")
        for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
            if leaf in parts and len(parts) > 1:
                layer = model.get_submodule(f"{parent}.{fused}")
                index, widths = parts.index(leaf), layer.logical_widths
                start = sum(widths[:index])
                return layer, slice(start, start + widths[index])
        return model.get_submodule(module_name), slice(None)

    def _qurl_part(self, name: str, layer, tensor: torch.Tensor, is_scale: bool = False) -> torch.Tensor:
        """This process's part of a projection's codes or scale, where a tensor-parallel group shares the layer."""
        from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

        size, rank = layer.tp_size, layer.tp_rank
        if isinstance(layer, RowParallelLinear):
            return tensor if is_scale else tensor.chunk(size, dim=1)[rank]
        if isinstance(layer, QKVParallelLinear) and not name.endswith("q_proj.weight"):
            # Fewer heads of keys and values than processes: neighbours hold the same one.
            size, rank = size // layer.num_kv_head_replicas, rank // layer.num_kv_head_replicas
        return tensor.chunk(size, dim=0)[rank]


def _bits(codes: torch.Tensor) -> torch.Tensor:
    """Codes as bytes: FP8 tensors have no comparison."""
    return codes.contiguous().view(torch.uint8)


def _forget_partial_load(module: torch.nn.Module) -> None:
    """Let a layer whose load was cut off take its old tensors back, instead of being processed half-filled."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    info = get_layerwise_info(module)
    if info.can_load():
        info.loaded_weights.clear()
        info.load_numel = 0
