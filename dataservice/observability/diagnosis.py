"""Who waits for whom, and why, in words: a pure function of what can be seen.

A synchronous job has one cause at a time: ranks that wait in a collective wait for the rank
that is behind, and ranks that wait for data wait for the slowest part of what brings it. So
the causes are asked in the order in which one hides the next, and the first that holds is
named, with its number and its remedy:

    no attempt → ranks missing → a rank stopped → workers gone → a client that only reads
               → planning → memory full → decoding → delivery → a rank that the others are ahead of

Where decoding is too slow, the remedy depends on what its seconds go to: CPUs work, and more of
them help; or reading waits for storage; or samples have a slot, and no CPU has time for them.
"""

from collections.abc import Sequence
from math import ceil
from typing import Literal

from dataservice.core.health import (
    OTHERS,
    Finding,
    FleetHealth,
    JobHealth,
    RankHealth,
    SourceHealth,
)
from dataservice.core.team import team_of

# Below this fraction of a step a wait is not reported (the demo's bar is 1 %).
WORTH_SAYING = 0.02
# Ranks report every few seconds, whatever they do; those of very large jobs less often.
QUIET_S = 10.0
# Where supply exceeds demand by less than this factor, unequal samples still leave gaps.
HEADROOM = 1.1
# From this factor over its usual cost on, a source is slower than usual.
SLOWER = 1.5
# And it is to blame if its growth makes up this fraction of the seconds that are missing.
EXPLAINS = 0.5
# If a CPU works for less than this fraction of a sample's seconds, waiting makes it slow.
WORKS = 0.5
# A client that has begun this many steps and committed none is no trainer in its first step; one
# that spends less than these seconds on each step computes nothing.
READS_ONLY_STEPS = 10
READS_ONLY_S = 0.01

CPUS_ARE_SHORT = (
    "the rest it waits for a CPU, or for what its processor calls: look at what else "
    "runs on the workers' hosts, and give them a CPU for each slot"
)

Lack = Literal["", "storage", "cpu"]


def diagnose(job: JobHealth, fleet: FleetHealth) -> list[Finding]:
    """What holds the job up, the cause first; one finding of severity info if nothing does."""
    found = (
        _no_trainers(job)
        or _missing_ranks(job)
        or _stopped_rank(job)
        or _no_workers(job, fleet)
        or _only_reads(job)
        or _storage_away(job)
        or _waiting_for_data(job, fleet)
        or _waiting_for_a_rank(job)
        or _in_health(job)
    )
    return [found, *_budgets(job)]


def waiting(job: JobHealth) -> tuple[RankHealth, ...]:
    """The ranks that wait for data for a noticeable part of a step, worst first."""
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
        last = job.planned_step
        which = f", the last is step {last}" if last >= 0 else ""
        return Finding(severity="info", text=f"all data is given out: {last + 1} steps{which}")
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
    """A rank that has left, or whose process no longer reports: the others wait for it."""
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


def _late_ranks(job: JobHealth) -> list[RankHealth]:
    """The ranks that wait for data, and not for another rank, worst first."""
    return [rank for rank in waiting(job) if not job.waits_for_ranks(rank)]


def _is_late(job: JobHealth) -> bool:
    """Whether data is waited for. A rank's wait for its first step is not counted as one, so
    before that it is not known which ranks wait."""
    return bool(_late_ranks(job)) or (job.steps == 0 and job.decoded_steps == 0)


def _no_workers(job: JobHealth, fleet: FleetHealth) -> Finding | None:
    if fleet.workers > 0 or not _is_late(job):
        return None
    return Finding(
        severity="stalled",
        text=f"{_who(_late_ranks(job))}: no worker of {fleet.wanted_workers} is alive; "
        + (fleet.shortfall or "see the workers' logs"),
    )


def _only_reads(job: JobHealth) -> Finding | None:
    """Where nothing is trained there is no pace that data could be too slow for."""
    live = [rank for rank in job.ranks if rank.live]
    if live and job.steps >= READS_ONLY_STEPS and job.step_s < READS_ONLY_S:
        does = "each step is asked for as soon as the one before is there"
        return _readers(live, does, "computes between steps")
    untrained = [rank for rank in live if rank.untrained_steps >= READS_ONLY_STEPS]
    if untrained:
        begun = max(rank.untrained_steps for rank in untrained)
        does = f"{begun} steps begun, none committed"
        return _readers(untrained, does, "commits each step that it has trained")
    return None


def _readers(ranks: Sequence[RankHealth], does: str, a_trainer: str) -> Finding:
    wait_s = max(rank.wait_s for rank in ranks)
    waits = f", and waited {wait_s:.2g} s a step for data" if wait_s > 0 else ""
    return Finding(
        severity="info",
        text=f"{_ranks([rank.rank for rank in ranks])} only read{'s' * (len(ranks) == 1)}: "
        f"{does}{waits}; a trainer {a_trainer}",
    )


def _storage_away(job: JobHealth) -> Finding | None:
    """Samples of a source wait for its storage. The job trains on what is decoded already."""
    if not job.outages:
        return None
    worst = max(job.outages, key=lambda outage: outage.away_s)
    return Finding(
        severity="stalled" if job.decoded_steps == 0 else "slow",
        text=f"the storage of source `{worst.source}` has not answered for {worst.away_s:.0f} s; "
        f"its samples wait, and none is masked for it: {worst.reason}",
    )


def _waiting_for_data(job: JobHealth, fleet: FleetHealth) -> Finding | None:
    if not _is_late(job):
        return None
    begin = _who(_late_ranks(job))
    if job.ready_steps == 0 and job.plan_s > job.step_s:
        return Finding(
            severity="slow",
            text=f"{begin}: planning takes {job.plan_s:.2g} s a step, training {job.step_s:.2g} s; "
            "give the coordinator a faster core, or choose cheaper stages",
        )
    short = job.demand_slots * HEADROOM > job.share_slots
    if not short and job.decoded_steps <= 1 and (full := _memory_full(job)):
        return Finding(severity="slow", text=f"{begin}: {full}")
    # While decoding is short, a step is decoded now and then for a moment before it is fetched.
    if job.decoded_steps == 0 or (short and job.decoded_steps < job.ready_steps):
        return _decoding(job, fleet, begin) if short else _bursts(job, begin)
    return Finding(
        severity="slow",
        text=f"{begin} though {job.decoded_steps} steps are decoded: look at the network from "
        "the workers, or raise prefetch_steps",
    )


def _memory_full(job: JobHealth) -> str:
    """What keeps steps from being decoded ahead though slots are free; empty where nothing does."""
    if job.bytes_full:
        return (
            "its team holds all the decoded bytes that it may, so that steps are decoded only when "
            "they are asked for; raise the team's max_ready_bytes"
        )
    if job.steps > 0 and job.room_s > WORTH_SAYING * job.step_s:
        return (
            f"the workers' memory is full, and a pack waits {job.room_s:.2g} s for room before it "
            "is decoded; raise held_bytes_per_worker, or add workers"
        )
    return ""


def _waiting_for_a_rank(job: JobHealth) -> Finding | None:
    """Some ranks have received every planned step, and wait for the slowest, which has not."""
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
    """Decoding does not keep up: which source, by how much, what its seconds go to, and what
    would help."""
    worst, has_grown = _culprit(job)
    lacks = _lacks(worst)
    text = f"{begin}: source `{worst.source}` {'is read' if _is_read(worst) else 'decodes'} at "
    text += f"{min(1.0, job.share_slots / job.demand_slots):.2g} of need, "
    text += _seconds(worst, on_cpu=bool(lacks), usual=has_grown)
    remedy = _for_grown(worst, lacks) if has_grown else _for_short(job, fleet, lacks)
    return Finding(severity="slow", text=f"{text}; {remedy}")


def _seconds(source: SourceHealth, *, on_cpu: bool, usual: bool) -> str:
    """`2.1 s a sample, 0.3 s of it on a CPU, where 0.4 s is usual`."""
    samples = max(source.samples, 1e-9)
    told = [f"{(source.read_s + source.decode_s) / samples:.2g} s a sample"]
    if on_cpu:
        cpu_s = (source.read_cpu_s + source.decode_cpu_s) / samples
        told.append(f"{cpu_s:.2g} s of it on a CPU")
    where = f"{',' if on_cpu else ''} where {source.usual_s:.2g} s is usual" if usual else ""
    return ", ".join(told) + where


def _for_grown(source: SourceHealth, lacks: Lack) -> str:
    """What helps a source that has become slower than it was."""
    if _is_read(source) or lacks == "storage":
        return "look at its storage"
    if lacks == "cpu":
        return CPUS_ARE_SHORT
    return "look at its files, or at what else uses the workers' CPUs"


def _for_short(job: JobHealth, fleet: FleetHealth, lacks: Lack) -> str:
    """What helps where decoding is as fast as ever, and there is too little of it."""
    supply, demand = job.share_slots, job.demand_slots
    lost = fleet.wanted_workers - fleet.workers
    if lost > 0:
        down = f"{lost} of {fleet.wanted_workers} workers are down, see their logs"
        return fleet.shortfall or down
    if demand <= fleet.slots and (others := _borrowers(job, fleet)):
        return f"{others} use the rest: raise the team's weight, or add workers"
    if lacks == "storage":
        times = demand * HEADROOM / max(supply, 1e-9)
        return (
            "the rest it waits for its storage: look there, or raise reads_per_worker "
            f"{times:.2g} times, for a read that waits takes neither a slot nor a CPU"
        )
    if lacks == "cpu":
        return CPUS_ARE_SHORT
    more = max(1, ceil((demand * HEADROOM - supply) / fleet.slots_per_worker))
    return f"add {more} worker{'s' if more > 1 else ''}"


def _is_read(source: SourceHealth) -> bool:
    """Whether reading its samples takes longer than decoding them."""
    return source.read_s > source.decode_s


def _lacks(source: SourceHealth) -> Lack:
    """What its samples wait for; empty where they mostly work, or workers do not tell."""
    cpu_s = source.read_cpu_s + source.decode_cpu_s
    if cpu_s <= 0 or cpu_s >= WORKS * (source.read_s + source.decode_s):
        return ""
    reading_waits_s = source.read_s - source.read_cpu_s
    return "storage" if reading_waits_s > source.decode_s - source.decode_cpu_s else "cpu"


def _bursts(job: JobHealth, begin: str) -> Finding:
    """Decoding keeps up on average, but its slowest samples come too late."""
    if job.demand_slots <= 0:
        return Finding(severity="slow", text=f"{begin}: its first steps are being decoded")
    return Finding(
        severity="slow",
        text=f"{begin}: decoding keeps up in the mean, at {job.share_slots / job.demand_slots:.2g} "
        f"times the need, but not with its slowest samples; raise ready_steps, now "
        f"{job.window_steps}",
    )


def _culprit(job: JobHealth) -> tuple[SourceHealth, bool]:
    """The source that grew most over its usual cost, and True, if that growth explains the seconds
    that are missing; else the most expensive source, and False."""

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
    """The other teams that wait for slots too, for a sentence."""
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
