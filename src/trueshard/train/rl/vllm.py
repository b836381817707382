"""A vLLM server as the engine: it generates, and is proven to have the model's weights after each update.

- Requests are divided over the ranks, and every rank gets all answers. The seed of a request follows from the name of
  its sample; the server's kernels depend on what else it computes at the time, so equal seeds give equal tokens up to
  rounding.
- New weights go by way of a directory, or from GPU to GPU. Both iterate ``trueshard.weights``, a unit of the model at a
  time, on all ranks in the same order: no rank talks to the server while another waits in a collective.
- After an update the server is asked for the log-probabilities of a few fixed texts, the *probe*, which are compared
  with the model's own. They are also compared with the server's before: a server that keeps its old weights answers
  with the same bits, however small the step was.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import secrets
import shutil
import socket
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueshard.checkpoint import layout
from trueshard.checkpoint.format import TensorEntry, dtype_name, make_header
from trueshard.checkpoint.process_group import as_bytes
from trueshard.checkpoint.weights import weights
from trueshard.distributed import device_of
from trueshard.errors import UserError, explained
from trueshard.model import names
from trueshard.sharding.engine import sharded
from trueshard.sharding.gathering import on_this_stream
from trueshard.train.rl.config import RolloutSection
from trueshard.train.rl.engine import ends_of, probe_bound, probes
from trueshard.train.rl.policy import PolicyLoss
from trueshard.train.rl.ranks import awaited, on_every_rank, on_first_rank, rank_and_ranks
from trueshard.train.rl.sampler import PromptEncoder
from trueshard.train.rl.samples import Answer, Request, Sampling
from trueshard.train.rl.vllm_answers import entry
from trueshard.train.rl.vllm_server import Server, completion

_STILL = 0.1
"""Part of the bound by which the model's log-probabilities may move while the server's keep every bit."""
_PREFIX = "weights-"


class VLLMEngine:
    """Generates on a vLLM server at ``rollout.url``; an `Engine`. Collective.

    Raises `UserError` on every rank if no server answers, or not one that can be used.
    """

    def __init__(
        self,
        section: RolloutSection,
        model: nn.Module,  # sharded
        encoder: PromptEncoder,
        folder: Path | None,  # ``run.dir``: new weights are written below it
    ) -> None:
        if folder is None:
            raise ValueError('rollout.engine = "vllm" puts new weights into a folder; give folder=')
        self._section, self._model = section, model
        self._probes, self._bound = probes(len(encoder.tokenizer)), probe_bound(model)
        self._loss = PolicyLoss()
        inner: Any = names.unwrap(model)
        vocabulary = inner.get_input_embeddings().weight.shape[0]  # may have more tokens than the tokenizer
        self._server = server = Server(section.url or "", section.timeout, vocabulary)
        self._ends = sorted(ends_of(model, encoder))
        takes_adapters = on_first_rank(lambda: _check_server(section, server), awaited)
        self._served: str | None = None
        """Name of the adapter on the server, None for the model that it serves."""
        self.mismatch = math.nan
        """Largest difference in the last probe, in nats."""
        self._running: Future[dict[int, Answer]] | None = None
        self._before: tuple[int, torch.Tensor, torch.Tensor] | None = None
        """The last probe at which the server's log-probabilities changed: (version, the model's, the server's), by
        which a server that keeps its old weights is found though the step was smaller than the bound. On rank 0."""
        self._sync: Directory | Transfer
        if section.sync == "nccl":
            self._sync = Transfer(model, server)
        else:
            self._sync = Directory(model, encoder.tokenizer, folder, server, takes_adapters)

    def update(self, version: int) -> None:
        """Give the server the model's weights, after ``version`` optimizer steps, and probe it. Collective.

        Raises `UserError` on every rank if it did not take them, or if its log-probabilities are not the model's.
        """
        assert self._running is None, "finish() what was started with the old weights first"
        self._served = self._sync.send(version)
        on_first_rank(self._forget, awaited)
        self._probe(version)

    def start(self, requests: Sequence[Request], sampling: Sampling) -> Future[dict[int, Answer]]:
        """Ask for answers in the background, one batch at a time; ``finish`` returns them. No collective.

        Raises `UserError` if a request has images.
        """
        assert self._running is None, "one batch at a time: finish() the one before first"
        if any(request.messages is not None for request in requests):
            raise UserError('rollout.engine = "vllm" takes prompts of text, and one has images; use "transformers"')
        rank, ranks = rank_and_ranks()
        bodies = {
            number: completion(requests[number], sampling, self._ends, self._served)
            for number in range(rank, len(requests), ranks)
        }
        self._running = self._server.complete(bodies, concurrent=-(-self._section.batch // ranks))
        return self._running

    def finish(self, started: Future[dict[int, Answer]]) -> list[Answer]:
        """Return the answers to what was started, in the order of its requests. Collective.

        Raises `UserError` on every rank if the server failed one of them, or took longer than ``rollout.timeout``.
        """
        try:
            parts = awaited(started.result)
        finally:
            self._running = None
        answers = {number: answer for part in parts for number, answer in part.items()}
        return [answers[number] for number in sorted(answers)]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Continue each request: ``start``, then ``finish``. Collective."""
        return self.finish(self.start(requests, sampling))

    def close(self) -> None:
        """Delete the weights that were written, and stop asking. No collective."""
        if self._running is not None:
            self._running.cancel()
        self._sync.close()

    def _forget(self) -> None:
        """Empty the server's cache of prefixes, which the old weights computed. Rank 0."""
        content = self._server.ask("/reset_prefix_cache?reset_running_requests=true", {})
        if entry(content, "success") is False:
            raise UserError(
                f"rollout.url: {self._server.url} keeps its cache of prefixes, since it is answering others; give the "
                "run a server of its own"
            )

    @torch.no_grad()
    def _probe(self, version: int) -> None:
        """Compare the server's log-probabilities of the probes with the model's. Collective."""
        ids = torch.tensor(self._probes, device=device_of(sharded(self._model).mesh))
        logprobs, _ = self._loss.logprobs(self._model, {"input_ids": ids[:, :-1], "targets": ids[:, 1:]})
        ours = logprobs.cpu()
        self.mismatch = on_first_rank(lambda: self._compare(version, ours), awaited)

    def _compare(
        self,
        version: int,
        ours: torch.Tensor,  # (probes, length - 1): the model's log-probabilities, from the second token on
    ) -> float:
        """Return the largest difference between the server's log-probabilities and the model's. Rank 0."""
        answers = [self._server.prompt_logprobs(ids, self._served) for ids in self._probes]
        theirs = torch.tensor(answers, dtype=torch.float64)
        differences = (ours - theirs).abs()
        difference = float(differences.max())  # NaN if any is
        problem = f"rollout.url: the server's weights are not those of step {version}"
        remedy = "see its log since the last update: it must see run.dir, and serve this run alone"
        if not difference <= self._bound:
            probe, token = divmod(int(differences.argmax()), differences.shape[1])
            raise UserError(
                f"{problem}: its log-probability of token {token + 1} of probe {probe} "
                f"(id {self._probes[probe][token + 1]}) is {theirs[probe, token]:.4f}, the model's "
                f"{ours[probe, token]:.4f}: {difference:.2g} apart, and {self._bound:g} is allowed; {remedy}"
            )
        if self._before is None or not torch.equal(self._before[2], theirs):
            self._before = version, ours, theirs
        elif (moved := float((ours - self._before[1]).abs().max())) > self._bound * _STILL:
            raise UserError(
                f"{problem}: its log-probabilities of the probes are those of step {self._before[0]} to the last bit, "
                f"while the model's have moved by up to {moved:.2g}; {remedy}"
            )
        return difference


def _check_server(section: RolloutSection, server: Server) -> bool:
    """Return True if the server gets adapters alone. Raises `UserError` if it cannot be used as ``section`` says."""
    content = server.ask("/server_info?config_format=json")
    config = entry(content, "vllm_config")
    if not isinstance(config, dict):
        raise UserError(f"rollout.url: {server.url} does not tell its configuration; vLLM 0.29 or newer does")
    mode = str(entry(config, "model_config", "logprobs_mode"))
    if section.temperature != 1 and not mode.endswith("processed_logprobs"):
        raise UserError(
            f"rollout.temperature is {section.temperature:g}, and the server's log-probabilities are those at 1; start "
            "it with --logprobs-mode processed_logprobs"
        )
    if section.sync == "nccl" and entry(config, "weight_transfer_config", "backend") != "nccl":
        raise UserError(
            'rollout.sync = "nccl": the server was not started for it; add --weight-transfer-config '
            '\'{"backend": "nccl"}\', or use "directory"'
        )
    takes_adapters = entry(content, "vllm_env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    if section.send == "adapter" and not (config.get("lora_config") and takes_adapters):
        raise UserError(
            'rollout.send = "adapter": the server takes none; start it with --enable-lora, and '
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 before it"
        )
    return bool(config.get("lora_config") and takes_adapters) and section.send != "merged"


# The ways of new weights


class Directory:
    """Writes a Hugging Face directory that the server reads.

    - Of a model, or with its adapter merged: each unit is a file, which the ranks write in turn.
    - Of an adapter alone: what PEFT writes; the server keeps the base that it was started with. Each version has a name
      of its own there: one that is loaded again in place (vLLM 0.32) is read from its files at every token.

    The directory before is deleted once the server has read the new one.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, folder: Path, server: Server, takes_adapters: bool) -> None:
        self._root, self._server, self._model = folder.resolve() / "rollout", server, model
        inner: Any = names.unwrap(model)
        has_adapters = hasattr(inner, "peft_config")
        self._is_adapter = takes_adapters and has_adapters
        """True if the adapter alone is written, False if the model is, with its adapter merged."""
        self._run = secrets.token_hex(4)
        """Part of an adapter's name on the server, which may have had one of an earlier run."""
        self._loaded: str | None = None
        """Name of the adapter that the server has loaded."""
        self._companions: dict[str, bytes] = {}
        """The configurations and the tokenizer's files, on rank 0."""
        if rank_and_ranks()[0] == 0:
            saved = inner.get_base_model() if has_adapters and not self._is_adapter else inner
            files = layout.companions({"model": saved}, tokenizer, "")()
            self._companions = {name: data for name, data in files.items() if not name.startswith(layout.BASE)}

    def send(self, version: int) -> str | None:
        """Let the server read the model's weights; return their name there, None for the model that it serves.

        Collective. Raises `UserError` on every rank.
        """
        place = self._root / f"{_PREFIX}{version}"
        on_first_rank(lambda: _make_empty(place))
        on_every_rank(lambda: self._write(place))
        return on_first_rank(lambda: self._hand_over(place), awaited)

    def close(self) -> None:
        """Remove what is left of it. No collective; does not raise."""
        if rank_and_ranks()[0] == 0:
            with contextlib.suppress(UserError):
                self._unload(timeout=10)
            self._delete_all_but(None)
            with contextlib.suppress(OSError):  # others may keep files there
                self._root.rmdir()

    def _delete_all_but(self, kept: Path | None) -> None:
        for place in self._root.glob(f"{_PREFIX}*"):
            if place != kept:
                shutil.rmtree(place, ignore_errors=True)

    def _write(self, place: Path) -> None:
        rank, ranks = rank_and_ranks()
        files: dict[str, str] = {}
        adapter: dict[str, torch.Tensor] = {}
        sizes: Counter[torch.dtype] = Counter()
        failure: OSError | None = None
        units = weights(self._model, adapters="alone") if self._is_adapter else weights(self._model, naming="hub")
        for number, (keys, tensors) in enumerate(units):
            file = f"model-{number:05d}.safetensors"
            files |= dict.fromkeys(keys, file)
            for tensor in tensors:
                sizes[tensor.dtype] += tensor.nbytes
            if self._is_adapter:  # is one file; what is gathered goes with the next unit
                if rank == 0:
                    adapter |= {key: tensor.to("cpu", copy=True) for key, tensor in zip(keys, tensors, strict=True)}
            elif number % ranks == rank and failure is None:
                try:
                    _write_file(place / file, dict(zip(keys, tensors, strict=True)))
                except OSError as error:  # the other ranks are in the next unit's collective
                    failure = error
        problem = f"run.dir: weights for the server cannot be written to {place}"
        with explained(problem, "free space there, or choose another", OSError):
            if failure is not None:
                raise failure
            if adapter:
                _write_file(place / "adapter_model.safetensors", adapter)
            if rank == 0:
                self._write_rest(place, files, sizes)

    def _write_rest(self, place: Path, files: Mapping[str, str], sizes: Counter[torch.dtype]) -> None:
        """Write the files without tensors; ``files``: each tensor's, ``sizes``: bytes of each dtype."""
        rest = dict(self._companions)
        if not self._is_adapter:
            index = {"metadata": {"total_size": sizes.total()}, "weight_map": files}
            rest["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
            if "config.json" in rest:
                dtype = dtype_name(sizes.most_common(1)[0][0])
                rest["config.json"] = json.dumps(json.loads(rest["config.json"]) | {"dtype": dtype}, indent=2).encode()
        for name, data in rest.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)

    def _hand_over(self, place: Path) -> str | None:
        """Let the server read ``place``; return the name of the adapter in it. Rank 0."""
        name = f"{place.name}-{self._run}" if self._is_adapter else None
        try:
            if name is None:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}}
                self._server.ask("/collective_rpc", body)
            else:
                self._server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(place)})
        except UserError as error:
            raise UserError(f"{error} (new weights are in {place}, which the server must see as well)") from error
        self._unload()
        self._loaded = name
        self._delete_all_but(place)
        return name

    def _unload(self, timeout: float | None = None) -> None:
        if self._loaded is not None:
            self._server.ask("/v1/unload_lora_adapter", {"lora_name": self._loaded}, timeout)
            self._loaded = None


def _make_empty(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    with explained(f"run.dir: {place} cannot be made", "choose another", OSError):
        place.mkdir(parents=True)


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    header, ranges = make_header({key: TensorEntry.of(tensor, [key]) for key, tensor in tensors.items()}, marked=False)
    with open(path, "wb") as file:
        file.write(header)
        for key in sorted(tensors, key=lambda key: ranges[key]):
            file.write(as_bytes(tensors[key].to("cpu", copy=True)))  # numpy would pin the gathered memory


def whole_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of all weights, each valid until the next. Collective."""
    for keys, tensors in weights(model, naming="hub"):
        yield from zip(keys, tensors, strict=True)


def copied_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator of (name, a copy) of all weights, each valid as long as it is held. Collective.

    vLLM packs many into a buffer after it has asked for the last one of them, on two streams in turn.
    """

    def pairs() -> Generator[tuple[str, torch.Tensor], None, None]:
        for key, tensor in whole_weights(model):
            yield key, tensor.clone()

    return on_this_stream(pairs(), device_of(sharded(model).mesh))


class Transfer:
    """Sends weights from the GPU of rank 0 to the server's, over NCCL, through vLLM's own interface.

    **Not run on GPUs**: written against ``vllm.distributed.weight_transfer`` of vLLM 0.32. The server's routes, and the
    order in which vLLM's sender calls them, were tried without GPUs; no tensor has crossed. What can be checked up
    front is checked when it is made; the probe after each update checks the rest.

    The first rank sends, and the others take part in gathering each unit. Names, dtypes and shapes, which the server is
    told before the first tensor, come from a pass over the model when this is made.
    """

    def __init__(self, model: nn.Module, server: Server) -> None:
        self._model, self._server, self._version = model, server, 0
        on_first_rank(_check_transfer)
        self.described = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in whole_weights(model)]
        self._engine: Any = None
        self._pairs: Iterator[tuple[str, torch.Tensor]] = iter(())
        on_first_rank(self._meet)

    def send(self, version: int) -> None:
        """Send the model's weights. Collective. Raises `UserError` on every rank."""
        self._version = version
        on_every_rank(self._send)

    def close(self) -> None:
        """End the group with the server. No collective; does not raise."""
        if self._engine is not None:
            with contextlib.suppress(Exception):
                self._server.ask("/shutdown_weight_transfer_engine", {}, timeout=10)
                self._engine.shutdown()

    def _send(self) -> None:
        pairs = self._pairs = copied_weights(self._model)
        try:
            if rank_and_ranks()[0] == 0:
                self._server.ask("/pause?mode=wait", {})
                self._engine.send_weights()
                self._server.ask("/resume", {})
        finally:  # every rank gathers every unit, whatever happened here
            for _ in pairs:
                pass

    def _meet(self) -> None:
        """Make the group of this rank and the server's. Rank 0."""
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        transfer = self

        class Source(WeightSource):
            def metadata(self) -> list[Any]:
                return [ParamMeta(*description) for description in transfer.described]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return transfer._pairs

        size = entry(self._server.ask("/get_world_size"), "world_size")
        if type(size) is not int or size < 1:
            raise UserError(f"rollout.url: {self._server.url} does not tell its world_size; vLLM 0.29 or newer does")
        ranks = 1 + size
        url = self._server.address
        port = url.port or (443 if url.scheme == "https" else 80)
        with socket.create_connection((url.host, port), self._server.timeout) as reached:
            address = reached.getsockname()[0]  # of the interface on which the server is reached, and reaches back
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=ranks, rank=0)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self, source=Source())

    # What vLLM's engine asks the server, by the names that it calls.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._server.ask("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._server.ask("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self._server.ask("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._server.ask("/finish_weight_update", {"weight_version": weight_version or str(self._version)})


def _check_transfer() -> None:
    """Raise `UserError` unless this process can send weights over NCCL."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            'rollout.sync = "nccl" needs the package vllm (0.29 or newer) where the run trains; install it, or use '
            '"directory"'
        )
    if not torch.cuda.is_available():
        raise UserError('rollout.sync = "nccl" sends from GPU to GPU, and there is none here; use "directory"')
