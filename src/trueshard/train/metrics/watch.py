"""`trueshard watch`: runs in the terminal and on a page while they go on, from the files of their folders alone.

- Files grow while they are read: half a line at the end is left for the next look, and a file that a resumed run has
  cut is read again.
- The page is served on 127.0.0.1 and is read-only: GET of a fixed set of addresses, under a name of this host, against
  DNS rebinding, and below a path that nobody can guess, since other users of the machine reach the port.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import re
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trueshard.errors import UserError, one_line
from trueshard.text import load_json
from trueshard.train.metrics import answers
from trueshard.train.metrics.curves import RunRecords, curve, named, page, page_data
from trueshard.train.metrics.step_metrics import NAME, read_steps, record_of
from trueshard.train.metrics.terminal import figures, final_line, has_reward, together
from trueshard.train.run.checks import LOCK
from trueshard.train.run.log import NAME as LOG

SILENT = 60.0
"""Seconds without a step, and at least ten times those of a step, from which on a run is called silent."""
END = 1 << 16
"""Bytes of the end of a log, or of a file of answers, that are read."""
DRAWN = ("loss", "reward")
"""Names of the pictures that a complete run has."""
HOSTS = ("127.0.0.1", "localhost")
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
BARS = "▁▂▃▄▅▆▇█"


def _end_of(file: Path) -> str:
    """Return the end of a file as text; "" if there is none."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - END))
            return opened.read().decode(errors="replace")
    except OSError:
        return ""


class Watched:
    """A run's folder, read as far as it is written."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.records = name, folder, list[dict[str, Any]]()
        self._end, self._last = 0, b""  # bytes read, and the last line of them

    def read(self) -> None:
        """Read the records that are new."""
        with contextlib.suppress(FileNotFoundError), (self.folder / NAME).open("rb") as file:
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                self.records, self._end = [], 0
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._end, self._last = self._end + len(line), line
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    self.records.append(record_of(line))

    def live(self) -> dict[str, Any]:
        """Return what is known beyond the records: the run's state, when its last record came, and what it said."""
        taken, log = [record for record in self.records[-20:] if "seconds" in record], _end_of(self.folder / LOG)
        answered = (self.folder / answers.NAME).exists()
        more: dict[str, Any] = {"log": ["".join(filter(str.isprintable, line)) for line in log.splitlines()[-200:]]}
        if not taken:
            return more | {"state": "has not begun", "at": None, "samples": None}
        at = (self.folder / NAME).stat().st_mtime
        holder = re.fullmatch(r"process (\d+) on (.+)", _end_of(self.folder / LOCK))
        patience = max(SILENT, 10 * statistics.median(record["seconds"] for record in taken))
        if holder is None:
            is_drawn = any(file.stat().st_mtime >= at for file in self.folder.glob("*.png") if file.stem in DRAWN)
            state = "complete" if is_drawn else "stopped"
        elif holder[2] == socket.gethostname() and not psutil.pid_exists(int(holder[1])):
            state = "killed"
        else:
            state = "running" if time.time() - at < patience else "silent"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                total = load_json((self.folder / "config.json").read_bytes())["config"]["train"]["steps"]
                state += f" to step {total:,}"
        return more | {"state": state, "at": at, "samples": answered}

    def answers(self) -> list[str]:
        """Return the best and the worst answer of the newest step that has some, a line each."""
        records: list[dict[str, Any]] = []
        for line in _end_of(self.folder / answers.NAME).splitlines(keepends=True)[-64:]:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                records.append(answers.answer_of(line.encode()))
        newest = [record for record in records if record["step"] == records[-1]["step"]]
        newest.sort(key=lambda record: -record["reward"])
        return [
            f"answer of step {record['step']}, {answers.score_of(record)} {record['reward']:.3f}: {record['text']!r}"
            for record in newest[:1] + newest[1:][-1:]
        ]


# In the terminal


def view(runs: Sequence[Watched], height: int, head: str = "") -> Group:
    """Return what a terminal of so many lines shows."""
    table = Table("run", "state", "step", "loss or reward", "", box=None, pad_edge=False, header_style="dim")
    below: list[Text] = []
    for run in runs:
        live, taken = run.live(), [record for record in run.records if "seconds" in record]
        age = f", {_age(live['at'])}" if live["at"] else ""
        step = f"{taken[-1]['step']:,}" if taken else ""
        row = (
            run.name,
            live["state"] + age,
            step,
            _bars(run.records),
            "  ".join(figures(together(taken[-20:])).values()) if taken else "",
        )
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
        lost = [f"step {record['step']}: {record['incident']}" for record in run.records if "incident" in record]
        said = [*([final_line(run.records)] if taken else []), *lost[-3:], *run.answers()]
        log = live["log"][-max(2, (height - len(runs) - 4) // len(runs) - len(said) - 1) :]
        below += [Text(f"\n{run.name}", style="bold"), *map(Text, said), *(Text(line, style="dim") for line in log)]
    for line in below:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(Text(head, style="dim"), table, *below)


def _age(at: float) -> str:
    return f"last step {datetime.timedelta(seconds=max(1, round(time.time() - at)))} ago"


def _bars(records: Sequence[dict[str, Any]]) -> str:
    """Return the loss, or the reward, over all steps, as a row of bars."""
    points = curve(records, "reward" if has_reward(records) else "loss", 24)
    if points is None:
        return ""
    low, high = np.nanmin(points.mean), np.nanmax(points.mean)
    return "".join(
        " " if value != value else BARS[int((value - low) / (high - low or 1) * 7.99)] for value in points.mean
    )


# On a page


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of the pages of its server."""

    server: Server
    timeout = 30  # seconds for a request to arrive
    server_version, sys_version = "trueshard", ""

    def do_GET(self) -> None:
        make, is_here = self.server.pages.get(self.path), self.headers.get("Host", "").partition(":")[0] in HOSTS
        if make is None or not is_here:
            self.send_error(404 if is_here else 403)
            return
        with self.server.reading:
            try:
                text, status = make(), 200
            except UserError as error:
                text, status = str(error), 500
        tag = f'"{hashlib.sha256(text.encode()).hexdigest()}"'
        if tag == self.headers.get("If-None-Match"):
            text, status = "", 304
        kind = "text/html" if status == 200 and not self.path.endswith(".json") else "text/plain"
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", "ETag": tag, **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Be silent: the terminal shows runs."""


class Server(ThreadingHTTPServer):
    """The page of runs, at ``address``."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Watched], port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._runs, self.reading = runs, threading.Lock()
        self._drawn: tuple[Any, str] = None, ""
        self._due = 0.0
        secret = f"/{secrets.token_urlsafe(16)}/"
        self.address = f"http://127.0.0.1:{self.server_port}{secret}"
        self.pages: dict[str, Callable[[], str]] = {
            secret: lambda: page(*self._read()),
            f"{secret}data.json": self._data,
            **{f"{secret}samples{i}": functools.partial(_samples, run) for i, run in enumerate(runs)},
        }

    def _read(self) -> tuple[list[RunRecords], list[dict[str, Any]]]:
        for run in self._runs:
            run.read()
        live = [run.live() for run in self._runs]
        for i, state in enumerate(live):
            state["samples"] = f"samples{i}" if state["samples"] else None
        return [RunRecords(run.name, run.records) for run in self._runs], live

    def _data(self) -> str:
        """Return what is drawn as JSON, made anew if something has changed."""
        runs, live = self._read()
        key = [(len(run.records), run.records[-1:], more) for run, more in zip(runs, live, strict=True)]
        if key != self._drawn[0] and (began := time.monotonic()) >= self._due:
            self._drawn = key, json.dumps(page_data(runs, live), allow_nan=False)
            self._due = began + 10 * (time.monotonic() - began)  # of a long run not every step: it would take a core
        return self._drawn[1]


def _samples(run: Watched) -> str:
    file = run.folder / answers.NAME
    return answers.page(run.name, file, read_steps(file))


def watch(paths: Sequence[Path], port: int | None = None, console: Console | None = None) -> None:
    """Show runs until Ctrl-C; elsewhere than on a terminal once, unless there is a page.

    Args:
        paths: folders of runs, which need not have begun, or their `metrics.jsonl`.
        port: of the page; 0: a free one; None: no page.

    Raises `UserError`: the port is taken, or a run is given twice.
    """
    files = [path.expanduser().resolve() for path in paths]
    runs_by_name = named([file if file.suffix == ".jsonl" else file / NAME for file in files])
    runs, console, head = (
        [Watched(name, file.parent) for name, file in runs_by_name],
        console or Console(highlight=False),
        "",
    )
    lock: Any = contextlib.nullcontext()
    if port is not None:
        try:
            server = Server(runs, port)
        except OSError as error:
            raise UserError(f"--port {port}: cannot be opened ({one_line(error)}); choose another, or 0") from None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        head, lock = server.address, server.reading
        console.print(head, soft_wrap=True)

    def shown() -> Group:
        with lock:
            for run in runs:
                run.read()
            return view(runs, console.height, head)

    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal:
            with Live(console=console, screen=True, auto_refresh=False) as display:
                while True:
                    began = time.monotonic()
                    display.update(shown(), refresh=True)
                    time.sleep(max(1, 10 * (time.monotonic() - began)))
        while port is not None:
            time.sleep(3600)
    console.print(shown())
