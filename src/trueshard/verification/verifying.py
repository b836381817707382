"""``trueshard.verify``: check the contract on the user's own model, one process against many, on this machine.

What a process returns, or why it failed, it leaves in the folder of the case.
"""

from __future__ import annotations

import datetime
import errno
import faulthandler
import math
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trueshard.axes import sizes_of
from trueshard.distributed import ensure_process_group
from trueshard.errors import UserError, one_line, own_errors, with_extra
from trueshard.launching import end_with_parent, how, last_lines, python_command, run_ranks
from trueshard.machine import cpu_cores
from trueshard.options import Options, ShardOptions, options_of, show_options
from trueshard.planner.inputs.factories import Original
from trueshard.plans import Plan
from trueshard.verification import locating, runs
from trueshard.verification.modules import Located
from trueshard.verification.report import Failure, Verified, contract
from trueshard.verification.subjects import Case, ShardRefused, other_ranks, small_configuration
from trueshard.verification.training import Progress

if TYPE_CHECKING:
    from typing_extensions import Unpack

COLLECTIVE = 0.5  # of the time limit: a rank that waits for another in vain says so before all are ended
LEAST_SPACE = 1 << 20  # free bytes below which what the processes leave to each other may be cut off


@show_options
@own_errors()
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
    **options: Unpack[ShardOptions],
) -> Verified:
    """Train a few steps sharded over processes of this machine, and compare everything with one process that is not.

    Where something differs in a step, two more runs name the first module whose inputs agree and whose output, or whose
    inputs' gradient, does not: ``report.first``.

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
        plan: as for ``shard()``. A configuration brings its own options. With ``exact`` no bit may differ: the one
            process has the same plan, and each step's hash is in the report. With ``context`` a batch is a dict with
            ``input_ids`` and ``labels``, and the loss the model's own.
        options: as for ``shard()``.

    Returns:
        The report. ``report.held`` says whether all of the contract holds; ``print`` shows a line for each point.

    Raises:
        ValueError: an argument is wrong, the factory fails on one process, or ``shard()`` refuses; one line.
    """
    choices = options_of("verify", options)
    choices.check_alone(plan)
    _check(nproc, steps, layers, replicate, seed, timeout)
    with tempfile.TemporaryDirectory(prefix="trueshard-verify-") as name:
        folder, notes = Path(name), list[str]()
        source: Any = factory
        if isinstance(factory, (str, Path)) and ".py" not in str(factory):
            names = choices.replace(exact=False).differing()
            names += ["plan"] * (plan is not None) + ["optimizer"] * (optimizer is not None)
            source, notes = small_configuration(Path(factory), overrides, folder, nproc, names)
            exact, choices, replicate = choices.exact, source.shard.options(), source.shard.replicate
            choices = choices.replace(exact=exact or choices.exact)
            source = source.model_copy(update={"shard": type(source.shard)()})
        elif overrides:
            raise ValueError("overrides go with a training configuration; leave them out")
        elif isinstance(factory, nn.Module):
            source = Original(factory)
        readers, other = other_ranks(_readers(nproc, replicate, choices, plan))
        if readers == other:
            notes.append("There is one GPU: the checkpoint is loaded on one rank, and not on another number of ranks.")
        case = Case(
            folder=folder,
            source=str(source) if isinstance(source, Path) else source,
            plan=plan,
            choices=choices,
            replicate=replicate,
            ranks=nproc,
            other_ranks=other,
            splits=(choices if plan is None else plan).context > 1,
            parts=max(readers, other),
            steps=steps,
            save_after=steps // 2,
            seed=seed,
            layers=layers,
            sequence=sequence,
            optimizer=optimizer,
            threads=max(1, cpu_cores() // nproc),
            timeout=timeout,
        )
        return _verified(case, notes)


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


def _readers(nproc: int, replicate: int, choices: Options, plan: Plan | None) -> int:
    """Return how many processes read different samples; raise ValueError if the axes do not divide them."""
    sizes = sizes_of(plan or choices)
    if nproc % (replicate * math.prod(sizes.values())):
        words = " × ".join(f"{name} {size}" for name, size in {"replicate": replicate, **sizes}.items() if size > 1)
        raise ValueError(f"{words}: {nproc} processes do not divide by it; choose others")
    return nproc // math.prod(sizes.values())


def _verified(case: Case, notes: list[str]) -> Verified:
    began = time.monotonic()
    _leave_case(case)
    reference = _run(case, "reference", 1)
    if isinstance(reference, Failure):
        last = reference.trace.strip().splitlines()[-1:] or ["it said nothing"]
        raise ValueError(f"one process, without sharding, fails: {reference.words}; {last[0]}")
    sharded = _run(case, "sharded", case.ranks)
    restored = None if isinstance(sharded, Failure) else _run(case, "restored", case.other_ranks)
    setting = {
        **reference.setting,
        **{name: getattr(case, name) for name in ("ranks", "other_ranks", "steps", "save_after", "layers")},
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "reference": "one rank, the same plan" if case.changes_arithmetic else "one process, not sharded",
        "seconds": time.monotonic() - began,
    }
    if case.changes_arithmetic:
        what = "Exact sums change" if case.is_exact else "Mixed precision or compiling changes"
        notes = [*notes, f"{what} the arithmetic: the one process has the same plan."]
    report = contract(reference, sharded, restored, setting, (*notes, *reference.notes))
    return report if report.held or isinstance(sharded, Failure) else replace(report, first=_first(case, sharded))


def _leave_case(case: Case) -> None:
    with with_extra():
        import cloudpickle

    (case.folder / "case.pickle").write_bytes(cloudpickle.dumps(case))


def _first(case: Case, sharded: Mapping[str, Any]) -> Located | None:
    """Return where the sharded run left the reference first, if it did in a step and two more runs find it."""
    wrong = [one for one in sharded["steps"] if not one.held and one.step]  # 0: before training
    if not wrong:
        return None
    step = min(one.step for one in wrong)
    if not any(one.kind in ("losses", "gradients", "gradient norm") for one in wrong if one.step == step):
        words = "losses and gradients agree, and what the optimizer makes of them does not"
        return Located("", "optimizer", step, None, words)
    if case.splits:  # ranks have parts of what modules return, of its loss too
        return None
    # Hooks of modules are not called in compiled code.
    choices, plan = case.choices.replace(compile=False), case.plan and replace(case.plan, compile=False)
    was_compiled = (choices, plan) != (case.choices, case.plan)
    case = replace(case, watched=step, choices=choices, plan=plan)
    _leave_case(case)
    result = _run(case, "located_reference", 1)
    result = result if isinstance(result, Failure) else _run(case, "located", case.ranks)
    if result is None and was_compiled:
        return Located("", "compiled code", step, None, "without compiling nothing differs")
    return result if isinstance(result, Located) else None


# The processes of a run


def _run(case: Case, run: str, ranks: int) -> Any:
    """Call a function of ``runs`` on so many ranks; return what the first one left, or the ``Failure``.

    Raises ValueError if ``shard()`` refused, or an input is wrong.
    """
    logs = case.folder / f"{run}-logs"
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # they meet in a file
        "OMP_NUM_THREADS": str(case.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = python_command(f"from {__name__} import work; work(*sys.argv[1:])", str(case.folder), run)
    ended = run_ranks(command, ranks, environment=environment, logs=logs, limit=case.timeout)
    ended.raise_for_signal()
    if ended.is_late:
        stacks = "\n".join(f"rank {rank}:\n{last_lines(logs, rank)}" for rank in range(ranks))
        return Failure(0, "?", "failed", f"the processes have not ended within {case.timeout:.0f} s", stacks, 0.0)
    if shutil.disk_usage(case.folder).free < LEAST_SPACE:
        raise OSError(f"no space is left in {case.folder.parent}; free some, or let TMPDIR name another folder")
    failures = [pickle.loads(file.read_bytes()) for file in case.folder.glob(f"{run}-*.failure")]
    if not failures and not ended.codes:
        return case.get(run)
    failure = _cause(failures, ended.codes, ranks, logs)
    if failure.kind != "failed":
        raise ValueError(f"shard() refuses: {failure.words}" if failure.kind == "refused" else failure.words)
    return failure


def _cause(failures: list[Failure], codes: Mapping[int, int], ranks: int, logs: Path) -> Failure:
    """Return the failure from which the others follow: one that a process left of itself, or its exit code by rank."""
    first = min(failures, key=lambda failure: (failure.kind == "failed", failure.at), default=None)
    silent = sorted(set(range(ranks)) - {failure.rank for failure in failures})
    for rank in silent:
        if rank in codes:
            words, stage = f"the process {how(codes[rank])}", "?" if first is None else first.stage
            return Failure(rank, stage, "failed", words, last_lines(logs, rank), 0.0)
    assert first is not None
    if silent and "imed out" in first.words:
        words, trace = f"the other ranks wait for it; {first.words}", last_lines(logs, silent[0])
        return replace(first, rank=silent[0], kind="failed", words=words, trace=trace)
    return first


def work(folder: str, run: str) -> None:
    """Take the part of one rank in a run, and end the process with exit code 0 or 1."""
    end_with_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
    rank, ranks, progress, source = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Progress(), None
    try:
        case: Case = pickle.loads((Path(folder) / "case.pickle").read_bytes())
        source, limit = case.source, case.timeout * COLLECTIVE
        torch.set_num_threads(case.threads)
        faulthandler.dump_traceback_later(limit / 2, repeat=True)  # for whoever waits for this rank in vain
        store = dist.FileStore(str(case.folder / f"{run}.store"), ranks)
        ensure_process_group(datetime.timedelta(seconds=limit), store)
        result = getattr(locating if run.startswith("located") else runs, run)(
            case.on_other_ranks() if run == "restored" else case, progress
        )
        if rank == 0:
            (case.folder / f"{run}.pickle").write_bytes(pickle.dumps(result))
        dist.barrier()
    except BaseException as error:
        kind, words = _described(error, run, progress.stage, source)
        failure = Failure(rank, progress.stage, kind, words, traceback.format_exc(), time.time())
        (Path(folder) / f"{run}-{rank}.failure").write_bytes(pickle.dumps(failure))
        _leave(1)
    _leave(0)


def _described(error: BaseException, run: str, stage: str, source: Any) -> tuple[str, str]:
    """Return (kind, words) of the ``Failure`` that an error makes."""
    words = one_line(error)
    if isinstance(error, ShardRefused):
        return "refused", words
    if isinstance(error, UserError) or (run == "reference" and isinstance(error, ValueError)):
        return "input", words
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "input", f"{words}; free some, or let TMPDIR name another folder"
    words = f"{type(error).__name__}: {words}"
    if isinstance(source, str):
        file = Path(source.rpartition(":")[0]).expanduser().resolve()
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        words += f" ({file.name}, line {lines[-1]})" if lines else ""  # in the user's own file
    if run == "reference":  # the user's: the model fails without any sharding, too
        return "input", f"one process, without sharding, fails at {stage}: {words}"
    return "failed", words


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: threads of a lost collective would keep it
