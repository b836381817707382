"""The cases of ``benchmarks.goes_wrong``: each does what users of sharded training report as gone wrong.

A case is a function of a ``Run``. It trains a tiny Llama and returns what one process is to have as well. It does not
know which system it runs under, and nothing here says what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from benchmarks.goes_wrong_systems import Job, System

SEQUENCES, TOKENS = 6, 8
"""Of the global batch, which divides by two and by three ranks."""
HIDDEN, VOCABULARY = 32, 61
"""The vocabulary divides by neither."""

Result = dict[str, Any]
"""By what it is: whole tensors by name, or a plain value."""
TRAINED = "parameters"
"""What each parameter has become, less what it was."""


class Run:
    """A system that trains, step by step."""

    def __init__(self, make: Callable[[], System], folder: Path) -> None:
        self._make, self._folder = make, folder
        self.phase = "sharding"
        """What it is at, for an error's cell."""

    def start(self, job: Job) -> None:
        """Shard what the job makes."""
        self.phase = "sharding"
        self.system = self._make()
        self.system.start(job, self._folder)
        self.phase = "training"

    def save(self) -> None:
        """Save model and optimizer."""
        self.phase = "saving"
        self.system.save(self._folder / "saved")
        self.phase = "training"

    def resume(self, job: Job) -> None:
        """Go on, as another program would, from what was saved."""
        self.phase = "loading"
        self.system = self._make()
        self.system.resume(job, self._folder, self._folder / "saved")
        self.phase = "training"

    def train(self, *steps: int) -> None:
        """A step for each number, on the batch of that number."""
        for step in steps:
            self.system.differentiate(batch(step))
            self.system.optimizer.step()
            self.system.optimizer.zero_grad()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Of the model, by the names that the user gave them."""
        return dict(self.system.module.named_parameters())

    def trained(self, job: Job) -> Result:
        """The result of training."""
        before = {name: whole(parameter) for name, parameter in job.build().named_parameters()}
        return {TRAINED: {name: whole(parameter) - before[name] for name, parameter in self.parameters.items()}}


Phase = Callable[[Run], Result]


@dataclass(frozen=True)
class Case:
    """A report, and how it is tried."""

    label: str
    thread: str
    """Where it is reported, as ``owner/repository#number``."""
    phases: tuple[tuple[int, Phase], ...]
    """Numbers of processes and what they do in the same folder, one after the other. The last result counts."""
    limit: float = 60
    """Seconds that a phase may take."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor, float64, on every rank. Collective if it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double().clone()


def batch(step: int) -> torch.Tensor:
    """This rank's part of the batch of a step, int64 ``[sequences, TOKENS]``."""
    return _batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def _batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(step))


def _config(**more: Any) -> Any:
    from transformers import LlamaConfig

    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
    return LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, **heads, **more)


def _llama(**more: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(_config(**more)).train()


def _adamw(model: Any, parameters: Iterable[Any] | None = None) -> Optimizer:
    # With this epsilon a gradient of nearly zero, whose sign is rounding, does not make a step of full length.
    return AdamW(model.parameters() if parameters is None else parameters, lr=1e-2, eps=1e-4)


def _groups(run: Run) -> Result:
    """The embedding and the head are trainable, and in no group."""

    def optimizer(model: Any) -> Optimizer:
        blocks = [(name, parameter) for name, parameter in model.named_parameters() if "layers" in name]
        matrices, norms = ([p for name, p in blocks if ("norm" in name) is which] for which in (False, True))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0, "lr": 3e-3}]
        return _adamw(model, groups)

    job = Job(_llama, optimizer)
    run.start(job)
    run.train(0, 1, 2)
    return run.trained(job) | {"groups": [len(group["params"]) for group in run.system.optimizer.param_groups]}


def _momenta(run: Run) -> Result:
    """Two steps on one device, then two sharded."""

    def begin(model: Any, optimizer: Optimizer) -> None:
        for step in (0, 1):
            model(input_ids=_batch(step), labels=_batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    job = Job(_llama, _adamw, begin=begin)
    run.start(job)
    run.train(2, 3)
    return run.trained(job)


def _resumed(run: Run, job: Job) -> Result:
    """Go on from what ``run`` saved, on a model made anew."""
    run.resume(job)
    run.train(2, 3)
    return run.trained(job)


def _frozen(run: Run) -> Result:
    """The optimizer is over all parameters, as ``model.parameters()`` gives them."""

    def freeze(model: Any) -> None:
        model.get_input_embeddings().requires_grad_(False)
        model.get_decoder().layers[0].requires_grad_(False)

    job = Job(_llama, _adamw, freeze)
    run.start(job)
    run.train(0, 1)
    run.save()
    return _resumed(run, job)


def _unused(run: Run) -> Result:
    """The last block takes no part in the steps before the save, so AdamW has no state for it."""
    job = Job(_llama, _adamw)
    run.start(job)
    run.system.module.config.num_hidden_layers = 1
    run.train(0, 1)
    run.system.module.config.num_hidden_layers = 2
    run.save()
    return _resumed(run, job)


def _early(run: Run) -> Result:
    """A program that tries its checkpointing before it trains."""
    job = Job(_llama, _adamw)
    run.start(job)
    run.save()
    run.train(0, 1)
    return run.trained(job)


def _save(run: Run) -> Result:
    run.start(Job(_llama, _adamw))
    run.train(0, 1)
    run.save()
    return {}


def _resume(run: Run) -> Result:
    return _resumed(run, Job(_llama, _adamw))


def _tied(run: Run) -> Result:
    job = Job(partial(_llama, tie_word_embeddings=True), _adamw)
    run.start(job)
    run.train(0, 1)
    run.save()
    result = _resumed(run, job)
    head, embedding = run.system.module.get_output_embeddings(), run.system.module.get_input_embeddings()
    return result | {"head is embedding": head.weight is embedding.weight}


def _to_bfloat16(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(torch.bfloat16)


def _two_dtypes() -> Any:
    from transformers import LlamaForCausalLM

    class Llama(LlamaForCausalLM):
        """bfloat16, with norms in float32; from_pretrained keeps that by the names below."""

        _keep_in_fp32_modules_strict: ClassVar = {"norm", "input_layernorm", "post_attention_layernorm"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name, module in self.named_modules():
                if name.endswith("norm"):
                    module.register_forward_hook(_to_bfloat16)

    torch.manual_seed(0)
    model: Any = Llama(_config(dtype=torch.bfloat16)).train()
    for name, module in model.named_modules():
        if not list(module.children()):
            module.to(torch.float32 if name.endswith("norm") else torch.bfloat16)
    return model


def _mixed(run: Run) -> Result:
    """The gradients of one batch: in bfloat16, an update would be mostly rounding."""
    run.start(Job(_two_dtypes, _adamw))
    run.system.differentiate(batch(0))
    gradients = {name: whole(p.grad) for name, p in run.parameters.items() if p.grad is not None}
    return {
        "gradients": gradients,
        "dtypes": {name: str(p.dtype) for name, p in run.parameters.items()},
    }


def _clipping(run: Run) -> Result:
    """A norm that is a DTensor is made whole, as PyTorch's documentation has it."""
    run.start(Job(_llama, _adamw))
    result: Result = {"norms": {}, "gradients": {}}
    for kind in (2.0, math.inf):
        run.system.differentiate(batch(0))
        result["norms"][f"{kind}"] = whole(run.system.clip(1e-2, kind))
        gradients = {f"{kind} {name}": parameter.grad for name, parameter in run.parameters.items()}
        result["gradients"] |= {name: whole(gradient) for name, gradient in gradients.items() if gradient is not None}
        run.system.optimizer.zero_grad()
    return result


def _read(run: Run) -> Result:
    """Norms, and whether a gradient is finite that has an infinity in the last rank's rows alone."""
    run.start(Job(_llama, _adamw))
    run.system.differentiate(batch(0))
    read = {name: torch.tensor(parameter.norm().item()).double() for name, parameter in run.parameters.items()}
    gradient: Any = run.parameters["lm_head.weight"].grad
    rows = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if dist.get_rank() == dist.get_world_size() - 1:
        rows[-1] = math.inf
    return {"isfinite(p.grad).all()": bool(torch.isfinite(gradient).all()), "p.norm().item()": read}


def _head(run: Run) -> Result:
    """The same head on all ranks, and an optimizer over the model as it then is."""
    job = Job(_llama, _adamw)
    run.start(job)
    torch.manual_seed(1)
    run.system.module.set_output_embeddings(nn.Linear(HIDDEN, VOCABULARY, bias=False))
    run.system.optimizer = _adamw(run.system.module)
    run.train(0, 1, 2)
    return run.trained(job)


def _skipped(run: Run) -> Result:
    """The first half of the batch goes through one block, the second through both."""
    job = Job(_llama, _adamw)
    run.start(job)
    ranks = dist.get_world_size()
    for i, part in enumerate(batch(0).chunk(2 // ranks)):
        run.system.module.config.num_hidden_layers = 1 if dist.get_rank() + i == 0 else 2
        run.system.differentiate(part, ranks / 2)
    run.system.optimizer.step()
    return run.trained(job)


def _on_two(label: str, thread: str, phase: Phase, **more: Any) -> Case:
    return Case(label, thread, ((2, phase),), **more)


CASES = (
    _on_two("optimizer of two groups over a part of the model", "mosaicml/composer#3493", _groups),
    _on_two("optimizer that has momenta when it is sharded", "huggingface/accelerate#3855", _momenta),
    _on_two("save before the first step, then train", "pytorch/pytorch#164929", _early),
    _on_two("frozen tower: save, resume", "hiyouga/EasyR1#244", _frozen),
    _on_two("layer that had no gradient yet: save, resume", "PrimeIntellect-ai/prime-rl#2800", _unused),
    Case("odd vocabulary: save on two ranks, resume on three", "pytorch/torchtitan#1136", ((2, _save), (3, _resume))),
    _on_two("tied embedding: train, save, resume", "huggingface/accelerate#4171", _tied),
    _on_two("two dtypes in a block", "pytorch/pytorch#156784", _mixed),
    _on_two("clipping by the 2-norm and the inf-norm", "meta-pytorch/torchrec#3199", _clipping),
    _on_two("values read on each rank", "pytorch/pytorch#166638", _read),
    _on_two("new head on the sharded model", "hao-ai-lab/FastVideo#1666", _head),
    _on_two("block that one rank skips", "pytorch/pytorch#158719", _skipped, limit=20),
)
