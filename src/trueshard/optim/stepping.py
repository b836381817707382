"""Hooks around ``step()`` of every optimizer that holds sharded parameters: the same object, the same call.

Hooks on the optimizer's own step show it plain tensors and put the DTensors back, between the user's hooks, which see
DTensors. Parameters of a group that works on shards are stepped by the call itself. Those that need an owner come in
batches: all but the last are stepped before the call, each from the same settings, so that what a step changes in its
groups (a count) is changed once.

``[Note: Swap in step]`` DTensor's dispatch is most of what a step of small tensors costs the host, and refuses many
optimizers. So for the time of a step the groups and state of the user's own optimizer hold plain tensors over the very
memory of the shards. Our pre-hook must be the last and our post-hook the first, or the user's hooks would see plain
tensors. An exception skips post-hooks; so a function over ``step`` puts DTensors back whatever happens, and so does
``state_dict()``, which somebody may call after a step that failed before there was such a function.

What an optimizer is doing is the list ``Stepping.states``, outermost first; empty: idle, and it holds DTensors.

- ``STEP``: a step runs; the class's own ``step`` sees plain tensors.
- ``NESTED``: a step inside that step, of a subclass that calls ``super().step()``. It changes nothing.
- ``CLOSURE``: the user's closure runs inside the step, and sees DTensors.

While there is a sharded model, every optimizer is looked at before it steps:

- One that holds a parameter from before sharding, or one of the gathered copies, would train nothing: an error says so.
- One that was made from a sharded model's parameters and never given to ``shard()`` is bound before its first step, so
  that it steps as exactly as the others.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trueshard import _torch
from trueshard.distributed import all_reduce, device_of, gather_objects
from trueshard.errors import TrueShardRuntimeError, own_errors, warn_user
from trueshard.model import registry
from trueshard.model.regions import has_whole_rows
from trueshard.optim.classify import Verdict, classify
from trueshard.optim.exact import are_exact
from trueshard.optim.local_params import GroupStandIns, Placeholder, StandIn, WholeTensor, swapped
from trueshard.optim.owners import Owned, Owners, Place
from trueshard.optim.rebind import IsRows, by_shape, each_in, family, is_container
from trueshard.optim.runs import BINDING, StepRuns
from trueshard.optim.seeded_random import DRAWS, drawn_from, torch_states
from trueshard.optim.ties import check_added_up
from trueshard.optim.trial import ON_STAND_INS


def watch_steps() -> Callable[[], None]:
    """Check every optimizer before it steps; return what ends that."""
    return register_optimizer_step_pre_hook(torch.compiler.disable(_check)).remove


@torch.compiler.disable
def drop_unreduced(zeroed: torch.optim.Optimizer | nn.Module) -> None:
    """Drop, after ``zero_grad`` of an optimizer or module, gradients of its parameters that are not reduced yet."""
    for model in registry.models():
        if model.has_pending:
            held = _members(zeroed) if isinstance(zeroed, torch.optim.Optimizer) else zeroed.parameters()
            model.drop_unreduced(set(map(id, held)))


def _members(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, ON_STAND_INS):
        return
    if _closure(args, kwargs) is None:  # else the step's last backward is still to come, in the closure
        _refuse_unreduced(optimizer)
    signature = [list(map(id, group["params"])) for group in optimizer.param_groups]
    for model in registry.models():
        if model.seen.get(optimizer) != signature:
            _refuse_unstepped(optimizer, model)
            if _holds(optimizer, model):
                model.stepped_by.add(optimizer)
                if not is_container(optimizer):
                    bind(optimizer)
            model.seen[optimizer] = signature


def _holds(optimizer: torch.optim.Optimizer, model: registry.ShardedModel) -> bool:
    held = set(map(id, model.parameters()))
    return any(id(parameter) in held for parameter in _members(optimizer))


def _closure(args: Any, kwargs: Any) -> Any:
    """Return the closure among the arguments of a call of ``step``, of which the first is the optimizer; or None."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _refuse_unreduced(optimizer: torch.optim.Optimizer) -> None:
    for model in registry.models():
        if model.ties:
            check_added_up(optimizer, model.ties)
        if model.has_pending and _holds(optimizer, model):
            raise TrueShardRuntimeError(
                f"{type(optimizer).__name__} would step without gradients that each rank has summed and that are not "
                "reduced: since the last step every backward ran under accumulate(model, last=False). Run the last one "
                "under last=True, or drop them with zero_grad()"
            )


def _refuse_unstepped(optimizer: torch.optim.Optimizer, model: registry.ShardedModel) -> None:
    """Raise RuntimeError if the optimizer holds a parameter that nothing computes with any more."""
    plain = [parameter for parameter in _members(optimizer) if not isinstance(parameter, DTensor)]
    for parameter in plain:
        if (name := model.replaced.get(parameter)) is not None:
            raise TrueShardRuntimeError(
                f"{type(optimizer).__name__} holds {name!r} as it was before shard(), so its step would train nothing; "
                "give the optimizer to shard(), or make it from model.parameters() after shard()"
            )
    gathered = {id(g): name for name, _, g in _torch.gathered_parameters(model.root.modules())} if plain else {}
    for parameter in plain:
        if (name := gathered.get(id(parameter))) is not None:
            raise TrueShardRuntimeError(
                f"{type(optimizer).__name__} was made while {name!r} was gathered (between forward and backward), "
                "so its step would train nothing; make it before the forward, or give it to shard()"
            )


def _binding(optimizer: torch.optim.Optimizer) -> Stepping | None:
    binding: Stepping | None = vars(optimizer).get(BINDING)
    return binding


def bind(optimizer: torch.optim.Optimizer, verdicts: list[Verdict] | None = None) -> Stepping:
    """Let ``optimizer`` step without DTensor dispatch, exactly, from now on. Raises the ValueError of ``classify``."""
    binding = _binding(optimizer)
    if binding is None:
        binding = Stepping(optimizer, _verdicts(optimizer) if verdicts is None else verdicts)
        setattr(optimizer, BINDING, binding)
    return binding


def _verdicts(optimizer: torch.optim.Optimizer) -> list[Verdict]:
    members = _members(optimizer)
    return classify(optimizer, exact=are_exact(members), inside=not all(map(has_whole_rows, members)))


@dataclass(frozen=True)
class Role:
    """Role of this rank in keeping the state of a sharded parameter."""

    is_mine: bool | None
    """True if this rank owns the parameter and has all of its state; None: each rank has the state of its shard."""
    is_rows: IsRows
    """Rule that tells which tensors of the state are sharded like the parameter, where each rank has some."""


def roles_of(optimizer: torch.optim.Optimizer) -> dict[int, Role]:
    """Return by ``id`` the role of each sharded parameter of ``optimizer``, which is bound. No communication."""
    if not any(isinstance(parameter, DTensor) for parameter in _members(optimizer)):
        return {}
    return bind(optimizer).roles(optimizer)


class State(enum.Enum):
    """State of an optimizer; the file's docstring is the glossary."""

    STEP = enum.auto()
    NESTED = enum.auto()
    CLOSURE = enum.auto()


class Stepping:
    """The hooks of one optimizer, and what they keep from step to step."""

    def __init__(self, optimizer: torch.optim.Optimizer, verdicts: list[Verdict]) -> None:
        self.states: list[State] = []
        self._verdicts = verdicts
        self._groups = list(optimizer.param_groups)
        self._stand_ins: list[GroupStandIns] = []
        """Stand-ins of each group in the last step: reused while its parameters and their memory stay."""
        self._owners = Owners()
        self._swapped = contextlib.ExitStack()
        """Closing it shows DTensors again; nothing happens if they are shown."""
        self._sending: Iterator[Any] = iter(())
        """Generator that sends the last batch back, which the call itself steps; empty where it steps none."""
        self._runs: StepRuns | None = None
        """Runs of this step, where it takes more than one."""
        self._watches_random = any(v.rows is not None for v in verdicts) and not any(v.draws for v in verdicts)
        self._random: Any = None
        """State of torch's generator when the optimizer began to compute; valid inside a step."""
        self._losses: list[tuple[Any, Any]] = []
        """(averaged loss that the optimizer got, the user's own loss) of each call of the closure in this step."""
        _torch.make_hookable(optimizer)
        self._before_handle = optimizer.register_step_pre_hook(torch.compiler.disable(self._before))
        after = optimizer.register_step_post_hook(torch.compiler.disable(self._after))
        _torch.step_hooks(optimizer)[1].move_to_end(after.id, last=False)
        # Whoever looks at the optimizer after a step that failed before it was guarded.
        optimizer.register_state_dict_pre_hook(lambda _: self._abandon(), prepend=True)
        self._guard(optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of an optimizer is bound anew."""

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an exception in a step leave DTensors, and hooks that the user set since come before ours.

        Like a scheduler's, the function put over ``step`` holds the optimizer weakly: it is freed when it is let go of.
        """
        before, handle = _torch.step_hooks(optimizer)[0], self._before_handle.id
        inner = optimizer.__dict__.get("step")  # a scheduler's
        weak = weakref.ref(optimizer)

        def guarded(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            before.move_to_end(handle)
            self._abandon()
            try:
                with own_errors():
                    result = type(this).step(this, *args, **kwargs) if inner is None else inner(*args, **kwargs)
                return self._with_own_losses(result)
            finally:
                self._abandon()
                self._losses = []

        @functools.wraps(type(optimizer).step if inner is None else inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            this = weak()
            assert this is not None
            return guarded(this, *args, **kwargs)

        replaced: Any = torch.compiler.disable(step, recursive=False)
        replaced.__func__ = torch.compiler.disable(guarded, recursive=False)  # schedulers take a bound method apart
        optimizer.step = replaced  # type: ignore[method-assign]

    def roles(self, optimizer: torch.optim.Optimizer) -> dict[int, Role]:
        """Return by ``id`` the role of each sharded parameter."""
        self._follow(optimizer)
        roles = {
            id(parameter): Role(None, verdict.is_rows)
            for group, verdict in zip(self._groups, self._verdicts, strict=True)
            for parameter in group["params"]
            if isinstance(parameter, DTensor)
        }
        return roles | {id(owned.parameter): Role(owned.is_mine, by_shape) for owned in self._owned()}

    # What is stepped

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow groups that were added, removed or loaded, and parameters or memory that were replaced."""
        groups = optimizer.param_groups
        if len(groups) != len(self._groups) or not all(map(operator.is_, groups, self._groups)):
            self._verdicts = _verdicts(optimizer)
            self._groups = list(groups)
        now = [(group["params"], verdict) for group, verdict in zip(groups, self._verdicts, strict=True)]
        if len(now) != len(self._stand_ins):
            self._stand_ins = [GroupStandIns(*group) for group in now]
        for g, group in enumerate(now):
            if not self._stand_ins[g].fit(*group):
                self._stand_ins[g] = GroupStandIns(*group)

    def _owned(self) -> list[Owned]:
        cut = [(parameter, (g, i)) for g, group in enumerate(self._stand_ins) for i, parameter in group.owned]
        return self._owners.of(cut) if cut else []

    # The hooks

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self.states:
            self.states.append(State.NESTED)
            return None
        self.states.append(State.STEP)
        self._follow(optimizer)
        owned = self._owned()
        is_seeded = any(verdict.seeded for verdict in self._verdicts)
        if (closure := _closure(args, kwargs)) is not None:
            closure = self._wrap(optimizer, closure, first=bool(owned) or is_seeded)
            if len(args) > 1:
                args = (args[0], closure, *args[2:])
            else:
                kwargs = {**kwargs, "closure": closure}
        if self._watches_random:
            self._random = _generators()
        local = [group.now(optimizer.state) for group in self._stand_ins]
        if is_seeded or owned:
            self._runs = StepRuns(optimizer)
            step_runs = self._step_seeded if is_seeded else self._step_owned
            step_runs(optimizer, local, owned, args, kwargs)
            self._runs.note_gradients()
        else:
            self._show_local(optimizer, local)
        return args, kwargs

    def _show_local(self, optimizer: torch.optim.Optimizer, local: list[list[StandIn]]) -> None:
        in_parts = all(verdict.elementwise for verdict in self._verdicts)
        self._swapped.enter_context(swapped(optimizer, local, in_parts=in_parts))

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.states and self.states.pop() is State.STEP:
            self._swapped.close()
            for _ in self._sending:
                raise AssertionError("the last batch of a step is followed by another")
            if self._runs is not None:
                self._runs.finish()
            self._runs = None
            self._check_random(optimizer)
            for model in registry.models():
                for function in model.after_step if optimizer in model.stepped_by else ():
                    function(optimizer)

    def _abandon(self) -> None:
        """Give up a step that an exception cut short: what was not updated stays as it is."""
        if State.CLOSURE not in self.states:  # the user looks at the optimizer, in the middle of a step that goes on
            self.states = []
            self._sending, self._runs = iter(()), None
            self._swapped.close()

    def _check_random(self, optimizer: torch.optim.Optimizer) -> None:
        if self._watches_random and self._random != _generators():
            self._watches_random = False
            warn_user(
                f"{type(optimizer).__name__} drew random numbers in this step, which it did not when it was tried: "
                "ranks draw their own, so from here on training depends on the number of ranks"
            )

    # Parameters with an owner

    def _step_owned(
        self, optimizer: torch.optim.Optimizer, local: list[list[StandIn]], owned: list[Owned], args: Any, kwargs: Any
    ) -> None:
        """Run all but the last batch of the step, and show the last to the call itself.

        What is not in a batch leaves a placeholder: an optimizer may go by the place of a parameter in its group.
        """
        self._settle_state(optimizer, owned)
        groups = optimizer.param_groups
        nothing_local = all(isinstance(stand_in, Placeholder) for group in local for stand_in in group)
        walk = self._owners.walk(owned, groups, [verdict.decoupled for verdict in self._verdicts])
        for members, last in walk:
            batch = [group.placeholders() for group in self._stand_ins]
            for member, leaf in members:
                batch[member.place[0]][member.place[1]] = WholeTensor(member.parameter, leaf)
            if last and nothing_local:
                self._sending = walk
                self._swapped.enter_context(swapped(optimizer, batch))
                return
            if members:
                self._step_ahead(optimizer, batch, args, kwargs)
        self._swapped.enter_context(swapped(optimizer, local))

    def _step_ahead(self, optimizer: torch.optim.Optimizer, batch: list[list[StandIn]], args: Any, kwargs: Any) -> None:
        """Step ``batch`` before the call itself, from the same settings as it."""
        step: Any = type(optimizer).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without torch's, which calls hooks
        assert self._runs is not None
        with self._runs.ahead(), contextlib.closing(self._swapped):
            self._swapped.enter_context(swapped(optimizer, batch))
            self._runs.note_gradients()
            step(optimizer, *args[1:], **kwargs)

    def _step_seeded(
        self, optimizer: torch.optim.Optimizer, local: list[list[StandIn]], owned: list[Owned], args: Any, kwargs: Any
    ) -> None:
        """Step each parameter by itself, with draws that follow from seed, step and its place; the call finds none."""
        self._settle_state(optimizer, owned)
        groups = optimizer.param_groups
        seed, number = _next_draws(optimizer)
        nothing = [group.placeholders() for group in self._stand_ins]

        def step_alone(place: Place, stand_in: StandIn) -> None:
            batch = [list(group) for group in nothing]
            batch[place[0]][place[1]] = stand_in
            with drawn_from(seed, number, *place):
                self._step_ahead(optimizer, batch, args, kwargs)

        for members, _ in self._owners.walk(owned, groups, [False] * len(groups)):
            for member, leaf in members:
                step_alone(member.place, WholeTensor(member.parameter, leaf))
        for g, stand_ins in enumerate(local):
            for i, stand_in in enumerate(stand_ins):
                if not isinstance(stand_in, Placeholder):
                    step_alone((g, i), stand_in)
        self._swapped.enter_context(swapped(optimizer, nothing))

    def _settle_state(self, optimizer: torch.optim.Optimizer, owned: list[Owned]) -> None:
        """Give state from elsewhere (before sharding, a checkpoint) to its owner alone. Collective where it is cut."""
        for member in family(optimizer):
            for record in owned:
                if (entries := member.state.get(record.parameter)) is None:
                    continue
                full = _gather(entries)
                if record.is_mine:
                    member.state[record.parameter] = full
                else:
                    del member.state[record.parameter]

    # Closures

    def _wrap(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *, first: bool) -> Callable[[], Any]:
        """Wrap the user's closure, which meets DTensors; ``first``: call it now, before its gradients travel."""
        closure = self._checked(optimizer, closure)
        if first:
            with torch.enable_grad():
                loss = closure()
            return lambda: loss

        @functools.wraps(closure)
        def wrapped() -> Any:
            self._check_random(optimizer)
            self._swapped.close()
            self.states.append(State.CLOSURE)
            try:
                loss = closure()
            except BaseException:
                self.states = []
                raise
            self.states.pop()
            self._follow(optimizer)
            self._show_local(optimizer, [group.now(optimizer.state) for group in self._stand_ins])
            if self._watches_random:
                self._random = _generators()
            return loss

        return wrapped

    def _checked(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        if any(verdict.rows is not None for verdict in self._verdicts):
            closure = self._average_loss(optimizer, closure)

        @functools.wraps(closure)
        def checked() -> Any:
            loss = closure()
            _refuse_unreduced(optimizer)
            return loss

        return checked

    def _average_loss(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Tell the optimizer the loss of the whole batch, as on one device: its update may depend on it."""

        @functools.wraps(closure)
        def averaged() -> Any:
            loss = closure()
            mesh = next((p.device_mesh for p in _members(optimizer) if isinstance(p, DTensor)), None)
            if mesh is None or isinstance(loss, DTensor) or not isinstance(loss, (float, torch.Tensor)):
                return loss
            total = torch.as_tensor(loss).detach().to(device_of(mesh), torch.float64, copy=True)
            mean = all_reduce(total, mesh) / mesh.size()
            average = float(mean) if isinstance(loss, float) else mean.to(loss)
            self._losses.append((average, loss))
            return average

        return averaged

    def _with_own_losses(self, result: Any) -> Any:
        """Return the ``result`` of a step with the user's own losses in place of averaged ones."""
        if type(result) in (tuple, list):
            return type(result)(map(self._with_own_losses, result))
        return next((loss for average, loss in self._losses if average is result), result)


def _next_draws(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the seed, which is rank 0's when it sharded, and the number of this step. Collective at the first."""
    groups = optimizer.param_groups
    seed, number = next((group[DRAWS] for group in groups if DRAWS in group), (None, 0))
    if seed is None:
        model = registry.owner_of(_members(optimizer))
        seed = (torch.initial_seed() if model is None else model.seed) & (1 << 62) - 1
        mesh = next((p.device_mesh for p in _members(optimizer) if isinstance(p, DTensor)), None)
        if mesh is not None:
            (seed, *_) = gather_objects(seed, mesh)
    for group in groups:
        group[DRAWS] = [seed, number + 1]
    return seed, number


def _gather(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    return each_in(value, lambda member, _: _gather(member))


def _generators() -> dict[str, bytes]:
    return torch_states(torch.accelerator.current_accelerator(check_available=True))
