"""`trueshard watch`: files that are being written, what a run does, the terminal, the page and who may read it."""

from __future__ import annotations

import http.client
import io
import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

import chromium
import forks
from messages import lacking, naming
from running import environment, kill, project, start
from showing import answer, data_of, record, rewarded, write_run, write_samples
from trueshard.errors import UserError
from trueshard.train.metrics.watch import Server, Watched, view, watch
from trueshard.train.run.log import logged

in_a_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")


def records(first: int, last: int, **more: Any) -> list[dict[str, Any]]:
    return [record(step, **more) for step in range(first, last + 1)]


def append(run: Path, text: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


def steps(run: Watched) -> list[int]:
    run.read()
    return [each["step"] for each in run.records]


def held_by(run: Path, pid: int, host: str = socket.gethostname()) -> Path:
    (run / ".lock").write_text(f"process {pid} on {host}")
    return run


# Files


def test_a_file_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    run = Watched("run", tmp_path / "run")
    assert steps(run) == []
    write_run(run.folder, records(1, 2))
    assert steps(run) == [1, 2]
    line = json.dumps(record(3))
    append(run.folder, line[:20])
    assert steps(run) == [1, 2]
    append(run.folder, line[20:] + "\n" + json.dumps(record(4)))
    assert steps(run) == [1, 2, 3]
    append(run.folder, "\nno record\n")
    assert steps(run) == [1, 2, 3, 4]
    (run.folder / "metrics.jsonl").unlink()
    assert steps(run) == [1, 2, 3, 4]


@pytest.mark.parametrize("more", [0, 2, 9])
def test_steps_that_a_resumed_run_takes_again_are_read_again(tmp_path: Path, more: int) -> None:
    run = Watched("run", write_run(tmp_path / "run", records(1, 6)))
    run.read()
    write_run(run.folder, [*records(1, 3), *records(4, 3 + more, loss=5.0)])
    assert steps(run) == [*range(1, 4 + more)]
    assert all(each["loss"] == 5.0 for each in run.records[3:])


def test_what_a_run_does_is_said(tmp_path: Path) -> None:
    assert Watched("", tmp_path / "none").live()["state"] == "has not begun"
    before = write_run(tmp_path / "before", [{"step": 0, "evaluation_loss": 2.0}])

    def state(folder: Path, age: float = 5) -> str:
        at = time.time() - age
        os.utime(folder / "metrics.jsonl", (at, at))
        run = Watched("", folder)
        run.read()
        found = run.live()
        assert found["at"] == (pytest.approx(at, abs=1e-3) if found["state"] != "has not begun" else None)
        return str(found["state"])

    assert state(before) == "has not begun"
    run = write_run(tmp_path / "run", records(1, 9))
    assert state(run) == "stopped"
    assert state(held_by(run, os.getpid())) == "running"
    (run / "config.json").write_text('{"config": {"train": {"steps": 2000}}}')
    assert state(run) == "running to step 2,000"
    assert state(run, 90) == "silent to step 2,000"
    assert state(held_by(run, 1, "elsewhere")) == "running to step 2,000"
    with subprocess.Popen(["true"]) as ended:
        pass
    assert state(held_by(run, ended.pid)) == "killed"
    (run / ".lock").unlink()
    (run / "loss.png").touch()
    assert state(run) == "complete"
    os.utime(run / "loss.png", (0, 0))
    assert state(run) == "stopped"


def test_a_log_has_what_a_terminal_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with logged(folder):
        print("before there is a folder")
        folder.mkdir()
        print("one")
        print("\x1b[1mtwo\x1b[0m", file=sys.stderr)
        for step in range(3):
            print(f"\r\x1b[2Kstep {step} ━━━", end="")
        print("\r\x1b[2Kevaluation\nstep 3 ━━━", end="")
        print("\n\nlast line")
    print("after")
    lines = (folder / "log.txt").read_text().splitlines()
    assert [line[21:] for line in lines] == ["one", "two", "evaluation", "step 3 ━━━", "last line"]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines)
    printed = capsys.readouterr()
    assert lacking(printed.out, "before", "one", "\r\x1b[2Kstep 2", "after") == []
    assert printed.err == "\x1b[1mtwo\x1b[0m\n"


# The terminal


def shown(runs: list[Watched], width: int = 120, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, _environ={})
    for run in runs:
        run.read()
    console.print(view(runs, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_terminal_shows_runs_side_by_side(tmp_path: Path) -> None:
    lost = [record(21, incident="rank 1 was ended by SIGKILL", incident_seconds=4.0, incident_parts={})]
    one = held_by(write_run(tmp_path / "one", [*records(1, 20), *lost]), os.getpid())
    (one / "log.txt").write_text("".join(f"now  line {number} \x1b]0;title\x07\n" for number in range(99)))
    two = write_run(tmp_path / "two", [rewarded(step) for step in range(1, 31)])
    write_samples(two, [answer(30, 1, n, reward=n / 4, text=f"text {n}\x1b[2J") for n in range(3)])
    lines = shown([Watched("one", one), Watched("two", two), Watched("new", tmp_path / "new")])
    text = "\n".join(lines)
    assert lacking(text, "running, last step", "stopped, last step", "has not begun", "█", "▁") == []
    assert lacking(text, "tokens/s", "1.0 GiB", f"reward {rewarded(30)['reward']:.3f}", "Reward 0.") == []
    assert lacking(text, "step 21: rank 1 was ended by SIGKILL", "line 98", "step 30, reward 0.500", "text 2") == []
    assert "reward 0.000: 'text 0" in text
    assert not set(text) & {"\x1b", "\x07"}
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 40
    assert len(shown([Watched("one", one)], 60, 20)) <= 20


def test_without_a_terminal_it_is_said_once(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    watch([write_run(tmp_path / "one", records(1, 3)), tmp_path / "two"], console=console)
    assert isinstance(console.file, io.StringIO)
    assert lacking(console.file.getvalue(), "stopped", "has not begun", "loss") == []
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["metrics.jsonl", "one"]
    with pytest.raises(UserError, match=naming("one", "twice")):
        watch([tmp_path / "one", tmp_path / "one" / "metrics.jsonl"], console=console)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=naming("--port", port, "another")):
            watch([tmp_path / "one"], port, console)


# The page


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def serve(*folders: Path) -> Server:
        servers.append(server := Server([Watched(folder.name, folder) for folder in folders], 0))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    secret = server.address.split("/")[3]
    connection.request(method, path.replace("SECRET", secret), headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def test_the_page_is_that_of_plot_and_asks_its_own_server_alone(tmp_path: Path, serve: Callable[..., Server]) -> None:
    run = write_run(tmp_path / "run", records(1, 9))
    (run / "log.txt").write_text("now  </script><b>\n")
    server = serve(run, tmp_path / "new")
    status, text, headers = ask(server, "/SECRET/")
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "text/html; charset=utf-8", "no-store")
    assert (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"
        in text
    )
    data = data_of(text)
    assert [run["state"] for run in data["runs"]] == ["stopped", "has not begun"]
    assert data["runs"][0]["log"] == ["now  </script><b>"]
    status, text, headers = ask(server, "/SECRET/data.json")
    assert json.loads(text)["runs"][0]["curves"]["loss"]["step"] == [*range(1, 10)]
    tag = headers["ETag"]
    assert ask(server, "/SECRET/data.json", **{"If-None-Match": tag})[:2] == (304, "")
    append(run, json.dumps(record(10)) + "\n")
    deadline = time.monotonic() + 60
    while ask(server, "/SECRET/data.json", **{"If-None-Match": tag})[0] == 304:  # what takes long is made seldom
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads(ask(server, "/SECRET/data.json")[1])["runs"][0]["steps"] == 10


def test_nobody_else_reads_and_nothing_else_is_read(tmp_path: Path, serve: Callable[..., Server]) -> None:
    run = write_run(tmp_path / "run", records(1, 3))
    server = serve(run)
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", "/data.json", "/SECRET", "/SECRET/../metrics.jsonl", "/SECRET/metrics.jsonl", "/SECRET/samples1"):
        assert ask(server, path)[0] == 404, path
    assert ask(server, "/SECRET/", Host=f"localhost:{server.server_port}")[0] == 200
    for host in ("attacker.example", f"attacker.example:{server.server_port}", "127.0.0.1.attacker.example", ""):
        assert ask(server, "/SECRET/data.json", Host=host)[0] == 403, host
    assert [ask(server, "/SECRET/", method)[0] for method in ("POST", "PUT", "DELETE", "OPTIONS")] == [501] * 4
    assert serve(run).address.split("/")[3] != server.address.split("/")[3]


def test_answers_are_a_page_too(tmp_path: Path, serve: Callable[..., Server]) -> None:
    run = write_run(tmp_path / "run", [rewarded(1)])
    server = serve(run)
    assert data_of(ask(server, "/SECRET/")[1])["runs"][0]["samples"] is None
    file = write_samples(run, [answer(1, 0, 0, text="an answer")])
    assert data_of(ask(server, "/SECRET/")[1])["runs"][0]["samples"] == "samples0"
    status, text, _ = ask(server, "/SECRET/samples0")
    assert (status, data_of(text)["total"]) == (200, 1)
    file.write_text("no answer\n" + file.read_text())
    status, text, headers = ask(server, "/SECRET/samples0")
    assert (status, headers["Content-Type"]) == (500, "text/plain; charset=utf-8")
    assert lacking(text, "samples.jsonl", "line 1") == []


@pytest.fixture
def tab(browser: chromium.Page) -> Iterator[chromium.Page]:
    """A page that does not go on asking when the test is over."""
    yield browser
    browser.open("about:blank")


def wait_for(tab: chromium.Page, expression: str, limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not tab.run(expression):
        assert time.monotonic() < deadline, (expression, tab.run("document.querySelector('#runs').innerText"))
        time.sleep(0.1)
    tab.settle()


@pytest.mark.rest
@in_a_browser
def test_the_page_follows_runs_and_keeps_what_was_chosen(
    tab: chromium.Page, tmp_path: Path, serve: Callable[..., Server]
) -> None:
    one, two = held_by(write_run(tmp_path / "one", records(1, 9)), os.getpid()), tmp_path / "two"
    server = serve(one, two)
    tab.open(server.address)
    assert tab.run("data.runs.map((run) => run.now.split(',')[0])") == ["running", "has not begun"]
    tab.run("document.querySelector('#runs input').click()")
    tab.run("document.querySelector('input[value=log]').click()")
    tab.run("document.querySelector('#logs details').open = true")
    append(one, json.dumps(record(10, incident="rank 1 was ended by SIGKILL", incident_seconds=1.0)) + "\n")
    (one / "log.txt").write_text("now  went on\n")
    write_run(two, [rewarded(step) for step in range(1, 5)])
    wait_for(tab, "data.runs[1].steps === 4 && data.runs[0].steps === 10")
    assert tab.run("charts[0].panel.key") == "reward"
    assert tab.run("[...document.querySelectorAll('#runs input')].map((each) => each.checked)") == [False, True]
    assert tab.run("[view.to, view.scale]") == [4, "log"]
    tab.run("document.querySelector('#runs input').click()")
    tab.settle()
    assert tab.run("view.to") == 10
    said = tab.run("document.querySelector('#logs details').innerText")
    assert lacking(said, "Step 10: rank 1 was ended by SIGKILL", "went on") == []
    assert tab.run(chromium.CONTRAST) == []
    tab.scheme("dark")
    tab.settle()
    assert tab.run(chromium.CONTRAST) == []
    tab.resize(380, 1000)
    tab.settle()
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.errors == []
    assert {*tab.requests} == {server.address, f"{server.address}data.json"}
    server.shutdown()
    server.server_close()
    wait_for(tab, "$('settings').textContent.includes('has ended')")


@pytest.mark.rest
@in_a_browser
def test_a_real_run_is_watched_while_it_trains_and_when_it_is_killed(tab: chromium.Page, tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    ours, theirs = pty.openpty()
    more = environment(COLUMNS="120", LINES="30", TERM="xterm")
    command = [sys.executable, "-m", "trueshard", "watch", "run", "--page"]
    with forks.Popen(command, cwd=folder, stdout=theirs, stderr=theirs, env=more) as watching:
        os.close(theirs)
        written = b""

        def read_until(words: str) -> str:
            nonlocal written
            deadline = time.monotonic() + 60
            while words not in written.decode(errors="replace"):
                assert time.monotonic() < deadline, written.decode(errors="replace")[-2000:]
                written += os.read(ours, 1 << 16)
            found, written = written.decode(errors="replace"), b""
            return found

        address = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", read_until("has not begun"))
        assert address
        tab.open(address[0])
        process = start(folder, "--set", "train.steps=100000", "--set", "train.checkpoint_every=50000")
        wait_for(tab, "data.runs[0].steps > 3", 60)
        read_until("running to step 100,000, last step")
        steps = tab.run("data.runs[0].steps")
        wait_for(tab, f"data.runs[0].steps > {steps}")
        assert lacking(tab.run("document.body.innerText"), "running to step 100,000", "parameters on 1 cpu rank") == []
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            kill(each)
        process.communicate()
        read_until("killed, last step")
        wait_for(tab, "data.runs[0].state === 'killed'")
        assert tab.errors == []
        kill(psutil.Process(watching.pid))
    os.close(ours)
