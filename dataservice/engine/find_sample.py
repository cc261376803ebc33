"""The steps of the ledger that one sample was in.

A step's samples are drawn again from its cursor; nothing is planned. A request goes a bounded way
along the ledger and says where the next one is to go on, so that a long ledger takes many short
turns at the planners, not one long one.
"""

from dataservice.core.cursor import Cursor
from dataservice.core.sample import SampleRef
from dataservice.core.state_store import StateStore
from dataservice.engine.api import FoundSample, SampleStep
from dataservice.engine.planner import step_ids
from dataservice.engine.versions import SetupOf

MOST_STEPS = 2_000
MOST_DRAWN = 1_000_000
"""Steps that one request looks at, and samples that it draws: about a second's work."""


def find_sample(
    store: StateStore, setups: SetupOf, job: str, ref: SampleRef, from_step: int
) -> FoundSample:
    """The sample's place, which is `ref`, and the steps from `from_step` on that it was in, as far
    as one request goes. Of an index its lengths alone are read."""
    last, drawn, steps = store.last_planned_step(job), 0, []
    step = first = max(0, from_step)
    while step <= last and step - first < MOST_STEPS and drawn < MOST_DRAWN:
        same: dict[tuple[str, int], bool] = {}  # attempts mostly draw alike
        for entry in store.ledger_of_step(job, step):
            setup = setups(entry.attempt)
            drawing = (entry.cursor, setup.record.spec_version)
            if drawing not in same:
                ids = step_ids(setup, Cursor.from_json(entry.cursor))
                same[drawing] = bool((ids == ref.sample_id).any())
                drawn += len(ids) * setup.options.window_steps
            if same[drawing]:
                committed = entry.committed_unix_s is not None
                steps.append(
                    SampleStep(
                        step=step,
                        attempt=entry.attempt,
                        fate="committed" if committed else "planned",
                        masked=_masked(store, job, entry.attempt, step, ref.sample_id),
                    )
                )
        step += 1
    return FoundSample(ref=ref, steps=tuple(steps), next_step=step if step <= last else None)


def _masked(store: StateStore, job: str, attempt: int, step: int, sample_id: int) -> str:
    entries = store.quarantine_of_step(job, attempt, step)
    return next((each.reason for each in entries if each.sample_id == sample_id), "")
