"""What an operator may write into a storage profile."""

import pytest

from dataservice.core.errors import SpecError
from dataservice.core.storage_profile import StorageProfile

LAKE = ("s3://lake/",)


@pytest.mark.parametrize(
    "root",
    ["/data", "data", "file:///data", "local://data", "s3://", "s3://lake/*", "s3://{team}/a"],
)
def test_a_root_is_a_prefix_of_urls(root):
    with pytest.raises(SpecError, match="is no prefix of URLs"):
        StorageProfile(roots=(root,))


def test_a_profile_without_a_root_is_refused():
    with pytest.raises(SpecError, match="roots is empty"):
        StorageProfile(roots=())


@pytest.mark.parametrize(
    "option", ["key", "secret", "token", "password", "account_key", "sas_token", "aws_secret_key"]
)
def test_a_secret_among_the_open_options_is_refused_without_its_value(option):
    with pytest.raises(SpecError, match=f"names {option}.*options_file") as refused:
        StorageProfile(roots=LAKE, options={option: "hunter2"})
    assert "hunter2" not in str(refused.value)


def test_options_that_are_no_secrets_are_taken():
    StorageProfile(roots=LAKE, options={"endpoint_url": "https://s3.test", "anon": False})


@pytest.mark.parametrize(
    ("teams", "team", "may"),
    [
        ((), "audio", True),
        (("vision",), "vision", True),
        (("vision",), "audio", False),
        (("vision",), "", True),  # nobody has a team: everybody is an admin
    ],
)
def test_only_its_teams_may_use_a_profile(teams, team, may):
    assert StorageProfile(roots=LAKE, teams=teams).may_use(team) is may
