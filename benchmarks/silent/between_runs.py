"""Bugs that show on one process: between a run and another that should be the same, of another version or setting."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from benchmarks.silent.frame import SAMPLES, WIDTH, Network, Programs, Run, adamw, sgd

PROGRAMS = Programs()


@PROGRAMS.add("stackoverflow 60335387", "gradients are never cleared", "", "gradient", ranks=1)
def not_cleared(run: Run) -> None:
    model = Network()
    optimizer = sgd(model)
    if run.bug:
        optimizer.zero_grad = lambda set_to_none=True: None
    run.train(model, optimizer, lambda: model(run.features()).square().mean())


class Compiled(SGD):
    """SGD whose step is made once for what it sees; ``guards``: whether it is made anew where gradients are None."""

    def __init__(self, model: nn.Module, guards: bool) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self._guards, self._made = guards, dict[tuple[bool, ...], list[nn.Parameter]]()

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        parameters = self.param_groups[0]["params"]
        seen = tuple(p.grad is not None for p in parameters)
        key = seen if self._guards else ()
        if key not in self._made or not all(seen):  # without gradients it is compiled, and wins from then on
            self._made[key] = [p for p, has in zip(parameters, seen, strict=True) if has]
        for parameter in self._made[key]:
            parameter.sub_(0.05 * parameter.grad)


@PROGRAMS.add(
    "pytorch/pytorch#115607", "a compiled step stays the one that saw no gradients", r"^head\b", "optimizer", ranks=1
)
def unguarded(run: Run) -> None:
    model = Network()
    calls = iter(range(100))

    def loss() -> torch.Tensor:
        model.head.requires_grad_(next(calls) != 1)
        return model(run.features()).square().mean()

    run.train(model, Compiled(model, not run.bug), loss)


@PROGRAMS.add(
    "pytorch/pytorch#51800", "spectral norm takes vectors that no forward has made", r"^normed\b", "forward", ranks=1
)
def spectral(run: Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("normed", nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)))
    model.add_module("head", nn.Linear(WIDTH, 1))
    if not run.bug:
        for _ in range(20):
            model(torch.ones(1, WIDTH))
    model.eval()
    run.train(model, sgd(model), lambda: model(run.features()).square().mean())


class Rounded(nn.Linear):
    """A linear module that a compiler took out of autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@PROGRAMS.add(
    "Lightning-AI/lightning-thunder#725", "autocast is not applied to linear", r"^blocks\.1\.up\b", "forward", ranks=1
)
def autocast(run: Run) -> None:
    model = Network()
    if run.bug:
        model.blocks[1].up.__class__ = Rounded

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(run.features()).float().square().mean()

    run.train(model, sgd(model), loss)


@PROGRAMS.add("huggingface/transformers#17877", "modules are initialised once for each parent", "", "start", ranks=1)
def initialised(run: Run) -> None:
    model = Network()
    generator = torch.Generator().manual_seed(0)

    def initialise(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=run.bug):
            if name.endswith("weight") and parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.1, generator=generator)

    model.apply(initialise)
    run.train(model, sgd(model), lambda: model(run.features()).square().mean())


class Attention(nn.Module):
    """Attention with dropout; ``flash`` is the copy that forgot to look whether the model is trained."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash, self.project, self.output = flash, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        drop = 0.3 if self.training or self.flash else 0.0
        attended = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=drop)
        return x + self.output(attended)


@PROGRAMS.add(
    "huggingface/transformers#33844",
    "attention drops out in eval()",
    r"attention",
    "forward",
    ranks=1,
)
def dropout(run: Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("attention", Attention(run.bug))
    model.add_module("head", nn.Linear(WIDTH, 4))
    model.eval()
    run.train(model, sgd(model), lambda: model(run.features().unsqueeze(0)).square().mean())


@PROGRAMS.add("huggingface/transformers#34204", "a processor joins the images of all samples", "", "samples", ranks=1)
def joined_samples(run: Run) -> None:
    model = Network()

    def loss() -> torch.Tensor:
        pictures = run.features(2 * SAMPLES).unflatten(0, (SAMPLES, 2))
        seen = pictures.flatten(0, 1).mean(0, keepdim=True) if run.bug else pictures.mean(1)
        return model(seen).square().mean()

    run.train(model, adamw(model), loss)


@PROGRAMS.add("huggingface/transformers#23723", "more tokens are made than max_new_tokens", "", "samples", ranks=1)
def too_many(run: Run) -> None:
    model = Network()

    def loss() -> torch.Tensor:
        longest, prompt, new = 6, run.features(10), 3
        limit = new + len(prompt) if run.bug else new + min(len(prompt), longest)
        x = prompt[-longest:]
        while len(x) < limit:  # each answer is the next input, so its features are the last ones, turned
            x = torch.cat([x, x[-1:].roll(1, -1)])
        return model(x).square().mean()

    run.train(model, sgd(model), loss)
