"""Which variables of an environment hold credentials, or say where they lie.

A process that runs a team's own code starts without them. To take one too many costs nothing: the
processes that read storage are handed all of them.
"""

import re
from collections.abc import Mapping

_OF_CREDENTIALS = re.compile(
    r"SECRET|TOKENS?(_|$)|PASSW|PASSPHRASE|.PWD$|CREDENTIAL|KEYS?(_|$)|(^|_)SAS(_|$)|SAS_?URL"
    r"|CONNECTION_?STRING|DATABASE_URL|AUTHORIZATION|^KRB5"
    r"|^(AWS|AZURE|GOOGLE|GCLOUD|CLOUDSDK|OSS|OCI|FSSPEC|BOTO)_",
    re.IGNORECASE,
)
_IN_A_URL = re.compile(r"://[^/@\s]+:[^/@\s]+@")  # of a proxy or a database, say
_NEVER = {"OLDPWD"}


def _may_hold(name: str, value: str) -> bool:
    of_credentials = _OF_CREDENTIALS.search(name) is not None and name not in _NEVER
    return of_credentials or _IN_A_URL.search(value) is not None


def credentials_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may hold credentials."""
    return {name: value for name, value in environment.items() if _may_hold(name, value)}


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold none."""
    return {name: value for name, value in environment.items() if not _may_hold(name, value)}
