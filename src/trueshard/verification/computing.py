"""Whether mixed precision is in force: in which dtype each module finds its parameters when it computes."""

from __future__ import annotations

from typing import Any

from torch import nn

from trueshard.names import named_modules
from trueshard.verification.subject import Made


class Computing:
    """Looks at the parameters of every module at its forward, until ``end``."""

    def __init__(self, made: Made) -> None:
        precision = None if made.plan is None else made.plan.mixed_precision
        self._asked = None if precision is None else precision.compute
        self._other: dict[str, str] = {}
        kept = set() if made.plan is None else {each.name for each in made.plan.replicated}
        self._hooks = [
            module.register_forward_pre_hook(self._looker(name, kept))
            for name, module in named_modules(made.model)
            if self._asked is not None and module._parameters
        ]

    def end(self) -> str:
        """What computes in another dtype than was asked for, in words, or nothing."""
        for hook in self._hooks:
            hook.remove()
        name = next(iter(self._other), "")
        return f"{name!r} is computed in {self._other[name]}, asked for {self._asked}" if name else ""

    def _looker(self, prefix: str, kept: set[str]) -> Any:
        def look(module: nn.Module, arguments: Any) -> None:
            for key, parameter in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if parameter is None or name in kept or not parameter.is_floating_point():
                    continue
                dtype = str(parameter.dtype).removeprefix("torch.")
                if dtype != self._asked:
                    self._other.setdefault(name, dtype)

        return look
