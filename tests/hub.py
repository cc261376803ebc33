"""The few routes of the Hugging Face Hub that reading a data set at a commit takes."""

import json
import re
from hashlib import sha1
from pathlib import Path

from tests.web_store import StoreRequest, WebStore

NAME = "org/pages"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Request(StoreRequest):
    def answer(self, path: str) -> None:
        home = self.server.home
        if path == f"/api/datasets/{NAME}/revision/{COMMIT}":
            self.send(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode())
        elif found := re.fullmatch(rf"/api/datasets/{NAME}/tree/{COMMIT}(?:/(.*))?", path):
            self._list(home / (found[1] or ""))
        elif found := re.fullmatch(rf"/datasets/{NAME}/resolve/{COMMIT}/(.*)", path):
            self.send_file(home / found[1])
        else:
            self.send(404, b"{}")

    def _list(self, folder: Path) -> None:
        if not folder.is_dir():
            self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        deep = "recursive=true" in self.path.lower()
        paths = sorted(folder.rglob("*") if deep else folder.iterdir())
        self.send(200, json.dumps([self._entry(path) for path in paths]).encode())

    def _entry(self, path: Path) -> dict[str, object]:
        name = str(path.relative_to(self.server.home))
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "path": name, "size": 0}
        data = path.read_bytes()
        return {"type": "file", "oid": sha1(data).hexdigest(), "path": name, "size": len(data)}


class Hub(WebStore):
    """Serves `home` as the data set NAME at COMMIT."""

    request = _Request
