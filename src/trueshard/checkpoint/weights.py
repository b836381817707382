"""``weights``: go through the whole tensors of a sharded model unit by unit, under the names that files have.

- A unit is gathered with one collective in the dtype in which it computes, and freed before the next one.
- Adapters of PEFT are merged by PEFT's own layers, in float32: copies of these layers without memory, made once, get
  the gathered tensors of one layer at a time. Parameters of a layer that lie in several units are kept until all are
  there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import layout, state
from trueshard.checkpoint.format import floating_dtype
from trueshard.distributed import device_of
from trueshard.errors import own_errors
from trueshard.model import names
from trueshard.sharding.copying import copy_modules, on_meta
from trueshard.sharding.engine import sharded
from trueshard.sharding.gathering import gather_each, on_this_stream, settle
from trueshard.sharding.hooks import Runtime

Place = tuple[nn.Module, str]
"""(module, attribute)."""


@own_errors()
def weights(
    model: nn.Module,
    *,
    adapters: Literal["merged", "alone"] = "merged",
    naming: Literal["saved", "hub"] = "saved",
    dtype: torch.dtype | str | None = None,
) -> Generator[tuple[list[str], list[torch.Tensor]], None, None]:
    """Go through the whole tensors of a sharded model, unit by unit in the plan's order. Collective.

        for names, tensors in trueshard.weights(model):
            engine.load_weights(zip(names, tensors))

    Each unit is gathered with one collective. Every parameter comes once, a tie under its first name; what every rank
    holds whole comes last, persistent buffers at its end. Every rank goes through all of it; one that ends early frees
    its unit. Between two steps no pass of the model may run.

    Args:
        model: a sharded model.
        adapters: of a PEFT model. "merged": the base's tensors, under the names that the base has without PEFT, with
            the active adapters merged in float32. "alone": the tensors of the active adapter, under the names that
            PEFT's file has.
        naming: "saved": names and tensors as ``save`` writes them, which are the model's own. "hub": as
            ``save_pretrained`` of transformers writes them and engines expect them; they differ where transformers
            renames, merges or splits tensors when it loads (the experts of Mixtral, parts of Llava).
        dtype: of floating-point tensors, such as ``torch.bfloat16`` or "bfloat16"; None: parameters in the dtype in
            which the model computes, buffers in their own.

    Returns:
        A generator of (names, tensors), of equal length. Tensors are on the device that computes, and valid until the
        iterator goes on, also where that is done on another stream than the one that is current now.

    Raises:
        ValueError: the model is not sharded, an argument is wrong, or PEFT cannot merge the adapter.
    """
    if adapters not in ("merged", "alone"):
        raise ValueError(f'adapters={adapters!r}: it is "merged" or "alone"')
    if naming not in ("saved", "hub") or (naming == "hub" and adapters == "alone"):
        raise ValueError(f'naming={naming!r}: it is "saved", or with merged adapters "hub"')
    converted_to, runtime = floating_dtype(dtype), sharded(model)
    settle(runtime)
    root: Any = runtime.root
    held, _ = state.model_tensors(root)
    with torch.no_grad():  # PEFT may call a prompt's encoder, which is a pass
        name_of = _names(root, list(held), alone=adapters == "alone")
    merging = Merging(runtime, converted_to) if adapters == "merged" else None
    output_name = {id(part.tensor): name_of[name] for name, part in held.items() if name in name_of}

    def members(places_of: Iterable[list[Place]]) -> list[_Member]:
        """Return the parameters, each by its places, that are output, or merged into one that is."""
        result = [_Member(places, output_name.get(id(_registered(places[0])))) for places in places_of]
        return [m for m in result if m.name is not None or (merging and m.places[0] in merging.layers_at)]

    def output(values: list[tuple[_Member, torch.Tensor]]) -> dict[str, torch.Tensor]:
        merged = values if merging is None else merging.merged(values)
        return {member.name: value for member, value in merged if member.name is not None}

    def finished(tensors: dict[str, torch.Tensor]) -> tuple[list[str], list[torch.Tensor]]:
        if naming == "hub":
            tensors = layout.as_published(root.get_base_model() if hasattr(root, "get_base_model") else root, tensors)
        values = [t.to(converted_to) if t.is_floating_point() else t for t in tensors.values()]  # to(None): as it is
        return list(tensors), values

    of_units = [(unit, members(_torch.places_in_unit(unit))) for unit in runtime.units]
    units = {unit: in_unit for unit, in_unit in of_units if in_unit}
    replicated = [(parameter, m) for parameter in runtime.replicated for m in members([parameter.places])]
    buffers = {name_of[n]: part.tensor for n, part in held.items() if n in name_of and part.trainable is None}

    def batches() -> Generator[tuple[list[str], list[torch.Tensor]], None, None]:
        for unit in gather_each(runtime, units):
            if tensors := output([(member, _full_tensor(member)) for member in units[unit]]):
                yield finished(tensors)
            del tensors
        with torch.no_grad():
            last = output([(member, parameter.gathered().detach()) for parameter, member in replicated]) | buffers
        if last:
            yield finished(last)

    # What is wrong is raised by the call, before the first batch.
    return on_this_stream(batches(), device_of(runtime.mesh))


def _names(root: Any, held: list[str], *, alone: bool) -> dict[str, str]:
    """Return name in the model → name in the output, of each tensor that is output."""
    peft: dict[str, Any] = getattr(root, "peft_config", {})
    keys = layout.adapted_keys(root, "") if peft else None
    if keys is None:
        if alone or (peft and hasattr(root, "get_base_model")):
            name = _torch.own_class(root).__name__
            if peft:
                raise ValueError(f"two tensors of this {name} would have one name without PEFT: call trueshard.save()")
            raise ValueError(f'this {name} has no adapter of PEFT, so adapters="alone" has nothing to give')
        return dict(zip(held, held, strict=True))
    if alone:
        active = [root.active_adapter] if isinstance(root.active_adapter, str) else list(root.active_adapter)
        if len(active) != 1:
            raise ValueError(f"the adapters {', '.join(active)} are active: activate one with set_adapter()")
        folder = layout.adapter_folder(root, active[0])
        in_file = ((name, key) for name, key in keys.items() if key.stem == "adapter_model" and key.folder == folder)
        return {name: key.key for name, key in in_file if name in held}
    if packed := next((name for name in held if name.endswith(".packed")), None):
        raise ValueError(
            f"the base is quantized ({packed}), and merging would round the adapter away; "
            'adapters="alone" gives the adapter alone'
        )
    if not hasattr(root, "merge_and_unload") or not hasattr(root.base_model, "merge_and_unload"):
        kind = next(iter(peft.values())).peft_type
        raise ValueError(f'PEFT cannot merge a {kind} adapter into its base; adapters="alone" gives it alone')
    result = {name: keys[name].key for name in held if keys[name].stem == "model"}
    from peft.utils import ModulesToSaveWrapper

    for name, module in names.named_modules(root):
        if isinstance(module, ModulesToSaveWrapper):  # trained whole: they take the names of their originals
            original = f"{name}.original_module."
            for adapter in (active for active in module.active_adapters if active in module.modules_to_save):
                for key in [key for key in result if key.startswith(original)]:
                    result[f"{name}.modules_to_save.{adapter}.{key.removeprefix(original)}"] = result.pop(key)
    return result


class _Member(NamedTuple):
    """A parameter of a unit, or one that every rank holds whole."""

    places: list[Place]
    name: str | None  # under which it is output; None: it is not output itself


def _full_tensor(member: _Member) -> torch.Tensor:
    """Return a gathered parameter, whole: the ranks of the tensor axis join what it cuts. Collective over them."""
    tensor = _registered(member.places[0]).detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _registered(place: Place) -> torch.Tensor:
    module, attribute = place
    tensor = _torch.own_parameters(module)[attribute]
    assert tensor is not None
    return tensor


class _Layers:
    """Layers of PEFT that share parameters, mostly one: copies without memory, and what was gathered for them."""

    def __init__(self) -> None:
        self.twins: list[Any] = []
        self.missing: set[Place] = set()
        """First places of parameters that were not gathered yet."""
        self.gathered: list[tuple[_Member, Place, torch.dtype]] = []
        """Each with its place in the copies, and the dtype that it was gathered in."""

    def merge(self) -> list[tuple[_Member, torch.Tensor]]:
        for twin in self.twins:
            if hasattr(twin, "unload_and_optionally_merge_module"):
                twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                twin.merge(safe_merge=False, adapter_names=None)
        self.twins.clear()
        merged, self.gathered = [item for item in self.gathered if item[0].name is not None], []
        return [(member, getattr(twin, attribute).detach().to(dtype)) for member, (twin, attribute), dtype in merged]


class Merging:
    """Merges the active adapters of PEFT into the layers around them, as their parameters are gathered."""

    def __init__(self, runtime: Runtime, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        """Dtype of what is merged; None: that of the parameter, which rounds small updates away in 16 bits."""
        self.layers_at: dict[Place, tuple[_Layers, Place]] = {}
        """Place in the model → the layers that it belongs to, and the place in their copies."""
        layers = _adapted_layers(runtime.root)
        twins = copy_modules(runtime, layers, on_meta, {}) if layers else []
        parameters = [places for unit in runtime.units for places in _torch.places_in_unit(unit)]
        parameters += [parameter.places for parameter in runtime.replicated]
        first_of = {place: places[0] for places in parameters for place in places}
        layers_of: dict[Place, _Layers] = {}
        for layer, twin in zip(layers, twins, strict=True):
            places = {
                (module, attribute): (copied, attribute)
                for (_, module), (_, copied) in zip(names.named_modules(layer), names.named_modules(twin), strict=True)
                for attribute, parameter in _torch.own_parameters(module).items()
                if parameter is not None
            }
            firsts = {first_of[place] for place in places}
            group = next((layers_of[place] for place in firsts if place in layers_of), _Layers())
            group.twins.append(twin)
            group.missing |= firsts
            layers_of |= dict.fromkeys(firsts, group)
            self.layers_at |= {place: (group, copied) for place, copied in places.items()}

    @torch.no_grad()
    def merged(self, values: list[tuple[_Member, torch.Tensor]]) -> list[tuple[_Member, torch.Tensor]]:
        """Return what needs no merging, and the parameters of layers that are complete now, merged."""
        result: list[tuple[_Member, torch.Tensor]] = []
        for member, value in values:
            copies = [self.layers_at.pop(place) for place in member.places if place in self.layers_at]
            if not copies:
                result.append((member, value))
                continue
            parameter = nn.Parameter(value.to(torch.float32, copy=True), requires_grad=False)
            for _, (twin, attribute) in copies:
                _torch.own_parameters(twin)[attribute] = parameter
            group, place = copies[0]
            group.gathered.append((member, place, self._dtype or value.dtype))
            group.missing.discard(member.places[0])
            if not group.missing:
                result += group.merge()
        return result


def _adapted_layers(root: nn.Module) -> list[nn.Module]:
    """Return the layers of PEFT that are not inside another one."""
    if not hasattr(root, "get_base_model"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    result: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in root.modules():  # from the outside inwards
        if isinstance(module, BaseTunerLayer) and module not in inside:
            result.append(module)
            inside |= set(module.modules())
    return result
