"""Streams of samples: media files with a conversation about them, or text alone.

Sample k of a stream depends only on the seed, the stream's name and k. Its kind follows repeating
patterns instead of random draws, so that every kind occurs in a small corpus too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from demo import dialogue, media, workloads
from demo.dialogue import Json, Turn
from demo.language import Language

_IMAGE_EXTENSIONS = ("jpg", "png", "webp", "jpg", "gif", "jpg", "png", "jpg", "webp", "jpg", "png")
_AUDIO_EXTENSIONS = ("wav", "flac", "mp3", "wav", "flac", "mp3", "ogg")
_DIALECTS = ("llava", "openai", "llava", "sharegpt", "llava")
_TEXT_TAIL_SHARE = 0.15
_VIDEO_TAIL_SHARE = 0.04


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One training example before it is written down.

    `media` are (extension, file) pairs in the order of the placeholders in `turns`; `document`
    is the whole of a plain-text sample, which has neither.
    """

    key: str
    media: tuple[tuple[str, bytes], ...] = ()
    turns: tuple[Turn, ...] = ()
    document: str | None = None
    dialect: str = "openai"

    def record(self) -> Json:
        """The sample's text as JSON, in its dialect."""
        if self.document is not None:
            return {"id": self.key, "text": self.document}
        return {"id": self.key, **dialogue.DIALECTS[self.dialect](self.turns)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A stream's source of randomness: one language, and a name that gives each sample a seed of
    its own."""

    language: Language
    seed: int
    name: str

    def rng(self, index: int) -> Random:
        """The generator of sample `index`."""
        return Random(f"{self.seed}/{self.name}/{index}")


def single_images(stream: Stream, count: int) -> Iterator[Sample]:
    """`count` samples of one web-sized image each."""
    for index in range(count):
        rng = stream.rng(index)
        yield _image_sample(stream, rng, index, [workloads.image_size_px(rng)])


def images(stream: Stream, count: int) -> Iterator[Sample]:
    """As `single_images`, but every seventh has 2–5 images, and a tenth of these are large."""
    for index in range(count):
        rng = stream.rng(index)
        many = rng.randint(2, 5) if index % 7 == 3 else 1
        large = index % 70 == 10
        draw = workloads.large_image_size_px if large else workloads.image_size_px
        yield _image_sample(stream, rng, index, [draw(rng) for _ in range(many)])


def clips(stream: Stream, count: int) -> Iterator[Sample]:
    """`count` samples of one video (the even ones) or one sound; a few videos are very long."""
    tail = _spread(workloads.TAIL_VIDEO_S, max(1, round(_VIDEO_TAIL_SHARE * count / 2)), count // 2)
    for index in range(count):
        rng = stream.rng(index)
        if index % 2:
            yield _audio_sample(stream, rng, index)
        else:
            yield _video_sample(stream, rng, index, tail.get(index // 2))


def texts(stream: Stream, count: int) -> Iterator[Sample]:
    """`count` documents and chats, three to two; the corpus's longest samples are among them."""
    tail = _spread(workloads.TAIL_DOCUMENT_TOKENS, max(4, round(_TEXT_TAIL_SHARE * count)), count)
    for index in range(count):
        rng, key = stream.rng(index), _key(index)
        tokens = round(tail.get(index) or workloads.document_tokens(rng))
        if index % 5 in (1, 4):
            turns = dialogue.chat(rng, stream.language, tokens)
            yield Sample(key=key, turns=tuple(turns))
        else:
            words = round(tokens / dialogue.TOKENS_PER_WORD)
            yield Sample(key=key, document=stream.language.document(rng, words))


def _image_sample(
    stream: Stream, rng: Random, index: int, sizes_px: list[tuple[int, int]]
) -> Sample:
    scenes = [media.draw_scene(rng) for _ in sizes_px]
    files = []
    for place, (scene, size_px) in enumerate(zip(scenes, sizes_px, strict=True)):
        extension = _IMAGE_EXTENSIONS[(index + place) % len(_IMAGE_EXTENSIONS)]
        files.append((extension, media.encode_image(scene, size_px, extension, rng)))
    return _sample_about("image", [str(scene) for scene in scenes], files, stream, rng, index)


def _video_sample(stream: Stream, rng: Random, index: int, tail_s: float | None) -> Sample:
    duration_s = tail_s or workloads.video_s(rng)
    side_px = 112 if tail_s else rng.choice((64, 80, 96, 112))
    frames_per_s = 4 if tail_s else rng.choice((4, 6, 8))
    scene, direction = media.draw_scene(rng), rng.choice(media.DIRECTIONS)
    file = media.encode_video(
        scene,
        direction,
        side_px=side_px,
        frames=round(duration_s * frames_per_s),
        frames_per_s=frames_per_s,
        rng=rng,
    )
    truth = f"{scene} that moves {direction}"
    return _sample_about("video", [truth], [("mp4", file)], stream, rng, index)


def _audio_sample(stream: Stream, rng: Random, index: int) -> Sample:
    melody, duration_s = media.draw_melody(rng), workloads.speech_s(rng)
    extension = _AUDIO_EXTENSIONS[index // 2 % len(_AUDIO_EXTENSIONS)]
    file = media.encode_audio(melody, duration_s, extension, rng)
    return _sample_about("audio", [str(melody)], [(extension, file)], stream, rng, index)


def _sample_about(
    kind: str,
    truths: list[str],
    files: list[tuple[str, bytes]],
    stream: Stream,
    rng: Random,
    index: int,
) -> Sample:
    tokens = workloads.answer_tokens(rng)
    return Sample(
        key=_key(index),
        media=tuple(files),
        turns=tuple(dialogue.about(kind, truths, rng, stream.language, tokens)),
        dialect=_DIALECTS[index % len(_DIALECTS)],
    )


def _key(index: int) -> str:
    return f"{index:06d}"


def _spread(values: tuple[float, ...], wanted: int, places: int) -> dict[int, float]:
    """`wanted` of the `values`, repeated if necessary, at even distances over `places`."""
    return {int((k + 0.5) * places / wanted): values[k % len(values)] for k in range(wanted)}
