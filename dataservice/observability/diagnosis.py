"""Who waits for whom, and why, in words: a pure function of what can be seen.

A synchronous job has one cause at a time: ranks that wait in a collective wait for the rank
that is behind, and ranks that wait for data wait for the slowest part of what brings it. So
the causes are asked in the order in which one hides the next, and the first that holds is
named, with its number and its remedy:

    no attempt → ranks missing → a rank stopped → planning → workers gone → decoding → delivery
               → a rank that the others are ahead of
"""

from collections.abc import Sequence
from math import ceil

from dataservice.core.health import (
    OTHERS,
    Finding,
    FleetHealth,
    JobHealth,
    RankHealth,
    SourceHealth,
)
from dataservice.core.team import team_of

# Below this fraction of a step, waiting is not worth a word (the demo's bar is 1 %).
WORTH_SAYING = 0.02
# Ranks speak every few seconds, whatever they do; those of very large jobs less often.
QUIET_S = 10.0
# Supply within this factor of demand still leaves gaps where samples are unlike.
HEADROOM = 1.1
# A source is slower than usual, not merely unlike the others, from this factor on.
SLOWER = 1.5
# And it is to blame when its growth makes up this part of the seconds that are missing.
EXPLAINS = 0.5


def diagnose(job: JobHealth, fleet: FleetHealth) -> list[Finding]:
    """What holds the job up, first the cause; one finding of severity info when nothing does."""
    found = (
        _no_trainers(job)
        or _missing_ranks(job)
        or _stopped_rank(job)
        or _waiting_for_data(job, fleet)
        or _waiting_for_a_rank(job)
        or _in_health(job)
    )
    return [found, *_budgets(job)]


def waiting(job: JobHealth) -> tuple[RankHealth, ...]:
    """The ranks whose loop stands without data for a noticeable part of a step, worst first."""
    noticeable_s = WORTH_SAYING * max(job.step_s, 1e-9)
    late = [rank for rank in job.ranks if rank.live and rank.wait_s > noticeable_s]
    return tuple(sorted(late, key=lambda rank: -rank.wait_s))


def _who(late: Sequence[RankHealth]) -> str:
    """`ranks 0-3 wait 0.6 s a step`; all ranks when it is not known which."""
    if not late:
        return "all ranks wait"
    verb = "waits" if len(late) == 1 else "wait"
    return f"{_ranks([rank.rank for rank in late])} {verb} {late[0].wait_s:.2g} s a step"


def _no_trainers(job: JobHealth) -> Finding | None:
    if job.failure:
        return Finding(severity="stalled", text=f"attempt {job.attempt} ended: {job.failure}")
    if job.ended:
        return Finding(severity="info", text=f"all data is given out: {job.planned_step + 1} steps")
    if job.missing_ranks or any(rank.live for rank in job.ranks):
        return None
    after = f" since step {job.committed_step}" if job.committed_step >= 0 else ""
    drained = "; it is draining, and takes no new attempt" if job.draining else ""
    return Finding(severity="info", text=f"no trainer is connected{after}{drained}")


def _missing_ranks(job: JobHealth) -> Finding | None:
    if not job.missing_ranks:
        return None
    here = job.world_size - len(job.missing_ranks)
    if job.forming_s < QUIET_S:
        return Finding(severity="info", text=f"{here} of {job.world_size} ranks have come so far")
    return Finding(
        severity="stalled",
        text=f"{here} of {job.world_size} ranks have waited {job.forming_s:.0f} s for "
        f"{_ranks(job.missing_ranks)} to open; start them, or look at why they do not",
    )


def _stopped_rank(job: JobHealth) -> Finding | None:
    """A rank that left, or whose process says nothing any more: the others wait for it."""
    quiet_s = max(QUIET_S, 3 * job.report_every_s)
    for rank in sorted(job.ranks, key=lambda rank: (rank.live, -rank.quiet_s)):
        if rank.live and rank.quiet_s <= quiet_s:
            break
        others = [each.rank for each in job.ranks if each.live and each.quiet_s <= quiet_s]
        begin = (
            f"{_ranks(others)} wait{'s' if len(others) == 1 else ''}" if others else "all stands"
        )
        if not rank.live and rank.quiet_s <= 2 * job.report_every_s:
            what = "has left: unless it comes back, restart the trainers from their checkpoint"
        else:
            what = f"{'has said' if rank.live else 'is cut off, and had said'} nothing for "
            what += f"{rank.quiet_s:.0f} s: see whether its process is stopped, or its host "
            what += "unreachable"
        return Finding(
            severity="stalled",
            text=f"{begin}: rank {rank.rank} ({rank.client}), at step {rank.committed_step + 1}, "
            f"{what}",
        )
    return None


def _waiting_for_data(job: JobHealth, fleet: FleetHealth) -> Finding | None:
    late = [rank for rank in waiting(job) if not job.waits_for_ranks(rank)]
    # A rank's wait for its first step is not counted as one.
    if not late and (job.steps > 0 or job.decoded_steps > 0):
        return None
    begin = _who(late)
    if fleet.workers == 0:
        return Finding(
            severity="stalled",
            text=f"{begin}: no worker of {fleet.wanted_workers} is alive; see the workers' logs",
        )
    if job.ready_steps == 0 and job.plan_s > job.step_s:
        return Finding(
            severity="slow",
            text=f"{begin}: planning takes {job.plan_s:.2g} s a step, training {job.step_s:.2g} s; "
            "give the coordinator a faster core, or choose cheaper stages",
        )
    short = job.demand_slots * HEADROOM > job.share_slots
    # While decoding is short, a step is decoded now and then for a moment before it is fetched.
    if job.decoded_steps == 0 or (short and job.decoded_steps < job.ready_steps):
        return _decoding(job, fleet, begin) if short else _bursts(job, begin)
    return Finding(
        severity="slow",
        text=f"{begin} though {job.decoded_steps} steps are decoded: look at the network from "
        "the workers, or raise prefetch_steps",
    )


def _waiting_for_a_rank(job: JobHealth) -> Finding | None:
    """Ranks that no collective holds back have used up the window; the slowest has not."""
    late = [rank for rank in waiting(job) if job.waits_for_ranks(rank)]
    behind = min((r for r in job.ranks if r.live), key=lambda r: r.received_step, default=None)
    if not late or behind is None or behind.received_step >= job.planned_step:
        return None
    steps = late[0].received_step - behind.received_step
    return Finding(
        severity="slow",
        text=f"{_who(late)}: rank {behind.rank} ({behind.client}) is {steps} steps behind, and no "
        f"more than {job.window_steps} are planned ahead of it; look at what slows it",
    )


def _decoding(job: JobHealth, fleet: FleetHealth, begin: str) -> Finding:
    """Decoding does not keep up: which source, by how much, and whether it is reading."""
    worst, has_grown = _culprit(job)
    supply, demand = job.share_slots, job.demand_slots
    of_need = min(1.0, supply / demand)
    lost = fleet.wanted_workers - fleet.workers
    reads = worst.read_s > worst.decode_s
    seconds = (worst.read_s + worst.decode_s) / max(worst.samples, 1e-9)
    text = f"{begin}: source `{worst.source}` {'is read' if reads else 'decodes'} at "
    text += f"{of_need:.2g} of need, {seconds:.2g} s a sample"
    if has_grown:
        text += f" where {worst.usual_s:.2g} s is usual; look at its "
        text += "storage" if reads else "files, or at what else uses the workers' CPUs"
    elif lost > 0:
        text += f"; {lost} of {fleet.wanted_workers} workers are down, see their logs"
    elif (others := _borrowers(job, fleet)) and demand <= fleet.slots:
        text += f"; {others} use the rest: raise the team's weight, or add workers"
    else:
        more = max(1, ceil((demand * HEADROOM - supply) / fleet.slots_per_worker))
        text += f"; add {more} worker{'s' if more > 1 else ''}"
    return Finding(severity="slow", text=text)


def _bursts(job: JobHealth, begin: str) -> Finding:
    """Decoding keeps up in the mean, and its slowest samples come too late all the same."""
    if job.demand_slots <= 0:
        return Finding(severity="slow", text=f"{begin}: its first steps are being decoded")
    return Finding(
        severity="slow",
        text=f"{begin}: decoding keeps up in the mean, at {job.share_slots / job.demand_slots:.2g} "
        f"times the need, but not with its slowest samples; raise ready_steps, now "
        f"{job.window_steps}",
    )


def _culprit(job: JobHealth) -> tuple[SourceHealth, bool]:
    """The source that grew most over its usual cost, and True, if that explains what is missing;
    else the dearest, and False."""

    def seconds(source: SourceHealth) -> float:
        return source.read_s + source.decode_s

    def excess_s(source: SourceHealth) -> float:
        return seconds(source) - source.usual_s * source.samples

    missing_s = (job.demand_slots - job.share_slots) * job.step_s
    grown = [
        source
        for source in job.sources
        if 0 < SLOWER * source.usual_s * source.samples < seconds(source)
        and excess_s(source) > EXPLAINS * missing_s
    ]
    if grown:
        return max(grown, key=excess_s), True
    return max(job.sources, key=seconds), False


def _borrowers(job: JobHealth, fleet: FleetHealth) -> str:
    """The other teams that wait for slots too."""
    mine = team_of(job.job)
    others = [team for team in fleet.waiting_teams if team not in ("", mine)]
    return ", ".join("other teams" if team == OTHERS else f"team {team}" for team in others)


def _in_health(job: JobHealth) -> Finding:
    return Finding(
        severity="info",
        text=f"nobody waits for data: {job.decoded_steps} of {job.window_steps} steps are decoded "
        "ahead of the last rank",
    )


def _budgets(job: JobHealth) -> list[Finding]:
    """Sources that are on their way to stopping the job."""
    return [
        Finding(
            severity="slow",
            text=f"source `{source.source}` has used {source.budget_used:.0%} of its error budget: "
            f"{source.quarantined} samples masked; see `dataservice job quarantine`",
        )
        for source in job.sources
        if source.budget_used > 0.5
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2 and 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(names) > 8:
        names = [*names[:8], f"{len(names) - 8} more"]
    listed = ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
