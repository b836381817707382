"""Trainings that keep their state and go on from it, as a user of each peer writes them; ``torchrun`` starts them.

    torchrun … -m benchmarks.peers.lost WAY FOLDER --every 1

Rank 0 appends a line to ``FOLDER/steps`` at the end of each step: its number, and how many processes took it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.llama import Shape, loss_of, shard_by_hand

RANKS = 2
SHAPE = Shape(layers=10, hidden=384, intermediate=1024, heads=6, vocabulary=4096, sequences=2, tokens=32)
SMALL = Shape(layers=2, hidden=32, intermediate=64, heads=4, vocabulary=400, sequences=2, tokens=32)
STEPS = 100_000
"""More than any run takes: it is ended from outside."""
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Given:
    """What a training is told."""

    folder: Path
    shape: Shape
    every: int
    """Steps between two checkpoints; 0: none."""

    def tell(self, step: int, processes: int = RANKS) -> None:
        """Say that a step has ended."""
        with open(self.folder / "steps", "a") as file:
            file.write(f"{step} {processes}\n")


def _resumed(step: int) -> None:
    print(f"Resumed after step {step} from disk", flush=True)


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _step(model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def by_hand(given: Given) -> None:
    """Train with FSDP2; ``torch.distributed.checkpoint.async_save``, of which one at a time is under way."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo")
    model: Any = given.shape.build()
    shard_by_hand(model, RANKS)
    optimizer = _adamw(model)
    # Collectives of a save in its thread would mix with those of training on one group of gloo, and both would wait.
    apart = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        parameters, moments = get_state_dict(model, optimizer)
        return {"model": parameters, "optimizer": moments}

    step = max((int(path.parent.name) for path in given.folder.glob("*/.metadata")), default=0)  # written last
    if step:
        loaded = state()
        dcp.load(loaded, checkpoint_id=given.folder / str(step))
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        if dist.get_rank() == 0:
            _resumed(step)
    under_way: Any = None
    while step < STEPS:
        step += 1
        _step(model, optimizer, given.shape.batch(RANKS * step + dist.get_rank()))
        if given.every and step % given.every == 0:
            if under_way is not None:
                under_way.result()
                if dist.get_rank() == 0:
                    shutil.rmtree(given.folder / str(step - 2 * given.every), ignore_errors=True)
            under_way = dcp.async_save(state(), checkpoint_id=given.folder / str(step), process_group=apart)
        if dist.get_rank() == 0:
            given.tell(step)


def ddp(given: Given) -> None:
    """Train with torch's DDP, and keep nothing."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(given.shape.build())
    optimizer = _adamw(model)
    for step in range(1, STEPS):
        _step(model, optimizer, given.shape.batch(RANKS * step + dist.get_rank()))
        if dist.get_rank() == 0:
            given.tell(step)


def lightning(given: Given) -> None:
    """Train with Lightning's ``ModelParallelStrategy`` and ``ModelCheckpoint``; ``ckpt_path="last"``."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.strategies import ModelParallelStrategy

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model: Any = given.shape.build()
                shard_by_hand(self.model, RANKS, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _adamw(self)

        def on_train_start(self) -> None:
            if self.global_rank == 0 and self.trainer.global_step:
                _resumed(self.trainer.global_step)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_rank == 0:  # after the callbacks, of which one saves
                given.tell(self.trainer.global_step)

    class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (given.shape.batch(RANKS * step + int(os.environ["RANK"])) for step in range(STEPS))

    keep = ModelCheckpoint(given.folder, every_n_train_steps=given.every, save_last="link") if given.every else None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
        max_steps=STEPS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=keep is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[] if keep is None else [keep],
    )
    batches = torch.utils.data.DataLoader(Batches(), batch_size=None)
    trainer.fit(Module(), batches, ckpt_path="last" if keep is not None else None)


def torchft(given: Given) -> None:
    """Train one of two replicas of torchft's DDP; the other goes on when it is lost, and gives it its state."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    replica = int(os.environ["REPLICA_GROUP_ID"])
    bare = given.shape.build()
    inner = _adamw(bare)

    def load(state: dict[str, Any]) -> None:
        bare.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": bare.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica-{replica}",
    )
    model, optimizer = DistributedDataParallel(manager, bare), Optimizer(manager, inner)
    while (step := manager.current_step()) < STEPS:
        _step(model, optimizer, given.shape.batch(RANKS * step + replica))
        if replica == 0 and manager.current_step() > step:
            given.tell(manager.current_step(), manager.num_participants())


def lighthouse(given: Given) -> None:
    """Keep torchft's lighthouse, with the settings of its documentation, and leave its address in the folder."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100)
    (given.folder / "address.part").write_text(server.address())
    (given.folder / "address.part").rename(given.folder / "address")
    while True:
        time.sleep(60)


WAYS: dict[str, Callable[[Given], None]] = {
    function.__name__: function for function in (by_hand, ddp, lightning, torchft, lighthouse)
}


def main() -> None:
    """Train until this process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    WAYS[given.way](Given(given.folder, SMALL if given.small else SHAPE, given.every))


if __name__ == "__main__":
    main()
