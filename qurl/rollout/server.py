"""A stock vLLM server with quantized weights, as a process of its own: what ``qurl serve`` starts and stops.

    with RolloutServer("smollm2-135m", "int8") as server:
        print(server.url)

It begins with the start checkpoint, quantized, and can be asked like any server of vLLM. A trainer with
``QuRLConfig(vllm_mode="server")`` then gives it new weights at every step.
"""

import contextlib
import ipaddress
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from qurl import arguments
from qurl.config import ROLLOUT_TRANSFERS
from qurl.models import resolve_model
from qurl.quantization import FORMATS, export_checkpoint, get_format
from qurl.rollout.client import RolloutClient, ServerError, server_url
from qurl.rollout.engine import DTYPES, FULL_PRECISION, RolloutError
from qurl.rollout.handover import handover_folder
from qurl.rollout.log import last_lines, new_log_path
from qurl.rollout.preflight import (
    check_heads,
    hardware_name,
    kv_cache_bytes,
    longest,
    read_config,
    require_vllm,
)
from qurl.rollout.sync import checkpoint_bytes

logger = logging.getLogger(__name__)

_STOP_SECONDS = 20.0
# Ends a server when its standard input closes: when the process that started the server is gone, killed without a
# chance to say so.
_WATCH = "import os, signal, sys; sys.stdin.buffer.read(); os.killpg(int(sys.argv[1]), signal.SIGTERM)"


class RolloutServer:
    """vLLM's OpenAI-compatible server over a policy in ``dtype``, until `close`.

    Parameters
    ----------
    model : str or path
        Anything `qurl.models.resolve_model` takes.
    dtype : {"int8", "fp8", "bf16", "fp32"}
    code_bits : int
        Below 8 (INT8 only), fewer code levels.
    host : str
        Address to listen at. Whoever reaches it can also exchange the weights.
    port : int
        0 takes a free one.
    max_model_len : int, optional
        Longest prompt plus completion, in tokens; default the model's own limit.
    max_num_seqs : int
        Sequences decoded at once.
    tensor_parallel_size, data_parallel_size : int
        Processes that share each layer, and replicas of all these.
    gpu_memory_utilization : float
        Share of a GPU that vLLM may take.
    transfer : {"auto", "file", "nccl"}
        How weights come in: through a file in this machine's memory, or through NCCL from GPU to GPU. "auto" is NCCL
        where there are GPUs.
    seed : int
        Of sampling.
    start_seconds : float
        After which a server that is not ready counts as failed.

    Attributes
    ----------
    url : str
    log_path : pathlib.Path
        Of the server's output.
    seconds : float
        From the start of the process to its first answer.

    Raises
    ------
    ValueError, FileNotFoundError, qurl.models.ModelUnavailableError
        For a parameter that is not possible, before anything slow.
    RolloutError
        If the server does not start, with the end of its log.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        dtype: str = "int8",
        *,
        code_bits: int = 8,
        host: str = "127.0.0.1",
        port: int = 8000,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        transfer: str = "auto",
        seed: int = 0,
        start_seconds: float = 600.0,
    ):
        self._process: subprocess.Popen | None = None
        self._watch: subprocess.Popen | None = None
        self._folder = contextlib.ExitStack()
        arguments.model_name(model)
        arguments.choice("dtype", dtype, DTYPES)
        arguments.choice("transfer", transfer, ROLLOUT_TRANSFERS)
        code_bits = arguments.whole_number("code_bits", code_bits, 2, 8)
        if dtype in FORMATS:
            get_format(dtype).levels(code_bits)
        elif code_bits != 8:
            raise ValueError(f"code_bits={code_bits} needs dtype='int8', not {dtype!r}: leave it out.")
        port = arguments.whole_number("port", port, 0, 65535)
        if max_model_len is not None:
            max_model_len = arguments.whole_number("max_model_len", max_model_len, 2)
        max_num_seqs = arguments.whole_number("max_num_seqs", max_num_seqs, 1, arguments.MAX_SEQUENCES)
        for name, size in (
            ("tensor_parallel_size", tensor_parallel_size),
            ("data_parallel_size", data_parallel_size),
        ):
            arguments.whole_number(name, size, 1)
        arguments.number("gpu_memory_utilization", gpu_memory_utilization, 0.01, 1)
        seed = arguments.whole_number("seed", seed, 0, arguments.MAX_SEED)
        arguments.number("start_seconds", start_seconds, 1, 86400)
        on_gpu = torch.cuda.is_available()
        self.transfer = transfer if transfer != "auto" else "nccl" if on_gpu else "file"
        if not isinstance(host, str):
            raise ValueError(f"host={host!r} is not possible: use an address such as 127.0.0.1.")
        self._check_transfer(host, on_gpu)
        require_vllm()
        path = resolve_model(model)
        config = read_config(path, str(model))
        max_model_len = longest(config, max_model_len, str(model))
        check_heads(config, tensor_parallel_size, str(model))
        self.host, self.port = host, _free_port(host, port)
        self.url = server_url(host, self.port)
        self.log_path = new_log_path()
        self.model, self.dtype, self.code_bits = str(model), dtype, code_bits
        options = {
            "max-model-len": max_model_len,
            "max-num-seqs": max_num_seqs,
            "tensor-parallel-size": tensor_parallel_size,
            "data-parallel-size": data_parallel_size,
            "seed": seed,
        }
        if on_gpu:
            options["gpu-memory-utilization"] = gpu_memory_utilization
        else:
            compute_dtype = FULL_PRECISION[dtype if dtype in FULL_PRECISION else "bf16"]
            options["kv-cache-memory-bytes"] = kv_cache_bytes(
                config, compute_dtype, max_model_len, max_num_seqs
            )
        try:
            self._start(path, options, on_gpu, start_seconds)
            if not on_gpu:
                client = RolloutClient(self.url, connect_seconds=10, call_seconds=120, group_port=0)
                client.workers("qurl_use_fast_ops", seed)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RolloutServer":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def wait(self) -> int:
        """Until the server ends by itself; returns its exit status."""
        return self._process.wait()

    def close(self) -> None:
        """Stop the server and all its processes, and remove its files. Safe to repeat."""
        if self._process is not None:
            family = _session(self._process.pid)
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
            else:  # its processes outlive a server that was killed
                for process in family:
                    process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
            # Each frees its shared memory when it ends in order.
            _, left = psutil.wait_procs(family, timeout=5)
            for process in (self._process, *left):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
        if self._watch is not None:
            self._watch.kill()
            self._watch.stdin.close()
            self._watch.wait()
        self._folder.close()

    def _check_transfer(self, host: str, on_gpu: bool) -> None:
        if self.transfer == "nccl" and not on_gpu:
            raise ValueError(
                "transfer='nccl' is not possible without a GPU: use 'file', through this machine's memory, or leave it "
                "out."
            )
        try:
            address = ipaddress.ip_address(host if ":" in host else socket.gethostbyname(host))
        except (OSError, ValueError, UnicodeError):
            raise ValueError(
                f"host={host!r} is no address: use 127.0.0.1, or one of this machine's, without a port."
            ) from None
        if address.is_loopback:
            return
        if self.transfer == "file":
            raise ValueError(
                f"host={host!r} is not possible with transfer='file', which is for a trainer on this machine: use "
                "127.0.0.1, or transfer='nccl' for two nodes with GPUs."
            )
        logger.warning(
            "Whoever reaches %s can exchange this server's weights and call its processes: listen in a private network "
            "alone.",
            host,
        )

    def _start(self, path: Path, options: dict, on_gpu: bool, seconds: float) -> None:
        with contextlib.ExitStack() as stack:
            if self.dtype in FORMATS:
                temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="qurl-checkpoint-"))
                path = export_checkpoint(path, Path(temporary, "model"), self.dtype, code_bits=self.code_bits)
            self._launch(path, options, on_gpu)
            self._wait_until_ready(seconds)  # it has read the checkpoint

    def _launch(self, exported: Path, options: dict, on_gpu: bool) -> None:
        self.handover = self._folder.enter_context(handover_folder(checkpoint_bytes(exported)))
        known = {
            "dtype": self.dtype,
            "code_bits": self.code_bits,
            "transfer": self.transfer,
            "processes": options["tensor-parallel-size"] * options["data-parallel-size"],
            "hardware": hardware_name(),
        }
        extra = {"qurl_kernels": True, "qurl_server": known | {"handover": str(self.handover)}}
        options |= {
            "model": exported,
            "served-model-name": self.model,
            "host": self.host,
            "port": self.port,
            "dtype": str(FULL_PRECISION.get(self.dtype, torch.bfloat16)).removeprefix("torch."),
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",  # not the model's own defaults of sampling
            "worker-extension-cls": "qurl.rollout.worker.RolloutWorker",
            "additional-config": json.dumps(extra),
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        words += ["--disable-log-stats", "--disable-uvicorn-access-log"]
        words += ["--weight-transfer-config", '{"backend": "nccl"}'] if self.transfer == "nccl" else []
        words += [] if on_gpu else ["--enforce-eager"]
        # A trainer speaks in token ids; whoever wants to ask in words needs the tokenizer beside the weights.
        words += [] if any(exported.glob("tokenizer*")) else ["--skip-tokenizer-init"]
        # The trainer knows no key; it would guard the completions alone, and not the weights.
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
        logger.info("Starting vLLM with %s in %s: about a minute on a CPU ...", self.model, self.dtype)
        self._start_time = time.monotonic()
        with open(self.log_path, "a") as log:
            self._process = subprocess.Popen(
                # The `vllm` command looks for a package of that name, which its CPU build is not.
                [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", *words],
                env={
                    **_cores_of(0 if on_gpu else known["processes"]),
                    **environment,
                    "VLLM_SERVER_DEV_MODE": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for `close`, which lets it end in order
            )
        watch = [sys.executable, "-S", "-c", _WATCH, str(self._process.pid)]
        self._watch = subprocess.Popen(
            watch, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def _wait_until_ready(self, seconds: float) -> None:
        while self._process.poll() is None:
            self.seconds = time.monotonic() - self._start_time
            if self.seconds > seconds:
                raise RolloutError(
                    f"the vLLM server was not ready after {seconds:g} s. The end of {self.log_path}:\n"
                    f"{last_lines(self.log_path)}"
                )
            with (
                contextlib.suppress(OSError, ServerError),
                socket.create_connection((self.host, self.port), 1),
            ):
                client = RolloutClient(self.url, connect_seconds=0, call_seconds=60, group_port=0)
                # Another server may have taken the port meanwhile.
                if client.workers("qurl_state")[0].get("handover") == str(self.handover):
                    return
            time.sleep(0.25)
        raise RolloutError(
            f"the vLLM server ended with status {self._process.returncode} before it was ready. The end of "
            f"{self.log_path}:\n{last_lines(self.log_path)}"
        )


def _cores_of(processes: int) -> dict[str, str]:
    """Share this machine's cores among several processes of a server: vLLM does so for NUMA nodes alone."""
    if processes < 2:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::processes] or [cores[rank % len(cores)]] for rank in range(processes)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares)}


def _session(leader: int) -> list[psutil.Process]:
    """The processes that a server has started, also where it is gone itself: nobody else is in its session."""
    family = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader != process.pid and process.status() != psutil.STATUS_ZOMBIE:
                family.append(process)
    return family


def _free_port(host: str, port: int) -> int:
    """``port`` if nobody listens there; for 0 one that is free."""
    try:
        with socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as listener:
            return listener.getsockname()[1]
    except OSError as error:
        raise ValueError(
            f"port={port} at host={host!r} is not free ({error.strerror}): use another port, or 0 for any."
        ) from None
