"""The folders and URL prefixes under which a service may read, as its operator allows.

Jobs come from teams, but the service opens the files, and it may read more than a team may. A local
path is checked after its links are resolved, and again whenever a file is opened: the team may have
replaced anything in its folder by a link.
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
_USER = re.compile(r"(?<=://)[^/\s]*@")  # of a URL, with a password or a key
TEAM = "{team}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roots:
    """Local folders and URL prefixes; every file under one of them may be read. Folders are
    resolved on the host that uses them, since their links may differ between hosts. `of_teams` are
    roots as the operator wrote them, which a job without a team may not read."""

    folders: tuple[str, ...]
    urls: tuple[str, ...]
    of_teams: tuple[str, ...] = ()

    @staticmethod
    def of(allowed: Sequence[str], team: str) -> "Roots":
        """In a root, `{team}` stands for the team's name; such a root is left out when there is no
        team."""
        mine = [root.replace(TEAM, team) for root in allowed if team or TEAM not in root]
        local = [LOCAL.sub("", root) for root in mine if _is_local(root)]
        return Roots(
            folders=tuple(os.path.abspath(root) for root in local),
            urls=tuple(root.rstrip("/") for root in mine if not _is_local(root)),
            of_teams=tuple(root for root in allowed if not team and TEAM in root),
        )

    def require(self, place: str, what: str, asked: str = "allowed_roots") -> None:
        """Raises SpecError unless a path, URL or pattern lies under a root; `asked` is where the
        operator has them."""
        shown = _USER.sub("***@", place)  # refusals are logged
        try:
            single = expand(place)
        except ValueError as error:
            raise SpecError(f"{what} is {shown!r}: {error}. Correct it.") from error
        if not all(self.hold(each) for each in single):
            roots = ", ".join((*self.folders, *self.urls)) or "nothing"
            if self.of_teams:
                raise SpecError(
                    f"{what} is {shown!r}, which this service does not read for a job without a "
                    f"team. It reads under {', '.join(self.of_teams)} for the jobs of that team "
                    f"only, and under {roots} for all. A job has no team where it is submitted by "
                    "an admin's token without one: submit it with the team's own token, or with "
                    "one that `dataservice token new --role admin --team TEAM` makes."
                )
            raise SpecError(
                f"{what} is {shown!r}, which this service does not read. It reads under {roots}. "
                "Move the files there, or ask the operator to add their place to "
                f"{asked}."
            )

    def hold(self, place: str) -> bool:
        """Whether a path, URL or glob lies under a root, links resolved."""
        # A chain of file systems (`a::b`) would lead to a place that its beginning does not name.
        if "::" in place or "\0" in place:
            return False
        if not _is_local(place):
            # HTTP clients leave control characters out, which makes `..` of `.\t.`.
            parts = re.split(r"[/\\]", re.sub(r"[\0-\x20\x7f]", "", unquote(place)))
            return ".." not in parts and any(_under(place, root) for root in self.urls)
        path = LOCAL.sub("", place)
        if not posixpath.isabs(path):
            return False
        fixed = takewhile(lambda part: not GLOB.search(part), path.split("/"))
        if GLOB.search(path) and ".." in path.split("/"):
            return False
        return self._hold_resolved("/".join(fixed) or "/")

    def hold_file(self, path: str) -> bool:
        """Whether this file lies under a root; pattern characters in its name have no meaning."""
        if not _is_local(path):
            return self.hold(path)
        return self._hold_resolved(path)

    def _hold_resolved(self, path: str) -> bool:
        try:
            real = os.path.realpath(path)
        except UnicodeEncodeError:  # half of a surrogate pair, which no file's name has
            return False
        return any(_under(real, os.path.realpath(folder)) for folder in self.folders)


def _is_local(place: str) -> bool:
    return "://" not in place or LOCAL.match(place) is not None


def _under(place: str, root: str) -> bool:
    return place == root or place.startswith(root.rstrip("/") + "/")
