"""Draw docs/layout.svg anew: `python -m tools.layout_picture`, after a change of what is drawn."""

from pathlib import Path

from benchmarks import workloads
from dataservice.jobs.layout_files import read_model
from dataservice.jobs.pipeline_drawing import draw_before_after
from dataservice.planning.layout.before_after import time_before_after
from dataservice.planning.layout.cluster import Device, NodeGroup
from dataservice.planning.layout.search import LayoutTask, search_layout

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "layout.svg"
MODEL, SAMPLES = "omnibal-internvit-6b-internlm2-20b", 20
NODES = NodeGroup(
    nodes=2,
    device=Device(name="H100", peak_flops=9.89e14, memory_bytes=8e10, memory_bytes_per_s=3.35e12),
    inside_bytes_per_s=4.5e11,
    between_bytes_per_s=5e10,
)


def main() -> None:
    """One step of a few samples, so that every microbatch can be seen."""
    batch = workloads.step_samples(workloads.vlm_sft(SAMPLES, 0))
    task = LayoutTask(model=read_model(MODEL), group=NODES, batches=(batch,))
    compared = time_before_after(task, search_layout(task))
    words = f"one step, {SAMPLES} samples"
    draw_before_after([PICTURE], task, compared, step_words=words)
    print(f"wrote {PICTURE.relative_to(PICTURE.parents[1])}, {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
