"""The in-rank runtime: executes a rank shard with the gradients of the unbalanced run."""

from trainer_client.runtime.errors import (
    GroupFormationError,
    GroupPoolError,
    LayoutError,
    PeerError,
    PlanMismatchError,
    RuntimeFault,
)
from trainer_client.runtime.exchange import exchange_features, scatter_rows
from trainer_client.runtime.gradients import FsdpReduction, GradientReduction
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.loss import global_loss_tokens, sum_gradients, token_weighted_loss
from trainer_client.runtime.peers import PeerGroup
from trainer_client.runtime.ring_attention import PackedAttention, ring_attention
from trainer_client.runtime.step import (
    Features,
    MultimodalModel,
    StepResult,
    check_same_plan,
    forward_microbatch,
    run_step,
)

__all__ = [
    "Features",
    "FsdpReduction",
    "GradientReduction",
    "GroupFormationError",
    "GroupPool",
    "GroupPoolError",
    "LayoutError",
    "MultimodalModel",
    "PackedAttention",
    "PeerError",
    "PeerGroup",
    "PlanMismatchError",
    "RuntimeFault",
    "StepResult",
    "check_same_plan",
    "exchange_features",
    "forward_microbatch",
    "global_loss_tokens",
    "ring_attention",
    "run_step",
    "scatter_rows",
    "sum_gradients",
    "token_weighted_loss",
]
