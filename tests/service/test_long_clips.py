"""A clip that several ranks encode: each fetches its own frames, and together they are the clip."""

import pytest

from dataservice.jobs.setup import job_records, open_job
from tests.service.slow_vision import IMPORT_PATH
from tests.service.small import CLIPS, indexed_job, make_corpus
from tests.service.support import Ranks, decoder_of_job, serving

pytestmark = pytest.mark.long

RANKS = 3


VISIONS = {
    "a built-in family": {"kind": "qwen2_5_vl", "video_min_pixels": 3136, "video_fps": 8.0},
    # Of the operator's own: the job says that the encoder takes pairs of frames.
    "code of ones own": {"kind": "custom", "name": IMPORT_PATH, "unit_frames": 2},
}


@pytest.fixture(scope="module", params=VISIONS)
def job(request, tmp_path_factory):
    """Clips of 12 pairs of frames among short texts; patches are dear."""
    return indexed_job(
        make_corpus(tmp_path_factory.mktemp("clips")),
        sources=[
            {"name": "clips", "format": "jsonl", "url": "clips/clips.jsonl"},
            {"name": "texts", "format": "jsonl", "url": "texts/*.jsonl"},
        ],
        pipeline={"tokenizer": "tokenizer", "vision": VISIONS[request.param]},
        plan={"memory_tokens": 512, "cost": {"vision": {"linear_s_per_token": 1e-2}}},
    )


def trained(job, home):
    """What each rank received in an epoch, by step."""
    with serving(home) as service:
        service.cli("job", "submit", str(job))
        ranks = Ranks(service.address, RANKS).start().join()
        service.stop()
    return ranks


def test_each_rank_fetches_its_own_frames_of_a_long_clip(job, tmp_path):
    ranks = trained(job, tmp_path)
    decode = decoder_of_job(
        open_job(job_records(job.read_text(), str(job.parent))[0], custom_processors={})
    )
    clips = pieces = 0
    for step in ranks.digests:
        received, wanted = [], []
        for shards in ranks.shards.values():
            for microbatch in shards[step].microbatches:
                if microbatch.cp_rank == 0:
                    for sample in microbatch.sample_ids.tolist():
                        for clip in decode(sample).items:
                            clips += 1
                            wanted += [frame.tobytes() for frame in clip]
                    # Positions are of the whole clip, wherever its frames are encoded.
                    assert all(t == 12 for t in microbatch.items.grid[:, 0].tolist())
                if microbatch.vision is not None:
                    vision = microbatch.vision
                    pieces += len(vision.items)
                    for clip, grid in zip(vision.items, vision.notes.grid.tolist(), strict=True):
                        assert len(clip) == 2 * grid[0] <= 24
                        received += [frame.numpy().tobytes() for frame in clip]
        assert sorted(received) == sorted(wanted)
    assert clips == CLIPS
    assert pieces >= RANKS * clips
