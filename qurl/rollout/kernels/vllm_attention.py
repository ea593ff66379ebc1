"""Attention of decoding in place of vLLM's on a CPU, over the same paged cache.

vLLM's kernel for AVX-512 reads keys and values at a third of the memory's speed. Ours fetches the next ones while it
computes (``decode.c``), and one call takes the place of four operators: two that vLLM registers for compilation, the
write to the cache and the attention.
"""

import functools

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from qurl.rollout.kernels import decode_attention, unavailable


def use_decode_attention(layer: Attention) -> None:
    """Let ``layer``, and no other, decode with `decode_attention`, if that computes what the layer asks for."""
    if _is_plain(layer) and unavailable("int8") is None:
        layer.forward = functools.partial(_forward, layer)


def _is_plain(layer: Attention) -> bool:
    """Whether this is softmax(q kᵀ scale) v over all earlier tokens, in the one cache layout that is known."""
    impl = layer.impl
    return (
        type(layer) is Attention
        and type(impl) is CPUAttentionBackendImpl
        and layer.isa == "vec"
        and layer.attn_type == AttentionType.DECODER
        and impl.alibi_slopes is None
        and impl.sinks is None
        and impl.sliding_window == -1
        and not impl.logits_soft_cap
        and layer.kv_sharing_target_layer_name is None
        and layer.kv_cache.dtype == layer.dtype
        and layer.dtype in (torch.bfloat16, torch.float32)
        and layer.head_size % 32 == 0
        and layer.head_size_v == layer.head_size
    )


def _forward(layer: Attention, query, key, value, output_shape=None, output_dtype=None) -> torch.Tensor:
    """Replaces ``Attention.forward``, and calls it for prompts and for vLLM's dummy runs."""
    context = get_forward_context()
    metadata = context.attn_metadata
    if isinstance(metadata, dict):
        metadata = metadata[layer.layer_name]
    if getattr(metadata, "max_query_len", None) != 1:
        return Attention.forward(layer, query, key, value, output_shape, output_dtype)
    rows = metadata.num_actual_tokens
    return decode_attention(
        query[:rows],
        key[:rows],
        value[:rows],
        layer.kv_cache,
        metadata.block_table,
        metadata.seq_lens,
        context.slot_mapping[layer.layer_name],
        layer.impl.scale,
    )
