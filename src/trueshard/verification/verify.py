"""``trueshard.verify``: check the contract on the user's own model, on this machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from trueshard.choices import Choices, UnitWords
from trueshard.errors import with_extra
from trueshard.machine import cpu_cores
from trueshard.planner.inputs.factories import Original
from trueshard.plans import Plan
from trueshard.verification.processes import start
from trueshard.verification.report import Failure, Verified, contract
from trueshard.verification.subjects import Case

if TYPE_CHECKING:
    from trueshard.train.config import Config

COLLECTIVE = 0.5  # of the time limit: a rank that waits for another in vain says so before all are ended


def verify(
    factory: Callable[..., Any] | nn.Module | str | Path,
    *,
    nproc: int = 2,
    layers: int | None = None,
    steps: int = 4,
    seed: int = 0,
    optimizer: str | None = None,
    sequence: int | None = None,
    overrides: Sequence[str] = (),
    replicate: int = 1,
    timeout: float = 600.0,
    plan: Plan | None = None,
    units: UnitWords = "auto",
    reshard_after_forward: str | int | Mapping[str, str | int | bool] = "default",
    mixed_precision: MixedPrecisionPolicy | str | None = None,
    activation_checkpointing: str | Mapping[str, str] = "none",
    compile: bool = False,
    offload: str = "none",
    memory: str | None = None,
) -> Verified:
    """Train a few steps sharded over processes of this machine, and compare everything with one process that is not.

    Every loss, gradient, parameter and entry of optimizer state of each step is compared, names, dtypes, ties,
    trainability and membership are, and a checkpoint is loaded on another number of ranks, from which training goes on.
    With ``mixed_precision`` or ``compile``, which change the arithmetic on one device too, the one process has the
    same plan; else its model is plain, and this library does not touch it.

    Args:
        factory: makes what is trained, the same at every call: a module, a tuple ``(module, optimizers, batch, loss)``
            of which all but the module may be left out, or an object or dict with ``model``, ``optimizers``, ``batch``
            and ``loss``. Or ``"file.py:factory"``, where the file may define ``optimizers(model)``, ``batch`` and
            ``loss(model, batch)``; a module, which stays as it is; or the path of a training configuration, which
            brings all of it. A batch is tensors whose first size is the number of samples, of which each rank takes
            its part, some such batches, or a function of nothing, of the step, or of (microbatch, sequence). What is
            left out is found: the loss that ``forward`` returns, a batch that fits, AdamW.
        nproc: processes, on GPUs at most one for each.
        layers: keep so many blocks of each list of blocks. A factory that has an argument ``layers`` is given it.
        steps: optimizer steps, at least 2. Half of them come after the checkpoint.
        seed: of every random generator.
        optimizer: in the place of the factory's own: ``"adamw"``, ``"sgd"``, ``"muon"``, a class of ``torch.optim`` or
            ``"package.module:Class"``, with settings after a colon.
        sequence: tokens of a sample, if no batch is given; None: up to 32.
        overrides: with a configuration, settings such as ``"train.batch_size=8"``.
        replicate: copies of the model (HSDP): a mesh (replicate, shard).
        timeout: seconds for each of the three runs; then every process's stack is reported.
        plan: as for ``shard()``, and so are ``units``, ``reshard_after_forward``, ``mixed_precision``,
            ``activation_checkpointing``, ``compile``, ``offload`` and ``memory``. A configuration brings its own.

    Returns:
        The report. ``report.held`` says whether all of the contract holds; ``print`` shows a line for each point.

    Raises:
        ValueError: an argument is wrong, the factory fails on one process, or ``shard()`` refuses; one line.
    """
    _check(nproc, steps, layers, replicate, seed, timeout)
    choices = Choices(
        units=units,
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        offload=offload,
        memory=memory,
    )
    choices.check_alone(plan)
    with tempfile.TemporaryDirectory(prefix="trueshard-verify-") as name:
        folder, notes = Path(name), list[str]()
        source: Any = factory
        if isinstance(factory, (str, Path)) and ".py" not in str(factory):
            said = ["plan"] * (plan is not None) + choices.said() + ["optimizer"] * (optimizer is not None)
            source, notes = _configuration(Path(factory), overrides, folder, max(nproc, 2), said)
            choices, replicate = source.shard.choices(), source.shard.replicate
        elif overrides:
            raise ValueError("overrides go with a training configuration; leave them out")
        elif isinstance(factory, nn.Module):
            source = Original(factory)
        case = Case(
            folder=folder,
            source=str(source) if isinstance(source, Path) else source,
            plan=plan,
            choices=choices,
            replicate=replicate,
            ranks=nproc,
            other_ranks=nproc // 2 if nproc % 2 == 0 else 2 if nproc == 1 else 1,
            steps=steps,
            save_after=steps // 2,
            seed=seed,
            layers=layers,
            sequence=sequence,
            optimizer=optimizer,
            threads=max(1, cpu_cores() // nproc),
            timeout=timeout * COLLECTIVE,
        )
        return _run(case, timeout, notes)


def _run(case: Case, limit: float, notes: list[str]) -> Verified:
    began = time.monotonic()
    with with_extra():
        import cloudpickle

    (case.folder / "case.pickle").write_bytes(cloudpickle.dumps(case))
    known = _unless_refused(start(case, "reference", 1, limit))
    if isinstance(known, Failure):
        last = known.trace.strip().splitlines()[-1:] or ["it said nothing"]
        raise ValueError(f"one process, without sharding, fails: {known.words}; {last[0]}")
    sharded = _unless_refused(start(case, "sharded", case.ranks, limit))
    restored = None if isinstance(sharded, Failure) else start(case, "restored", case.other_ranks, limit)
    setting = {
        **known.setting,
        **{name: getattr(case, name) for name in ("ranks", "other_ranks", "steps", "save_after", "layers")},
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "reference": "one rank, the same plan" if case.changes_arithmetic else "one process, not sharded",
        "seconds": time.monotonic() - began,
    }
    if case.changes_arithmetic:
        notes = [*notes, "Mixed precision or compiling changes the arithmetic: the one process has the same plan."]
    return contract(known, sharded, restored, setting, (*notes, *known.notes))


def _unless_refused(found: Any) -> Any:
    if isinstance(found, Failure) and found.kind in ("refused", "input"):
        raise ValueError(f"shard() refuses: {found.words}" if found.kind == "refused" else found.words)
    return found


def _configuration(
    path: Path, overrides: Sequence[str], folder: Path, parts: int, said: Sequence[str]
) -> tuple[Config, list[str]]:
    """Return a configuration whose run lives in ``folder``, with small batches, and notes of the changes."""
    if said:
        raise ValueError(f"{path} says how it is trained and sharded: leave out {', '.join(said)}, or override a key")
    from trueshard.train.parse import load_config
    from trueshard.train.running.checks import located

    config = located(load_config(path, list(overrides)))
    train = config.train
    accumulate = min(train.accumulate, 2)
    samples = min(2, max(1, train.batch_size // (parts * train.accumulate)))
    small = train.model_copy(update={"batch_size": parts * accumulate * samples, "accumulate": accumulate})
    changes = {"train": small, "run": config.run.model_copy(update={"dir": str(folder / "run")})}
    notes = [
        f"A step takes {parts * accumulate * samples} sequences (the configuration: {train.batch_size}), "
        "at the learning rate without its schedule."
    ]
    return config.model_copy(update=changes), notes


def _check(nproc: int, steps: int, layers: int | None, replicate: int, seed: int, timeout: float) -> None:
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; it is a number of seconds")
    counts = {"nproc": nproc, "steps": steps, "layers": layers, "replicate": replicate, "seed": seed}
    for name, value in counts.items():
        least = {"steps": 2, "seed": 0}.get(name, 1)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name} is {value!r}; it is a whole number from {least} on")
    if torch.cuda.is_available() and nproc > torch.cuda.device_count():
        raise ValueError(f"nproc is {nproc}, and this machine has {torch.cuda.device_count()} CUDA devices")
    if nproc % replicate:
        raise ValueError(f"replicate={replicate}: {nproc} processes do not divide into so many copies")
