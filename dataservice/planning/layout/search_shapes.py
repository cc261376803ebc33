"""Every shape that the search tries: TP, PP, virtual stages, encoders' place, and tokens."""

from collections.abc import Iterator
from itertools import product

from dataservice.planning.layout.replica import Parallel, Place
from dataservice.planning.layout.task import LayoutTask

MICROBATCH_TOKENS = (2048, 4096, 8192, 16_384, 32_768, 65_536)
VIRTUAL_STAGES = (1, 2)


def shapes(task: LayoutTask) -> Iterator[tuple[Parallel, int]]:
    """Every parallelism, with every size of a microbatch."""
    longest = task.longest_tokens
    for parallel in parallels(task):
        for tokens in MICROBATCH_TOKENS:
            if longest <= tokens * parallel.replicas:
                yield parallel, tokens
            if tokens >= longest:
                break  # a larger one only fills the pipeline worse


def parallels(task: LayoutTask) -> Iterator[Parallel]:
    """Every parallelism that divides the GPUs, with every place of encoders."""
    layers, gpus = task.model.decoder.layers, task.group.gpus
    stages = [p for p in range(1, layers + 1) if p & (p - 1) == 0 and gpus % p == 0]
    for ranks, pipeline, virtual in product(task.tensor_ranks, stages, VIRTUAL_STAGES):
        if gpus % (ranks * pipeline) or virtual * pipeline > layers:
            continue
        if pipeline == 1 and virtual > 1:
            continue
        for place in _places(task, ranks, pipeline, virtual):
            yield Parallel(
                tensor_ranks=ranks,
                pipeline_stages=pipeline,
                virtual_stages=virtual,
                replicas=gpus // (ranks * pipeline),
                encoder_stage=place,
            )


def _places(task: LayoutTask, ranks: int, pipeline: int, virtual: int) -> Iterator[Place]:
    """Where encoders may run. One stage is the first; there are bubbles in it where its ranks
    communicate."""
    if pipeline == 1 or not task.model.encoders:
        yield "first"
    for place in task.places if task.model.encoders else ():
        if pipeline == 1 and (place != "bubbles" or ranks == 1):
            continue
        if place != "own" or virtual == 1:
            yield place


def shape_words(parallel: Parallel, tokens: int) -> str:
    """A shape, as an error names it."""
    return (
        f"TP {parallel.tensor_ranks}, PP {parallel.pipeline_stages}, {parallel.virtual_stages} "
        f"virtual stages, encoders {parallel.encoder_stage}, {tokens:,} tokens a microbatch"
    )
