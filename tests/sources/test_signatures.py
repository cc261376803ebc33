"""First bytes: what real encoders write is known, and other data are not taken for media."""

import json
import pickle

import numpy as np
import pytest

from dataservice.sources.formats.signatures import HEAD_BYTES, signature_kind
from tests.decode.files import Files

WRITTEN = {
    "image": [
        *(Files.image(20, 10, f) for f in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")),
        Files.image(20, 10, "JPEG2000"),
    ],
    "video": [
        Files.video(3),
        Files.video(3, container="mov"),
        Files.video(3, container="matroska"),
        Files.video(3, container="webm", codec="libvpx-vp9"),
        Files.video(3, container="avi"),
        Files.video(3, container="mpeg", codec="mpeg1video", rate=25),
        Files.video(3, container="flv"),
    ],
    "audio": [
        Files.audio(0.2),
        Files.audio(0.2, container="flac", codec="flac"),
        Files.audio(0.2, container="ogg", codec="libopus", rate=48_000),
        Files.audio(0.2, container="mp3", codec="libmp3lame"),
        Files.audio(0.2, container="ipod", codec="aac"),
        Files.audio(0.2, container="aiff", codec="pcm_s16be"),
    ],
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_files_of_real_encoders_are_known_by_their_first_bytes(kind):
    assert [signature_kind(data[:HEAD_BYTES]) for data in WRITTEN[kind]] == [kind] * len(
        WRITTEN[kind]
    )


def test_other_data_are_no_media():
    rng = np.random.default_rng(0)
    for k in range(20_000):
        assert signature_kind(rng.bytes(HEAD_BYTES if k % 2 else k % HEAD_BYTES)) is None
    for value in (
        b"",
        b"BM",
        b"BMW is a car maker of Munich",
        b"II",
        b"RIFF",
        b"ftyp",
        b"%PDF-1.7",
    ):
        assert signature_kind(value) is None
    for data in (json.dumps({"a": 1}).encode(), pickle.dumps([1]), np.ones(9).tobytes()):
        assert signature_kind(data[:HEAD_BYTES]) is None
