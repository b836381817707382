"""Give a vLLM server the model's weights: by way of a directory, or from GPU to GPU.

Both iterate ``trueshard.weights``, a unit of the model at a time, on all ranks in the same order: no rank talks to the
server while another waits in a collective that it has not reached.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

import trueshard
from trueshard.checkpoint import layout
from trueshard.checkpoint.format import TensorEntry, dtype_name, make_header
from trueshard.checkpoint.process_group import RankGroup, as_bytes
from trueshard.errors import UserError, with_kind
from trueshard.model import names
from trueshard.train.rl.vllm_server import Server, on_every_rank, on_first_rank

_PREFIX = "weights-"

Adapters = Literal["merged", "alone"]


class Sync(Protocol):
    """A way of new weights."""

    def send(self, version: int) -> str | None:
        """Put the model's weights into the server; return their name there, None for the model that it serves.

        Collective. Raises `UserError` on every rank.
        """

    def close(self) -> None:
        """Remove what is left of it. No collective; does not raise."""


class Directory:
    """Writes a Hugging Face directory that the server reads.

    - Of a model, or with its adapter merged: each unit is a file, which the ranks write in turn.
    - Of an adapter alone: what PEFT writes; the server keeps the base that it was started with. Each version has a name
      of its own there: one that is loaded again in place (vLLM 0.32) is read from its files at every token.

    The directory before is deleted once the server has read the new one.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        folder: Path,
        server: Server,
        ranks: RankGroup,
        adapters: Adapters,
    ) -> None:
        self._root, self._server, self._ranks = folder.resolve() / "rollout", server, ranks
        self._model, self._adapters = model, adapters
        self._run = secrets.token_hex(4)
        self._loaded: str | None = None
        self._companions = {} if ranks.rank else _companions(model, tokenizer, adapters)

    def send(self, version: int) -> str | None:
        place = self._root / f"{_PREFIX}{version}"
        on_first_rank(self._ranks, lambda: _make_empty(place))
        on_every_rank(self._ranks, lambda: self._write(place))
        name: str | None = on_first_rank(self._ranks, lambda: self._hand_over(place))
        return name

    def close(self) -> None:
        if self._ranks.rank == 0:
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
        files: dict[str, str] = {}
        kept: dict[str, torch.Tensor] = {}
        sizes: dict[torch.dtype, int] = {}
        failure: OSError | None = None
        for number, (keys, tensors) in enumerate(_groups(self._model, self._adapters)):
            file = f"model-{number:05d}.safetensors"
            files |= dict.fromkeys(keys, file)
            for tensor in tensors:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
            found = dict(zip(keys, tensors, strict=True))
            if self._adapters == "alone":  # one file, of the first rank; what is gathered goes with the next unit
                mine = found if self._ranks.rank == 0 else {}
                kept |= {key: tensor.to("cpu", copy=True) for key, tensor in mine.items()}
            elif number % self._ranks.world == self._ranks.rank and failure is None:
                try:
                    _write_file(place / file, found)
                except OSError as error:  # the other ranks are in the next unit's collective
                    failure = error
        try:
            if failure is not None:
                raise failure
            if kept:
                _write_file(place / "adapter_model.safetensors", kept)
            if self._ranks.rank == 0:
                self._write_rest(place, files, sizes)
        except OSError as error:
            raise UserError(
                f"run.dir: weights for the server cannot be written to {place} ({with_kind(error)}); free space there, "
                "or choose another"
            ) from error

    def _write_rest(self, place: Path, files: Mapping[str, str], sizes: Mapping[torch.dtype, int]) -> None:
        """Write the files without tensors: of those, ``files`` has the file, and ``sizes`` the bytes of each dtype."""
        rest = dict(self._companions)
        if self._adapters == "merged":
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
            rest["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
            if "config.json" in rest:
                dtype = dtype_name(max(sizes, key=lambda size_: sizes[size_]))
                rest["config.json"] = json.dumps(json.loads(rest["config.json"]) | {"dtype": dtype}, indent=2).encode()
        for name, data in rest.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)

    def _hand_over(self, place: Path) -> str | None:
        """Let the server read ``place``; return the name of the adapter in it. Rank 0."""
        name = f"{place.name}-{self._run}" if self._adapters == "alone" else None
        try:
            if name is None:
                told = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}}
                self._server.ask("/collective_rpc", told)
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


def _groups(model: nn.Module, adapters: Adapters) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
    """Return the (names, whole tensors) of each unit, under the names that vLLM knows. Collective."""
    groups: Iterator[tuple[list[str], list[torch.Tensor]]]
    groups = trueshard.weights(model, adapters=adapters, naming="hub" if adapters == "merged" else "saved")
    return groups


def _make_empty(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"run.dir: {place} cannot be made ({with_kind(error)}); choose another") from error


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    header, ranges = make_header({key: TensorEntry.of(tensor, [key]) for key, tensor in tensors.items()}, marked=False)
    with open(path, "wb") as file:
        file.write(header)
        for key in sorted(tensors, key=lambda key: ranges[key]):
            file.write(as_bytes(tensors[key].to("cpu", copy=True)))  # numpy would pin the gathered memory


def _companions(model: nn.Module, tokenizer: Any, adapters: Adapters) -> dict[str, bytes]:
    """Return the configurations and the tokenizer's files, as name → content."""
    own: Any = names.unwrap(model)
    if adapters == "merged" and has_adapters(model):
        own = own.get_base_model()
    files = layout.companions({"model": own}, tokenizer, "")()
    return {name: data for name, data in files.items() if not name.startswith(layout.BASE)}


def has_adapters(model: nn.Module) -> bool:
    """True for a model of PEFT."""
    return hasattr(names.unwrap(model), "peft_config")


class Transfer:
    """Sends weights from the GPU of rank 0 to the server's, over NCCL, through vLLM's own interface.

    **Not run on GPUs**: written against ``vllm.distributed.weight_transfer`` of vLLM 0.32. The server's routes, and the
    order in which vLLM's sender calls them, were tried without GPUs; no tensor has crossed. What can be checked up
    front is checked when it is made; the probe after each update checks the rest.

    The first rank sends, and the others take part in gathering each unit. Names, dtypes and shapes, which the server is
    told before the first tensor, come from a pass over the model when this is made.
    """

    def __init__(self, model: nn.Module, server: Server, ranks: RankGroup) -> None:
        self._model, self._server, self._ranks, self._version = model, server, ranks, 0
        on_first_rank(ranks, _check_transfer)
        self.described = [(key, each.dtype, tuple(each.shape)) for key, each in self]
        self._engine: Any = None
        self._pairs: Iterator[tuple[str, torch.Tensor]] = iter(())
        on_first_rank(ranks, self._meet)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of all weights, each valid until the next. Collective."""
        for keys, tensors in _groups(self._model, "merged"):
            yield from zip(keys, tensors, strict=True)

    def send(self, version: int) -> None:
        self._version = version
        on_every_rank(self._ranks, self._send if self._ranks.rank == 0 else self._take_part)

    def close(self) -> None:
        if self._engine is not None:
            with contextlib.suppress(Exception):
                self._server.ask("/shutdown_weight_transfer_engine", {}, timeout=10)
                self._engine.shutdown()

    def _take_part(self) -> None:
        for _ in self:
            pass

    def _send(self) -> None:
        # vLLM packs many into a buffer after it has asked for the last one of them.
        pairs = self._pairs = ((name, tensor.clone()) for name, tensor in self)
        try:
            self._server.ask("/pause?mode=wait", {})
            self._engine.send_weights()
            self._server.ask("/resume", {})
        finally:  # the other ranks gather every unit, whatever happened here
            for _ in pairs:
                pass

    def _meet(self) -> None:
        """Make the group of this rank and the server's. Rank 0."""
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        transfer = self

        class Source(WeightSource):
            def metadata(self) -> list[Any]:
                return [ParamMeta(*each) for each in transfer.described]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return transfer._pairs

        ranks = 1 + int(self._server.ask("/get_world_size")["world_size"])
        with socket.create_connection((self._server.host, self._server.port), self._server.timeout) as reached:
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
