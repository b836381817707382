"""Ask by trial whether a model computes from other samples of its batch, of which each rank has a part.

Before the first pass with gradients a copy with random weights runs on the CPU: on two parts a and b of a few samples
that the pass is given, and on both.

- What has a row for each sample must have the rows of a and b, in whatever output it lies; so must gradients of rows.
- Any other number must be a sum or a mean over samples (``is_mean_or_sum``), whether returned or left on a module.
- A buffer must not change with the samples at all: ranks do not add it up.

Of blocks alike, one is kept. Batch norms compute with their running statistics, since ``shard()`` names them by class,
and losses that ``balancing`` computes over ranks are left out. The first rank tries, and others need not wait for it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.distributed import made_on_cpu
from trueshard.errors import one_line, warn_user
from trueshard.model import names
from trueshard.model.names import Index
from trueshard.parallel import balancing
from trueshard.parallel.module_copies import (
    CheapMatrices,
    copy_on_cpu,
    copy_without_memory,
    kind_of,
    random_values,
    replaced_forward,
)
from trueshard.parallel.random_streams import random_states, set_random_states
from trueshard.parallel.tensor_comparison import NotTried
from trueshard.plans import Plan

LENGTH = 32
"""Tokens of a sample on which a model is tried first."""
_MOST = 1 << 20
"""Numbers, a token being 256, that a trial is given at most."""
_LARGEST = 1 << 28
"""Elements of stacked matrices that a trial computes with at most."""
_FAR = 1e-4
"""Difference, over the largest element, that is no rounding."""
_SETTLED = (_torch.BatchNorm, nn.MultiheadAttention, nn.RNNBase)
"""Modules that run in evaluation mode: told by class, or drawing where no function shows it."""
_A, _B = (0, 1), (2, 3)

Key = tuple[str, str, str]
"""("output" | "attribute" | "buffer" | "gradient", name of a module, what of it)."""


def is_mean_or_sum(a: Any, b: Any, both: Any, more: Any, eps: float = 0.0) -> bool:
    """Return True if numbers of the parts a, b, (a, b) and (a, a, b) are sums, or means, over samples.

    A sum adds up. A mean has weights, which the first three give and the fourth must fit. A loss with negatives from
    the batch, or with a product of means, is neither. ``eps``: of the dtype that computed them, if below float32's.
    """
    a, b, both, more = (torch.as_tensor(value).detach().double() for value in (a, b, both, more))
    slack = 64 * max(eps, torch.finfo(torch.float32).eps) * torch.maximum(a.abs(), b.abs()).max()
    adds_up = ((both - a - b).abs() <= slack) & ((more - 2 * a - b).abs() <= slack)
    share = torch.where((a - b).abs() > slack, (both - b) / (a - b), 0.5)  # the weight of a in (a, b)
    off = (more - (2 * share * a + (1 - share) * b) / (1 + share)).abs()
    between = (both >= torch.minimum(a, b) - slack) & (both <= torch.maximum(a, b) + slack)
    return bool((adds_up | (between & (off <= 4 * slack))).all())


class BatchTrial:
    """Trials of one model, one for each method that the user calls."""

    def __init__(self, index: Index, plan: Plan) -> None:
        self.model = copy_without_memory(index.root)
        modules = dict(names.named_modules(self.model))
        self.names = {id(module): name for name, module in modules.items()}
        self.biases = {id(p) for name, p in self.model.named_parameters() if name.endswith("bias") and p.ndim == 1}
        self.left_out: dict[int, Any] = {}
        """``id`` of each block that is left out, since one before it is alike."""
        kinds = set()
        for block in (modules.get(unit.name) for unit in plan.units if unit.kind == "block"):
            if block is not None and (kind := kind_of(block)) in kinds:
                self.left_out[id(block)] = None
            elif block is not None:
                kinds.add(kind)
        self.files = balancing.files_of(index.root)
        self.asked: set[tuple[str, bool]] = set()
        """Methods that were tried, and whether in training mode."""
        self.has_warned = False

    @torch.compiler.disable
    def ask(self, method: str, args: Any, kwargs: Any, training: bool) -> str:
        """Try a method on samples of what it is called with; warn of what is found, and say it in a sentence."""
        self.asked.add((method, training))
        why, what = "", f"batch, {type(self.model).__name__}.{method}"
        try:
            with self._apart():
                left_out = (self.left_out, {}) if self.left_out else ({},)
                for ways in itertools.product((True, False), left_out, (torch.float64, torch.float32), (True, False)):
                    try:
                        faults = _Passes(self, method, [args, kwargs], training, *ways).faults()
                        break
                    except Exception as error:  # whatever a forward raises that was given something unexpected
                        why = why or (str(error) if isinstance(error, NotTried) else one_line(error, 120))
                else:
                    return f"{what}: not tried ({why})"
        except Exception as error:
            return f"{what}: not tried ({one_line(error, 120)})"
        if not faults:
            return f"{what}: no sample depends on others of its batch"
        shown = f"{'; '.join(faults[:4])}{f'; and {len(faults) - 4} more' * (len(faults) > 4)}"
        if not self.has_warned:
            self.has_warned = True
            warn_user(
                f"{type(self.model).__name__} computes for a sample from the others of its batch: {shown}. Each rank "
                "has a part of the batch, and computes this from its own samples, which is not what one device "
                "computes: gather or add up over ranks what it is made of (torch.distributed.nn.functional.all_gather, "
                'all_reduce), or leave it out. tensor={"trial": False} turns this check off'
            )
        return f"{what}: samples depend on others of their batch: {shown}"

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Compute on the CPU, with gradients, and leave generators, modes and output of the process as they are."""
        states = random_states(None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_torch.unwatched())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(balancing.left_out(self.files))
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                set_random_states(states)


class _NoDropout(CheapMatrices):
    """Drop nothing at random."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if "dropout" in name and "native" not in name:
            return args[0] if args else kwargs["input"]
        kwargs = kwargs | {"dropout_p": 0.0} if kwargs.get("dropout_p") else kwargs
        return super().__torch_function__(function, kinds, args, kwargs)


class _Alone(_torch.DispatchMode):
    """Refuse to communicate: other ranks may not."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            raise NotTried("it communicates with other ranks by itself")
        return function(*args, **(kwargs or {}))


@dataclasses.dataclass
class _Pass:
    """Values and calls of one pass."""

    values: dict[Key, Any]
    leaves: list[torch.Tensor]
    """Inputs with floats and results of embeddings, for gradients."""
    calls: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]
    """Name of a module → tensors that its first call was given and returned; inner modules first."""


class _Passes:
    """Passes of one copy each on parts of a batch."""

    def __init__(
        self, trial: BatchTrial, method: str, inputs: Any, training: bool,
        cut: bool, left_out: Mapping[int, Any], dtype: torch.dtype, gradients: bool,
    ) -> None:  # fmt: skip
        self.trial, self.method, self.training, self.left_out, self.dtype = trial, method, training, left_out, dtype
        self.inputs, self.gradients = inputs, gradients
        tensors = [tensor for tensor in _torch.tensors_in(self.inputs) if tensor.ndim]
        if not tensors or any(map(_torch.is_fake, tensors)):
            raise NotTried("it is given no tensors")
        if (name := replaced_forward(trial.model)) is not None:
            raise NotTried(f"the forward of {name or type(trial.model).__name__!r} was replaced")
        if any(p.ndim > 2 and p.numel() > _LARGEST for p in trial.model.parameters()):
            raise NotTried("its matrices are large")
        self.size = len(tensors[0])
        ids = [t.shape[1] for t in tensors if t.ndim == 2 and not t.is_floating_point()]
        self.length = ids[0] if ids and cut else 0
        size = sum(t.numel() * (1 if t.is_floating_point() else 256) for t in _torch.tensors_in(self._rows((*_A, *_B))))
        if size > _MOST:
            raise NotTried("its inputs are large")
        self.noise = torch.Generator().manual_seed(0)
        self.weights: dict[int, torch.Tensor] = {}

    def faults(self) -> list[str]:
        """Return what depends on other samples, in words. Raises NotTried if it cannot be told."""
        passes = [self._pass(rows) for rows in (_A, _B, (*_A, *_B))]
        one, two, three = (done.values for done in passes)
        keys = [key for key in three if key in one and key in two]
        rows = [key for key in keys if key[0] == "output" and _rows_dim(one[key], two[key], three[key]) == 0]
        with contextlib.suppress(RuntimeError):  # of outputs that autograd refuses
            for done in passes:
                self._add_gradients(done, rows)
            keys += [key for key in three if key[0] == "gradient" and key in one and key in two]
        open_keys = [key for key in keys if _is_open(key, one[key], two[key], three[key])]
        buffers = [key for key in keys if key[0] == "buffer" and key not in open_keys]
        for row in (*_A, *_B) if buffers else ():  # which change by signs, say, or as nothing that is given
            single = self._pass([row]).values
            open_keys += [key for key in buffers if key not in open_keys and _far(one[key], single.get(key))]
        if not open_keys:
            return []
        passes.append(self._pass((*_A, *_A, *_B)))
        with contextlib.suppress(RuntimeError):
            self._add_gradients(passes[-1], rows)
        four = passes[-1].values
        wrong = [
            key
            for key in open_keys
            if key[0] == "buffer" or (key in four and _depends(*(done.values[key] for done in passes)))
        ]
        if wrong:
            again = self._pass(_A).values
            if any(_far(one[key], again.get(key)) for key in keys if key[0] != "gradient"):
                raise NotTried("it draws random numbers")
        where = self._where(passes) if any(key[0] in ("output", "gradient") for key in wrong) else ""
        return list(dict.fromkeys(self._words(key, where) for key in wrong))

    def _words(self, key: Key, where: str) -> str:
        kind, name, what = key
        modules = dict(names.named_modules(self.trial.model))

        def shown(name: str) -> str:
            return f"{name!r} ({type(modules[name]).__name__})" if name else type(modules[name]).__name__

        if kind in ("attribute", "buffer"):
            return f"the {kind} {what!r} of {shown(name)}"
        of = f"output {what!r}" if what else "output"
        first = f", first in what {shown(where)} returns" if where else ""
        return f"the {of if kind == 'output' else 'gradient of its inputs'}{first}"

    def _where(self, passes: Sequence[_Pass]) -> str:
        """Return the name of the first module whose results depend on other samples, and what it is given does not."""
        for name in passes[2].calls:
            if name and all(name in done.calls for done in passes):
                inputs, outputs = (list(zip(*(done.calls[name][i] for done in passes), strict=False)) for i in (0, 1))
                same = bool(inputs) and not any(_depends(*four) for four in inputs)
                if same and any(_depends(*four) for four in outputs):
                    return name
        return ""

    def _pass(self, rows: Sequence[int]) -> _Pass:
        result, handles = _Pass({}, [], {}), list[Any]()
        copies: list[tuple[str, nn.Module, nn.Module]] = []

        def finish(original: nn.Module, copied: nn.Module) -> None:
            state = copied.__dict__
            state["training"] = self.training and not isinstance(copied, _SETTLED)
            if isinstance(copied, (nn.ModuleList, nn.Sequential)):
                kept = [child for child in state["_modules"].values() if child is not None or not self.left_out]
                state["_modules"] = {str(i): child for i, child in enumerate(kept)}
            for key, value in _plain(copied):
                state[key] = _owned(value, self.dtype)
            copies.append((self.trial.names[id(original)], original, copied))

        def note(name: str, module: nn.Module, args: Any, output: Any) -> Any:
            result.calls.setdefault(name, (_torch.tensors_in(args), [leaf for _, leaf in _leaves(output)]))
            if self.gradients and isinstance(module, nn.Embedding) and not output.requires_grad:
                result.leaves.append(output.detach().requires_grad_())
                return result.leaves[-1].clone()
            return None

        model = copy_on_cpu(self.trial.model, self._parameter, self.dtype, replaced=self.left_out, finish=finish)
        before = {name: {k: b.clone() for k, b in copied.named_buffers(recurse=False)} for name, _, copied in copies}
        for name, _, copied in copies:
            handles.append(copied.register_forward_hook(lambda *call, name=name: note(name, *call)))

        def leaf(tensor: Any) -> Any:
            if not self.gradients or not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                return tensor
            result.leaves.append(tensor.detach().requires_grad_())
            return result.leaves[-1].clone()

        args, kwargs = _torch.mapped(leaf, self._rows(rows))
        call = model if self.method == "forward" else getattr(model, self.method)
        with contextlib.ExitStack() as modes:
            modes.enter_context(_NoDropout())
            modes.enter_context(made_on_cpu())
            if rows == _A:  # a mode costs
                modes.enter_context(_Alone())
            result.values |= {("output", "", key): value for key, value in _leaves(call(*args, **kwargs))}
        for name, original, copied in copies:
            buffers = copied.named_buffers(recurse=False)
            written = {key: b for key, b in buffers if key not in before[name] or not torch.equal(b, before[name][key])}
            result.values |= {("buffer", name, key): leaf for key, leaf in _leaves(written)}
            written = {key: value for key, value in _plain(copied) if original.__dict__.get(key) is not value}
            result.values |= {("attribute", name, key): leaf for key, leaf in _leaves(written)}
        for handle in handles:
            handle.remove()
        return result

    def _add_gradients(self, result: _Pass, rows: Sequence[Key]) -> None:
        """Add gradients of a sum over outputs, whose weights are those of any row."""
        ends = [result.values[key] for key in rows if result.values[key].requires_grad]
        if not ends or not result.leaves:
            return
        noise = torch.Generator().manual_seed(2)
        total = sum((end * torch.randn(end.shape[1:], generator=noise, dtype=torch.float64)).sum() for end in ends)
        gradients = torch.autograd.grad(total, result.leaves, allow_unused=True)
        result.values |= {("gradient", "", str(i)): grad for i, grad in enumerate(gradients) if grad is not None}

    def _parameter(self, original: torch.Tensor) -> nn.Parameter:
        if id(original) not in self.weights:
            self.weights[id(original)] = random_values(original, self.noise, self.dtype, centred=True)
            if id(original) in self.trial.biases:  # of the mean 0, or one expert would get all tokens
                self.weights[id(original)] -= 1
        return nn.Parameter(self.weights[id(original)], requires_grad=False)

    def _rows(self, rows: Sequence[int]) -> Any:
        """Return the inputs with these samples; further ones than there are begin at another place."""

        def row(tensor: torch.Tensor, number: int) -> torch.Tensor:
            value, round_ = tensor[number % self.size], number // self.size
            value = value.roll(round_, -1) if value.ndim else value
            return value * (1 + round_ / 4) if value.is_floating_point() else value

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf)
            if leaf.ndim and len(leaf) == self.size:
                leaf = torch.stack([row(leaf, number) for number in rows])
            if self.length > LENGTH:
                for dim in range(1, leaf.ndim) if not leaf.is_floating_point() or leaf.ndim == 4 else (1,):
                    if leaf.ndim > dim and leaf.shape[dim] == self.length:
                        leaf = leaf.narrow(dim, 0, LENGTH)
            return _cast(leaf, self.dtype)  # of a few rows: the batch may be large, and on a GPU

        return _torch.mapped(take, self.inputs)


def _plain(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module that a forward may write numbers to, by name."""
    return [(key, value) for key, value in names.plain_attributes(module).items() if not key.endswith("_hooks")]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield tensors and numbers in nested containers, with their places."""
    if isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _leaves(vars(value), path)


def _owned(value: Any, dtype: torch.dtype) -> Any:
    """Return an attribute that a copy may write to."""
    if isinstance(value, torch.Tensor):
        return _cast(value, dtype)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) is dict:
        return {key: _owned(item, dtype) for key, item in value.items()}
    return type(value)(_owned(item, dtype) for item in value) if type(value) in (list, tuple, set) else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        result = leaf.detach().cpu()
        return result.to(dtype, copy=True) if result.is_floating_point() else result.clone()

    return _torch.mapped(cast, value)


# Comparing


def _rows_dim(a: Any, b: Any, both: Any) -> int | None:
    """Return the dimension in which ``both`` is as long as ``a`` and ``b`` together; None: none, or several."""
    if not all(isinstance(value, torch.Tensor) for value in (a, b, both)) or not a.ndim == b.ndim == both.ndim:
        return None
    dims = [dim for dim in range(a.ndim) if not a.shape[dim] == b.shape[dim] == both.shape[dim]]
    grown = dims[:1] if len(dims) == 1 else []
    return next((dim for dim in grown if both.shape[dim] == a.shape[dim] + b.shape[dim]), None)


def _far(one: Any, two: Any) -> bool:
    """Return True if two tensors or numbers differ by more than rounding. What is not finite says nothing."""
    if one is None or two is None:
        return False
    first, second = (torch.as_tensor(value).detach().double() for value in (one, two))
    if first.shape != second.shape:
        return True
    finite = first.isfinite() & second.isfinite()
    first, second = first[finite], second[finite]
    return bool(len(first)) and float((first - second).abs().max()) > _FAR * float(first.abs().max().clamp_min(1e-30))


def _is_open(key: Key, a: Any, b: Any, both: Any) -> bool:
    """Return True unless three results show that nothing depends on other samples."""
    if not any(isinstance(value, torch.Tensor) for value in (a, b, both)):
        return not a == b == both
    if key[0] != "buffer" and (dim := _rows_dim(a, b, both)) is not None:
        return _differs_in_rows(a, b, both, dim)
    return _far(a, b) or _far(a, both)


def _differs_in_rows(a: torch.Tensor, b: torch.Tensor, both: torch.Tensor, dim: int) -> bool:
    joined = torch.cat([a, b], dim)
    if both.shape[dim] != len(_A) + len(_B):  # tokens of all samples, maybe in another order
        joined, both = joined.sort(dim).values, both.sort(dim).values
    return _far(joined, both)


def _depends(a: Any, b: Any, both: Any, more: Any) -> bool:
    """Return True if results of a, b, (a, b) and (a, a, b) depend on other samples."""
    if (dim := _rows_dim(a, b, both)) is not None:
        return _differs_in_rows(a, b, both, dim)
    values = [torch.as_tensor(value).detach().double() for value in (a, b, both, more)]
    if len({value.shape for value in values}) > 1 or not all(bool(value.isfinite().all()) for value in values):
        return False
    return (_far(a, b) or _far(a, both)) and not is_mean_or_sum(values[0], values[1], values[2], values[3])
