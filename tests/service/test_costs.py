"""Costs of a running service: measured against predicted, and refitted at a recorded step."""

import json
from pathlib import Path

import pytest

from dataservice.core.cost import ContextCost
from dataservice.core.memory import MemoryModel
from dataservice.core.plan import StepPlan
from dataservice.core.topology import ReplicaLayout
from dataservice.jobs.cost_file import Coefficients, CostFile, write_cost_file
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.validate import validate_plan
from tests.service.support import Ranks, explained, job_file, serving, wait_for
from trainer_client.errors import ClientError

pytestmark = pytest.mark.long

OTHER = Coefficients(
    llm=ContextCost(attention_s_per_token2=1e-6, linear_s_per_token=1e-5, group_s=1e-3)
)


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    write_cost_file(tmp_path / "cost.yaml", CostFile(cost=OTHER))
    return tmp_path / "cost.yaml"


def test_a_refit_begins_at_its_step_and_outlives_the_service(corpus, tmp_path, cost_file):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        first = Ranks(service.address, 3).start(stop_after=2).join()
        before = explained(service, 0)["cost_version"]
        said = service.cli("job", "recost", "job", str(cost_file)).stdout
        assert OTHER.model.version in said
        begins = int(said.split("from step ")[1].split()[0])
        ranks = Ranks(service.address, 3, pace_s=0.1).start(state=first.state)
        wait_for(lambda: ranks.steps_done >= 4)
        service.kill()
        service.start()
        ranks.join()
        last = max(ranks.digests)
        assert 2 <= begins <= last
        digests = first.digests | ranks.digests
        for step in (0, begins - 1, begins, last):
            step_plan = explained(service, step)
            assert step_plan["plan_digest"] == step_plan["ledger_plan_digest"] == digests[step]
            assert step_plan["cost_version"] == (before if step < begins else OTHER.model.version)
        refused = service.cli(
            "job", "recost", "job", str(cost_file), "--from-step", "1", check=False
        )
        assert refused.returncode == 1
        assert "was planned already" in refused.stderr


def test_explain_sets_the_slowest_rank_s_seconds_against_the_prediction(corpus, tmp_path):
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path)))
        Ranks(service.address, 3, measured_s=0.5).start(stop_after=2).join()
        found = explained(service, 0)
        assert found["measured_s"] == 0.5
        assert found["predicted_s"] > 0
        off = f"{0.5 / found['predicted_s'] - 1:+.0%}"
        shown = service.cli("explain", "job", "--step", "0").stdout
        assert f"measured 0.500 s ({off})" in shown
        time = found["plan"]["time"]
        assert time["total_s"] == found["predicted_s"]
        assert f"of which a rank, on the mean: vision {time['vision_s']:.3f} s" in shown


def test_a_job_s_trainer_is_predicted_by_its_topology(corpus, tmp_path):
    topologies = {"wave": {}, "step": {"replicas_meet": "step"}}
    with serving(tmp_path) as service:
        seconds = {}
        for name, topology in topologies.items():
            file = job_file(corpus, tmp_path, job=name, topology=topology)
            service.cli("job", "submit", str(file))
            Ranks(service.address, 3, job=name).start(stop_after=1).join()
            seconds[name] = explained(service, 0, job=name)["predicted_s"]
    assert seconds["step"] < seconds["wave"]


def test_a_job_that_names_a_cost_file_plans_with_it(corpus, tmp_path, cost_file):
    plan = {"memory_tokens": 2304, "cost": cost_file.name}
    with serving(tmp_path) as service:
        service.cli("job", "submit", str(job_file(corpus, tmp_path, plan=plan)))
        Ranks(service.address, 3).start(stop_after=1).join()
        found = explained(service, 0)
        assert found["cost_version"] == OTHER.model.version
        assert found["measured_s"] is None


def test_a_job_in_bytes_trains_within_them_and_one_without_room_is_told_its_sample(
    corpus, tmp_path
):
    memory = {"budget_bytes": 2364e3, "states_bytes": 60e3, "llm_token_bytes": 1e3}
    of_patch = {"roomy": 200.0, "tight": 3e5}
    with serving(tmp_path) as service:
        for name, each in of_patch.items():
            plan = {"memory": {**memory, "vision_token_bytes": each}}
            service.cli("job", "submit", str(job_file(corpus, tmp_path, job=name, plan=plan)))
        Ranks(service.address, 3, job="roomy").start(stop_after=2).join()
        found = explained(service, 0, job="roomy")
        plan = StepPlan.from_json(json.dumps(found["plan"]))
        model = MemoryModel(**memory, vision_token_bytes=of_patch["roomy"])
        room = EncoderRoom.of(model, ReplicaLayout())
        validate_plan(plan, memory_tokens=2304, sample_count=len(plan.sample_ids), room=room)
        with pytest.raises(ClientError, match="have no room for these"):
            Ranks(service.address, 3, job="tight").start(stop_after=1).join()
