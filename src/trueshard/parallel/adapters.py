"""Adapters of PEFT under the tensor axis: from the style of a layer follow those of what wraps it.

LoRA's matrices are cut along with the layer in it. Every other adapter (DoRA, VeRA, OFT, …) may read the whole weight
or all of the features, so each rank computes the adapted layer whole: it is given whole inputs, and each rank goes on
with its part of the outputs, as the layer alone would. What is neither is refused by the adapter's name.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from trueshard.errors import TrueShardValueError
from trueshard.model.names import Index
from trueshard.parallel.tp_styles import STYLES

_LAYERS = ("base_layer", "original_module")
"""Attributes of an adapter that hold the layer which it adapts."""


def is_adapter(module: Any) -> bool:
    """True if ``module`` wraps a layer that it adapts."""
    return isinstance(module, nn.Module) and any(isinstance(getattr(module, key, None), nn.Module) for key in _LAYERS)


def adapter_styles(name: str, adapter: Any, word: str) -> dict[str, str]:
    """Return the styles of an adapter and its parts, of which the layer alone would have the style ``word``.

    Raises ValueError, with the adapter's name, for a style that it cannot have.
    """
    style = STYLES[word]
    if _is_lora(adapter):
        # The second matrix makes the outputs, the first takes the inputs; the low rank between is on every rank.
        matrix = ("lora_B" if style.dim == -2 else "lora_A") if style.linear else None
        matrices = {f"{name}.{matrix}.{adapter_name}": word for adapter_name in adapter.lora_A} if matrix else {}
        return {f"{name}.base_layer": word} | matrices
    if saved := getattr(adapter, "modules_to_save", None):
        return {f"{name}.{path}": word for path in ("original_module", *(f"modules_to_save.{key}" for key in saved))}
    if style.sums:
        return {f"{name}.{path}" if path else name: word for path, _ in adapter.named_modules()}
    if style.uncut is None:
        raise TrueShardValueError(
            f"tensor: {kind_of_adapter(adapter)} of {name!r} does not go with the style {word!r}: leave {name!r} out "
            "of the adapter's targets, or out of the styles"
        )
    return {name: style.uncut}


def _is_lora(adapter: Any) -> bool:
    """True for two matrices whose product is added to the layer's, and nothing more."""
    matrices = getattr(adapter, "lora_A", None)
    if not isinstance(matrices, nn.ModuleDict) or not hasattr(adapter, "base_layer"):
        return False
    more = (getattr(adapter, key, None) for key in ("lora_variant", "lora_magnitude_vector", "parameter_name"))
    return not any(more) and all(isinstance(matrix, nn.Linear) for matrix in matrices.values())


def kind_of_adapter(adapter: Any) -> str:
    """Return what an adapter is called."""
    if variants := getattr(adapter, "lora_variant", None):
        return str(next(iter(variants.values()))).partition("Linear")[0]
    return next((cls.__module__.split(".")[-2] for cls in type(adapter).__mro__ if "tuners." in cls.__module__), "PEFT")


def refuse_adapters(index: Index) -> None:
    """Raise ValueError for an adapter of a whole model that does not go with parts of its heads, or of a parameter."""
    for name, module in index.modules.items():
        if parameter := getattr(module, "parameter_name", None):
            raise TrueShardValueError(
                f"tensor: {kind_of_adapter(module)} of the parameter {parameter!r} of {name!r} (target_parameters) is "
                "added to the whole of it, of which each rank has a part: adapt layers (target_modules), or leave out "
                "tensor"
            )
        for config in dict(getattr(module, "peft_config", {})).values():
            kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
            if getattr(config, "is_prompt_learning", False) and hasattr(config, "prefix_projection"):
                raise TrueShardValueError(
                    f"tensor: {kind} of {name or type(module).__name__!r} gives attention the keys and values of all "
                    "heads, of which each rank has a part: use another adapter, or leave out tensor"
                )


def refuse_later_adapters(index: Index) -> None:
    """Raise ValueError for LoRA matrices of the size of a rank's part: each rank would train its own as a copy."""
    for name, layer in index.modules.items():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if not isinstance(weight, DTensor) or weight.ndim != 2:
            continue
        for dim, attribute in enumerate(("lora_B", "lora_A")):
            matrices: Any = getattr(layer, attribute, {})
            if any(matrice.weight.shape[dim] != weight.shape[dim] for matrice in matrices.values()):
                raise TrueShardValueError(
                    f"{name!r} was adapted by PEFT after the model was cut, and its {attribute} is of the size of a "
                    "rank's part: adapt the whole model and let shard() cut both, with tensor="
                )
