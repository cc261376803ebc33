"""A small model and a node of four GPUs, for layouts that are searched in seconds."""

from dataservice.planning.layout.cluster import Device, NodeGroup
from dataservice.planning.layout.model import Decoder, Encoder, ModelDescription, Projector

VISION = Encoder(
    layers=6,
    hidden_size=1024,
    heads=16,
    ffn_size=4096,
    input_size=588,
    tokens_per_row=4.0,
    projector=Projector(widths=(4096, 2048)),
)
DECODER = Decoder(
    layers=12, hidden_size=2048, heads=16, kv_heads=4, ffn_size=8192, gated=True, vocabulary=32_000
)
MODEL = ModelDescription(name="small", decoder=DECODER, encoders=(VISION,))


def nodes(memory_bytes: float, count: int = 1) -> NodeGroup:
    return NodeGroup(
        nodes=count,
        gpus_per_node=4,
        device=Device(peak_flops=1e15, memory_bytes=memory_bytes, memory_bytes_per_s=3e12),
        inside_bytes_per_s=400e9,
        between_bytes_per_s=50e9,
    )
