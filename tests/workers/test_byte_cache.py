"""Bytes that one process of a worker has read, others find: ahead, in a slot, for own code."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataservice.core.ports import SampleDecoder, SampleReader
from dataservice.core.sample import DecodedSample, MediaBlob, RawSample
from dataservice.workers.kept_files import CacheSpec
from dataservice.workers.sample_pipelines import PipelineFactory
from tests.workers.trouble import an_order, hosted


class FarShelf(SampleReader):
    """Notes what it fetches."""

    def __init__(self, folder, kept):
        self.folder, self.kept = Path(folder), kept

    def read(self, ref):
        data = self.kept.find(ref.key, 1000) if self.kept else None
        if data is None:
            with (self.folder / "fetched").open("a") as note:
                note.write(ref.key)
            data = bytes([ref.sample_id]) * 1000
            if self.kept:
                self.kept.keep(ref.key, data)
        media = (MediaBlob(kind="image", name="a.jpg", data=data),)
        return RawSample(key=ref.key, record={}, media=media)


class Codec(SampleDecoder):
    pad_token_id = 0

    def decode(self, raw, planned, epoch=None, places=()):
        ids = np.arange(planned.llm_tokens, dtype=np.int32)
        item = np.full(planned.items[0].shape, raw.media[0].data[0], np.uint8)
        return DecodedSample(input_ids=ids, labels=-ids, items=(item,))


def shelf_of(pipeline, ranges_of=None):
    plain = json.loads(pipeline)
    return FarShelf(plain["folder"], ranges_of(plain["team"]) if ranges_of else None)


def codec_of(_pipeline):
    return Codec()


def far(pipeline):
    return ["src"] if json.loads(pipeline)["far"] else []


def owner_of(pipeline):
    return json.loads(pipeline)["owner"]


FACTORY = PipelineFactory(
    reader_for=shelf_of, decoder_for=codec_of, far_sources=far, code_owner=owner_of
)


@pytest.fixture
def spec(tmp_path):
    return CacheSpec(folder=str(tmp_path / "cache"), limit_bytes=2**30, key="ab" * 32)


async def delivered(host, folder, pack, *, is_far=True, team="a", owner=None):
    order = an_order(folder, ["a", "b", "c"], pack=pack, images=1)
    plain = {"folder": str(folder), "far": is_far, "team": team, "owner": owner}
    receipt = await host.prepare(replace(order, pipeline=json.dumps(plain)))
    assert receipt.bad_samples == ()
    return receipt.sample_digests


async def test_what_was_read_ahead_is_found_ahead_in_a_slot_and_for_a_teams_code(spec, tmp_path):
    fetched = tmp_path / "fetched"
    async with hosted(FACTORY, ranges=spec) as host:
        first = await delivered(host, tmp_path, 0)
        stats = host.stats()
        assert (stats.ranges_found, stats.ranges_missed) == (0, 3)
        assert await delivered(host, tmp_path, 1) == first
        assert await delivered(host, tmp_path, 2, is_far=False) == first
        assert await delivered(host, tmp_path, 3, is_far=False, owner="a") == first
        assert sorted(fetched.read_text()) == ["a", "b", "c"]
        stats = host.stats()
        assert (stats.ranges_found, stats.range_bytes_found) == (6, 6000)
        assert await delivered(host, tmp_path, 4, team="b") == first
        assert len(fetched.read_text()) == 6
    async with hosted(FACTORY) as host:
        assert await delivered(host, tmp_path, 5) == first
        assert (host.stats().ranges_found, host.stats().ranges_missed) == (0, 0)
