"""Whose code a worker's pipeline runs, which decides what processes it may share."""

import pytest

from dataservice.core.job import CodeSpec
from dataservice.decode.spec import PipelineSpec
from dataservice.jobs.sample_pipeline import worker_pipeline
from dataservice.jobs.worker_pipeline import code_owner

PLAIN = PipelineSpec(tokenizer="tokenizer")
OWN = PipelineSpec(tokenizer="tokenizer", prepare=(CodeSpec(name="tidy"),))
TOKENS = PipelineSpec(tokenizer="tokenizer", tokenizer_code=CodeSpec(name="bytes"))


@pytest.mark.parametrize(
    ("spec", "team", "owner"),
    [(PLAIN, "a", None), (OWN, "a", "a"), (OWN, "", ""), (PLAIN, "", None), (TOKENS, "a", "a")],
)
def test_a_pipeline_with_a_teams_own_code_names_the_team(spec, team, owner):
    assert code_owner(worker_pipeline([], spec, {}, team=team)) == owner
