"""The step plan: everything decided about one optimizer step, as arrays.

Packs are numbered in execution order, wave by wave, and each pack has exactly one CP group,
so pack p, its group and its degree share the index p. Replicas that no group of a wave names
are idle in it: each is alone in an empty group, so that every replica is in exactly one
group a wave.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from dataservice_proto.columns import least_and_most
from numpy.typing import NDArray

from dataservice.core.layout import counts_between, padded_tokens, sample_starts

JSON_AT_ONCE = 16_384
PHASES = ("vision", "audio", "exchange", "llm", "gradients", "waiting")
"""What a rank's seconds of a step go to, as plans predict them and ranks report them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """What one planning stage achieved, in its own unit: cost before, after, lower bound."""

    stage: str
    algorithm: str
    unit: str
    before: float
    after: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """Distance to the bound as a share of the bound; 0 when the bound is 0."""
        return self.after / self.lower_bound - 1.0 if self.lower_bound > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step: `total_s`, and what they are to a rank, on the mean of all ranks.

    The phases are those that a rank measures (`StepResult.phase_s` of the trainer's client):
    encoding, the exchange of features and the decoder with its rings, each in both directions;
    `gradient_s`, what a step takes once; and `waiting_s`, what the others leave of the total: for
    slower replicas, for other stages of the pipeline, and for the members of a group.
    """

    total_s: float
    vision_s: float
    audio_s: float
    exchange_s: float
    llm_s: float
    gradient_s: float

    @property
    def waiting_s(self) -> float:
        """Seconds in which a rank computes nothing, on the mean."""
        working_s = self.vision_s + self.audio_s + self.exchange_s + self.llm_s + self.gradient_s
        return max(0.0, self.total_s - working_s)

    @property
    def phase_s(self) -> dict[str, float]:
        """Seconds by phase, in the names by which ranks report them."""
        seconds = (
            self.vision_s,
            self.audio_s,
            self.exchange_s,
            self.llm_s,
            self.gradient_s,
            self.waiting_s,
        )
        return dict(zip(PHASES, seconds, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One CP group of a wave: the replicas that share a pack. `pack` is -1 when idle."""

    wave: int
    pack: int
    replicas: tuple[int, ...]
    tokens: int
    seconds: float

    @property
    def degree(self) -> int:
        """The number of replicas that share the pack."""
        return len(self.replicas)


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class StepPlan:
    """The plan of one step: n samples, P packs, m encoder items, N replicas.

    Samples, in draw order: `sample_ids`, `sample_epoch`, `sample_tokens` (LLM tokens),
    `sample_loss_tokens` [n]. Packs: `pack_offsets` int64[P+1] into `pack_samples` int32[n]
    (positions of the pack's samples in the arrays above, in sequence order); `pack_wave`
    int32[P]; `replica_offsets` int64[P+1] into `pack_replicas` (the group's members in ring
    order); `pack_seconds` float64[P], predicted. Items [m], by sample then place:
    `item_sample`, `item_modality`, `item_encoder_tokens`, `item_llm_tokens`,
    `item_position`, and `item_replica`, the replica that encodes it.

    Where items may be cut, `item_units` int32[m] are the equal parts of each, which attend to
    themselves alone. Where some are cut, each row is a *piece*, consecutive units of one item, and
    the pieces of an item are rows behind one another: `item_first_unit` int32[m] is 0 in the first.

        item of 5 units     │ 0 1 2 │ 3 4 │     first_unit 0, 3   units 3, 2   replicas 7, 2

    `sample_loss_weights` [n] weigh the loss of the samples' tokens. These three are None where
    there is nothing to say, and such a plan has the digest and the JSON of a plan without the
    field. `time` splits `predicted_s`.
    """

    step: int
    replicas: int
    waves: int
    cost_version: str
    predicted_s: float
    sample_ids: NDArray[np.int64]
    sample_epoch: NDArray[np.int32]
    sample_tokens: NDArray[np.int32]
    sample_loss_tokens: NDArray[np.int32]
    pack_offsets: NDArray[np.int64]
    pack_samples: NDArray[np.int32]
    pack_wave: NDArray[np.int32]
    pack_seconds: NDArray[np.float64]
    replica_offsets: NDArray[np.int64]
    pack_replicas: NDArray[np.int32]
    item_sample: NDArray[np.int32]
    item_modality: NDArray[np.int8]
    item_encoder_tokens: NDArray[np.int32]
    item_llm_tokens: NDArray[np.int32]
    item_position: NDArray[np.int32]
    item_replica: NDArray[np.int32]
    stages: tuple[StageReport, ...] = ()
    time: StepTime | None = None
    sample_loss_weights: NDArray[np.float64] | None = None
    item_units: NDArray[np.int32] | None = None
    item_first_unit: NDArray[np.int32] | None = None

    @property
    def weighted_loss_tokens(self) -> float | None:
        """The sum of the weights of all loss tokens; None where all weigh 1."""
        if self.sample_loss_weights is None:
            return None
        return float((self.sample_loss_weights * self.sample_loss_tokens).sum())

    @property
    def packs(self) -> int:
        """P, the number of packs."""
        return len(self.pack_wave)

    @property
    def pack_degree(self) -> NDArray[np.int64]:
        """CP degree of each pack's group: int64[P]."""
        return counts_between(self.replica_offsets)

    @property
    def pack_of_sample(self) -> NDArray[np.int32]:
        """The pack of each sample: int32[n]."""
        pack_of = np.empty(len(self.sample_ids), dtype=np.int32)
        pack_of[self.pack_samples] = np.repeat(
            np.arange(self.packs, dtype=np.int32), counts_between(self.pack_offsets)
        )
        return pack_of

    @property
    def padded_sample_tokens(self) -> NDArray[np.int64]:
        """Each sample's length padded for its group's degree, in pack order: int64[n]."""
        tokens = self.sample_tokens[self.pack_samples]
        if len(self.pack_replicas) == self.packs:  # none is shared
            return padded_tokens(tokens, 1)
        degree = np.repeat(self.pack_degree, counts_between(self.pack_offsets))
        return padded_tokens(tokens, degree)

    @property
    def pack_tokens(self) -> NDArray[np.int64]:
        """Padded tokens of each pack: int64[P]."""
        return counts_between(sample_starts(self.padded_sample_tokens)[self.pack_offsets])

    def samples_of(self, pack: int) -> NDArray[np.int32]:
        """Positions of a pack's samples, in sequence order: int32[k]."""
        return self.pack_samples[self.pack_offsets[pack] : self.pack_offsets[pack + 1]]

    def replicas_of(self, pack: int) -> tuple[int, ...]:
        """The members of a pack's CP group, in ring order."""
        start, stop = self.replica_offsets[pack : pack + 2]
        return tuple(self.pack_replicas[start:stop].tolist())

    def groups(self, wave: int) -> Iterator[Group]:
        """The CP groups of a wave, idle replicas last."""
        busy: set[int] = set()
        tokens = self.pack_tokens
        for pack in np.flatnonzero(self.pack_wave == wave).tolist():
            replicas = self.replicas_of(pack)
            busy.update(replicas)
            yield Group(
                wave=wave,
                pack=pack,
                replicas=replicas,
                tokens=int(tokens[pack]),
                seconds=float(self.pack_seconds[pack]),
            )
        for replica in range(self.replicas):
            if replica not in busy:
                yield Group(wave=wave, pack=-1, replicas=(replica,), tokens=0, seconds=0.0)

    @property
    def digest(self) -> str:
        """32 hex digits over everything decided. Tickets, reports and `time` are not part of it.

        Numbers are hashed in as few bytes as hold them all: hashing is a good part of planning.
        """
        hasher = hashlib.blake2b(digest_size=16)
        for name in _DECIDED:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                narrow = _narrowed(value)
                types = f"{value.dtype.str}{narrow.dtype.str}"
                hasher.update(f"{name}{types}{value.shape}".encode())
                hasher.update(np.ascontiguousarray(narrow).data)
            elif value is not None:
                hasher.update(f"{name}{value!r}".encode())
        return hasher.hexdigest()

    def to_json(self) -> str:
        """The whole plan as JSON; `from_json` reads it back to the same digest."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, np.ndarray):
                text = f'{{"dtype": {json.dumps(value.dtype.str)}, "values": [{_values(value)}]}}'
            elif field.name == "stages":
                stages = [{f.name: getattr(one, f.name) for f in fields(one)} for one in value]
                text = json.dumps(stages)
            elif field.name == "time":
                text = json.dumps(asdict(value))
            else:
                text = json.dumps(value)
            parts.append(f"{json.dumps(field.name)}: {text}")
        return f"{{{', '.join(parts)}}}"

    @staticmethod
    def from_json(text: str) -> "StepPlan":
        """Read `to_json`'s form."""
        plain: dict[str, Any] = json.loads(text)
        if "time" in plain:
            plain["time"] = StepTime(**plain["time"])
        for name, value in plain.items():
            if isinstance(value, dict):
                plain[name] = np.array(value["values"], dtype=value["dtype"])
        plain["stages"] = tuple(StageReport(**stage) for stage in plain["stages"])
        return StepPlan(**plain)


_DECIDED = tuple(f.name for f in fields(StepPlan) if f.name not in ("stages", "time"))
ITEM_COLUMNS = tuple(field.name for field in fields(StepPlan) if field.name.startswith("item_"))


def _values(values: NDArray[Any]) -> str:
    """The elements of a JSON list, written some at a time: json lets no other thread run
    meanwhile."""
    pieces = (values[k : k + JSON_AT_ONCE] for k in range(0, len(values), JSON_AT_ONCE))
    return ", ".join(json.dumps(piece.tolist())[1:-1] for piece in pieces)


def _narrowed(values: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers ≥ 0 in as few bytes each as hold them all; anything else as it is."""
    if values.dtype.kind != "i" or values.size == 0:
        return values
    least, most = least_and_most(values)
    return values if least < 0 else values.astype(np.min_scalar_type(most))
