"""The section `[shard]`, made from the records of the options of `trueshard.shard()`."""

from __future__ import annotations

import functools
import math
import operator
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import Field, create_model, model_validator

from trueshard.axes import sizes_of
from trueshard.options import FIELDS, NAMES, Options
from trueshard.plans import check_options
from trueshard.train.section import Section, Text


def _in_toml(name: str, annotation: Any = None) -> Any:
    """Return the type of an option's value in TOML: its record's, with no empty text and with bounded numbers."""
    metadata = FIELDS[name].metadata
    annotation = metadata["text"] if annotation is None else annotation
    arguments = tuple(_in_toml(name, argument) for argument in get_args(annotation))
    if annotation is int:
        return annotation if metadata["least"] is None else Annotated[int, Field(ge=metadata["least"])]
    if annotation is str:
        return Text
    if get_origin(annotation) in (Union, UnionType):
        return functools.reduce(operator.or_, arguments)
    if get_origin(annotation) in (list, dict):
        return Annotated[get_origin(annotation)[arguments], Field(min_length=1)]
    return annotation


if TYPE_CHECKING:
    _OptionKeys = Section  # so that everything reads them through ``ShardSection.options()``, whose types are known
else:
    _OptionKeys = create_model(
        "OptionKeys",
        __base__=Section,
        **{
            name: (_in_toml(name), Field(FIELDS[name].default, description=FIELDS[name].metadata["help"]))
            for name in NAMES
        },
    )


class ShardSection(_OptionKeys):
    """The options of `trueshard.shard()`, and the copies of the model."""

    replicate: Annotated[int, Field(ge=1)] = 1
    """Copies of the whole model: each is sharded over ranks / `replicate` ranks (HSDP)."""

    def options(self) -> Options:
        """Return the options of `trueshard.shard()`."""
        return Options(**{name: getattr(self, name) for name in NAMES})

    def readers(self, ranks: int) -> int:
        """Return how many of `ranks` read different samples; raise ValueError if the axes do not divide them."""
        axes = {f"shard.{name}": size for name, size in sizes_of(self).items()}
        sizes = {"shard.replicate": self.replicate} | axes
        if ranks % (product := math.prod(sizes.values())):
            factors = " × ".join(f"{key} = {size}" for key, size in sizes.items() if size > 1)
            raise ValueError(f"{factors}: {ranks} ranks do not divide by {product}; choose others")
        return ranks // math.prod(axes.values())

    @model_validator(mode="after")
    def _checked(self) -> ShardSection:
        """Raise ValueError, with the key, for what is no valid option whatever the model."""
        try:
            check_options(self.options())
        except ValueError as error:
            raise ValueError(f"shard.{error}") from None
        return self
