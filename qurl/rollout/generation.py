"""TRL's generation backend over quantized engines.

`QuantizedVLLMGeneration` replaces two things of `trl.generation.vllm_generation.VLLMGeneration`: how vLLM is started
and how weights get into it. The walk over the parameters stays TRL's, with its merging of adapters and its gathering
of shards.
"""

import logging
import math
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import is_peft_model
from transformers import GenerationConfig
from trl.generation.vllm_generation import VLLMGeneration

from qurl.quantization import is_quantized_name
from qurl.rollout.client import ServerLostError, server_url
from qurl.rollout.engine import RolloutEngine, Rollouts
from qurl.rollout.served import ServedEngine
from qurl.rollout.sync import SyncReport

logger = logging.getLogger(__name__)


class CountingEngine(RolloutEngine):
    """An engine that hands on NaN among the log-probs that it samples: its trainer counts them, and stops at many.

    A sync that makes the engine return NaN fails as before.
    """

    _hands_on = False

    def sample(self, *args, **options) -> Rollouts:
        """`generate`, but with NaN in ``logps`` where a log-prob is not a number."""
        self._hands_on = True
        try:
            return self.generate(*args, **options)
        finally:
            self._hands_on = False

    def _check_numbers(self, rows: list[list[float]]) -> None:
        if not self._hands_on:
            super()._check_numbers(rows)
        elif any(map(math.isnan, chain.from_iterable(rows))):
            # Other sequences must not meet NaN in keys and values.
            self._call("qurl_clear_kv_cache")
            self._llm.reset_prefix_cache()


class QuantizedVLLMGeneration(VLLMGeneration):
    """Samples for a TRL trainer from a copy of the policy in ``dtype``.

    Parameters
    ----------
    dtype : {"int8", "fp8", "bf16", "fp32"}
        Of the rollouts in training.
    code_bits : int
        See `qurl.rollout.RolloutEngine`.
    eval_dtype : {"same", "bf16", "fp32"}
        Of the rollouts in evaluation; another than ``dtype`` starts a second engine when it is first needed.
    bf16_weights : bool
        Quantize the BF16 cast of the projections instead of the parameters themselves.
    check : bool
        See `qurl.rollout.RolloutEngine.sync`.
    stop_token_ids : sequence of int
        End tokens of the trainer; sampling stops at them and at no other.
    seed : int
    transfer : {"auto", "file", "nccl"}
    call_timeout : float
        See `qurl.rollout.served.ServedEngine`, which samples with ``mode="server"``.
    **options
        Those of TRL's class.

    Attributes
    ----------
    last_sync : SyncReport or None
    last_rollouts : Rollouts or None
    dtype : str
        Of the engine that sampled last, or samples next.
    folder : pathlib.Path
        Config of the policy without weights, from which engines are started.
    """

    def __init__(
        self,
        *,
        dtype: str,
        code_bits: int,
        eval_dtype: str,
        bf16_weights: bool,
        check: bool,
        stop_token_ids: list[int],
        seed: int,
        transfer: str = "auto",
        call_timeout: float = 900.0,
        **options,
    ):
        self.train_dtype, self.code_bits = dtype, code_bits
        self.eval_dtype = dtype if eval_dtype == "same" else eval_dtype
        self.bf16_weights, self.check, self.seed = bf16_weights, check, seed
        self.stop_token_ids = stop_token_ids
        self.transfer, self.call_timeout = transfer, call_timeout
        self.dtype = dtype
        self.last_sync: SyncReport | None = None
        self.last_rollouts: Rollouts | None = None
        self._engines: dict[str, CountingEngine | ServedEngine] = {}
        # How often TRL has said that the policy changed, and at which of these each engine was synced.
        self._version = 0
        self._synced: dict[str, int] = {}
        super().__init__(**options)

    def _init_vllm(self) -> None:
        """Replaces TRL's method, which knows neither number formats nor CPUs, and loads weights in vain."""
        self._temporary = tempfile.TemporaryDirectory(prefix="qurl-policy-")
        self.folder = Path(self._temporary.name)
        policy = self.model.get_base_model() if is_peft_model(self.model) else self.model
        config = type(policy.config).from_dict(policy.config.to_dict())
        self._longest = getattr(config, "max_position_embeddings", None)
        if self.max_model_length and self._longest and self.max_model_length > self._longest:
            raise ValueError(
                f"vllm_max_model_length={self.max_model_length} exceeds what the model was trained for: use at most "
                f"{self._longest}."
            )
        room = self.max_model_length or self._longest
        if room and self.max_completion_length >= room:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} leaves no room for a prompt in "
                f"{'vllm_max_model_length=' if self.max_model_length else 'the model, whose limit is '}{room} tokens: "
                f"use less, such as {room // 2}."
            )
        # The architecture, whatever class holds it here (a wrapper's name would mean nothing to vLLM).
        config.architectures = [type(policy).__name__]
        config.eos_token_id = self.stop_token_ids
        config.save_pretrained(self.folder)
        GenerationConfig(eos_token_id=self.stop_token_ids).save_pretrained(self.folder)
        self._group = self._group_of_processes()
        self._engine(self.dtype)
        self.accelerator.wait_for_everyone()

    def _group_of_processes(self) -> "torch.distributed.ProcessGroup | None":
        """Neighbours that share an engine, as TRL forms them; None where each has its own."""
        size, processes = self.tensor_parallel_size, self.accelerator.num_processes
        if size == 1:
            return None
        if processes % size:
            raise ValueError(
                f"vllm_tensor_parallel_size={size} does not divide the {processes} processes of the training: use a "
                "divisor, or start more with accelerate launch --num_processes."
            )
        ranks = [list(range(first, first + size)) for first in range(0, processes, size)]
        return torch.distributed.new_subgroups_by_enumeration(ranks)[0]

    @property
    def _engine_index(self) -> int:
        """Of this process's engine: processes that share one draw the same random numbers."""
        return self.accelerator.process_index // self.tensor_parallel_size

    def _engine(self, dtype: str) -> "CountingEngine | ServedEngine":
        """The engine of a number format, started when it is first needed."""
        if dtype not in self._engines and self.mode == "server" and dtype == self.train_dtype:
            self._engines[dtype] = ServedEngine(
                self.folder,
                dtype,
                code_bits=self.code_bits,
                accelerator=self.accelerator,
                url=self.server_base_url or server_url(self.server_host, self.server_port),
                max_model_len=self.max_model_length,
                connect_seconds=self.server_timeout,
                call_seconds=self.call_timeout,
                transfer=self.transfer,
                group_port=self.group_port,
                seed=self.seed,
            )
        elif dtype not in self._engines:
            self._engines[dtype] = CountingEngine(
                self.folder,
                dtype,
                code_bits=self.code_bits if dtype == "int8" else 8,
                max_model_len=self.max_model_length,
                max_num_seqs=self.max_num_seqs,
                seed=self.seed + self._engine_index,
                gpu_memory_utilization=self.gpu_memory_utilization,
                tensor_parallel_size=self.tensor_parallel_size,
                enable_sleep_mode=self.enable_sleep_mode,
                track_codes=True,
                load_weights=False,
            )
        return self._engines[dtype]

    def begin(self, *, training: bool, stream: tuple[int, ...]) -> None:
        """Choose the engine of the next rollouts, and the random numbers that they are drawn with.

        Parameters
        ----------
        training : bool
        stream : tuple of int
            Names the rollouts within the run. The same stream gives the same random numbers, so that a resumed run
            samples what the uninterrupted one would have (on a CPU; on a GPU vLLM draws from the process's generator).
        """
        self.dtype = self.train_dtype if training else self.eval_dtype
        sequence = np.random.SeedSequence([self.seed, self._engine_index, not training, *stream])
        self._engine(self.dtype).reseed(int(sequence.generate_state(1)[0]))

    def use_full_precision(self) -> None:
        """Sample in BF16 from now on, and free the quantized engine."""
        engine = self._engines.pop(self.train_dtype)
        if self.eval_dtype == self.train_dtype:
            self.eval_dtype = "bf16"
        self.train_dtype = self.dtype = "bf16"
        engine.close()

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """TRL's walk, after which adapters are out and the base weights are bit for bit what they were.

        TRL's own leaves adapters merged when it is broken off; and what merging adds, taking out subtracts with
        rounding, so that the base would drift from sync to sync. (ZeRO-3 throws away what it gathered, and has
        nothing to keep.)
        """
        base = [(weight, weight.detach().to("cpu", copy=True)) for weight in _adapted_weights(self.model)]
        walk = super()._iter_named_params()
        try:
            yield from walk
        finally:
            walk.close()
            if _has_merged_adapter(self.model):
                with self._dist.gather_params(list(self.model.parameters())):
                    self.model.unmerge_adapter()
            for weight, before in base:
                weight.data.copy_(before)

    @contextmanager
    def named_params(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """What an engine is given: the policy's parameters, whole, adapters merged, cast where the cast is quantized.

        One at a time; a collective operation. At the end of the context, also when the walk is broken off, adapters
        are taken out again.
        """
        with closing(self._iter_named_params()) as parameters:
            yield map(self._cast, parameters)

    def _cast(self, named_param: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        name, tensor = named_param
        return name, tensor.to(torch.bfloat16) if self.bf16_weights and is_quantized_name(name) else tensor

    def sync_weights(self) -> None:
        """Replaces TRL's method: quantize, load, check, reset the prefix cache; called when the policy has changed."""
        self._version += 1
        self.last_sync = self._sync(self.dtype)

    def _sync(self, dtype: str) -> SyncReport:
        engine = self._engine(dtype)
        try:
            with self.named_params() as parameters:
                report = engine.sync(parameters, check=self.check)
        except ServerLostError as error:
            self._await_server(engine, error)
            with self.named_params() as parameters:
                report = engine.sync(parameters, check=self.check)
        self._synced[dtype] = self._version
        return report

    def _await_server(self, engine: ServedEngine, error: ServerLostError) -> None:
        reason = str(error).rstrip(".")
        logger.warning("%s; training waits up to %.0f s for it to come back.", reason, self.server_timeout)
        engine.reconnect()
        logger.warning("The server at %s is back, and is given the policy anew.", engine.url)

    def _sample(self, prompts: list[list[int]]) -> Rollouts:
        """From the engine that holds the policy; what a server has sampled with other weights is thrown away."""
        engine = self._engine(self.dtype)
        sampling = {"max_tokens": self.max_completion_length, "temperature": self.temperature}
        if self._group is not None:
            return self._sample_together(engine, prompts, sampling)
        try:
            return engine.sample(prompts, **sampling)
        except ServerLostError as error:
            self._await_server(engine, error)
            self.last_sync = self._sync(self.dtype)
            return engine.sample(prompts, **sampling)

    def _sample_together(self, engine: CountingEngine, prompts: list[list[int]], sampling: dict) -> Rollouts:
        """Processes that share an engine all sample for all of them; each takes its own."""
        every: list = [None] * self.tensor_parallel_size
        torch.distributed.all_gather_object(every, prompts, group=self._group)
        rollouts = engine.sample([ids for part in every for ids in part], **sampling)
        first = sum(map(len, every[: torch.distributed.get_rank(self._group)]))
        return rollouts.part(first, first + len(prompts))

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """Replaces TRL's method: same arguments and return value, without images.

        Parameters
        ----------
        prompts : list of list of int
            Token ids, each prompt as often as it is to be completed.
        images : None
        num_generations : int
            Not needed, since the prompts are repeated.
        profiler : context manager, optional

        Returns
        -------
        tuple
            Prompt ids, completion ids, log-probs (batch, length, 1; NaN where the engine's was none) and the token ids
            that these belong to.
        """
        if images is not None:
            raise ValueError("quantized rollouts are of text alone: leave images out of the dataset.")
        self._require_room(prompts)
        if self._synced.get(self.dtype) != self._version:
            self.last_sync = self._sync(self.dtype)
        with profiler or nullcontext():
            rollouts = self._sample(prompts)
        if self.enable_sleep_mode:
            self._engine(self.dtype).sleep()
        self.last_rollouts = rollouts
        logps = [[[logp] for logp in sequence] for sequence in rollouts.logps]
        ids = [[[token] for token in sequence] for sequence in rollouts.completion_ids]
        return prompts, rollouts.completion_ids, logps, ids

    def _require_room(self, prompts: list[list[int]]) -> None:
        length = self._engine(self.dtype).max_model_len
        room, longest = length - self.max_completion_length, max(map(len, prompts), default=0)
        if longest > room:
            raise ValueError(
                f"a prompt of {longest} tokens and max_completion_length={self.max_completion_length} exceed "
                f"vllm_max_model_length={length}: raise vllm_max_model_length (the model's own limit is "
                f"{self._longest}), lower max_completion_length, or leave out prompts of more than {room} tokens."
            )

    @property
    def max_tokens_scored(self) -> int:
        """Longest sequence that `score_in_full_precision` takes."""
        return self._engine(self.train_dtype).max_model_len - 1

    def score_in_full_precision(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of given tokens, from the second of each sequence on, by the same engine unquantized (BF16)."""
        if self._synced.get("bf16") != self._version:
            self._sync("bf16")
        return self._engine("bf16").score(sequences)

    @property
    def log_path(self) -> Path:
        """Of the engine that sampled last, or samples next."""
        return self._engine(self.dtype).log_path

    @property
    def description(self) -> dict:
        """Of the engine that samples in training, see `qurl.rollout.RolloutEngine.description`."""
        return self._engine(self.train_dtype).description

    def close(self) -> None:
        """Free the engines and the folder they were built from; safe to repeat."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        self._temporary.cleanup()


def _adapted_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What adapters are merged into."""
    layers = (module for module in model.modules() if hasattr(module, "merged_adapters"))
    return [weight for layer in layers for weight in layer.get_base_layer().parameters()]


def _has_merged_adapter(model: torch.nn.Module) -> bool:
    return any(getattr(module, "merged_adapters", None) for module in model.modules())
