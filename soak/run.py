"""The soak: two teams train job after job while processes are killed at random.

    act 1   every kind of fault, the coordinator among them
    act 2   the coordinator is spared, and its resources are watched for growth
    end     the jobs that run come to their end; all are audited; the service is stopped and
            nothing of it may be left

The next fault follows when each team has committed a few steps again; some follow at once, to hit a
system that is still recovering. All faults are drawn from the printed seed, but the timing of
processes differs from run to run.
"""

import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soak.chaos import KINDS, Target, draw
from soak.cluster import Cluster, cluster
from soak.config import write_config
from soak.corpus import JobShape, make_data
from soak.gate import Gate
from soak.recovery import POLL_S, Commits, Recovery
from soak.service import ServiceProcess
from soak.team import JobResult, Team, TeamPlan
from soak.watch import Sample, Watch, grown, growth, left_behind

TEAMS = (
    TeamPlan(
        name="vision",
        shape=JobShape(memory_tokens=2304, weights=(("text", 0.5), ("clips", 1.5))),
        world_sizes=(3, 4),
        steps_per_checkpoint=3,
    ),
    TeamPlan(
        name="speech",
        shape=JobShape(memory_tokens=4608, batch_samples=10, window_steps=2),
        world_sizes=(2, 3),
        steps_per_checkpoint=4,
    ),
)
ACT_ONE = 0.6  # share of the faults
IMPATIENCE = 0.25  # share of the faults that do not wait for recovery from the one before
RECOVERY_LIMIT_S = 90.0
LONGEST_CALM_S = 1.0
LAST_JOB_LIMIT_S = 180.0
LAST_WORDS = 1500  # characters of a log's end that are shown

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakOptions:
    """The options of a soak. It ends after `kills` kills, and fails if that takes longer than
    `limit_s`."""

    kills: int = 200
    limit_s: float = 900.0
    seed: int = 0
    pace_s: float = 0.05
    epochs: int = 16  # of each job; even, and large enough that jobs need several launches
    nodes: int = 2  # of a Ray cluster, one worker on each; 0: two workers in the service's own Ray
    least_watched: int = 40  # least number of samples of the coordinator for judging growth


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, and the recovery of each team that it hit, unless the next fault came first."""

    number: int
    kind: str
    at_s: float
    recovery: dict[str, Recovery]


@dataclass
class SoakResult:
    """The result. `broken` is empty when every promise held."""

    options: SoakOptions
    seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    jobs: list[JobResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """The least number of processes that were killed."""
        return sum(KINDS[fault.kind].kills for fault in self.faults)

    @property
    def judges_growth(self) -> bool:
        """Whether the coordinator was watched for long enough."""
        return len(self.samples) >= self.options.least_watched

    @property
    def growth(self) -> dict[str, tuple[float, float]]:
        """Medians of act 2's first and last quarter."""
        return growth(self.samples) if self.samples else {}


def soak(home: Path, options: SoakOptions, say: Say = print) -> SoakResult:
    """Run a soak in `home`, which must not exist."""
    home.mkdir(parents=True)
    result = SoakResult(options=options)
    began_s = time.monotonic()
    make_data(home / "data")
    tokens = write_config(home / "service.yaml", teams=[plan.name for plan in TEAMS])
    service = ServiceProcess(home=home, pool="ray", flags=("--config", str(home / "service.yaml")))
    watch = Watch(service=service)
    with contextlib.ExitStack() as stack:
        stack.callback(service.end)
        stack.callback(watch.stop)
        joined = _joined(service, options, stack)
        with Gate() as gate:
            service.start()
            teams = [
                Team(
                    plan=plan,
                    data=home / "data",
                    home=home,
                    address=service.address,
                    gate=gate.control,
                    token=tokens[plan.name],
                    pace_s=options.pace_s,
                    epochs=options.epochs,
                )
                for plan in TEAMS
            ]
            say(f"seed {options.seed}; the service is at {service.address}, its files in {home}")
            Play(options, service, gate, joined, teams, watch, result, say).run()
            watch.stop()
            result.broken += _stopped(service)
        if joined is not None:
            joined.stop()
        result.broken += left_behind(service)
    result.samples = watch.samples
    result.broken += judged(result)
    result.seconds = time.monotonic() - began_s
    return result


def _joined(
    service: ServiceProcess, options: SoakOptions, stack: contextlib.ExitStack
) -> Cluster | None:
    """The Ray cluster that the service joins, if any."""
    if not options.nodes:
        return None
    joined = stack.enter_context(cluster(service.home, [1] * options.nodes, {}))
    service.environment = joined.environment
    service.flags += ("--ray-address", joined.address, "--workers", str(options.nodes))
    return joined


def _stopped(service: ServiceProcess) -> list[str]:
    """Stop the service by SIGTERM; returns what was wrong with its end."""
    try:
        service.stop()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return [f"the service did not stop cleanly: {str(error)[-LAST_WORDS:]}"]
    return []


def judged(result: SoakResult) -> list[str]:
    """The promises that were broken, of jobs and of growth."""
    broken = []
    for job in result.jobs:
        broken += [f"{job.job}: {finding}" for finding in job.findings]
        broken += [f"{job.job}: a rank ended unasked: {why}" for why in job.unasked]
    if result.judges_growth:
        broken += grown(result.samples)
    if result.kills < result.options.kills:
        broken.append(f"{result.kills} kills in {result.options.limit_s:.0f} s")
    return broken


@dataclass
class Play:
    """The faults of a soak, one after another."""

    options: SoakOptions
    service: ServiceProcess
    gate: Gate
    cluster: Cluster | None
    teams: Sequence[Team]
    watch: Watch
    result: SoakResult
    say: Say

    def __post_init__(self) -> None:
        self._commits = {team.plan.name: Commits(team=team) for team in self.teams}

    def run(self) -> None:
        """Start the teams, strike, and let them finish."""
        rng = random.Random(self.options.seed)
        began_s = time.monotonic()
        for team in self.teams:
            team.start()
            self._commits[team.plan.name].start()
        try:
            self._recovered(began_s)
            while (
                self.result.kills < self.options.kills
                and time.monotonic() - began_s < self.options.limit_s
                and not self._failures
            ):
                self._strike(rng, began_s)
            for team in self.teams:
                team.finish()
        finally:
            for commits in self._commits.values():
                commits.stop()
            for team in self.teams:
                team.join(0.0 if self._failures else LAST_JOB_LIMIT_S)
                self.result.jobs += team.results
            self.result.broken += self._failures

    @property
    def _failures(self) -> list[str]:
        return [team.failure for team in self.teams if team.failure is not None]

    def _strike(self, rng: random.Random, began_s: float) -> None:
        second_act = self.result.kills >= ACT_ONE * self.options.kills
        if second_act and not self.watch.running:
            self.watch.start()
        kind = draw(rng, spare_coordinator=second_act)
        impatient = rng.random() < IMPATIENCE
        calm_s = rng.uniform(0.0, LONGEST_CALM_S)
        target = Target(
            service=self.service,
            gate=self.gate,
            cluster=self.cluster,
            trainings=[team.current for team in self.teams if team.current is not None],
            rng=rng,
        )
        for commits in self._commits.values():
            commits.look()
        at_s = time.monotonic()
        if not KINDS[kind].strike(target):
            return
        recovery = {} if impatient else self._recovered(at_s)
        hit = {job.rpartition("-")[0] for job in target.hit} or recovery.keys()
        number = len(self.result.faults) + 1
        fault = Fault(
            number=number,
            kind=kind,
            at_s=at_s - began_s,
            recovery={team: recovery[team] for team in recovery if team in hit},
        )
        self.result.faults.append(fault)
        self.say(line_of(fault))
        time.sleep(calm_s)

    def _recovered(self, since_s: float) -> dict[str, Recovery]:
        """Wait until every team has committed steps again; recovery by team."""
        while not self._failures:
            found = {name: each.recovery(since_s) for name, each in self._commits.items()}
            done = {name: recovery for name, recovery in found.items() if recovery is not None}
            if len(done) == len(found):
                return done
            if time.monotonic() - since_s > RECOVERY_LIMIT_S:
                self._give_up(done)
            time.sleep(POLL_S)
        return {}

    def _give_up(self, done: Collection[str]) -> None:
        for team in self.teams:
            if team.plan.name not in done and team.failure is None:
                said = team.current.describe() if team.current else "no job"
                team.failure = f"{team.plan.name} stood still for {RECOVERY_LIMIT_S:.0f} s: {said}"


def line_of(fault: Fault) -> str:
    """One fault in words."""
    said = ", ".join(
        f"{name} {each.first_s:.1f} s (stood still {each.stall_s:.1f} s)"
        for name, each in fault.recovery.items()
    )
    return f"{fault.at_s:6.1f} s  {fault.number:3d}  {fault.kind:<20} {said or 'not awaited'}"
