"""Ray Train starts the ranks of a sharded loop, and starts them again when one is lost: docs/how-to/ray.md.

    python examples/ray_train.py 2 20 runs      # 2 workers, 20 steps; the run is runs/sharded
    python examples/ray_train.py 3 40 runs      # goes on at step 20, on 3 workers

A global batch is the same at any number of workers, so the losses are, too.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import trueshard

SAMPLES, WORDS = 12, 100


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(WORDS, 32), *blocks, nn.Linear(32, WORDS)).to(get_device())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of a global batch, [samples, 16]; they follow from its number alone."""
    tokens = torch.randint(0, WORDS, (SAMPLES, 16), generator=torch.Generator().manual_seed(step))
    return tokens, tokens.masked_fill(tokens < tokens[:, :1], -100)  # -100 is no target


def loop(config: dict[str, Any]) -> None:
    """Train; every worker calls it, in the process group that Ray has made."""
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    model, optimizer = build()
    trueshard.shard(model, optimizer)

    # Ray's folder of this run, on storage that all workers share: a checkpoint is written there by all, once.
    checkpoints = trueshard.Checkpoints(context.get_storage().experiment_fs_path)
    start = 0
    if newest := checkpoints.latest():
        start = trueshard.load(newest, model=model, optimizer=optimizer)["progress"]["step"]

    for step in range(start, config["steps"]):
        tokens, labels = (each.tensor_split(ranks)[rank].to(get_device()) for each in batch(step))
        mean = trueshard.token_mean(model, trueshard.count_targets(labels, shifted=False))
        logits = model(tokens).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        mean(loss).backward()
        norm = trueshard.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

        metrics = {"step": step, "loss": mean.value(loss), "norm": norm.item(), "ranks": ranks}
        if rank == 0:
            log(metrics)
        if (step + 1) % config["save_every"] == 0:
            path = checkpoints.path(step + 1)
            trueshard.save(path, model=model, optimizer=optimizer, progress={"step": step + 1})
            ray.train.report(  # waits for all workers and for Ray, a second or two
                metrics,
                checkpoint=ray.train.Checkpoint.from_directory(path) if rank == 0 else None,
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it lies where Ray keeps them
            )


def log(metrics: dict[str, Any]) -> None:
    print("step {step}: loss {loss:.5f}, norm {norm:.5f}, {ranks} workers".format(**metrics), flush=True)


def trainer(workers: int, steps: int, folder: str, loop: Callable[[dict[str, Any]], None] = loop, **config: Any) -> Any:
    has_gpu = torch.cuda.is_available()
    return TorchTrainer(
        loop,
        train_loop_config={"steps": steps, "save_every": 5, **config},
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=has_gpu,
            resources_per_worker={"GPU": 1} if has_gpu else {"CPU": 0.5},  # of a small machine's cores
        ),
        run_config=RunConfig(
            name="sharded",
            storage_path=str(Path(folder).absolute()),
            failure_config=FailureConfig(max_failures=3),  # workers start again, from the newest checkpoint
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


def main(workers: str = "2", steps: str = "20", folder: str = "runs") -> None:
    print(trainer(int(workers), int(steps), folder).fit().checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
