"""A web server of files that serves byte ranges, to those who bring its token."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class WebStore(ThreadingHTTPServer):
    """Serves the files of `home`. `asked` has what was asked for, as (path, range)."""

    daemon_threads = True

    def __init__(self, home: Path, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.home = home
        self.token = token
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Request(BaseHTTPRequestHandler):
    server: WebStore
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        span = self.headers.get("Range", "")
        self.server.asked.append((self.path, span))
        file = self.server.home / self.path.lstrip("/")
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._send(401)
        elif not file.is_file():
            self._send(404)
        else:
            data, status, headers = file.read_bytes(), 200, {"Accept-Ranges": "bytes"}
            if found := re.fullmatch(r"bytes=(\d+)-(\d*)", span):
                start, end = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                data, status = data[start : end + 1], 206
            self._send(status, data, headers, with_body=with_body)

    def _send(
        self,
        status: int,
        data: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        with_body: bool = True,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@contextmanager
def web_store(home: Path, token: str) -> Iterator[WebStore]:
    """A store that serves while the block runs."""
    with WebStore(home, token) as store:
        serving = threading.Thread(target=store.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield store
        finally:
            store.shutdown()
            serving.join()
