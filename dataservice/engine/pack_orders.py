"""The orders of a step's packs, and an estimate of the work that decoding each takes."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import counts_between
from dataservice.core.order_columns import FEW_SAMPLES, PackOrders
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Catalog
from dataservice.core.sample_columns import FoundSamples, SampleColumns
from dataservice.core.team import TeamShare
from dataservice.planning.place_packs import ENCODER_TOKEN_WORK

WHOLE = TeamShare()


def pack_orders(
    plan: StepPlan,
    catalog: Catalog,
    *,
    job: str,
    digest: str,
    pipeline: str,
    share: TeamShare = WHOLE,
) -> PackOrders:
    """One order for each pack: its samples in sequence order, with locations and planned shapes,
    and the share of the job's team. Samples are looked up once they are sent; now, where they are
    few, or of an index that is still being read: whoever sends must not wait for its storage."""

    def find(rows: NDArray[np.int64]) -> SampleColumns:
        of = plan.pack_samples[rows]
        return replace(catalog.columns(plan.sample_ids[of]), epoch=plan.sample_epoch[of])

    now = len(plan.sample_ids) <= FEW_SAMPLES or not catalog.at_hand
    return PackOrders(
        job=job,
        step=plan.step,
        plan_digest=digest,
        pipeline=pipeline,
        share=share,
        pack=np.arange(plan.packs),
        degree=plan.pack_degree,
        starts=plan.pack_offsets[:-1].astype(np.int64),
        counts=counts_between(plan.pack_offsets).astype(np.int64),
        samples=find(np.arange(len(plan.pack_samples))) if now else FoundSamples(find),
    )


def decode_work(plan: StepPlan) -> NDArray[np.int64]:
    """A stand-in for each pack's decode seconds, in tokens: int64[P].

    Encoder tokens are pixels and samples of sound, which dominate decoding; text is cheap.
    """
    encoded = np.bincount(
        plan.item_sample, weights=plan.item_encoder_tokens, minlength=len(plan.sample_ids)
    )
    sample_work = plan.sample_tokens + ENCODER_TOKEN_WORK * encoded
    work = np.bincount(plan.pack_of_sample, weights=sample_work, minlength=plan.packs)
    return work.astype(np.int64)
