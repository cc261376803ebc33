"""The files of data sets that keep a list of their files beside them, such as `state.json`.

    state.json              Hugging Face's save_to_disk, beside its Arrow files
    index.json              MosaicML Streaming, beside its shards
    .nv-meta/split.yaml     Megatron-Energon, beside its tars

Libraries leave other files with the same suffix in such a folder (`cache-….arrow` of a mapped data
set), which are copies of its samples. So a folder's own list says what its data are.
"""

import json
import logging
import posixpath
from collections.abc import Callable, Mapping, Sequence

import yaml

from dataservice.core.errors import SourceError
from dataservice.core.quoting import cut, quoted
from dataservice.sources.storage import SourceFile, Storage

_MOST_LIST_BYTES = 64 * 2**20
_MOST_YAML_BYTES = 2**20  # which takes seconds to parse
_SHOWN = 8

log = logging.getLogger(__name__)


def listed_files(
    storage: Storage,
    files: Sequence[SourceFile],
    owner: str,
    *,
    list_names: Sequence[str],
    names_in: Callable[[Mapping[str, object]], Sequence[str]],
) -> tuple[SourceFile, ...]:
    """`files` of the source without those that the list of their folder does not name; a file that
    the URL itself names is taken as it is. A folder's list has one of `list_names`; `names_in`
    gives the paths in it, relative to the folder.

    Raises:
        SourceError: a listed file is missing from a folder, a folder holds several splits, a list
            cannot be read, or no file is left.
    """
    found = {file.path: file for file in files}
    named = set(storage.paths)
    folders = [path.rstrip("/") for path in named - found.keys() if storage.is_folder(path)]
    parents = {posixpath.dirname(path) for path in found if path not in named}
    lists: dict[str, set[str]] = {}
    for folder in sorted({*folders, *parents}):
        if any(folder.startswith(f"{above}/") for above in lists if above in folders):
            continue  # the list of the whole data set counts, not those of its parts
        for list_name in list_names:
            names = _names(storage, owner, f"{folder}/{list_name}", names_in)
            if names is not None:
                lists[folder] = {posixpath.normpath(f"{folder}/{name}") for name in names}
                break
    for folder in sorted(folders):
        _require_one_whole_set(owner, folder, lists, found)
    unlisted = {
        path
        for path in found
        if path not in named
        and not any(path in listed for listed in lists.values())
        and any(path.startswith(f"{folder}/") for folder in lists)
    }
    if len(unlisted) == len(found):
        raise SourceError(
            f"{owner}: none of its {len(found):,} files, such as {min(unlisted)}, is data by "
            f"{list_names[0]} of their folder. Name the files themselves in the url, as "
            "{000..003} or {a,b}."
        )
    if unlisted:
        log.warning(
            "%s: %s of its files are not read, such as %s: %s of their folder does not name them "
            "as data",
            *(owner, f"{len(unlisted):,}", min(unlisted), list_names[0]),
        )
    return tuple(file for path, file in found.items() if path not in unlisted)


def _require_one_whole_set(
    owner: str, folder: str, lists: Mapping[str, set[str]], found: Mapping[str, SourceFile]
) -> None:
    within = [at for at in lists if at == folder or at.startswith(f"{folder}/")]
    if len(within) > 1:
        splits = [posixpath.relpath(at, folder) for at in within]
        raise SourceError(
            f"{owner}: {folder} holds {len(splits)} data sets or splits: "
            f"{quoted(splits, 200)}. Name one in the url, as {folder}/{splits[-1]}, or several as "
            f"{folder}/{{{splits[0]},{splits[-1]}}}."
        )
    for at in within:
        missing = sorted(lists[at] - found.keys())
        if missing:
            raise SourceError(
                f"{owner}: {folder} lacks {len(missing)} of the {len(lists[at])} files that its "
                f"own list names: {quoted(missing[:_SHOWN], 400)}. Copy the folder again."
            )


def _names(
    storage: Storage,
    owner: str,
    path: str,
    names_in: Callable[[Mapping[str, object]], Sequence[str]],
) -> Sequence[str] | None:
    """The names in the list at `path`; None when there is none."""
    is_yaml = path.endswith(".yaml")
    data = storage.read_note(path, _MOST_YAML_BYTES if is_yaml else _MOST_LIST_BYTES)
    if data is None:
        return None
    try:
        stated = yaml.safe_load(data) if is_yaml else json.loads(data)
        if not isinstance(stated, dict):
            raise TypeError(f"a {type(stated).__name__}")
        names = names_in(stated)
        if not all(isinstance(name, str) for name in names):
            raise TypeError("names that are no text")
        return names
    except (ValueError, TypeError, LookupError, RecursionError, yaml.YAMLError) as error:
        raise SourceError(
            f"{owner}: {path} is no list of a data set's files ({cut(repr(error))}). Restore it, "
            "or name the files themselves in the url."
        ) from error
