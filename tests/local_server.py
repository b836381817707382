"""An HTTP server of a test on a port of the loopback interface."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """Answers GET as POST, and writes no log."""

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        raise NotImplementedError

    def log_message(self, *args: Any) -> None:
        pass


class LocalServer:
    """Serves until `close`."""

    def __init__(self, handler: type[QuietHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
