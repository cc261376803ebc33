"""Layouts of the model over the GPUs: how good, and how long they take to find.

Bubbles: Optimus's Table 7 from the shapes in its Tables 8, 9 and 12, over a device that is stated
here. What the paper measured and printed is taken as it is; what it did not print is assumed:

- Kernel times: FLOPs of each matrix product and of attention over 8 ranks at 0.6 of 989 TFLOP/s,
  which gives a ViT-22B layer the 1.4 ms forward that §2.3 states (backward 2.2 ms, there 2.0).
- Tensor-parallel collectives (two gathers, two scatters a layer and direction, sequence parallel):
  bytes at 300 GB/s, which gives GPT-175B the 300 µs bubbles of §2.2.
- Microbatches of 2 sequences of 2,048 tokens, in encoder and backbone.
- Encoder features between stages, and to the backbone: bytes at 40 GB/s.
- Data-parallel collectives are not printed for these runs. `GATHER_S` and `SCATTER_S` stand in the
  ratio of Table 1 and are chosen so that coarse efficiency at 1,536 GPUs is the paper's; the other
  five efficiencies follow.
- Memory: 80 GB; 6 bytes a parameter (§4.5); activations 34 bytes a token and width (Korthikanti),
  the backbone's for its warm-up.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Peer, Row, Scale, side_by_side
from dataservice.planning import (
    BackboneTimes,
    BubbleSchedule,
    EncoderTimes,
    KernelTimes,
    schedule_bubbles,
    simulate_1f1b,
)

TOKENS, SEQUENCE = 4096, 2048
FLOPS = 0.6 * 989e12
LINK_BYTES_PER_S = 300e9
NETWORK_BYTES_PER_S = 40e9
MEMORY_BYTES = 80e9
STATE_BYTES, ACTIVATION_BYTES = 6, 34
GATHER_S, SCATTER_S = 0.0515, 0.1411
STAGES, RANKS, VIRTUAL = 8, 8, 12

# GPUs, microbatches, coarse and fine efficiency and seconds of Table 7 (3,072: the errata).
TABLE_7 = (
    (1536, 32, 34.3, 57.5, 322.2),
    (2048, 24, 45.8, 69.3, 89.6),
    (3072, 16, 68.7, 85.0, 15.1),
)
# Seconds of a step in Table 5: Megatron-LM balanced, Optimus.
TABLE_5 = {1536: (10.43, 9.80), 2048: (8.06, 7.29), 3072: (5.87, 4.87)}


def layer_times(
    width: int, mlp: int, layers: int, ranks: int, *, causal: bool, backward: bool
) -> KernelTimes:
    """Kernels of a transformer layer on one of `ranks`, [layer, kernel]: collective, QKV,
    attention, projection, collective, collective, two products of the MLP, collective. Backwards
    the other way round, each product twice: for its input and for its weight."""
    products = {
        name: 2 * TOKENS * width * columns / ranks / FLOPS
        for name, columns in {"qkv": 3 * width, "out": width, "up": mlp, "down": mlp}.items()
    }
    attention = 4 * TOKENS * SEQUENCE * width / ranks / FLOPS / (2 if causal else 1)
    collective = 2 * TOKENS * width * (ranks - 1) / ranks / LINK_BYTES_PER_S
    links = (collective, True)
    if backward:
        row = [
            links, *[(products["down"], False)] * 2, *[(products["up"], False)] * 2, links,
            links, *[(products["out"], False)] * 2, (2 * attention, False),
            *[(products["qkv"], False)] * 2, links,
        ]  # fmt: skip
    else:
        row = [
            links, (products["qkv"], False), (attention, False), (products["out"], False), links,
            links, (products["up"], False), (products["down"], False), links,
        ]  # fmt: skip
    seconds, kinds = zip(*row, strict=True)
    return KernelTimes(
        seconds=np.tile(np.array(seconds), (layers, 1)), communicates=np.array(kinds)
    )


def layer_parameters(width: int, mlp: int, layers: int) -> NDArray[np.float64]:
    """Of each layer: four matrices of attention, two of the MLP."""
    return np.full(layers, 4.0 * width * width + 2.0 * width * mlp)


def vision_transformer(width: int, mlp: int, layers: int) -> EncoderTimes:
    """An encoder of Table 8 at every degree."""
    shape = partial(layer_times, width, mlp, layers, causal=False)
    degrees = (1, 2, 4, 8)
    return EncoderTimes(
        name=f"ViT of width {width}",
        forward={ranks: shape(ranks, backward=False) for ranks in degrees},
        backward={ranks: shape(ranks, backward=True) for ranks in degrees},
        layer_bytes=STATE_BYTES * layer_parameters(width, mlp, layers),
        activation_bytes=np.full(layers, ACTIVATION_BYTES * TOKENS * width, np.float64),
        transfer_s=2 * TOKENS * width / RANKS / NETWORK_BYTES_PER_S,
    )


def gpt_175b(microbatches: int) -> BackboneTimes:
    """The backbone of Tables 9 and 12."""
    width, layers = 12288, 96
    shape = partial(layer_times, width, 4 * width, layers, RANKS, causal=True)
    states = STATE_BYTES * layer_parameters(width, 4 * width, layers).sum() / STAGES / RANKS
    warm_up = np.minimum(
        (VIRTUAL - 1) * STAGES + 2 * np.arange(STAGES)[::-1] + 1, microbatches * VIRTUAL
    )
    layers_of_chunk = layers // (STAGES * VIRTUAL)
    activations = warm_up * layers_of_chunk * ACTIVATION_BYTES * TOKENS * width / RANKS
    return BackboneTimes(
        forward=shape(backward=False),
        backward=shape(backward=True),
        microbatches=microbatches,
        pipeline_parallel=STAGES,
        virtual_stages=VIRTUAL,
        tensor_parallel=RANKS,
        gather_s=GATHER_S,
        scatter_s=SCATTER_S,
        held_bytes=states + activations,
    )


def bubbles(scale: Scale) -> list[Row]:
    """Table 7: efficiency coarse and fine."""
    encoder = vision_transformer(6144, 24576, 48)
    rows = []
    for gpus, microbatches, paper_coarse, paper_fine, _ in TABLE_7:
        made = schedule_bubbles(gpt_175b(microbatches), [encoder], memory_bytes=MEMORY_BYTES)
        what = _what(gpus, microbatches)
        rows += [
            Row(
                group="bubbles",
                what=f"encoder compute in bubbles, {what}",
                figure=100 * made.efficiency,
                unit="%",
                limit=paper_fine,
                at_least=True,
                peers=(Peer(name="coarse", figure=100 * made.coarse_efficiency),),
                paper=f"Optimus {paper_coarse} % coarse, {paper_fine} % fine",
                explanation=_explanation(made),
            ),
            Row(
                group="bubbles",
                what=f"seconds outside the backbone's step, fine over coarse, {what}",
                figure=_outside_ratio(made),
                unit="",
                limit=1.0,
                explanation="What encoding adds to the backbone's own step: kernels in all "
                "bubbles, over whole layers before and after it.",
            ),
            _speed_up_row(made, encoder, gpt_175b(microbatches), gpus, what),
        ]
    return [*rows, _two_encoders_row()]


def bubble_speed(scale: Scale) -> list[Row]:
    """Table 7: seconds to find the schedule."""
    encoder = vision_transformer(6144, 24576, 48)
    rows = []
    for gpus, microbatches, _, _, paper_s in TABLE_7:
        call = partial(
            schedule_bubbles, gpt_175b(microbatches), [encoder], memory_bytes=MEMORY_BYTES
        )
        best = side_by_side({"schedule_bubbles": call}, repeats=scale.repeats)["schedule_bubbles"]
        rows.append(
            Row(
                group="bubble-speed",
                what=f"bubble schedule, {_what(gpus, microbatches)}",
                figure=best.processor_s,
                unit="s",
                limit=2.0,
                paper=f"Optimus {paper_s} s",
                explanation="Every encoder plan that fits, coarse and fine.",
            )
        )
    return rows


def _what(gpus: int, microbatches: int) -> str:
    return f"{gpus:,} GPUs, {microbatches} microbatches, ViT-22B + GPT-175B"


def balanced_step_s(encoder: EncoderTimes, backbone: BackboneTimes) -> float:
    """Megatron-LM balanced at its best: layers of both in one pipeline, as if every chunk took the
    same time (whole layers cannot be cut so evenly)."""
    assert encoder.backward is not None
    shape = (backbone.microbatches, backbone.chunks)
    forward, backward = (
        np.full(shape, (ours.seconds.sum() + theirs.seconds.sum()) / backbone.chunks)
        for ours, theirs in (
            (encoder.forward[RANKS], backbone.forward),
            (encoder.backward[RANKS], backbone.backward),
        )
    )
    alone = simulate_1f1b(forward, backward, virtual_stages=backbone.virtual_stages)
    return backbone.gather_s + alone.makespan_s + backbone.scatter_s


def _speed_up_row(
    made: BubbleSchedule, encoder: EncoderTimes, backbone: BackboneTimes, gpus: int, what: str
) -> Row:
    ours = balanced_step_s(encoder, backbone) / made.step_s
    theirs = TABLE_5[gpus][0] / TABLE_5[gpus][1]
    return Row(
        group="bubbles",
        what=f"speed-up over Megatron-LM balanced, off the paper's, {what}",
        figure=100 * abs(ours / theirs - 1),
        unit="%",
        limit=15.0,
        paper=f"Optimus {theirs:.3f}×",
        explanation=f"{ours:.3f}×, the baseline cut into chunks of equal time. Seconds of the "
        "paper's steps are about twice ours: it counts 8 FLOPs a parameter and token "
        "(recomputation), and prints no kernel time of the backbone.",
    )


def _two_encoders_row() -> Row:
    """DualEnc(22B, 11B) of Table 6: 512 GPUs, 256 samples."""
    encoders = [vision_transformer(6144, 24576, 48), vision_transformer(4096, 16384, 48)]
    made = schedule_bubbles(gpt_175b(16), encoders, memory_bytes=MEMORY_BYTES)
    return Row(
        group="bubbles",
        what="step over its bound, 512 GPUs, 16 microbatches, ViT-22B + ViT-11B + GPT-175B",
        figure=100 * (made.step_s / made.lower_bound_s - 1),
        unit="%",
        limit=5.0,
        peers=(
            Peer(name="coarse", figure=100 * (made.coarse_step_s / made.lower_bound_s - 1)),
            Peer(name="backbone alone", figure=100 * (made.backbone_s / made.lower_bound_s - 1)),
        ),
        explanation=f"{100 * made.efficiency:.1f} % of encoder compute in bubbles, coarse "
        f"{100 * made.coarse_efficiency:.1f} %. The paper has speed-ups over Megatron-LM with all "
        "encoders in its first stage, whose layers it does not print.",
    )


def _outside_ratio(made: BubbleSchedule) -> float:
    return (made.step_s - made.backbone_s) / (made.coarse_step_s - made.backbone_s)


def _explanation(made: BubbleSchedule) -> str:
    plan = made.plan
    return (
        f"Step {made.step_s:.3f} s, bound {made.lower_bound_s:.3f} s, coarse "
        f"{made.coarse_step_s:.3f} s, backbone alone {made.backbone_s:.3f} s; {plan.pipelines} "
        f"encoder pipelines of PP {plan.pipeline_parallel} and TP {plan.tensor_parallel}. Device "
        "and efficiencies as this file states them at its top; gather and scatter are set by"
        " the paper's coarse figure at 1,536 GPUs."
    )
