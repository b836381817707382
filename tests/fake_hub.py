"""A server that speaks as much of the hub's HTTP as `HfApi` asks for an upload; large files go by LFS."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from local_server import LocalServer, QuietHandler

COMMIT = "c" * 40


class FakeHub(LocalServer):
    """Serves on a port of the loopback interface until `close`. Uploads need the token `hf_right`."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        """By name: what it was created with."""
        self.files: dict[str, dict[str, bytes]] = {}
        """By name of the repository: the files of its commits."""
        self.asked: list[str] = []
        """Method and path of each request."""
        self._stored: dict[str, bytes] = {}
        fake = self

        class Handler(QuietHandler):
            def do_PUT(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.asked.append(f"{self.command} {self.path}")
                is_allowed = self.command == "PUT" or self.headers.get("Authorization") == "Bearer hf_right"
                status, told = fake.answer(self.path, body) if is_allowed else (401, {"error": "Invalid credentials"})
                data = json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        super().__init__(Handler)

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """HTTP status, and what is sent as JSON."""
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}" if "organization" in given else given["name"]
            is_new = name not in self.repositories
            self.repositories.setdefault(name, given)
            return (200 if is_new else 409), {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name = next((name for name in self.repositories if f"/{name}" in path), "")
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [(each["path"], "lfs" if each["path"].endswith(".safetensors") else "regular") for each in files]
            return 200, {"files": [{"path": file, "uploadMode": mode, "shouldIgnore": False} for file, mode in modes]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                each | {"actions": {"upload": {"href": f"{self.url}/stored/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.startswith("/stored/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/stored/")
            self._stored[path.removeprefix("/stored/")] = body
            return 200, {}
        if "/commit/" in path:
            files = self.files.setdefault(name, {})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                if line["key"] == "lfsFile":
                    files[line["value"]["path"]] = self._stored[line["value"]["oid"]]
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        return 404, {"error": f"nothing at {path}"}
