"""The lengths of a bare index: what planning reads of it, without the job that it was written for.

INDEX_DIR/SOURCE_NAME/… ──► lengths by sample id, dense over the sources in the order of their names

Files of the sources are not looked at: lengths are those that were measured when it was written.
"""

from dataservice.core.errors import SourceError
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.filesystem import open_filesystem, translate
from dataservice.sources.index_folder import MANIFEST, IndexFolder
from dataservice.sources.length_columns import concatenate
from dataservice.sources.lengths_by_id import LengthsById
from dataservice.sources.manifest import AGAIN, Manifest
from dataservice.sources.part_reader import read_part
from dataservice.sources.ranges import SourceRanges


class IndexLengths(LengthsById):
    """Lengths of all samples of an index, and each source's range of ids."""

    def __init__(self, sources: SourceRanges, lengths: LengthTable) -> None:
        self.sources = sources
        self._lengths = lengths


def read_index_lengths(index_dir: str, *, limits: DecodeLimits = DEFAULT_LIMITS) -> IndexLengths:
    """The lengths of every source that has a complete index in this folder, a path or a URL.

    Raises:
        SourceError: there is no such folder, or it holds no complete index.
        IndexStaleError: a part is missing or damaged.
    """
    names = _indexed_sources(index_dir)
    tables, rows = [], []
    for name in names:
        folder = IndexFolder(index_dir, name)
        manifest = Manifest.from_json(folder.read(MANIFEST) or b"", f"{folder.path}/{MANIFEST}")
        rows.append(manifest.rows)
        for part in manifest.parts:
            tables += [lengths for _, lengths in read_part(folder, part, limits)]
    return IndexLengths(SourceRanges.of(names, rows), concatenate(tables))


def _indexed_sources(index_dir: str) -> list[str]:
    """Names of the sources that have a complete index, sorted."""
    owner = f"index {index_dir}"
    fs, root = open_filesystem(index_dir, {}, owner)
    root = root.rstrip("/")
    with translate(owner, root, "be listed"):
        alone = fs.exists(f"{root}/{MANIFEST}")
        folders = [str(path).rstrip("/") for path in fs.ls(root, detail=False)]
        found = sorted(
            path.rpartition("/")[2] for path in folders if fs.exists(f"{path}/{MANIFEST}")
        )
    if alone:
        above, _, name = root.rpartition("/")
        raise SourceError(
            f"{root} is the index of one source, {name!r}; give the folder of the whole index, "
            f"{above}"
        )
    if not found:
        raise SourceError(f"{root} holds no complete index of a source. Write it: {AGAIN}")
    return found
