"""Ask a vLLM server over HTTP: one question, or many in the background.

- Whatever goes wrong is a `UserError` of one line that names ``rollout.url``, what failed, and the remedy.
- No answer takes longer than ``rollout.timeout``, also one that trickles in.
- Ranks tell each other what went wrong before any of them raises, so all of them raise the same line.
"""

from __future__ import annotations

import http.client
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trueshard.checkpoint.process_group import RankGroup
from trueshard.errors import UserError, one_line, refused, with_kind
from trueshard.train.rl.samples import Answer, Request, Sampling, key_of

COMPLETIONS = "/v1/completions"
_LOWEST = -9999.0
"""What the server writes for a log-probability of minus infinity."""


def on_every_rank(ranks: RankGroup, function: Callable[[], Any]) -> list[Any]:
    """Return what ``function`` returns on each rank; a wrong input of one is a `UserError` on all. Collective."""

    def attempt() -> tuple[Any, str | None]:
        try:
            with refused():
                return function(), None
        except UserError as error:
            return None, str(error)

    everyone = ranks.attempt("the rollout failed", attempt)
    for _, line in everyone:
        if line is not None:
            raise UserError(line)
    return [value for value, _ in everyone]


def on_first_rank(ranks: RankGroup, function: Callable[[], Any]) -> Any:
    """Return on every rank what ``function`` returns on the first, or raise its `UserError` there. Collective."""
    return on_every_rank(ranks, lambda: None if ranks.rank else function())[0]


class Server:
    """A vLLM server.

    Args:
        url: ``rollout.url``, such as "http://127.0.0.1:8000".
        timeout: ``rollout.timeout``, in seconds.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f'rollout.url: {url!r} is no address of a server; write it as "http://127.0.0.1:8000"')
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place, self._folder = parts.netloc.rpartition("@")[2], parts.path
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Return the answer to a POST of ``body``, to a GET if that is None: JSON, or text that is none.

        Raises:
            UserError: no answer within ``timeout`` seconds, ``rollout.timeout`` if None, or one that says what failed.
        """
        try:
            status, content = self._exchange(path, body, time.monotonic() + (timeout or self.timeout))
        except TimeoutError:
            raise self.late(path) from None
        except (OSError, http.client.HTTPException) as error:
            raise UserError(
                f"rollout.url: {self.url} broke off its answer to {path} ({with_kind(error)}); see the server's log, "
                "start it again, and resume the run"
            ) from error
        if status >= 400:
            is_missing = status == 404 and not path.startswith("/v1/")
            remedy = "start it with VLLM_SERVER_DEV_MODE=1" if is_missing else "see the server's log"
            raise UserError(f"rollout.url: {self.url} answered {path} with HTTP {status} ({_said(content)}); {remedy}")
        try:
            return json.loads(content)
        except ValueError:
            return content.decode(errors="replace")

    def late(self, path: str) -> UserError:
        """Return the error of a question that was not answered in time."""
        return UserError(
            f"rollout.url: {self.url} did not answer {path} within {self.timeout:g} s; see the server's log, or set a "
            "longer rollout.timeout"
        )

    def _exchange(self, path: str, body: Mapping[str, Any] | None, deadline: float) -> tuple[int, bytes]:
        def left() -> float:
            if (seconds := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            return seconds

        connection = self._kind(self._place, timeout=left())
        try:
            try:
                connection.connect()
            except TimeoutError:
                raise
            except OSError as error:
                raise UserError(
                    f"rollout.url: no server answers at {self.url} ({with_kind(error)}); start vLLM there, or correct "
                    "the address"
                ) from error
            sock = connection.sock
            content = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", self._folder + path, content, headers)
            response = connection.getresponse()
            parts: list[bytes] = []
            while not response.isclosed():
                sock.settimeout(left())
                if not (part := response.read1(1 << 20)):
                    break
                parts.append(part)
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return response.status, b"".join(parts)
        finally:
            connection.close()


def _said(content: bytes) -> str:
    """Return the server's own words about an error, in one line."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        error = found.get("error", found.get("detail", found))
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    return one_line(ValueError(text), 300) if text.strip() else "without a word"


@dataclass(frozen=True)
class Settings:
    """What decides how the server can be used."""

    processed: bool
    """True if its log-probabilities are those at the temperature of sampling."""
    adapters: bool
    """True if it takes LoRA adapters while it runs."""
    transfer: str | None
    """The backend of its weight transfer."""

    @classmethod
    def of(cls, server: Server) -> Settings:
        """Ask for them."""
        told = server.ask("/server_info?config_format=json")
        config = told.get("vllm_config") if isinstance(told, dict) else None
        if not isinstance(config, dict):
            raise UserError(f"rollout.url: {server.url} does not tell its configuration; vLLM 0.29 or newer does")
        mode = str((config.get("model_config") or {}).get("logprobs_mode"))
        takes = (told.get("vllm_env") or {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
        transfer = config.get("weight_transfer_config") or {}
        return cls(
            mode.endswith("processed_logprobs"), bool(config.get("lora_config") and takes), transfer.get("backend")
        )


def question(request: Request, sampling: Sampling, ends: Sequence[int], model: str | None) -> dict[str, Any]:
    """Return the body of a completion; every setting is in it, since the server has defaults of the model's makers.

    ``ends``: tokens that end an answer, the only ones; ``model``: name of the adapter, if it has one.
    """
    seed = key_of(key_of(sampling.seed, request.name), (request.first, 0, 0)) >> 1  # 63 bits: it is signed there
    body: dict[str, Any] = {
        "prompt": request.ids,
        "max_tokens": request.most,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
        "stop_token_ids": list(ends),
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    return body if model is None else body | {"model": model}


def answer_of(told: Any, most: int, server: Server) -> Answer:
    """Return the continuation in a completion of ``most`` tokens at most. Raises `UserError` if it is not whole."""
    try:
        choice = told["choices"][0]
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        reason = choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        raise _unusable(server, "without a completion") from None
    if not ids or not logprobs or len(ids) != len(logprobs):
        raise _unusable(server, "without token ids and a log-probability of each")
    if not all(isinstance(each, int | float) and math.isfinite(each) and each > _LOWEST for each in logprobs):
        raise _unusable(server, "with a log-probability that is not a finite number")
    if reason not in ("stop", "length"):
        raise _unusable(server, f"that was broken off (finish_reason {reason!r})")
    if reason == "length" and len(ids) < most:
        raise UserError(
            f"rollout.url: {server.url} cut an answer after {len(ids)} of {most} tokens; start it with a "
            "--max-model-len of train.sequence_length or more"
        )
    return Answer(list(ids), [float(each) for each in logprobs], reason == "stop")


def _unusable(server: Server, how: str) -> UserError:
    return UserError(
        f"rollout.url: {server.url} gave an answer {how}; it must be vLLM 0.29 or newer, and healthy: see its log"
    )


class Batch:
    """Completions that threads of this process ask for, from now on.

    Args:
        bodies: number → body of the question.
        threads: how many are asked at the same time.
    """

    def __init__(self, server: Server, bodies: Mapping[int, dict[str, Any]], threads: int) -> None:
        self._server, self._count = server, len(bodies)
        self._stopped = threading.Event()
        self._todo: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Answer | BaseException]] = queue.SimpleQueue()
        for each in bodies.items():
            self._todo.put(each)
        for _ in range(min(threads, len(bodies))):
            threading.Thread(target=self._ask, name="trueshard: rollout", daemon=True).start()

    def _ask(self) -> None:
        found: Answer | BaseException
        while not self._stopped.is_set():
            try:
                number, body = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                found = answer_of(self._server.ask(COMPLETIONS, body), body["max_tokens"], self._server)
            except BaseException as error:
                found = error
            self._done.put((number, found))

    def wait(self) -> dict[int, Answer]:
        """Return the answers by number. Raises the first error, and does not wait for the others."""
        answers: dict[int, Answer] = {}
        for _ in range(self._count):
            try:
                number, found = self._done.get(timeout=self._server.timeout + 1)  # each question has a limit of its own
            except queue.Empty:
                found = self._server.late(COMPLETIONS)
            if isinstance(found, BaseException):
                self.stop()
                raise found
            answers[number] = found
        return answers

    def stop(self) -> None:
        """Ask for no more."""
        self._stopped.set()
