"""An index whose files a service's workers measure: it is the one that this machine would make,
whatever dies meanwhile. The workers' processes are real; what lies between is left out."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from dataservice.cli import service_indexing
from dataservice.cli.service_indexing import ServiceIndexing
from dataservice.core.errors import SpecError, WorkerLostError
from dataservice.core.index_orders import (
    IndexAnswer,
    IndexOrder,
    IndexPlaces,
    IndexProgress,
    IndexWaiting,
)
from dataservice.jobs.index_program import IndexProgram
from dataservice.jobs.indexing import IndexIncompleteError, index_job
from dataservice.jobs.job_file import read_job
from dataservice.jobs.setup import index_pipelines, job_records
from dataservice.jobs.worker_pipeline import code_owner
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.serving.status_codes import ServiceUnreachableError
from dataservice.sources import shared_indexing
from dataservice.sources.formats.protocol import FilePiece
from dataservice.sources.index_errands import Errand
from dataservice.sources.index_folder import LENGTHS, part_name
from dataservice.sources.index_part import PACKED, SCHEMA
from dataservice.sources.part_sums import SUMS
from dataservice.sources.storage import SourceFile
from dataservice.workers.index_processes import IndexProcesses
from tests.decode.files import Files
from tests.jobs.corpus import make_corpus, talk, write_job

PLACES = 3
PRIORITY = 3  # the lowest would make the tests wait for all else on the machine
Trouble = Callable[["Service", IndexAnswer], None]


@dataclass
class Service:
    """The processes of one worker, asked as the client asks a service. Of each errand's answers
    the next of `troubles` is told, as long as there are some; but of listings."""

    processes: IndexProcesses
    loop: asyncio.AbstractEventLoop
    allowed_roots: list[str] | None = None
    troubles: list[Trouble] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def index(self, spec_yaml: str, base: str, source: str, errand: str) -> "Call":
        self.asked.append(Errand.from_json(errand).what)
        records = job_records(spec_yaml, base, allowed_roots=self.allowed_roots)
        pipelines = index_pipelines(records, "", allowed_roots=self.allowed_roots)
        order = IndexOrder(pipeline=pipelines[source], errand=errand)
        listing = self.asked[-1] == "list"
        trouble = self.troubles.pop(0) if self.troubles and not listing else None
        return Call(self, self.processes.index(order), trouble)

    def wait_for(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    @property
    def process_ids(self) -> list[int]:
        return self.processes.process_ids


class Call:
    def __init__(self, service: Service, answers: Any, trouble: Trouble | None) -> None:
        self.service, self.answers, self.trouble = service, answers, trouble
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[IndexAnswer]:
        yield IndexPlaces(places=PLACES)
        try:
            while not self.cancelled.is_set():
                try:
                    answer = self.service.wait_for(anext(self.answers))
                except StopAsyncIteration:
                    return
                if self.trouble is not None:
                    self.trouble(self.service, answer)
                yield answer
        finally:
            self.service.wait_for(self.answers.aclose())
        raise ServiceUnreachableError("cancelled")

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(service_indexing, "LONGEST_PAUSE_S", 0.01)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    program = IndexProgram(custom_processors={}, niceness=PRIORITY)
    processes = IndexProcesses(program, slots=4 * PLACES, code_owner=code_owner)
    yield Service(processes, loop)
    loop.call_soon_threadsafe(processes.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Text in files of which one is large, images in tars, pages in Parquet, and bad samples."""
    monkeypatch.setattr(shared_indexing, "SMALLEST_PIECE_BYTES", 50_000)
    home = make_corpus(tmp_path / "corpus")
    for number, rows in enumerate((3, 4000, 40)):
        lines = "".join(f'{{"id": "{k}", "text": "the cat {k}"}}\n' for k in range(rows))
        (home / f"text-{number}.jsonl").write_text(lines)
    for number in range(3):
        with webdataset.TarWriter(str(home / f"{number}.tar"), encoder=False) as tar:
            for k in range(4):
                record = json.dumps(talk("<image>", "a cat")).encode()
                image = Files.image(56, 56)
                tar.write({"__key__": f"{number}{k}", "jpg": image, "json": record})
    sources = [
        {"name": "talks", "format": "jsonl", "url": "talks.jsonl"},
        {"name": "pages", "format": "parquet", "url": "pages.parquet"},
        {"name": "text", "format": "jsonl", "url": "text-*.jsonl"},
        {"name": "tars", "format": "webdataset", "url": "*.tar"},
    ]
    write_job(home, sources=sources)
    return home


def index_here(home: Path, into: str = "here", **options: Any) -> Any:
    spec = read_job((home / "job.yaml").read_text(), home)
    spec = spec.model_copy(update={"index": str(home / into)})
    return index_job(spec, custom_processors={}, **options)


def index_there(home: Path, service: Service, **options: Any) -> Any:
    text = (home / "job.yaml").read_text()
    elsewhere = lambda source: ServiceIndexing(service, text, str(home), source, None)  # noqa: E731
    return index_here(home, "there", elsewhere=elsewhere, **options)


def files_of(folder: Path) -> dict[str, bytes]:
    """But for the sums of parts, which a run behind another one writes."""
    there = [p for p in folder.rglob("*") if p.is_file() and p.name != SUMS]
    return {str(p.relative_to(folder)): p.read_bytes() for p in there}


def require_alike(home: Path) -> None:
    """The index made here is the one made there, bit by bit; but the part of a file that was
    indexed in pieces has more row groups, of the same rows, each of which packs its lengths, as the
    file of all lengths has them."""
    here, there = files_of(home / "here"), files_of(home / "there")
    assert here.keys() == there.keys()
    in_pieces = f"text/{part_name('text-1.jsonl')}"
    otherwise = {name for name in here if here[name] != there[name]}
    assert otherwise == {in_pieces, f"text/{LENGTHS}"}
    one, other = (pq.ParquetFile(home / made / in_pieces) for made in ("here", "there"))
    assert (one.num_row_groups, other.num_row_groups) == (1, 4)
    assert [part.read([PACKED])[PACKED].null_count for part in (one, other)] == [
        part.metadata.num_rows - part.num_row_groups for part in (one, other)
    ]
    assert one.read(SCHEMA.names).equals(other.read(SCHEMA.names))
    assert one.metadata.metadata == other.metadata.metadata


def test_the_index_is_bit_by_bit_the_one_that_is_made_here(home, service):
    told: dict[str, Any] = {}
    made = index_there(home, service, progress=lambda name, *now: told.__setitem__(name, now))
    same = index_here(home)
    require_alike(home)
    for one, other in zip(made, same, strict=True):
        assert (one.rows, one.skipped, one.tokens, one.fingerprint) == (
            (other.rows, other.skipped, other.tokens, other.fingerprint)
        )
        assert told[one.source][0] == one.rows + len(one.skipped)
        assert told[one.source][1] == told[one.source][2], "all bytes are done"
    assert {"list", "divide", "count", "piece", "index"} == set(service.asked)
    again = index_there(home, service)
    assert [each.files_reused for each in again] == [each.files for each in made]


def test_a_large_parquet_file_is_shared_by_its_row_groups(home, service):
    rows = pa.table({"text": [f"the cat {'and the dog ' * 8}{k}" for k in range(8000)]})
    pq.write_table(rows, home / "many.parquet", row_group_size=500, compression="none")
    write_job(home, sources=[{"name": "many", "format": "parquet", "url": "many.parquet"}])
    (made,) = index_there(home, service)
    (same,) = index_here(home)
    assert service.asked.count("piece") > 1
    assert (made.rows, made.tokens, made.fingerprint) == (8000, same.tokens, same.fingerprint)
    name = f"many/{part_name('many.parquet')}"
    one, other = (
        pq.read_table(home / into / name, columns=SCHEMA.names) for into in ("here", "there")
    )
    assert one.equals(other)


@pytest.mark.long
def test_small_files_are_asked_for_together(home, service):
    for number in range(40):
        (home / f"text-many-{number}.jsonl").write_text('{"text": "the cat"}\n')
    index_there(home, service)
    assert service.asked.count("index") == 4, "one errand a source"


def killing(answers: int = 1) -> Trouble:
    """Kills the processes at work when so many answers have come."""
    seen = iter(range(answers))

    def kill(service: Service, answer: IndexAnswer) -> None:
        if next(seen, None) == answers - 1:
            for process_id in service.process_ids:
                with suppress(ProcessLookupError):
                    os.kill(process_id, 9)

    return kill


def away(service: Service, answer: IndexAnswer) -> None:
    raise ServiceUnreachableError("the service is being restarted")


def dying(service: Service, answer: IndexAnswer) -> None:
    raise WorkerLostError("the process died of SIGKILL.")


def no_trouble(service: Service, answer: IndexAnswer) -> None:
    pass


@pytest.mark.long
@pytest.mark.parametrize("trouble", [killing(1), killing(2), away])
def test_processes_that_die_and_a_service_that_is_away_cost_what_they_were_at(
    home, service, trouble
):
    service.troubles = [no_trouble, trouble] * 6
    told: dict[str, Any] = {}
    made = index_there(home, service, progress=lambda name, *now: told.__setitem__(name, now))
    index_here(home)
    require_alike(home)
    for one in made:
        assert told[one.source][0] == one.rows + len(one.skipped), "nothing is counted twice"


@pytest.mark.long
def test_of_files_asked_for_together_those_that_came_are_not_asked_for_again(home, service):
    asked = []

    def last(service: Service, answer: IndexAnswer) -> None:
        if isinstance(answer, IndexProgress) and asked:
            raise ServiceUnreachableError("the service is being restarted")
        if isinstance(answer, bytes):
            asked.append("a part is on its way")

    write_job(home, sources=[{"name": "tars", "format": "webdataset", "url": "*.tar"}])
    service.troubles = [last]
    errands: list[Errand] = []
    index = service.index

    def noting(text: str, base: str, source: str, errand: str) -> Call:
        errands.append(Errand.from_json(errand))
        return index(text, base, source, errand)

    service.index = noting  # type: ignore[method-assign]
    (made,) = index_there(home, service)
    assert [len(errand.files) for errand in errands] == [0, 3, 2]
    assert made.rows == 12


@pytest.mark.long
def test_a_file_whose_process_always_dies_is_named_and_the_others_are_kept(home, service):
    write_job(home, sources=[{"name": "text", "format": "jsonl", "url": "text-*.jsonl"}])
    service.troubles = [no_trouble] + [dying] * 200
    said = r"text-\d.jsonl: the process died of SIGKILL. It was tried 5 times. What is finished is"
    with pytest.raises(IndexIncompleteError, match=said):
        index_there(home, service)
    service.troubles = []
    (made,) = index_there(home, service)
    assert made.rows == 4043


@pytest.mark.long
def test_an_interrupted_run_leaves_no_process_and_keeps_what_is_finished(home, service):
    write_job(home, sources=[{"name": "text", "format": "jsonl", "url": "text-*.jsonl"}])
    parts = home / "there" / "text"

    def interrupt(source: str, rows: int, done: int, total: int) -> None:
        if any(path.name.endswith(".parquet") for path in parts.glob("part-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_there(home, service, progress=interrupt)
    left = [path.name for path in parts.iterdir()]
    whole = [name for name in left if name.endswith(".parquet")]
    assert whole
    service.wait_for(asyncio.sleep(0.2))
    assert not service.process_ids
    (made,) = index_there(home, service)
    assert (made.files_reused, made.pieces_reused) == (len(whole), len(left) - len(whole))


def test_pieces_that_an_interrupted_run_has_left_are_not_asked_for_again(home, service):
    parts = home / "there" / "text"

    def left() -> list[Path]:
        return list(parts.glob("part-*.parquet.*-*[0-9]"))

    def interrupt(source: str, rows: int, done: int, total: int) -> None:
        if left():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_there(home, service, progress=interrupt)
    pieces = len(left())
    service.asked.clear()
    told: dict[str, Any] = {}
    made = index_there(home, service, progress=lambda name, *now: told.__setitem__(name, now))
    assert service.asked.count("piece") == 4 - pieces
    assert [each.pieces_reused for each in made] == [0, 0, pieces, 0]
    assert told["text"][1] == told["text"][2], "all bytes that were to be done"
    index_here(home)
    require_alike(home)


def test_processes_that_index_have_the_priority_of_their_program_which_is_the_lowest(home, service):
    assert IndexProgram(custom_processors={}).niceness == 19
    write_job(home, sources=[{"name": "pages", "format": "parquet", "url": "pages.parquet"}])
    seen = []

    def look(service: Service, answer: IndexAnswer) -> None:
        seen.extend(os.getpriority(os.PRIO_PROCESS, each) for each in service.process_ids)

    service.troubles = [look]
    index_there(home, service)
    assert set(seen) == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + PRIORITY)}


@pytest.mark.long
def test_damaged_files_are_named_as_they_are_here(home, service):
    data = (home / "1.tar").read_bytes()
    (home / "1.tar").write_bytes(data[: len(data) // 2 + 700])
    with pytest.raises(IndexIncompleteError) as here:
        index_here(home)
    with pytest.raises(IndexIncompleteError) as there:
        index_there(home, service)
    assert "1.tar" in str(here.value)
    assert str(there.value) == str(here.value)
    made = index_there(home, service, leave_out_damaged=True)
    assert [file.name for file in made[-1].left_out] == ["1.tar"]


def test_a_service_that_does_not_answer_at_first_is_not_waited_for(home):
    text = (home / "job.yaml").read_text()
    with CoordinatorClient("127.0.0.1:1") as client:
        nobody = ServiceIndexing(client, text, str(home), "text", None, waits=False)
        with pytest.raises(ServiceUnreachableError, match=r"no service answers at 127.0.0.1:1"):
            nobody.listed()


def test_a_service_that_is_away_when_a_later_source_is_listed_is_waited_for_and_told_of_once(
    home, service, caplog
):
    asked, index = [], service.index

    def twice_away(*of):
        asked.append(of)
        if len(asked) < 3:
            away(service, None)
        return index(*of)

    service.index = twice_away
    text = (home / "job.yaml").read_text()
    files, _ = ServiceIndexing(service, text, str(home), "text", None).listed()
    assert files
    assert len(asked) == 3
    assert caplog.text.count("is being restarted") == 1


def test_a_service_without_workers_is_waited_for_and_says_why_once(home, service, caplog):
    index = service.index

    class Late:
        """A call that hears of no workers twice, before it is answered."""

        def __init__(self, call: Call) -> None:
            self.call, self.cancel = call, call.cancel

        def __iter__(self) -> Iterator[IndexAnswer]:
            yield from [IndexWaiting(why="1 of 1 workers are being started")] * 2
            yield from self.call

    service.index = lambda *of: Late(index(*of))
    text = (home / "job.yaml").read_text()
    files, _ = ServiceIndexing(service, text, str(home), "text", None).listed()
    assert len(files) == 3
    said = "no worker yet: 1 of 1 workers are being started. It is waited for."
    assert caplog.text.count(said) == 1


# ---- what a service reads -----------------------------------------------------------------


def test_an_errand_reads_no_file_outside_the_roots(home, service, tmp_path):
    """The files of an errand are the word of whoever sends it."""
    (tmp_path / "secret.jsonl").write_text('{"text": "the cat"}\n')
    service.allowed_roots = [str(home)]
    text = (home / "job.yaml").read_text()
    for path in (tmp_path / "secret.jsonl", home / ".." / "secret.jsonl"):
        file = SourceFile(name="x", path=str(path), size_bytes=20, version="")
        whole = FilePiece(start=0, end=20)
        for errand in (
            Errand(what="index", files=(file,)),
            Errand(what="count", files=(file,), piece=whole),
            Errand(what="piece", files=(file,), piece=whole),
        ):
            answers = list(service.index(text, str(home), "text", errand.to_json()))
            (damage,) = [each.damage for each in answers if hasattr(each, "damage")]
            assert "is not under" in damage or "outside" in damage or "does not read" in damage
            assert not [each for each in answers if isinstance(each, bytes)]
    outside = text.replace("text-*.jsonl", str(tmp_path / "*.jsonl"))
    with pytest.raises(SpecError, match=r"url of source 'text' is .*this service does not read"):
        service.index(outside, str(home), "text", Errand(what="list").to_json())


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '{"what": "index"}', '{"what":"run","files":[],"piece":null,"number":0,'
     '"piece_bytes":0}', '{"what":"count","files":[],"piece":null,"number":0,"piece_bytes":0}'],
)  # fmt: skip
def test_what_is_no_errand_is_refused(home, service, text):
    records = job_records((home / "job.yaml").read_text(), str(home))
    order = IndexOrder(pipeline=index_pipelines(records, "")["text"], errand=text)

    async def asked() -> None:
        async for _ in service.processes.index(order):
            pass

    with pytest.raises(SpecError, match="this is no errand of an index"):
        service.wait_for(asked())


def test_code_of_the_users_own_gets_no_credentials_so_far_sources_are_refused(home, service):
    own = {"name": "far", "format": "jsonl", "url": "s3://bucket/a.jsonl"}
    pipeline = {
        "tokenizer": "tokenizer",
        "vision": {"kind": "custom", "name": "tests.service.slow_vision:SlowVision"},
    }
    write_job(home, sources=[own], pipeline=pipeline)
    with pytest.raises(SpecError, match=r"(?s)lies on another machine.*without --on"):
        index_there(home, service)


@pytest.mark.parametrize(("files", "size_bytes"), [(257, 1), (2, 2**25 + 1), (4000, 10_000_000)])
def test_an_errand_for_which_other_teams_would_wait_long_is_refused(files, size_bytes):
    """Teams take turns between errands; a file that is large by itself is one all the same."""
    file = SourceFile(name="x", path="/x", size_bytes=size_bytes, version="")
    large = Errand(what="index", files=(file,) * files).to_json()
    with pytest.raises(SpecError, match=r"several may be 256, of 67,108,864 bytes in all"):
        Errand.from_json(large)
    alone = Errand(what="index", files=(replace(file, size_bytes=2**40),))
    assert Errand.from_json(alone.to_json()) == alone
    short = Errand(what="index", files=(replace(file, size_bytes=2**18),) * 256)
    assert Errand.from_json(short.to_json()) == short
