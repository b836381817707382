"""The ways to load and to save the model of ``benchmarks.checkpoint``: TrueShard's and its peers', each as its
documentation has it.

- A way of loading goes from nothing to a sharded model that has its weights: building the modules and sharding them is
  part of it, since transformers and Accelerate do all of it in one.
- The model is Llama 3.2 1B: its widths, its tied embedding, bfloat16. Its values are those of one small random block,
  again and again, so that they cost next to nothing to make.
- Accelerate's FSDP2 functions are called as ``prepare`` and ``save_state`` call them on an accelerator: see
  ``benchmarks.peers.accelerated``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.llama import shard_by_hand
from benchmarks.peers.accelerated import accelerators, launched
from benchmarks.peers.fabric import fabric, parallel

HUGGING_FACE, OURS, DCP, FABRIC = "hugging-face", "ours", "dcp", "fabric"
"""Names of the folders that are loaded from; the last three are followed by the number of ranks that saved them."""


def quietly() -> None:
    """No progress bars in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def config(*, small: bool = False) -> Any:
    """Llama 3.2 1B's; ``small``: of two narrow blocks, to see that all runs."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
    }
    if small:
        sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return LlamaConfig(
        **sizes,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        use_cache=False,
    )


def bare(folder: Path) -> Any:
    """The model of ``folder`` without memory: parameters on the meta device. What is computed, and in no file, is
    there.
    """
    from transformers import LlamaConfig

    return _bare(LlamaConfig.from_pretrained(folder / HUGGING_FACE))


def _bare(sizes: Any) -> Any:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(sizes)
        model.to(torch.bfloat16)
    _give_buffers(model)
    return model


def _give_buffers(model: Any) -> None:
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def with_memory(model: Any) -> Any:
    """The same model with memory that nobody has written to; sharded, its tie is as it was."""
    model.to_empty(device="cpu")
    _give_buffers(model)
    return model


def locals_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """What this rank holds of each parameter, ties once."""
    for parameter in model.parameters():
        yield (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def pages(tensor: torch.Tensor) -> torch.Tensor:
    """A byte of each page of memory that a contiguous tensor lies in: uint8 ``[pages]``, a view."""
    return tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE]


def write_source(folder: Path, *, small: bool) -> None:
    """The Hugging Face directory, as ``save_pretrained`` writes it; in this process."""
    model = with_memory(_bare(config(small=small)))
    model.tie_weights()
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) / 50
    for local in locals_of(model):
        for part in local.view(-1).split(len(block)):
            part.copy_(block[: len(part)])
    model.save_pretrained(folder / HUGGING_FACE)


def count_reads() -> list[int]:
    """From here on, the bytes that TrueShard takes from local files; it maps them, so the kernel sees no reading."""
    from trueshard.checkpoint.catalogue import LocalDirectory

    counted, read = [], LocalDirectory.read

    def counting(self: LocalDirectory, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        data = read(self, name, begin, end)
        counted.append(len(data))
        return data

    LocalDirectory.read = counting  # type: ignore[method-assign]
    return counted


def _ours_bare(folder: Path) -> nn.Module:
    import trueshard

    model: nn.Module = bare(folder)
    trueshard.shard(model)
    trueshard.load(folder / HUGGING_FACE, model=model)
    return model


def _ours_with_memory(folder: Path) -> nn.Module:
    import trueshard

    model: nn.Module = bare(folder)
    trueshard.shard(model)
    trueshard.load(folder / HUGGING_FACE, model=with_memory(model))
    return model


def _ours_own(folder: Path) -> nn.Module:
    import trueshard

    model: nn.Module = bare(folder)
    trueshard.shard(model)
    trueshard.load(folder / f"{OURS}-{dist.get_world_size()}", model=model)
    return model


def _transformers(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    layout = DistributedConfig(fsdp_size=dist.get_world_size())
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder / HUGGING_FACE, distributed_config=layout)
    return model


def _accelerate(folder: Path) -> nn.Module:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import AutoModelForCausalLM

    accelerator, _ = accelerators(ram_efficient=True)
    with launched(ram_efficient=True):  # from_pretrained looks whether only rank 0 is to load
        model = AutoModelForCausalLM.from_pretrained(folder / HUGGING_FACE)
    prepared: nn.Module = fsdp2_prepare_model(accelerator, model)
    return prepared


def _dcp(folder: Path) -> nn.Module:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model: nn.Module = bare(folder)
    shard_by_hand(model, dist.get_world_size())
    state = get_model_state_dict(with_memory(model))
    dcp.load(state, checkpoint_id=folder / f"{DCP}-{dist.get_world_size()}")
    return model


def _fabric(folder: Path) -> nn.Module:
    made = fabric(parallel("default"))
    whole = with_memory(bare(folder))
    whole.tie_weights()  # lost where it is not sharded when it gets memory
    model: nn.Module = made.setup_module(whole)
    made.load(folder / f"{FABRIC}-{dist.get_world_size()}", {"model": model})
    return model


LOADS: dict[str, Callable[[Path], nn.Module]] = {
    "trueshard, meta": _ours_bare,
    "trueshard, sharded": _ours_with_memory,
    "trueshard, own": _ours_own,
    "transformers": _transformers,
    "Accelerate": _accelerate,
    "torch DCP": _dcp,
    "Lightning Fabric": _fabric,
}
"""Each takes the folder of folders; collective."""


def save_plainly(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path) -> None:
    """The bytes of this rank to one file of its own, and ``fsync``: no format, no names, the limit of the disk."""
    path.mkdir(exist_ok=True)
    tensors = list(locals_of(model))
    if optimizer is not None:
        for state in optimizer.state.values():
            tensors += [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in state.values()]
    with open(path / str(dist.get_rank()), "wb", buffering=0) as file:
        for tensor in tensors:
            left: Any = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            while len(left):
                left = left[file.write(left) :]
        os.fsync(file.fileno())


def save_ours(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path) -> None:
    """``trueshard.save``, which reads again what it wrote."""
    import trueshard

    trueshard.save(path, model=model, optimizer=optimizer)


def save_ours_unverified(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path) -> None:
    """``trueshard.save`` that does not."""
    import trueshard

    trueshard.save(path, model=model, optimizer=optimizer, verify=False)


def save_dcp(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path) -> None:
    """``torch.distributed.checkpoint.save``."""
    import torch.distributed.checkpoint as dcp

    dcp.save(dcp_state(model, optimizer), checkpoint_id=path)


def dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What DCP saves: the model's state dict alone, or that and the optimizer's."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    if optimizer is None:
        return get_model_state_dict(model)
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path) -> None:
    """What ``Accelerator.save_state`` calls."""
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    accelerator, plugin = accelerators(ram_efficient=True)
    save_fsdp_model(plugin, accelerator, model, str(path))
    if optimizer is not None:
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(path))


def save_fabric(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path) -> None:
    """``Fabric.save`` of its strategy for FSDP2."""
    state = {"model": model} | ({} if optimizer is None else {"optimizer": optimizer})
    fabric(parallel("default")).save(path, state)


SAVES: dict[str, Callable[[nn.Module, torch.optim.Optimizer | None, Path], None]] = {
    "plain write": save_plainly,
    "trueshard": save_ours,
    "trueshard, unverified": save_ours_unverified,
    "torch DCP": save_dcp,
    "Accelerate": save_accelerate,
    "Lightning Fabric": save_fabric,
}
"""Each takes a sharded model, its optimizer or None, and the path to make; collective."""


def load_again_ours(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """``trueshard.load``, in place."""
    import trueshard

    trueshard.load(path, model=model, optimizer=optimizer)


def load_again_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """``torch.distributed.checkpoint.load`` into what the model and the optimizer have."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = dcp_state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


RELOADS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Path], None]] = {
    "trueshard": load_again_ours,
    "torch DCP": load_again_dcp,
}
"""Each takes what ``SAVES`` took; collective."""
