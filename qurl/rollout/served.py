"""A quantized vLLM server as the engine of a trainer: weights go there as codes and scales, completions come back.

The main process talks to the server; the others take part in gathering shards and prompts, and get their share.
"""

import collections
import contextlib
import importlib.metadata
import json
import math
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import vllm
from accelerate import Accelerator
from accelerate.utils import gather_object
from filelock import BaseFileLock, Timeout
from safetensors import SafetensorError
from transformers import AutoConfig

from qurl import arguments
from qurl.processes import on_main
from qurl.quantization import FORMATS, get_format, is_quantized_name
from qurl.rollout.client import RolloutClient, ServerError, ServerLostError
from qurl.rollout.engine import FULL_PRECISION, RolloutError, Rollouts
from qurl.rollout.handover import own_folder, trainer_lock, weights_file
from qurl.rollout.sync import SentTensors, SyncReport, config_shapes, digest

# Of a model's config what says nothing about the function it computes.
_NO_MATTER = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range",
    "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "quantization_config",
    "qurl_uaq_scale", "return_dict", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


class ServedEngine:
    """What `qurl.rollout.generation.QuantizedVLLMGeneration` asks of an engine, from a server.

    All processes of the training make the same calls at the same time; an error is raised in all of them.

    Parameters
    ----------
    folder : path
        Config of the policy.
    dtype : {"int8", "fp8", "bf16", "fp32"}
    code_bits : int
    accelerator : accelerate.Accelerator
    url : str
        Of a server that ``qurl serve`` has started.
    max_model_len : int, optional
        What the trainer needs; default what the server has.
    connect_seconds, call_seconds : float
        See `qurl.rollout.client.RolloutClient`.
    transfer : {"auto", "file", "nccl"}
        As the server was started with, which "auto" asks it for.
    group_port : int
        Of the NCCL group.
    seed : int

    Raises
    ------
    qurl.rollout.client.ServerError
        Where the server is not there, or is of another model, format, log-prob mode or version.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        code_bits: int,
        accelerator: Accelerator,
        url: str,
        max_model_len: int | None,
        connect_seconds: float,
        call_seconds: float,
        transfer: str,
        group_port: int,
        seed: int,
    ):
        self.dtype, self.code_bits, self.url, self.quantized = dtype, code_bits, url, dtype in FORMATS
        self.log_path = url
        self._accelerator, self._transfer, self._seed = accelerator, transfer, seed
        self._config = json.loads(AutoConfig.from_pretrained(folder).to_json_string(use_diff=False))
        self._shapes = config_shapes(folder)
        self._previous_codes: dict[str, torch.Tensor] = {}
        self._asked_length = max_model_len
        # The last complete sync, by a name that nobody else can have given.
        self._weights: str | None = None
        self._client: RolloutClient | None = None
        self._lock: BaseFileLock | None = None

        def connect() -> dict:
            self._client = RolloutClient(
                url, connect_seconds=connect_seconds, call_seconds=call_seconds, group_port=group_port
            )
            return self._join()

        self._state = on_main(connect)
        self.max_model_len = max_model_len or self._state["max_model_len"]

    def reconnect(self) -> None:
        """Wait for a server that was lost, and see that it is the same one in all but its weights.

        Raises
        ------
        ServerError
            Where it does not come back in time, or as another.
        """
        self._weights = None

        def wait() -> dict:
            self._client.wait()
            return self._join()

        self._state = on_main(wait)

    def sync(self, named_params: Iterable[tuple[str, torch.Tensor]], *, check: bool = True) -> SyncReport:
        """Give the server the weights of the policy, see `qurl.rollout.RolloutEngine.sync`.

        The server stops what it is doing, loads, compares what it holds with what was sent, and forgets its cache.
        After any error it is not asked for rollouts until a sync succeeds.
        """
        arguments.switches(check=check)
        self._weights = None
        # Reading a shard is a collective operation: where the main process fails, the others must not wait for it.
        source = iter(named_params)

        def send() -> tuple[SyncReport, str]:
            try:
                return self._sync(source, check)
            finally:
                if self._accelerator.num_processes > 1:
                    with contextlib.suppress(Exception):
                        _read(source)

        if not self._accelerator.is_main_process:
            _read(source)
        report, self._weights = on_main(send)
        return report

    def _sync(self, source: Iterator[tuple[str, torch.Tensor]], check: bool) -> tuple[SyncReport, str]:
        start = time.perf_counter()
        stream = SentTensors(source, self.dtype, self.code_bits, self._previous_codes, self._shapes)
        weights = uuid.uuid4().hex
        try:
            if self._state["transfer"] == "file":
                # The server goes on meanwhile, and what is wrong with the parameters is found before it is touched.
                with self._file_of(stream) as (name, sha256), self._paused():
                    self._client.workers("qurl_begin", weights)
                    self._client.workers("qurl_load_file", name, sha256)
                    loaded = time.perf_counter()
                    self._confirm(weights, stream, check)
            else:
                self._failure: Exception | None = None
                with self._paused():
                    self._client.workers("qurl_begin", weights)
                    self._client.update_named_params(self._announced(), self._as_announced(stream))
                    if self._failure is not None:
                        raise self._failure
                    loaded = time.perf_counter()
                    self._confirm(weights, stream, check)
        except BaseException as error:
            if stream.source_error is not None and stream.source_error is not error:
                raise stream.source_error from None
            raise
        layers = self._client.workers("qurl_linear_layers")[0]
        if check:
            self._check_layers(layers)
            self._complete([[0]], max_tokens=1, temperature=0.0)
        self._previous_codes = stream.codes
        return stream.report(start, loaded, layers, self._sent_bytes), weights

    def _confirm(self, weights: str, stream: SentTensors, check: bool) -> None:
        if stream.left_out:
            raise RolloutError(stream.left_out)
        sent = {name: digest(codes, scale) for name, (codes, scale) in stream.sample.items()}
        self._client.workers("qurl_confirm", weights, sent if check else {})
        # Only now: a reset in the middle would let entries of the old weights back in.
        if not self._client.post("/reset_prefix_cache").get("success", True):
            raise ServerError(f"the server at {self.url} did not reset its prefix cache after the sync.")

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """No request is worked at, so that none is answered by two policies."""
        self._client.post("/pause?mode=abort")
        try:
            yield
        except BaseException:
            with contextlib.suppress(ServerError):
                self._client.post("/resume")
            raise
        self._client.post("/resume")

    def sample(self, prompts: list[list[int]], *, max_tokens: int, temperature: float) -> Rollouts:
        """One completion of each prompt of this process.

        Raises
        ------
        ServerLostError
            Where the server is gone, or holds other weights than those of the last sync: `reconnect`, sync, and ask
            again. What it has sampled meanwhile is thrown away.
        """
        own, first = self._share_of(prompts)

        def ask() -> Rollouts:
            self._require_weights()
            self._client.workers("qurl_reseed", self._seed)
            rollouts = self._complete(own, max_tokens=max_tokens, temperature=temperature)
            self._require_weights()
            return rollouts

        return on_main(ask).part(first, first + len(prompts))

    def reseed(self, seed: int) -> None:
        """Restart the random numbers with the next call of `sample`.

        A server forms its batches by the clock, so that the same seed need not give the same completions.
        """
        self._seed = arguments.whole_number("seed", seed, 0, arguments.MAX_SEED)

    @property
    def description(self) -> dict:
        """What a result has to say about the server behind it, see `qurl.rollout.RolloutEngine.description`."""
        state = self._state
        names = (
            "dtype",
            "code_bits",
            "compute_dtype",
            "linear_kernel",
            "emulated",
            "processes",
            "transfer",
            "hardware",
        )
        return {
            "server": self.url,
            **{name: state[name] for name in names},
            "parameters": sum(map(math.prod, self._shapes.values())),
            "versions": state["versions"],
        }

    def close(self) -> None:
        """Leave the server; it goes on with the last weights."""
        if self._client is not None:
            self._leave()
            self._client.session.close()

    # --- what the main process does -----------------------------------------------------------------------------------

    def _join(self) -> dict:
        """Be the one trainer of the server, if it is one that may be used; returns its own account."""
        self._leave()
        state = self._checked_state()
        if state["transfer"] == "nccl":
            self._client.init_communicator(device=self._accelerator.device)
            return state
        try:
            self._lock = trainer_lock(own_folder(state["handover"]))
            self._lock.acquire()
        except Timeout:
            self._lock = None
            raise ServerError(
                f"the server at {self.url} follows another trainer's policy: wait for that one, or start a server of "
                "your own."
            ) from None
        except (ValueError, OSError) as error:
            raise ServerError(
                f"the server at {self.url} takes weights through a file, but runs on another machine, or as another "
                f"user ({error}): start it on this one, or with --transfer nccl between GPUs."
            ) from None
        return state

    def _leave(self) -> None:
        self._client.close_communicator()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _share_of(self, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
        """The prompts of all processes, and where those of this one begin."""
        if self._accelerator.num_processes == 1:
            return prompts, 0
        every = gather_object([prompts])
        return [ids for part in every for ids in part], sum(
            map(len, every[: self._accelerator.process_index])
        )

    def _checked_state(self) -> dict:
        """The server's own account, if it is one that this trainer may use."""
        try:
            state = self._client.workers("qurl_state")[0]
        except ServerLostError:
            raise
        except ServerError as error:
            raise ServerError(
                f"the server at {self.url} was not started by qurl serve, which adds what a trainer needs: start it so "
                f"({error})"
            ) from None
        try:
            return self._accepted(state)
        except (KeyError, TypeError, AttributeError):
            raise ServerError(
                f"the server at {self.url} gives no full account of itself: start it with the same version of qurl."
            ) from None

    def _accepted(self, state: dict) -> dict:
        start = f"qurl serve --dtype {self.dtype}"
        for name, theirs, ours, fix in (
            ("rollout_dtype", state["dtype"], self.dtype, start),
            (
                "rollout_code_bits",
                state["code_bits"],
                self.code_bits,
                f"{start} --code-bits {self.code_bits}",
            ),
            ("vLLM", state["versions"]["vllm"], vllm.__version__, "the same version on both sides"),
            (
                "qurl",
                state["versions"]["qurl"],
                importlib.metadata.version("qurl"),
                "the same version on both sides",
            ),
            ("logprobs_mode", state["logprobs_mode"], "processed_logprobs", start),
            ("compute dtype", state["compute_dtype"], self._compute_dtype, start),
        ):
            if theirs != ours:
                raise ServerError(
                    f"the server at {self.url} has {name}={theirs!r} where this trainer has {ours!r}: use {fix}."
                )
        for name in sorted(self._config.keys() & state["config"].keys() - _NO_MATTER):
            if not name.endswith("dropout") and self._config[name] != state["config"][name]:
                raise ServerError(
                    f"the server at {self.url} serves another model than the policy: its config has {name}="
                    f"{state['config'][name]!r} instead of {self._config[name]!r}; start it with the policy's model."
                )
        if self._transfer not in ("auto", state["transfer"]):
            raise ServerError(
                f"rollout_transfer={self._transfer!r} does not go with the server at {self.url}, which was started "
                f"with --transfer {state['transfer']}: use the same, or 'auto'."
            )
        if (self._asked_length or 0) > state["max_model_len"]:
            raise ServerError(
                f"vllm_max_model_length={self._asked_length} exceeds what the server at {self.url} takes: use qurl "
                f"serve --max-model-len {self._asked_length}, or at most {state['max_model_len']} here."
            )
        return state

    @property
    def _compute_dtype(self) -> str:
        return str(FULL_PRECISION.get(self.dtype, torch.bfloat16)).removeprefix("torch.")

    def _require_weights(self) -> None:
        """Before and after rollouts: every process of the server holds the weights of the last sync.

        No other process can know their name, so that a server that was started again in between is found out.
        """
        if self._weights is None:
            raise RolloutError(
                f"the server at {self.url} is not used: its last sync was not finished, sync again."
            )
        try:
            self._client.workers("qurl_require", self._weights)
        except ServerLostError:
            raise
        except ServerError as error:
            raise ServerLostError(str(error)) from None

    def _complete(self, prompts: list[list[int]], *, max_tokens: int, temperature: float) -> Rollouts:
        start = time.perf_counter()
        stop = self._config["eos_token_id"]
        choices = self._client.complete(
            prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            vocabulary=self._config["vocab_size"],
            # The trainer's end tokens and no other: not those of the server's own tokenizer.
            ignore_eos=True,
            stop_token_ids=stop if isinstance(stop, list) else [] if stop is None else [stop],
        )
        rollouts = Rollouts(
            completion_ids=[choice["token_ids"] for choice in choices],
            logps=[choice["logprobs"]["token_logprobs"] for choice in choices],
            finish_reasons=[choice["finish_reason"] for choice in choices],
            seconds=time.perf_counter() - start,
            prompt_tokens=sum(map(len, prompts)),
            completion_tokens=sum(len(choice["token_ids"]) for choice in choices),
        )
        if any(reason not in ("stop", "length") for reason in rollouts.finish_reasons):
            raise ServerLostError(
                f"the server at {self.url} has broken off rollouts: another trainer uses it, too."
            )
        return rollouts

    def _check_layers(self, layers: dict[str, str | None]) -> None:
        unquantized = [name for name, kernel in layers.items() if kernel is None]
        if self.quantized and unquantized:
            raise ServerError(
                f"the server at {self.url} runs {', '.join(unquantized[:3])} in full precision although dtype="
                f"{self.dtype!r}: this architecture is not supported."
            )

    # --- how weights travel -------------------------------------------------------------------------------------------

    def _tensors(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """What is sent: codes and scales as they are, all else as the server computes with it."""
        self._sent_bytes = 0
        for name, tensor in stream:
            kept = self.quantized and is_quantized_name(name.removesuffix("_scale"))
            sent = tensor.detach() if kept else tensor.detach().to(getattr(torch, self._compute_dtype))
            self._sent_bytes += sent.nbytes
            yield name, sent

    @contextlib.contextmanager
    def _file_of(self, stream: SentTensors) -> Iterator[tuple[str, str]]:
        """Name and SHA-256 of a file in the server's folder, for as long as the server reads it."""
        folder = Path(self._state["handover"])
        with contextlib.ExitStack() as stack:
            try:
                named = stack.enter_context(weights_file(folder, self._tensors(stream)))
            except (OSError, SafetensorError) as error:
                if stream.source_error is not None:
                    raise
                if not folder.is_dir():
                    raise ServerLostError(
                        f"the vLLM server at {self.url} has been stopped: its folder is gone."
                    ) from None
                raise ServerError(
                    f"the weights cannot be handed to the server at {self.url} ({error}): free memory in {folder}, "
                    "or start the server again."
                ) from None
            yield named

    def _announced(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each tensor that an update through NCCL sends, in order."""
        announced = []
        for name, shape in self._shapes.items():
            if self.quantized and is_quantized_name(name):
                codes = str(get_format(self.dtype).code_dtype).removeprefix("torch.")
                announced += [(name, codes, list(shape)), (f"{name}_scale", "float32", [shape[0], 1])]
            else:
                announced.append((name, self._compute_dtype, list(shape)))
        return announced

    def _as_announced(self, stream: SentTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors themselves, on the GPU; one that was not announced would be read as another.

        The server waits for all that was announced: after a failure zeros are sent in its place, and not confirmed.
        """
        tensors = self._tensors(stream)
        for name, dtype, shape in self._announced():
            tensor = None
            if self._failure is None:
                try:
                    tensor = _next_of(tensors, name, getattr(torch, dtype), shape)
                except Exception as error:
                    self._failure = error
            if tensor is None:
                tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
            yield name, tensor.to(self._accelerator.device)


def _read(source: Iterator) -> None:
    """To its end: what a collective operation comes with."""
    collections.deque(source, maxlen=0)


def _next_of(
    tensors: Iterator[tuple[str, torch.Tensor]], name: str, dtype: torch.dtype, shape: list[int]
) -> torch.Tensor:
    """The next tensor, if it is the one that was announced."""
    found, tensor = next(tensors, (None, torch.empty(0)))
    if (found, tensor.dtype, list(tensor.shape)) != (name, dtype, shape):
        raise RolloutError(
            f"the policy's parameter {found} of shape {tuple(tensor.shape)} comes where {name} of {tuple(shape)} was "
            "announced to the server: pass the named parameters of the same model, whole and in its order."
        )
    return tensor
