"""Where a service reads: the folders and URL prefixes that its operator allows.

Jobs come from teams, but files are opened by the service, which may read more than a team may.
A local path is judged by where it leads once links are resolved, and again whenever a file is
opened: what lies in a team's folder, the team may have made a link.
"""

import os
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from urllib.parse import unquote

from dataservice.core.errors import SpecError
from dataservice.sources.patterns import expand

LOCAL = re.compile(r"^(file|local)://")
GLOB = re.compile(r"[*?\[]")
TEAM = "{team}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roots:
    """Local folders and URL prefixes. Whatever lies under one may be read. Folders are resolved
    where they are used, for each host may have them elsewhere."""

    folders: tuple[str, ...]
    urls: tuple[str, ...]

    @staticmethod
    def of(allowed: Sequence[str], team: str) -> "Roots":
        """`{team}` stands for the team's name; a root with it is not for those without one."""
        mine = [root.replace(TEAM, team) for root in allowed if team or TEAM not in root]
        local = [LOCAL.sub("", root) for root in mine if _is_local(root)]
        return Roots(
            folders=tuple(os.path.abspath(root) for root in local),
            urls=tuple(root.rstrip("/") for root in mine if not _is_local(root)),
        )

    def require(self, place: str, what: str) -> None:
        """Raises SpecError unless a path, URL or pattern of them lies under a root."""
        try:
            single = expand(place)
        except ValueError as error:
            raise SpecError(f"{what} is {place!r}: {error}. Correct it.") from error
        if not all(self.hold(each) for each in single):
            roots = ", ".join((*self.folders, *self.urls)) or "nothing"
            raise SpecError(
                f"{what} is {place!r}, which this service does not read. It reads under {roots}. "
                "Move the files there, or ask the operator to add their place to allowed_roots."
            )

    def hold(self, place: str) -> bool:
        """Whether a path, URL or glob lies under a root, links resolved."""
        # A chain of file systems (`a::b`) would lead elsewhere than its beginning says.
        if "::" in place or "\0" in place:
            return False
        if not _is_local(place):
            parts = re.split(r"[/\\]", unquote(place))
            return ".." not in parts and any(_under(place, root) for root in self.urls)
        path = LOCAL.sub("", place)
        if not posixpath.isabs(path):
            return False
        fixed = takewhile(lambda part: not GLOB.search(part), path.split("/"))
        if GLOB.search(path) and ".." in path.split("/"):
            return False
        return self._hold_resolved("/".join(fixed) or "/")

    def hold_file(self, path: str) -> bool:
        """Whether this very file lies under a root, whatever characters are in its name."""
        if not _is_local(path):
            return self.hold(path)
        return self._hold_resolved(path)

    def _hold_resolved(self, path: str) -> bool:
        real = os.path.realpath(path)
        return any(_under(real, os.path.realpath(folder)) for folder in self.folders)


def _is_local(place: str) -> bool:
    return "://" not in place or LOCAL.match(place) is not None


def _under(place: str, root: str) -> bool:
    return place == root or place.startswith(root.rstrip("/") + "/")
