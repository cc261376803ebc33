"""The runtime inside a rank: trains a rank shard, with the gradients of the unbalanced run."""

from trainer_client.notices import SlowAttention
from trainer_client.runtime.exchange import exchange_features, scatter_rows
from trainer_client.runtime.faults import (
    GroupFormationError,
    GroupPoolError,
    LayoutError,
    PeerError,
    PlanMismatchError,
    RuntimeFault,
)
from trainer_client.runtime.gradients import FsdpReduction, GradientReduction
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.loss import global_loss_tokens, sum_gradients, token_weighted_loss
from trainer_client.runtime.peers import PeerGroup
from trainer_client.runtime.pipeline_mesh import PipelineMesh, place_in_mesh
from trainer_client.runtime.pipeline_parallel import (
    HiddenStates,
    LaterChunk,
    PipelineResult,
    run_pipeline_step,
)
from trainer_client.runtime.pipeline_schedule import (
    Action,
    PipelineSchedule,
    one_forward_one_backward,
)
from trainer_client.runtime.pipeline_timeline import Timeline, gantt
from trainer_client.runtime.ring_attention import PackedAttention, ring_attention
from trainer_client.runtime.stage_layout import Recompute, StageLayout, recomputed
from trainer_client.runtime.step import (
    Features,
    MultimodalModel,
    StepResult,
    check_same_plan,
    evaluate_step,
    forward_microbatch,
    run_step,
)
from trainer_client.runtime.trace import Trace, join_traces, traced

__all__ = [
    "Action",
    "Features",
    "FsdpReduction",
    "GradientReduction",
    "GroupFormationError",
    "GroupPool",
    "GroupPoolError",
    "HiddenStates",
    "LaterChunk",
    "LayoutError",
    "MultimodalModel",
    "PackedAttention",
    "PeerError",
    "PeerGroup",
    "PipelineMesh",
    "PipelineResult",
    "PipelineSchedule",
    "PlanMismatchError",
    "Recompute",
    "RuntimeFault",
    "SlowAttention",
    "StageLayout",
    "StepResult",
    "Timeline",
    "Trace",
    "check_same_plan",
    "evaluate_step",
    "exchange_features",
    "forward_microbatch",
    "gantt",
    "global_loss_tokens",
    "join_traces",
    "one_forward_one_backward",
    "place_in_mesh",
    "recomputed",
    "ring_attention",
    "run_pipeline_step",
    "run_step",
    "scatter_rows",
    "sum_gradients",
    "token_weighted_loss",
    "traced",
]
