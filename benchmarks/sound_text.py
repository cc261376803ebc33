"""Recordings and texts: `python -m benchmarks.sound_text --out FILE`, two minutes.

30 s of sound at 16 kHz are decoded by the service, by PyAV alone (no samples taken out), by
soundfile and, where it is installed, by miniaudio, whose FLAC skips what is damaged. Texts of 2 KB
and 100 KB become the service's tokens and labels: documents, and chats of four turns that learn
every other one; the peer is `encode_batch_fast` of all the documents at once, on one thread. The
tokenizer is trained on the texts themselves, with Qwen's pattern. All take turns in one run, in a
process that keeps freed memory, as decoders do; times are the processor's.
"""

import argparse
import io
import os
import tempfile
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import av
import numpy as np
import soundfile
from av.audio.stream import AudioStream
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.harness import hardware, publish, side_by_side
from dataservice.core.kept_heap import keep_freed
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.ports import ToDecode
from dataservice.core.sample import DecodedSample, MediaBlob, RawSample, SampleLengths
from dataservice.decode.audio import audio_samples, decode_audio
from dataservice.decode.processors.whisper import WhisperProcessor
from dataservice.decode.sample_pipeline import Pipeline, build_pipeline
from dataservice.decode.spec import PipelineSpec
from dataservice.workers.slots import BATCH_SAMPLES

RATE_HZ, SECONDS = 16_000, 30
FORMATS = {"mp3": "libmp3lame", "flac": "flac"}
TEXTS = {2_000: 200, 100_000: 8}  # characters → how many
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def recording(container: str) -> bytes:
    """A gliding tone under noise, mono."""
    rng, time_s = np.random.default_rng(0), np.arange(SECONDS * RATE_HZ) / RATE_HZ
    wave = 0.3 * np.sin(1400 * time_s * (1 + 0.1 * np.sin(time_s)))
    wave += 0.1 * rng.standard_normal(wave.size) * np.abs(np.sin(3 * time_s))
    pcm = (wave.clip(-1, 1) * 32_767).astype(np.int16)
    frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
    frame.sample_rate = RATE_HZ
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        stream = out.add_stream(FORMATS[container], rate=RATE_HZ, layout="mono")
        assert isinstance(stream, AudioStream)
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return buffer.getvalue()


def sound_ways(data: bytes) -> dict[str, Callable[[], object]]:
    """The ways to decode a recording to float32, by name."""
    blob = MediaBlob(kind="audio", name="recording", data=data)
    samples = audio_samples(blob, DEFAULT_LIMITS)
    chunks = WhisperProcessor().plan(samples)

    def pyav() -> None:
        with av.open(io.BytesIO(data), "r") as container:
            deque(container.decode(audio=0), maxlen=0)

    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: decode_audio(blob, samples, chunks, DEFAULT_LIMITS),
        "PyAV": pyav,
        "soundfile": lambda: soundfile.read(io.BytesIO(data), dtype="float32"),
    }
    try:
        import miniaudio  # type: ignore[import-not-found]

        ways["miniaudio"] = lambda: miniaudio.decode(
            data, output_format=miniaudio.SampleFormat.FLOAT32, nchannels=1, sample_rate=RATE_HZ
        )
    except ImportError:
        pass
    return ways


def words(characters: int) -> str:
    """Text whose words are as unequal as a language's: a token for four characters."""
    rng = np.random.default_rng(1)
    letters = np.array(list("eeeeetttaaaoooiinnsshhrrddlluucmwfgypbvk"))
    known = ["".join(rng.choice(letters, rng.integers(1, 11))) for _ in range(100_000)]
    ranks = rng.zipf(1.2, characters // 4) % len(known)
    ends = rng.choice([" ", " ", " ", " ", " ", " ", ", ", ". ", ".\n", " 17 "], len(ranks))
    return "".join(known[rank] + end for rank, end in zip(ranks, ends, strict=True))[:characters]


def train(text: str, folder: Path) -> Tokenizer:
    """A byte-level tokenizer of 32,000 tokens, in the folder too."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def document(text: str) -> dict[str, object]:
    """A record all of which is learnt."""
    return {"text": text}


def chat(text: str) -> dict[str, object]:
    """A record of four turns, of which every other is learnt."""
    roles, size = ("user", "assistant") * 2, len(text) // 4
    turns = [text[turn * size : (turn + 1) * size] for turn in range(4)]
    said = zip(roles, turns, strict=True)
    return {"messages": [{"role": role, "content": turn} for role, turn in said]}


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The bare library."""
    return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def decode_all(
    pipeline: Pipeline, samples: list[RawSample], planned: list[SampleLengths]
) -> list[DecodedSample]:
    """As a slot does that has texts waiting."""
    made: list[DecodedSample] = []
    for start in range(0, len(samples), BATCH_SAMPLES):
        now = slice(start, start + BATCH_SAMPLES)
        order = [ToDecode(*pair) for pair in zip(samples[now], planned[now], strict=True)]
        made += [finish(()) for finish in pipeline.begin(order)]
    return made


def sound_rows(repeats: int) -> list[str]:
    lines = ["", "| 30 s of | ours | others | over the fastest that was run |", "|---|---|---|---|"]
    for container in FORMATS:
        best = side_by_side(sound_ways(recording(container)), repeats=repeats, most_s=10.0)
        took = {name: 1000 * each.processor_s for name, each in best.items()}
        ours = took.pop("ours")
        others = ", ".join(f"{name} {ms:.1f} ms" for name, ms in took.items())
        ratios = ours / min(took.values()), ours / took["PyAV"]
        lines.append(
            f"| {container} | {ours:.1f} ms | {others} | {ratios[0]:.2f} (PyAV {ratios[1]:.2f}) |"
        )
    return lines


def text_rows(repeats: int) -> list[str]:
    """Tokens a second of the processor, beside `encode_batch_fast`."""
    lines = [
        "",
        "| texts of | encode_batch_fast | documents | chats, half learnt |",
        "|---|---|---|---|",
    ]
    text = words(2_000_000)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train(text, Path(folder))
        pipeline = build_pipeline(PipelineSpec(tokenizer=folder, chat_template="chatml"))
        for size, count in TEXTS.items():
            texts = [text[i * size : (i + 1) * size] for i in range(count)]
            ways: dict[str, Callable[[], object]] = {"bare": partial(ids_of, tokenizer, texts)}
            tokens = {"bare": sum(map(len, ids_of(tokenizer, texts)))}
            for kind, made in (("document", document), ("chat", chat)):
                samples = [RawSample(key=str(i), record=made(one)) for i, one in enumerate(texts)]
                planned = [pipeline.measure(sample) for sample in samples]
                tokens[kind] = sum(lengths.llm_tokens for lengths in planned)
                ways[kind] = partial(decode_all, pipeline, samples, planned)
            best = side_by_side(ways, repeats=repeats, most_s=20.0)
            rate = {name: tokens[name] / each.processor_s / 1e6 for name, each in best.items()}
            cells = (
                f"{rate[k]:.2f} M ({rate[k] / rate['bare']:.2f} ×)" for k in ("document", "chat")
            )
            lines.append(f"| {size:,} characters | {rate['bare']:.2f} M | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    keep_freed(64 * 2**20)
    lines = [
        "# Recordings and texts: time of the processor",
        "",
        f"`python -m benchmarks.sound_text` on {hardware()}; PyAV {av.__version__}.",
        *sound_rows(given.repeats),
        "",
        "Tokens a second of the processor:",
        *text_rows(given.repeats),
    ]
    text = "\n".join(lines) + "\n"
    publish(text, given.out)


if __name__ == "__main__":
    main()
