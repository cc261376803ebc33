"""The orders of a step's packs, and a guess of what each takes to decode."""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.orders import PackKey, PackOrder, PackSample
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Catalog
from dataservice.core.team import TeamShare

WHOLE = TeamShare()


def pack_orders(
    plan: StepPlan,
    *,
    job: str,
    digest: str,
    pipeline: str,
    catalog: Catalog,
    share: TeamShare = WHOLE,
) -> list[PackOrder]:
    """One order a pack: its samples in sequence order, with locations and planned shapes, and
    the share of the job's team."""
    details = catalog.details(plan.sample_ids)
    degrees = plan.pack_degree
    return [
        PackOrder(
            key=PackKey(job=job, step=plan.step, plan_digest=digest, pack=pack),
            degree=int(degrees[pack]),
            pipeline=pipeline,
            share=share,
            samples=tuple(
                PackSample(ref=details[s][0], lengths=details[s][1])
                for s in plan.samples_of(pack).tolist()
            ),
        )
        for pack in range(plan.packs)
    ]


def decode_work(plan: StepPlan) -> NDArray[np.float64]:
    """A stand-in for each pack's decode seconds, in tokens: float64[P].

    Encoder tokens are pixels and samples of sound, which dominate decoding; text is cheap.
    """
    sample_work = plan.sample_tokens.astype(np.float64)
    np.add.at(sample_work, plan.item_sample, 4.0 * plan.item_encoder_tokens)
    work: NDArray[np.float64] = np.bincount(
        plan.pack_of_sample, weights=sample_work, minlength=plan.packs
    ).astype(np.float64)
    return work
