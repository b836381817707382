"""A fork stands for a start: it ends and speaks as the interpreter would, and nothing of its parent is left in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

import forks

PROGRAMS = {
    "words": "import sys; print(sys.argv, sys.path[0], __name__, sys.orig_argv[1:3]); print('more', file=sys.stderr)",
    "exit code": "import sys; sys.exit(300)",
    "exit with words": "import sys; sys.exit('no')",
    "exception": "def f():\n    raise ValueError('no')\nf()",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "threads, then the end": "import atexit, threading as t, time\natexit.register(print, 'end')\n"
    "t.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "input": "import sys; print(sys.stdin.read() + input.__name__)",
    "signals": "import signal as s; print([(n, s.getsignal(n)) for n in sorted(s.valid_signals())])",
    "files": "import os; print(len(os.listdir('/proc/self/fd')), os.getcwd(), os.environ['MORE'])",
    "session": "import os; print(os.getsid(0) == os.getpid())",
    "no such name": "print(nothing)",
    "a pickle of its own": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
}


def both(words: list[str], **more: Any) -> list[tuple[int, str, str]]:
    """What a start and a fork leave: exit code, stdout and stderr."""
    ran = [run([sys.executable, *words], text=True, capture_output=True, **more) for run in (subprocess.run, forks.run)]
    return [(each.returncode, each.stdout, each.stderr) for each in ran]


@pytest.mark.parametrize("name", PROGRAMS)
def test_code_ends_and_speaks_as_after_a_start(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"MORE": "yes"}
    words = ["-c", PROGRAMS[name], "a", "--b"]
    start, fork = both(words, cwd=tmp_path, env=environment, input="typed ", start_new_session=True)
    assert fork == start


@pytest.mark.parametrize("kind", ["start", "fork"])
def test_an_ignored_signal_is_inherited(kind: str) -> None:
    code = "import signal as s; print(s.getsignal(s.SIGINT), s.getsignal(s.SIGUSR1), s.getsignal(s.SIGTERM))"
    parent = "import signal as s, subprocess, sys; s.signal(s.SIGINT, s.SIG_IGN); s.signal(s.SIGUSR1, s.SIG_IGN)"
    parent += "; s.signal(s.SIGTERM, print); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    run = {"start": subprocess.run, "fork": forks.run}[kind]
    done = run([sys.executable, "-c", parent, code], capture_output=True, text=True)
    assert done.stdout == "1 1 0\n"


@pytest.mark.parametrize("words", [["no.py"], ["-m", "no_such"], ["own.py", "x"], ["-m", "own", "x"], ["-u", "own.py"]])
def test_scripts_and_modules_run_as_after_a_start(words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys, own_too\nprint(sys.argv, sys.path[0], __file__, __name__, own_too.__file__)\nraise SystemExit(3)"
    )
    (tmp_path / "own.py").write_text(code)
    (tmp_path / "own_too.py").write_text("")
    start, fork = both(words, cwd=tmp_path)
    assert fork == start


def test_it_has_imported_torch_and_starts_for_real_where_a_variable_is_read_at_the_start() -> None:
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules, hash('words'))"]
    found = [
        forks.run(command, env=os.environ | more, capture_output=True, text=True).stdout.split()
        for more in ({}, {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "1"})
    ]
    assert [each[0] for each in found] == ["True", "False", "False"]
    assert found[1] == found[2]


def test_a_module_of_ones_own_hides_one_that_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('own')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = forks.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True)
    assert done.stdout == "own\n"


PARENT = """
import atexit, json, logging, os, psutil, signal, subprocess, sys, tempfile, threading, warnings
import torch
folder = tempfile.TemporaryDirectory()
atexit.register(print, "parent's end")
sys.stdout.write("not yet written, ")
warnings.simplefilter("error")
logging.getLogger("torch.distributed.elastic").propagate = False
signal.signal(signal.SIGTERM, lambda *_: None)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
held = threading.Lock()
held.acquire()
threading.Thread(target=held.acquire, daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
known = [each.pid for each in psutil.Process().children()] == [child.pid]
told = json.loads(child.communicate("go on")[0])
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
other.terminate()
print(json.dumps([known, told, os.getpid(), child.returncode, other.wait(), os.path.isdir(folder.name)]))
"""
CHILD = """
import json, logging, os, signal, sys, threading, warnings
forked = "torch" in sys.modules
import torch
first = warnings.filters[0][0] if warnings.filters else None
elastic = logging.getLogger("torch.distributed.elastic")
state = [first, elastic.propagate, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]
print(json.dumps([*state, str(torch.get_default_dtype()), torch.initial_seed() != 0, threading.active_count(),
                  forked, os.getppid(), sys.stdin.read()]))
sys.exit(7)
"""


def test_a_program_s_own_programs_are_its_children_and_start_afresh() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = forks.run([sys.executable, "-c", PARENT, CHILD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spoken, end = done.stdout.removeprefix("not yet written, ").splitlines()
    known, told, pid, code, other, folder = json.loads(spoken)
    assert (known, code, other, folder, end) == (True, 7, -signal.SIGTERM, True, "parent's end")
    assert told[0] != "error"
    assert told[1:] == [True, True, "torch.float32", True, 1, True, pid, "go on"]


def test_a_process_is_waited_for_with_a_limit_and_killed() -> None:
    with forks.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(100)"], stdout=-1) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"up\n"
        assert one.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(0.01)
        one.kill()
        assert one.wait() == -signal.SIGKILL


@pytest.mark.rest
def test_forks_end_with_the_session_that_asked_for_them() -> None:
    # The session is a fork itself, and so is its server, which needs not import all again.
    session = textwrap.dedent("""
        import os, signal, sys, forks
        forks.start_server()
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        print(*[forks.Popen(command, start_new_session=new).pid for new in (True, False)], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    environment = {key: value for key, value in os.environ.items() if key != forks.ADDRESS}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", session]
    done = forks.run(command, env=environment, capture_output=True, text=True, timeout=250)
    pids = [int(each) for each in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    for pid in pids:
        try:
            psutil.Process(pid).wait(60)
        except psutil.NoSuchProcess:
            continue
