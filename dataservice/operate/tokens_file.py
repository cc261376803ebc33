"""The tokens file: who may call the service. Only hashes of tokens are in it.

    - {name: vision-a1b2c3, team: vision, role: team, sha256: "9f86...", expires: 2026-12-31}

The file is read again when it changes, so tokens are added, replaced and revoked without a
restart. While the file is missing, invalid or not to be read, the last valid tokens stay in force.
"""

import logging
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from dataservice.core.errors import SpecError
from dataservice.core.private_files import file_stamp
from dataservice.core.team import NO_TEAM, Identity
from dataservice.core.tokens import TokenEntry, identify, new_token, token_digest

log = logging.getLogger(__name__)

TeamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
LOOK_S = 1.0  # a stat for every call would be too slow on a remote file system


class TokenRecord(BaseModel):
    """An entry of the tokens file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the token in the audit log; unique in the file."""
    team: TeamName | None = None
    """Team whose jobs the token is for; an admin's may have none."""
    role: Literal["admin", "team", "reader"]
    """admin sees and changes the jobs of all teams, team those of its own team; reader sees the
    jobs of its team."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    """Hash of the token."""
    expires: datetime | None = None
    """Date and time when the token expires, in UTC where no zone is given."""

    @model_validator(mode="after")
    def _has_a_team(self) -> "TokenRecord":
        if self.team is None and self.role != "admin":
            raise ValueError(f"role {self.role} needs a team")
        return self

    @property
    def entry(self) -> TokenEntry:
        """The record in the form that calls are checked against."""
        ends = self.expires
        if ends is not None and ends.tzinfo is None:
            ends = ends.replace(tzinfo=UTC)
        return TokenEntry(
            identity=Identity(team=self.team or NO_TEAM, role=self.role, name=self.name),
            sha256=bytes.fromhex(self.sha256),
            expires_unix_s=None if ends is None else ends.timestamp(),
        )


_RECORDS = TypeAdapter(Annotated[list[TokenRecord], Field(min_length=1)])


class TokensFile:
    """serving.identity.Authenticate over a file, which is read again when it changes."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        look_s: float = LOOK_S,
    ) -> None:
        """Raises SpecError where the file cannot be used."""
        self._path = path
        self._clock = clock
        self._look_s = look_s
        self._stamp = file_stamp(path)
        self._looked_s = clock()
        self._told = self._stamp
        self._entries = read_tokens(path)

    def __call__(self, token: str | None) -> Identity:
        """The identity that the token stands for. Raises TokenError."""
        now_s = self._clock()
        if abs(now_s - self._looked_s) >= self._look_s:
            self._looked_s = now_s
            self._follow()
        return identify(self._entries, token, now_s)

    def _follow(self) -> None:
        stamp = file_stamp(self._path)
        told, self._told = self._told, stamp
        if stamp == self._stamp:
            return
        try:
            self._entries = read_tokens(self._path)
        except SpecError as error:
            # It is tried at each look: what kept it from being read may go, and leave no trace in
            # its stamp, as a `chmod` does.
            if stamp != told:
                log.error("the tokens in use stay: %s", error)
        else:
            self._stamp = stamp
            log.info("%d tokens taken up from %s", len(self._entries), self._path)


def read_tokens(path: Path) -> list[TokenEntry]:
    """The entries of a tokens file. Raises SpecError saying what is wrong with it."""
    remedy = "Write it with what `dataservice token new` prints."
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        records = _RECORDS.validate_python(plain)
    except OSError as error:
        raise SpecError(
            f"the tokens file {path} cannot be read: {error.strerror}. Check the path."
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise SpecError(f"the tokens file {path} is not YAML{where}. {remedy}") from error
    except ValidationError as error:
        # Neither pydantic's input nor its chain: they could show a token written there by mistake.
        found = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in found["loc"]) or "the file"
        raise SpecError(
            f"the tokens file {path} is not a list of tokens: {where}: {found['msg']}. {remedy}"
        ) from None
    except (ValueError, LookupError, AttributeError):  # of PyYAML, whose words may show a token
        raise SpecError(
            f"the tokens file {path} has a value that cannot be read, such as a date that is in no "
            f"calendar. {remedy}"
        ) from None
    for key in ("name", "sha256"):
        values = [getattr(record, key) for record in records]
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise SpecError(
                f"the tokens file {path} has {key} {twice[0]!r} twice; each must be unique."
            )
    return [record.entry for record in records]


def make_token(
    *, team: str | None, role: str, name: str | None = None, expires: datetime | None = None
) -> tuple[str, TokenRecord]:
    """A new token and its entry. Raises SpecError where the name or team is invalid."""
    token = new_token()
    digest = token_digest(token).hex()
    try:
        record = TokenRecord.model_validate(
            {
                "name": name or f"{team or role}-{digest[:6]}",
                "team": team,
                "role": role,
                "sha256": digest,
                "expires": expires,
            }
        )
    except ValidationError as error:
        found = "; ".join(
            "".join(f"{part}: " for part in each["loc"]) + each["msg"].removeprefix("Value error, ")
            for each in error.errors(include_url=False)
        )
        raise SpecError(
            f"no token can be made: {found}. Names have letters, digits, dots, dashes and "
            "underscores; every role but admin has a team."
        ) from error
    return token, record


def expiry(text: str, now: datetime) -> datetime | None:
    """When a token expires that is made at `now`. `text` is `90d`, `12h`, `4w`, a date, a date
    with time, or `never` (None). Raises SpecError."""
    if text == "never":
        return None
    try:
        if match := re.fullmatch(r"(\d{1,5})([hdw])", text):
            unit = {"h": "hours", "d": "days", "w": "weeks"}[match[2]]
            ends = now.replace(microsecond=0) + timedelta(**{unit: int(match[1])})
        else:
            ends = datetime.fromisoformat(text)
    except ValueError:
        raise SpecError(
            f"a token cannot expire at {text!r}. Give 90d, 12h, 4w, a date such as 2026-12-31, "
            "or never."
        ) from None
    ends = ends if ends.tzinfo is not None else ends.replace(tzinfo=UTC)
    if ends <= now:
        raise SpecError(f"{text} is in the past; a token must expire later than now.")
    return ends
