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
    "PGPASSWORD",
    "MYSQL_PWD",
    "STORAGE_CONNECTION_STRING",
    "DATABASE_URL",
    "S3_ACCESSKEY",
    "SECRETKEY",
    "S3_PASSPHRASE",
    "SAS_URL",
    "ADL_SAS",
    "AUTHORIZATION",
    "KRB5CCNAME",
    "my_password",
]
OPEN = ["PATH", "HOME", "HF_ENDPOINT", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "KEYBOARD"]
OPEN += ["PWD", "OLDPWD", "PYTHONPATH", "KEYWORDS"]


@pytest.mark.parametrize("name", HIDDEN)
def test_what_holds_credentials_is_told_apart(name):
    assert credentials_of({name: "x"}) == {name: "x"}
    assert without_credentials({name: "x"}) == {}


@pytest.mark.parametrize("value", ["http://user:word@proxy.test:3128", "db://u:p@host/name"])
def test_a_url_with_a_password_is_credentials_whatever_its_name(value):
    assert credentials_of({"HTTPS_PROXY": value}) == {"HTTPS_PROXY": value}
    assert without_credentials({"HTTPS_PROXY": "http://proxy.test:3128"}) != {}


@pytest.mark.parametrize("name", OPEN)
def test_what_holds_none_is_left(name):
    assert credentials_of({name: "x"}) == {}
    assert without_credentials({name: "x"}) == {name: "x"}
