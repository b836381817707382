"""A table of the training configuration: strict and frozen, documented by the docstrings of its fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def one_of(*keys: str, required: bool = True) -> Any:
    """Return a validator: exactly one (or, unless ``required``, at most one) of a section's keys has a value."""

    def check(section: Section) -> Section:
        set_keys = [key for key in keys if getattr(section, key.partition(".")[2]) not in (None, [])]
        if len(set_keys) > 1 or (required and not set_keys):
            wanted = f"exactly one of {', '.join(keys)}" if required else f"one of {', '.join(keys)}"
            raise ValueError(f"wanted {wanted}; found {' and '.join(set_keys) or 'none of them'}")
        return section

    return model_validator(mode="after")(check)
