"""What rounding does to a model: a run whose numbers are changed by rounding errors, beside the same run without."""

from __future__ import annotations

import torch

from trueshard.verification import states
from trueshard.verification.compare import SHAKE, distance, number_distance
from trueshard.verification.recording import Recorder, Steps
from trueshard.verification.subject import Made


class Noise(Steps):
    """Changes a run by rounding errors, and says how far that took it."""

    def __init__(self, recorder: Recorder, computed_in: torch.dtype | None) -> None:
        self._recorder, self._store = recorder, recorder.store
        self._random = torch.Generator().manual_seed(0)
        self._computed_in = computed_in
        self.found: dict[tuple[str, int, str], float] = {}

    def begin(self, made: Made) -> None:
        """Change the parameters that are trained."""
        for parameter in made.model.parameters():
            if parameter.requires_grad:
                self._shake(parameter, torch.promote_types(parameter.dtype, torch.float32))

    def gradients(self, step: int, made: Made) -> None:
        for parameter in made.model.parameters():
            if parameter.grad is not None:
                self._shake(parameter.grad, self._computed_in or parameter.grad.dtype)
        self._compare("gradients", step, states.gradients_of(made.model))

    def stepped(self, step: int, made: Made, loss: float, norm: float) -> None:
        for kind, found, expected in (
            ("losses", loss, self._recorder.losses[step - 1]),
            ("gradient norm", norm, self._recorder.norms[step - 1]),
        ):
            self.found[kind, step, ""] = number_distance(found, expected)[1]
        self._compare("parameters", step, states.parameters_of(made.model))
        self._compare("state", step, states.state_of(made.model, made.optimizers))

    def _compare(self, kind: str, step: int, tensors: states.Named) -> None:
        known = set(self._store.names(kind, step))
        for name, value in states.gathered(tensors):
            if isinstance(value, torch.Tensor) and name in known:
                expected = self._store.read(kind, step, name)
                if expected.shape == value.shape:
                    beside = self._store.read(kind, 0, name) if kind == "parameters" else None
                    self.found[kind, step, name] = distance(value, expected, beside)[1]

    @torch.no_grad()
    def _shake(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Change what is not zero by rounding errors of ``dtype``, of itself and of the usual size, for sums cancel."""
        local = states.local(tensor)
        if not local.is_floating_point():
            return
        wide, some = local.double(), local != 0
        usual = wide[some].square().mean().sqrt() if bool(some.any()) else 0.0
        change = torch.rand(local.shape, generator=self._random, dtype=torch.float64).mul_(2).sub_(1).to(local.device)
        change *= SHAKE * torch.finfo(dtype).eps
        local.copy_(torch.where(some, wide + change * (wide.abs() + usual), wide))
