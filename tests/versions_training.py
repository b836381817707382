"""Shard a model on the ranks that torchrun started, train it, save it, load it into another; print what did it.

Run by ``versions.py`` with each release of Python, where the package and its own dependencies are all that it needs,
and with sets of packages beside it, of which it tries what is there, against the same on one process.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import trueshard

STEPS = 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trueshard.shard(model, optimizer)
    return model, optimizer


def plain(folder: Path) -> str:
    model, optimizer = build()
    losses = []
    for _ in range(20):
        inputs = torch.ones(4, 16) * (dist.get_rank() + 1)
        loss = (model(inputs) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    trueshard.save(folder, model=model, optimizer=optimizer)
    other, its_optimizer = build()
    trueshard.load(folder, model=other, optimizer=its_optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())
    assert str(its_optimizer.state_dict()) == str(optimizer.state_dict())
    return "imported, sharded, trained, saved, loaded"


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=37, **sizes))


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = llama()
    model.name_or_path = "a-base"
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def rows(step: int) -> torch.Tensor:
    """Token numbers of a global batch, int64 ``[4, 9]``."""
    return torch.randint(3, 37, (4, 9), generator=torch.Generator().manual_seed(step))


def own(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def trained(model: Any, optimizer: Any, part: Callable[[torch.Tensor], torch.Tensor], backward: Any = None) -> Any:
    """Return the model after some steps on ``part`` of each batch."""
    for step in range(STEPS):
        batch = part(rows(step))
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward() if backward is None else backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def expected(build: Callable[[], Any]) -> dict[str, torch.Tensor]:
    model = build()
    return values(trained(model, sgd(model), lambda batch: batch))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Trainable parameters, whole."""
    named = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named.items()}


def sharded(build: Callable[[], Any], folder: Path, read: Callable[[Path], Any]) -> None:
    model, right = build(), expected(build)
    optimizer = sgd(model)
    trueshard.shard(model, optimizer)
    torch.testing.assert_close(values(trained(model, optimizer, own)), right)
    trueshard.save(folder, model=model)
    torch.testing.assert_close(values(read(folder)), right)


def with_transformers(folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    sharded(llama, folder, AutoModelForCausalLM.from_pretrained)
    return "a Llama"


def with_peft(folder: Path) -> str:
    from peft import PeftModel

    sharded(adapted, folder, lambda saved: PeftModel.from_pretrained(llama(), saved, is_trainable=True))
    return "an adapter"


def with_accelerate(folder: Path) -> str:
    from trueshard.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(model, sgd(model))
    torch.testing.assert_close(values(trained(model, optimizer, own, accelerator.backward)), expected(llama))
    accelerator.save_state(folder)
    return "Accelerator"


def with_trainer(folder: Path) -> str:
    from transformers import Trainer, TrainingArguments, __version__

    try:
        from trueshard.integrations.transformers import ShardedTrainer
    except ImportError as error:
        if not __version__.startswith("4."):
            raise
        return str(error).partition(":")[0]
    every = torch.cat([*map(rows, range(STEPS))]).tolist()
    samples: Any = [{"input_ids": row, "labels": row} for row in every]
    words = "ShardedTrainer"
    if has("datasets"):
        from datasets import Dataset

        samples, words = Dataset.from_list(samples), "ShardedTrainer on a Dataset"

    class InOrder(ShardedTrainer, Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(samples)

    arguments: dict[str, Any] = {"max_steps": STEPS, "learning_rate": 0.1, "optim": "sgd", "report_to": []}
    arguments |= {"max_grad_norm": 0.0, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments |= {"lr_scheduler_type": "constant", "logging_strategy": "no"}
    arguments |= {"per_device_train_batch_size": 4 // dist.get_world_size()}
    trainer = InOrder(model=llama(), args=TrainingArguments(str(folder), **arguments), train_dataset=samples)
    with contextlib.redirect_stdout(sys.stderr):  # it prints what it took
        trainer.train()
    torch.testing.assert_close(values(trainer.model), expected(llama))
    trainer.save_model()
    return words


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


TRIALS = {"transformers": with_transformers, "peft": with_peft, "accelerate": with_accelerate}
"""Package → what is tried if it is there."""


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")
    dist.init_process_group("gloo")
    folder = [Path(tempfile.mkdtemp())]
    dist.broadcast_object_list(folder)
    words = [plain(folder[0] / "plain")]
    words += [trial(folder[0] / package) for package, trial in TRIALS.items() if has(package)]
    if has("transformers") and has("accelerate"):
        words.append(with_trainer(folder[0] / "trainer"))
    if dist.get_rank() == 0:
        there = ["torch", *(each for each in (*TRIALS, "datasets") if has(each))]
        versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in there)
        print(f"{platform.python_version()}, {versions}: {', '.join(words)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
