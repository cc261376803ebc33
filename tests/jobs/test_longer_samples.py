"""A job says what becomes of samples that are too long, and its index, its readers and its previews
keep to it."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dataservice.core.errors import IndexStaleError, SpecError
from dataservice.core.sample import RawSample
from dataservice.jobs.dry_run import dry_run
from dataservice.jobs.indexing import IndexIncompleteError, index_job
from dataservice.jobs.preview import Wanted, preview_job
from dataservice.jobs.sample_pipeline import pipeline_json, pipeline_of
from dataservice.jobs.setup import build_files, find_files, job_records, open_job
from dataservice.sources.index import IndexSummary
from dataservice.sources.manifest import LongSamples
from dataservice.sources.reader import SourceReader
from tests.decode.files import WORDS, Kitchen
from tests.jobs.corpus import job_of, talk
from tests.sources.handed_over import handed_over

LIMIT = 24
DOCUMENTS = {"short": "the cat", "long": f"{WORDS} and {WORDS}", "longer": " ".join([WORDS] * 3)}


def write(home: Path, rule: dict[str, object] | None, *sources: str) -> Path:
    """A job over these of the sources `docs`, `rows`, `shards`, `files` (documents) and `talks`
    (two long conversations)."""
    where = {
        "docs": ("jsonl", "docs.jsonl"),
        "rows": ("parquet", "rows.parquet"),
        "shards": ("webdataset", "shards.tar"),
        "files": ("text", "files/*.txt"),
        "talks": ("jsonl", "talks.jsonl"),
    }
    pipeline: dict[str, object] = {"tokenizer": "tokenizer"}
    if rule is not None:
        pipeline["longer_than"] = rule
    plain = {
        "job": "job",
        "sources": [
            {"name": name, "format": where[name][0], "url": where[name][1]} for name in sources
        ],
        "index": "index",
        "pipeline": pipeline,
        "batch": {"samples": 2},
        "plan": {"memory_tokens": 512},
    }
    (home / "job.yaml").write_text(yaml.safe_dump(plain))
    return home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    Kitchen(tmp_path / "tokenizer")
    records = [{"id": key, "text": text} for key, text in DOCUMENTS.items()]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    columns = {"id": list(DOCUMENTS), "text": list(DOCUMENTS.values())}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=2)
    with tarfile.open(tmp_path / "shards.tar", "w") as tar:
        for key, text in DOCUMENTS.items():
            member = tarfile.TarInfo(f"{key}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    (tmp_path / "files").mkdir()
    for key, text in DOCUMENTS.items():
        (tmp_path / "files" / f"{key}.txt").write_text(text)
    talks = [
        {"id": "brief", **talk("the cat", "sat")},
        {"id": "epic", **talk(WORDS, WORDS)},
        {"id": "saga", **talk(WORDS, f"{WORDS} {WORDS}")},
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    return tmp_path


def index(home: Path) -> list[IndexSummary]:
    return index_job(job_of(home), custom_processors={})


def record(home: Path):
    return job_records((home / "job.yaml").read_text(), str(home))[0]


def opened(home: Path):
    built = build_files(record(home), custom_processors={})
    return find_files(record(home), built).read()


def tokens_of(home: Path) -> dict[str, list[int]]:
    """The token ids of the documents, as a job without a rule trains them."""
    spec = job_of(write(home, None, "docs"))
    pipeline = pipeline_of(pipeline_json(spec.pipeline), {})
    raws = [RawSample(key=key, record={"text": text}) for key, text in DOCUMENTS.items()]
    return {raw.key: pipeline.decode(raw, pipeline.measure(raw)).input_ids.tolist() for raw in raws}


# ---- cut ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["docs", "rows", "shards", "files"])
def test_every_token_of_a_document_is_in_one_sample(home, source):
    whole = tokens_of(home)
    write(home, {"tokens": LIMIT, "then": "cut"}, source)
    (summary,) = index(home)
    catalog, spec = opened(home), job_of(home)
    long = [ids for ids in whole.values() if len(ids) > LIMIT]
    pieces = sum(-(-len(ids) // LIMIT) for ids in long)
    assert summary.long == LongSamples(documents=2, pieces=pieces)
    assert catalog.samples == summary.rows == pieces + 1
    assert not summary.skipped
    assert summary.tokens.longest == LIMIT

    reader = SourceReader(spec.sources)
    pipeline = pipeline_of(pipeline_json(spec.pipeline), {})
    trained: dict[str, list[int]] = {}
    for ref, lengths in catalog.details(np.arange(catalog.samples)):
        key, _, piece = ref.key.partition("#")
        assert ref.location.piece == int(piece or 0)
        decoded = pipeline.decode(reader.read(ref), lengths)
        assert len(decoded.input_ids) == lengths.llm_tokens <= LIMIT
        trained.setdefault(key.removesuffix(".txt"), []).extend(decoded.input_ids.tolist())
    assert trained == whole


def test_pieces_survive_the_way_to_the_planning_process(home):
    write(home, {"tokens": LIMIT, "then": "cut", "otherwise": "drop"}, "docs", "talks")
    index(home)
    catalog = opened(home)
    taken = handed_over(catalog)
    ids = np.arange(catalog.samples)
    assert list(taken.details(ids)) == list(catalog.details(ids))
    assert taken.parts.long == catalog.parts.long
    assert taken.parts.long["talks"].left_out == 2


def test_files_that_were_touched_are_compared_and_are_the_same(home):
    write(home, {"tokens": LIMIT, "then": "cut"}, "docs", "shards")
    index(home)
    before = opened(home).fingerprint
    for name in ("docs.jsonl", "shards.tar"):
        os.utime(home / name, (1, 1))
    assert opened(home).fingerprint == before
    text = (home / "docs.jsonl").read_text()
    (home / "docs.jsonl").write_text(text.replace("warm mat", "warm cat"))
    with pytest.raises(IndexStaleError, match=r"docs.jsonl: \d+ of its 6 .* \(long#1"):
        opened(home)


# ---- what cannot be cut, and what is not ----------------------------------------------------


def test_conversations_are_refused_where_documents_are_cut(home):
    write(home, {"tokens": LIMIT, "then": "cut"}, "docs", "talks")
    with pytest.raises(IndexIncompleteError) as found:
        index(home)
    assert "source 'talks': 2 samples have more than the 24 tokens" in str(found.value)
    assert "cannot be cut: only documents of text can" in str(found.value)
    assert "'docs'" not in str(found.value)
    assert [each.source for each in found.value.made] == ["docs", "talks"]
    longest = found.value.made[1].long.longest_tokens
    assert f"the longest {longest}, " in str(found.value)
    with pytest.raises(SpecError, match="'talks': 2 samples have more"):
        open_job(record(home), custom_processors={})

    write(home, {"tokens": LIMIT, "then": "cut", "otherwise": "drop"}, "docs", "talks")
    docs, talks = index(home)
    assert docs.files_reused == talks.files_reused == 1
    assert [each.key for each in talks.skipped] == ["epic", "saga"]
    assert open_job(record(home), custom_processors={}).catalog.samples == docs.rows + 1


def test_an_index_with_longer_samples_is_refused_and_nothing_is_measured_again(home):
    write(home, {"tokens": LIMIT}, "docs", "talks")
    with pytest.raises(IndexIncompleteError) as found:
        index(home)
    longest = max(map(len, tokens_of(home).values()))
    said = str(found.value)
    assert "source 'docs': 2 samples have more than the 24 tokens of pipeline.longer_than" in said
    assert f"the longest {longest}. " in said
    assert "source 'talks': 2 samples have more" in said
    assert "Write then: cut" in said
    assert "or then: drop" in said

    write(home, {"tokens": LIMIT, "then": "drop"}, "docs", "talks")
    docs, talks = index(home)
    assert docs.files_reused == talks.files_reused == 1
    (reason,) = docs.skipped_reasons
    assert (reason.samples, reason.first_key) == (2, "long")
    assert open_job(record(home), custom_processors={}).catalog.samples == 2

    write(home, {"tokens": LIMIT, "then": "refuse"}, "docs", "talks")
    with pytest.raises(SpecError, match="'docs': 2 samples have more"):
        open_job(record(home), custom_processors={})


def test_a_limit_that_all_samples_keep_changes_nothing_but_the_pipeline(home):
    write(home, None, "docs", "talks")
    before = index(home)
    write(home, {"tokens": 1000}, "docs", "talks")
    after = index(home)
    assert [each.rows for each in after] == [each.rows for each in before] == [3, 3]
    assert {each.long for each in (*before, *after)} == {LongSamples()}
    assert open_job(record(home), custom_processors={}).catalog.samples == 6


def test_a_dry_run_says_it_too(home):
    write(home, {"tokens": LIMIT}, "docs")
    done = dry_run(job_of(home), samples_per_file=2, custom_processors={})
    assert "source 'docs': 1 sample has more than the 24 tokens" in done.problem
    assert [each.long.left_out for each in done.summaries] == [1]


# ---- looking at pieces ----------------------------------------------------------------------


@pytest.mark.parametrize("with_index", [True, False])
def test_a_piece_is_previewed_by_number_and_by_key(home, with_index):
    write(home, {"tokens": LIMIT, "then": "cut"}, "docs")
    if with_index:
        index(home)

    def shown(**wanted):
        return list(preview_job(job_of(home), Wanted(**wanted), custom_processors={}))

    (first,), (second,) = shown(sample="1"), shown(sample="long#2")
    assert (first.key, first.location.piece) == ("long#1", 1)
    assert (second.key, second.location.piece) == ("long#2", 2)
    assert [each.key for each in shown(sample="long")] == ["long#1"]
    assert first.lengths.llm_tokens == LIMIT
    assert not first.problem
    text = "".join(piece.text for each in (first, second) for piece in each.pieces)
    assert DOCUMENTS["long"].startswith(text.strip()[:20])
    assert shown(longest=1)[0].lengths.llm_tokens == LIMIT


# ---- indexes of other releases, and damaged ones --------------------------------------------


def rewrite(home: Path, change) -> None:
    """Change the table of the one part of `docs`, and keep its record."""
    (part,) = (home / "index" / "docs").glob("part-*")
    table = pq.read_table(part)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), part)
    file = pq.ParquetFile(part)
    assert file.metadata.num_rows == table.num_rows


def test_an_index_without_the_column_of_pieces_is_read(home):
    write(home, None, "docs")
    index(home)
    before = opened(home)
    manifest = home / "index" / "docs" / "manifest.json"
    plain = json.loads(manifest.read_text())
    for file in plain["files"]:
        del file["long"]
    manifest.write_text(json.dumps(plain))
    rewrite(home, lambda table: table.drop_columns(["piece"]))
    after, ids = opened(home), np.arange(3)
    assert after.identity == before.identity
    assert list(after.details(ids)) == list(before.details(ids))


def test_a_number_that_its_key_does_not_have_is_refused(home):
    write(home, {"tokens": LIMIT, "then": "cut"}, "docs")
    index(home)

    def shifted(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index("piece")
        pieces = [None if each is None else each + 1 for each in table["piece"].to_pylist()]
        return table.set_column(place, "piece", pa.array(pieces, pa.int32()))

    rewrite(home, shifted)
    with pytest.raises(IndexStaleError, match="keys of other pieces than it says"):
        opened(home)
