"""After ``fully_shard``: move what the user set on parameters to the shards, and install the runtime.

Attributes, gradient hooks and gradients belong to the parameter that the user made; FSDP2 puts another in its place,
and shows a third one, the gathered parameter, to the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.model import names
from trueshard.model.intent import attributes_of
from trueshard.model.names import Held
from trueshard.optim.rebind import shard_like
from trueshard.plans import Plan, Unit
from trueshard.runtime import additions, methods
from trueshard.runtime.gradients import GradientHooks
from trueshard.runtime.passes import Runtime


@dataclass
class Attachments:
    """Moves attributes, hooks and gradients of the originals to the shards; one use."""

    root: ShardedModule
    """With every unit sharded."""
    plan: Plan
    mesh: DeviceMesh
    modules: Mapping[str, nn.Module]
    originals: list[Held]
    hooked: Collection[str]
    """Names of parameters on which some rank has a gradient hook."""
    new_of: dict[int, nn.Parameter] = field(default_factory=dict)
    """``id`` of each original parameter → the parameter that took its place."""

    def __post_init__(self) -> None:
        self.runtime = Runtime(self.root, self.plan, self.mesh)
        self._unit_of = {module: unit for unit in self.plan.units for module in unit.modules}
        self._name_of = {id(module): name for name, module in self.modules.items()}

    def move(self) -> None:
        """Move all, and install the runtime: the model is ready for its first pass."""
        runtime = self.runtime
        by_unit: dict[str, list[tuple[str, nn.Parameter]]] = {unit.name: [] for unit in self.plan.units}
        replicated = {each.name for each in self.plan.replicated}
        for original in self.originals:
            module, attribute = original.places[0]
            unit = self._enclosing_unit(module)
            if original.name in replicated:
                runtime.hold_whole(original, self._module(unit))
            new = _torch.own_parameters(module)[attribute]
            assert new is not None
            self.new_of[id(original.tensor)] = new
            new.__dict__.update(attributes_of(original.tensor))
            if original.tensor.grad is not None and isinstance(new, DTensor):
                new.grad = shard_like(original.tensor.grad, new)
            if original.name not in replicated:
                by_unit[unit.name].append((original.name, new))
                self._move_sharded(original, new, unit)
        with_lists = self._units_with_lists()
        for unit in self.plan.units:
            module = self._module(unit)
            runtime.units[module] = [parameter for _, parameter in by_unit[unit.name]]
            runtime.usage.add(module, by_unit[unit.name], holds_list=unit.name in with_lists)
            if not isinstance(unit.reshard_after_forward, bool):
                _torch.set_reshard_after_forward(module, unit.reshard_after_forward, runtime.meshes)
        self._gather_beside_forward()
        if not any(parameter.is_meta for parameter in self.new_of.values()):
            _torch.initialise(self.root)
        runtime.install()
        additions.follow(runtime, [(each, self._module(self._enclosing_unit(each))) for each in self.modules.values()])

    def _units_with_lists(self) -> set[str]:
        """Return the units that gather members of a list of modules, of which a rank may use some and not others."""
        found: set[str] = set()
        for module in self.modules.values():
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                children = [names.unwrap(child) for child in module.children() if any(True for _ in child.parameters())]
                inside = [child for child in children if self._name_of[id(child)] not in self._unit_of]
                homes = [self._enclosing_unit(child).name for child in inside]
                found |= {home for home in homes if homes.count(home) > 1}
        return found

    def _enclosing_unit(self, module: nn.Module) -> Unit:
        return names.nearest_above(self._name_of[id(module)], self._unit_of)

    def _module(self, unit: Unit) -> ShardedModule:
        module = self.modules[unit.modules[0]]
        assert isinstance(module, ShardedModule)
        return module

    def _move_sharded(self, original: Held, new: nn.Parameter, unit: Unit) -> None:
        gathers = original.name in self.hooked
        if gathers or GradientHooks.on(original.tensor):
            self.runtime.call_hooks(new, GradientHooks(original.tensor, gathers), self._module(unit))
        if found := attributes_of(original.tensor):
            module, attribute = original.places[0]
            for name in unit.modules:
                methods.carry_attributes(self.modules[name], module, attribute, found)

    def _gather_beside_forward(self) -> None:
        runtime = self.runtime
        methods.gather_in_submodules(runtime)
        compiled_root = _torch.is_compiled_in_place(self.root)
        for number, unit in enumerate(self.plan.units):
            module = self._module(unit)
            if unit.kind in ("root", "block") and len(unit.modules) == 1 and not compiled_root:
                methods.gather_in_methods(runtime, module, methods.methods_that_compute(module))
            if unit.kind == "root" and callable(getattr(module, "generate", None)):
                runtime.share_passes_in("generate")
            for name in unit.modules:
                self.modules[name].__dict__["_trueshard_root"] = runtime
                runtime.numbers[self.modules[name]] = number
            if unit.kind in ("tied", "dtype"):
                methods.after_gathering(self._around(unit), module.unshard)

    def _around(self, unit: Unit) -> nn.Module:
        """Return the innermost other unit around all of ``unit``, whose forward may read them without calling them."""
        best = ""
        for other in self.plan.units:
            name = other.modules[0]
            inside = all(module.startswith(f"{name}.") for module in unit.modules) if name else True
            if len(other.modules) == 1 and inside and len(name) >= len(best):
                best = name
        return self.modules[best]
