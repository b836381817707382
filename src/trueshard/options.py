"""Every option of ``shard()``, declared once: its name, type, default, help and checks.

- ``Options`` is the record. ``shard()`` and ``verify()`` take ``ShardOptions``, its names and types as keyword
  arguments; ``Plan`` and the planner's ``Request`` inherit its fields; a configuration's ``[shard]`` and the command
  line make theirs from the fields' metadata. So a new option is a field here, a key of ``ShardOptions``, and its use.
- What a plan holds just as it was given is in ``AppliedOptions``, which ``Plan`` inherits; the rest of ``Options`` is
  resolved on a model (units, mixed precision, styles of the tensor axis) or used up in choosing (a budget of memory).
- Nothing here imports torch at the top, so that the command line takes words and defaults from here at no cost.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

from trueshard.axes import SHARED
from trueshard.text import nearest, parse_size

if TYPE_CHECKING:
    from types import EllipsisType

    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from typing_extensions import Self

    from trueshard.plans import MixedPrecision

ReshardWord = Literal["default", "always", "never", "last_layer", "auto"]
Recompute = Literal["none", "full", "selective"]
RecomputeWord = Literal["none", "full", "selective", "auto"]
PrecisionWord = Literal["bf16", "fp16"]
Offload = Literal["none", "cpu"]
GradientSums = Literal["whole", "sharded"]
GradientSumsWord = Literal["whole", "sharded", "auto"]

RESHARD_WORDS = tuple(word for word in get_args(ReshardWord) if word != "auto")
RECOMPUTE_WORDS = get_args(Recompute)
OFFLOAD_WORDS = get_args(Offload)
GRADIENT_SUMS = get_args(GradientSums)
WHOLE, SHARDED = GRADIENT_SUMS
PRECISION_WORDS = get_args(PrecisionWord)

TENSOR_KEYS = ("ranks", "sequence", "trial")
"""Keys of the option ``tensor`` that are no glob."""
EXPONENTS = range(-126, 75)
"""Exponents of a grid's step that ``exact`` may name: steps and ranges are numbers that float32 holds."""

Units: TypeAlias = "str | type | Callable[[str, nn.Module], bool] | Sequence[str | type | EllipsisType] | None"
Reshard: TypeAlias = "ReshardWord | int | Mapping[str, ReshardWord | int | bool]"
Precision: TypeAlias = "MixedPrecision | MixedPrecisionPolicy | str | None"
Recomputation: TypeAlias = "RecomputeWord | Mapping[str, RecomputeWord]"
Sums: TypeAlias = "GradientSumsWord | Mapping[str, GradientSumsWord]"
Tensor: TypeAlias = "int | Mapping[str, str | int | bool]"
Exact: TypeAlias = "bool | Mapping[str, int]"


def option(default: Any, help: str, *, text: Any = None, least: int | None = None) -> Any:
    """Return a dataclass field for an option.

    Args:
        default: its default in ``shard()``; elsewhere it may differ.
        help: what it does; the first sentence is the command line's help, all of it the documents'.
        text: its type where it is written as text (TOML); None: it cannot be, or that of the default.
        least: the smallest number that it may be, where it is one.
    """
    text = type(default) if text is None else text
    help = " ".join(textwrap.dedent(help).split())
    return dataclasses.field(default=default, metadata={"help": help, "text": text, "least": least})


@dataclass(frozen=True, kw_only=True)
class AppliedOptions:
    """The options of ``shard()`` that a plan holds just as they were given."""

    reshard_after_forward: Reshard = option(
        "default",
        """When gathered parameters are freed. ``"default"``: blocks after forward, the last block and the root after
        backward. ``"always"``: all after forward. ``"never"``: all after backward. ``"last_layer"``: all but the last
        block after forward. An integer: reshard to that many ranks. Or a table from globs over unit names to these;
        the rest is ``"default"``. ``"auto"``: chosen by the planner.""",
        text=ReshardWord | int | dict[str, ReshardWord | int],
        least=2,
    )
    activation_checkpointing: Recomputation = option(
        "none",
        """Recomputation of activations in backward. ``"none"``, ``"full"`` or ``"selective"``, for every block. Or a
        table from globs over unit names to these. ``"auto"``: chosen by the planner.""",
        text=RecomputeWord | dict[str, RecomputeWord],
    )
    compile: bool = option(False, "Compile every block in place.")
    offload: Offload | str = option(
        "none",
        """Where shards rest between uses. ``"cpu"`` keeps shards, gradients and optimizer state in host memory.""",
        text=Offload,
    )
    accumulate_gradients: Sums = option(
        "auto",
        """Gradients of a step of several microbatches, until its last one. ``"whole"``: each rank adds up the whole
        gradients, which are reduced once. ``"sharded"``: each microbatch is reduced, and ranks hold shards. Or a table
        from globs over unit names to these; the rest is ``"auto"``: whole if these and the model's state take at most
        half of the memory; the planner chooses by time.""",
        text=GradientSumsWord | dict[str, GradientSumsWord],
    )
    context: int = option(
        1,
        """Ranks that share each sequence. Give each its part of the tokens, see ``trueshard.split_sequence``; a run
        does. Their parameters are sharded over them, too.""",
        least=1,
    )
    experts: int = option(
        1,
        """Ranks that share out the experts of each layer. Tokens travel to them; neighbours among all that are not
        copies. For stacked experts, as transformers has them.""",
        least=1,
    )
    exact: Exact = option(
        False,
        """The same bits at any number of ranks. The same microbatches give the same gradients, parameters and optimizer
        state at any number of ranks and replicas and any split into accumulation: gradients are rounded to a grid of
        2**-40 and added in float64, twice the bytes of a float32 reduction. Or a table from globs over parameters'
        names to another exponent, from -126 to 74: the first that matches counts, the rest has -40. The range is 2**53
        steps.""",
        text=bool | dict[str, int],
    )
    watch: int = option(
        100,
        """Steps between two comparisons of what several ranks hold in common. Parameters and gradients of replicas and
        of what is held whole, and buffers, are compared by hash, after the first two steps of each optimizer as well;
        what went apart is an error. 0: never.""",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class Options(AppliedOptions):
    """The options of ``shard()`` as the user gave them."""

    units: Units = option(
        "auto",
        """Modules that are gathered together. ``"auto"``, class name(s), class(es), glob(s) over names, or
        ``callable(name, module) -> bool``. ``...`` in a list (as text ``"..."``) is the automatic choice, which the
        others are added to.""",
        text=str | list[str],
    )
    mixed_precision: Precision = option(
        None,
        """Dtype that units compute in, while gradients are reduced in float32. ``"bf16"`` or ``"fp16"``. Or a
        ``trueshard.MixedPrecision``, or torch's ``MixedPrecisionPolicy``, as it stands. The storage dtype is never
        touched. A run scales the loss with "fp16", and leaves out steps that overflow.""",
        text=PrecisionWord | None,
    )
    memory: str | int | None = option(
        None,
        """Budget of torch's reserved memory on each rank, such as 70GiB. Options that are ``"auto"`` are chosen
        to fit it, or nothing is sharded. The planner assumes a microbatch of one sample; for another, give the plan
        that ``trueshard.plan`` makes.""",
        text=str | None,
    )
    tensor: Tensor = option(
        1,
        """Ranks that share each matrix. As the model's own plan says (transformers' ``tp_plan``); neighbours, of one
        node. Or a table from globs over names of modules to styles, with ``"ranks"``, the number of ranks, unless a
        mesh has it, and ``"sequence"``: true if each rank holds its part of the sequence between matrices, which saves
        memory. Before that, one block of each class is tried on a few tokens, whole and in parts; ``"trial"``: false
        leaves it out, and the trial of what depends on other samples of a batch.""",
        text=int | dict[str, bool | int | str],
        least=1,
    )

    def differing(self, defaults: Options | None = None) -> list[str]:
        """Return the names of the options that differ from their defaults, in the order of ``ShardOptions``."""
        usual = defaults or DEFAULTS
        return [name for name in NAMES if getattr(self, name) != getattr(usual, name)]

    def check_alone(self, plan: object, defaults: Options | None = None) -> None:
        """Raise ValueError if any option is set alongside ``plan=``."""
        if plan is not None and (names := self.differing(defaults)):
            raise ValueError(f"plan= holds every choice: leave out {', '.join(names)}, or leave out plan")

    def needs_planner(self) -> bool:
        """True if an option is ``"auto"``, or a budget must be kept."""
        return self.memory is not None or is_free(self.reshard_after_forward) or is_free(self.activation_checkpointing)

    def scales_loss(self) -> bool:
        """True if the loss has to be scaled, because gradients in the compute dtype leave its range."""
        return self.mixed_precision == "fp16"

    def budget(self) -> int | None:
        """Return ``memory`` in bytes."""
        return None if self.memory is None else parse_size("memory", self.memory)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values for some options."""
        return dataclasses.replace(self, **changes)

    def on(self, sizes: Mapping[str, int]) -> Self:
        """Return a copy with the sizes of a mesh's axes, by name."""
        changes: dict[str, Any] = {name: sizes.get(name, 1) for name in SHARED}
        if isinstance(self.tensor, Mapping):
            changes["tensor"] = {**self.tensor, "ranks": changes["tensor"]}
        return self.replace(**changes)


class ShardOptions(TypedDict, total=False):
    """The keyword arguments that ``shard()`` and ``verify()`` take: names and types of the fields of ``Options``."""

    units: Units
    reshard_after_forward: Reshard
    mixed_precision: MixedPrecision | MixedPrecisionPolicy | PrecisionWord | None
    activation_checkpointing: Recomputation
    compile: bool
    offload: Offload
    accumulate_gradients: Sums
    memory: str | int | None
    tensor: Tensor
    context: int
    experts: int
    exact: Exact
    watch: int


DEFAULTS = Options()
FIELDS = {field.name: field for field in dataclasses.fields(Options)}
NAMES = tuple(ShardOptions.__annotations__)
"""Every option, in the order of signatures and documents."""


def is_free(word: Any) -> bool:
    """True if an option, or one glob of it, is ``"auto"``."""
    return "auto" in word.values() if isinstance(word, Mapping) else bool(word == "auto")


def options_of(function: str, words: ShardOptions) -> Options:
    """Return the keyword arguments of a public function as a record; raise TypeError for one that is no option."""
    if unknown := next((name for name in words if name not in NAMES), None):
        raise TypeError(f"{function}() has no argument {unknown!r}.{nearest(unknown, NAMES)}")
    return Options(**words)


Function = TypeVar("Function", bound=Callable[..., Any])


def show_options(function: Function) -> Function:
    """Let ``help()`` and ``inspect.signature`` show ``**options: ShardOptions`` as the options, with their defaults.

    A type checker reads them from ``ShardOptions``; people and notebooks read signature and docstring, which are made
    here from the record, in the place of the line that begins with "options:".
    """
    signature = inspect.signature(function)
    before = [
        parameter for parameter in signature.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    types, kind = ShardOptions.__annotations__, inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, kind, default=FIELDS[name].default, annotation=_type_words(types[name]))
        for name in NAMES
    ]
    function.__signature__ = signature.replace(parameters=[*before, *added])  # type: ignore[attr-defined]
    lines = (function.__doc__ or "").split("\n")
    at = next((number for number, line in enumerate(lines) if line.strip().startswith("options:")), None)
    if at is not None:
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at : at + 1] = [line for name in NAMES for line in _argument(name, indent)]
        function.__doc__ = "\n".join(lines)
    return function


def _argument(name: str, indent: str) -> list[str]:
    text = f"{name}: {FIELDS[name].metadata['help']}"
    return textwrap.wrap(text, 116, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)


def _type_words(annotation: Any) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation))
