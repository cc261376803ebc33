"""Teams and the full names of their jobs."""

import pytest

from dataservice.core.errors import SpecError
from dataservice.core.team import NO_TEAM, TeamSpec, full_name, team_of


def test_a_full_name_gives_its_team_back():
    assert team_of(full_name("vision", "vlm-sft")) == "vision"


def test_without_teams_a_job_is_named_as_its_file_says():
    assert full_name(NO_TEAM, "vlm-sft") == "vlm-sft"
    assert team_of("vlm-sft") == NO_TEAM


@pytest.mark.parametrize("key", ["weight", "max_jobs", "max_ready_bytes", "max_decode_cpus"])
def test_a_share_of_nothing_is_refused_by_its_name(key):
    with pytest.raises(SpecError, match=f"{key} is 0"):
        TeamSpec(**{key: 0})
