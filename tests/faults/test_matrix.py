"""Fault × phase on real processes: every case ends with the per-sample audit.

`make test` runs one of each kind of victim, `make test-long` one of every fault, `make faults` all.
"""

import contextlib

import pytest

from tests.faults.faults import FAULTS
from tests.faults.phases import PHASES
from tests.faults.stage import JOIN_LIMIT_S

ALWAYS = {
    "worker-killed": "streaming",
    "decoder-killed": "decoding",
    "coordinator-killed": "commit",
    "node-killed": "streaming",
    "rank-stopped": "streaming",
    "all-ranks-killed": "streaming",
    "workers-cut-off": "streaming",
    "disk-full": "commit",
}
LONG = {
    "nursery-killed": "streaming",
    "coordinator-stopped": "commit",
    "rank-killed": "planning",
    "coordinator-cut-off": "commit",
    "coordinator-silent": "planning",
    "worker-silent": "streaming",
}


def case(fault, phase):
    if ALWAYS.get(fault) == phase:
        marks = []
    else:
        marks = [pytest.mark.long if LONG.get(fault) == phase else pytest.mark.full]
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
