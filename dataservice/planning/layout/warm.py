"""Compile the kernels that no step needs: of a layout, by a search over two small models, so that
no user's first layout waits for a compiler, and of planners that stand alone. Part of the set-up: a
service needs neither them nor the libraries that come with them."""

import numpy as np

from dataservice.core.sample import LengthTable, Modality
from dataservice.planning.compose import StepSamples
from dataservice.planning.layout.before_after import time_before_after
from dataservice.planning.layout.bubble_inputs import BackboneTimes, EncoderTimes, KernelTimes
from dataservice.planning.layout.bubbles import schedule_bubbles
from dataservice.planning.layout.cluster import Device, NodeGroup
from dataservice.planning.layout.model import Decoder, Encoder, ModelDescription, Projector
from dataservice.planning.layout.module_layout import lay_out_modules, planned_s
from dataservice.planning.layout.search import LayoutTask, search_layout
from dataservice.planning.standalone.conv_loads import balance_conv
from dataservice.planning.standalone.node_balance import balance_nodewise
from dataservice.planning.standalone.node_exchange import compose_exchange
from dataservice.planning.standalone.node_rearrange import rearrange_nodewise
from dataservice.planning.standalone.padded_loads import balance_padded

SAMPLES = 24
# With room for everything; and with so little that layers recompute.
MEMORY_BYTES = (80e9, 1.2e9)


def warm_layouts() -> None:
    """Lay a few layers over four GPUs, and balance a few loads. Half a minute at first, then less
    than a second."""
    encoder = Encoder(
        layers=4,
        hidden_size=256,
        heads=4,
        ffn_size=1024,
        tokens_per_row=4.0,
        projector=Projector(widths=(1024, 512)),
    )
    decoder = Decoder(layers=24, hidden_size=512, heads=4, ffn_size=2048, vocabulary=8_000)
    model = ModelDescription(name="small", decoder=decoder, encoders=(encoder,))
    for memory_bytes in MEMORY_BYTES:
        device = Device(peak_flops=1e15, memory_bytes=memory_bytes, memory_bytes_per_s=3e12)
        group = NodeGroup(
            nodes=1,
            gpus_per_node=4,
            device=device,
            inside_bytes_per_s=4e11,
            between_bytes_per_s=5e10,
        )
        task = LayoutTask(model=model, group=group, batches=(_samples(),))
        time_before_after(task, search_layout(task))
        if memory_bytes == MEMORY_BYTES[0]:
            planned_s(task, lay_out_modules(task.model, group, task.batches))

    _warm_bubbles()
    _warm_standalone()


def _warm_bubbles() -> None:
    layers = KernelTimes(seconds=np.ones((4, 2)), communicates=np.array([False, True]))
    encoder = EncoderTimes(name="any", forward={1: layers}, backward={1: layers})
    backbone = BackboneTimes(
        forward=layers, backward=layers, microbatches=4, pipeline_parallel=2, virtual_stages=2
    )
    schedule_bubbles(backbone, [encoder])


def _warm_standalone() -> None:
    loads = (np.arange(97, dtype=np.int64) * 7919) % 89 + 1
    balance_padded(loads, 8, beta=0.1)
    balance_conv(loads, 8, alpha=1.0, lam=0.01)
    home = np.arange(97, dtype=np.int64) % 8
    balance_nodewise(loads, home, loads, 8, 4, tolerance=0.0)
    volume = (np.arange(64, dtype=np.int64) * 7919 % 83).reshape(8, 8)
    rearrange_nodewise(volume, 4, method="search")
    compose_exchange(home, home[::-1], loads)


def _samples() -> StepSamples:
    """Texts of very different lengths, and an image in each, some of which may be cut."""
    tokens = (400 + 61 * np.arange(SAMPLES) ** 2 % 4_000).astype(np.int32)
    lengths = LengthTable(
        llm_tokens=tokens,
        loss_tokens=tokens // 2,
        item_offsets=np.arange(SAMPLES + 1, dtype=np.int64),
        item_modality=np.full(SAMPLES, Modality.VISION, np.int8),
        item_encoder_tokens=(256 + 512 * (np.arange(SAMPLES) % 4)).astype(np.int32),
        item_llm_tokens=np.full(SAMPLES, 64, np.int32),
        item_position=np.full(SAMPLES, 4, np.int32),
        item_frames=(np.arange(SAMPLES) % 4 * 4).astype(np.int32),
    )
    return StepSamples(
        sample_ids=np.arange(SAMPLES, dtype=np.int64),
        epoch=np.zeros(SAMPLES, np.int32),
        lengths=lengths,
        unit_frames=2,
    )
