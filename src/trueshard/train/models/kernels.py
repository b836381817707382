"""Kernels of a model: its attention, and Liger's layers; and positions beyond those that it was trained on.

- transformers switches the attention and checks that the model has it. A forecast takes "sdpa" for what this machine
  need not have: like that, it holds no matrix of scores.
- Liger's kernels replace norms, gated layers and rotary embeddings. Its loss stays off: the trainer's own holds no
  whole logits either. Rotary embeddings are a function of transformers' module, which is replaced for the process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from typing import Any

import torch

from trueshard.errors import UserError, explained
from trueshard.text import nearest
from trueshard.train.models.config import ANYWHERE, FLASH, ModelSection

_PACKAGES = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("flash_attn_interface", "install it from the folder hopper of flash-attention's sources"),
    "liger": ("liger_kernel", "pip install liger-kernel"),
}
"""Word → its package, and how to install that."""
_SCALINGS = ("linear", "yarn", "llama3", "longrope")


def attend(model: Any, word: str | None, here: bool = True) -> None:
    """Let ``model`` compute attention by ``word``. Raises `UserError` if it cannot.

    With ``here=False`` only whether the architecture has such attention is asked: a package may be missing.
    """
    passed: tuple[type[Exception], ...] = () if here else (ImportError,)
    with explained(f'model.attention = "{word}" is refused', 'use "sdpa"'), contextlib.suppress(*passed):
        if word is not None:
            model.set_attn_implementation(word)
            if model.config._attn_implementation != word:
                raise ValueError(f"the model computes {model.config._attn_implementation!r} instead")


def install(section: ModelSection, model: Any) -> None:
    """Put the kernels of ``section`` into a model with or without an adapter, before ``shard()``."""
    attend(model, section.attention)
    if section.kernels == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        module = vars(sys.modules[type(inner).__module__])
        classes = {name: value for name, value in module.items() if isinstance(value, type)}
        _apply_liger_kernel_to_instance(inner, cross_entropy=False, fused_linear_cross_entropy=False)
        module.update(classes)  # so that the next model is of its own layers, on every rank


def check_here(section: ModelSection, settings: Any) -> None:
    """Raise `UserError` unless this machine has what the kernels of ``section`` need."""
    gpu = torch.cuda.is_available()
    for key, word in (("attention", section.attention), ("kernels", section.kernels)):
        package, remedy = _PACKAGES.get(word or "", ("", ""))
        problem = None
        if package and importlib.util.find_spec(package) is None:
            problem = f"needs the package {package}, which is not here"
        elif word == "flex_attention" and not gpu:
            problem = "has no backward on processors, and there is no GPU"
        elif word in FLASH and not (gpu and torch.cuda.get_device_capability()[0] >= 8):
            problem = "needs a GPU of compute capability 8.0 or newer"
        elif word == "liger" and not gpu and os.environ.get("TRITON_INTERPRET") != "1":
            problem = "runs on GPUs, and there is none here"
        elif word == "liger":
            from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known

            if settings.model_type not in known:
                problem = f"has no kernels for {settings.model_type!r}"
        if problem is not None:
            raise UserError(f'model.{key} = "{word}" {problem}; {remedy or "change it"}, or remove it')


def assumptions(section: ModelSection) -> tuple[str, ...]:
    """Return what a forecast takes in place of kernels that it cannot simulate, a sentence each."""
    attention = f"Attention is simulated as sdpa; {section.attention} holds no scores either."
    liger = "The model's own kernels are simulated; Liger's keep less for backward."
    return (attention,) * (section.attention not in ANYWHERE) + (liger,) * (section.kernels is not None)


def scale_positions(table: dict[str, Any], settings: Any) -> None:
    """Set the rotary scaling of a transformers configuration, and how many positions it gives.

    Where layers have several, it is that of full attention. Raises `UserError` for what transformers would refuse, or
    leave out.
    """
    key, limit, text = "model.rope_scaling", "original_max_position_embeddings", settings.get_text_config()
    rope, kind = getattr(text, "rope_parameters", None) or {}, table.get("rope_type")
    own = rope.get("full_attention", rope)
    if "rope_theta" not in own:
        raise UserError(f"{key}: {settings.model_type} has no rotary positions that can be scaled; remove it")
    from transformers.modeling_rope_utils import RopeParameters  # of transformers 5, as is what was asked above

    if kind not in _SCALINGS:
        why = ", which depends on the longest text that a rank has seen" if kind == "dynamic" else ""
        raise UserError(f"{key}.rope_type: found {kind!r}{why}; use one of {', '.join(_SCALINGS)}")
    if unknown := [name for name in table if name not in (known := RopeParameters.__annotations__)]:
        raise UserError(f"{key}.{unknown[0]}: transformers has no such key; correct it.{nearest(unknown[0], known)}")
    if own.get("rope_type", "default") != "default" and limit not in table:
        raise UserError(f"{key}: the model's positions are scaled already ({own['rope_type']}); add {limit}")
    first = table.get(limit, text.max_position_embeddings)
    wanted = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if name in own} | table
    own.clear()
    own.update(wanted if kind == "linear" else wanted | {limit: first})
    with explained(f"{key} is refused by transformers", "correct it"):
        text.max_position_embeddings = max(text.max_position_embeddings, round(first * table.get("factor", 1)))
        text.standardize_rope_params()
        text.validate_rope()
    if other := [name for name in table if own.get(name) != table[name]]:
        raise UserError(f"{key}.{other[0]}: {settings.model_type} has {own.get(other[0])!r}; set it to that")
