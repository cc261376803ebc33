"""A cluster of several kinds of nodes: each kind is searched by itself, and the fastest is named.

A replica over unlike GPUs, or unlike replicas in one job, is not laid out: every rank of a job is
planned as equally fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.search import Layout, LayoutTask, search_layout

GroupProgress = Callable[[int, int, int, float], None]
"""Called with (number of the group, candidates done, candidates in all, best seconds so far)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLayout:
    """What one kind of nodes was asked, and its layout; or why none fits on it."""

    task: LayoutTask
    layout: Layout | None
    refused: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite where no layout fits."""
        return float("inf") if self.layout is None else self.layout.best.step_s


def search_groups(
    task: LayoutTask, groups: Sequence[NodeGroup], *, progress: GroupProgress | None = None
) -> tuple[GroupLayout, ...]:
    """The task on each of `groups` alone, the shortest step first. Raises PlanningError where the
    model fits on none of them."""
    found = []
    for number, group in enumerate(groups):
        asked = replace(task, group=group)
        try:
            layout = search_layout(asked, progress=_told(progress, number))
            found.append(GroupLayout(task=asked, layout=layout))
        except PlanningError as error:
            if len(groups) == 1:
                raise
            found.append(GroupLayout(task=asked, layout=None, refused=str(error)))
    ranked = sorted(found, key=lambda each: each.step_s)
    if ranked[0].layout is None:
        reasons = "\n".join(f"{each.task.group.words}: {each.refused}" for each in found)
        raise PlanningError(f"{task.model.name} fits on no kind of nodes by itself.\n{reasons}")
    return tuple(ranked)


def _told(progress: GroupProgress | None, number: int) -> Callable[[int, int, float], None] | None:
    if progress is None:
        return None
    return lambda done, total, best_s: progress(number, done, total, best_s)
