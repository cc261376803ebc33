"""Fault × phase on real processes: every case ends with the per-sample audit.

`make test` runs a choice, `make faults` all.
"""

import contextlib

import pytest

from tests.faults.faults import FAULTS
from tests.faults.phases import PHASES
from tests.faults.stage import JOIN_LIMIT_S

# Where a fault plays, if not at workers of a Ray of the service's own.
STAGES = {
    "coordinator-killed": "local_stage",
    "coordinator-stopped": "local_stage",
    "disk-full": "disk_stage",
    "node-killed": "node_stage",
    "node-stopped": "node_stage",
}
CHOICE = {
    "worker-killed": PHASES,
    "decoder-killed": ["decoding"],
    "nursery-killed": ["streaming"],
    "coordinator-killed": PHASES,
    "coordinator-stopped": ["commit"],
    "rank-killed": ["planning", "commit"],
    "all-ranks-killed": ["streaming"],
    "coordinator-cut-off": ["commit"],
    "coordinator-silent": ["planning"],
    "workers-cut-off": ["streaming"],
    "worker-silent": ["streaming"],
    "disk-full": ["commit"],
    "node-killed": ["streaming"],
}


def case(fault, phase):
    chosen = phase in CHOICE.get(fault, [])
    stage = STAGES.get(fault, "ray_stage")
    return pytest.param(
        stage, fault, phase, id=f"{fault}-{phase}", marks=[] if chosen else [pytest.mark.full]
    )


@pytest.mark.parametrize(
    ("stage", "fault", "phase"), [case(fault, phase) for fault in FAULTS for phase in PHASES]
)
def test_every_sample_is_trained_once_whatever_fails(request, stage, fault, phase):
    stage, fault = request.getfixturevalue(stage), FAULTS[fault]
    with stage.training(most_unasked=fault.unasked) as training, contextlib.ExitStack() as lasts:
        with PHASES[phase](stage, training):
            lasts.enter_context(fault.strike(stage, training))
        if not fault.outlasted:
            lasts.close()
        training.join(JOIN_LIMIT_S)
        assert stage.findings(training) == []
        assert all(fault.told in words for words in training.unasked)
