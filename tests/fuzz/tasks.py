"""What is tried on each case: the oracles. Each returns None when all went as planned, the
text of a deliberate error, or raises when something is wrong."""

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dataservice.core.errors import SampleError, SourceError, SpecError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.orders import PackSample
from dataservice.core.sample import DecodedSample, MediaBlob, RawSample
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.sample_pipeline import Pipeline, build_pipeline
from dataservice.jobs.job_file import job_from_json, read_job
from dataservice.operate.config import read_config
from dataservice.sources.catalog import find_index
from dataservice.sources.checksum import sample_crc32
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index import build_index
from dataservice.sources.length_records import require_sound_lengths
from dataservice.sources.lengths_file import MappedLengths
from dataservice.sources.reader import SourceReader
from dataservice.workers.pack import check_planned_shape
from dataservice.workers.read_and_decode import read_and_decode
from dataservice.workers.sample_pipelines import Pipeline as DecodingPipeline
from tests.decode.files import Kitchen
from tests.fuzz.mutate import mutated
from tests.fuzz.specs import nearly_right


def _pipeline(folder: str, limits: DecodeLimits) -> Pipeline:
    small = Qwen2VLProcessor(
        max_pixels=128 * 28 * 28, video_min_pixels=28 * 28, video_max_pixels=16 * 28 * 28
    )
    spec = Kitchen(Path(folder)).spec(vision=small)
    return build_pipeline(spec, limits=limits)


def _measured_as_decoded(pipeline: Pipeline, raw: RawSample) -> str | None:
    """A sample is refused when it is measured or when it is decoded; or it has the measured shape
    and is what every decode of these bytes gives, with nothing in it that was in memory before."""
    try:
        planned = pipeline.measure(raw)
        decoded = pipeline.decode(raw, planned)
    except SampleError as error:
        return _deliberate(error)
    check_planned_shape(decoded, planned)
    again = pipeline.decode(raw, planned)
    assert _same(decoded, again), "two decodes of the same bytes differ"
    return None


def _same(one: DecodedSample, other: DecodedSample) -> bool:
    """Byte for byte."""
    pairs = (
        (one.input_ids, other.input_ids),
        (one.labels, other.labels),
        *zip(one.items, other.items, strict=True),
    )
    return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def _deliberate(error: Exception) -> str:
    """The error's text, which says something and can be sent and stored."""
    text = str(error)
    assert len(text) > 20, f"says too little: {text!r}"
    text.encode()
    return f"{type(error).__name__}: {text}"


def media(limits: DecodeLimits | None) -> Callable[[tuple[str, bytes]], str | None]:
    """(kind, bytes) of one file."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = _pipeline(folder, limits or DEFAULT_LIMITS)

    def attempt(case: tuple[str, bytes]) -> str | None:
        kind, data = case
        blob = MediaBlob(kind=kind, name=f"some.{kind}", data=data)  # type: ignore[arg-type]
        raw = RawSample(key="k", record={"text": f"a <{kind}> b"}, media=(blob,))
        return _measured_as_decoded(pipeline, raw)

    return attempt


def record(limits: DecodeLimits | None) -> Callable[[dict[str, object]], str | None]:
    """A record without media."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = _pipeline(folder, limits or DEFAULT_LIMITS)
    return lambda case: _measured_as_decoded(pipeline, RawSample(key="k", record=case))


def source(setting: tuple[str, DecodeLimits | None]) -> Callable[[Path], str | None]:
    """A file of a format: every sample that is scanned reads the same by its location."""
    format_name, limits = setting

    def attempt(path: Path) -> str | None:
        spec = SourceSpec(name="src", url=str(path), format=format_name)  # type: ignore[arg-type]
        opened = open_format(spec, limits or DEFAULT_LIMITS)
        refusals = []
        try:
            for file in list_files(spec):
                for sample in opened.scan(file):
                    sample.key.encode()
                    if isinstance(sample.raw, SampleError):
                        refusals.append(_deliberate(sample.raw))
                        continue
                    again = opened.read(sample.key, sample.location)
                    assert sample_crc32(again) == sample_crc32(sample.raw)
        except SourceError as error:
            return _deliberate(error)
        return "; ".join(refusals)[:2000] or None

    return attempt


# ---- files --------------------------------------------------------------------------------


def source_bytes(setting: tuple[str, str, DecodeLimits | None]) -> Callable[[bytes], str | None]:
    """A file of a format by its bytes; see `source`."""
    format_name, suffix, limits = setting
    attempt = source((format_name, limits))
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / f"some.{suffix}"

    def write_and_try(data: bytes, _kept: object = folder) -> str | None:
        path.write_bytes(data)
        return attempt(path)

    return write_and_try


def changed(setting: tuple[str, str, bytes]) -> Callable[[bytes], str | None]:
    """A file that is damaged after it was indexed: each of its samples is what it was, or is
    masked. `setting` is the format, the suffix, and the file as it was."""
    format_name, suffix, intact = setting
    folder = tempfile.TemporaryDirectory()
    home = Path(folder.name)
    path = home / f"some.{suffix}"
    path.write_bytes(intact)
    spec = SourceSpec(name="src", url=str(path), format=format_name)  # type: ignore[arg-type]
    (home / "tokenizer").mkdir()
    decoder = _pipeline(str(home / "tokenizer"), DEFAULT_LIMITS)
    build_index(spec, out_dir=str(home / "index"), make_measurer=lambda: decoder)
    catalog = find_index([spec], str(home / "index"), decoder.fingerprint).read()
    samples = [PackSample(ref=r, lengths=n) for r, n in catalog.details(np.arange(catalog.samples))]
    pipeline = DecodingPipeline(reader=SourceReader([spec]), decoder=decoder)
    whole = [outcome.sample for outcome in read_and_decode(pipeline, samples)]
    assert all(whole), "the intact file decodes"

    def attempt(data: bytes, _kept: object = folder) -> str | None:
        path.write_bytes(data)
        pipeline = DecodingPipeline(reader=SourceReader([spec]), decoder=decoder)
        reasons = []
        for sample, before in zip(samples, whole, strict=True):
            (outcome,) = read_and_decode(pipeline, [sample])
            assert "unexpectedly" not in outcome.reason, outcome.reason
            if outcome.sample is None:
                reasons.append(outcome.reason)
                continue
            assert before is not None
            assert _same(outcome.sample, before), f"{sample.ref.key} is another, and not masked"
        return "; ".join(reasons) or None

    return attempt


def index(_setting: None) -> Callable[[tuple[str, str]], str | None]:
    """(kind of file of the index, seed of its damage): it opens to rows that a planner can
    believe, or is refused."""
    folder = tempfile.TemporaryDirectory()
    home = Path(folder.name)
    path = home / "some.jsonl"
    path.write_bytes(b"".join(b'{"text": "words %d"}\n' % k for k in range(50)))
    spec = SourceSpec(name="src", url=str(path), format="jsonl")
    (home / "tokenizer").mkdir()
    decoder = _pipeline(str(home / "tokenizer"), DEFAULT_LIMITS)
    build_index(spec, out_dir=str(home / "index"), make_measurer=lambda: decoder)
    files = {f.suffix.strip("."): f for f in (home / "index" / "src").iterdir()}
    intact = {suffix: file.read_bytes() for suffix, file in files.items()}

    def attempt(case: tuple[str, str], _kept: object = folder) -> str | None:
        suffix, seed = case
        rng = random.Random(seed)
        files[suffix].write_bytes(mutated(intact[suffix], [intact[suffix]], rng))
        try:
            found = find_index([spec], str(home / "index"), decoder.fingerprint)
            if suffix == "bin":
                lengths = found.rows.lengths()
                try:
                    mapped = MappedLengths(lengths)
                    rows = mapped.take(np.arange(len(mapped)))
                    require_sound_lengths(rows, DEFAULT_LIMITS)
                finally:
                    os.close(lengths)
            catalog = found.read()
            assert catalog.samples == 50
            for ref, lengths in catalog.details(np.arange(50)):
                assert 1 <= lengths.llm_tokens < 2**24
                ref.key.encode()
        except SourceError as error:
            return _deliberate(error)
        finally:
            files[suffix].write_bytes(intact[suffix])
        return None

    return attempt


def spec(_setting: None) -> Callable[[str], str | None]:
    """The seed of a job file or a config that is nearly right: it is valid and survives being
    stored, or is refused by the name of a key."""
    folder = tempfile.TemporaryDirectory()
    base = Path(folder.name)

    def attempt(seed: str, _kept: object = folder) -> str | None:
        kind, text, path = nearly_right(seed)
        try:
            if kind == "config":
                (base / "config.yaml").write_text(text)
                read_config(base / "config.yaml", {})
            else:
                job = read_job(text, base)
                assert job_from_json(job.model_dump_json()) == job
        except SpecError as error:
            said = _deliberate(error)
            assert len(said) < 20_000
            named = [key for key in path if not key.isdecimal()]
            assert not named or any(key in said for key in named), f"{named} are not in: {said}"
            return said
        return None

    return attempt
