"""LoRA and DoRA adapters, through PEFT.

- Adapters are float32 over a base in 16 bits, as PEFT makes them.
- On the meta device they have no memory. After ``shard()``, ``initialise`` gives them their values, and ``settle`` the
  values that follow from the base's (DoRA's magnitudes, copies of modules that are trained whole).
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.errors import UserError, explained, with_kind
from trueshard.text import nearest
from trueshard.train.models.config import AdapterSection
from trueshard.train.models.parameters import copy_module, gather, seeded
from trueshard.train.models.quantized import QuantizedLinear, dequantise

_OWN = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "modules_to_save": "save_modules",
    "use_dora": "method",
}
"""Fields of PEFT's configuration → keys of ``[adapter]``."""

_MAGNITUDES = "lora_magnitude_vector"
"""Name of DoRA's norms of the rows of the weight, which ``settle`` computes."""

_WITHOUT_VALUES = {
    *("bias", "use_rslora", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern"),
    *("alpha_pattern", "fan_in_fan_out", "lora_bias", "revision", "inference_mode", "init_lora_weights"),
}
"""Fields that have the same effect on the meta device."""


def needs_values(section: AdapterSection) -> bool:
    """Return True if the adapter's first values are computed from the base's weights."""
    by_value = section.arguments.get("init_lora_weights", True) not in (True, False, "gaussian")
    return by_value or bool(section.arguments.keys() - _WITHOUT_VALUES)


def add_adapter(model: Any, section: AdapterSection, task: str | None, checking: bool = False) -> nn.Module:
    """Return the PEFT model around ``model``, which is changed in place. Raises `UserError` if that is refused."""
    try:
        import peft
    except ImportError:
        raise UserError("[adapter] needs PEFT: pip install peft") from None
    _check(model, section, {field.name for field in dataclasses.fields(peft.LoraConfig)})
    arguments = dict(section.arguments)
    if checking and needs_values(section):
        arguments["init_lora_weights"] = True
    detail = functools.partial(with_kind, most=300)  # PEFT writes out modules before it says what is wrong
    with explained("[adapter] is refused by PEFT", "correct it", detail=detail), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what PEFT asks it
        config = peft.LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,  # type: ignore[arg-type]
            lora_dropout=section.dropout,
            target_modules=section.targets,
            modules_to_save=list(section.save_modules) or None,
            use_dora=section.method == "dora",
            task_type=task,
            **arguments,
        )
        return peft.get_peft_model(model, config)


def _check(model: nn.Module, section: AdapterSection, fields: set[str]) -> None:
    for name in section.arguments:
        if name in _OWN:
            raise UserError(f"adapter.arguments.{name}: this is adapter.{_OWN[name]}; set that instead")
        if name not in fields:
            raise UserError(f"adapter.arguments.{name}: PEFT's LoraConfig has no such field.{nearest(name, fields)}")
    modules = [name for name, _ in model.named_modules() if name]
    ends = {name.rpartition(".")[2] for name in modules}
    targets = section.targets if isinstance(section.targets, list) else []
    for key, name in [*(("targets", name) for name in targets), *(("save_modules", n) for n in section.save_modules)]:
        if not any(f".{module}".endswith(f".{name}") for module in modules):
            near = nearest(name, ends)
            raise UserError(f"adapter.{key}: no module of the model is called {name!r}; correct it.{near}")


def is_saved_whole(name: str, section: AdapterSection | None) -> bool:
    """Return True if a module of the base is, or is in, one that is trained whole beside the adapter."""
    inside = f".{name}."
    return section is not None and any(f".{end}." in inside for end in section.save_modules)


def layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, layer) of each layer with an adapter."""
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _wrappers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of each one that is trained whole; it holds its original and its copies."""
    from peft.utils import ModulesToSaveWrapper

    return [(name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]


def added(model: nn.Module) -> set[str]:
    """Return the names of the adapter's parameters and buffers; none for a model without one."""
    if not hasattr(model, "peft_config"):
        return set()
    parts = [(f"{name}.{key}", part) for name, layer in layers(model) for key, part in _parts(layer)]
    parts += [(f"{name}.modules_to_save", wrapper.modules_to_save) for name, wrapper in _wrappers(model)]
    return {name for prefix, part in parts for name, _ in (*part.named_parameters(prefix), *part.named_buffers(prefix))}


def _parts(layer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of what an adapter adds to a layer."""
    for name in dict.fromkeys(layer.adapter_layer_names):
        part = getattr(layer, name, None)
        if isinstance(part, nn.Module):
            yield name, part


def initialise(model: nn.Module, twin: Any, seed: int, device: torch.device) -> None:
    """Give the adapters of ``model`` memory and their first values, except those that ``settle`` computes.

    Values of a layer follow from ``seed`` and its name; those of ``twin``, the same model not sharded, are made one by
    one.
    """
    twins = dict(layers(twin))
    for name, layer in layers(model):
        other = twins[name]
        for _, part in (*_parts(layer), *_parts(other)):
            part.to_empty(device=device)
        with seeded(seed, name, device):
            for _, part in _parts(other):
                for module in part.modules():
                    if callable(reset := getattr(module, "reset_parameters", None)):
                        reset()
            for adapter, config in twin.peft_config.items():
                if config.init_lora_weights:
                    other.reset_lora_parameters(adapter, config.init_lora_weights)
            ours = dict(_parts(layer))
            for key, part in _parts(other):
                if key != _MAGNITUDES:
                    copy_module(ours[key], part)
                part.to_empty(device="meta")
    for _, wrapper in _wrappers(model):
        wrapper.modules_to_save.to_empty(device=device)


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """Compute the values of an adapter that follow from the base, a layer at a time. Collective if sharded."""
    for _, wrapper in _wrappers(model):
        for copied in wrapper.modules_to_save.values():
            copy_module(copied, wrapper.original_module)
    for _, layer in layers(model):
        for adapter, dora in getattr(layer, _MAGNITUDES, {}).items():
            fresh = _torch.own_class(dora)(fan_in_fan_out=dora.fan_in_fan_out)
            stand_in = nn.Module()
            base = layer.get_base_layer()
            if isinstance(base, QuantizedLinear):
                weight = dequantise(gather(base.packed), base.kind, base.in_features, base.dtype)
            else:
                stored: Any = _torch.own_parameters(base)["weight"]  # reading the attribute may compute another
                weight = gather(stored)
            stand_in.weight = nn.Parameter(weight, requires_grad=False)
            first, second = (_factor(layer, side, adapter) for side in "AB")
            fresh.update_layer(base_layer=stand_in, lora_A=first, lora_B=second, scaling=layer.scaling[adapter])
            copy_module(dora, fresh)


def _factor(layer: Any, side: str, adapter: str) -> torch.Tensor:
    modules = getattr(layer, f"lora_{side}")
    return gather(modules[adapter].weight if adapter in modules else getattr(layer, f"lora_embedding_{side}")[adapter])
