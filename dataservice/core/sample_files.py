"""The files that hold samples, as columns: a corpus may have millions of them, and nearly every
sample of a step lies in another one, so that they are chosen and sent without an object for any."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import expanded, sample_starts

_WORD = np.dtype("<u8")  # gathered in an eighth of the time that its bytes would take
_FEW = 64  # numbers, for which numpy takes longer than Python
# Times how many numbers there are: beyond, sorting them takes less time than counting up to them.
_FAR = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleFiles:
    """k files by number.

    The source of file i is `sources[source[i]]`, int[k]. `paths` uint64[words] are the files' paths
    in UTF-8 end to end, of `path_bytes` int[k] each, every one filled up with zeros to whole words
    of eight bytes.
    """

    sources: tuple[str, ...]
    source: NDArray[Any]
    path_bytes: NDArray[Any]
    paths: NDArray[np.uint64]

    @staticmethod
    def of(files: Sequence[tuple[str, str]]) -> "SampleFiles":
        """Columns of the (source, path) of each file."""
        place: dict[str, int] = {}
        source = [place.setdefault(name, len(place)) for name, _ in files]
        paths = [path.encode() for _, path in files]
        filled = b"".join(path + bytes(-len(path) % _WORD.itemsize) for path in paths)
        return SampleFiles(
            sources=tuple(place),
            source=np.array(source, np.int32),
            path_bytes=np.array(list(map(len, paths)), np.int32),
            paths=np.frombuffer(filled, _WORD),
        )

    @staticmethod
    def read(
        sources: Sequence[str], source: NDArray[Any], path_bytes: NDArray[Any], paths: bytes
    ) -> "SampleFiles":
        """Columns as they came from elsewhere. Raises ValueError where they contradict each
        other."""
        if source.size and not 0 <= source.min() <= source.max() < len(sources):
            raise ValueError(f"files of source {source.min()} to {source.max()} of {len(sources)}")
        # None may be longer than all together: their sum could overflow.
        fit = not path_bytes.size or 0 <= path_bytes.min() <= path_bytes.max() <= len(paths)
        if not fit or int(_words(path_bytes).sum()) * _WORD.itemsize != len(paths):
            raise ValueError(f"the paths of {path_bytes.size} files came as {len(paths)} bytes")
        return SampleFiles(
            sources=tuple(sources),
            source=source,
            path_bytes=path_bytes,
            paths=np.frombuffer(paths, _WORD),
        )

    def only(self, numbers: NDArray[Any]) -> "SampleFiles":
        """Files by these numbers, in this order; repeats are allowed. Of sources, those that they
        are of. O(numbers)."""
        sources, source = self.sources, self.source[numbers]
        if len(sources) > 1:
            used, source = numbered(source)
            sources = tuple(sources[each] for each in used.tolist())
        first = self._starts[numbers]
        return SampleFiles(
            sources=sources,
            source=source,
            path_bytes=self.path_bytes[numbers],
            paths=self.paths[expanded(first, self._starts[numbers + 1] - first)],
        )

    def named(self) -> list[tuple[str, str]]:
        """The (source, path) of each. Raises UnicodeDecodeError where a path is no UTF-8."""
        sources = map(self.sources.__getitem__, self.source.tolist())
        return [(source, path.decode()) for source, path in zip(sources, self.utf8(), strict=True)]

    def utf8(self) -> Iterator[bytes]:
        """The path of each, as its bytes."""
        filled, starts = self.paths.tobytes(), self._starts[:-1] * _WORD.itemsize
        ends = starts + self.path_bytes
        return map(filled.__getitem__, map(slice, starts.tolist(), ends.tolist()))

    def __len__(self) -> int:
        return len(self.source)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleFiles) and self.named() == other.named()

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where the words of each path begin, and where the last end: int64[k + 1]."""
        return sample_starts(_words(self.path_bytes))


def numbered(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The numbers among these, ascending, and the place of each value among them. O(values), or
    O(values * log values) where the largest is far above how many they are."""
    if len(values) <= _FEW:
        listed = values.tolist()
        few = sorted(set(listed))
        places = {number: place for place, number in enumerate(few)}
        return np.array(few, np.int64), np.array([places[each] for each in listed], np.int64)
    if values.max() > _FAR * len(values):
        return np.unique(values, return_inverse=True)
    seen = np.bincount(values) > 0
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[values]


def _words(path_bytes: NDArray[Any]) -> NDArray[np.int64]:
    return (path_bytes.astype(np.int64) + _WORD.itemsize - 1) // _WORD.itemsize
