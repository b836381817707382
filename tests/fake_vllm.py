"""A server that speaks as much of vLLM's HTTP as the engine uses, with a real tiny model of transformers behind it.

It loads the directory that it is told to reload, so its log-probabilities are those of the files. `mode` makes it go
wrong as servers do: POST it to `/mode`, or set it. It is a word of `FAULTS`, a name of `forged_answers`, or one that
`load` knows; "hangs@/collective_rpc" is a fault on another route than that of answers.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from typing import Any

import torch

from forged_answers import FORGED
from local_server import LocalServer, QuietHandler

FAULTS = ("hangs", "half", "trickles", "dies", "endless", "fails", "moved", "no http")
"""How it goes wrong on a route, whatever it would answer."""
ANSWER, PROBE = "answer", "probe"
"""The two uses of /v1/completions; every other route is itself."""


class FakeVLLM(LocalServer):
    """Serves on a port of the loopback interface until `close`."""

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        self.mode = ""
        self.model: Any = None
        self.tokenizer: Any = None
        self.adapters: dict[str, Any] = {}
        """By name: the model with each."""
        self.bodies: list[dict[str, Any]] = []
        """Of the completions that were asked for."""
        self.loaded: list[str] = []
        """Directories, in order."""
        self.config: dict[str, Any] = {"model_config": {"logprobs_mode": logprobs_mode}, "lora_config": None}
        self.environment: dict[str, Any] = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True}
        self._lock, self._closed = threading.Lock(), threading.Event()
        fake = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                use = PROBE if "prompt_logprobs" in body else ANSWER
                route = use if self.path == "/v1/completions" else self.path.partition("?")[0]
                fault, _, where = fake.mode.partition("@")
                fault = fault if route == (where or ANSWER) else ""
                status, told = fake.answer(self.path, body) if fault not in FAULTS else (200, {"choices": []})
                if fault in FORGED:
                    told = FORGED[fault].damage(told)
                data = told if isinstance(told, bytes) else json.dumps(told).encode()
                with contextlib.suppress(OSError):  # the client has gone
                    self._send(status, data, fault)

            def _send(self, status: int, data: bytes, fault: str) -> None:
                if fault == "hangs":
                    fake._closed.wait(60)
                if fault == "no http":
                    self.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")
                    self.close_connection = True
                    return
                if fault == "fails":
                    status, data = 500, b'{"error": {"message": "EngineCore\\n\\u001b[31mencountered an issue"}}'
                if fault == "moved":
                    status, data = 302, b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(data) + 2**30 * (fault in FAULTS[1:5])))
                self.end_headers()
                self.wfile.write(data)
                if fault == "half":
                    fake._closed.wait(60)
                while fault in ("trickles", "endless") and not fake._closed.wait(0.2 * (fault == "trickles")):
                    self.wfile.write(b" " * (1 if fault == "trickles" else 2**20))

        super().__init__(Handler)

    def close(self) -> None:
        self._closed.set()
        super().close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """HTTP status, and what is sent as JSON."""
        if path == "/mode":
            self.mode = body["mode"]
            return 200, {}
        if path.startswith("/server_info"):
            return 200, {"vllm_config": self.config, "vllm_env": self.environment}
        if path.startswith("/reset_prefix_cache"):
            return 200, {"success": True}
        if path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if path == "/v1/load_lora_adapter":
            from peft import PeftModel

            self.adapters[body["lora_name"]] = PeftModel.from_pretrained(copy.deepcopy(self.model), body["lora_path"])
            return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, "Success"
        if path == "/v1/completions":
            return self._complete(body)
        return 404, {"detail": "Not Found"}

    def load(self, path: str) -> None:
        """What it does when it is told to reload its weights."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.loaded.append(path)
        if self.mode == "keeps old weights":
            return
        old, self.model = self.model, AutoModelForCausalLM.from_pretrained(path).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        if self.mode == "drops one tensor":
            self.model.model.norm.weight.data = old.model.norm.weight.data

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.bodies.append(body)
        with self._lock, torch.no_grad():
            choice = self._given(body) if "prompt_logprobs" in body else self._drawn(body)
        counted = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(choice["token_ids"])}
        return 200, {"choices": [choice | {"prompt_token_ids": body["prompt"]}], "usage": counted}

    def _given(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, model = body["prompt"], self.adapters.get(body.get("model"), self.model)
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        known = [{str(token): {"logprob": logprobs[place, token].item()}} for place, token in enumerate(ids[1:])]
        return {"prompt_logprobs": [None, *known], "token_ids": [0]}

    def _drawn(self, body: dict[str, Any]) -> dict[str, Any]:
        generator, model = torch.Generator().manual_seed(body["seed"]), self.adapters.get(body.get("model"), self.model)
        ids, logprobs, reason = list(body["prompt"]), [], "length"
        begin = len(ids)
        while len(ids) - begin < body["max_tokens"] and reason == "length":
            of_all = (model(torch.tensor([ids])).logits[0, -1].float() / body["temperature"]).log_softmax(-1)
            ids.append(int(torch.multinomial(of_all.exp(), 1, generator=generator)))
            logprobs.append(of_all[ids[-1]].item())
            text = self.tokenizer.decode(ids[begin:])
            if ids[-1] in body["stop_token_ids"] or any(stop in text for stop in body["stop"]):
                reason = "stop"
        return {"token_ids": ids[begin:], "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
