"""The operator's storage profiles, as the sources of a job use them.

    job file: storage_profile: lake ──▶ may this team, below these roots? ──▶ at submit
    opener, worker, index, preview ───▶ the same, and the secrets' file ────▶ an OpenedSource

A file with secrets is read each time that sources are opened, so a rotated secret counts from the
next opening on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dataservice.core.errors import SpecError
from dataservice.core.job import SourceSpec
from dataservice.core.own_format import FormatCodes
from dataservice.core.private_files import others_may
from dataservice.core.storage_profile import StorageProfile
from dataservice.core.team import NO_TEAM
from dataservice.jobs.yaml_file import read_text, written
from dataservice.sources.filesystem import hold_credentials as hold_credentials  # for workers
from dataservice.sources.opened import Grant, OpenedSource
from dataservice.sources.roots import Roots

StorageProfiles = Mapping[str, StorageProfile]
"""The operator's profiles by name."""
NO_PROFILES: StorageProfiles = {}


def require_profile(
    source: SourceSpec, profiles: StorageProfiles, team: str = NO_TEAM
) -> StorageProfile:
    """The profile that a source names. Raises SpecError where its team may not use that, or where
    the source lies elsewhere."""
    profile = profiles.get(source.storage_profile)
    if profile is None or not profile.may_use(team):
        mine = sorted(name for name, each in profiles.items() if each.may_use(team))
        there = f"The profiles here are {', '.join(mine)}" if mine else "There is none here"
        raise SpecError(
            f"source {source.name!r} names the storage_profile {source.storage_profile!r}, which "
            f"{f'team {team!r} may not use' if team else 'is not known here'}. {there}; ask the "
            "operator, in whose config they are (`--config` of the commands that read sources)."
        )
    roots = _roots(profile)
    for key in ("url", "media_root"):
        if place := getattr(source, key):
            what = f"the {key} of source {source.name!r}"
            roots.require(place, what, f"storage_profile {source.storage_profile!r}")
    return profile


def opened_sources(
    sources: Sequence[SourceSpec],
    profiles: StorageProfiles,
    team: str = NO_TEAM,
    *,
    codes: FormatCodes | None = None,
) -> list[SourceSpec]:
    """The sources, each with what its storage is opened with, and the code of its format if that is
    among `codes`. Raises SpecError where one names a profile that cannot be used."""
    opened: list[SourceSpec] = []
    for source in sources:
        grant = _grant(source, profiles, team) if source.storage_profile else None
        plain = {each.name: getattr(source, each.name) for each in fields(source)}
        opened.append(OpenedSource(**plain, grant=grant, code=(codes or {}).get(source.name)))
    return opened


def _grant(source: SourceSpec, profiles: StorageProfiles, team: str) -> Grant:
    profile = require_profile(source, profiles, team)
    return Grant(
        options=profile.options,
        secret=_secrets(profile, source.storage_profile),
        roots=_roots(profile),
    )


def _roots(profile: StorageProfile) -> Roots:
    return Roots.of(profile.roots, NO_TEAM)  # they name no team


def _secrets(profile: StorageProfile, name: str) -> dict[str, Any]:
    """The options that the profile's private file holds."""
    if profile.options_file is None:
        return {}
    path, what = Path(profile.options_file), f"options_file of storage_profile {name!r}"
    text = read_text(path, what)
    if others_may(path):
        raise SpecError(
            f"the {what} may be read or written by whoever is on this machine. `chmod 600` it; in "
            "Kubernetes give its volume defaultMode: 0440. Then rotate what it holds."
        )
    try:
        return written(text, what).plain
    except SpecError:
        # The reason would quote a line of the file.
        raise SpecError(
            f"the {what} is not YAML, or no mapping of options. Write `option: value` lines."
        ) from None
