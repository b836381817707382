"""Requests to a vLLM server over HTTP: one, or many in the background.

- Whatever goes wrong is a `UserError` of one line that names ``rollout.url``, what failed, and the remedy.
- No answer takes longer than ``rollout.timeout``, also one that trickles in.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import httpx

from trueshard.errors import UserError, one_line, with_kind
from trueshard.train.rl.engine import key_of
from trueshard.train.rl.samples import Answer, Request, Sampling

COMPLETIONS = "/v1/completions"
_LOWEST = -9999.0
"""The number that the server writes for a log-probability of minus infinity."""


class Server:
    """A vLLM server at ``rollout.url``; ``timeout``: ``rollout.timeout``, in seconds."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
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
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Return the answer to a POST of ``body``, or to a GET if that is None: JSON, or else text.

        Raises `UserError` for an error, and if no answer comes within ``timeout`` seconds (None: ``rollout.timeout``).
        """
        return asyncio.run_coroutine_threadsafe(self._request(path, body, timeout), self._loop).result()

    def complete(self, bodies: Mapping[int, dict[str, Any]], concurrent: int) -> Future[dict[int, Answer]]:
        """Ask for completions in the background, ``concurrent`` at a time; return the future answers by number.

        The first error ends it, and does not wait for the others.
        """
        return asyncio.run_coroutine_threadsafe(self._complete(bodies, concurrent), self._loop)

    async def _complete(self, bodies: Mapping[int, dict[str, Any]], concurrent: int) -> dict[int, Answer]:
        room = asyncio.Semaphore(max(1, concurrent))

        async def complete(body: dict[str, Any]) -> Answer:
            async with room:
                return self._answer(await self._request(COMPLETIONS, body), body["max_tokens"])

        tasks = [asyncio.create_task(complete(body)) for body in bodies.values()]
        try:
            return dict(zip(bodies, await asyncio.gather(*tasks), strict=True))
        finally:  # after an error, gather leaves the others running
            for task in tasks:
                task.cancel()

    async def _request(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        exchange = self._client.request("GET" if body is None else "POST", self.url + path, json=body)
        try:
            response = await asyncio.wait_for(exchange, timeout or self.timeout)
        except asyncio.TimeoutError:
            raise UserError(
                f"rollout.url: {self.url} did not answer {path} within {self.timeout:g} s; see the server's log, or "
                "set a longer rollout.timeout"
            ) from None
        except httpx.ConnectError as error:
            raise UserError(
                f"rollout.url: no server answers at {self.url} ({with_kind(_first_cause(error))}); start vLLM there, "
                "or correct the address"
            ) from error
        except httpx.HTTPError as error:
            raise UserError(
                f"rollout.url: {self.url} broke off its answer to {path} ({with_kind(error)}); see the server's log, "
                "start it again, and resume the run"
            ) from error
        try:
            content = response.json()
        except ValueError:
            content = response.content.decode(errors="replace")
        if response.status_code >= 400:
            is_missing = response.status_code == 404 and not path.startswith("/v1/")
            remedy = "start it with VLLM_SERVER_DEV_MODE=1" if is_missing else "see the server's log"
            raise UserError(
                f"rollout.url: {self.url} answered {path} with HTTP {response.status_code} ({_reason(content)}); "
                f"{remedy}"
            )
        return content

    def _answer(self, content: Any, most: int) -> Answer:
        """Return the continuation in a completion of ``most`` tokens at most. Raises `UserError` if it is not whole."""
        try:
            choice = content["choices"][0]
            ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
            reason = choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            raise self._unusable("without a completion") from None
        if not ids or not logprobs or len(ids) != len(logprobs):
            raise self._unusable("without token ids and a log-probability of each")
        if not all(isinstance(value, int | float) and math.isfinite(value) and value > _LOWEST for value in logprobs):
            raise self._unusable("with a log-probability that is not a finite number")
        if reason not in ("stop", "length"):
            raise self._unusable(f"that was broken off (finish_reason {reason!r})")
        if reason == "length" and len(ids) < most:
            raise UserError(
                f"rollout.url: {self.url} cut an answer after {len(ids)} of {most} tokens; start it with a "
                "--max-model-len of train.sequence_length or more"
            )
        return Answer(list(ids), [float(logprob) for logprob in logprobs], reason == "stop")

    def _unusable(self, how: str) -> UserError:
        return UserError(
            f"rollout.url: {self.url} gave an answer {how}; it must be vLLM 0.29 or newer, and healthy: see its log"
        )


def _first_cause(error: BaseException) -> BaseException:
    """Return the error of the system, such as ConnectionRefusedError, behind one of httpx that only says "failed"."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _reason(content: Any) -> str:
    """Return the server's own words about an error, in one line."""
    if isinstance(content, dict):
        error = content.get("error", content.get("detail", content))
        content = error.get("message", error) if isinstance(error, dict) else error
    return one_line(ValueError(str(content)), 300) if str(content).strip() else "without a word"


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
