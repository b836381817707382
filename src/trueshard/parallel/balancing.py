"""The loss that balances routers, over the global batch: transformers' ``load_balancing_loss_func``.

It multiplies the share of tokens of each expert by its mean probability. Both are means over the tokens of a batch, so
the mean over ranks of such products is not the product for all ranks. Here ranks add up the sums that these means are
made of, 2 numbers for each expert, before they are divided and multiplied. The gradient of a rank's loss reaches the
tokens of the others too, so gradients of the sums are added up as well; averaged over ranks, as all gradients are, they
are those of the mean of the ranks' losses.

Each file of models of transformers has a copy of this function, under one name. That of the files which a sharded
model's classes come from is replaced during its passes alone. Whether a copy computes the same is tried, on random
logits; one that computes something else is called as it is, with a warning.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch
from trueshard.errors import TrueShardValueError, warn_user
from trueshard.parallel.collectives import sum_gradients, sum_parts
from trueshard.plans import Plan

NAME = "load_balancing_loss_func"

Sum = Callable[[torch.Tensor], torch.Tensor]
"""Function that adds up a vector over ranks."""


def balance_over_ranks(root: nn.Module, plan: Plan, mesh: DeviceMesh) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what is to be called before and after each outermost pass of a sharded model.

    ``mesh``: ranks over which gradients are averaged.
    """
    replacements = [(file, _over_ranks(file[NAME], plan, mesh)) for file in files_of(root)]
    replaced = contextlib.ExitStack()

    def before() -> None:
        for file, function in replacements:
            replaced.callback(file.__setitem__, NAME, file[NAME])
            file[NAME] = function

    return before, replaced.close


def files_of(root: nn.Module) -> list[dict[str, Any]]:
    """Return the files with such a function that classes of a model come from."""
    classes = {cls for module in root.modules() for cls in type(module).__mro__}
    files = [vars(sys.modules[name]) for name in sorted({cls.__module__ for cls in classes}) if name in sys.modules]
    return [file for file in files if callable(file.get(NAME))]


@contextlib.contextmanager
def left_out(files: list[dict[str, Any]]) -> Iterator[None]:
    """Make these functions give 0."""
    originals = [file[NAME] for file in files]
    for file in files:
        file[NAME] = lambda *args, **kwargs: torch.zeros(())
    try:
        yield
    finally:
        for file, original in zip(files, originals, strict=True):
            file[NAME] = original


def _over_ranks(original: Callable[..., Any], plan: Plan, mesh: DeviceMesh) -> Callable[..., Any]:
    original = inspect.unwrap(original)
    with _torch.real_tensors():  # also in a simulation
        knows = _is_known(original)
        if not knows and _is_mean_over_sequences(original):
            return original
    warned: list[bool] = []

    def add_up(x: torch.Tensor) -> torch.Tensor:
        for group in mesh.get_all_groups():
            x = sum_gradients(sum_parts(x, group), group)
        return x

    @torch.compiler.disable
    def balance(*args: Any, **kwargs: Any) -> Any:
        for option, is_on in (("exact", plan.exact), ("tensor", plan.tensor > 1), ("context", plan.context > 1)):
            if is_on:
                raise TrueShardValueError(
                    f"{option}={getattr(plan, option)}: a loss that balances routers follows from how tokens lie on "
                    "ranks: set output_router_logits=False"
                )
        if knows:
            return _balancing_loss(add_up, *args, **kwargs)
        if not warned:
            warned.append(True)
            warn_user(
                f"{original.__module__}.{original.__qualname__} balances routers over the tokens of each rank by "
                "themselves, which is not what one device computes: it is none of the forms that ranks can add up; "
                "set output_router_logits=False"
            )
        return original(*args, **kwargs)

    balance.__wrapped__ = original  # for a model that is sharded inside another's pass
    return balance


def _balancing_loss(
    add_up: Sum,
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: torch.Tensor | None = None,
) -> Any:
    """Return the loss of Switch Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6, over all ranks.

    Args:
        add_up: adds up over ranks.
        gate_logits: a tuple of (tokens, experts), one for each layer; anything else gives 0, as in transformers.
        num_experts: experts of a layer.
        top_k: experts of a token.
        attention_mask: (batch, length), 0 for tokens that do not count.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    assert num_experts is not None
    device = gate_logits[0].device
    counts, probabilities = torch.zeros(2, num_experts, dtype=torch.float32, device=device).unbind()
    rows = torch.zeros(1, dtype=torch.float32, device=device)
    for logits in gate_logits:
        weights = F.softmax(logits.to(device), dim=-1)
        chosen = torch.topk(weights, top_k, dim=-1).indices  # (tokens, top_k)
        mask = torch.ones(len(weights), device=device)
        if attention_mask is not None:
            mask = attention_mask.reshape(-1).to(device, torch.float32)
            if len(mask) != len(weights):
                raise TrueShardValueError(
                    f"attention_mask has {len(mask)} tokens and the router {len(weights)}: give each rank the mask of "
                    "its own part of the tokens, or set output_router_logits=False"
                )
        counts = counts.scatter_add(0, chosen.flatten(), mask.repeat_interleave(top_k))
        probabilities = probabilities + (weights.float() * mask.unsqueeze(-1)).sum(0)
        rows = rows + mask.sum()
    sums = add_up(torch.cat([counts, probabilities, rows]))
    counts, probabilities, rows = sums.split([num_experts, num_experts, 1])
    return (counts.detach() / rows.detach() * (probabilities / rows.detach())).sum() * num_experts


def _is_known(original: Callable[..., Any]) -> bool:
    """True if a function computes on one rank what ``_balancing_loss`` does, with a mask and without."""
    draws = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(10, 5, generator=draws, device="cpu") for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], device="cpu")
    try:
        pairs = [(original(logits, 5, 2, m), _balancing_loss(lambda x: x, logits, 5, 2, m)) for m in (None, mask)]
        return all(torch.allclose(theirs, ours, rtol=1e-5) for theirs, ours in pairs)
    except Exception:  # of any kind: it takes other arguments
        return False


def _is_mean_over_sequences(original: Callable[..., Any]) -> bool:
    """True for a loss of (probabilities, chosen experts) that looks at each sequence by itself (Switch)."""
    draws = torch.Generator().manual_seed(0)
    probabilities = torch.rand(2, 6, 4, generator=draws, device="cpu")
    inputs = probabilities, probabilities.argmax(-1)
    try:
        apart = [original(*(tensor[i : i + 1] for tensor in inputs)) for i in range(2)]
        return torch.allclose(original(*inputs), torch.stack(apart).mean())
    except Exception:  # of any kind: it takes other arguments
        return False
