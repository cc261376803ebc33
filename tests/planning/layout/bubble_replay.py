"""Replays a bubble schedule from its text, and says what is wrong with it.

Written from Optimus (§2.3, §4) and from the text's own description, apart from the planner: of
`dataservice` it takes nothing but the numbers of what was asked, and it reads the text itself.
"""

from collections import defaultdict
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise

SLACK_S = 1e-9


@dataclass(frozen=True)
class Action:
    device: int
    kind: str
    encoder: int | None
    microbatch: int | None
    stage: int | None
    layer: int | None
    kernel: int | None
    start: float
    end: float

    @property
    def pass_(self):
        return self.kind.removesuffix("_comm")

    @property
    def name(self):
        return (self.pass_, self.encoder, self.microbatch, self.layer, self.kernel)


@dataclass
class Asked:
    """What a schedule is for: `backbone` and `encoders` as they were given to the planner, and the
    plan that it says to have chosen."""

    backbone: object
    encoders: list
    pipeline_parallel: int
    tensor_parallel: int
    memory_bytes: float = float("inf")

    @property
    def slices(self):
        return self.backbone.tensor_parallel // self.tensor_parallel


def read(text):
    first, names, *lines = text.split("\n")
    assert first == "bubbles 1"
    assert names.split() == [
        "device", "kind", "encoder", "microbatch", "stage", "layer", "kernel", "start_s", "end_s"
    ]  # fmt: skip
    assert lines.pop() == "", "the last line ends as the others do"
    actions = []
    for line in lines:
        device, kind, *whole, start, end = line.split(" ")
        numbers = [None if word == "-" else int(word) for word in whole]
        actions.append(Action(int(device), kind, *numbers, float(start), float(end)))
    return actions


def write(actions):
    """The text of actions that a test has changed."""
    names = "device kind encoder microbatch stage layer kernel start_s end_s"
    words = [["-" if word is None else str(word) for word in astuple(a)] for a in actions]
    return "\n".join(["bubbles 1", names, *map(" ".join, words)]) + "\n"


def part_of(layer, layers, parts):
    """Which of so many even parts a layer lies in; the first parts are the longer ones."""
    short, longer = divmod(layers, parts)
    inside_longer = longer * (short + 1)
    if layer < inside_longer:
        return layer // (short + 1)
    return longer + (layer - inside_longer) // short


def faults(text, asked):
    """Everything that is wrong, in words; nothing where the schedule holds."""
    actions = read(text)
    found = [*_missing(actions, asked), *_places(actions, asked)]
    if found:  # what follows looks actions up
        return found
    return [
        *_overlaps(actions),
        *_link_use(actions),
        *_collectives(actions, asked),
        *_kernel_order(actions, asked),
        *_backbone_order(actions, asked),
        *_encoder_order(actions, asked),
        *_memory(actions, asked),
    ]


def _tables(asked):
    """(pass, encoder, table) of everything that has kernels."""
    yield "forward", None, asked.backbone.forward
    yield "backward", None, asked.backbone.backward
    for number, encoder in enumerate(asked.encoders):
        yield "forward", number, encoder.forward[asked.tensor_parallel]
        if encoder.backward is not None:
            yield "backward", number, encoder.backward[asked.tensor_parallel]


def _missing(actions, asked):
    """Every kernel of every microbatch once (the backbone's on every slice), with its time."""
    wanted = {}
    for pass_, encoder, table in _tables(asked):
        for layer, row in enumerate(table.seconds.tolist()):
            for kernel, seconds in enumerate(row):
                if seconds > 0:
                    kind = pass_ + "_comm" * bool(table.communicates[kernel])
                    for microbatch in range(asked.backbone.microbatches):
                        wanted[pass_, encoder, microbatch, layer, kernel] = (kind, seconds)
    seen = defaultdict(int)
    for action in actions:
        if action.kind in ("gather", "scatter"):
            continue
        if action.name not in wanted:
            yield f"{action}: nobody asked for it"
            continue
        kind, seconds = wanted[action.name]
        seen[action.name] += 1
        if action.kind != kind:
            yield f"{action}: it is {kind}"
        if abs(action.end - action.start - seconds) > SLACK_S:
            yield f"{action}: it takes {seconds} s"
    for name in wanted:
        times = asked.slices if name[1] is None else 1
        if seen[name] != times:
            yield f"{name} runs {seen[name]} times, not {times}"


def _places(actions, asked):
    """Each kernel on the device of its stage; a microbatch's encoding on one pipeline."""
    backbone = asked.backbone
    chunks = backbone.pipeline_parallel * backbone.virtual_stages
    home, slices_of = {}, defaultdict(set)
    for action in actions:
        if action.kind in ("gather", "scatter"):
            continue
        stage, part = divmod(action.device, asked.slices)
        if action.encoder is None:
            chunk = part_of(action.layer, backbone.forward.layers, chunks)
            if backbone.bounds is not None:
                chunk = sum(action.layer >= bound for bound in backbone.bounds[1:])
            if action.stage != chunk or chunk % backbone.pipeline_parallel != stage:
                yield f"{action}: its chunk is {chunk}"
            slices_of[action.name].add(part)
            continue
        layers = len(asked.encoders[action.encoder].forward[asked.tensor_parallel].seconds)
        hop = part_of(action.layer, layers, asked.pipeline_parallel)
        if action.stage != hop or stage % asked.pipeline_parallel != hop:
            yield f"{action}: its stage is {hop}"
        pipeline = (stage // asked.pipeline_parallel, part)
        if home.setdefault(action.microbatch, pipeline) != pipeline:
            yield f"{action}: its microbatch is encoded on pipeline {home[action.microbatch]}"
    for name, parts in slices_of.items():
        if parts != set(range(asked.slices)):
            yield f"{name} runs on slices {parts} only"


def _touching(one, other):
    return min(one.end, other.end) - max(one.start, other.start) > SLACK_S


def _by_device(actions):
    rows = defaultdict(list)
    for action in actions:
        rows[action.device].append(action)
    return {device: sorted(row, key=lambda a: (a.start, a.end)) for device, row in rows.items()}


def _overlaps(actions):
    """One kernel at a time on the processors of a device, and one on its links."""
    for device, row in _by_device(actions).items():
        for resource, kinds in (
            ("compute", ("forward", "backward")),
            ("communication", ("forward_comm", "backward_comm")),
        ):
            used = [action for action in row if action.kind in kinds]
            for one, other in pairwise(used):
                if _touching(one, other):
                    yield f"device {device}: {resource} overlaps, {one} and {other}"


def _link_use(actions):
    """Encoder communication lies under backbone compute, or where the backbone does nothing: it
    never touches a bubble that the backbone's own communication makes."""
    for row in _by_device(actions).values():
        theirs = [a for a in row if a.encoder is None and a.kind.endswith("_comm")]
        at = 0
        for action in (a for a in row if a.encoder is not None and a.kind.endswith("_comm")):
            while at < len(theirs) and theirs[at].end <= action.start:
                at += 1
            if at < len(theirs) and _touching(action, theirs[at]):
                yield f"{action}: it communicates beside the backbone, {theirs[at]}"


def _collectives(actions, asked):
    """Parameters are there before the backbone's first kernel, gradients leave after its last."""
    for device, row in _by_device(actions).items():
        own = [a for a in row if a.encoder is None and a.kind not in ("gather", "scatter")]
        for kind, seconds in (
            ("gather", asked.backbone.gather_s),
            ("scatter", asked.backbone.scatter_s),
        ):
            of_kind = [a for a in row if a.kind == kind]
            if len(of_kind) != 1 or abs(of_kind[0].end - of_kind[0].start - seconds) > SLACK_S:
                yield f"device {device}: {kind} of {seconds} s is {of_kind}"
            elif kind == "gather" and of_kind[0].end > min(a.start for a in own) + SLACK_S:
                yield f"device {device}: it computes before {of_kind[0]} has ended"
            elif kind == "scatter" and of_kind[0].start < max(a.end for a in own) - SLACK_S:
                yield f"device {device}: {of_kind[0]} begins before its backward passes end"


def _groups(actions):
    """Kernels by (pass, encoder, microbatch, stage, device), in the order in which they run."""
    groups = defaultdict(list)
    for action in actions:
        if action.microbatch is not None:
            key = (action.pass_, action.encoder, action.microbatch, action.stage, action.device)
            groups[key].append(action)
    return {key: sorted(group, key=lambda a: a.start) for key, group in groups.items()}


def _kernel_order(actions, asked):
    """On a stage: layers rising forwards and falling backwards, kernels of a layer in order, each
    after the one before."""
    for key, group in _groups(actions).items():
        falling = key[0] == "backward"
        in_order = sorted(group, key=lambda a: (-a.layer if falling else a.layer, a.kernel))
        for one, other in pairwise(in_order):
            if other.start < one.end - SLACK_S:
                yield f"{other} begins before {one} has ended"


def _spans(actions):
    """Start and end by (pass, encoder, microbatch, stage), over all devices that run it."""
    spans = {}
    for key, group in _groups(actions).items():
        start, end = group[0].start, max(a.end for a in group)
        low, high = spans.get(key[:4], (start, end))
        spans[key[:4]] = min(low, start), max(high, end)
    return spans


def _backbone_order(actions, asked):
    """Chunk after chunk forwards, and back again; devices finish one chunk before the next."""
    spans = _spans(actions)
    backbone = asked.backbone
    chunks = backbone.pipeline_parallel * backbone.virtual_stages
    for microbatch in range(backbone.microbatches):
        way = [("forward", None, microbatch, chunk) for chunk in range(chunks)]
        way += [("backward", None, microbatch, chunk) for chunk in reversed(range(chunks))]
        for one, other in pairwise(way):
            if spans[other][0] < spans[one][1] - SLACK_S:
                yield f"{other} begins before {one} has ended"


def _encoder_order(actions, asked):
    """Stage after stage, each after the transfer; EF ≤ F where features go to the backbone, EB ≥ B
    where gradients come back."""
    spans = _spans(actions)
    for number, encoder in enumerate(asked.encoders):
        for microbatch in range(asked.backbone.microbatches):
            stages = range(asked.pipeline_parallel)
            way = [("forward", number, microbatch, stage) for stage in stages]
            way = [step for step in way if step in spans]
            back = [("backward", number, microbatch, stage) for stage in reversed(stages)]
            back = [step for step in back if step in spans]
            whole = [*way, ("forward", None, microbatch, 0)]
            steps = list(pairwise(whole)) if way else []
            if back:
                steps += pairwise([("backward", None, microbatch, 0), *back])
            for one, other in steps:
                if spans[other][0] < spans[one][1] + encoder.transfer_s - SLACK_S:
                    yield f"{other} begins before {one} has ended and its output has come"


def _memory(actions, asked):
    """Model states of both, and activations of every microbatch between its forward and its
    backward, on each GPU."""
    backbone, parts = asked.backbone, asked.pipeline_parallel
    changes = defaultdict(list)
    groups = _groups(actions)
    for (pass_, encoder, microbatch, stage, device), group in groups.items():
        if encoder is None:
            continue
        given = asked.encoders[encoder]
        layers = len(given.layer_bytes)
        kept = sum(
            given.activation_bytes[layer] / asked.tensor_parallel
            for layer in range(layers)
            if part_of(layer, layers, parts) == stage
        )
        end = max(a.end for a in group)
        backward = ("backward", encoder, microbatch, stage, device)
        if pass_ == "forward":
            changes[device].append((group[0].start, kept))
            if backward not in groups:
                changes[device].append((end, -kept))
        else:
            changes[device].append((end, -kept))
    for device in range(backbone.pipeline_parallel * asked.slices):
        stage = device // asked.slices
        held = float(backbone.held_bytes[stage])
        for given in asked.encoders:
            layers = len(given.layer_bytes)
            held += sum(
                given.layer_bytes[layer] / asked.tensor_parallel
                for layer in range(layers)
                if part_of(layer, layers, parts) == stage % parts
            )
        levels = list(accumulate([held, *(change for _, change in sorted(changes[device]))]))
        if max(levels) > asked.memory_bytes * (1 + 1e-9):
            yield f"device {device} holds {max(levels)} bytes"
