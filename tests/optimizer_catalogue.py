"""Every optimizer of torch.optim, pytorch_optimizer and torchao.optim, and what each needs besides the ordinary.

- The classes are found in the libraries, not listed here: a new one appears by itself, with the defaults below.
- Only what needs more than ``cls(groups, **options)`` and ``step()`` has an entry: wrappers, closures, groups with keys
  of their own.
- What happens every so many steps, or from some size on, is set to happen within a few steps of a tiny model.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Adam, AdamW, Optimizer

import optimizer_ways as ways
from optimizer_ways import Forward, Make, Take, takes

APART = Path(sys.prefix) / "apart"
"""Where torchao is, and timm: whoever finds it imports it (transformers does), and it prints what it could not load."""

LIBRARIES = ("torch.optim", "pytorch_optimizer", "torchao.optim")

SETTINGS: dict[str, Any] = {
    "d0": 0.1,
    "grad_accu_steps": 2,
    "inverse_steps": 2,
    "lookahead_merge_time": 2,
    "num_iterations": 20,
    "precondition_frequency": 2,
    "preconditioning_compute_steps": 2,
    "start_preconditioning_step": 1,
    "steps_before_using_centered": 2,
    "update_interval": 2,
    "update_proj_gap": 2,
    "warmup_steps": 2,
}
"""Options, by name, of whichever class takes them: what is rare or slow by default happens within four steps."""


COARSE = 2.0**-5
"""The tolerance where values pass through bfloat16 or 8 bits: what lies between two of these may be rounded either way,
by 2⁻⁸ of itself, and Newton-Schulz iterations enlarge what they find in small singular directions. A step on a part of
the matrix differs by as much as the step itself."""


@dataclass(frozen=True)
class Special:
    """What a class needs that others do not."""

    options: dict[str, Any] = field(default_factory=dict)
    make: Make = ways.plainly
    take: Take = ways.by_step
    steps: int = 4
    """How many steps it takes until all that it does has happened."""
    trains: bool = False
    """It has ``train()`` and ``eval()``, which move the parameters."""
    dimensions: tuple[int, int] = (0, 4)
    """Parameters of how many it takes, from and to."""
    wide: bool = False
    """It does what it does to large matrices alone."""
    tolerance: float = 1e-4
    """Largest difference of a parameter over its largest change. In float32 sums in another order differ by some 1e-7;
    what an optimizer divides by a small number grows by as much."""
    partly: bool = False
    """It leaves some parameters where they are."""


@dataclass(frozen=True)
class Entry:
    """One optimizer with one choice of options."""

    library: str
    name: str
    cls: type[Any]
    special: Special

    @property
    def options(self) -> dict[str, Any]:
        """What is given to the constructor besides parameters."""
        common = {key: value for key, value in SETTINGS.items() if takes(self.cls, key)}
        return common | self.special.options

    @property
    def full_precision(self) -> Entry | None:
        """What it would be without the quantization of its state; None where there is none."""
        if self.library != "torchao.optim" or ("bit" not in self.name and "Fp8" not in self.name):
            return None
        cls = AdamW if self.name.startswith("AdamW") else Adam
        return Entry("torch.optim", cls.__name__, cls, self.special)

    def make(self, model: nn.Module) -> list[Any]:
        """The optimizers of ``model``: one of the class, and perhaps one for what the class does not take."""
        optimizers = self.special.make(model, self.cls, dict(self.options))
        if self.special.trains:
            optimizers[0].train()
        return optimizers

    def take(self, model: nn.Module, optimizers: list[Any], forward: Forward) -> None:
        """One training step."""
        self.special.take(model, optimizers, forward)

    def finish(self, optimizers: list[Any]) -> None:
        """Leaves the parameters as they are evaluated and saved."""
        if self.special.trains:
            optimizers[0].eval()


TORCH: dict[str, Special] = {
    "Adadelta": Special({"lr": 1.0, "eps": 1e-3}),
    "LBFGS": Special({"lr": 0.1, "max_iter": 3}, make=ways.with_one_group, take=ways.by_closure),
    "Muon": Special(make=ways.with_matrices, tolerance=COARSE),
    "RAdam": Special(steps=8),
    "RMSprop": Special({"lr": 0.01}),
    "SparseAdam": Special(take=ways.by_sparse_gradients, dimensions=(1, 4)),
}

PYTORCH_OPTIMIZER: dict[str, Special] = {
    "A2Grad": Special({"lips": 2.0}),
    "AdaDelta": Special({"eps": 1e-3}),
    "AdaFactor": Special(tolerance=COARSE),
    "AdaGO": Special(make=ways.with_muon_groups, tolerance=COARSE),
    "AdaHessian": Special(take=ways.by_graph),
    "AdaLOMO": Special(make=ways.from_model, take=ways.by_fused_backward, dimensions=(1, 2)),
    "AdamG": Special({"lr": 1.0}),
    "AdamMini": Special({"num_embeds": 5, "num_heads": 1}, make=ways.from_model),
    "AdaMuon": Special({"eps": 1e-2}, make=ways.with_muon_groups, tolerance=COARSE),
    "AdaShift": Special({"keep_num": 2}, steps=8),
    "AdaSmooth": Special({"lr": 0.005}),
    "Alice": Special({"rank": 2, "leading_basis": 1}),
    "AliG": Special(make=ways.with_max_rate, take=ways.by_loss),
    "BSAM": Special({"num_data": 6}, take=ways.by_second_closure),
    "Conda": Special({"eps": 1e-3}),
    "DAdaptSGD": Special({"d0": 1.0}),
    "DASH": Special({"matrix_eps": 1e-4}),
    "DeMo": Special(dimensions=(1, 2)),
    "DistributedMuon": Special(make=ways.with_muon_groups, tolerance=COARSE),
    "EmoFact": Special(take=ways.by_closure),
    "EmoLynx": Special(take=ways.by_closure),
    "EmoNavi": Special(take=ways.by_closure),
    "Fira": Special(make=ways.with_low_rank_groups),
    "FlashAdamW": Special(tolerance=COARSE),
    "FriendlySAM": Special(make=ways.with_base_class, take=ways.by_second_closure),
    "GaLore": Special(make=ways.with_low_rank_groups),
    "GSAM": Special(make=ways.with_schedule, take=ways.by_pair_closure),
    "Kate": Special({"lr": 0.0005}, tolerance=1e-3),
    "LARS": Special({"trust_coefficient": 0.1}),
    "LOMO": Special(make=ways.from_model, take=ways.by_fused_backward),
    "Lookahead": Special({"k": 2}, make=ways.around_adamw),
    "LookSAM": Special({"k": 2}, make=ways.with_base_class, take=ways.by_second_closure),
    "LoRARite": Special({"eps": 1e-2}, make=ways.with_pairs),
    "Magma": Special(make=ways.around_adamw, partly=True),
    "MSVAG": Special({"beta": 0.5}),
    "Muon": Special(make=ways.with_muon_groups, tolerance=COARSE),
    "MuonClip": Special(make=ways.with_muon_groups, tolerance=COARSE),
    "NorMuon": Special(make=ways.with_muon_groups, tolerance=COARSE),
    "OrthoGrad": Special(make=ways.around_adamw),
    "PCGrad": Special(make=ways.around_sgd, take=ways.by_two_losses, dimensions=(1, 4)),
    "RAdam": Special(steps=8),
    "SafeFP16Optimizer": Special(make=ways.around_one_group, take=ways.by_scaled_backward),
    "SAM": Special(make=ways.with_base_class, take=ways.by_second_closure),
    "SaRA": Special({"threshold": 0.2}, partly=True),
    "ScheduleFreeAdamW": Special(trains=True),
    "ScheduleFreeRAdam": Special(steps=8, trains=True),
    "ScheduleFreeSGD": Special(trains=True),
    "ScheduleFreeWrapper": Special(make=ways.around_sgd, trains=True),
    "SCION": Special(tolerance=COARSE),
    "SCIONLight": Special(tolerance=COARSE),
    "Shampoo": Special({"preconditioning_compute_steps": 1, "matrix_eps": 1e-2}),
    # The longer side of a matrix has directions without any gradient: there, rounding is divided by rounding.
    "SOAP": Special({"max_precondition_dim": 5, "eps": 1e-2}, tolerance=1e-3),
    "SophiaH": Special({"update_period": 2}, take=ways.by_graph),
    "SpectralSphere": Special({"solver_max_iterations": 5}, make=ways.with_matrices, tolerance=COARSE),
    "SPlus": Special({"max_dim": 5, "lr": 0.5, "nonstandard_constant": 0.1}),
    "TRAC": Special({"s_prev": 1.0}, make=ways.around_sgd, dimensions=(1, 4), partly=True),
    "WSAM": Special(make=ways.with_model_and_base, take=ways.by_closure),
}

TORCHAO: dict[str, Special] = {"CPUOffloadOptimizer": Special(make=ways.from_groups, wide=True)}

ORDINARY = {
    "torch.optim": Special(),
    "pytorch_optimizer": Special(),
    # Of ten thousand gradients some are near zero, where a small eps makes a whole step of a rounding.
    "torchao.optim": Special({"eps": 1e-4}, wide=True),
}
"""What a class without an entry is taken to be."""

SPECIAL = {"torch.optim": TORCH, "pytorch_optimizer": PYTORCH_OPTIMIZER, "torchao.optim": TORCHAO}


def classes(library: str) -> dict[str, type[Any]]:
    """Every optimizer class that ``library`` gives out and defines itself, by name, in alphabetical order."""
    import importlib

    if library.startswith("torchao") and str(APART) not in sys.path:
        sys.path.append(str(APART))
    module = importlib.import_module(library)
    home = library.partition(".")[0]
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
        if value.__module__.partition(".")[0] == home
    }
    return dict(sorted(found.items(), key=lambda item: (item[0].lower(), item[0])))


def variants(cls: type[Any]) -> Iterator[dict[str, Any]]:
    """The defaults, then each switch of a torch optimizer by itself, and momentum in all its forms."""
    yield {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if parameter.default is False and name != "nesterov":
            yield {name: True}
        elif parameter.default is None and name in ("foreach", "fused"):
            yield {name: True}
            if name == "foreach":
                yield {name: False}
        elif name == "momentum" and parameter.default == 0:
            yield {name: 0.9}
    if takes(cls, "nesterov") and takes(cls, "dampening"):
        yield {"momentum": 0.9, "nesterov": True}
        yield {"momentum": 0.9, "dampening": 0.5}
    if takes(cls, "lr_decay"):
        yield {"lr_decay": 0.1, "initial_accumulator_value": 0.1}
    if takes(cls, "line_search_fn"):
        yield {"line_search_fn": "strong_wolfe"}


COUPLED = {
    ("pytorch_optimizer", "Adan"): [{"max_grad_norm": 1.0}],
    ("pytorch_optimizer", "Lamb"): [{"pre_norm": True}],
}
"""Options with which an update depends on all parameters, where by default it does not."""


@functools.cache
def entries(library: str) -> dict[str, Entry]:
    """Everything of ``library``, by name; options that are not the class's defaults are part of the name."""
    found = {}
    for name, cls in classes(library).items():
        special = SPECIAL[library].get(name, ORDINARY[library])
        for options in variants(cls) if library == "torch.optim" else [{}, *COUPLED.get((library, name), [])]:
            words = ", ".join(f"{key}={value!r}" for key, value in options.items())
            full = f"{name}({words})" if words else name
            more = dataclasses.replace(special, options=special.options | options)
            if options.get("max_grad_norm"):
                more = dataclasses.replace(more, dimensions=(1, 4))  # it scales gradients by a tensor of one dimension
            found[full] = Entry(library, full, cls, more)
    return found
