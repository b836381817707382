"""Trains two stages a rank under the schedules that are named, on all processes of torchrun, as one process does."""

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import trueshard

RANKS, STAGES, MICROBATCHES, SAMPLES, WIDTH = 2, 4, 4, 16, 8
"""RANKS: of the pipeline; each has two stages."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(STAGES))).to(device)


def batch(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() / (SAMPLES * WIDTH)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def alone(device: torch.device) -> tuple[list[float], nn.Sequential]:
    """Return the norms and the model after three steps of one process."""
    model, norms = build(device), []
    optimizer = adamw(model)
    for step in range(3):
        inputs, targets = (part.to(device) for part in batch(step))
        loss_of(model(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model


def pipelined(kind: str, mesh: DeviceMesh, device: torch.device) -> tuple[list[float], dict[int, nn.Module]]:
    """Return the norms, and this rank's stages by number, after the same steps under a schedule."""
    rank, shard = mesh["stage"].get_local_rank(), mesh["shard"]
    numbers = (rank, STAGES - 1 - rank if "ZBV" in kind else rank + RANKS)
    model = build(device)
    chunks = {number: model[number] for number in numbers}
    optimizers = [adamw(chunk) for chunk in chunks.values()]
    for chunk, optimizer in zip(chunks.values(), optimizers, strict=True):
        trueshard.shard(chunk, optimizer, plan=trueshard.Plan(pipeline=True), mesh=shard)
    group = mesh["stage"].get_group()
    stages = [PipelineStage(chunk, number, STAGES, device, group=group) for number, chunk in chunks.items()]
    # Gradients of ranks that read different samples are averaged, and the loss is a sum over all samples.
    schedule = getattr(schedules, kind)(
        stages, MICROBATCHES, loss_fn=lambda *given: loss_of(*given) * shard.size(), scale_grads=False
    )
    is_first, is_last = 0 in numbers, STAGES - 1 in numbers
    norms = []
    for step in range(3):
        inputs, targets = (part.chunk(shard.size())[shard.get_local_rank()].to(device) for part in batch(step))
        schedule.step(*((inputs,) if is_first else ()), target=targets if is_last else None)
        parameters = [parameter for chunk in chunks.values() for parameter in chunk.parameters()]
        norms.append(float(trueshard.clip_grad_norm_(parameters, 0.5, over=mesh["stage"])))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms, chunks


def main(*kinds: str) -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shape = (RANKS, int(os.environ["WORLD_SIZE"]) // RANKS)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("stage", "shard"))
    expected, model = alone(device)
    for kind in kinds:
        norms, chunks = pipelined(kind, mesh, device)
        torch.testing.assert_close(norms, expected, rtol=1e-4, atol=1e-5)
        for number, chunk in chunks.items():
            for name, parameter in chunk.named_parameters():
                whole = parameter.full_tensor()  # type: ignore[attr-defined]
                torch.testing.assert_close(whole, model[number].get_parameter(name).detach(), rtol=1e-3, atol=1e-4)
        print(f"{kind} is right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
