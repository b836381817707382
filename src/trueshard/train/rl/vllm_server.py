"""Requests to a vLLM server over HTTP: one, or many in the background.

- Whatever goes wrong is a `UserError` of one line that names ``rollout.url``, what failed, and the remedy.
- No answer takes longer than ``rollout.timeout``, also one that trickles in; nor more memory than was asked for.
- What is answered is believed only after `vllm_answers` has checked it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import httpx

from trueshard.errors import UserError, explained, one_line, with_kind
from trueshard.train.rl.engine import key_of
from trueshard.train.rl.samples import Answer, Request, Sampling
from trueshard.train.rl.vllm_answers import answer_of, entry, prompt_logprobs_of

COMPLETIONS = "/v1/completions"
_ROOM, _ROOM_OF_TOKEN = 4 * 2**20, 2**10
"""Bytes that an answer may have, and so many more for each token of prompt and completion: several times what vLLM
writes, which repeats what was sent."""


class Server:
    """A vLLM server at ``rollout.url`` of a model of ``vocabulary`` tokens; ``timeout``: ``rollout.timeout``."""

    def __init__(self, url: str, timeout: float, vocabulary: int) -> None:
        self.url, self.timeout, self._vocabulary = url.rstrip("/"), timeout, vocabulary
        try:
            self.address = httpx.URL(self.url)
        except httpx.InvalidURL:
            self.address = httpx.URL()
        if self.address.scheme not in ("http", "https") or not self.address.host:
            raise UserError(f'rollout.url: {url!r} is no address of a server; write it as "http://127.0.0.1:8000"')
        # [Note: limits of time] httpx limits each read, so an answer that trickles in could take for ever. wait_for
        # limits the whole exchange; it needs an event loop, and a notebook's own may run in this thread already.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="trueshard: vLLM", daemon=True).start()
        # The server closes idle connections when it likes, so each request has a connection of its own. Settings of
        # a proxy are for the world outside, and a server of the cluster is not there.
        limits, plain = httpx.Limits(max_connections=None, max_keepalive_connections=0), {"Accept-Encoding": "identity"}
        self._client = httpx.AsyncClient(timeout=None, limits=limits, headers=plain, trust_env=False)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Return the answer to a POST of ``body``, or to a GET if that is None: JSON, or None.

        Raises `UserError` for an error, and if no answer comes within ``timeout`` seconds (None: ``rollout.timeout``).
        """
        return asyncio.run_coroutine_threadsafe(self._request(path, body, timeout), self._loop).result()

    def complete(self, bodies: Mapping[int, dict[str, Any]], concurrent: int) -> Future[dict[int, Answer]]:
        """Ask for completions in the background, ``concurrent`` at a time; return the future answers by number.

        The first error ends it, and does not wait for the others.
        """
        return asyncio.run_coroutine_threadsafe(self._complete(bodies, concurrent), self._loop)

    def prompt_logprobs(self, ids: list[int], model: str | None) -> list[float]:
        """Return the log-probabilities of the tokens of a text, from the second on, in nats."""
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        content = self.ask(COMPLETIONS, body if model is None else body | {"model": model})
        with self._checked():
            return prompt_logprobs_of(content, ids)

    async def _complete(self, bodies: Mapping[int, dict[str, Any]], concurrent: int) -> dict[int, Answer]:
        room = asyncio.Semaphore(max(1, concurrent))

        async def complete(body: dict[str, Any]) -> Answer:
            async with room:
                content = await self._request(COMPLETIONS, body)
            with self._checked():
                return answer_of(content, body, self._vocabulary)

        tasks = [asyncio.create_task(complete(body)) for body in bodies.values()]
        try:
            return dict(zip(bodies, await asyncio.gather(*tasks), strict=True))
        finally:  # after an error, gather leaves the others running
            for task in tasks:
                task.cancel()

    async def _request(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        data, seconds = bytearray(), timeout or self.timeout
        try:
            status = await asyncio.wait_for(self._fetch(path, body, data), seconds)
        except asyncio.TimeoutError:
            did = f"sent {len(data)} bytes of its answer to {path} and no end" if data else f"did not answer {path}"
            raise UserError(
                f"rollout.url: {self.url} {did} within {seconds:g} s; see the server's log, or set a longer "
                "rollout.timeout"
            ) from None
        except httpx.ConnectError as error:
            raise UserError(
                f"rollout.url: no server answers at {self.url} ({with_kind(_first_cause(error))}); start vLLM there, "
                "or correct the address"
            ) from error
        except httpx.HTTPError as error:
            raise UserError(
                f"rollout.url: {self.url} broke off its answer to {path} ({with_kind(error)}); see the server's "
                "log, and that no other program has its port; start it again, and resume the run"
            ) from error
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):  # text, or what no server of vLLM would nest
            content = None
        if status >= 300:
            is_missing = status == 404 and not path.startswith("/v1/")
            remedy = "start it with VLLM_SERVER_DEV_MODE=1" if is_missing else "see the server's log"
            raise UserError(
                f"rollout.url: {self.url} answered {path} with HTTP {status} ({_reason(content, data)}); {remedy}"
            )
        return content

    async def _fetch(self, path: str, body: Mapping[str, Any] | None, data: bytearray) -> int:
        """Append the answer to ``data`` as it comes, and return the HTTP status."""
        asked = body or {}
        room = _ROOM + _ROOM_OF_TOKEN * (len(asked.get("prompt", ())) + asked.get("max_tokens", 0))
        exchange = self._client.stream("GET" if body is None else "POST", self.url + path, json=body)
        with self._checked():
            async with exchange as response:
                async for part in response.aiter_raw():  # as it was sent: compressed bytes may become gigabytes
                    data += part
                    if len(data) > room:
                        raise ValueError(f"of more than {room} bytes to {path}")
                return response.status_code

    def _checked(self) -> contextlib.AbstractContextManager[None]:
        problem = f"rollout.url: {self.url} gave an unusable answer"
        return explained(problem, "it must be vLLM 0.29 or newer, and healthy: see its log", ValueError, detail=str)


def _first_cause(error: BaseException) -> BaseException:
    """Return the error of the system, such as ConnectionRefusedError, behind one of httpx that only says "failed"."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _reason(content: Any, data: bytes | bytearray) -> str:
    """Return the server's own words about an error, in one line."""
    words = (entry(content, "error", "message"), entry(content, "error"), entry(content, "detail"))
    text = next((word for word in words if isinstance(word, str)), data[:1000].decode(errors="replace"))
    return one_line(ValueError(text), 300) if text.strip() else "without a word"


def completion(request: Request, sampling: Sampling, ends: Sequence[int], model: str | None) -> dict[str, Any]:
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
