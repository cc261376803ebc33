"""What was decoded before is found again, by content and team, and is the same byte by byte."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataservice.core.ports import SampleDecoder, SampleReader
from dataservice.core.sample import DecodedSample, MediaBlob, RawSample
from dataservice.workers import kept_files
from dataservice.workers.decoded_cache import CachedDecoder, DecodedCache
from dataservice.workers.kept_files import SALT_BYTES, TAG_BYTES, CacheSpec
from dataservice.workers.sample_pipelines import PipelineFactory
from tests.workers.memory_files import require_same
from tests.workers.trouble import a_sample, an_order, hosted

PLANNED = a_sample(1, "k", images=1).lengths
AT = {"salt": 0, "tag": SALT_BYTES, "first": SALT_BYTES + TAG_BYTES}  # bytes of a file


class Codec(SampleDecoder):
    """Counts what it decodes; its augmentation adds the epoch in place."""

    pad_token_id = 0

    def __init__(self):
        self.decoded = 0

    def decode(self, raw, planned, epoch=None, places=()):
        self.decoded += 1
        ids = np.arange(planned.llm_tokens, dtype=np.int32)
        item = np.full(planned.items[0].shape, raw.media[0].data[0], np.uint8)
        whole = DecodedSample(input_ids=ids, labels=-ids, items=(item,) * len(planned.items))
        return whole if epoch is None else self.augment(raw, whole, epoch)

    def augment(self, raw, decoded, epoch):
        for item in decoded.items:
            item += np.uint8(epoch)
        return decoded


def raw(first=7, **changes):
    media = (MediaBlob(kind="image", name="a.jpg", data=bytes([first]) * 1000),)
    return replace(RawSample(key="k", record={"text": "a"}, media=media), **changes)


@pytest.fixture
def spec(tmp_path):
    return CacheSpec(folder=str(tmp_path / "cache"), limit_bytes=2**30, key="ab" * 32)


def decoder(spec, identity="team a, pipeline 1", codec=None):
    return CachedDecoder(codec or Codec(), DecodedCache(spec), identity)


def files(spec):
    return [*Path(spec.folder).glob("*/*")]


def test_the_next_epoch_and_another_process_find_what_was_decoded(spec):
    codec = Codec()
    one, other = decoder(spec, codec=codec), decoder(spec, codec=codec)
    for epoch in (0, 1, 2):
        for each in (one, other):
            require_same(each.decode(raw(), PLANNED, epoch), Codec().decode(raw(), PLANNED, epoch))
    assert codec.decoded == 1
    assert (one.reused, other.reused) == (2, 3)


@pytest.mark.parametrize(
    "changed",
    [
        {"first": 8},
        {"key": "another"},
        {"record": {"text": "b"}},
        {"piece": 1},
        {"loss_weight": 0.5},
    ],
    ids=str,
)
def test_other_content_is_not_found(spec, changed):
    one = decoder(spec)
    one.decode(raw(), PLANNED)
    one.decode(raw(**changed), PLANNED)
    assert one.reused == 0


def test_another_team_pipeline_or_planned_length_does_not_find_it(spec):
    decoder(spec).decode(raw(), PLANNED)
    other = decoder(spec, identity="team b, pipeline 1")
    other.decode(raw(), PLANNED)
    longer = a_sample(1, "k", tokens=5, images=1).lengths
    mine = decoder(spec)
    mine.decode(raw(), longer)
    assert (other.reused, mine.reused) == (0, 0)


@pytest.mark.parametrize(
    "damage", ["flip", "salt", "tag", "first", "cut", "longer", "empty", "swap", "forged"]
)
def test_a_file_that_is_not_what_was_kept_is_decoded_anew(spec, damage):
    decoder(spec).decode(raw(), PLANNED)
    (path,) = files(spec)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    elif damage in AT:
        data[AT[damage]] ^= 1
    elif damage == "empty":
        data.clear()
    elif damage == "cut":
        del data[-1]
    elif damage == "longer":
        data.append(0)
    elif damage == "swap":  # another sample's whole file under this name
        decoder(spec).decode(raw(first=9), PLANNED)
        (other,) = set(files(spec)) - {path}
        data = other.read_bytes()
    else:  # whoever does not have the key
        forger = decoder(replace(spec, folder=f"{spec.folder}-2", key="cd" * 32))
        forger.decode(raw(), PLANNED)
        (other,) = Path(f"{spec.folder}-2").glob("*/*")
        assert other.name != path.name, "names tell nothing to those without the key"
        data = other.read_bytes()
    path.write_bytes(data)
    again = decoder(spec)
    require_same(again.decode(raw(), PLANNED), Codec().decode(raw(), PLANNED))
    assert again.reused == 0
    require_same(again.decode(raw(), PLANNED), Codec().decode(raw(), PLANNED))
    assert again.reused == 1, "and kept again"


def test_what_is_found_is_read_into_memory_that_is_lent_and_augmented_there(spec):
    decoder(spec).decode(raw(), PLANNED)
    lent = []

    def lend(size_bytes):
        lent.append(np.full(size_bytes, 255, np.uint8))
        return lent[-1]

    one = CachedDecoder(Codec(), DecodedCache(spec), "team a, pipeline 1", lend)
    found = one.decode(raw(), PLANNED, 3)
    require_same(found, Codec().decode(raw(), PLANNED, 3))
    assert all(np.shares_memory(item, lent[0]) for item in found.items)
    one.decode(raw(first=9), PLANNED)
    assert len(lent) == 1, "nothing is lent for what must be decoded"


def test_no_two_files_share_the_key_of_their_mac(spec):
    kept = []
    for _ in range(2):  # the same sample, kept twice
        decoder(spec).decode(raw(), PLANNED)
        (path,) = files(spec)
        kept.append(path.read_bytes())
        path.unlink()
    one, other = kept
    assert one[:SALT_BYTES] != other[:SALT_BYTES]
    assert one[SALT_BYTES:][:TAG_BYTES] != other[SALT_BYTES:][:TAG_BYTES]
    assert one[SALT_BYTES + TAG_BYTES :] == other[SALT_BYTES + TAG_BYTES :]


def test_the_mac_is_the_same_in_however_many_pieces_it_is_made(spec, monkeypatch):
    decoder(spec).decode(raw(), PLANNED)
    monkeypatch.setattr(kept_files, "PIECE_BYTES", 1009)
    one = decoder(spec)
    one.decode(raw(), PLANNED)
    assert one.reused == 1


def test_what_was_used_least_recently_goes_first_and_the_limit_holds(spec):
    one_bytes = 2 * 224 * 224 * 3
    spec = replace(spec, limit_bytes=10 * one_bytes)
    one = decoder(spec)
    for first in range(30):
        one.decode(raw(first), PLANNED)
        one.decode(raw(0), PLANNED)
    assert one.reused == 30, "what is used time and again stays"
    assert sum(path.stat().st_size for path in files(spec)) <= 11 * one_bytes
    one.decode(raw(28), PLANNED)
    assert one.reused == 31


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_cache(spec, tmp_path):
    (tmp_path / "file").touch()
    one = decoder(replace(spec, folder=str(tmp_path / "file" / "cache")))
    for _ in range(2):
        require_same(one.decode(raw(), PLANNED), Codec().decode(raw(), PLANNED))
    assert one.reused == 0


def test_only_this_user_may_read_what_is_kept(spec):
    decoder(spec).decode(raw(), PLANNED)
    (path,) = files(spec)
    assert [each.stat().st_mode & 0o77 for each in (path, path.parent, path.parent.parent)] == [
        0
    ] * 3


# ---- in decoders ---------------------------------------------------------------------------


class Shelf(SampleReader):
    def read(self, ref):
        return raw(first=ref.sample_id, key=ref.key)


class Noting(Codec):
    """Notes what it decodes, and in which process."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def decode(self, raw, planned, epoch=None, places=()):
        (self.folder / f"{raw.key}.{os.getpid()}.{self.decoded}").touch()
        return super().decode(raw, planned, epoch)


def shelf_of(_pipeline):
    return Shelf()


def noting_in(pipeline):
    return Noting(json.loads(pipeline)["folder"])


def team_of(pipeline):
    return json.loads(pipeline).get("team", "")


def owner_of(pipeline):
    return json.loads(pipeline).get("owner")


FACTORY = PipelineFactory(
    reader_for=shelf_of, decoder_for=noting_in, identity=team_of, code_owner=owner_of
)


async def delivered(host, folder, pack, **pipeline):
    order = an_order(folder, ["a", "b", "c"], pack=pack, images=1)
    order = replace(order, pipeline=json.dumps({"folder": str(folder), **pipeline}))
    receipt = await host.prepare(order)
    assert receipt.bad_samples == ()
    return receipt.sample_digests


async def test_two_jobs_of_a_team_decode_once_and_get_what_they_get_without_a_cache(spec, tmp_path):
    async with hosted(FACTORY, cache=spec) as host:
        first = await delivered(host, tmp_path, 0)
        assert len([*tmp_path.glob("[abc].*")]) == 3
        assert await delivered(host, tmp_path, 1, url="another job's") == first
        assert len([*tmp_path.glob("[abc].*")]) == 3
        assert host.stats().samples_reused == 3
        assert await delivered(host, tmp_path, 2, team="b") == first
        assert host.stats().samples_reused == 3
    async with hosted(FACTORY, cache=spec) as host:
        assert await delivered(host, tmp_path, 3) == first
        assert host.stats().samples_reused == 3, "of a worker of before"
    async with hosted(FACTORY) as host:
        assert await delivered(host, tmp_path, 4) == first
        assert host.stats().samples_reused == 0


async def test_a_process_with_a_teams_own_code_uses_no_cache(spec, tmp_path):
    async with hosted(FACTORY, cache=spec) as host:
        await delivered(host, tmp_path, 0, owner="a")
        await delivered(host, tmp_path, 1, owner="a", more=1)
        assert host.stats().samples_reused == 0
    assert files(spec) == []
