"""Decoded samples on a disk of this machine, for whoever decodes the same bytes in the same way.

    team, pipeline, sample as read, planned lengths ──► file of the arrays (see kept_files.py)

Another job of the team, the next epoch, a replayed step and a resumed attempt find there what was
decoded before. All workers of a machine share the folder. What is kept is not yet augmented.

The name is a digest of the bytes that were read, and of nothing that an index says of them. What is
found is what decoding gives, byte by byte.
"""

from collections.abc import Sequence

from dataservice.core.ports import Finish, SampleDecoder, ToDecode
from dataservice.core.sample import DecodedSample, ItemArray, RawSample, SampleLengths
from dataservice.workers.kept_files import CacheSpec, KeptFiles, Lend, nothing_lent
from dataservice.workers.pack import check_planned_shape
from dataservice.workers.read_sample import raw_buffers
from dataservice.workers.sample_memory import sample_buffers, sample_bytes, sample_of_bytes

# Part of a file's name: files of another format are not found, and go as those that nobody uses.
FORMAT = b"3"


class DecodedCache:
    """The decoded samples of one folder. Used by one thread."""

    def __init__(self, spec: CacheSpec) -> None:
        """Makes the folder, for this user alone, where it can."""
        self._files = KeptFiles(spec, "decoded samples")

    def name(self, identity: str, raw: RawSample, planned: SampleLengths) -> str:
        """The name of what this sample is decoded to. O(bytes)."""
        parts = [FORMAT, identity.encode(), repr(planned).encode(), *raw_buffers(raw)]
        return self._files.name(parts)

    def load(
        self, name: str, planned: SampleLengths, lend: Lend = nothing_lent
    ) -> DecodedSample | None:
        """The sample of this name, whose arrays may be written to; they lie in the memory that
        `lend` gives for them, or in their own."""
        data = self._files.find(name, sample_bytes(planned), lend)
        return None if data is None else sample_of_bytes(data, planned)

    def store(self, name: str, decoded: DecodedSample, planned: SampleLengths) -> None:
        """Keep this sample."""
        self._files.keep(name, sample_buffers(decoded, planned))


class CachedDecoder(SampleDecoder):
    """Decodes with another decoder what is not in the cache. `identity` stands for all that decides
    what a sample is decoded to, and for whom. What is found is read into what `lend` gives."""

    def __init__(
        self,
        decoder: SampleDecoder,
        cache: DecodedCache,
        identity: str,
        lend: Lend = nothing_lent,
    ) -> None:
        self._lend = lend
        self._decoder = decoder
        self._cache = cache
        self._identity = identity
        self.reused = 0
        """Samples that were found."""

    @property
    def pad_token_id(self) -> int:
        """The token that fills padding and masked samples."""
        return self._decoder.pad_token_id

    def decode(
        self,
        raw: RawSample,
        planned: SampleLengths,
        epoch: int | None = None,
        places: Sequence[ItemArray] = (),
    ) -> DecodedSample:
        """The sample augmented as in this epoch. A sample without media is not looked for: its
        tokens are made as quickly."""
        if not planned.items:
            return self._decoder.decode(raw, planned, epoch)
        name = self._cache.name(self._identity, raw, planned)
        found = self._cache.load(name, planned, self._lend)
        if found is None:
            found = self._decoder.decode(raw, planned, None, places)
            check_planned_shape(found, planned)
            self._cache.store(name, found, planned)
        else:
            self.reused += 1
        return found if epoch is None else self._decoder.augment(raw, found, epoch)

    def begin(self, samples: Sequence[ToDecode]) -> list[Finish]:
        """Samples without media begin together; whether others are found tells each by itself."""
        if any(sample.planned.items for sample in samples):
            return super().begin(samples)
        return self._decoder.begin(samples)
