"""The steps of the ledger that one sample was in.

A step's samples are drawn again from its cursor; nothing is planned. A request goes a bounded way
along the ledger and says where the next one is to go on, so that a long ledger takes many short
turns at the planners, not one long one.
"""

import numpy as np

from dataservice.core.cursor import Cursor
from dataservice.core.job_setup import JobSetup
from dataservice.core.state_store import StateStore
from dataservice.engine.api import FoundSample, SampleStep
from dataservice.engine.planner import draw_step
from dataservice.engine.versions import SetupOf

MOST_STEPS = 2_000
MOST_DRAWN = 1_000_000
"""Steps that one request looks at, and samples that it draws: about a second's work."""


def find_sample(
    store: StateStore, setups: SetupOf, newest: JobSetup, sample_id: int, from_step: int
) -> FoundSample:
    """The sample's place, and the steps from `from_step` on that it was in, as far as one request
    goes. Raises NotFoundError where there is no such sample."""
    job = newest.record.name
    ((ref, _),) = newest.catalog.details(np.array([sample_id]))
    last, drawn, steps = store.last_planned_step(job), 0, []
    step = first = max(0, from_step)
    while step <= last and step - first < MOST_STEPS and drawn < MOST_DRAWN:
        same: dict[tuple[str, int], bool] = {}  # attempts mostly draw alike
        for entry in store.ledger_of_step(job, step):
            setup = setups(entry.attempt)
            drawing = (entry.cursor, setup.record.spec_version)
            if drawing not in same:
                found = draw_step(setup, Cursor.from_json(entry.cursor))
                assert found is not None, "a step of the ledger is never past the end"
                ids = found[0].sample_ids
                same[drawing] = bool((ids == sample_id).any())
                drawn += len(ids) * setup.options.window_steps
            if same[drawing]:
                committed = entry.committed_unix_s is not None
                steps.append(
                    SampleStep(
                        step=step,
                        attempt=entry.attempt,
                        fate="committed" if committed else "planned",
                        masked=_masked(store, job, entry.attempt, step, sample_id),
                    )
                )
        step += 1
    return FoundSample(ref=ref, steps=tuple(steps), next_step=step if step <= last else None)


def _masked(store: StateStore, job: str, attempt: int, step: int, sample_id: int) -> str:
    entries = store.quarantine_of_step(job, attempt, step)
    return next((each.reason for each in entries if each.sample_id == sample_id), "")
