"""Ask the forward of a model by trial: how it makes masks, and what it does with what its blocks return.

No source is read, and no weight is needed. The module that holds the blocks runs its own forward, with children that
compute nothing: blocks note what they are given and give noise, embeddings give zeros, all else gives back what it is
given. So a trial takes milliseconds at any size, also where weights are on the meta device.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.model import names

LENGTH = 8
"""Tokens of the sequence on which a model is tried: two packed documents of half of them."""


_PLACE = LENGTH // 2
"""Position at which blocks give something else in a second pass."""

Visit = Callable[[nn.Module, torch.Tensor, Any, Any], None]
"""Function that is called with a block and what its holder gives it: hidden states, further arguments."""


@dataclass
class _Notes:
    """Record of what the children of the holder were given and gave in one pass."""

    given: list[torch.Tensor] = field(default_factory=list)
    """Hidden states that each block was given, in turn."""
    returned: list[torch.Tensor] = field(default_factory=list)
    """Hidden states that each block gave."""
    masks: list[torch.Tensor | None] = field(default_factory=list)
    """A block's each: (batch or 1, 1, length, length), or None for plainly causal attention."""
    positions: list[torch.Tensor] = field(default_factory=list)
    """Whole numbers for each token, (length,), that any child was given."""
    calls: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Name of a child beside the blocks → copies of what it was given, in turn."""
    output: Any = None
    visit: Visit | None = None
    changed: int | None = None
    """Position at which blocks give something else; None: nowhere."""

    def take(self, arguments: Iterable[Any]) -> None:
        """Note positions among the arguments of a child."""
        for value in _torch.tensors_in(list(arguments)):
            is_index = not value.is_floating_point() and value.dtype != torch.bool and value.shape[-1:] == (LENGTH,)
            if is_index and value.numel() == LENGTH:
                self.positions.append(value.flatten())


class BlockStandIn(nn.Module):
    """Stands for a block, whose attributes it has: a model may ask of which kind it is; ``more``: its own ones."""

    def __init__(self, block: nn.Module, **more: Any) -> None:
        super().__init__()
        self.__dict__ |= {"_block": block, **more}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


class _Block(BlockStandIn):
    """Notes what a block is given, and returns noise."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        notes: _Notes = self.__dict__["_notes"]
        notes.take([*args, *(value for key, value in kwargs.items() if key != "attention_mask")])
        masks = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim == 4]
        notes.masks.append(masks[0] if masks else None)
        notes.given.append(hidden)
        if notes.visit is not None:
            notes.visit(self.__dict__["_block"], hidden, args, kwargs)
        output = torch.randn(hidden.shape, generator=self.__dict__["_noise"]).to(hidden.dtype)
        if notes.changed is not None:
            output[:, notes.changed] += torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype)
        notes.returned.append(output.clone())
        return (output,) if self.__dict__["_returns_tuple"] else output


class _Child(nn.Module):
    """Stands for what the holder has beside its blocks: gives back what it is given, an embedding zeros."""

    def __init__(self, name: str, child: nn.Module, notes: _Notes, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.notes, self.dtype = name, notes, dtype
        self.width: int | None = getattr(child, "embedding_dim", None)
        self.features: int | None = getattr(child, "out_features", None)

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.notes.take([value, *args, *kwargs.values()])
        self.notes.calls.setdefault(self.name, []).append(value.clone())
        if self.features is not None and self.features != value.shape[-1]:
            times = -(-self.features // value.shape[-1])
            return value.repeat(*[1] * (value.ndim - 1), times)[..., : self.features]
        return value if self.width is None else torch.zeros((*value.shape, self.width), dtype=self.dtype)


class _Constant(_Child):
    """Stands for a norm: gives the same whatever it is given."""

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        super().forward(value)
        return torch.ones_like(value)


def run_holder(
    holder: nn.Module,
    blocks: str,
    length: int = LENGTH,
    *,
    norm: str = "",
    seed: int = 0,
    visit: Visit | None = None,
    replace: Callable[[nn.Module], nn.Module] | None = None,
    within: nn.Module | None = None,
    changed: int | None = None,
    **inputs: Any,
) -> _Notes:
    """Run the holder's forward once, with children that compute nothing.

    Args:
        blocks: attribute of the holder that lists them.
        norm: child that gives the same whatever it is given.
        seed: of the noise that blocks give.
        visit: called with each block and what the holder gives it.
        replace: returns what computes in float32 for a child beside blocks and embeddings; without it such a child
            gives back what it is given, in the model's dtype.
        within: module whose forward is run instead, in which the holder lies.
        changed: position at which blocks give something else than without it.

    Raises RuntimeError, with the reason, where it does not run so.
    """
    dtypes = (p.dtype for p in holder.parameters() if p.is_floating_point() and replace is None)
    dtype = next(dtypes, torch.float32)
    takes_embeddings = "inputs_embeds" in inspect.signature((within or holder).forward).parameters
    arguments: dict[str, Any] = dict(inputs)
    ids: tuple[torch.Tensor, ...] = ()
    if takes_embeddings:
        arguments |= {"inputs_embeds": torch.zeros(1, length, _width(holder), dtype=dtype), "use_cache": False}
    else:
        ids = (torch.zeros(1, length, dtype=torch.int64),)
    why = ""
    for returns_tuple in (False, True):
        notes, noise = _Notes(visit=visit, changed=changed), torch.Generator().manual_seed(seed)
        stand_in = _stand_in(holder, blocks, notes, noise, norm, dtype, returns_tuple, replace)
        if within is not None:
            stand_in = _around(within, holder, stand_in, notes, dtype)
        try:
            notes.output = stand_in(*ids, **arguments)
        except Exception as reason:  # whatever a forward raises that was given something unexpected
            # Its words alone: with this frame the exception would be a cycle, which keeps tensors till a collection.
            why = why or f"{type(reason).__name__}: {reason}"
            continue
        # A block's tuple that is taken for a tensor, or the other way round, gives the next one something else.
        if all(torch.equal(one, two) for one, two in zip(notes.returned, notes.given[1:], strict=False)):
            return notes
    why = why or "blocks are not given what those before them return"
    raise RuntimeError(f"its forward does not run in a trial ({why})")


def _width(holder: Any) -> int:
    """Return the width of the embeddings that a holder takes."""
    find = getattr(holder, "get_input_embeddings", None)
    embeddings: Any = find() if callable(find) else None
    inside = [] if embeddings is None else embeddings.modules()  # an adapter may be around it
    width = next((module.embedding_dim for module in inside if hasattr(module, "embedding_dim")), None)
    if not isinstance(width, int):
        raise RuntimeError(f"{_torch.own_class(holder).__name__} has no input embeddings that say their width")
    return width


def _stand_in(
    holder: nn.Module,
    blocks: str,
    notes: _Notes,
    noise: torch.Generator,
    norm: str,
    dtype: torch.dtype,
    returns_tuple: bool,
    replace: Callable[[nn.Module], nn.Module] | None,
) -> nn.Module:
    """Return a copy of the holder with other children."""
    copied = copy_without_hooks(holder)
    children: dict[str, nn.Module] = {}
    for name, child in holder.named_children():
        if name == blocks:
            own = {"_notes": notes, "_noise": noise, "_returns_tuple": returns_tuple}
            stands = (_Block(block, **own) for block in child.children())
            children[name] = nn.ModuleList(stands)
        elif replace is not None and not hasattr(child, "embedding_dim"):
            children[name] = replace(child)
        else:
            children[name] = (_Constant if name == norm else _Child)(name, child, notes, dtype)
    copied.__dict__["_modules"] = children
    return copied


def _around(module: nn.Module, holder: nn.Module, stand_in: nn.Module, notes: _Notes, dtype: torch.dtype) -> nn.Module:
    """Return a copy of ``module`` with ``stand_in`` for the holder, and children beside it that compute nothing."""
    if module is holder:
        return stand_in
    copied = copy_without_hooks(module)
    copied.__dict__["_modules"] = {
        name: _around(child, holder, stand_in, notes, dtype)
        if any(inner is holder for inner in child.modules())
        else _Child(name, child, notes, dtype)
        for name, child in module.named_children()
    }
    return copied


def copy_without_hooks(module: nn.Module) -> nn.Module:
    """Return a shallow copy, whose calls the user's hooks do not see; the module stays as it is.

    Nor is what TRL puts around its forward in the copy: it is bound to the module itself, and says what it wraps.
    """
    kind: Any = _torch.own_class(module)
    copied: nn.Module = object.__new__(kind)
    copied.__dict__.update(module.__dict__)
    if inspect.unwrap(copied.forward, stop=lambda function: function is kind.forward) is kind.forward:
        copied.__dict__.pop("forward", None)
    for key in (_torch.COMPILED_CALL, "_output_capturing_hooks_installed"):  # a mark of transformers, of its hooks
        copied.__dict__.pop(key, None)
    copied.__dict__.update({key: OrderedDict() for key in module.__dict__ if key.endswith("_hooks")})
    return copied


# Masks


@dataclass(frozen=True)
class MaskTrial:
    """Ways in which a language model makes masks and positions."""

    keeps_apart: bool
    """Packed documents, whose positions begin at 0 each, do not see each other."""
    takes_kinds: bool
    """The model takes a dict of masks, one for each kind of its layers."""
    counts_by_mask: bool
    """The model counts positions by the mask where it is given none, so padding before tokens moves them."""


def try_masks(model: Any, attention: Iterable[str]) -> MaskTrial:
    """Return how ``model`` makes masks; ``attention``: names of its modules of attention, which lie in its blocks.

    Raises:
        ValueError: it cannot be told. A mask that lets packed documents see each other fails nowhere, and trains wrong.
    """
    with _torch.real_tensors(), torch.no_grad():  # also where the model is simulated
        try:
            holder, blocks = list_of(model, attention)
            packed = torch.arange(LENGTH).remainder(LENGTH // 2).unsqueeze(0)  # (1, length)
            masks = run_holder(holder, blocks, position_ids=packed).masks
            padded = torch.ones(1, LENGTH, dtype=torch.int64)
            padded[:, : LENGTH // 4] = 0
            counted = run_holder(holder, blocks, attention_mask=padded).positions
        except RuntimeError as error:
            raise ValueError(
                f"context: whether {_torch.own_class(model).__name__} keeps packed documents apart cannot be told: "
                f"{error}; leave out context"
            ) from error
        return MaskTrial(
            keeps_apart=bool(masks) and not any(map(_crosses, masks)),
            takes_kinds=_takes_kinds(model, holder, blocks),
            counts_by_mask=not counted or any(not torch.equal(ids, torch.arange(LENGTH)) for ids in counted),
        )


def list_of(model: nn.Module, attention: Iterable[str]) -> tuple[nn.Module, str]:
    """Return the module that runs the blocks, and the name of its attribute that lists them."""
    modules, lists = dict(names.named_modules(model)), set()
    for name in attention:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
        lists.add(".".join(parts[:place]))
    if len(lists) != 1 or not isinstance(modules.get(listed := lists.pop()), nn.ModuleList):
        raise RuntimeError("its attention does not lie in one list of blocks")
    above, _, attribute = listed.rpartition(".")
    return modules[above], attribute


def _crosses(mask: torch.Tensor | None) -> bool:
    """True if the second document may see the first."""
    if mask is None:
        return True
    seen = mask[0, 0, LENGTH // 2 :, : LENGTH // 2]  # (queries of the second, keys of the first)
    return bool(seen.any()) if mask.dtype == torch.bool else bool((seen > torch.finfo(mask.dtype).min / 2).any())


def _takes_kinds(model: Any, holder: nn.Module, blocks: str) -> bool:
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    masks: Mapping[str, torch.Tensor] = {kind: torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool) for kind in kinds}
    try:
        seen = run_holder(holder, blocks, attention_mask=masks).masks
    except RuntimeError:
        return False
    return bool(seen) and all(any(mask is known for known in masks.values()) for mask in seen)


# What follows the blocks


def find_reader(model: nn.Module, attention: Iterable[str]) -> str | None:
    """Return why what follows the blocks of ``model`` needs more than one position at a time; None: it does not.

    Logits of a position are those of its hidden states, and a label belongs to the position before it.

    ``attention``: names of its modules of attention, which lie in its blocks. Raises RuntimeError if it cannot be told.
    """
    with _torch.real_tensors(), torch.no_grad():
        holder, blocks = list_of(model, attention)
        if holder is model:
            return None

        def outputs(**inputs: Any) -> list[list[torch.Tensor]]:
            passes = (run_holder(holder, blocks, within=model, changed=place, **inputs) for place in (None, _PLACE))
            return [_torch.tensors_in(_plain(notes.output)) for notes in passes]

        hidden, others = (1, LENGTH, _width(holder)), [place for place in range(LENGTH) if place != _PLACE]
        plain, changed = outputs()
        for one, two in zip(plain, changed, strict=True):
            if one.shape[1:2] != (LENGTH,) or not torch.equal(one[:, others], two[:, others]):
                return "what follows its blocks pools, or compares, positions"
        if all(output.shape == hidden for output in plain):
            return None
        if "labels" not in inspect.signature(model.forward).parameters:
            return "it takes no labels, so which positions its loss compares cannot be told"
        labels = torch.full((1, LENGTH), -100)
        labels[:, _PLACE + 1] = 0
        losses = [[output for output in one if output.ndim == 0] for one in outputs(labels=labels)]
        same = all(torch.equal(one, two) for one, two in zip(*losses, strict=True))
        return "its labels are not those of the next token" if same else None


# The norm behind the last block


def last_norm(modules: Mapping[str, nn.Module], blocks: Sequence[str]) -> str | None:
    """Return the name of the norm that alone is given what the last of ``blocks`` returns; None: none was seen.

    Such a norm may be given a part of the tokens, as the blocks are, if it computes each token by itself. It is tried
    at one token and at several. Where a forward goes another way at other lengths, the pass itself notices that its
    norm was not called, see ``sequence``. ``blocks`` lie in one list.
    """
    above, _, attribute = blocks[0].rpartition(".")[0].rpartition(".")
    holder = modules[above]
    with _torch.real_tensors(), torch.no_grad():
        for name, child in holder.named_children():
            if _is_norm_of_tokens(names.unwrap(child)) and _alone_reads(holder, attribute, name):
                return f"{above}.{name}" if above else name
    return None


def _is_norm_of_tokens(module: nn.Module) -> bool:
    """True for vectors alone that scale or shift, where a token's result does not depend on other tokens."""
    sizes = [parameter.ndim for parameter in module.parameters()]
    if not sizes or max(sizes) != 1:
        return False
    tried, noise = copy_without_hooks(module), torch.Generator().manual_seed(0)
    for kind in ("_parameters", "_buffers"):
        held = tried.__dict__[kind]
        tried.__dict__[kind] = {
            key: None if t is None else torch.rand(t.shape, generator=noise).to(t.dtype) for key, t in held.items()
        }
    width = next(parameter.shape[0] for parameter in module.parameters())
    tokens = torch.randn(2, LENGTH, width, generator=noise)
    try:
        full = tried(tokens)
        part = torch.cat([tried(tokens[:, :3]), tried(tokens[:, 3:])], 1)
    except Exception:  # it is given what it does not take
        return False
    return bool(full.shape == tokens.shape) and torch.allclose(full, part, rtol=1e-4, atol=1e-5)


def _alone_reads(holder: nn.Module, blocks: str, norm: str) -> bool:
    """True if a child is called once, with what the last block returned, and nothing else depends on that."""
    count = sum(1 for _ in holder.get_submodule(blocks).children())
    try:
        for length in (1, LENGTH):
            one, two = (run_holder(holder, blocks, length, norm=norm, seed=seed) for seed in (0, 1))
            for notes in (one, two):
                calls = notes.calls.get(norm, [])
                if len(notes.returned) != count or [torch.equal(call, notes.returned[-1]) for call in calls] != [True]:
                    return False
            # The norm gives the same in both passes, so whatever differs was read past it.
            first, second = (_torch.tensors_in(_plain(notes.output)) for notes in (one, two))
            if len(first) != len(second) or not all(map(torch.equal, first, second)):
                return False
    except RuntimeError:
        return False
    return True


def _plain(output: Any) -> Any:
    """Return the values of an output of transformers, which torch's tree functions do not know as a dict."""
    return dict(output) if isinstance(output, Mapping) else output
