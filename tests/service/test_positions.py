"""M-RoPE over a real service: what a rank gets is what the family's own code works out."""

import threading
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
import yaml

from dataservice.decode.tokenizer import load_tokenizer
from tests.service.support import dataservice, job_file, serving
from tests.trainer_client.rope_index import rope_index_of
from trainer_client import PositionsNotRead, ShardDataset

pytestmark = pytest.mark.long

RANKS, STEPS = 3, 6
IMAGE, CLIP = 1, 2


@pytest.fixture(
    scope="module", params=[pytest.param("qwen2_vl", marks=pytest.mark.full), "qwen2_5_vl"]
)
def served(request, corpus, tmp_path_factory):
    """A service whose job is of this family, and the ids of its tokens for images and clips."""
    home = tmp_path_factory.mktemp(request.param)
    plain = yaml.safe_load((corpus / "job.yaml").read_text())["pipeline"]
    pipeline = {**plain, "positions": "auto"}
    pipeline["vision"] = {**plain["vision"], "kind": request.param}
    own = {"pipeline": pipeline, "index": str(home / "index")}
    shared = job_file(corpus, home, **own)
    whole = job_file(corpus, home, job="whole", plan={"memory_tokens": 16384}, **own)
    tokenizer = load_tokenizer(str(corpus / "tokenizer"))
    pads = [tokenizer.id_of("<|image_pad|>"), tokenizer.id_of("<|video_pad|>")]
    with serving(home) as service:
        dataservice("index", str(shared))
        for file in (shared, whole):
            service.cli("job", "submit", str(file))
        yield request.param, service.address, pads


def steps_of(address, rank, into):
    with ShardDataset(address, job="job", rank=rank, world_size=RANKS, timeout_s=60) as dataset:
        for shard in dataset:
            into.append([(mb, mb.positions.numpy()) for mb in shard.microbatches if not mb.idle])
            if shard.step == STEPS - 1:
                break


def test_positions_are_those_that_the_family_computes_from_the_tokens(served):
    family, address, pads = served
    steps = [[] for _ in range(RANKS)]
    threads = [
        threading.Thread(target=steps_of, args=(address, rank, steps[rank]))
        for rank in range(RANKS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    get_rope_index, seen = rope_index_of(family), Counter()
    for step in range(STEPS):
        packs = {}  # a pack's members together hold its tokens
        for rank in range(RANKS):
            for mb, positions in steps[rank][step]:
                packs.setdefault(mb.pack, []).append((mb, positions))
        for members in packs.values():
            seen[len(members)] += 1
            check_pack(family, get_rope_index, members, pads, seen)
    assert seen["images"] > 4
    assert seen["clips"] > 1
    assert max(key for key in seen if isinstance(key, int)) > 1  # shared packs were among them


def check_pack(family, get_rope_index, members, pads, seen):
    first, _ = members[0]
    bounds, degree, items = first.cu_seqlens.numpy(), len(first.cp_group), first.items
    ids = np.zeros(bounds[-1], dtype=np.int64)
    found = np.zeros((3, bounds[-1]), dtype=np.int64)
    for mb, positions in members:
        assert len(mb.cp_group) == degree == len(members)
        np.testing.assert_array_equal(mb.items.start, items.start)
        rows = whole_rows(bounds, degree, mb.cp_rank)
        ids[rows], found[:, rows] = mb.input_ids.numpy(), positions
    for sample, length in enumerate(first.lengths.tolist()):
        start, end = int(bounds[sample]), int(bounds[sample]) + length
        own = ids[start:end]
        types = IMAGE * (own == pads[0]) + CLIP * (own == pads[1])
        of = [k for k in range(len(items)) if start <= items.start[k] < end]
        vision = [k for k in of if items.modality[k] == 0]
        assert sum(items.tokens[vision]) == np.count_nonzero(types)
        grids = {kind: [k for k in vision if items.kind[k] == kind - 1] for kind in (IMAGE, CLIP)}
        seen["images"] += len(grids[IMAGE])
        seen["clips"] += len(grids[CLIP])
        spans = torch.tensor(items.seconds_per_patch[grids[CLIP]], dtype=torch.float32)
        more = {"second_per_grid_ts": spans} if family == "qwen2_5_vl" else {}
        expected, _ = get_rope_index(
            input_ids=torch.from_numpy(own)[None],
            mm_token_type_ids=torch.from_numpy(types)[None],
            image_grid_thw=torch.from_numpy(items.grid[grids[IMAGE], :3]),
            video_grid_thw=torch.from_numpy(items.grid[grids[CLIP], :3]),
            **more,
        )
        np.testing.assert_array_equal(found[:, start:end], expected[:, 0].numpy())


def whole_rows(bounds, degree, member):
    """The rows of the pack that a member holds, written down once more as chunks of ranges."""
    if degree == 1:
        return np.arange(bounds[-1])
    rows = []
    for start, end in pairwise(bounds):
        chunks = np.split(np.arange(start, end), 2 * degree)
        rows += [chunks[member], chunks[2 * degree - 1 - member]]
    return np.concatenate(rows)


def test_a_loop_that_gives_such_a_model_token_counts_is_refused(served):
    _, address, _ = served
    with ShardDataset(address, job="whole", rank=0, world_size=1, timeout_s=60) as dataset:
        for shard in dataset:
            with_grid = [mb for mb in shard.microbatches if mb.items.grid.any()]
            for mb in shard.microbatches:
                mb.position_ids.sum()
            if with_grid:
                break
            dataset.commit(shard.step)
        with pytest.raises(PositionsNotRead, match=r"mb\.positions .*`positions: sequence`"):
            dataset.commit(shard.step)


def test_one_that_works_positions_out_itself_is_not(served):
    _, address, _ = served
    with ShardDataset(address, job="whole", rank=0, world_size=1, timeout_s=60) as dataset:
        for shard in dataset:
            dataset.commit(shard.step)
            if shard.step == 2:
                break
