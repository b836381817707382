"""Models from the user's functions (``file.py:factory``, or given), called without any data; from ``config.json``."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.errors import one_line, with_kind
from trueshard.model import names
from trueshard.planner.inputs.architectures import architecture, cached
from trueshard.planner.inputs.fake_tensors import READERS, Unavailable, fake_copy, make_fake, on_meta, without_gpu
from trueshard.text import load_json

_RESULT = (
    "it must return a torch.nn.Module, a tuple (module, optimizers, batch, loss) of which all but the module may be "
    "left out, or an object or dict with 'model'"
)
_NAMES = ("model", "batch", "loss", "optimizers", "optimizer")
"""Names under which a result, or its file, may hold parts."""


@dataclass
class TrainingParts:
    """A model, and perhaps what goes with it."""

    model: nn.Module
    batch: Any = None
    """Example tensors, or a callable (microbatch, sequence) → batch."""
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    optimizers: Any = None
    """A callable(model) → optimizer(s), or optimizers over the model's parameters."""


@dataclass
class Factory:
    """A function that makes models again and again."""

    name: str
    function: Callable[..., Any]
    beside: Mapping[str, Any]
    """Parts in the same file (``parts_among``), used where the result has none."""
    file: Path | None = None
    """Source file."""
    folder: Path | None = None
    """Folder on ``sys.path`` while it runs."""
    _made: TrainingParts | None = None
    """Parts that ``look`` made, for the next ``build``."""

    def look(self) -> TrainingParts:
        """Call the function on the meta device, and return its result; the next ``build`` goes on with it."""
        with on_meta():
            self._made = self.make()
        return self._made

    def build(self, dtype: torch.dtype | None = None) -> TrainingParts:
        """Call the function on the meta device and return its result on fake tensors. Inside ``fake_tensors``.

        ``dtype``: of floating-point parameters; None: as the function made them. Raises ValueError of one line if the
        function fails, asks for data or a GPU, or returns something else.
        """
        parts, self._made = self._made or self.look(), None
        model = parts.model
        if all(parameter.is_meta and not _torch.is_fake(parameter) for parameter in model.parameters()):
            stand_ins = make_fake(model, dtype)
        else:  # made elsewhere, and perhaps used there
            parts.model, stand_ins = fake_copy(model, dtype)
        made = parts.optimizers
        for optimizer in made if isinstance(made, (list, tuple)) else [made]:
            for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ():
                group["params"] = [stand_ins.get(id(parameter), parameter) for parameter in group["params"]]
        return parts

    def make(self, **arguments: Any) -> TrainingParts:
        """Call the function, and return its parts on whatever device it makes them. Raises ValueError as ``build``."""
        with explained(self.name, self.file, self.folder):
            result = self.function(**arguments)
        return self.parts_of(result)

    def parts_of(self, result: Any) -> TrainingParts:
        """Return the parts of the function's result, completed by its file's; raise ValueError if there is no model."""
        if isinstance(result, nn.Module):
            result = {"model": result}
        if isinstance(result, Sequence) and 2 <= len(result) <= 4 and isinstance(result[0], nn.Module):
            optimizers = [part for part in result[1:] if _are_optimizers(part)]
            others = [part for part in result[1:] if not _are_optimizers(part)]
            if len(optimizers) > 1 or len(others) > 2:
                raise ValueError(f"{self.name} returns {len(result)} things: {_RESULT}")
            result = {"model": result[0], **dict(zip(("batch", "loss"), others, strict=False))}
            result["optimizers"] = optimizers[0] if optimizers else None
        returned = result if isinstance(result, Mapping) else {key: getattr(result, key, None) for key in _NAMES}
        model = returned.get("model")
        if not isinstance(model, nn.Module):
            held = "" if model is None else f" whose model is a {type(model).__name__}"
            raise ValueError(f"{self.name} returns a {type(result).__name__}{held}: {_RESULT}")
        local = parts_among(returned)
        if local["optimizers"] is None and _are_optimizers(self.beside.get("optimizers")):
            raise ValueError(
                f"{self.name}: the optimizer beside it has another model's parameters; return it with the model, "
                "or make it a function optimizers(model)"
            )
        parts = TrainingParts(model, **{k: self.beside.get(k) if part is None else part for k, part in local.items()})
        if parts.loss is not None and not callable(parts.loss):
            raise ValueError(f"{self.name}: its loss must be a function (model, batch) → scalar, not {parts.loss!r}")
        return parts


@dataclass
class Original:
    """A module of the user, which stays as it is: copies of it are built."""

    module: nn.Module
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Parts in its file (``parts_among``)."""

    @property
    def name(self) -> str:
        """Name of the module's class."""
        return type(names.unwrap(self.module)).__name__

    def make(self) -> TrainingParts:
        """Return a copy with all values, and copies of the parts in its file."""
        module, beside = copy.deepcopy((self.module, dict(self.beside)))
        return TrainingParts(module, **beside)

    def build(self, dtype: torch.dtype | None = None) -> TrainingParts:
        """Return a copy on fake tensors. Inside ``fake_tensors``. Raises ValueError as ``fake_copy``."""
        parts = TrainingParts(fake_copy(self.module, dtype)[0], **self.beside)
        if not callable(parts.optimizers):  # they have the parameters of the original
            parts.optimizers = None
        return parts


def parts_among(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``batch``, ``loss`` and ``optimizers`` (or ``optimizer``) of a mapping; None where it has none."""
    several = parts.get("optimizers")
    optimizers = parts.get("optimizer") if several is None else several
    return {"batch": parts.get("batch"), "loss": parts.get("loss"), "optimizers": optimizers}


def _are_optimizers(value: Any) -> bool:
    held = list(value.values()) if isinstance(value, Mapping) else value
    held = held if isinstance(held, (list, tuple)) else [held]
    return bool(held) and all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in held)


def from_callable(function: Callable[..., Any], name: str = "", beside: Mapping[str, Any] | None = None) -> Factory:
    """Return a factory around a function or class; raise ValueError if it needs arguments."""
    name = name or getattr(function, "__name__", type(function).__name__)
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # builtins have no signature
        parameters = []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if needed:
        raise ValueError(
            f"{name} needs arguments ({', '.join(needed)}); give them defaults, or give a function that takes none"
        )
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Factory(name, function, beside or {}, Path(code.co_filename) if code else None)


def from_file(words: str, guarded: bool = True) -> Factory | Original:
    """Import the file of ``file.py:attribute``, with its folder on ``sys.path``, and return the factory.

    ``guarded``: import it where no GPU is at hand and no weights are loaded. Raises ValueError for no such file or
    attribute, one that is not callable or needs arguments, or a file that cannot be imported.
    """
    path, _, attribute = words.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not path or not attribute:
        raise ValueError(f"{words!r} names no function; write file.py:function")
    if not file.is_file():
        names_there = [path.name for path in file.parent.glob("*.py")]
        raise ValueError(f"there is no file {path!r}.{names.nearest(file.name, names_there)}")
    module = _imported(file, words, guarded)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            names_there = [name for name, value in vars(target).items() if callable(value) and not name.startswith("_")]
            raise ValueError(f"{file.name} has no {attribute!r}.{names.nearest(attribute, names_there)}")
        target = getattr(target, part)
    held = {key: value for key, value in vars(module).items() if key in _NAMES}
    beside = parts_among({k: v for k, v in held.items() if v is not target and not isinstance(v, ModuleType)})
    if isinstance(target, nn.Module):
        return Original(target, beside)
    if not callable(target):
        raise ValueError(f"{words}: {attribute!r} is a {type(target).__name__}, not a function that makes a model")
    factory = from_callable(target, f"{file.name}:{attribute}", beside)
    factory.file, factory.folder = file, file.parent
    return factory


def _imported(file: Path, words: str, guarded: bool) -> ModuleType:
    text = file.read_text(encoding="utf-8", errors="replace")
    for library, word in READERS.items():
        if guarded and word in text and importlib.util.find_spec(library.partition(".")[0]) is not None:
            importlib.import_module(library)  # so that it is there to be guarded before the factory imports it
    name = f"_trueshard_factory_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{words}: {file.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        guard = without_gpu() if guarded else contextlib.nullcontext()
        with explained(f"importing {file.name}", file, file.parent), guard, _torch.real_tensors():
            spec.loader.exec_module(module)
    except ValueError:
        sys.modules.pop(name, None)
        raise
    return module


@contextlib.contextmanager
def explained(name: str, file: Path | None, folder: Path | None) -> Iterator[None]:
    """Turn errors inside into a ValueError of one line; put ``folder`` on ``sys.path``."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        yield
    except Unavailable as error:
        raise ValueError(f"{name}{_at(error, file)} {error}") from error
    except (Exception, SystemExit) as error:
        words = f"{type(error).__name__}: {one_line(error, 300)}"
        if any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA", "accelerator")):
            words += "; the planner has no GPU: build the model on the CPU, and move it where it is trained"
        raise ValueError(f"{name} fails{_at(error, file)}: {words}") from error
    finally:
        if folder is not None:
            sys.path.remove(str(folder))


def _at(error: BaseException, file: Path | None) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" (line {lines[-1]})" if lines else ""


# config.json

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
"""Mappings of ``transformers`` from a configuration to a class."""
PAIRS = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING")
"""Mappings that come first for a model with an encoder and a decoder."""


class Configuration:
    """Models of a transformers ``config.json``: nothing is loaded from a hub, no weights, no foreign code.

    ``where``: the file or the name, for errors. Raises ValueError for what transformers does not know.
    """

    def __init__(self, name: str, data: Any, where: str) -> None:
        self.name = name
        self.settings = _settings(data, where)
        self.cls = _class(self.settings, where)
        self.assumptions: list[str] = []
        if not self.settings.architectures:
            self.assumptions.append(f"The class is {self.cls.__name__}: the configuration names none.")
        if getattr(self.settings, "quantization_config", None) is not None:
            self.assumptions.append("The configuration's quantization is left out: parameters are stored whole.")
        self.assumptions += _left_out(self.settings, self.cls)

    def build(self, dtype: torch.dtype | None = None) -> TrainingParts:
        """Return a new model on fake tensors, stored in ``dtype``; None: float32, whatever the configuration says."""
        try:
            with _torch.real_tensors(), torch.device("meta"):
                model = self.cls._from_config(self.settings, dtype=dtype or torch.float32)
        except Exception as error:  # whatever the modelling code trips over
            raise ValueError(
                f"{self.name}: no {self.cls.__name__} can be built from it ({with_kind(error)}); "
                "correct its configuration"
            ) from error
        make_fake(model)
        return TrainingParts(model)


def read_configuration(path: Path) -> Configuration:
    """Return the configuration of a folder with a ``config.json``, or of that file; raises ValueError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = load_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"{file.parent} has no config.json" if file.parent.is_dir() else f"{file.parent} does not exist"
        why = what if isinstance(error, FileNotFoundError) else f"{file} cannot be read ({error.strerror})"
        raise ValueError(f"{why}; give a folder with a config.json, that file, or file.py:factory") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    return Configuration(name, data, str(file))


def named_configuration(words: str) -> Configuration | None:
    """Return the configuration of a name: of the hub's cache on this machine, or a known one; None if there is none."""
    if (file := cached(words)) is not None:
        configuration = read_configuration(file)
        configuration.name = words.rpartition("/")[2]
        configuration.assumptions.insert(0, f"The configuration is that of {words} in the hub's cache on this machine.")
        return configuration
    if (entry := architecture(words)) is None:
        return None
    configuration = Configuration(entry.name, copy.deepcopy(dict(entry.fields)), entry.name)
    if "architectures" not in entry.fields:
        configuration.assumptions.clear()
    assumption = f"The architecture is known by name: sizes as in config.json of {entry.hub[0]} (MODEL)."
    configuration.assumptions.insert(0, assumption)
    return configuration


def _settings(data: Any, where: str) -> Any:
    """Return a configuration for training: no cache, attention as transformers chooses it."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise ValueError(
            f"{where} needs transformers; pip install 'trueshard[train]', or use file.py:factory"
        ) from None
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f'{where} is not a transformers configuration: it has no "model_type"')
    if kind not in CONFIG_MAPPING:
        remedy = " Its own code (auto_map) is not run; write file.py:factory." if "auto_map" in data else ""
        near = names.nearest(kind, list(CONFIG_MAPPING))
        raise ValueError(f"{where}: the model_type {kind!r} is unknown to transformers.{near}{remedy}")
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        data.pop(key, None)
    try:
        settings = CONFIG_MAPPING[kind].from_dict(data)
    except Exception as error:  # transformers validates in several ways
        raise ValueError(f"{where} is refused by transformers ({with_kind(error)}); correct it") from None
    for part in (settings, settings.get_text_config()):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if settings.is_encoder_decoder and getattr(settings, "decoder_start_token_id", None) is None:
        settings.decoder_start_token_id = getattr(settings, "pad_token_id", None) or 0
    return settings


def _left_out(settings: Any, cls: Any) -> list[str]:
    """Return a sentence on layers of multi-token prediction: checkpoints have them, classes of transformers not."""
    fields = vars(settings) | vars(settings.get_text_config())
    keys = [key for key, count in fields.items() if ("nextn" in key or "mtp" in key) and type(count) is int and count]
    named = [f"{key}={fields[key]}" for key in keys]
    ignored = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
    named = named or ["mtp.*" for pattern in ignored if "mtp" in pattern]
    return [f"Multi-token prediction ({', '.join(named)}) is left out, as transformers does it."] if named else []


def _class(settings: Any, where: str) -> Any:
    import transformers

    architecture_name = (settings.architectures or [None])[0]
    if architecture_name is not None:
        cls = getattr(transformers, architecture_name, None)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            classes = [name for name in dir(transformers) if "For" in name or name.endswith("Model")]
            near = names.nearest(architecture_name, classes)
            raise ValueError(f"{where}: the architecture {architecture_name!r} is unknown to transformers.{near}")
        return cls
    for mapping in (*PAIRS, *MAPPINGS) if settings.is_encoder_decoder else MAPPINGS:
        if type(settings) in (classes_of := getattr(transformers, mapping, {})):
            cls = classes_of[type(settings)]
            return cls[0] if isinstance(cls, tuple) else cls
    raise ValueError(f'{where}: no class is known for {settings.model_type!r}; add "architectures": ["…"]')
