"""HTTP between a trainer and the vLLM server that ``qurl serve`` has started.

Every call has a time limit, goes to the address the user named and nowhere else (no proxy, no redirect), and ends in an
error of one sentence: `ServerLostError` where the server may come back, `ServerError` where it will not help.
"""

import math
import time
from typing import Any

import requests
from trl.generation.vllm_client import VLLMClient

from qurl.rollout.engine import RolloutError

# Seconds within which a server that works has answered what needs no sampling.
_PROMPT_ANSWER = 60.0
_RETRY_EVERY = 2.0


def server_url(host: str, port: int) -> str:
    """Address of a server; an IPv6 host stands in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class ServerError(RolloutError):
    """The server cannot be used: another model, format or version, or a call that it refuses."""


class ServerLostError(ServerError):
    """The server does not answer, or has other weights than those it was given: it may have been started again."""


class RolloutClient(VLLMClient):
    """TRL's client, of which the transfer of weights through NCCL is used, with limits and sentences of its own.

    Parameters
    ----------
    url : str
        Such as "http://127.0.0.1:8000".
    connect_seconds : float
        How long to wait for a server that is not there yet, or no longer.
    call_seconds : float
        How long a call may take before the server counts as hanging.
    group_port : int
        Of the NCCL group.
    """

    def __init__(self, url: str, *, connect_seconds: float, call_seconds: float, group_port: int):
        self.url, self.connect_seconds, self.call_seconds = url.rstrip("/"), connect_seconds, call_seconds
        self._http = requests.Session()
        # Environment variables could lead prompts and weights through a proxy.
        self._http.trust_env = False
        # A server closes connections that were idle for seconds, as in training: that must not pass for its end.
        self._http.headers["Connection"] = "close"
        try:
            super().__init__(base_url=self.url, group_port=group_port, connection_timeout=connect_seconds)
        except (KeyError, IndexError, TypeError):
            raise ServerError(f"what answers at {self.url} is no vLLM server: it names no model.") from None
        self.session = self._http

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = _RETRY_EVERY) -> None:
        """Replaces TRL's, which waits for ever for a server that accepts and does not answer."""
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                self._request("GET", f"{self.url}/health", seconds=10)
                return
            except ServerError as error:
                if time.monotonic() + retry_interval > deadline:
                    reason = str(error).rstrip(".")
                    raise ServerLostError(
                        f"no vLLM server answers at {self.url} ({reason}): start one with qurl serve, or name its "
                        "address with vllm_server_base_url, or vllm_server_host and vllm_server_port."
                    ) from None
            time.sleep(retry_interval)

    def wait(self) -> None:
        """Until the server answers; `ServerLostError` after ``connect_seconds``."""
        self.check_server(self.connect_seconds)

    def workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `qurl.rollout.worker.RolloutWorker` in every process of the server.

        Returns
        -------
        list
            What each process of the first replica returns; an error in any process of any replica is raised.
        """
        answer = self._post(
            f"{self.url}/collective_rpc",
            json={"method": method, "args": list(arguments), "timeout": self.call_seconds},
            seconds=self.call_seconds,
        )
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results:
            raise ServerError(
                f"the server at {self.url} does not answer /collective_rpc as vLLM does: {answer!r:.200}"
            )
        return results

    def complete(
        self, prompts: list[list[int]], *, max_tokens: int, vocabulary: int, **sampling: Any
    ) -> list[dict]:
        """One choice of ``/v1/completions`` for each prompt: token ids, log-probs and why it ended.

        Parameters
        ----------
        prompts : list of list of int
        max_tokens : int
        vocabulary : int
            Token ids are below.
        **sampling
            Further fields of the request.

        Raises
        ------
        ServerError
            Where the answer is not one to this question.
        """
        payload = {
            "model": self.model,
            "prompt": prompts,
            "max_tokens": max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            # What a server might take from the model's generation config.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            **sampling,
        }
        answer = self._post(f"{self.url}/v1/completions", json=payload)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            faulty = [choice["index"] for choice in choices] != list(range(len(prompts))) or not all(
                # The prompt as it was sent: nothing added, such as another start token.
                choice["prompt_token_ids"] == prompt and _is_completion(choice, max_tokens, vocabulary)
                for choice, prompt in zip(choices, prompts, strict=True)
            )
        except (KeyError, TypeError, AttributeError):
            faulty = True
        if faulty:
            raise ServerError(
                f"the server at {self.url} does not answer /v1/completions as vLLM does: {str(answer)[:200]}"
            )
        return choices

    def post(self, path: str) -> dict:
        """Call an endpoint without a body; an empty answer is an empty dictionary."""
        return self._post(self.url + path) or {}

    def _get(self, url: str, seconds: float = _PROMPT_ANSWER, **options: Any) -> dict:
        return self._content(self._request("GET", url, seconds, **options))

    def _post(self, url: str, seconds: float | None = None, **options: Any) -> dict | None:
        answer = self._request("POST", url, seconds or self.call_seconds, **options)
        return self._content(answer) if answer.content else None

    def _content(self, answer: requests.Response) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise ServerError(
                f"what answers at {self.url} is no vLLM server: {' '.join(answer.text.split())[:100]!r}"
            ) from None

    def _request(self, verb: str, url: str, seconds: float, **options: Any) -> requests.Response:
        name = url.removeprefix(self.url)
        try:
            answer = self._http.request(verb, url, timeout=(10, seconds), allow_redirects=False, **options)
        except requests.exceptions.ReadTimeout:
            raise ServerError(
                f"the vLLM server at {self.url} has not answered {name} for {seconds:g} s and seems to hang: see its "
                "log, and start it again; where it is only slow, raise rollout_timeout."
            ) from None
        except requests.exceptions.RequestException as error:
            raise ServerLostError(f"the vLLM server at {self.url} is not reached: {_cause(error)}.") from None
        if answer.status_code == 404:
            raise ServerError(
                f"the server at {self.url} does not know {name}: it was not started by qurl serve, which opens it."
            )
        if answer.status_code == 400 and "Out of range float" in answer.text:
            raise ServerError(
                f"the vLLM server at {self.url} returned log-probs that are not numbers: the weights overflow; go back "
                "to a checkpoint and lower the learning rate."
            )
        if answer.status_code != 200:
            raise ServerError(
                f"the vLLM server at {self.url} refused {name} with status {answer.status_code}: {_said(answer)}"
            )
        return answer


def _is_completion(choice: dict, max_tokens: int, vocabulary: int) -> bool:
    """Whether a choice holds tokens of the vocabulary with a log-probability each, no more than were asked for."""
    ids, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    return (
        1 <= len(ids) == len(logps) <= max_tokens
        and all(type(token) is int and 0 <= token < vocabulary for token in ids)
        and all(isinstance(logp, float | int) and math.isfinite(logp) and logp <= 1e-3 for logp in logps)
        and isinstance(choice["finish_reason"], str)
    )


def _cause(error: BaseException) -> str:
    """What lies at the bottom of an error of requests, which wraps several times."""
    while (inner := getattr(error, "reason", None) or error.__cause__ or error.__context__) and isinstance(
        inner, BaseException
    ):
        error = inner
    return (str(error) or type(error).__name__).rstrip(".").split("\n")[0]


def _said(answer: requests.Response) -> str:
    """The message of an answer that is an error, on one line."""
    try:
        body = answer.json()
        message = body.get("error", body) if isinstance(body, dict) else body
        message = message.get("message", message) if isinstance(message, dict) else message
    except ValueError:
        message = answer.text
    return " ".join(str(message).split())[:500]
