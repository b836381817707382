"""The Plan, every choice that sharding makes, and its Forecast, as frozen data.

- A plan holds names and numbers only, never a module or a tensor: it can be printed, written as JSON, edited, compared.
- ``Plan()`` with no units is a set of choices still to be resolved on a model; ``shard()`` returns one with its units.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from trueshard.axes import OPTIONS
from trueshard.options import (
    EXPONENTS,
    GRADIENT_SUMS,
    OFFLOAD_WORDS,
    PRECISION_WORDS,
    SHARDED,
    TENSOR_KEYS,
    AppliedOptions,
    GradientSums,
    Options,
    Precision,
    Recompute,
)
from trueshard.text import load_json, nearest, size, table

VERSION = 2
"""Version of a plan's JSON."""


@dataclass(frozen=True)
class Forecast:
    """Memory, traffic and speed of one step of one rank. Bytes, seconds and counts; nothing is rounded."""

    model: str
    hardware: str
    """Key of the catalogue, for example ``"h100"``."""
    ranks: int
    ranks_per_node: int
    sequence: int
    """Tokens of a sample; 1 for samples that are no sequences."""
    microbatch: int
    """Samples a rank in one forward."""
    accumulation: int
    """Microbatches a step."""
    optimizer: str
    fits: bool
    budget_bytes: int
    """The limit for ``peak_reserved_bytes``: ``memory=``, or the device's memory less ``overhead_bytes``."""
    peak_live_bytes: int
    """Peak of the memory that tensors take."""
    peak_reserved_bytes: int
    """Peak of what torch's allocator takes from the device, as ``torch.cuda.max_memory_reserved()`` counts it."""
    overhead_bytes: int
    """Memory outside of torch's allocator: the device's context and the communicators' buffers."""
    peak_phase: str
    peak_unit: str
    peak_by_kind: Mapping[str, int]
    """Live bytes at the peak by kind; their sum is ``peak_live_bytes``."""
    bytes_received_per_step: int
    received_by_collective: Mapping[str, int]
    flops_per_step: int
    """Operations of this rank, recomputation included."""
    model_flops_per_step: int
    """Operations of this rank without recomputation, as MFU counts."""
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    """Time in which the device waits for communication."""
    tokens_per_second_per_rank: float
    """Samples, where ``sequence`` is 1."""
    mfu: float
    """Model operations a second over the device's peak in the compute dtype, between 0 and 1."""
    received_by_axis: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes received by axis: shard, replicate, tensor, context, experts, pipeline."""
    exposed_by_axis: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of ``exposed_communication_seconds`` by axis."""
    pipeline: int = 1
    """Stages of the pipeline; memory, bytes and operations are those of the stage that takes most memory."""
    schedule: str = ""
    """``"1f1b"``, ``"gpipe"``, ``"interleaved"``; "" without a pipeline."""
    virtual: int = 1
    """Chunks of blocks a rank."""
    in_flight: float = 0.0
    """Microbatches whose activations that stage holds at most; 0 without a pipeline."""
    bubble_seconds: float = 0.0
    """Time in which a rank has nothing to compute while the pipeline fills and drains."""
    host_bytes: int = 0
    """Peak of the host memory that a rank's offloaded shards, gradients and optimizer state take, and its snapshots."""
    snapshot_bytes: int = 0
    """Bytes of one snapshot of a rank's part of model and optimizers."""
    host_budget_bytes: int | None = None
    """The limit for ``host_bytes``: a rank's share of its node's main memory; None: not known."""

    @property
    def host_lack(self) -> int:
        """Bytes of host memory that a rank lacks; 0 or less if it lacks none."""
        return 0 if self.host_budget_bytes is None else self.host_bytes - self.host_budget_bytes

    @property
    def lacking_bytes(self) -> int:
        """Bytes by which it does not fit; 0 if it does."""
        return 0 if self.fits else max(self.peak_reserved_bytes - self.budget_bytes, self.host_lack)

    @property
    def counted(self) -> str:
        """Unit of ``tokens_per_second_per_rank``: "tokens", or "samples" where these are no sequences."""
        return "tokens" if self.sequence > 1 else "samples"


UnitKind = Literal["root", "block", "embedding", "head", "experts", "shared", "tied", "dtype"]

#: Dtype names that a mixed-precision choice may hold.
DTYPES = ("float64", "float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype_name(option: str, word: str) -> str:
    """Return ``"bfloat16"`` for ``"bf16"`` or ``"bfloat16"``, and so on; raise ValueError, naming ``option``."""
    name = SHORT_DTYPES.get(word, word)
    if name not in DTYPES:
        dtypes = [*SHORT_DTYPES, *DTYPES]
        raise ValueError(f"{option}={word!r} is no dtype; use one of {', '.join(dtypes)}.{nearest(word, dtypes)}")
    return name


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes in which a unit computes and reduces; the storage dtype never changes."""

    compute: str | None = None
    """Dtype of the gathered parameters and of the forward inputs; None: as stored."""
    reduce: str | None = None
    """Dtype in which gradients are reduced over ranks; None: the compute dtype."""
    output: str | None = None
    """Dtype to which a unit's floating-point outputs are cast; None: as computed."""
    cast_inputs: bool = True
    """Cast floating-point forward inputs to the compute dtype."""

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "output"):
            if (dtype := getattr(self, name)) is not None and dtype not in DTYPES:
                raise ValueError(f"mixed_precision.{name}={dtype!r} is no dtype name; use one of {', '.join(DTYPES)}")


def precision_of(option: Precision) -> MixedPrecision | None:
    """Return a plan's mixed precision for ``shard()``'s option; raise ValueError for what is none."""
    if option is None or isinstance(option, MixedPrecision):
        return option
    if isinstance(option, str) and option in PRECISION_WORDS:
        return MixedPrecision(compute=SHORT_DTYPES[option], reduce="float32")
    if not hasattr(option, "param_dtype"):
        words = ", ".join(f'"{word}"' for word in PRECISION_WORDS)
        raise ValueError(
            f"mixed_precision={option!r} is not known; use {words}, a trueshard.MixedPrecision or torch's "
            "MixedPrecisionPolicy"
        )
    policy: Any = option
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)
    compute, reduce, output = (None if dtype is None else str(dtype).removeprefix("torch.") for dtype in dtypes)
    return MixedPrecision(compute, reduce, output, policy.cast_forward_inputs)


def check_options(options: Options) -> None:
    """Raise ValueError for a value that no model and no number of ranks could make valid."""
    Plan.of(options)
    options.budget()


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together, in one collective."""

    name: str
    """The module's dotted name; several are joined by ``" + "``; the root's is ``""``."""
    modules: tuple[str, ...]
    kind: UnitKind
    parameters: int
    """Elements, each tied parameter once, units inside this one not counted."""
    bytes: int
    """Size in the storage dtype, whole (not per rank)."""
    trainable: int
    """Elements that require a gradient."""
    dtype: str
    """Storage dtype(s), joined by ``"+"``."""
    reshard_after_forward: bool | int = True
    """True: free after forward, gather again in backward. False: keep. An integer: reshard to that many ranks."""
    activation_checkpointing: Recompute = "none"
    accumulate_gradients: GradientSums = "whole"
    """Way in which gradients of several microbatches add up: whole on each rank, or as shards."""
    unshard_in_backward: bool = True
    """False where backward does not read the parameters (an embedding)."""
    why: str = ""

    def __post_init__(self) -> None:
        _one_of(f"unit {self.name!r}: activation_checkpointing", self.activation_checkpointing, get_args(Recompute))
        _one_of(f"unit {self.name!r}: kind", self.kind, get_args(UnitKind))
        _one_of(f"unit {self.name!r}: accumulate_gradients", self.accumulate_gradients, GRADIENT_SUMS)
        if not isinstance(self.reshard_after_forward, int):
            raise ValueError(f"unit {self.name!r}: reshard_after_forward must be true, false or a number of ranks")
        _a_bool(f"unit {self.name!r}: unshard_in_backward", self.unshard_in_backward)


@dataclass(frozen=True)
class Replicated:
    """A parameter that FSDP2 cannot shard: every rank holds it whole, and its gradient is averaged over ranks."""

    name: str
    parameters: int
    why: str


@dataclass(frozen=True)
class Plan(AppliedOptions):
    """Units, when they are freed and what they recompute, dtypes, and where shards rest.

    ``Plan(...)`` without ``units`` is resolved by ``shard(model, plan=...)``; the plan that it returns has them.
    """

    units: tuple[Unit, ...] = ()
    replicated: tuple[Replicated, ...] = ()
    mixed_precision: MixedPrecision | None = None
    pipeline: bool = False
    """The model is one stage of a pipeline: a stage runs many microbatches in a row, so ``default`` means ``never``."""
    tensor: int = 1
    """Ranks that share each matrix."""
    styles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Glob over names of modules and parameters → how ``tensor`` ranks share them; empty: as the model's plan says."""
    sequence: bool = False
    """True if each of the ``tensor`` ranks holds a part of the sequence between matrices."""
    trial: bool = True
    """True if trials ask whether ranks with parts of matrices, or of a batch, compute what one process does."""
    tried: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Results of these trials, in sentences; not read when the plan is applied."""
    ranks: tuple[int, ...] = ()
    """Ranks over which gradients are averaged: (shard,) or (replicate, shard), where those of a context shard, too;
    empty before the plan is resolved."""
    cut_dimensions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Parameter → dimension along which ranks have a part each, where that is not the first. Follows from shapes and
    ``ranks``, and is computed anew when the plan is applied."""
    padding: int = 0
    """Bytes of padding that the shards of all ``ranks`` that share a parameter have together."""
    resolved_for: str = ""
    """The policies that the units' values were resolved for; with other policies they are resolved again."""
    forecast: Forecast | None = dataclasses.field(default=None, compare=False)
    """The planner's; not read when the plan is applied."""
    version: int = VERSION

    def __post_init__(self) -> None:
        _one_of("offload", self.offload, OFFLOAD_WORDS)
        _a_bool("compile", self.compile)
        _a_bool("pipeline", self.pipeline)
        _a_bool("sequence", self.sequence)
        _a_bool("trial", self.trial)
        _check_exact(self.exact)
        for axis in OPTIONS:
            if type(size := getattr(self, axis)) is not int or size < 1:
                raise ValueError(f"{axis} must be a number of ranks, at least 1, not {size!r}")
        if not isinstance(self.watch, int) or self.watch < 0:
            raise ValueError(f"watch must be a number of steps, 0 for never, not {self.watch!r}")
        if self.mixed_precision is not None and not isinstance(self.mixed_precision, MixedPrecision):
            raise ValueError(f"mixed_precision must be a MixedPrecision, not {self.mixed_precision!r}")
        if self.pipeline and self.reshard_after_forward == "default":
            kept = tuple(dataclasses.replace(unit, reshard_after_forward=False) for unit in self.units)
            object.__setattr__(self, "units", kept)

    @classmethod
    def of(cls, options: Options) -> Plan:
        """Return the plan, without units, that holds options (``units`` and ``memory`` are not part of it).

        Raises:
            ValueError: a value that no model and no number of ranks could make valid.
        """
        tensor = options.tensor if isinstance(options.tensor, Mapping) else {"ranks": options.tensor}
        applied = {field.name: getattr(options, field.name) for field in dataclasses.fields(AppliedOptions)}
        applied["exact"] = dict(options.exact) if isinstance(options.exact, Mapping) else options.exact
        return cls(
            mixed_precision=precision_of(options.mixed_precision),
            tensor=cast(int, tensor.get("ranks", 1)),
            styles={glob: str(style) for glob, style in tensor.items() if glob not in TENSOR_KEYS},
            sequence=cast(bool, tensor.get("sequence", False)),
            trial=cast(bool, tensor.get("trial", True)),
            **applied | {"compile": bool(options.compile)},
        )

    @property
    def policies(self) -> str:
        """The policies that have a value for each unit, as text to compare."""
        words = [self.reshard_after_forward, self.activation_checkpointing, self.accumulate_gradients]
        return json.dumps([dict(word) if isinstance(word, Mapping) else word for word in words])

    @property
    def modules_apart(self) -> tuple[str, ...]:
        """Modules whose experts are shared out over ranks, each a unit of its own."""
        modules = (name for unit in self.units if unit.kind == "experts" for name in unit.modules)
        return tuple(modules) if self.experts > 1 else ()

    @property
    def trials(self) -> tuple[str, ...]:
        """Trials of the tensor axis and of batches, in sentences."""
        if not self.trial:
            return ('What ranks compute from parts of matrices and batches was not tried: "trial" is false.',)
        return tuple(f"Tried: {sentence}." for sentence in self.tried)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Sentences about parameters that are not cut by rows, and about padding."""
        sentences, total = [], sum(unit.bytes for unit in self.units)
        for dim in sorted(set(self.cut_dimensions.values())):
            first, *others = (name for name, other in self.cut_dimensions.items() if other == dim)
            more = f" and {len(others)} more" if others else ""
            sentences.append(f"Cut along dimension {dim}, since rows would be padded: {first}{more}.")
        if self.padding * 100 >= max(1, total):
            sentences.append(f"Padding: {size(self.padding)} on {self.ranks[-1]} ranks, beside {size(total)}.")
        return tuple(sentences)

    def unit(self, name: str) -> Unit:
        """Return the unit called ``name``, or the one with a module of that name.

        Raises:
            KeyError: no unit has that name.
        """
        for unit in self.units:
            if name == unit.name or name in unit.modules:
                return unit
        raise KeyError(f"no unit is called {name!r}; units: {', '.join(repr(unit.name) for unit in self.units)}")

    def to_json(self) -> str:
        """Return the plan as JSON text, which ``from_json`` reads back to an equal plan."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from ``to_json``'s text, or from an object that holds one as ``"plan"``.

        Raises:
            ValueError: not JSON, an unknown key, a missing key or a newer version; the message names it.
        """
        try:
            data = load_json(text)
        except ValueError as error:
            raise ValueError(f"a plan must be JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError("a plan must be a JSON object")
        if isinstance(data.get("plan"), dict):
            data = data["plan"]
        if (version := data.pop("version", VERSION)) != VERSION:
            raise ValueError(f"plan version {version} is not the one that this library reads ({VERSION})")
        data["ranks"], data["tried"] = (tuple(_list(data, key)) for key in ("ranks", "tried"))
        for key, kind in (("units", Unit), ("replicated", Replicated)):
            data[key] = tuple(_build(kind, value, f"{key}[{i}]") for i, value in enumerate(_list(data, key)))
        for key, part in (("mixed_precision", MixedPrecision), ("forecast", Forecast)):
            if data.get(key) is not None:
                data[key] = _build(part, data[key], key)
        plan = _build(cls, data, "plan")
        assert isinstance(plan, Plan)
        return plan

    def __str__(self) -> str:
        head: tuple[str, ...] = ("unit", "parameters", "bytes", "trainable", "dtype", "reshard after forward")
        head += ("activation checkpointing", "why")
        rows: list[tuple[str, ...]] = []
        for unit in self.units:
            policy = unit.reshard_after_forward
            reshard = ("yes" if policy else "no") if isinstance(policy, bool) else f"to {policy} ranks"
            numbers = (f"{unit.parameters:,}", size(unit.bytes), f"{unit.trainable:,}")
            name = unit.name or "(root)"
            rows.append((name, *numbers, unit.dtype, reshard, unit.activation_checkpointing, unit.why))
        rows += [(r.name, f"{r.parameters:,}", "", "", "", "replicated", "", r.why) for r in self.replicated]
        sharded = [unit.name or "(root)" for unit in self.units if unit.accumulate_gradients == SHARDED]
        of = "" if len(sharded) == len(self.units) else f" of {', '.join(sharded)}"
        sums = [f"Gradients{of} are reduced in each microbatch of a step, and add up as shards."] if sharded else []
        return "\n".join([*table(head, rows, right=(1, 2, 3)), *sums, *self.cuts, *self.trials])


def _one_of(what: str, word: Any, words: Sequence[str]) -> None:
    if word not in words:
        raise ValueError(f"{what}={word!r} is not known; use " + " or ".join(f'"{option}"' for option in words))


def _a_bool(what: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, not {value!r}")


def _check_exact(value: Any) -> None:
    if isinstance(value, bool):
        return
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"exact must be true, false or a mapping of globs to exponents, not {value!r}")
    for glob, exponent in value.items():
        if not isinstance(glob, str) or type(exponent) is not int or exponent not in EXPONENTS:
            raise ValueError(
                f"exact: {glob!r}: {exponent!r}; wanted a glob of parameters' names and the exponent of their grid's "
                f"step, a whole number from {EXPONENTS[0]} to {EXPONENTS[-1]}"
            )


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    value = data.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{key} must be a list, not {value!r}")
    return value


def _build(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object, not {data!r}")
    if "modules" in data:
        data = {**data, "modules": tuple(_list(data, "modules"))}
    keys = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(data) - keys):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(keys))}")
    try:
        return cls(**data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
