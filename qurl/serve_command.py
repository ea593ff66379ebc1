"""``qurl serve``: a quantized vLLM server until Ctrl-C, and how a trainer reaches it."""

import argparse
import logging
import sys

from qurl.interrupts import end_in_order


def add_serve_command(commands) -> None:
    """Add the command to the parser of ``qurl``."""
    serve = commands.add_parser(
        "serve",
        help="a vLLM server with quantized weights, for trainers beside it",
        description="Start a vLLM server whose INT8 or FP8 weights follow a policy that is trained elsewhere: "
        "qurl train --vllm_mode server quantizes after each step and sends codes and scales. It says when it is ready "
        "and how a trainer reaches it, and serves until Ctrl-C.",
    )
    serve.add_argument(
        "--model", default="smollm2-135m", help="embedded model, folder or hub id (default: %(default)s)"
    )
    serve.add_argument("--dtype", default="int8", help="int8, fp8, bf16 or fp32 (default: %(default)s)")
    serve.add_argument(
        "--code-bits", type=int, default=8, help="below 8 (int8): fewer code levels (default: %(default)s)"
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: this machine alone)"
    )
    serve.add_argument("--port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    serve.add_argument(
        "--max-model-len",
        type=int,
        help="longest prompt with its completion, tokens (default: what the model takes)",
    )
    serve.add_argument(
        "--max-num-seqs", type=int, default=64, help="sequences decoded at once (default: %(default)s)"
    )
    serve.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="processes that share each layer (default: %(default)s)",
    )
    serve.add_argument("--data-parallel-size", type=int, default=1, help="replicas (default: %(default)s)")
    serve.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="share of a GPU for vLLM (default: %(default)s)",
    )
    serve.add_argument(
        "--transfer",
        default="auto",
        help="weights come through file, nccl, or auto: nccl on GPUs (default: %(default)s)",
    )
    serve.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    serve.add_argument(
        "--start-seconds",
        type=float,
        default=600.0,
        help="a server that is not ready by then failed (default: %(default)s)",
    )
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    try:
        return _serve_until_stopped(arguments)
    except KeyboardInterrupt:
        _say("Stopped.")
        return 0


def _serve_until_stopped(arguments: argparse.Namespace) -> int:
    from qurl.rollout import RolloutError
    from qurl.rollout.server import RolloutServer

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("qurl").setLevel(logging.INFO)
    names = ("code_bits", "host", "port", "max_model_len", "max_num_seqs", "tensor_parallel_size")
    names += ("data_parallel_size", "gpu_memory_utilization", "transfer", "seed", "start_seconds")
    end_in_order()
    try:
        options = {name: getattr(arguments, name) for name in names}
        with RolloutServer(arguments.model, arguments.dtype, **options) as server:
            _say(f"Ready after {server.seconds:.0f} s: {server.url}   (log: {server.log_path})")
            _say("Train against it:  qurl train --vllm_mode server --vllm_server_base_url " + server.url)
            _say(f"  with --model {server.model} --rollout_dtype {server.dtype}" + _bits(server.code_bits))
            _say("Ask it:            POST /v1/completions, as any server of vLLM.  Stop it: Ctrl-C")
            status = server.wait()
            print(
                f"qurl serve: the server ended with status {status}, see {server.log_path}", file=sys.stderr
            )
            return 1
    except RolloutError as error:
        print(f"qurl serve: {error}", file=sys.stderr)
        return 1


def _bits(code_bits: int) -> str:
    return "" if code_bits == 8 else f" --rollout_code_bits {code_bits}"


def _say(line: str) -> None:
    print(line, flush=True)
