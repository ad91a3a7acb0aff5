"""A small Hub on localhost that serves a folder: well, without ranges, slowly, cut short, or not at all."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/model"

#: looks at a request (path, how often it was asked before) and answers it itself, or returns False
Misbehaviour = Callable[["Handler", str, int], bool]


class HubServer(ThreadingHTTPServer):
    """Serves `folder` as `org/model`. requests: (method, path, Range) in order. sent: bytes of bodies."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.misbehave: Misbehaviour = lambda handler, path, times: False
        self.requests: list[tuple[str, str, str | None]] = []
        self.tokens: set[str | None] = set()
        self.sent = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def ranges(self, name: str) -> list[str | None]:
        """The Range of every GET of a file."""
        return [asked for method, path, asked in self.requests if method == "GET" and path.endswith("/" + name)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def _respond(self) -> None:
        path = unquote(self.path)
        with self.server.lock:
            times = sum(asked == path for _, asked, _ in self.server.requests)
            self.server.requests.append((self.command, path, self.headers.get("Range")))
            self.server.tokens.add(self.headers.get("Authorization"))
        try:
            if not self.server.misbehave(self, path, times):
                self._behave(path)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _behave(self, path: str) -> None:
        names = sorted(
            p.relative_to(self.server.folder).as_posix() for p in self.server.folder.rglob("*") if p.is_file()
        )
        if re.fullmatch(rf"/api/models/{REPO}/revision/(main|v1/x|{COMMIT})", path) or path == f"/api/models/{REPO}":
            self.answer_json({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})
        elif re.fullmatch(rf"/api/models/{REPO}/tree/{COMMIT}(\?.*)?", path):
            sizes = {name: (self.server.folder / name).stat().st_size for name in names}
            self.answer_json([{"type": "file", "path": n, "size": s, "oid": str(s)} for n, s in sizes.items()])
        elif match := re.fullmatch(rf"/{REPO}/resolve/(?:main|{COMMIT})/(.+)", path):
            self._file(match[1], names)
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str, names: list[str]) -> None:
        if name not in names:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = (self.server.folder / name).read_bytes()
        headers = {"ETag": f'"{hash(content):x}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            self.answer(200, content, headers)
            return
        first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
        if first >= len(content):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.answer(206, content[first : last + 1], headers)

    def answer_json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        cut: int | None = None,
        pause: float = 0.0,
    ) -> None:
        """Answer; `cut` sends fewer bytes than announced, `pause` waits after each byte."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut is not None:
            body = body[:cut]
            self.close_connection = True
        pieces = [body] if not pause else [body[i : i + 1] for i in range(len(body))]
        for piece in pieces:
            self.wfile.write(piece)
            self.wfile.flush()
            with self.server.lock:
                self.server.sent += len(piece)
            if pause:
                time.sleep(pause)
