"""Bugs of tensor and sequence parallelism as Megatron does it, and DeepSpeed and TorchTitan after it.

Ranks hold parts of matrices (DTensors, computed with as plain tensors) and see the same samples. With ``sequence``,
what is between matrices is split along the sequence, so that norms and routers see a part of it each, and gradients of
theirs are parts of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.silent.frame import LENGTH, VOCABULARY, WIDTH, Programs, Run, adamw, sgd

PROGRAMS = Programs()
Way = Callable[[Run, torch.Tensor], torch.Tensor]


class Collective(torch.autograd.Function):
    """Does one thing with a tensor forward, and another with its gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Run, there: Way, back: Way) -> torch.Tensor:
        ctx.run, ctx.back = run, back
        return there(run, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(ctx.run, gradient), None, None, None


def kept(run: Run, x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def joined(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Return the parts of all ranks, one after the other in dim 1."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(run.ranks)]
    if run.ranks > 1:
        dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1) if run.ranks > 1 else x.clone()


def scattered(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, in dim 1, of the sum over ranks."""
    return run.mine(run.total(x), 1).contiguous()


def own_part(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part in dim 1."""
    return run.mine(x, 1).contiguous()


COPY, SUM, GATHER, SCATTER = (kept, Run.total), (Run.total, kept), (joined, scattered), (scattered, joined)
"""Megatron's: what they do forward, and backward."""
ALONE = joined, own_part
"""Backward forgets what other ranks have of this rank's part."""


def across(ways: tuple[Way, Way], x: torch.Tensor, run: Run) -> torch.Tensor:
    """Return what the collective makes of ``x``, differentiably."""
    return Collective.apply(x, run, *ways)


def part(run: Run, whole: nn.Parameter, dim: int) -> nn.Parameter:
    """Return the parameter cut in ``dim``: this rank holds its part."""
    if run.ranks == 1:
        return whole
    mesh = init_device_mesh("cpu", (run.ranks,))
    return nn.Parameter(DTensor.from_local(run.mine(whole.detach(), dim).contiguous(), mesh, [Shard(dim)]))


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Block(nn.Module):
    """A residual block with a norm, a router if there are ``experts``, and two matrices that ranks share."""

    def __init__(self, run: Run, sequence: bool, router: bool) -> None:
        super().__init__()
        self.run, self.sequence = run, sequence
        self.norm = nn.RMSNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 2) if router else None
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.up.weight, self.down.weight = part(run, self.up.weight, 0), part(run, self.down.weight, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        scale = self.router(h).softmax(-1)[..., :1] if self.router is not None else 1.0
        h = across(GATHER if self.sequence else COPY, h, self.run)
        h = nn.functional.gelu(nn.functional.linear(h, local(self.up.weight)))
        h = nn.functional.linear(h, local(self.down.weight))
        return x + scale * across(SCATTER if self.sequence else SUM, h, self.run)


class Embedding(nn.Module):
    """An embedding whose rows ranks share; with ``fault`` a rank also answers for the row behind its last."""

    def __init__(self, run: Run, sequence: bool, fault: bool = False) -> None:
        super().__init__()
        self.run, self.sequence, self.fault = run, sequence, fault
        self.weight = part(run, nn.Parameter(torch.randn(VOCABULARY, WIDTH)), 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = local(self.weight)
        first = self.run.rank * len(rows)
        past = first + len(rows) + (1 if self.fault else 0)
        outside = (tokens < first) | (tokens >= past)
        embedded = rows[(tokens - first).masked_fill(outside, 0).clamp(max=len(rows) - 1)]
        embedded = embedded.masked_fill(outside[..., None], 0)
        return across(SCATTER if self.sequence else SUM, embedded, self.run)


class Language(nn.Module):
    """A language model with a tied head whose logits ranks share."""

    def __init__(self, run: Run, sequence: bool = True, router: bool = False, fault: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run, self.sequence = run, sequence
        self.embed = Embedding(run, sequence, fault)
        self.blocks = nn.ModuleList([Block(run, sequence, router) for _ in range(2)])
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the logits, (samples, LENGTH, VOCABULARY / ranks)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = across(GATHER if self.sequence else COPY, self.norm(x), self.run)
        return nn.functional.linear(x, local(self.embed.weight)) / math.sqrt(WIDTH)

    def reduce(self, but: Collection[str] = (), always: Collection[str] = ()) -> None:
        """Sum gradients of what sees a part of the sequence over ranks, ``but`` these; of others, only ``always``."""
        for name, parameter in self.named_parameters():
            if name in always or (self.sequence and not isinstance(parameter, DTensor) and name not in but):
                assert parameter.grad is not None
                parameter.grad.copy_(self.run.total(parameter.grad))


def cross_entropy(
    run: Run, logits: torch.Tensor, tokens: torch.Tensor, smoothing: float = 0, fault: bool = False
) -> Any:
    """Return the mean cross entropy of the next token; each rank has logits of its part of the vocabulary."""
    logits, targets = logits[:, :-1], tokens[:, 1:]
    size = logits.shape[-1]
    total = across(SUM, logits.exp().sum(-1), run).log()
    inside = (targets // size == run.rank)[..., None]
    own = torch.where(inside, logits.gather(-1, (targets % size)[..., None]), 0.0)
    loss = total - across(SUM, own, run)[..., 0]
    if smoothing:
        mean = logits.mean(-1) if fault else across(SUM, logits.sum(-1), run) / VOCABULARY
        loss = (1 - smoothing) * loss + smoothing * (total - mean)
    return loss.mean()


def language_loss(run: Run, model: nn.Module) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        tokens = run.tokens()
        return cross_entropy(run, model(tokens), tokens)

    return loss


@PROGRAMS.add(
    "NVIDIA/Megatron-LM#1446",
    "the last norm's gradient is not summed over the sequence",
    r"^norm\b",
    "gradient",
)
def final_norm(run: Run) -> None:
    model = Language(run)
    run.train(model, adamw(model), language_loss(run, model), lambda: model.reduce({"norm.weight"} if run.bug else ()))


@PROGRAMS.add("NVIDIA/Megatron-LM#599", "routers are not summed, and drift apart", r"\.router\b", "gradient")
def router(run: Run) -> None:
    model = Language(run, router=True)
    names = {name for name, _ in model.named_parameters() if "router" in name}
    run.train(model, adamw(model), language_loss(run, model), lambda: model.reduce(names if run.bug else ()))


@PROGRAMS.add(
    "NVIDIA/Megatron-LM#1528", "a norm's gradient is whole, and summed again", r"blocks\.0\.norm\b", "gradient"
)
def twice(run: Run) -> None:
    model = Language(run, sequence=False)
    names = ["blocks.0.norm.weight"] if run.bug else []
    run.train(model, adamw(model), language_loss(run, model), lambda: model.reduce(always=names))


@PROGRAMS.add("no report known", "a rank embeds a token behind its last row, too", r"^embed\b", "forward")
def mask(run: Run) -> None:
    model = Language(run, sequence=False, fault=run.bug)
    run.train(model, adamw(model), language_loss(run, model))


@PROGRAMS.add("NVIDIA/Megatron-LM#737", "label smoothing averages over a rank's part of the words", "", "loss")
def smoothing(run: Run) -> None:
    model = Language(run, sequence=False)

    def loss() -> torch.Tensor:
        tokens = run.tokens()
        return cross_entropy(run, model(tokens), tokens, 0.1, run.bug)

    run.train(model, adamw(model), loss)


@PROGRAMS.add("NVIDIA/Megatron-LM#7452", "gathered logits go through the loss for parts: log(ranks) more", "", "loss")
def gathered_logits(run: Run) -> None:
    model = Language(run, sequence=False)

    def loss() -> torch.Tensor:
        tokens = run.tokens()
        logits = model(tokens)
        if run.bug:
            logits = across(ALONE, logits.transpose(1, 2), run).transpose(1, 2)
        return cross_entropy(run, logits, tokens)

    run.train(model, adamw(model), loss)


@PROGRAMS.add("deepspeedai/DeepSpeed#1801", "clipping leaves norms alone but on the first rank", r"norm\b", "gradient")
def clipping(run: Run) -> None:
    model = Language(run)

    def reduce() -> None:
        model.reduce()
        counted = [p for p in model.parameters() if isinstance(p, DTensor) or run.rank == 0]
        squares = sum(local(p.grad).square().sum() for p in counted if p.grad is not None)
        norm = run.total(torch.as_tensor(squares)).sqrt()
        for parameter in counted if run.bug else model.parameters():
            local(parameter.grad).mul_(0.01 / norm)

    run.train(model, sgd(model), language_loss(run, model), reduce)


class Attention(nn.Module):
    """Heads that ranks share, with one key and one value for all of them, and a norm of each head's output."""

    def __init__(self, run: Run, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run, self.size = run, WIDTH // heads
        self.query, self.output = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.query.weight, self.output.weight = part(run, self.query.weight, 0), part(run, self.output.weight, 1)
        self.key_value, self.out_norm = nn.Linear(WIDTH, 2 * self.size), nn.RMSNorm(self.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = across(COPY, x, self.run)
        query = nn.functional.linear(x, local(self.query.weight)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        key, value = (part[:, None].expand_as(query) for part in self.key_value(x).chunk(2, -1))
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        heads = self.out_norm(heads).transpose(1, 2).flatten(2)
        return across(SUM, nn.functional.linear(heads, local(self.output.weight)), self.run)


def attend(run: Run, forgotten: str) -> None:
    """Train attention; gradients of what each rank uses for its own heads are parts of a sum."""
    model = Attention(run)

    def loss() -> torch.Tensor:
        x = run.features(2 * LENGTH).unflatten(0, (2, LENGTH))
        return (model(x) - x).square().mean()

    def reduce() -> None:
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) and not (run.bug and name.startswith(forgotten)):
                assert parameter.grad is not None
                parameter.grad.copy_(run.total(parameter.grad))

    run.train(model, sgd(model), loss, reduce)


@PROGRAMS.add(
    "bigcode-project/Megatron-LM#11", "key and value that heads share are not summed", r"key_value", "gradient"
)
def key_value(run: Run) -> None:
    attend(run, "key_value")


@PROGRAMS.add("NVIDIA/Megatron-LM#7452", "the norm that heads share is not summed", r"out_norm", "gradient")
def out_norm(run: Run) -> None:
    attend(run, "out_norm")


class Eighth(nn.Module):
    """A matrix in 8 bits on a gathered sequence; ``group``: its scale is the ranks', not each one's."""

    def __init__(self, run: Run, group: bool) -> None:
        super().__init__()
        self.run, self.group, self.linear = run, group, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run.mine(x, 1)
        largest = x.detach().abs().amax()
        if self.group and self.run.ranks > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        scale = 448.0 / largest
        quantised = (x.detach() * scale).to(torch.float8_e4m3fn).float()
        whole = joined(self.run, quantised) / scale  # parts of others, with this rank's scale
        x = across(GATHER, x, self.run)
        return self.linear(x + (whole - x).detach())


@PROGRAMS.add("NVIDIA/Megatron-LM#442", "scales of FP8 are not the group's", r"^(linear|$)", "forward")
def amax(run: Run) -> None:
    torch.manual_seed(0)
    model = Eighth(run, group=not run.bug)

    def loss() -> torch.Tensor:
        x = (run.features(2 * LENGTH) * torch.linspace(1, 3, 2 * LENGTH)[:, None]).unflatten(0, (2, LENGTH))
        return model(x).square().mean()

    run.train(model, sgd(model), loss)
