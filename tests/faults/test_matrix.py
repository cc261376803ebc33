"""Fault × phase on real processes: every case ends with the per-sample audit.

`make test` runs a choice with each kind of fault, `make faults` all.
"""

import contextlib

import pytest

from tests.faults.faults import FAULTS
from tests.faults.phases import PHASES
from tests.faults.stage import JOIN_LIMIT_S

CHOICE = {
    "worker-killed": ["streaming"],
    "decoder-killed": ["decoding"],
    "nursery-killed": ["streaming"],
    "coordinator-killed": ["commit"],
    "coordinator-stopped": ["commit"],
    "node-killed": ["streaming"],
    "rank-killed": ["planning"],
    "rank-stopped": ["streaming"],
    "all-ranks-killed": ["streaming"],
    "coordinator-cut-off": ["commit"],
    "coordinator-silent": ["planning"],
    "workers-cut-off": ["streaming"],
    "worker-silent": ["streaming"],
    "disk-full": ["commit"],
}


def case(fault, phase):
    marks = [] if phase in CHOICE.get(fault, []) else [pytest.mark.full]
    return pytest.param(fault, phase, id=f"{fault}-{phase}", marks=marks)


@pytest.mark.parametrize(
    ("fault", "phase"), [case(fault, phase) for fault in FAULTS for phase in PHASES]
)
def test_every_sample_is_trained_once_whatever_fails(stage, fault, phase):
    fault = FAULTS[fault]
    with stage.training(most_unasked=fault.unasked) as training, contextlib.ExitStack() as lasts:
        with PHASES[phase](stage, training):
            lasts.enter_context(fault.strike(stage, training))
        if not fault.outlasted:
            lasts.close()
        training.join(JOIN_LIMIT_S)
        assert stage.findings(training) == []
        assert all(fault.told in words for words in training.unasked)
