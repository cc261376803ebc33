"""Which variables of an environment are kept from a team's own code."""

import pytest

from dataservice.core.credentials import credentials_of, without_credentials

HIDDEN = [
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AZURE_STORAGE_CONNECTION_STRING",
    "DATASERVICE_TOKEN",
    "FSSPEC_S3_SECRET",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HF_TOKEN",
    "RAY_AUTH_TOKEN",
    "my_password",
]
OPEN = ["PATH", "HOME", "HF_ENDPOINT", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "KEYBOARD"]


@pytest.mark.parametrize("name", HIDDEN)
def test_what_holds_credentials_is_told_apart(name):
    assert credentials_of({name: "x"}) == {name: "x"}
    assert without_credentials({name: "x"}) == {}


@pytest.mark.parametrize("name", OPEN)
def test_what_holds_none_is_left(name):
    assert credentials_of({name: "x"}) == {}
    assert without_credentials({name: "x"}) == {name: "x"}
