"""GPT-2 cut into the stages of a pipeline, each stage sharded: docs/how-to/pipeline.md.

    torchrun --nproc-per-node 4 examples/pipeline.py 1f1b checkpoint      # 2 stages × 2 shards

The head is tied to the embedding, so the first and the last stage hold a copy each. Microbatches and ranks have
different numbers of target tokens. The checkpoint is that of the whole model, as one process would write it.
"""

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import GPT2Config, GPT2LMHeadModel

import trueshard

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICROBATCHES = 4
CONFIG = GPT2Config(
    vocab_size=65, n_positions=16, n_embd=16, n_layer=3, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    architectures=["GPT2LMHeadModel"],
)  # fmt: skip


class Stage(nn.Module):
    """One of ``count`` stages of ``whole``: some of its layers; embeddings on the first stage, the head on the last."""

    def __init__(self, whole: GPT2LMHeadModel, number: int, count: int) -> None:
        super().__init__()
        layers = whole.transformer.h
        self.first_layer, end = (len(layers) * each // count for each in (number, number + 1))
        is_first, is_last = number == 0, number == count - 1
        self.config = whole.config  # goes into the checkpoint
        self.wte = whole.transformer.wte if is_first else None
        self.wpe = whole.transformer.wpe if is_first else None
        self.h = layers[self.first_layer : end]
        self.ln_f = whole.transformer.ln_f if is_last else None
        self.lm_head = whole.lm_head if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wte is not None:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            x = block(x)
        return x if self.lm_head is None else self.lm_head(self.ln_f(x))

    def whole_name(self, name: str) -> str:
        """Return the name in the whole model of what this stage calls ``name``."""
        first, _, rest = name.partition(".")
        if first == "h":
            number, _, rest = rest.partition(".")
            return f"transformer.h.{self.first_layer + int(number)}.{rest}"
        return name if first == "lm_head" else f"transformer.{name}"


class Pipeline:
    """This rank's stage, sharded and scheduled; ``mesh``: (stage, shard)."""

    def __init__(self, mesh: DeviceMesh, schedule: str = "1f1b", dtype: torch.dtype = torch.float32) -> None:
        self.mesh = mesh
        stages, number = mesh["stage"], mesh["stage"].get_local_rank()
        self.is_first, self.is_last = number == 0, number == stages.size() - 1
        torch.manual_seed(0)
        device = torch.device(mesh.device_type)
        self.model = Stage(GPT2LMHeadModel(CONFIG).to(device, dtype), number, stages.size())
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        # The groups of the whole model's optimizer, on every stage.
        self.optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
        trueshard.shard(self.model, self.optimizer, plan=trueshard.Plan(pipeline=True), mesh=mesh["shard"])

        copy = self.model.wte if self.is_first else self.model.lm_head
        trueshard.tie_over(stages, {"transformer.wte.weight": None if copy is None else copy.weight})

        stage = PipelineStage(self.model, number, stages.size(), device, group=stages.get_group())
        # The mean over tokens divides by all of them, so the schedule must not divide by the microbatches.
        self.schedule = SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=self.loss, scale_grads=False)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of one microbatch. Last stage."""
        logits, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return self.mean(nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[float | None, torch.Tensor]:
        """Return the global mean loss (on the last stage) and the norm of the whole model's gradient.

        ``tokens``, ``labels``: [samples, length], of this rank's place in ``mesh["shard"]``, all microbatches.
        """
        losses: list[torch.Tensor] = []
        if self.is_last:  # which sees the labels; the others need not know
            self.mean = trueshard.token_mean(self.model, trueshard.count_targets(labels))
        inputs = (tokens,) if self.is_first else ()
        self.schedule.step(*inputs, target=labels if self.is_last else None, losses=losses if self.is_last else None)
        norm = trueshard.clip_grad_norm_(self.model.parameters(), 1.0, over=self.mesh["stage"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.mean.value(sum(losses) * self.mean.divisor) if self.is_last else None, norm

    def save(self, path: str) -> None:
        trueshard.save(path, model=self.model, optimizer=self.optimizer, names=self.model.whole_name)

    def load(self, path: str) -> None:
        trueshard.load(path, model=self.model, optimizer=self.optimizer, names=self.model.whole_name)


def batch(number: int, samples: int = 16, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of a global batch; each sample has another number of targets."""
    tokens = torch.randint(0, 65, (samples, length), generator=torch.Generator().manual_seed(number))
    labels = tokens.clone()
    for row in range(samples):
        labels[row, 1 + row % length :] = -100
    return tokens, labels


def main(schedule: str = "1f1b", checkpoint: str = "checkpoint", stages: int = 2) -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    shards = int(os.environ["WORLD_SIZE"]) // stages
    mesh = init_device_mesh(device.type, (stages, shards), mesh_dim_names=("stage", "shard"))
    pipeline = Pipeline(mesh, schedule)
    shard = mesh["shard"]
    for number in range(5):
        mine = (each.chunk(shard.size())[shard.get_local_rank()].to(device) for each in batch(number))
        loss, norm = pipeline.step(*mine)
        if loss is not None and shard.get_local_rank() == 0:
            print(f"step {number}: loss {loss:.4f}, norm {norm.item():.4f}")
    pipeline.save(checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
