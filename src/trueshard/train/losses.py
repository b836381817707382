"""The losses of the trainer: what it asks of one, and next-token cross entropy.

- Targets are aligned with inputs: the token to predict at a position stands at that position.
- The whole logits (tokens × vocabulary, in float32 with their gradient the largest tensors of a step) are never held
  if the model returns the output of its head unchanged; otherwise they are, with one warning.
- For a plain linear head, the gradient is computed along with the loss, some rows at a time: in float32 and float64 by
  ``torch.nn.functional.linear_cross_entropy``. In bfloat16 and float16 that function returns the loss in them, in which
  a sum over thousands of tokens has two or three digits (or overflows); so there the same is done here, with softmax,
  sum and the weight's gradient in float32.
- Any other head (with an adapter, say), and a loss that needs each token separately, is recomputed in backward, some
  rows at a time.
- The head's own ``forward`` is replaced for the pass by one that returns losses, behind any hooks of the head: FSDP2
  gathers its weight as usual. A model that changes its logits (caps or scales them) would do that to losses, so it must
  return the very tensor that the head gave; otherwise there is no such loss.
- Where ranks share the vocabulary (the tensor axis), each has its part of the logits, and sums travel, not logits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from trueshard import _torch
from trueshard.errors import UserError, warn_user
from trueshard.model import names
from trueshard.parallel.collectives import sum_parts
from trueshard.parallel.tensor import is_shared
from trueshard.parallel.tp_styles import SharedHead, shared_head
from trueshard.sharding.hooks import runtime_of
from trueshard.train.data.batches import IGNORED, Batch
from trueshard.train.own_code import blamed, check_call, own

if TYPE_CHECKING:
    from trueshard.train.config import TrainSection

Forward = Callable[[torch.Tensor], torch.Tensor]
AtHead = Callable[[nn.Module, Forward, torch.Tensor], torch.Tensor]
"""(head, its forward, hidden states [batch, length, features]) → output in place of logits, any shape."""

OnRows = Callable[[nn.Module | None, Forward, torch.Tensor], torch.Tensor]
"""(head, its forward, hidden states [positions, features]) → output, any shape; (None, identity, logits) where the
whole logits are held."""

_ROWS = 1024
"""Rows of a piece on an accelerator, at least: each piece reads and writes the whole sum of the weight's gradient,
which takes an H100 as long as the products of some 250 rows."""
_PIECES = 8
"""Number of pieces to recompute rows in: more save little memory, and each adds up a gradient."""


@runtime_checkable
class Loss(Protocol):
    """A loss that counts the terms of its mean.

    Optional: ``unit``, the name of a term ("token" by default, for which an evaluation has a perplexity), and
    ``tokens(batch)``, the number of tokens that the model reads (by default the terms), for tokens a second.
    """

    def count(self, batch: Any) -> int:
        """Return the number of terms in the sum over a microbatch: its target tokens."""

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the sum of the terms of a microbatch: 0-dim, float32 or wider."""


class Mean:
    """Adapt a function (model, batch) → mean loss: every microbatch of every rank has the same weight."""

    unit = "microbatch"

    def __init__(self, function: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        self._function = function

    def count(self, batch: Any) -> int:
        return 1

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self._function(model, batch)


class CausalLoss:
    """Summed cross entropy of the next token: a ``Loss``."""

    def __init__(self, whole_logits: bool = False) -> None:
        self._rows_of = HeadRows(whole_logits)

    @property
    def whole_logits(self) -> bool:
        """True if the whole logits are held: as asked for, or because the model needs it."""
        return self._rows_of.whole_logits

    def count(self, batch: Batch) -> int:
        """Return the number of targets."""
        return int(batch["targets"].ne(IGNORED).sum())

    @staticmethod
    def tokens(batch: Batch) -> int:
        """Return the number of tokens that the model reads, without padding."""
        return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()

    def __call__(self, model: nn.Module, batch: Batch, *, rows: bool = False) -> torch.Tensor:
        """Return the cross entropy, in nats, float32, summed over a microbatch (0-dim) or each of its rows ([batch]).

        ``batch``: ``input_ids`` and ``targets`` [batch, length]; other tensors are passed to the model. Raises
        `ValueError` if the model gives no logits for each position. Collective if sharded.
        """
        inputs = {key: value for key, value in batch.items() if key != "targets"}
        targets = batch["targets"]
        shape = targets.shape[:1] if rows else ()

        def compute(head: nn.Module | None, logits_of_rows: Forward, hidden: torch.Tensor) -> torch.Tensor:
            is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
            shared = None if head is None else shared_head(head)
            if shared is not None:
                terms = each_loss(shared.part, hidden, targets.flatten(), shared)
            elif is_plain and not rows:
                return summed(cast(nn.Linear, head), hidden, targets.flatten())
            elif head is not None:
                terms = each_loss(logits_of_rows, hidden, targets.flatten())
            else:
                terms = losses_of(hidden, targets.flatten())
            return terms.view(targets.shape).sum(1) if rows else terms.sum()

        return self._rows_of(model, inputs, targets.shape, compute).reshape(shape)


class OwnLoss(CausalLoss):
    """The function of ``words``, `train.loss`: (model, batch) → loss of each target, [batch, length]."""

    def __init__(self, words: str) -> None:
        self._words, self._function = words, own("train.loss", words, "model", "batch")

    def __reduce__(self) -> Any:  # another process finds the function by its words, too
        return OwnLoss, (self._words,)

    def __call__(self, model: nn.Module, batch: Batch, *, rows: bool = False) -> torch.Tensor:
        """Return the sum over the targets: 0-dim, float32 or wider. Raises `UserError` for another shape."""
        terms, targets = self._function(model, batch), batch["targets"]
        if not isinstance(terms, torch.Tensor) or terms.shape != targets.shape:
            state = f"shape {list(terms.shape)}" if isinstance(terms, torch.Tensor) else f"a {type(terms).__name__}"
            raise UserError(
                f"train.loss: {self._words} returned {state} for targets of shape {list(targets.shape)}; return each "
                "target's loss, of which the mean over all ranks is taken, or name a class with count() and a call"
            )
        return torch.where(targets.ne(IGNORED), terms if terms.dtype == torch.float64 else terms.float(), 0.0).sum()


def loss_of(section: TrainSection) -> Loss:
    """Return the loss of [train]. Raises `UserError` for one of the user's own that is none."""
    if section.loss is None:
        return CausalLoss(section.whole_logits)
    kind = own("train.loss", section.loss, binds=False)
    if not isinstance(kind, type):
        return OwnLoss(section.loss)
    check_call("train.loss", kind)
    with blamed("train.loss", section.loss):
        made = kind()
    if not isinstance(made, Loss):
        raise UserError(f"train.loss: {section.loss} has no count(batch) and no call; give it both, or name a function")
    return made


class HeadRows:
    """Compute from what the head of a model reads, a row a position; from its whole logits where it must be."""

    def __init__(self, whole_logits: bool = False) -> None:
        self.whole_logits = whole_logits
        """True if the whole logits are held: as asked for, or because the model needs it."""
        self._is_tried = whole_logits
        """True once a pass has shown how the model treats its logits: until then random numbers are put back."""

    def __call__(
        self, model: nn.Module, inputs: Mapping[str, torch.Tensor], shape: torch.Size, compute: OnRows
    ) -> torch.Tensor:
        """Return what ``compute`` does, flat, for ``shape``, [batch, length], of positions. Collective if sharded.

        Raises `ValueError` if the model gives no logits for each position.
        """

        def at_rows(head: nn.Module, forward: Forward, hidden: torch.Tensor) -> torch.Tensor:
            return compute(head, forward, hidden.flatten(0, 1)).reshape(-1, 1, 1).clone()  # FSDP2 warns of views

        if not self.whole_logits and not _heads_of(model):
            self._hold(f"{_kind(model)} has no get_output_embeddings(), which names its head")
        if not self.whole_logits and _shares_head(model):
            self._hold(f"ranks share the head of {_kind(model)}")
        if not self.whole_logits:
            device = next(iter(inputs.values()))
            before = None if self._is_tried else (torch.get_rng_state(), *get_device_states(device))
            result = at_head(model, inputs, shape, at_rows)
            if result is not None:
                self._is_tried = True
                return result.flatten()
            assert before is not None, "a model changed what it does to its logits"
            # The pass was in vain and runs again: dropout must draw what it would have drawn.
            torch.set_rng_state(before[0])
            set_device_states(*before[1:])
            self._hold(f"{_kind(model)} changes the logits that its head gives")
        logits = logits_of(model, inputs)
        if logits.shape[:-1] != shape:
            raise ValueError(
                f"the model gives logits of shape {list(logits.shape)} for {list(shape)} targets; it must give "
                "one row for each input token"
            )
        return compute(None, lambda rows: rows, logits.flatten(0, 1)).flatten()

    def _hold(self, why: str) -> None:
        """Hold the whole logits in every later step, and warn why."""
        self.whole_logits = self._is_tried = True
        if not dist.is_initialized() or dist.get_rank() == 0:
            warn_user(f"{why}, so the loss is computed from all logits at once")


# Cross entropy at the head of a model


def losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each row: logits [rows, vocabulary], targets [rows] → [rows], float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="none")


def losses_of_parts(logits: torch.Tensor, targets: torch.Tensor, shared: SharedHead) -> torch.Tensor:
    """Return the cross entropy of each row, of which each rank has the logits of its part of the vocabulary.

    logits [rows, part of the vocabulary], targets [rows] → [rows], float32 or wider, on every rank.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    with torch.no_grad():
        largest = wide.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shared.group)
    wide = wide - largest.unsqueeze(1)
    index = targets - shared.first
    is_here = (index >= 0) & (index < wide.shape[1])
    target = wide.gather(1, index.where(is_here, 0).unsqueeze(1)).squeeze(1) * is_here  # 0 on all ranks but one
    total, target = sum_parts(torch.stack([wide.exp().sum(1), target]), shared.group)
    return (total.log() - target) * targets.ne(IGNORED)


def summed(
    linear: nn.Linear,  # with its weight gathered
    hidden: torch.Tensor,  # [rows, features]
    targets: torch.Tensor,  # [rows], int64; -100 for no loss
) -> torch.Tensor:
    """Return the summed cross entropy of a plain linear head: 0-dim, float32 or wider. Its backward can run once."""
    weight, bias = linear.weight, linear.bias
    if hidden.dtype in (torch.float32, torch.float64) and hasattr(nn, "LinearCrossEntropyOptions"):
        # Torch's own choice would be pieces of some ten kernels each over a few rows.
        rows = None if hidden.device.type == "cpu" else _rows_of_piece(hidden, weight)
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="sum", ignore_index=IGNORED, options=options
        )
    total: torch.Tensor = _Summed.apply(hidden, weight, bias, targets, torch.is_grad_enabled())
    return total


def each_loss(
    head: Forward,  # [some rows, features] → logits [some rows, vocabulary]; called again in backward
    hidden: torch.Tensor,  # [rows, features]
    targets: torch.Tensor,  # [rows], int64; -100 for no loss
    shared: SharedHead | None = None,  # ranks have parts of the vocabulary
) -> torch.Tensor:
    """Return the cross entropy of each row: [rows], float32 or wider."""

    def piece(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return losses_of(head(some), wanted) if shared is None else losses_of_parts(head(some), wanted, shared)

    return in_pieces(piece, hidden, targets)


def in_pieces(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],  # of some rows of both → [rows, …]
    hidden: torch.Tensor,  # [rows, features]
    targets: torch.Tensor,  # [rows]
    recompute: bool = True,  # in backward
) -> torch.Tensor:
    """Return what ``compute`` does, some rows at a time."""
    rows = -(-hidden.shape[0] // _PIECES) or 1
    pieces = zip(hidden.split(rows), targets.split(rows), strict=True)
    again = functools.partial(checkpoint, compute, use_reentrant=False) if recompute else compute
    return torch.cat([again(*piece) for piece in pieces])


class _Summed(torch.autograd.Function):
    """The sum of cross entropies and its gradients, in one pass over the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [rows, features]
        weight: torch.Tensor,  # [vocabulary, features]
        bias: torch.Tensor | None,  # [vocabulary]
        targets: torch.Tensor,  # [rows]
        training: bool,
    ) -> torch.Tensor:
        wanted = [training and needed for needed in ctx.needs_input_grad[:3]]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        to_bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
        rows = _rows_of_piece(hidden, weight)
        for begin in range(0, hidden.shape[0], rows):
            some, target = hidden[begin : begin + rows], targets[begin : begin + rows]
            counts = target.ne(IGNORED).unsqueeze(1)
            index = target.clamp(min=0).unsqueeze(1)
            logs = F.linear(some, weight, bias).to(wide).log_softmax(dim=1)
            total -= (logs.gather(1, index) * counts).sum()
            if not any(wanted):
                continue
            slope = logs.exp_().scatter_add_(1, index, torch.full_like(index, -1, dtype=wide)).mul_(counts)
            if to_bias is not None:
                to_bias += slope.sum(0)
            if to_weight is not None:
                _add_product(to_weight, slope.t(), some)
            if to_hidden is not None:
                torch.mm(slope.to(hidden.dtype), weight, out=to_hidden[begin : begin + rows])
        ctx.gradients = (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None or bias is None else to_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradient of this loss was taken already; compute the loss again")
        return *(None if grad is None else grad.mul_(slopes[0].to(grad.dtype)) for grad in gradients), None, None


def _rows_of_piece(
    hidden: torch.Tensor,  # [rows, features]
    weight: torch.Tensor,  # [vocabulary, features]
) -> int:
    """Return the rows whose logits are no larger than ``hidden``, at least 1; more on an accelerator."""
    pieces = -(-weight.shape[0] // weight.shape[1])
    rows = -(-hidden.shape[0] // pieces) or 1
    return rows if hidden.device.type == "cpu" else max(rows, _ROWS)


def _add_product(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Add ``first @ second`` to ``total`` in its wider dtype; on CUDA from factors in the dtype of ``second``."""
    if total.device.type == "cuda" and second.dtype != total.dtype:
        torch.addmm(total, first.to(second.dtype), second, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(first, second.to(total.dtype))


def at_head(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], shape: torch.Size, compute: AtHead
) -> torch.Tensor | None:
    """Run ``model`` on ``inputs`` with ``compute`` as its head, for hidden states of ``shape``, [batch, length].

    Returns the output of ``compute``; None if the model has no single head, or changes its output.
    """
    heads = _heads_of(model)
    if not heads:
        return None
    outputs: list[torch.Tensor] = []

    def instead(head: nn.Module, forward: Forward, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if hidden.shape[:-1] != shape:
            return forward(hidden, **kwargs)
        outputs.append(compute(head, functools.partial(forward, **kwargs), hidden))
        return outputs[-1]

    with _replaced(heads, instead):
        logits = logits_of(model, inputs)
    return outputs[0] if len(outputs) == 1 and logits is outputs[0] else None


def logits_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return logits [batch, length, vocabulary], without key-value cache: it makes transformers mix documents."""
    output = model(**inputs, use_cache=False)
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output
    return logits if isinstance(logits, torch.Tensor) else logits[0]


def _kind(model: nn.Module) -> str:
    return _torch.own_class(names.unwrap(model)).__name__


def _shares_head(model: nn.Module) -> bool:
    """Return True if ranks share the head in a way of which no part can be taken apart."""
    runtime = runtime_of(names.unwrap(model))
    heads = [head for head in _heads_of(model) if shared_head(head) is None]
    return runtime is not None and any(is_shared(runtime.root, runtime.plan, head) for head in heads)


def _heads_of(model: nn.Module) -> list[nn.Module]:
    """Return the output layer of a transformers model, or its copies if PEFT trains it whole."""
    find = getattr(names.unwrap(model), "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module):
        return []
    head = names.unwrap(head)
    copies, original = getattr(head, "modules_to_save", None), getattr(head, "original_module", None)
    if isinstance(copies, nn.ModuleDict) and isinstance(original, nn.Module):
        return [names.unwrap(copy_) for copy_ in (original, *copies.values())]
    return [head]


@contextlib.contextmanager
def _replaced(heads: Sequence[nn.Module], instead: Callable[..., torch.Tensor]) -> Iterator[None]:
    before = [head.__dict__.get("forward") for head in heads]
    for head in heads:
        # The class's own: an instance's is a wrapper that begins a pass, or recomputes, around it.
        shared = shared_head(head)
        original = functools.partial(type(head).forward, head) if shared is None else shared.whole
        head.__dict__["forward"] = functools.partial(instead, head, original)
    try:
        yield
    finally:
        for head, forward in zip(heads, before, strict=True):
            del head.__dict__["forward"]
            if forward is not None:
                head.__dict__["forward"] = forward
