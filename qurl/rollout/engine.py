"""A live vLLM engine that samples from a quantized copy of a policy and takes the policy's weights again and again.

    with RolloutEngine("smollm2-135m", dtype="int8") as engine:
        engine.sync(policy.named_parameters())
        rollouts = engine.generate(prompt_ids, n=8, max_tokens=512, temperature=1.0)

The engine is built without weights and gets its first ones as it gets all later ones, through `RolloutEngine.sync`:
full-precision parameters in, codes and scales (`qurl.quantization`) into vLLM's own reload, then a check of what the
engine holds, then a reset of the prefix cache. One path for BF16, FP32, INT8 and FP8, on CPUs and GPUs.

Source: QuRL (arXiv 2602.13953): the behaviour policy Q(θ_old), quantized anew at every step.
"""

import atexit
import contextlib
import dataclasses
import gc
import importlib.metadata
import logging
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qurl import arguments
from qurl.models import resolve_model
from qurl.quantization import (
    FORMATS,
    checkpoint_quantization_config,
    get_format,
)
from qurl.rollout.kernels import unavailable
from qurl.rollout.log import last_lines, new_log_path, output_to
from qurl.rollout.preflight import (
    check_heads,
    end_tokens,
    hardware_name,
    kv_cache_bytes,
    longest,
    read_config,
    require_vllm,
    vllm_distribution,
)
from qurl.rollout.sync import SentTensors, SyncReport, checkpoint_shapes, checkpoint_tensors

logger = logging.getLogger(__name__)

FULL_PRECISION = {"bf16": torch.bfloat16, "fp32": torch.float32}
DTYPES = (*FULL_PRECISION, *FORMATS)
# vLLM would sample at this temperature where a lower one, but not 0, is asked for.
MIN_TEMPERATURE = 0.01


# Calls into engines take turns: they redirect the output of the whole process, and vLLM's engines are not thread-safe.
_one_at_a_time = threading.RLock()
# Engines of this process that are not closed.
_open_engines: "weakref.WeakSet[RolloutEngine]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what a script has left open, while the interpreter is still whole."""
    for engine in list(_open_engines):
        engine.close()


class RolloutError(RuntimeError):
    """The engine could not be built, does not hold the weights that it should, or returned what it must not."""


@dataclass(frozen=True)
class Rollouts:
    """Sampled completions, the ``n`` of the first prompt first.

    Attributes
    ----------
    completion_ids : list of list of int
    logps : list of list of float
        Natural log-probabilities of the sampled tokens under the behaviour policy, after temperature.
    finish_reasons : list of str
        "stop" or "length".
    seconds : float
    prompt_tokens, completion_tokens : int
    """

    completion_ids: list[list[int]]
    logps: list[list[float]]
    finish_reasons: list[str]
    seconds: float
    prompt_tokens: int
    completion_tokens: int

    def part(self, first: int, end: int) -> "Rollouts":
        """Those from ``first`` up to ``end``: of one process where several have sampled together.

        ``seconds`` are those of all, ``prompt_tokens`` too.
        """
        ids = self.completion_ids[first:end]
        return dataclasses.replace(
            self,
            completion_ids=ids,
            logps=self.logps[first:end],
            finish_reasons=self.finish_reasons[first:end],
            completion_tokens=sum(map(len, ids)),
        )


class RolloutEngine:
    """vLLM in this process, sampling from a policy in ``dtype``.

    Parameters
    ----------
    model : str or path
        Anything `qurl.models.resolve_model` takes. Its weights are loaded unless ``load_weights`` is off.
    dtype : {"int8", "fp8", "bf16", "fp32"}
        Number format of the decoder projections; "bf16" and "fp32" are the same engine unquantized.
    code_bits : int
        Below 8 (INT8 only), fewer code levels: the stress setting.
    max_model_len : int, optional
        Longest prompt plus completion, in tokens; default the model's own limit.
    max_num_seqs : int
        Sequences decoded at once, at most 4,096.
    seed : int
        Of the sampler. Seeds per request would make sampling on a CPU much slower.
    compute_dtype : {"bf16", "fp32"}, optional
        Of activations, attention and unquantized layers; default BF16 unless ``dtype`` is "fp32".
    enforce_eager : bool, optional
        Skip compilation; default on a CPU, where the kernels of qurl cannot be compiled into a graph.
    enable_prefix_caching : bool
        Reuse the keys and values of prompts that begin alike; reset at every sync.
    gpu_memory_utilization : float
        Share of a GPU that vLLM may take. On a CPU the cache is sized from the limits above.
    tensor_parallel_size : int
        Processes of this program (as torchrun starts them) that share each layer. All of a group make the same calls
        with the same arguments, `sync` and `generate` included, and get the same rollouts.
    enable_sleep_mode : bool
        On a GPU, let `sleep` free its memory between rollouts.
    track_codes : bool
        Keep a copy of the codes (one byte per weight, in main memory) to report how many a sync changed.
    kernels : {"qurl", "vllm"}
        "vllm" leaves vLLM's own CPU kernels and sampler in place, as a baseline.
    load_weights : bool
        Off where a sync follows anyway: the engine refuses to generate until then.

    Raises
    ------
    ImportError
        If vLLM is not installed.
    ValueError, FileNotFoundError, qurl.models.ModelUnavailableError
        For a parameter that is not possible, before anything slow.
    RolloutError
        If vLLM does not start, with the end of its log.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        dtype: str = "int8",
        *,
        code_bits: int = 8,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        seed: int = 0,
        compute_dtype: str | None = None,
        enforce_eager: bool | None = None,
        enable_prefix_caching: bool = True,
        gpu_memory_utilization: float = 0.5,
        tensor_parallel_size: int = 1,
        enable_sleep_mode: bool = False,
        track_codes: bool = False,
        kernels: str = "qurl",
        load_weights: bool = True,
    ):
        self._llm = None
        self._unusable = "it has no weights yet: call sync first"
        arguments.model_name(model)
        arguments.choice("dtype", dtype, DTYPES)
        arguments.choice("kernels", kernels, ("qurl", "vllm"))
        code_bits = arguments.whole_number("code_bits", code_bits, 2, 8)
        max_num_seqs = arguments.whole_number("max_num_seqs", max_num_seqs, 1, arguments.MAX_SEQUENCES)
        if max_model_len is not None:
            max_model_len = arguments.whole_number("max_model_len", max_model_len, 2)
        seed = arguments.whole_number("seed", seed, 0, arguments.MAX_SEED)
        gpu_memory_utilization = arguments.number("gpu_memory_utilization", gpu_memory_utilization, 0.01, 1)
        tensor_parallel_size = arguments.whole_number("tensor_parallel_size", tensor_parallel_size, 1)
        arguments.switches(
            enable_prefix_caching=enable_prefix_caching,
            enable_sleep_mode=enable_sleep_mode,
            track_codes=track_codes,
            load_weights=load_weights,
        )
        if enforce_eager is not None:
            arguments.switches(enforce_eager=enforce_eager)
        self.dtype, self.code_bits, self.quantized = dtype, code_bits, dtype in FORMATS
        if compute_dtype is None:
            compute_dtype = dtype if dtype in FULL_PRECISION else "bf16"
        arguments.choice("compute_dtype", compute_dtype, tuple(FULL_PRECISION))
        if not self.quantized and (compute_dtype != dtype or code_bits != 8):
            raise ValueError(
                f"dtype={dtype!r} is full precision and takes neither another compute_dtype nor code_bits: leave them "
                "out, or use dtype='int8'."
            )
        if self.quantized:
            get_format(dtype).levels(code_bits)
        if enable_sleep_mode and not torch.cuda.is_available():
            raise ValueError("enable_sleep_mode=True needs a GPU, whose memory it frees: leave it out.")
        if tensor_parallel_size > 1 and not _is_one_of_several():
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} needs as many processes of this program: start it with "
                f"torchrun --nproc_per_node={tensor_parallel_size}, or use 1."
            )
        self.sleeps, self._asleep = enable_sleep_mode, False
        require_vllm()

        self.path = resolve_model(model)
        self.model = str(model)
        config = read_config(self.path, self.model)
        max_model_len = longest(config, max_model_len, self.model)
        check_heads(config, tensor_parallel_size, self.model)
        self.max_model_len, self.max_num_seqs, self.kernels = max_model_len, max_num_seqs, kernels
        self.compute_dtype = compute_dtype
        self._previous_codes: dict[str, torch.Tensor] | None = {} if track_codes and self.quantized else None
        self._shapes = checkpoint_shapes(self.path)
        self._stop_token_ids = end_tokens(self.path, config)
        self.log_path = new_log_path()
        # Compiled here, where a warning reaches the caller instead of the log.
        on_gpu = torch.cuda.is_available()
        if kernels == "qurl" and not on_gpu and (reason := unavailable(dtype if self.quantized else "int8")):
            logger.warning("qurl's CPU kernels are replaced by slower ones of libraries, since %s.", reason)

        # In-process, so that tensors are handed over and not copied; the variable is read when an engine is made.
        with _environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"), _random_states_kept(), self._logged("start"):
            from vllm import LLM
            from vllm.platforms import current_platform

            self.on_cpu = current_platform.is_cpu()
            if self.on_cpu and kernels == "qurl" and enforce_eager is False:
                raise RolloutError(
                    "enforce_eager=False is not possible on a CPU with kernels='qurl', which are called and not "
                    "compiled: leave it out."
                )
            if kernels == "vllm" and dtype == "int8" and self.on_cpu:
                raise RolloutError(
                    "kernels='vllm' with dtype='int8' cannot be synced on a CPU, where vLLM's INT8 kernel breaks when "
                    "weights are reloaded: use kernels='qurl'."
                )
            memory = (
                {
                    "kv_cache_memory_bytes": kv_cache_bytes(
                        config, FULL_PRECISION[compute_dtype], self.max_model_len, max_num_seqs
                    )
                }
                if self.on_cpu
                else {"gpu_memory_utilization": gpu_memory_utilization}
            )
            overrides = (
                {"quantization_config": checkpoint_quantization_config(dtype)} if self.quantized else {}
            )
            self._llm = LLM(
                model=str(self.path),
                dtype=str(FULL_PRECISION[compute_dtype]).removeprefix("torch."),
                load_format="dummy",
                hf_overrides=overrides,
                skip_tokenizer_init=True,  # token ids in, token ids out
                max_model_len=self.max_model_len,
                max_num_seqs=max_num_seqs,
                seed=seed,
                enforce_eager=self.on_cpu if enforce_eager is None else enforce_eager,
                enable_prefix_caching=enable_prefix_caching,
                logprobs_mode="processed_logprobs",
                worker_extension_cls="qurl.rollout.worker.RolloutWorker",
                additional_config={"qurl_kernels": kernels == "qurl"},
                disable_log_stats=True,
                tensor_parallel_size=tensor_parallel_size,
                enable_sleep_mode=enable_sleep_mode,
                # Each process of this program is one of vLLM's, too, and takes the GPU of its own rank.
                distributed_executor_backend="external_launcher" if _is_one_of_several() else None,
                **memory,
            )
            _open_engines.add(self)
            # vLLM shuts an engine down when it is collected, and with it what others share: see close.
            self._llm.llm_engine.engine_core._finalizer.detach()
            if kernels == "qurl":
                self._call("qurl_use_fast_ops", seed)
        if load_weights:
            self.load_checkpoint(self.path)

    def __enter__(self) -> "RolloutEngine":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine's memory; it cannot be used afterwards. Safe to repeat."""
        if self._llm is not None:
            _open_engines.discard(self)
            with self._logged("close"):
                # Not vLLM's whole shutdown, which ends the process groups: other engines, or a trainer, use them too.
                self._call("qurl_release")
                self._llm.llm_engine.model_executor.shutdown()
                self._llm = None
                gc.unfreeze()  # vLLM hides an engine's objects from the collector when it starts
                gc.collect()  # and they refer to each other in circles
        self._previous_codes = None
        self._unusable = "it is closed"

    def load_checkpoint(self, folder: str | os.PathLike) -> SyncReport:
        """`sync` with the full-precision weights of a transformers checkpoint, read one tensor at a time."""
        return self.sync(checkpoint_tensors(Path(folder)))

    @torch.no_grad()
    def sync(self, named_params: Iterable[tuple[str, torch.Tensor]], *, check: bool = True) -> SyncReport:
        """Give the engine the weights of a policy.

        Parameters
        ----------
        named_params : iterable of (str, torch.Tensor)
            All full-precision parameters, named as transformers names them, read once and in order. Half precision is
            promoted to FP32 before it is quantized.
        check : bool
            Compare a sample of layers with what was sent, look at every scale, and decode one token.

        Returns
        -------
        SyncReport

        Raises
        ------
        ValueError
            When a parameter is not finite or not the model's, with its name.
        RolloutError
            When parameters are missing, or the engine does not hold what was sent.
        Exception
            Whatever ``named_params`` itself raises, as it is.

        Notes
        -----
        After any error the engine refuses to generate until a sync succeeds: it may hold a mixture of weights.
        """
        self._require_open()
        arguments.switches(check=check)
        if not isinstance(named_params, Iterable):
            raise ValueError(
                f"named_params is a {type(named_params).__name__} and holds no pairs: pass policy.named_parameters()."
            )
        self._unusable = "its last sync was not finished: sync again"
        self.wake()
        start = time.perf_counter()
        stream = SentTensors(named_params, self.dtype, self.code_bits, self._previous_codes, self._shapes)
        try:
            with self._logged("sync", ValueError):
                self._call("qurl_load_weights", stream)
                loaded = time.perf_counter()
                if stream.left_out:
                    raise RolloutError(stream.left_out)
                if check:
                    self._check_weights(stream)
                # Only now: a reset in the middle would let entries of the old weights back in.
                if not self._llm.reset_prefix_cache():
                    raise RolloutError("vLLM did not reset its prefix cache after the sync.")
                if check:
                    self._unusable = None
                    self._check_decodes()
        except BaseException as error:
            raised = stream.source_error or error
            first_line = (str(raised).splitlines() or [""])[0]
            self._unusable = f"its last sync failed ({type(raised).__name__}: {first_line}): sync again"
            if raised is not error:
                raise raised from None
            raise
        self._unusable = None
        if self._previous_codes is not None:
            self._previous_codes = stream.codes
        layers = self._call("qurl_linear_layers")
        return stream.report(start, loaded, layers)

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int = 1,
        max_tokens: int = 128,
        temperature: float = 1.0,
        *,
        ignore_eos: bool = False,
        min_tokens: int = 0,
    ) -> Rollouts:
        """Sample ``n`` completions of each prompt.

        Parameters
        ----------
        prompt_ids : sequence of sequence of int
            Token ids exactly as the policy sees them; nothing is added, no start token either. Lists, arrays or
            tensors of whole numbers.
        n : int
        max_tokens : int
            Longest completion, in tokens; prompt and completion must fit in ``max_model_len``.
        temperature : float
            0 decodes greedily; otherwise from 0.01 to 2.
        ignore_eos : bool
            Go on after an end token: completions of equal length, for benchmarks.
        min_tokens : int
            No end token before; at most ``max_tokens``.

        Returns
        -------
        Rollouts

        Raises
        ------
        ValueError
            For arguments that are not possible, before anything is sampled.
        RolloutError
            If the engine has no intact weights, or a log-prob comes out NaN.
        """
        self._require_usable()
        self.wake()
        prompts = arguments.token_ids("prompt_ids", prompt_ids)
        n = arguments.whole_number("n", n, 1)
        max_tokens = arguments.whole_number("max_tokens", max_tokens, 1)
        min_tokens = arguments.whole_number("min_tokens", min_tokens, 0, max_tokens)
        temperature = arguments.number("temperature", temperature, 0, 2)
        if 0 < temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={temperature} is not possible: use 0 for greedy decoding, or {MIN_TEMPERATURE} to 2."
            )
        arguments.switches(ignore_eos=ignore_eos)
        self._check_lengths(prompts, max_tokens)
        if not prompts:
            return Rollouts([], [], [], 0.0, 0, 0)
        from vllm import SamplingParams

        parameters = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
            stop_token_ids=None if ignore_eos else self._stop_token_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        start = time.perf_counter()
        outputs = self._run(prompts, parameters)
        seconds = time.perf_counter() - start
        completions = [completion for output in outputs for completion in output.outputs]
        rollouts = Rollouts(
            completion_ids=[list(completion.token_ids) for completion in completions],
            logps=[_sampled_logps(completion) for completion in completions],
            finish_reasons=[str(completion.finish_reason) for completion in completions],
            seconds=seconds,
            prompt_tokens=sum(map(len, prompts)),
            completion_tokens=sum(len(completion.token_ids) for completion in completions),
        )
        self._check_numbers(rollouts.logps)
        return rollouts

    def sleep(self) -> None:
        """Free the GPU's memory for the training: the weights wait in main memory, keys and values are forgotten."""
        if self.sleeps and not self._asleep and self._llm is not None:
            with self._logged("sleep"):
                self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Take the memory back; the next call that needs it does so itself."""
        if self._asleep:
            with self._logged("wake up"):
                self._llm.wake_up()
            self._asleep = False

    def reseed(self, seed: int) -> None:
        """Restart the random numbers that tokens are drawn with.

        On a GPU this has no effect: vLLM's sampler draws there from the process's own generator.
        """
        self._require_open()
        self._call("qurl_reseed", arguments.whole_number("seed", seed, 0, arguments.MAX_SEED))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens under the engine's policy, at temperature 1.

        Parameters
        ----------
        sequences : sequence of sequence of int
            Each of at least two tokens and shorter than ``max_model_len``.

        Returns
        -------
        list of list of float
            For each sequence its log-probs from the second token on.
        """
        self._require_usable()
        self.wake()
        tokens = arguments.token_ids("sequences", sequences)
        self._check_lengths(tokens, 1)
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._run(tokens, parameters)
        scores = [
            [
                position[token].logprob
                for token, position in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for ids, output in zip(tokens, outputs, strict=True)
        ]
        self._check_numbers(scores)
        return scores

    @property
    def description(self) -> dict:
        """What a result has to say about the engine behind it: model and size, formats, kernels, device, versions."""
        self._require_open()
        model_config = self._llm.llm_engine.vllm_config.model_config
        return {
            "model": self.model,
            "parameters": sum(map(math.prod, self._shapes.values())),
            "dtype": self.dtype,
            "code_bits": self.code_bits,
            "compute_dtype": str(model_config.dtype).removeprefix("torch."),
            "device": "cpu" if self.on_cpu else torch.cuda.get_device_name(),
            "hardware": hardware_name(),
            "kernels": self.kernels,
            **self._call("qurl_kernel"),
            "versions": {
                name: importlib.metadata.version(name)
                for name in (vllm_distribution(), "torch", "transformers")
            },
        }

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens whose keys and values fit into the cache; sequences beyond them wait."""
        self._require_open()
        cache = self._llm.llm_engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    def codes_and_scale(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (out, in) and FP32 scale (out, 1) that the live engine holds for the projection ``name``."""
        self._require_open()
        return self._call("qurl_codes_and_scale", name)

    def _check_numbers(self, rows: list[list[float]]) -> None:
        if any(logp != logp for logps in rows for logp in logps):
            self._unusable = "it returned NaN log-probs: sync weights that do not overflow"
            self._call("qurl_clear_kv_cache")
            raise RolloutError(
                f"vLLM returned NaN log-probs in {self.dtype}: the weights overflow or the kernel is broken; sync "
                f"others, and see {self.log_path}."
            )

    def _run(self, prompts: list[list[int]], parameters) -> list:
        try:
            with self._logged("generate"):
                requests = [{"prompt_token_ids": ids} for ids in prompts]
                return self._llm.generate(requests, parameters, use_tqdm=False)
        except BaseException:
            # An interrupt in a notebook leaves requests behind, which the next call would get the answers of.
            engine = self._llm.llm_engine
            self._call("qurl_forget_step")
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise

    def _call(self, method: str, *arguments):
        return self._llm.collective_rpc(method, args=arguments)[0]

    @contextlib.contextmanager
    def _logged(self, doing: str, *expected: type[Exception]) -> Iterator[None]:
        """Keep the engine's output in its log, and point there when vLLM fails in a way that is not ``expected``."""
        try:
            with _one_at_a_time, output_to(self.log_path):
                yield
        except (RolloutError, *expected):
            raise
        except Exception as error:
            raise RolloutError(
                f"vLLM failed to {doing} ({type(error).__name__}: {error}). The end of {self.log_path}:\n"
                f"{last_lines(self.log_path)}"
            ) from error

    def _require_open(self) -> None:
        if self._llm is None:
            raise RolloutError(f"This engine cannot be used: {self._unusable or 'it was not built'}.")

    def _require_usable(self) -> None:
        if self._unusable:
            raise RolloutError(f"This engine refuses to generate: {self._unusable}.")

    def _check_lengths(self, prompts: list[list[int]], max_tokens: int) -> None:
        vocabulary = self._llm.llm_engine.vllm_config.model_config.get_vocab_size()
        for index, ids in enumerate(prompts):
            if not ids:
                raise ValueError(f"prompt {index} is empty: give at least one token.")
            if not 0 <= min(ids) <= max(ids) < vocabulary:
                raise ValueError(
                    f"prompt {index} holds a token id outside 0..{vocabulary - 1}: it was encoded "
                    "with another tokenizer."
                )
            if len(ids) + max_tokens > self.max_model_len:
                raise ValueError(
                    f"prompt {index} of {len(ids)} tokens and max_tokens={max_tokens} exceed max_model_len="
                    f"{self.max_model_len}: raise max_model_len, or shorten one of them."
                )

    def _check_weights(self, stream: "SentTensors") -> None:
        if not self.quantized:
            return
        layers = self._call("qurl_linear_layers")
        unquantized = [name for name, kernel in layers.items() if kernel is None]
        if unquantized:
            raise RolloutError(
                f"vLLM runs {', '.join(unquantized[:3])} in full precision although dtype={self.dtype!r}: this "
                "architecture is not supported."
            )
        if bad := self._call("qurl_bad_scales"):
            raise RolloutError(
                f"the scales of {', '.join(bad[:3])} are not finite and positive after the sync."
            )
        if wrong := self._call("qurl_mismatched", stream.sample):
            raise RolloutError(f"the engine does not hold the codes that were sent for {', '.join(wrong)}.")

    def _check_decodes(self) -> None:
        """One greedy token, which draws no random number: its log-prob must be a number."""
        self.generate(
            [[self._stop_token_ids[0] if self._stop_token_ids else 0]], max_tokens=1, temperature=0.0
        )


def _is_one_of_several() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _sampled_logps(completion) -> list[float]:
    """Of vLLM's flat log-probs the first per position: the sampled token's."""
    flat = completion.logprobs
    return [flat.logprobs[start] for start in flat.start_indices]


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """vLLM seeds the process's generators when an engine starts; those belong to the caller."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Environment variables set for a while; vLLM reads some only from there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
