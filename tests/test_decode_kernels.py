"""Attention and SwiGLU of a decode step against float64, and attention against vLLM's over the same cache."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("vllm", reason="needs vLLM: pip install 'qurl[cpu]'")
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from qurl.rollout import RolloutEngine, kernels

if not current_platform.is_cpu():
    pytest.skip("needs vLLM for CPUs", allow_module_level=True)
if reason := kernels.unavailable("int8"):
    assert "could not compile" not in reason, reason
    pytest.skip(reason, allow_module_level=True)

# One token; below, at and above a group of 32; below, at and above a block of 128; several blocks.
LENGTHS = torch.tensor([1, 31, 32, 33, 127, 128, 129, 300], dtype=torch.int32)
TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 1e-5}


class Batch:
    """One new token for each of LENGTHS, earlier ones in blocks in random order; the rest of the cache is NaN."""

    def __init__(self, heads: int, kv_heads: int, size: int, block: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(heads * size + block)
        rows, self.block = len(LENGTHS), block
        per_row = -(-int(LENGTHS.max()) // block)
        self.table = torch.randperm(rows * per_row + 3, generator=generator)[: rows * per_row]
        self.table = self.table.view(rows, per_row).int()
        # Views of one tensor, as a fused projection gives them.
        widths = [heads * size, kv_heads * size, kv_heads * size]
        self.qkv = torch.randn(rows, sum(widths), generator=generator).to(dtype)
        self.q, self.k, self.v = self.qkv.split(widths, dim=1)
        self.heads, self.kv_heads, self.size, self.scale = heads, kv_heads, size, size**-0.5
        last = LENGTHS.long() - 1
        self.slots = self.table.gather(1, (last // block)[:, None]).squeeze(1).long() * block + last % block
        self.cache = torch.full((rows * per_row + 3, kv_heads, block, 2 * size), torch.nan, dtype=dtype)
        self.history = []
        for row, length in enumerate(LENGTHS.tolist()):
            keys, values = torch.randn(2, length, kv_heads, size, generator=generator).to(dtype)
            for token in range(length - 1):
                self.write(row, token, keys[token], values[token])
            keys[-1], values[-1] = self.k[row].view(kv_heads, size), self.v[row].view(kv_heads, size)
            self.history.append((keys, values))

    def write(self, row: int, token: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """vLLM's layout: within a block and head the keys (size, block), then the values (block, size)."""
        interior = self.cache[self.table[row, token // self.block]].view(self.kv_heads, 2, -1)
        interior[:, 0].view(self.kv_heads, self.size, self.block)[:, :, token % self.block] = key
        interior[:, 1].view(self.kv_heads, self.block, self.size)[:, token % self.block] = value

    def attention(self, **replaced) -> torch.Tensor:
        arguments = {
            "query": self.q,
            "key": self.k,
            "value": self.v,
            "cache": self.cache,
            "table": self.table,
            "lengths": LENGTHS,
            "slots": self.slots,
            "scale": self.scale,
        }
        return kernels.decode_attention(**arguments | replaced)

    def exact(self) -> torch.Tensor:
        """softmax(q kᵀ scale) v in FP64."""
        out = []
        for row, (keys, values) in enumerate(self.history):
            query = self.q[row].double().view(self.kv_heads, -1, self.size)
            scores = torch.einsum("hgd,thd->hgt", query, keys.double()) * self.scale
            out.append(torch.einsum("hgt,thd->hgd", scores.softmax(-1), values.double()).reshape(-1))
        return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(9, 3, 64), (4, 4, 32), (2, 1, 96), (8, 2, 128), (7, 1, 64), (16, 2, 32)],
    ids=lambda value: str(value),
)
def test_attention_is_the_reference_rounded_once(heads, kv_heads, size, block, dtype):
    batch = Batch(heads, kv_heads, size, block, dtype)
    written = batch.cache.clone()
    out = batch.attention()
    assert out.dtype == dtype and out.shape == batch.q.shape
    exact = batch.exact()
    error = (out.double() - exact).abs()
    assert (error <= TOLERANCE[dtype] * exact.abs() + 1e-5).all()
    # One token of each sequence is new in the cache, and nothing else.
    untouched, batch.cache = batch.cache, written
    for row, length in enumerate(LENGTHS.tolist()):
        batch.write(row, length - 1, batch.k[row].view(kv_heads, size), batch.v[row].view(kv_heads, size))
    torch.testing.assert_close(untouched, written, rtol=0, atol=0, equal_nan=True)


def test_attention_is_vllms():
    """Same cache bit for bit, same outputs but for the order of FP32 sums."""
    current_platform.import_kernels()
    batch = Batch(9, 3, 64, 128, torch.bfloat16)
    batch.cache.nan_to_num_()  # vLLM reads what lies beyond a sequence's end
    cache = batch.cache.clone()
    expected = torch.empty(len(LENGTHS), 9, 64, dtype=torch.bfloat16)
    starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    keys, values = cache.view(len(cache), 3, 2 * 128, 64).chunk(2, dim=2)
    scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    ops.cpu_attn_reshape_and_cache(
        batch.k.unflatten(1, (3, 64)),
        batch.v.unflatten(1, (3, 64)),
        keys,
        values,
        batch.slots,
        "vec",
        **scales,
    )
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(LENGTHS),
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        seq_lens=LENGTHS,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
        dynamic_causal=None,
        kv_cache_dtype="auto",
    )
    ops.cpu_attention_with_kv_cache(
        query=batch.q.unflatten(1, (9, 64)),
        key_cache=keys,
        value_cache=values,
        output=expected,
        query_start_loc=starts,
        seq_lens=LENGTHS,
        scale=batch.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=batch.table,
        softcap=0.0,
        scheduler_metadata=metadata,
        s_aux=None,
        dynamic_causal=None,
        **scales,
    )
    out = batch.attention()
    assert torch.equal(batch.cache, cache)
    expected = expected.view_as(out)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)
    assert (out == expected).float().mean() > 0.99


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_query_gives_nan_and_no_other_does(value):
    batch = Batch(4, 2, 32, 32, torch.bfloat16)
    batch.q[2, 5] = value
    broken = batch.attention().isnan().view(len(LENGTHS), 4, 32)
    assert broken[2, 0].all() and broken.sum() == 32


def test_padding_writes_nothing():
    """vLLM marks rows without a token by slot -1."""
    batch = Batch(4, 2, 32, 32, torch.float32)
    before = batch.cache.clone()
    batch.attention(slots=torch.full_like(batch.slots, -1))
    torch.testing.assert_close(batch.cache, before, rtol=0, atol=0, equal_nan=True)


def test_no_sequences():
    batch = Batch(4, 2, 32, 32, torch.bfloat16)
    empty = {"query": batch.q[:0], "key": batch.k[:0], "value": batch.v[:0]}
    assert batch.attention(**empty).shape == (0, 128)


def test_engines_take_it_only_where_it_computes_the_same(tmp_path, monkeypatch):
    from vllm.model_executor.layers.attention import Attention

    from qurl.rollout.kernels.vllm_attention import use_decode_attention

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)

    def attention_layers(engine) -> list:
        model = engine._llm.llm_engine.model_executor.driver_worker.worker.get_model()
        return [module for module in model.modules() if isinstance(module, Attention)]

    with RolloutEngine(tmp_path, "bf16", kernels="vllm") as stock:
        assert ["forward" in vars(layer) for layer in attention_layers(stock)] == [False, False]
    with RolloutEngine(tmp_path, "bf16") as engine:
        layers = attention_layers(engine)
        assert ["forward" in vars(layer) for layer in layers] == [True, True]
        layer = layers[0]
        for holder, name, value in (
            (layer, "isa", "amx"),
            (layer, "kv_sharing_target_layer_name", "another"),
            (layer, "head_size", 48),
            (layer, "kv_cache", layer.kv_cache.view(torch.uint8)),
            (layer.impl, "sliding_window", 16),
            (layer.impl, "logits_soft_cap", 30.0),
            (layer.impl, "sinks", torch.zeros(2)),
            (layer.impl, "alibi_slopes", torch.zeros(2)),
        ):
            with monkeypatch.context() as changed:
                changed.delitem(vars(layer), "forward")
                changed.setattr(holder, name, value)
                use_decode_attention(layer)
                assert "forward" not in vars(layer), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_silu_and_mul(dtype):
    generator = torch.Generator().manual_seed(0)
    x = (8 * torch.randn(7, 3, 2 * 77, generator=generator)).to(dtype)
    # Around where e^x leaves the FP32 numbers, and beyond: torch gives NaN for -inf, which is -inf / inf.
    extremes = torch.tensor([-200, 200, -88, -89, 0, 88, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    x[0, 0, : len(extremes)] = extremes
    gate, up = x.float().chunk(2, dim=-1)
    torch.testing.assert_close(
        kernels.silu_and_mul(x),
        (torch.nn.functional.silu(gate) * up).to(dtype),
        rtol=2**-7 if dtype is torch.bfloat16 else 1e-6,
        atol=1e-30,
        equal_nan=True,
    )
