"""Storage that the operator opens to teams by name, with credentials that no job file holds."""

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT
from dataservice.core.team import NO_TEAM

# What stores call their secrets. Nested ones cannot be known by name; these are what people write.
_SECRETS = re.compile(
    r"secret|password|token|credential|signature|connection_string|^key$|_key$|access_key", re.I
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageProfile:
    """Storage that jobs may name as `storage_profile`. Its secrets lie in `options_file` alone,
    which is read where storage is opened and never sent."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    roots: tuple[str, ...]
    """URL prefixes, such as s3://lake/images: sources with this profile are read below these, and
    nowhere else. allowed_roots need not have them."""
    teams: tuple[str, ...] = ()
    """The teams that may use it; without any, all teams may."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of fsspec's file system that are no secrets, such as
    {endpoint_url: "https://s3.example.com"}."""
    options_file: str | None = None
    """YAML file with further options, such as `key` and `secret` of s3, or `token` of hf. Only its
    owner and group may read it. Workers read it on their own hosts."""

    def __post_init__(self) -> None:
        if not self.roots:
            raise SpecError("roots is empty; name the URL prefixes that it is for, as s3://lake/.")
        for root in self.roots:
            if not re.match(r"(?!file:|local:)[a-z0-9]+://[^/]", root) or set(root) & set("*?[]{}"):
                raise SpecError(
                    f"root {root!r} is no prefix of URLs. Write one such as s3://lake/images, "
                    "without patterns; paths of this machine need no profile, but allowed_roots."
                )
        secrets = sorted(filter(_SECRETS.search, self.options))
        if secrets:
            raise SpecError(
                f"options names {', '.join(secrets)}, which is a secret by its name. Put it into a "
                "YAML file that only the service's user may read, and name that as options_file."
            )

    def may_use(self, team: str) -> bool:
        """Whether jobs of this team may name it. Without teams, whoever asks is an admin."""
        return team == NO_TEAM or not self.teams or team in self.teams
