"""How good plans are on a small frozen set of workloads: `python -m tests.planning.record_quality`.

Writes `quality.json`, which `test_quality` holds every later plan to. Record again when plans have
become better, or when a change is meant to make some of them worse; the difference shows in the
diff. Everything here is lengths and seconds of the cost model: the same on every machine.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import workloads
from benchmarks.planning.adversarial import COSTS, SLOW_RING
from dataservice.core.cost import ContextCost, StepCost
from dataservice.core.memory import MemoryModel
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.core.topology import Meet, Topology
from dataservice.planning.compose import compose_step
from dataservice.planning.context.groups import plan_context_groups, plan_context_waves
from dataservice.planning.context.many import find_many_waves

RECORDED = Path(__file__).with_name("quality.json")
COST = COSTS["7B"]
SMALL = COSTS["1B"]
NOTHING = StepCost()
# What features cost on their way, where a row takes 20 times as long between nodes as inside.
MOVES = StepCost(
    feature_intra_s_per_token=1e-7,
    feature_inter_s_per_token=2e-6,
    exchange_s=1e-4,
    gradient_s=0.05,
)
# Seconds of the parts of a plan, by name.
Seconds = dict[str, float]


def wiki(samples: int, seed: int = 0) -> workloads.Workload:
    """Text of up to 131,072 tokens."""
    return workloads.long_text(samples, seed, longest_tokens=131_072)


def spread(samples: int, low: float, high: float, memory_tokens: int) -> NDArray[np.int64]:
    """Lengths spread evenly over low..high times a replica's memory."""
    generator = np.random.default_rng(0)
    return generator.uniform(low * memory_tokens, high * memory_tokens, samples).astype(np.int64)


def step(
    workload: workloads.Workload,
    *,
    replicas: int = 64,
    memory_tokens: int = 8192,
    stages: int = 1,
    virtual_stages: int = 1,
    cost: ContextCost = COST,
    moves: StepCost = NOTHING,
    meet: Meet = "wave",
    **options: Any,
) -> Seconds:
    """A whole step: what it is predicted to take, and what every stage of it says."""
    plan = compose_step(
        workloads.step_samples(workload),
        step=0,
        topology=Topology(
            world_size=replicas * stages,
            ranks_per_replica=stages,
            pipeline_stages=stages,
            virtual_stages=virtual_stages,
            replicas_per_node=8,
            replicas_meet=meet,
        ),
        options=PlanOptions(
            memory_tokens=memory_tokens, cost=CostModel(llm=cost, step=moves), **options
        ),
    )
    reports = {
        report.stage: report.after for report in plan.stages if report.unit == "s" and report.after
    }
    return {"predicted": plan.predicted_s, **reports}


def context(
    plan: Callable[..., Any],
    tokens: NDArray[np.int64],
    *,
    replicas: int = 64,
    memory_tokens: int = 8192,
    cost: ContextCost = COST,
    ranks_per_node: int = 8,
) -> Seconds:
    """The waves, or the one wave, of a planner of context groups alone."""
    made = plan(
        tokens,
        ranks=replicas,
        memory_tokens=memory_tokens,
        cost=cost,
        ranks_per_node=ranks_per_node,
    )
    return {"waves": made.makespan_s}


def in_bytes(vision_token_bytes: float) -> MemoryModel:
    """As much as 8,192 tokens of a decoder alone."""
    return MemoryModel(
        budget_bytes=4 * 8192,
        llm_token_bytes=4,
        vision_token_bytes=vision_token_bytes,
        audio_token_bytes=1,
    )


one_wave = partial(context, plan_context_groups)
few = partial(context, plan_context_waves)
many = partial(context, find_many_waves)

CASES: dict[str, Callable[[], Seconds]] = {
    # whole steps, every stage on
    "image-text at 8k": lambda: step(workloads.vlm_sft(512)),
    "video at 8k": lambda: step(workloads.video(512)),
    "video at 16k": lambda: step(workloads.video(512), memory_tokens=16_384),
    "wiki at 8k": lambda: step(wiki(512)),
    "wiki at 16k": lambda: step(wiki(512), memory_tokens=16_384),
    "images from the web, 4 pipeline stages": lambda: step(
        workloads.web_image(512), replicas=8, stages=4
    ),
    "video, 2 stages of 2 chunks": lambda: step(
        workloads.video(256), replicas=16, stages=2, virtual_stages=2, memory_tokens=16_384
    ),
    "video, 8 stages of 2 chunks": lambda: step(
        workloads.video(456, 3),
        replicas=8,
        stages=8,
        virtual_stages=2,
        memory_tokens=32_768,
        cost=SMALL,
    ),
    "documents, few items a wave": lambda: step(
        workloads.vlm_long(320, 6), stages=2, virtual_stages=2
    ),
    "video, 4 stages": lambda: step(
        workloads.video(336), replicas=8, stages=4, memory_tokens=16_384, cost=SLOW_RING
    ),
    "image-text, 8 stages with memory for far more": lambda: step(
        workloads.vlm_sft(256, 1), replicas=16, stages=8, memory_tokens=131_072
    ),
    "image-text, 8 replicas meet at the end": lambda: step(
        workloads.vlm_sft(216, 8), replicas=8, memory_tokens=4096, cost=SLOW_RING, meet="step"
    ),
    "text with rare clips": lambda: step(workloads.rare_clips(1024), memory_tokens=4096),
    "text with rare clips, 4 stages": lambda: step(
        workloads.rare_clips(512), replicas=16, stages=4, memory_tokens=2048
    ),
    "text with rare clips, replicas meet at the end": lambda: step(
        workloads.rare_clips(512), replicas=16, memory_tokens=2048, meet="step"
    ),
    "speech": lambda: step(
        workloads.speech(416, 7), replicas=32, memory_tokens=4096, cost=SLOW_RING
    ),
    "wiki at 8k, small model": lambda: step(wiki(480, 6), replicas=32, cost=SMALL),
    "documents, 256 replicas": lambda: step(
        workloads.vlm_long(8192), replicas=256, memory_tokens=32_768
    ),
    "video, 256 replicas": lambda: step(workloads.video(20_000), replicas=256),
    "video, items attend both ways": lambda: step(
        workloads.video(20_000), replicas=256, full_attention="items"
    ),
    # encoders share the memory, in bytes of which a decoder's token takes four
    "image-text in bytes": lambda: step(workloads.vlm_sft(512), memory=in_bytes(1.0)),
    "video in bytes": lambda: step(workloads.video(512), memory=in_bytes(1.0)),
    "video in bytes, rings slow between nodes": lambda: step(
        workloads.video(512), memory=in_bytes(1.0), cost=SLOW_RING
    ),
    "images from the web in bytes": lambda: step(
        workloads.web_image(300), replicas=32, memory=in_bytes(2.0)
    ),
    "video in bytes, 256 replicas": lambda: step(
        workloads.video(4000), replicas=256, memory=in_bytes(1.0), cost=SMALL
    ),
    "image-text in bytes, 4 stages, waves that would be full to the brim": lambda: step(
        workloads.vlm_sft(3840), stages=4, cost=SMALL, memory=in_bytes(1.0)
    ),
    # each of these is planned worse by 1 to 24 % without one kind of rival: items at home, all
    # tokens that memory holds, fewer a wave, tokens of its own degree, balanced seats
    "documents, items at home": lambda: step(workloads.vlm_long(512), meet="step", moves=MOVES),
    "images from the web in bytes, all tokens": lambda: step(
        workloads.web_image(60, 1),
        replicas=8,
        stages=4,
        meet="step",
        cost=SMALL,
        moves=MOVES,
        memory=in_bytes(1.0),
    ),
    "image-text in bytes, 4 stages, fewer tokens": lambda: step(
        workloads.vlm_sft(512, 1), stages=4, cost=SLOW_RING, moves=MOVES, memory=in_bytes(1.0)
    ),
    "images from the web in bytes, tokens of a degree": lambda: step(
        workloads.web_image(512, 1), memory=in_bytes(2.0)
    ),
    "rare clips in bytes, balanced seats": lambda: step(
        workloads.rare_clips(512), meet="step", moves=MOVES, memory=in_bytes(0.5)
    ),
    # few samples: one wave, and all waves
    "one wave, wiki": lambda: one_wave(wiki(256).llm_tokens, memory_tokens=65_536),
    "one wave, video": lambda: one_wave(workloads.video(256).llm_tokens, memory_tokens=65_536),
    "one wave, 10 long samples": lambda: one_wave(spread(10, 0.5, 8.0, 8192)),
    "one wave, tight memory": lambda: one_wave(spread(40, 0.5, 2.0, 4096)),
    "one wave, rings slow between nodes": lambda: one_wave(
        spread(12, 0.5, 4.0, 8192), replicas=40, cost=SLOW_RING
    ),
    "one wave, memory nearly full": lambda: one_wave(spread(48, 0.5, 1.0, 8192), replicas=40),
    "one wave, wiki, rings slow between nodes of 3": lambda: one_wave(
        wiki(16, 6).llm_tokens,
        replicas=8,
        memory_tokens=65_536,
        cost=SLOW_RING,
        ranks_per_node=3,
    ),
    "waves, wiki at 8k": lambda: few(wiki(512, 1).llm_tokens),
    "waves, video at 8k": lambda: few(workloads.video(512, 1).llm_tokens),
    "waves, video, three that memory fills": lambda: few(workloads.video(512, 4).llm_tokens),
    "waves, video, three of even groups": lambda: few(workloads.video(512, 5).llm_tokens),
    "waves, wiki, short ones beside long": lambda: few(wiki(512, 9).llm_tokens),
    "waves, video, a prime number of replicas": lambda: few(
        workloads.video(610, 1).llm_tokens, replicas=61
    ),
    "waves, wiki, the tightest node": lambda: few(
        wiki(230, 4).llm_tokens, replicas=23, memory_tokens=4096, cost=SLOW_RING
    ),
    "waves, rings slow between nodes": lambda: few(
        spread(90, 0.5, 4.0, 8192), replicas=40, cost=SLOW_RING
    ),
    "waves, rings slow between nodes of 3": lambda: few(
        spread(23, 0.05, 1.2, 4096),
        replicas=23,
        memory_tokens=4096,
        cost=SLOW_RING,
        ranks_per_node=3,
    ),
    "waves, a rank of memory each": lambda: few(
        spread(16, 0.4, 1.0, 65_536),
        replicas=16,
        memory_tokens=65_536,
        cost=SLOW_RING,
        ranks_per_node=4,
    ),
    "waves, 3 replicas a node": lambda: few(
        spread(60, 0.2, 3.0, 4096), replicas=23, memory_tokens=4096, ranks_per_node=3
    ),
    "waves, tight memory": lambda: few(spread(300, 0.4, 1.2, 4096), memory_tokens=4096),
    # many samples
    "many, image-text": lambda: many(workloads.vlm_sft(4096).llm_tokens),
    "many, video": lambda: many(workloads.video(4096).llm_tokens),
    "many, documents": lambda: many(workloads.vlm_long(4096).llm_tokens, memory_tokens=16_384),
    "many, documents at 2k": lambda: many(
        workloads.vlm_long(312, 2).llm_tokens,
        replicas=12,
        memory_tokens=2048,
        cost=SMALL,
        ranks_per_node=4,
    ),
    "many, image-text, 8 replicas": lambda: many(
        workloads.vlm_sft(208, 1).llm_tokens,
        replicas=8,
        memory_tokens=16_384,
        cost=SMALL,
        ranks_per_node=4,
    ),
    "many, video, rings slow between nodes": lambda: many(
        workloads.video(3172, 8).llm_tokens, replicas=61, cost=SLOW_RING
    ),
    "many, video at 2k": lambda: many(
        workloads.video(3584).llm_tokens, memory_tokens=2048, cost=SMALL, ranks_per_node=3
    ),
    "many, wiki": lambda: many(wiki(8192).llm_tokens, memory_tokens=16_384),
    "many, rings slow between nodes": lambda: many(
        wiki(4096).llm_tokens, memory_tokens=16_384, cost=SLOW_RING
    ),
    "many, tight memory": lambda: many(spread(2000, 0.1, 0.6, 4096), memory_tokens=4096),
}


def measured() -> dict[str, Seconds]:
    """Every case, planned anew."""
    return {name: case() for name, case in CASES.items()}


def recorded() -> dict[str, Seconds]:
    """Every case as it was planned when it was recorded."""
    found: dict[str, Seconds] = json.loads(RECORDED.read_text())
    return found


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(measured(), indent=2) + "\n")
