"""The runtime inside a rank: trains a rank shard, with the gradients of the unbalanced run."""

from trainer_client.notices import SlowAttention
from trainer_client.runtime.agreement import check_same_plan
from trainer_client.runtime.block_attention import Kernel
from trainer_client.runtime.bubble_schedule import BubbleSchedule, EncoderAction, spread_encoders
from trainer_client.runtime.bubble_text import read_bubbles
from trainer_client.runtime.encoder_cut import EncoderCut
from trainer_client.runtime.encoder_runs import LayeredEncoders
from trainer_client.runtime.exchange import exchange_features, scatter_rows
from trainer_client.runtime.faults import (
    GroupFormationError,
    GroupPoolError,
    LayoutError,
    PeerError,
    PlanMismatchError,
    RuntimeFault,
    TransportMismatchError,
)
from trainer_client.runtime.gradients import (
    DdpReduction,
    ExpertReduction,
    FsdpReduction,
    GradientReduction,
    SumReduction,
)
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.linear_loss import LinearLogits, linear_cross_entropy
from trainer_client.runtime.loss import global_loss_tokens, sum_gradients, token_weighted_loss
from trainer_client.runtime.peers import PeerGroup
from trainer_client.runtime.pipeline_mesh import PipelineMesh, place_in_mesh
from trainer_client.runtime.pipeline_parallel import (
    PipelineResult,
    run_pipeline_step,
    sum_of_stages,
)
from trainer_client.runtime.pipeline_schedule import (
    Action,
    PipelineSchedule,
    one_forward_one_backward,
)
from trainer_client.runtime.pipeline_stage import HiddenStates, LaterChunk
from trainer_client.runtime.pipeline_timeline import EncoderSpan, Timeline, gantt, simulate
from trainer_client.runtime.ring_attention import PackedAttention, ring_attention
from trainer_client.runtime.stage_layout import EncoderStage, Recompute, StageLayout, recomputed
from trainer_client.runtime.step import (
    MultimodalModel,
    evaluate_step,
    forward_microbatch,
    run_step,
)
from trainer_client.runtime.step_result import StepResult
from trainer_client.runtime.trace import Trace, join_traces, traced
from trainer_client.runtime.wave_features import Features

__all__ = [
    "Action",
    "BubbleSchedule",
    "DdpReduction",
    "EncoderAction",
    "EncoderCut",
    "EncoderSpan",
    "EncoderStage",
    "ExpertReduction",
    "Features",
    "FsdpReduction",
    "GradientReduction",
    "GroupFormationError",
    "GroupPool",
    "GroupPoolError",
    "HiddenStates",
    "Kernel",
    "LaterChunk",
    "LayeredEncoders",
    "LayoutError",
    "LinearLogits",
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
    "SumReduction",
    "Timeline",
    "Trace",
    "TransportMismatchError",
    "check_same_plan",
    "evaluate_step",
    "exchange_features",
    "forward_microbatch",
    "gantt",
    "global_loss_tokens",
    "join_traces",
    "linear_cross_entropy",
    "one_forward_one_backward",
    "place_in_mesh",
    "read_bubbles",
    "recomputed",
    "ring_attention",
    "run_pipeline_step",
    "run_step",
    "scatter_rows",
    "simulate",
    "spread_encoders",
    "sum_gradients",
    "sum_of_stages",
    "token_weighted_loss",
    "traced",
]
