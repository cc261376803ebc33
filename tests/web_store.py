"""A web server of files that serves byte ranges, to those who bring its token."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit


class StoreRequest(BaseHTTPRequestHandler):
    """One request; whoever serves more than files by their paths overrides `answer`."""

    server: "WebStore"
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._begin()

    def do_GET(self) -> None:
        self._begin()

    def _begin(self) -> None:
        path, token = unquote(urlsplit(self.path).path), self.server.token
        self.server.asked.append((path, self.headers.get("Range", "")))
        if token and self.headers.get("Authorization") != f"Bearer {token}":
            self.send(401)
        else:
            self.answer(path)

    def answer(self, path: str) -> None:
        """Answer a request for this path."""
        self.send_file(self.server.home / path.lstrip("/"))

    def send_file(self, file: Path) -> None:
        """Send the range of a file that is asked for, or all of it."""
        if not file.is_file():
            self.send(404)
            return
        data, status, headers = file.read_bytes(), 200, {"Accept-Ranges": "bytes"}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data, status = data[start : end + 1], 206
        self.send(status, data, headers)

    def send(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Send one answer."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


class WebStore(ThreadingHTTPServer):
    """Serves the files of `home` to those who bring `token`, or to all where it is empty. `asked`
    has what was asked for, as (path, range)."""

    daemon_threads = True
    request = StoreRequest

    def __init__(self, home: Path, token: str) -> None:
        super().__init__(("127.0.0.1", 0), self.request)
        self.home = home
        self.token = token
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


Store = TypeVar("Store", bound=WebStore)


@contextmanager
def running(store: Store) -> Iterator[Store]:
    """The store, which serves while the block runs."""
    with store:
        serving = threading.Thread(target=store.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield store
        finally:
            store.shutdown()
            serving.join()
