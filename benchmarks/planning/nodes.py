"""How little crosses between nodes at a tight balance."""

import numpy as np

from benchmarks import workloads
from benchmarks.harness import Peer, Row, Scale
from dataservice.core.plan_options import PlanOptions
from dataservice.core.topology import Topology
from dataservice.planning import balance_nodewise, partition, rearrange_nodewise
from dataservice.planning.compose import compose_step


def nodewise(scale: Scale) -> list[Row]:
    """What crosses nodes when items are balanced inside nodes first."""
    shares, loads = [], []
    free, renumbered = [], []
    for seed in range(min(scale.seeds, 5)):
        tokens = workloads.vlm_sft(128 * 75, seed).llm_tokens
        home = np.repeat(np.arange(128), 75)
        plan = balance_nodewise(tokens, home, tokens, 128, 8)
        shares.append(100 * plan.inter_node_share)
        loads.append(100 * float(plan.loads.max() / plan.loads.mean() - 1))
        freely = partition(tokens, 128).rank_of
        free.append(100 * float(tokens[freely // 8 != home // 8].sum() / tokens.sum()))
        volume = np.zeros((128, 128))
        np.add.at(volume, (home, freely), tokens)
        placed = rearrange_nodewise(volume, 8)
        renumbered.append(100 * placed.inter_node_volume / volume.sum())
    what = "vlm-sft, 128 replicas, 8 a node, 75 items each"
    return [
        Row(
            group="nodes",
            what=f"volume that crosses nodes, mean of {len(shares)} draws, {what}",
            figure=float(np.mean(shares)),
            unit="%",
            limit=1.0,
            peers=(
                Peer(name="free balance", figure=float(np.mean(free))),
                Peer(name="free balance, renumbered (Alg. 3)", figure=float(np.mean(renumbered))),
            ),
            explanation="With many items a batch draws from everywhere and renumbering saves "
            "little; moving only a node's excess saves nearly all.",
        ),
        Row(
            group="nodes",
            what=f"largest load over the mean, worst of {len(loads)} draws, {what}",
            figure=max(loads),
            unit="%",
            limit=0.5,
            explanation="The balance that goes with the share above.",
        ),
    ]


def dispatch_gaps(scale: Scale) -> list[Row]:
    """How far the encoder phases of a whole step end above their bound."""
    rows = []
    for mix, memory_tokens in ((workloads.vlm_sft, 8192), (workloads.vlm_long, 32_768)):
        found = []
        for seed in range(min(scale.seeds, 4)):
            workload = mix(153_600, seed)
            plan = compose_step(
                workloads.step_samples(workload),
                step=0,
                topology=Topology(world_size=2560, replicas_per_node=8),
                options=PlanOptions(memory_tokens=memory_tokens),
            )
            found += [s for s in plan.stages if s.stage == "dispatch vision"]
        rows.append(
            Row(
                group="dispatch",
                what=f"encoder phases over their bound, worst of {len(found)} draws, "
                f"{workload.name}, 153,600 samples, 2,560 replicas, 8 a node",
                figure=100 * max(report.gap for report in found),
                unit="%",
                limit=1.0,
                peers=(
                    Peer(
                        name="home", figure=100 * max(r.before / r.lower_bound - 1 for r in found)
                    ),
                ),
                explanation="Sum over waves of the slowest replica's encoding.",
            )
        )
    return rows
