"""The orders of a step's packs, and an estimate of the work that decoding each takes."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.orders import PackKey, PackOrder
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Catalog
from dataservice.core.sample_columns import PackedSamples, SampleColumns
from dataservice.core.team import TeamShare

WHOLE = TeamShare()


def packed_samples(plan: StepPlan, catalog: Catalog) -> SampleColumns:
    """The samples of all packs end to end, in sequence order."""
    columns = catalog.columns(plan.sample_ids[plan.pack_samples])
    return replace(columns, epoch=plan.sample_epoch[plan.pack_samples])


def pack_orders(
    plan: StepPlan,
    columns: SampleColumns,
    *,
    job: str,
    digest: str,
    pipeline: str,
    share: TeamShare = WHOLE,
) -> list[PackOrder]:
    """One order for each pack: its samples in sequence order, with locations and planned shapes,
    and the share of the job's team. The samples stay `columns`, of the whole step."""
    offsets = plan.pack_offsets.tolist()
    return [
        PackOrder(
            key=PackKey(job=job, step=plan.step, plan_digest=digest, pack=pack),
            degree=degree,
            pipeline=pipeline,
            share=share,
            samples=PackedSamples(columns, range(offsets[pack], offsets[pack + 1])),
        )
        for pack, degree in enumerate(plan.pack_degree.tolist())
    ]


def decode_work(plan: StepPlan) -> NDArray[np.int64]:
    """A stand-in for each pack's decode seconds, in tokens: int64[P].

    Encoder tokens are pixels and samples of sound, which dominate decoding; text is cheap.
    """
    encoded = np.bincount(
        plan.item_sample, weights=plan.item_encoder_tokens, minlength=len(plan.sample_ids)
    )
    sample_work = plan.sample_tokens + 4 * encoded
    work = np.bincount(plan.pack_of_sample, weights=sample_work, minlength=plan.packs)
    return work.astype(np.int64)
