"""Which variables of an environment hold credentials, or say where they lie.

A process that runs a team's own code starts without them. To take one too many costs nothing: the
processes that read storage are handed all of them.
"""

import re
from collections.abc import Mapping

_OF_CREDENTIALS = re.compile(
    r"(^|_)(SECRETS?|TOKENS?|PASSWORD|PASSWD|CREDENTIALS?|APIKEY|KEY|KEYS)(_|$)"
    r"|^(AWS|AZURE|GOOGLE|GCLOUD|CLOUDSDK|OSS|OCI|FSSPEC|BOTO)_",
    re.IGNORECASE,
)


def credentials_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may hold credentials."""
    return {name: value for name, value in environment.items() if _OF_CREDENTIALS.search(name)}


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold none."""
    return {name: value for name, value in environment.items() if not _OF_CREDENTIALS.search(name)}
