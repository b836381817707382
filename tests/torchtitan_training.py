"""Train a model of TorchTitan for four steps, as its trainer's step does, and print JSON: losses, norms, weights.

python torchtitan_training.py '{"model": "llama3", "chunks": 4, ...}', alone or under torchrun.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


class _NoKernels(types.ModuleType):
    """Stands for the module of TorchTitan that imports triton, of which nothing here is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
sys.modules[KERNELS] = _NoKernels(KERNELS)

import torchtitan.distributed.parallel_dims as dims  # noqa: E402
from torchtitan.components.checkpointer.base import ModelWrapper  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.utils import clip_grad_norm_  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

from trueshard.integrations.torchtitan import sharded  # noqa: E402

SEQUENCE, SAMPLES, MICROBATCHES = 64, 6, 2
RECOMPUTE = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}


@dataclass
class Case:
    model: str = "llama3"
    chunks: int = 0
    recompute: str = "none"
    copies: int = 1
    dtype: str = "float32"
    tensor: int = 1
    backend: str = "partial_dtensor"
    steps: tuple[int, int] = (0, 4)
    load: str = ""
    save: str = ""
    ours: bool = True


def build(case: Case, ranks: int) -> torch.nn.Module:
    """Return a model on the CPU as the trainer builds it: on meta, made parallel, emptied, initialised."""
    dims.device_type = "cpu"  # it is what TorchTitan makes meshes of: "cuda" wherever it finds no accelerator
    ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]
    spec = importlib.import_module(f"torchtitan.models.{case.model}").model_registry("debugmodel")
    spec = sharded(spec) if case.ours else spec
    with torch.device("meta"):
        model = spec.model.build()
    for block in model.layers.values():  # flex attention has no backward on a CPU
        block.attention.inner_attention = ScaledDotProductAttention(ScaledDotProductAttention.Config())
    sizes = {
        "dp_replicate": case.copies,
        "dp_shard": ranks // case.copies,
        "cp": 1,
        "tp": case.tensor,
        "pp": 1,
        "ep": 1,
    }
    model = spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims(**sizes, world_size=ranks * case.tensor, spmd_backend=case.backend),
        training=TrainingConfig(seq_len=SEQUENCE, mixed_precision_param=case.dtype),
        parallelism=ParallelismConfig(spmd_backend=case.backend),
        compile_config=CompileConfig(),
        ac_config=RECOMPUTE[case.recompute],
        dump_folder="",
    )
    for module in () if case.ours else model.modules():
        if isinstance(module, FSDPModule):  # its divisors need reductions that gloo lacks
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            value = torch.randn(parameter.shape, generator=generator) * 0.05 + (parameter.ndim == 1)
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
    return model


def train(case: Case, rank: int, ranks: int) -> dict[str, Any]:
    """Return losses, norms and the sum of magnitudes of each final parameter."""
    model = build(case, ranks)
    config: Any = CrossEntropyLoss.Config(global_vocab_size=2048)
    if case.chunks:
        config = ChunkedLossWrapper.Config(loss_fn=config, num_chunks=case.chunks)
    loss_of = config.build(compile_config=CompileConfig())
    if case.chunks:
        loss_of.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    optimizer = default_adamw(lr=1e-3).build(model_parts=[model])
    if case.load:
        dcp.load({"model": ModelWrapper(model), "optimizer": optimizer}, checkpoint_id=case.load)
    share = SAMPLES // ranks
    positions = torch.arange(SEQUENCE).expand(share, SEQUENCE).contiguous()
    tokens = torch.tensor(MICROBATCHES * SAMPLES * SEQUENCE)
    losses, norms = [], []
    for step in range(*case.steps):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for microbatch in range(MICROBATCHES):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            batch = torch.randint(0, 2048, (SAMPLES, SEQUENCE + 1), generator=generator)[rank * share :][:share]
            loss, _ = loss_of(model(batch[:, :-1], positions), batch[:, 1:].contiguous(), tokens)
            loss.backward()
            total += loss.detach()
        norms.append(float(clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)))
        optimizer.step()
        dist.all_reduce(total)
        losses.append(float(total))
    if case.save:
        dcp.save({"model": ModelWrapper(model), "optimizer": optimizer}, checkpoint_id=case.save)
    sizes = [_whole(parameter.detach()).double().abs().sum().item() for parameter in model.parameters()]
    return {"losses": losses, "norms": norms, "weights": sizes}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = Case(**json.loads(sys.argv[1]))
    try:
        result = train(case, dist.get_rank(), dist.get_world_size() // case.tensor)
    except ValueError as error:
        result = {"refused": str(error)}
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
