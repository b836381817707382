"""Lightning's Trainer and Fabric over TrueShard: what one process computes, saved for any number of ranks."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from pytorch_lightning.plugins import AsyncCheckpointIO, MixedPrecision
from pytorch_lightning.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import trueshard
from cases import as_on_one_device, on_ranks
from documents_blocks import blocks
from emulated_cuda import build
from emulated_cuda.running import run as emulated
from gathering import whole
from parity import DEVICE, Ranks, assert_same
from traffic import Traffic
from trueshard.integrations.lightning import TrueShardStrategy, consolidate

ROWS = 12
"""of one step, over all ranks"""


def data(steps: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS * steps, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, 5, (len(x),), generator=generator))


class Net(pl.LightningModule):
    """Uneven shards; notes the loss of each step, over all ranks, and the norm of the gradients that are stepped."""

    def __init__(self, width: int = 8, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 5)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def test_step(self, batch: Any, number: int) -> None:
        x, y = batch
        self.log("test", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def predict_step(self, batch: Any, number: int) -> torch.Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack([torch.as_tensor(float(g)) for g in gradients]).norm()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def trainer(rank: int, ranks: int, options: dict[str, Any] | None = None, **words: Any) -> pl.Trainer:
    """A Trainer of this many ranks; of one: Lightning's own strategy, unless there are ``options``."""
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    sharded = ranks > 1 or options is not None
    usual = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "gradient_clip_val": 0.5,
        "use_distributed_sampler": False,
    }
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    strategy = TrueShardStrategy(**(options or {})) if sharded else "auto"
    return pl.Trainer(accelerator=DEVICE, devices=ranks, strategy=strategy, **usual | quiet | words)


def loader(rank: int, ranks: int, steps: int = 4, parts: int = 1) -> DataLoader:
    """Each rank reads every ``ranks``-th row, so that a step has the same rows at any number of ranks."""
    rows = data(steps)
    sampler = DistributedSampler(rows, ranks, rank, shuffle=False)
    return DataLoader(rows, batch_size=ROWS // ranks // parts, sampler=sampler)


def outcome(module: Net) -> dict[str, Any]:
    return {"losses": module.losses, "norms": module.norms, "weights": module.state_dict()}


@as_on_one_device(ranks=2, rtol=1e-4, atol=1e-5)
def test_fit(rank: int, ranks: int) -> Any:
    module = Net()
    job = trainer(rank, ranks)
    job.fit(module, loader(rank, ranks), loader(rank, ranks, 1))
    return outcome(module) | {"logged": dict(job.callback_metrics)}


@pytest.mark.rest
@pytest.mark.parametrize(
    "words", [{"accumulate_grad_batches": 2}, {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}], ids=str
)
@as_on_one_device(ranks=3, rtol=1e-4, atol=1e-5)
def test_accumulation_and_clipping_by_value(rank: int, ranks: int, words: dict[str, Any]) -> Any:
    module = Net()
    trainer(rank, ranks, **words).fit(module, loader(rank, ranks, 4, words.get("accumulate_grad_batches", 1)))
    return outcome(module) | {"losses": []}


@pytest.mark.rest
@on_ranks(2)
def test_microbatches_are_not_reduced(rank: int, ranks: int) -> None:
    counts = []
    for parts in (1, 3):
        with Traffic() as traffic:
            trainer(rank, ranks, accumulate_grad_batches=parts).fit(Net(), loader(rank, ranks, 2, parts))
        counts.append(traffic.calls["reduce_scatter"])
    assert counts[0] == counts[1] > 0


@pytest.mark.rest
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@as_on_one_device(ranks=2, rtol=2e-2, atol=2e-3)
def test_precision(rank: int, ranks: int, precision: str) -> Any:
    module = Net()
    trainer(rank, ranks, precision=precision).fit(module, loader(rank, ranks))
    return outcome(module)


@pytest.mark.rest
@as_on_one_device(ranks=2, rtol=1e-4, atol=1e-5)
def test_scaler(rank: int, ranks: int) -> Any:
    """Lightning makes of "16-mixed" on the CPU "bf16-mixed", unless it is given the plugin."""
    module = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer(rank, ranks, plugins=[plugin]).fit(module, loader(rank, ranks, 8))
    return outcome(module) | {"scale": scaler.get_scale()}


class Adversaries(pl.LightningModule):
    """Two optimizers, stepped by hand inside one step, whose modules train in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 8))
        self.critic = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1))
        self.losses: list[float] = []

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, number: int) -> None:
        x, _ = batch
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * (self.critic(self(x[:, :4])).mean() - self.critic(x).mean()) + self.critic(x).pow(2).mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.8) for o in optimizers]


@pytest.mark.parametrize("units", ["auto", pytest.param(["generator", "critic"], marks=pytest.mark.rest)], ids=str)
@as_on_one_device(ranks=2, rtol=1e-4, atol=1e-5)
def test_two_optimizers_stepped_by_hand(rank: int, ranks: int, units: Any) -> Any:
    module = Adversaries()
    options = {"units": units} if ranks > 1 else None
    trainer(rank, ranks, options, gradient_clip_val=None).fit(module, loader(rank, ranks))
    return {"losses": module.losses, "weights": module.state_dict()}


# Checkpoints


def saved(rank: int, ranks: int, folder: Path) -> Any:
    """Two of four epochs, with what ``ModelCheckpoint`` keeps of them."""
    module = Net()
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val", save_top_k=1, save_last=True)
    job = trainer(rank, ranks, {}, max_epochs=2, enable_checkpointing=True, callbacks=[keep])
    job.fit(module, loader(rank, ranks, 2), loader(rank, ranks, 2))
    best = job.test(module, loader(rank, ranks, 1), ckpt_path="best", verbose=False)
    return {"best": keep.best_model_path, "tested": best, "score": keep.best_model_score}


def resumed(rank: int, ranks: int, path: Path | None, options: dict[str, Any] | None) -> Any:
    """Four epochs, from the beginning or from a checkpoint of two."""
    module = Net()
    job = trainer(rank, ranks, options, max_epochs=4)
    job.fit(module, loader(rank, ranks, 2), ckpt_path=path)
    rate = job.optimizers[0].param_groups[0]["lr"]
    return {"losses": module.losses[-4:], "weights": module.state_dict(), "step": job.global_step, "rate": rate}


CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def test_resume_at_another_number_of_ranks(alone: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    (expected,) = alone.run(resumed, None, None)
    results = ranks2.run(saved, tmp_path)
    (after,) = alone.run(resumed, tmp_path / "last.ckpt", {})
    assert_same(after, expected, **CLOSE)
    assert trueshard.check(tmp_path / "last.ckpt").tensors
    assert sorted(path.name for path in tmp_path.iterdir()) == [Path(results[0]["best"]).name, "last.ckpt"]
    # One file, for load_from_checkpoint() and for Lightning's own strategies.
    consolidate(tmp_path / "last.ckpt", tmp_path / "one.ckpt")
    module = Net.load_from_checkpoint(tmp_path / "one.ckpt")
    assert module.hparams == {"width": 8, "lr": 1e-2}
    (from_file,) = alone.run(resumed, tmp_path / "one.ckpt", None)
    assert_same(from_file, expected, **CLOSE)


@pytest.mark.rest
def test_resume_on_three_ranks_and_from_a_file(ranks2: Ranks, ranks3: Ranks, alone: Ranks, tmp_path: Path) -> None:
    (expected,) = alone.run(resumed, None, None)
    ranks2.run(saved, tmp_path)
    consolidate(tmp_path / "last.ckpt", tmp_path / "one.ckpt")
    for name in ("last.ckpt", "one.ckpt"):
        for after in ranks3.run(resumed, tmp_path / name, {}):
            assert_same(after, expected, **CLOSE)


class Noting(Callback):
    """Reads and writes parameters in Lightning's hooks, of which none is a pass of the model."""

    def on_train_batch_end(self, trainer: Any, module: Net, *_: Any) -> None:
        with torch.no_grad():
            module.head.bias.mul_(0.5)


class Hooked(Net):
    def on_train_batch_start(self, batch: Any, number: int) -> None:
        self.heads = [*getattr(self, "heads", []), float(self.head.weight.detach().float().norm())]

    def optimizer_step(self, epoch: int, number: int, optimizer: Any, closure: Any = None) -> None:
        assert self.head.weight.requires_grad
        super().optimizer_step(epoch, number, optimizer, closure)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return super().training_step(batch, number) + 0.1 * self.head.weight.pow(2).sum()


@pytest.mark.rest
@as_on_one_device(ranks=2, rtol=1e-4, atol=1e-5)
def test_hooks_and_a_step_that_reads_a_parameter(rank: int, ranks: int) -> Any:
    module = Hooked()
    trainer(rank, ranks, callbacks=[Noting()]).fit(module, loader(rank, ranks))
    return outcome(module) | {"heads": module.heads}


@pytest.mark.rest
@as_on_one_device(ranks=2, rtol=1e-4, atol=1e-5)
def test_stop_early_then_validate_and_predict(rank: int, ranks: int) -> Any:
    module = Net()
    stop = EarlyStopping("val", patience=1, min_delta=10.0, mode="min")
    job = trainer(rank, ranks, max_epochs=9, callbacks=[stop])
    job.fit(module, loader(rank, ranks, 1), loader(rank, ranks, 1))
    (predicted,) = job.predict(module, loader(rank, ranks, 1))
    gathered = job.strategy.all_gather(predicted).reshape(-1, ROWS // ranks, 5).transpose(0, 1).reshape(ROWS, 5)
    other = trainer(rank, ranks)
    validated = other.validate(module, loader(rank, ranks, 1), verbose=False)
    return {"epochs": job.current_epoch, "validated": validated, "predicted": gathered}


class Configured(Net):
    """Built when ranks are there."""

    def __init__(self, empty: bool = False) -> None:
        pl.LightningModule.__init__(self)
        self.empty = empty
        self.losses, self.norms = [], []

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        with self.trainer.init_module(empty_init=self.empty):
            whole = Net()
            self.blocks, self.head = whole.blocks, whole.head
            self.save_hyperparameters({"lr": 1e-2})


def configured(rank: int, ranks: int, folder: Path, empty: bool) -> Any:
    module = Configured(empty)
    job = trainer(rank, ranks, {}, max_epochs=1 + empty)
    job.fit(module, loader(rank, ranks, 2), ckpt_path=folder / "one.ckpt" if empty else None)
    job.save_checkpoint(folder / ("two.ckpt" if empty else "one.ckpt"))
    return module.losses[-2:]


@pytest.mark.rest
def test_a_module_without_memory_is_filled_by_the_checkpoint(alone: Ranks, ranks2: Ranks, tmp_path: Path) -> None:
    (expected,) = alone.run(uninterrupted)
    (first, _), (second, _) = (ranks2.run(configured, tmp_path, empty) for empty in (False, True))
    assert_same([*first, *second], expected, **CLOSE)


def uninterrupted(rank: int, ranks: int) -> Any:
    module = Net()
    trainer(rank, ranks, max_epochs=2).fit(module, loader(rank, ranks, 2))
    return module.losses


@pytest.mark.rest
@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int) -> None:
    def fit(module: pl.LightningModule, options: dict[str, Any], **words: Any) -> pl.Trainer:
        job = trainer(rank, ranks, options, **words)
        job.fit(module, loader(rank, ranks, 1))
        return job

    with pytest.raises(TypeError, match="mixed_precision"):
        TrueShardStrategy(mixed_precison="bf16")
    with pytest.raises(TypeError, match="CheckpointIO"):
        fit(Net(), {}, plugins=[AsyncCheckpointIO()])
    module = Net()
    job = fit(module, {})
    with pytest.raises(ValueError, match="sharded before"):
        fit(module, {"reshard_after_forward": "always"})
    with pytest.raises(TypeError, match="storage_options"):
        job.save_checkpoint("x.ckpt", storage_options=object())
    assert not os.path.exists("x.ckpt")
    module.on_save_checkpoint = lambda checkpoint: checkpoint["state_dict"].pop("head.bias")
    with pytest.raises(ValueError, match=r"head\.bias.*state_dict\(\)"):
        job.save_checkpoint("x.ckpt")
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(mine={"bias": module.head.bias})
    with pytest.raises(TypeError, match="'mine'"):
        job.save_checkpoint("x.ckpt")


@pytest.mark.rest
@on_ranks(2)
def test_whole_state_dict_samples_and_copies(rank: int, ranks: int) -> None:
    module = Net()
    job = trainer(rank, ranks, {"replicate": 2}, use_distributed_sampler=True)
    job.fit(module, DataLoader(data(1), batch_size=3))
    assert job.num_training_batches == 2
    assert dict(
        module.head.weight.device_mesh.mesh_dim_names
        and zip(module.head.weight.device_mesh.mesh_dim_names, module.head.weight.device_mesh.shape, strict=True)
    ) == {"replicate": 2, "shard": 1}
    whole = job.strategy.full_state_dict()
    assert list(whole) == (list(module.state_dict()) if rank == 0 else [])
    if rank == 0:
        Net().load_state_dict(whole)


@pytest.mark.rest
@as_on_one_device(ranks=3, rtol=1e-4, atol=1e-5)
def test_a_second_fit_with_new_optimizers(rank: int, ranks: int) -> Any:
    module = Net()
    trainer(rank, ranks).fit(module, loader(rank, ranks))
    trainer(rank, ranks).fit(module, loader(rank, ranks))
    return outcome(module)


class Measured(Net):
    """With a metric, a module of Lightning's inside, and Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.accuracy = MulticlassAccuracy(5)
        self.inner = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.inner(x)

    def validation_step(self, batch: Any, number: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("val", self.accuracy, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([block.weight for block in [*self.blocks, *self.inner.blocks]], lr=0.01)


@pytest.mark.rest
@as_on_one_device(ranks=2, rtol=1e-4, atol=1e-4)
def test_a_metric_and_an_optimizer_of_whole_tensors(rank: int, ranks: int) -> Any:
    module = Measured()
    job = trainer(rank, ranks)
    job.fit(module, loader(rank, ranks), loader(rank, ranks, 1))
    return outcome(module) | {"val": job.callback_metrics["val"]}


@pytest.mark.rest
@on_ranks(2)
def test_the_tuner_leaves_weights_as_they_were(rank: int, ranks: int, tmp_path: Path) -> None:
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    job = trainer(rank, ranks, default_root_dir=tmp_path)
    found = Tuner(job).lr_find(module, loader(rank, ranks, 8), num_training=8, update_attr=False)
    assert len(found.results["loss"]) == 8
    assert_same(whole(module.state_dict()), before)
    assert not list(tmp_path.glob("*.ckpt*"))


@pytest.mark.rest
@pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler: install g++, or set CXX")
def test_on_an_emulated_device_with_offload_and_a_scaler(tmp_path: Path) -> None:
    (script,) = (block.text for block in blocks("docs/how-to/stay-in-lightning.md") if block.title.startswith("train"))
    script = re.sub(r".*accelerator=.*\n", '        precision="16-mixed",\n', script)
    script = script.replace('reshard_after_forward="always"', 'offload="cpu"').replace("max_epochs=2", "max_epochs=1")
    (tmp_path / "train.py").write_text(script + "    print('on', trainer.model.device, trainer.global_step)\n")
    done = emulated([str(tmp_path / "train.py")], devices=2, processes=2, cwd=tmp_path)
    assert (done.code, done.faults) == (0, []), done.output
    assert "on cuda:0 4" in done.output
    assert trueshard.check(tmp_path / "kept" / "last.ckpt").tensors
