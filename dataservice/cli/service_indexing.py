"""A source that the workers of a service read and measure, while the index is written here.

    errand ──▶ service ──▶ a worker's process: scan + measure
    part of the index ◀── its bytes ◀──┘     and is written, whole or not at all

Contract. An errand whose worker dies is asked again, but for the files of it that are here; so is
one whose service is away, as while it restarts; but the first, where it may not be there at all.
Both end after some tries, and what is written is kept. `close` ends every errand.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from dataservice.core.errors import ServiceError, SourceError, WorkerLostError
from dataservice.core.index_orders import IndexPlaces, IndexProgress, IndexResult, IndexWaiting
from dataservice.serving.coordinator_client import CoordinatorClient, IndexCall
from dataservice.serving.status_codes import ServiceUnreachableError
from dataservice.sources.file_indexer import Result, join_pieces
from dataservice.sources.formats.protocol import FilePiece
from dataservice.sources.index_errands import Errand, Listing, pieces_of_json
from dataservice.sources.index_folder import IndexFolder, part_name, piece_name
from dataservice.sources.index_part import read_record
from dataservice.sources.manifest import IndexedFile, LeftOutFile, PartRecord, Recipe
from dataservice.sources.shared_indexing import Elsewhere, Indexers
from dataservice.sources.storage import SourceFile

log = logging.getLogger(__name__)

TRIES = 5  # of an errand whose process dies
AWAY_S = 180.0  # that a service may take to come back
LONGEST_PAUSE_S = 8.0
WAITING = 4  # errands more than there are places, so that none stays empty meanwhile

Take = Callable[[IndexResult, Iterator[bytes]], None]


class ServiceIndexing(Elsewhere):
    """One source of a job file, indexed by the workers of a service."""

    def __init__(
        self,
        client: CoordinatorClient,
        spec_yaml: str,
        base_directory: str,
        source: str,
        processes: int | None,
        *,
        waits: bool = True,
    ) -> None:
        """`processes` is the most files at once, if given. `waits`: for a service that is away when
        the source is to be listed, as for one that goes away later."""
        self._client = client
        self._listing_away_s = AWAY_S if waits else 0.0
        self._asked = spec_yaml, base_directory, source
        self._processes = processes
        self._offered = 1  # places, once it has been listed
        self._recipe: Recipe | None = None

    def listed(self) -> tuple[Sequence[SourceFile], Recipe]:
        """The files of the source as the service sees them, and how it indexes them."""
        errands = _Errands(self._client, *self._asked, away_s=self._listing_away_s)
        listing = Listing.from_json(errands.text(Errand(what="list")))
        self._offered, self._recipe = errands.places, listing.recipe
        return listing.files, listing.recipe

    @property
    def places(self) -> int:
        """As many as the service offers, or fewer `processes`."""
        return min(self._offered, self._processes or self._offered)

    def divided(
        self, files: Sequence[SourceFile], piece_bytes: int
    ) -> Mapping[str, tuple[FilePiece, ...]]:
        """The pieces of those of these files that can be divided, by name."""
        errand = Errand(what="divide", files=tuple(files), piece_bytes=piece_bytes)
        return pieces_of_json(_Errands(self._client, *self._asked).text(errand))

    def indexers(self, folder: IndexFolder) -> Indexers:
        """The service's workers, whose parts are written into the folder."""
        assert self._recipe is not None, "it has been listed"
        threads = self.places + (0 if self._processes else WAITING)
        errands = _Errands(self._client, *self._asked)
        return _ServiceIndexers(errands, folder, self._recipe, self.places, threads)


@dataclass(slots=True)
class _Errands:
    """Errands over one source. Used by several threads."""

    client: CoordinatorClient
    spec_yaml: str
    base_directory: str
    source: str
    away_s: float = AWAY_S
    places: int = 1
    rows: int = 0
    size_bytes: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    calls: set[IndexCall] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    told: bool = False
    """That the service or its workers are away, since something was last heard of them."""

    def text(self, errand: Errand) -> bytes:
        """The one result of an errand. Raises SourceError where there is none."""
        found: list[bytes] = []
        self.carry_out(errand, lambda result, data: found.append(b"".join(data)))
        return found[-1]

    def carry_out(self, errand: Errand, take: Take) -> None:
        """Have an errand carried out; `take` gets each result, in any order, at most once."""
        left = list(range(max(1, len(errand.files))))
        tries, heard_s = 0, time.monotonic()

        def taken(result: IndexResult, data: Iterator[bytes]) -> None:
            nonlocal tries, heard_s
            take(replace(result, place=left[result.place]), data)
            done.append(left[result.place])
            tries, heard_s = 0, time.monotonic()
            self.told = False

        while True:
            done: list[int] = []
            files = tuple(errand.files[place] for place in left) if errand.files else ()
            try:
                self._ask(replace(errand, files=files), taken)
                return
            except (WorkerLostError, ServiceUnreachableError) as error:
                left = [place for place in left if place not in done]
                tries += 1
                lost = isinstance(error, WorkerLostError)
                over = tries >= TRIES if lost else time.monotonic() - heard_s > self.away_s
                if not left:
                    return
                if self.closed.is_set() or not (lost or self.away_s):
                    raise
                if over:
                    raise self._given_up(errand, left, tries, error) from error
                self._tell(f"{error} It is asked again.", each=lost)
                self.closed.wait(min(2.0 ** (tries - 1), LONGEST_PAUSE_S))

    def _tell(self, what: str, *, each: bool = False) -> None:
        """Of an outage once, whichever errands it stops."""
        with self.lock:
            told, self.told = self.told, self.told or not each
        if each or not told:
            log.warning("source %s: %s", self.source, what)

    def close(self) -> None:
        """End every errand."""
        self.closed.set()
        with self.lock:
            for call in self.calls:
                call.cancel()

    def _ask(self, errand: Errand, take: Take) -> None:
        """Ask once. Raises WorkerLostError or ServiceUnreachableError where it may be asked
        again."""
        call = self.client.index(self.spec_yaml, self.base_directory, self.source, errand.to_json())
        with self.lock:
            self.calls.add(call)
            if self.closed.is_set():
                call.cancel()
        rows = size_bytes = 0  # of what is not here yet
        try:
            answers = iter(call)
            for answer in answers:
                if isinstance(answer, IndexWaiting):
                    why = answer.why.rstrip(".")
                    self._tell(f"the service has no worker yet: {why}. It is waited for.")
                elif isinstance(answer, IndexPlaces):
                    self.places = answer.places
                elif isinstance(answer, IndexProgress):
                    self._count(answer.rows, answer.size_bytes)
                    rows, size_bytes = rows + answer.rows, size_bytes + answer.size_bytes
                elif isinstance(answer, IndexResult):
                    take(answer, _bytes_of(answer, answers))
                    rows = size_bytes = 0
        except BaseException:
            self._count(-rows, -size_bytes)
            raise
        finally:
            call.cancel()  # of one that has ended it does nothing
            with self.lock:
                self.calls.discard(call)

    def _count(self, rows: int, size_bytes: int) -> None:
        with self.lock:
            self.rows += rows
            self.size_bytes += size_bytes

    def _given_up(
        self, errand: Errand, left: Sequence[int], tries: int, error: ServiceError
    ) -> SourceError:
        names = [errand.files[place].name for place in left if errand.files]
        what = f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: " if names else ""
        return SourceError(
            f"source {self.source!r}: {what}{error} It was tried {tries} times. What is finished "
            "is kept: run the command again to go on."
        )


def _bytes_of(result: IndexResult, answers: Iterator[object]) -> Iterator[bytes]:
    """The bytes that follow a result. Raises ServiceUnreachableError where they end early."""
    left_bytes = result.size_bytes
    while left_bytes > 0:
        answer = next(answers, None)
        if not isinstance(answer, bytes):
            raise ServiceUnreachableError("a part of the index came cut off.")
        left_bytes -= len(answer)
        yield answer


@dataclass(slots=True)
class _ServiceIndexers:
    """The workers of a service, each errand in a thread that waits for it."""

    errands: _Errands
    folder: IndexFolder
    recipe: Recipe
    places: int
    threads: int
    executor: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.executor = ThreadPoolExecutor(self.threads, thread_name_prefix="errand")

    @property
    def done(self) -> tuple[int, int]:
        return self.errands.rows, self.errands.size_bytes

    def index(self, files: Sequence[SourceFile]) -> "Future[Sequence[Result]]":
        names = [part_name(file.name) for file in files]
        return self.executor.submit(self._written, Errand(what="index", files=tuple(files)), names)

    def count(self, file: SourceFile, piece: FilePiece) -> "Future[int | LeftOutFile]":
        return self.executor.submit(self._counted, file, piece)

    def index_piece(self, file: SourceFile, piece: FilePiece) -> "Future[Result]":
        errand = Errand(what="piece", files=(file,), piece=piece)
        names = [piece_name(file.name, piece)]
        return self.executor.submit(lambda: self._written(errand, names)[0])

    def join(self, file: SourceFile, pieces: Mapping[FilePiece, PartRecord]) -> "Future[Result]":
        return self.executor.submit(join_pieces, self.folder, file, pieces)

    def close(self) -> None:
        self.errands.close()
        self.executor.shutdown(wait=True, cancel_futures=True)

    def _counted(self, file: SourceFile, piece: FilePiece) -> int | LeftOutFile:
        found: list[int | LeftOutFile] = []

        def take(result: IndexResult, data: Iterator[bytes]) -> None:
            if result.damage:
                found.append(LeftOutFile(name=file.name, reason=result.damage))
            else:
                found.append(int(json.loads(b"".join(data))))

        self.errands.carry_out(Errand(what="count", files=(file,), piece=piece), take)
        return found[0]

    def _written(self, errand: Errand, names: Sequence[str]) -> Sequence[Result]:
        """What became of each file; its part is in the folder, under these names."""
        found: dict[int, Result] = {}

        def take(result: IndexResult, data: Iterator[bytes]) -> None:
            file = errand.files[result.place]
            if result.damage:
                found[result.place] = LeftOutFile(name=file.name, reason=result.damage)
                return
            with self.folder.replace(names[result.place]) as stream:
                for chunk in data:
                    stream.write(chunk)
            found[result.place] = self._record(file, names[result.place])

        self.errands.carry_out(errand, take)
        return [found[place] for place in range(len(errand.files))]

    def _record(self, file: SourceFile, name: str) -> PartRecord:
        """What a part says of itself. Raises SourceError where it is not the one asked for."""
        with self.folder.open(name) as stream:
            record = read_record(stream)
        if record is None or record.file != IndexedFile.of(file):
            raise SourceError(
                f"{self.folder.owner}: the part of {file.name} that the service made is damaged, "
                "or of another release. Run one release of service and command line."
            )
        if record.recipe != self.recipe:
            raise SourceError(
                f"{self.folder.owner}: the service has indexed {file.name} by another tokenizer, "
                "template or processor than the files before: one was replaced meanwhile. Run it "
                "again; files that fit what is there now are kept."
            )
        return record
