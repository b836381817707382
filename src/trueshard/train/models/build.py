"""The model of a run, from a Hugging Face directory or configuration, never from the network.

- ``architecture`` is cheap and raises every ``UserError``; the launcher calls it before a process starts.
- ``build`` makes the model without memory; after ``shard()``, ``values.fill`` gives each rank its own rows. No rank
  holds the whole model.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trueshard.checkpoint.format import check_name
from trueshard.errors import UserError, explained, warn_user, with_kind
from trueshard.model.experts import KIND, by_grouped_products
from trueshard.text import load_json, nearest
from trueshard.train.config import Config
from trueshard.train.models import adapters, kernels, vocabulary
from trueshard.train.models.config import ANYWHERE, AdapterSection, ModelSection, own_code
from trueshard.train.models.parameters import freeze, seeded
from trueshard.train.models.quantized import Quantization, quantise_layers
from trueshard.train.own_code import Wrong, blamed, check_call, own

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def _auto(config: Config) -> Any:
    import transformers

    return transformers.AutoModelForImageTextToText if config.images else transformers.AutoModelForCausalLM


def with_model(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def architecture(config: Config, vocab_size: int, image_token: int | None = None) -> Any:
    """Return the transformers configuration of the model; raises as ``checked``."""
    return checked(config, vocab_size, image_token)[0]


def checked(config: Config, vocab_size: int, image_token: int | None = None) -> tuple[Any, nn.Module]:
    """Return the transformers configuration of the model, and the model as ``empty`` makes it.

    Raises `UserError` if there is none, transformers does not know it or refuses its fields, it is of another family
    than the data need, its vocabulary is smaller than ``vocab_size``, or what is to be frozen, quantised or adapted
    does not exist.
    """
    section, key = config.model, _key_of(config.model)
    if section.build is not None:
        settings = _of_own(config, vocab_size)
    else:
        settings = _from_fields(config, vocab_size) if section.architecture else from_files(config)
    rows = getattr(settings.get_text_config(), "vocab_size", vocab_size)
    if rows < vocab_size <= rows + len(config.tokenizer.add_tokens or ()):
        settings = vocabulary.with_rows(settings, vocab_size)
    if section.rope_scaling is not None:
        kernels.scale_positions(section.rope_scaling, settings)
    if image_token is not None:
        _set_image_token(section, settings, image_token)
    with explained(f"{key}: no model can be built from it", "correct its configuration"):
        model: Any = empty(config, settings, checking=True)
    rows = model.get_input_embeddings().weight.shape[0] if section.build is None else vocab_size
    if rows < vocab_size:
        raise UserError(
            f"{key}: its vocabulary of {rows} is smaller than the tokenizer's {vocab_size}; "
            f"use the model's own tokenizer, or tokenizer.vocab_size = {rows}"
        )
    if config.tokenizer.add_tokens and section.build is None:
        vocabulary.check_trained(model)
    kernels.attend(model, section.attention, here=False)
    return settings, model


def build(config: Config, settings: Any) -> nn.Module:
    """Return the model as configured, on the meta device; ``values.fill`` gives it values, best after ``shard()``.

    With an adapter that starts from the weights ("pissa"), it is made whole on the CPU.
    """
    by_value = config.adapter is not None and adapters.needs_values(config.adapter)
    result = with_values(config, settings) if by_value else empty(config, settings)
    kernels.install(config.model, result)
    return result


def empty(config: Config, settings: Any, checking: bool = False) -> nn.Module:
    """Return the model on the meta device, quantised, adapted and frozen as configured, in `model.dtype`."""
    with torch.device("meta"):
        return _changed(config, _untrained(config, settings), checking)


def _untrained(config: Config, settings: Any) -> nn.Module:
    """Return the model of the architecture, or of `model.build`, on torch's default device."""
    section, dtype, words = config.model, getattr(torch, config.model.dtype), config.model.build
    if words is None:
        made: nn.Module = _auto(config).from_config(settings, dtype=dtype, trust_remote_code=section.trust_remote_code)
        return made
    arguments = {name: getattr(settings, name) for name in ("vocab_size", *section.fields)}
    function = own("model.build", words, **arguments)
    with blamed("model.build", words):
        made = function(**arguments)
        if not isinstance(made, nn.Module):
            raise Wrong(f"it returned a {type(made).__name__}, not a torch.nn.Module")
    check_call("model.build", made.forward, input_ids=..., use_cache=False)
    return made.to(dtype) if "dtype" in section.model_fields_set else made


def with_values(config: Config, settings: Any) -> nn.Module:
    """Return the model with its values, whole in host memory; random ones follow from `train.seed`."""
    dtype, auto = getattr(torch, config.model.dtype), _auto(config)
    with seeded(config.train.seed, "", torch.device("cpu")):
        if config.model.path is None:
            return _changed(config, _untrained(config, settings))
        path = config.model.place()
        files = sorted(file for pattern in WEIGHTS for file in path.glob(f"{pattern}*"))
        problem = f"model.path: the weights in {path} cannot be loaded ({', '.join(file.name for file in files[:2])})"
        refusal = explained(problem, "fetch the files again, best as safetensors", detail=_why_not_loaded)
        with refusal, own_code(config.model, path) as options, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # on how a pickle was written
            for file in (file for file in files if file.suffix == ".json"):
                for name in load_json(file.read_text(encoding="utf-8"))["weight_map"].values():
                    check_name(name, str(file))
            more = options | {"config": as_in_files(config, settings), "dtype": dtype, "output_loading_info": True}
            base, report = auto.from_pretrained(str(path), **more)
        if lacking := sorted(report["missing_keys"]):
            raise UserError(f"model.path: {path} has no {lacking[0]!r} (and {len(lacking) - 1} more); fetch it again")
        vocabulary.grow(base, settings, config.train.seed)
        return _changed(config, base.train())


def as_in_files(config: Config, settings: Any) -> Any:
    """Return ``settings`` with the vocabulary of the files at `model.path`, which new tokens add to."""
    if not config.tokenizer.add_tokens:
        return settings
    return vocabulary.with_rows(settings, from_files(config).get_text_config().vocab_size)


def _why_not_loaded(error: BaseException) -> str:
    # Of a pickle torch reads tensors alone; its own text explains how to run the rest all the same.
    if isinstance(error, pickle.UnpicklingError):
        return "it is a damaged pickle, or one that holds more than tensors: it was not run"
    return with_kind(error)


def quiet_transformers() -> None:
    """Turn off advice and progress bars of transformers; its errors are raised."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def plain_settings(settings: Any) -> dict[str, Any]:
    """Return the architecture as JSON values, to compare with on a resume, without what does not change the model."""
    unrelated = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    values = json.loads(settings.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in unrelated}


def _changed(config: Config, model: Any, checking: bool = False) -> nn.Module:
    """Return a model quantised, adapted and frozen as configured."""
    if config.model.attention in ANYWHERE:
        kernels.attend(model, config.model.attention)
    if config.model.quantize != "none":
        quantise(model, config.model.quantize, config.adapter, checking)
    if config.adapter is not None:
        model = adapters.add_adapter(model, config.adapter, None if config.images else "CAUSAL_LM", checking)
    if config.train.exact and torch.cuda.is_available():  # whose kernels have to be deterministic
        for module in by_grouped_products(model).values():
            setattr(module.config, KIND, "eager")
    freeze(model, config.model.freeze)
    return model


def quantise(base: Any, kind: Quantization, adapter: AdapterSection | None, checking: bool = False) -> None:
    """Quantise the linear layers of ``base``, except its head and modules that are trained whole."""
    if adapter is not None and adapters.needs_values(adapter):
        raise UserError(
            "model.quantize does not go with adapter.arguments that begin with or change the base's weights; set it to "
            '"none", or remove them'
        )
    head, total = base.get_output_embeddings(), base.num_parameters()
    kept = {name for name, module in base.named_modules() if module is head}
    count = quantise_layers(base, kind, lambda name: name not in kept and not adapters.is_saved_whole(name, adapter))
    if not count:
        raise UserError(f'model.quantize: {type(base).__name__} has no linear layer to quantise; set it to "none"')
    if checking and count < 0.5 * total and is_first():
        warn_user(
            f"model.quantize reaches {count / total:.0%} of the weights of {type(base).__name__}: the head, and what "
            "is in no linear layer (embeddings, experts that are held together), stays as it is"
        )


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _key_of(section: ModelSection) -> str:
    names_of_keys = ("path", "config", "architecture", "build")
    return next(f"model.{name}" for name in names_of_keys if getattr(section, name) is not None)


def _of_own(config: Config, vocab_size: int) -> Any:
    """Return a transformers configuration that stands for a model of `model.build`: its arguments."""
    from transformers import PretrainedConfig

    if "vocab_size" in config.model.fields:
        raise UserError("model.fields.vocab_size: the vocabulary size is the tokenizer's; remove it")
    settings: Any = PretrainedConfig()
    vars(settings).update(config.model.fields, vocab_size=vocab_size)
    return settings


def _from_fields(config: Config, vocab_size: int) -> Any:
    from transformers import AutoConfig

    name, fields = str(config.model.architecture), dict(config.model.fields)
    _check_known(config, name, "model.architecture")
    default = AutoConfig.for_model(name)
    _check_fields(fields, default, "model.fields", name)
    nested = getattr(default, "text_config", None)
    if nested is None:
        fields["vocab_size"] = vocab_size
    else:
        text = {"model_type": nested.model_type} | dict(fields.get("text_config", {}))
        fields["text_config"] = text | {"vocab_size": vocab_size}
        if getattr(default, "vision_config", None) is not None and "vision_config" in fields:
            fields["vision_config"] = {"model_type": default.vision_config.model_type} | dict(fields["vision_config"])
    with explained(f"model.fields: {name} refuses them", "correct them"):
        return AutoConfig.for_model(name, **fields)


def _check_fields(fields: Mapping[str, Any], default: Any, where: str, what: str) -> None:
    """Compare the names of ``fields`` with those of a default configuration, and of its nested ones."""
    from transformers import AutoConfig

    if "vocab_size" in fields:
        raise UserError(f"{where}.vocab_size: the vocabulary size is the tokenizer's; remove it")
    valid = default.to_dict()
    for name, value in fields.items():
        if name not in valid:
            problem = f"unknown key {where}.{name} for the architecture {what!r}"
            raise UserError(f"{problem}; see its transformers configuration.{nearest(name, valid, 1)}")
        if name in ("text_config", "vision_config") and valid[name] is not None:
            if not isinstance(value, Mapping):
                raise UserError(f"{where}.{name}: wanted a table, found {value!r}")
            inner = getattr(default, name)
            if (other := value.get("model_type", inner.model_type)) != inner.model_type:
                try:
                    inner = AutoConfig.for_model(other)
                except ValueError:
                    raise UserError(f"{where}.{name}.model_type: {other!r} is unknown to transformers") from None
            _check_fields({k: v for k, v in value.items() if k != "model_type"}, inner, f"{where}.{name}", other)


def from_files(config: Config) -> Any:
    """Return the transformers configuration that `model.path` or `model.config` names. Raises `UserError`."""
    from transformers import AutoConfig

    section, key, path = config.model, _key_of(config.model), config.model.place()
    file = path / "config.json" if path.is_dir() or section.path else path
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist; give a Hugging Face model directory on this machine")
    if (path / "adapter_config.json").exists():
        raise UserError(
            f"{key}: {path} is a checkpoint of an adapter and its base; make one model of them first: "
            f"trueshard export {path} OUT --to merged"
        )
    if not file.is_file():
        raise UserError(f"{key}: {path} is not a model directory: it has no config.json; give one that has")
    with explained(f"{key}: {file} is not a transformers configuration", 'it needs a "model_type"'):
        data = load_json(file.read_text(encoding="utf-8"))
        model_type = data["model_type"]
        if not isinstance(model_type, str) or not isinstance(own := data.get("auto_map") or {}, dict):
            raise TypeError("model_type is no text, or auto_map no object")
    if not (section.trust_remote_code and _auto(config).__name__ in own):
        with own_code(section, file.parent):
            _check_known(config, model_type, f"{key}: {file}")
    if section.path and not any(file for pattern in WEIGHTS for file in path.glob(pattern)):
        raise UserError(
            f"model.path: {path} has no weights ({', '.join(WEIGHTS)}); to train from scratch use model.config instead"
        )
    place = file.parent if file.name == "config.json" else file
    with (
        explained(f"{key}: {file} is refused by transformers", "correct it"),
        own_code(section, file.parent) as options,
    ):
        settings = AutoConfig.from_pretrained(str(place), **options)
    is_named = section.path or section.trust_remote_code  # PEFT records the base's place, and own code is found by it
    settings._name_or_path = str(file.parent.absolute()) if is_named else ""
    return settings


def _check_known(config: Config, model_type: Any, where: str) -> None:
    """Raise `UserError` for a ``model_type`` that the auto class of `data.format` does not have."""
    from transformers.models.auto import configuration_auto, modeling_auto

    names_of, noun = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal language model"
    if config.images:
        names_of, noun = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "model of images and text"
    if model_type not in names_of:
        is_other = model_type in configuration_auto.CONFIG_MAPPING_NAMES
        state = f"is not a {noun}" if is_other else "is unknown to transformers"
        near = nearest(str(model_type), names_of)
        raise UserError(f"{where}: the architecture {model_type!r} {state}; choose another.{near}")


def _set_image_token(section: ModelSection, settings: Any, image_token: int) -> None:
    """Set or check the image token: model and tokenizer must agree on it."""
    keys = [key for key in ("image_token_id", "image_token_index") if hasattr(settings, key)]
    for key in keys:
        if section.architecture is not None and key not in section.fields:
            setattr(settings, key, image_token)
        elif getattr(settings, key) != image_token:
            raise UserError(
                f"{_key_of(section)}: the model's {key} is {getattr(settings, key)}, the tokenizer's image token is "
                f"{image_token}; use the model's own tokenizer"
            )
