"""A campaign: so many damaged copies of some seeds, tried in the lab, failures kept.

What is shown: no crash, no hang, no hoard of memory, and no wrong sample that is not masked. A
sample is wrong when a trainer would get, unmasked,
- other bytes than those that were indexed, where the damage came after indexing: each sample is
  then quarantined, or byte for byte what it was before;
- other arrays than its bytes stand for, where the damage came before. Nobody can know what such
  a file once held, so it is refused by name, or every decode of it gives the same bytes, in the
  shape that was measured and planned.

FUZZ_FACTOR multiplies the numbers of cases, 13,000 at 1; `make test` runs an eighth of them.
FUZZ_SEED chooses other damage than the usual. A failure names the seed, and the file that holds
its input, in FUZZ_FOLDER.
"""

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataservice.core.limits import DecodeLimits
from tests.fuzz.lab import MIB, Outcome, run_cases
from tests.fuzz.mutate import mutated

SEED = int(os.environ.get("FUZZ_SEED", "20"))
FACTOR = float(os.environ.get("FUZZ_FACTOR", "0.125"))
KEPT = Path(os.environ.get("FUZZ_FOLDER", Path(tempfile.gettempdir()) / "dataservice-fuzz"))
# Small, so that what goes past them shows in a small file's memory.
LIMITS = DecodeLimits(
    max_image_pixels=2**21,
    max_video_pixels=2**20,
    max_media_packets=100_000,
    max_audio_s=600.0,
    max_decoded_bytes=64 * MIB,
    max_page_bytes=8 * MIB,
    max_row_group_values=2**20,
)
PEAK_LIMIT_BYTES = 256 * MIB
SHOWN_FAILURES = 3
FEWEST_TO_JUDGE = 50

VERDICTS = ("refused", "quarantined", "identical", "accepted")
"""How a case may end well. After indexing: some sample quarantined, or all identical to what they
were. Else: refused, or accepted and all as the oracle wants it."""
Tally = Callable[[str, Mapping[str, int]], None]


def damaged(seeds: Sequence[bytes], cases: int, name: str) -> list[bytes]:
    """The cases of one test, always the same for a seed."""
    rng = random.Random(f"{SEED} {name}")
    return [mutated(rng.choice(seeds), seeds, rng) for _ in range(int(cases * FACTOR))]


def campaign(
    tally: Tally,
    name: str,
    inputs: Sequence[bytes],
    task: str,
    case_of: Callable[[int, bytes], Any],
    setting: object = LIMITS,
    *,
    after_indexing: bool = False,
    some_pass: bool = True,
) -> None:
    """Try all inputs; raises AssertionError that names those that went wrong. Some must have
    been refused and some not, or the damage was too little or too much to tell anything."""
    cases = [case_of(number, data) for number, data in enumerate(inputs)]
    outcomes = run_cases(task, cases, setting=setting)
    failures = [
        _kept(name, number, data, outcome)
        for number, (data, outcome) in enumerate(zip(inputs, outcomes, strict=True))
        if outcome.bad or outcome.peak_bytes > PEAK_LIMIT_BYTES
    ]
    words = {"refused": "refused", "fine": "accepted"}
    if after_indexing:
        words = {"refused": "quarantined", "fine": "identical"}
    ended = Counter(words.get(outcome.verdict, outcome.verdict) for outcome in outcomes)
    tally(name, ended)
    assert not failures, (
        f"{len(failures)} of {len(inputs)} cases of FUZZ_SEED={SEED}:\n"
        + "\n".join(failures[:SHOWN_FAILURES])
    )
    if len(inputs) >= FEWEST_TO_JUDGE:
        assert ended[words["refused"]] > 0.05 * len(inputs)
        assert ended[words["fine"]] or not some_pass


def _kept(name: str, number: int, data: bytes, outcome: Outcome) -> str:
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{name.replace(', ', '-').replace(' ', '-')}-{SEED}-{number}"
    path.write_bytes(data)
    memory = f"{outcome.peak_bytes >> 20} MiB"
    return f"{outcome.verdict}, {memory}, input at {path}: {outcome.said}"
