"""The planner works in a process of its own, which leaves the caller's as it is, and in workers that it forks."""

from __future__ import annotations

import builtins
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import forks
import trueshard
from messages import naming
from resting import all_but
from trueshard.planner import process
from trueshard.planner.process import Workers

FIXED: dict[str, Any] = {
    "hardware": "cpu",
    "ranks": 2,
    "batch": torch.zeros(4, 16),
    "reshard_after_forward": "always",
    "activation_checkpointing": "none",
}


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


def state() -> dict[str, Any]:
    """Everything that a simulation changes in its own process."""
    hooks = {key: value for key, value in vars(nn.modules.module).items() if key.startswith("_global_")}
    return {
        "functions": [builtins.open, io.open, torch.load, torch.get_rng_state, torch.cuda.is_available],
        "attention": nn.functional.scaled_dot_product_attention,
        "resize": torch.UntypedStorage.resize_,
        "hooks": {key: list(value) if hasattr(value, "__iter__") else value for key, value in hooks.items()},
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "modes": _get_current_dispatch_mode_stack(),
        "group": torch.distributed.is_initialized(),
        "random": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "threads": threading.enumerate(),
        "hook": sys.excepthook,
        "simulation": [name for name in sys.modules if name.startswith("trueshard.planner.simulation")],
    }


UNCHANGED = """
import gc, warnings
import torch, trueshard
from test_planner_process import FIXED, make, state
gc.unfreeze()  # what a fork has frozen: its number falls when any of that is freed
model = make()
before = state()
trueshard.plan(make, **FIXED)
trueshard.plan(model, **FIXED | {"reshard_after_forward": "auto"})
for refused in (FIXED | {"memory": 1 << 10, "reshard_after_forward": "auto"}, FIXED | {"optimizer": "adamx"}):
    try:
        trueshard.plan(make, **refused)
    except ValueError:
        continue
    raise AssertionError
after = state()
assert before == after, [(key, before[key], after[key]) for key in before if before[key] != after[key]]
optimizer = torch.optim.AdamW(model.parameters())
before = state()
warnings.simplefilter("ignore")
plan = trueshard.shard(model, optimizer, reshard_after_forward="auto", memory="1GiB")
assert plan.forecast is not None
after = state()
for key in ("functions", "attention", "gc", "environment", "modes", "random", "simulation"):
    assert before[key] == after[key], key
print("unchanged")
"""


@pytest.mark.rest
def test_nothing_of_the_caller_is_touched() -> None:
    folder = Path(__file__).parent
    done = forks.run(
        [sys.executable, "-c", UNCHANGED], cwd=folder, check=False, capture_output=True, text=True, timeout=200
    )
    assert done.stdout == "unchanged\n", done.stderr


# What can be sent


class Kept(nn.Module):
    """A module with all that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight
        self.first.weight.tag = "tied"  # type: ignore[attr-defined]
        self.register_buffer("scale", torch.ones(16))
        self.table = [torch.arange(4)]
        self.apply_last = self.last.forward
        self.first.register_forward_hook(lambda module, inputs, output: output * 2)
        self.first.weight.register_hook(lambda grad: grad / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_last(self.first(x) * self.scale)


def _compiled() -> nn.Module:
    model = Kept()
    model.compile()
    return model


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return Kept()


def _local() -> type[Kept]:
    class Local(Kept):
        pass

    return Local


def _closure() -> Callable[[], nn.Module]:
    model = Kept()
    return lambda: model


def _parts() -> Callable[[], tuple[Any, ...]]:
    weights = torch.ones(1 << 20)
    return lambda: (Kept(), None, lambda model, batch: (model(batch) * weights[:16]).sum())


SENT: dict[str, Callable[[], Any]] = {
    "local class": _local,
    "local object": lambda: _local()(),
    "lambda": lambda: lambda: _local()(),
    "closure": _closure,
    "compiled": lambda: torch.compile(Kept()),
    "compiled in place": _compiled,
    "parametrized": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))),
    "nested": lambda: nn.Sequential(Kept(), nn.Linear(16, 16)),
    "on meta": _on_meta,
    "parts": _parts,
    "with an optimizer": lambda: lambda: (kept := Kept(), torch.optim.SGD(kept.parameters(), lr=0.1)),
}


@pytest.mark.parametrize("name", all_but(["local class", "compiled", "with an optimizer"], SENT))
def test_models_and_factories_can_be_sent(name: str) -> None:
    plan = trueshard.plan(SENT[name](), **FIXED)
    assert sum(unit.parameters for unit in plan.units) >= 256


def test_weights_are_not_sent() -> None:
    model = nn.Linear(4096, 4096)
    model.register_buffer("table", torch.ones(1 << 20))
    model.kept = torch.ones(1 << 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4096)).sum().backward()
    optimizer.step()
    assert len(process.dumped((model, optimizer, lambda: model))) < 20_000


def test_small_tensors_of_no_model_are_sent_with_their_values() -> None:
    weights = torch.arange(4.0)
    assert process.call("torch:equal", weights, torch.arange(4.0))


def test_what_cannot_be_sent_is_named() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].guard = threading.Lock()
    with pytest.raises(ValueError, match=naming("model.0.guard (lock)", "cannot pickle", "function")) as caught:
        trueshard.plan(model, **FIXED)
    assert "\n" not in str(caught.value)
    lock = threading.Lock()
    with pytest.raises(ValueError, match=naming("model", "lock (lock)", "function")):
        trueshard.plan(lambda: (lock, make())[1], **FIXED)


# What comes back


def test_prints_of_a_factory_come_out_here(capfd: pytest.CaptureFixture[str]) -> None:
    def loud() -> nn.Module:
        print("making it")
        print("slowly", file=sys.stderr)
        return make()

    trueshard.plan(loud, **FIXED)
    printed = capfd.readouterr()
    assert set(printed.out.split("\n")) == {"making it", ""}
    assert set(printed.err.split("\n")) == {"slowly", ""}


class OwnError(Exception):
    """Cannot be made from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raises(kind: str) -> None:
    error = {"value": ValueError("wrong"), "own": OwnError(1, 2), "held": ValueError("held")}[kind]
    error.add_note("look here")
    if kind == "held":
        error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def test_errors_are_raised_as_they_are() -> None:
    for kind, cls, text in (("value", ValueError, "wrong"), ("own", OwnError, "1 and 2")):
        with pytest.raises(cls) as caught:
            process.call(f"{__name__}:raises", kind)
        assert (type(caught.value), str(caught.value)) == (cls, text)
        assert caught.value.__notes__ == ["look here"]
        assert "in raises" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match=naming("ValueError", "held")):
        process.call(f"{__name__}:raises", "held")


@pytest.mark.rest
def test_where_nothing_fits_the_study_comes_back() -> None:
    with pytest.raises(trueshard.NothingFits) as caught:
        trueshard.plan(make, **FIXED | {"memory": 1 << 10, "reshard_after_forward": "auto"})
    assert caught.value.study.forecast.peak_reserved_bytes > 1 << 10


# The process


def number() -> int:
    return os.getpid()


def surroundings() -> Any:
    return os.getcwd(), os.environ.get("A_VARIABLE"), torch.get_default_dtype()


def test_one_process_serves_every_call_where_the_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = process.call(f"{__name__}:number")
    assert first != os.getpid()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_VARIABLE", "there")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert process.call(f"{__name__}:surroundings") == (str(tmp_path), "there", torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert process.call(f"{__name__}:number") == first


def test_a_module_that_was_edited_is_imported_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_module.py"
    for width in (8, 16):
        file.write_text(f"def width(): return {width}")
        os.utime(file, (width, width))
        assert process.call("edited_module:width") == width


def die(by: int) -> None:
    os.kill(os.getpid(), by)


@pytest.mark.rest
def test_a_process_that_is_killed_is_told_and_replaced() -> None:
    with pytest.raises(RuntimeError, match=naming("planner's process", "SIGKILL", "memory")):
        process.call(f"{__name__}:die", signal.SIGKILL)
    with pytest.raises(RuntimeError, match=naming("planner's process", "SIGSEGV")):
        process.call(f"{__name__}:die", signal.SIGSEGV)
    assert process.call(f"{__name__}:number") != os.getpid()


INTERRUPTED = """
import os, signal, sys, threading
from trueshard.planner import process
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this with it ignored
number = process.call("os:getpid")
print(number, flush=True)
if sys.argv[1] == "interrupt":
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    process.call("time:sleep", 60)
except KeyboardInterrupt:
    print(process.call("os:getpid") != number, flush=True)
"""


def is_gone(number: int) -> bool:
    """True once a process is gone; waits ten seconds for it."""
    deadline = time.monotonic() + 10
    while psutil.pid_exists(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(number)


@pytest.mark.rest
@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_a_caller_that_ends_takes_the_process_along(how: str) -> None:
    with forks.Popen([sys.executable, "-c", INTERRUPTED, how], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        number = int(caller.stdout.readline())
        if how == "kill":
            caller.kill()
        else:
            assert caller.stdout.read() == "True\n"
            assert caller.wait(60) == 0
    assert is_gone(number)


# Workers

in_forks = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def double(value: int) -> int:
    time.sleep(0.01 * value)
    return 2 * value


def slow_number() -> int:
    time.sleep(0.05)
    return os.getpid()


def fail(text: str) -> None:
    raise ValueError(text)


def fail_unsendably() -> None:
    raise OwnError(1, 2)


FUNCTIONS: dict[str, Any] = {
    function.__name__: function
    for function in (double, slow_number, fail, fail_unsendably, die, time.sleep, signal.raise_signal)
}


@in_forks
@pytest.mark.parametrize("count", [0, 2])
def test_tasks_are_done_in_any_order_and_raise_where_their_result_is_asked_for(count: int) -> None:
    with Workers(FUNCTIONS, count) as workers:
        tasks = [workers.start("double", value) for value in (5, 0, 3, 1)]
        failed = workers.start("fail", "so it is")
        assert [task() for task in reversed(tasks)] == [2, 6, 0, 10]
        with pytest.raises(ValueError, match="so it is"):
            failed()


@in_forks
def test_two_work_at_a_time_whatever_a_ctrl_c_or_an_error_and_end_with_the_context() -> None:
    with Workers(FUNCTIONS, 2) as workers:
        tasks = [workers.start("slow_number") for _ in range(2)]
        numbers = {task() for task in tasks}
        assert len({os.getpid(), *numbers}) == 3
        workers.start("raise_signal", signal.SIGINT)()
        with pytest.raises(RuntimeError, match="OwnError: 1 and 2"):
            workers.start("fail_unsendably")()
        assert workers.start("double", 1)() == 2
        workers.start("sleep", 60)
    assert not any(map(psutil.pid_exists, numbers))


@in_forks
def test_every_task_is_an_error_once_a_worker_has_died() -> None:
    with Workers(FUNCTIONS, 2) as workers:
        tasks = [workers.start(*task) for task in (("die", signal.SIGKILL), ("sleep", 60), ("double", 1))]
        for task in tasks:
            with pytest.raises(RuntimeError, match=r"was ended by SIGKILL before it was done; .* memory"):
                task()
        with pytest.raises(RuntimeError, match="SIGKILL"):
            workers.start("double", 1)


KILLED = """
import os, time
from trueshard.planner.process import Workers
with Workers({"pid": os.getpid, "sleep": time.sleep}, 2) as workers:
    print(workers.start("pid")(), flush=True)
    workers.start("sleep", 60), workers.start("sleep", 60)
    time.sleep(60)
"""


@pytest.mark.rest
@in_forks
def test_workers_are_gone_if_the_process_that_forked_them_is_killed() -> None:
    with forks.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        parent.kill()
    assert is_gone(number)
