"""Storage profiles: who may use which, below which roots, and where their secrets do not go."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from dataservice.core.errors import ServiceError, SourceError, SpecError
from dataservice.core.job import JobRecord
from dataservice.core.limits import DEFAULT_LIMITS, OpeningLimits
from dataservice.core.storage_profile import StorageProfile
from dataservice.jobs.dry_run import dry_run
from dataservice.jobs.find_samples import Wanted
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import JobSpec, read_job
from dataservice.jobs.opener import JobOpener
from dataservice.jobs.preview import preview_job
from dataservice.jobs.sample_pipeline import reader_of
from dataservice.jobs.setup import job_records, open_job
from dataservice.jobs.storage_profiles import opened_sources
from dataservice.sources.formats.registry import list_files
from tests.jobs.corpus import make_corpus
from tests.web_store import WebStore, running

SECRET = "hunter2-and-more"
ROTATED = "another-secret"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus; its table `pages` lies in a store that asks for a token."""
    return make_corpus(tmp_path_factory.mktemp("lake"))


@pytest.fixture
def store(home: Path) -> Iterator[WebStore]:
    with running(WebStore(home, SECRET)) as serving:
        yield serving


@pytest.fixture
def profiles(store: WebStore, tmp_path: Path) -> dict[str, StorageProfile]:
    path = tmp_path / "lake.yaml"
    hold(path, SECRET)
    lake = StorageProfile(roots=(store.url,), teams=("vision",), options_file=str(path))
    return {"lake": lake, "attic": StorageProfile(roots=("s3://attic",), teams=("audio",))}


def hold(path: Path, secret: str) -> None:
    """Write the private file with the header that the store asks for."""
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump({"headers": {"Authorization": f"Bearer {secret}"}}))


def job_text(home: Path, store: WebStore, tmp_path: Path, **changes: object) -> str:
    plain = yaml.safe_load((home / "job.yaml").read_text())
    (pages,) = (source for source in plain["sources"] if source["name"] == "pages")
    url = f"{store.url}/{Path(pages['url']).name}"
    source = {**pages, "url": url, "storage_profile": "lake", **changes}
    return yaml.safe_dump({**plain, "sources": [source], "index": str(tmp_path / "index")})


def job(home: Path, store: WebStore, tmp_path: Path, **changes: object) -> JobSpec:
    return read_job(job_text(home, store, tmp_path, **changes), home)


# ---- who may use which ----------------------------------------------------------------------


def submitted(home, store, tmp_path, profiles, team="vision", **changes) -> JobRecord:
    text = job_text(home, store, tmp_path, **changes)
    more = {"allowed_roots": [str(home), str(tmp_path)], "storage_profiles": profiles}
    return job_records(text, str(home), team, **more)[0]


def test_a_team_may_name_its_profile_where_its_allowed_roots_do_not_reach(
    home, store, tmp_path, profiles
):
    record = submitted(home, store, tmp_path, profiles)
    assert json.loads(record.spec_json)["sources"][0]["storage_profile"] == "lake"
    assert SECRET not in repr(record)


@pytest.mark.parametrize("name", ["lake", "nowhere"])
def test_a_team_learns_which_profiles_it_may_use_and_of_no_other(
    home, store, tmp_path, profiles, name
):
    with pytest.raises(SpecError) as refused:
        submitted(home, store, tmp_path, profiles, team="audio", storage_profile=name)
    said = str(refused.value)
    assert f"'{name}', which team 'audio' may not use. The profiles here are attic;" in said
    assert "lake" not in said.replace(f"'{name}'", "")


def test_a_team_without_any_profile_is_told_so(home, store, tmp_path, profiles):
    with pytest.raises(SpecError, match=r"which team 'text' may not use. There is none here"):
        submitted(home, store, tmp_path, profiles, team="text")


@pytest.mark.parametrize("key", ["url", "media_root"])
def test_a_profile_is_not_used_beyond_its_roots(home, store, tmp_path, profiles, key):
    with pytest.raises(SpecError, match=rf"the {key} of source.*storage_profile 'lake'"):
        submitted(home, store, tmp_path, profiles, **{key: "http://else.test/pages.parquet"})


def test_a_profile_opens_no_path_of_this_machine(home, store, tmp_path, profiles):
    with pytest.raises(SpecError, match="storage_profile 'lake'"):
        submitted(home, store, tmp_path, profiles, url=str(home / "pages.parquet"))


def test_a_profile_and_options_of_the_jobs_own_are_not_mixed(home, store, tmp_path):
    with pytest.raises(SpecError, match="storage_profile and storage_options; give one"):
        job(home, store, tmp_path, storage_options={"endpoint_url": "http://else.test"})


# ---- what is read with it -------------------------------------------------------------------


def test_a_job_is_indexed_previewed_and_opened_with_its_profile(home, store, tmp_path, profiles):
    spec = job(home, store, tmp_path)
    tried = dry_run(spec, samples_per_file=2, custom_processors={}, storage_profiles=profiles)
    assert tried.problem == ""
    (summary,) = index_job(spec, custom_processors={}, storage_profiles=profiles)
    assert summary.rows == 4
    wanted = Wanted(random=2)
    shown = [*preview_job(spec, wanted, custom_processors={}, storage_profiles=profiles)]
    assert [each.problem for each in shown] == ["", ""]
    record = submitted(home, store, tmp_path, profiles)
    setup = open_job(record, custom_processors={}, storage_profiles=profiles)
    ((ref, _),) = setup.catalog.details(np.array([0]))
    assert reader_of(setup.pipeline, storage_profiles=profiles).read(ref).record
    assert any(span for _, span in store.asked), "it is read by byte ranges"


def test_without_the_operators_config_it_is_said_what_is_missing(home, store, tmp_path):
    with pytest.raises(SpecError, match=r"'lake', which is not known here.*`--config`"):
        index_job(job(home, store, tmp_path), custom_processors={})
    with pytest.raises(SourceError, match="known to a service's config alone"):
        list_files(job(home, store, tmp_path).sources[0])
    assert store.asked == [], "nothing was asked for with other credentials"


def test_a_worker_reads_nothing_beyond_the_roots_whatever_its_order_says(
    home, store, tmp_path, profiles
):
    spec = job(home, store, tmp_path)
    index_job(spec, custom_processors={}, storage_profiles=profiles)
    record = submitted(home, store, tmp_path, profiles)
    setup = open_job(record, custom_processors={}, storage_profiles=profiles)
    ((ref, _),) = setup.catalog.details(np.array([0]))
    for file in ("http://else.test/pages.parquet", f"{store.url}/../pages.parquet"):
        beyond = replace(ref, location=replace(ref.location, file=file))
        with pytest.raises(ServiceError, match="lies outside of what this service reads"):
            reader_of(setup.pipeline, storage_profiles=profiles).read(beyond)


def test_a_job_whose_profile_was_taken_away_hears_of_that_and_not_of_its_index(
    home, store, tmp_path, profiles
):
    index_job(job(home, store, tmp_path), custom_processors={}, storage_profiles=profiles)
    record = submitted(home, store, tmp_path, profiles)
    opener = JobOpener(
        custom_processors={}, limits=DEFAULT_LIMITS, allowed_roots=None, opening=OpeningLimits()
    )
    opener.start()
    try:
        with pytest.raises(SpecError, match=r"^source 'pages' names the storage_profile 'lake'"):
            opener.open_job(record)
    finally:
        opener.close()


# ---- rotation -------------------------------------------------------------------------------


def test_a_rotated_secret_counts_at_the_next_opening_and_changes_no_job(
    home, store, tmp_path, profiles
):
    spec = job(home, store, tmp_path)
    index_job(spec, custom_processors={}, storage_profiles=profiles)
    opener = JobOpener(
        custom_processors={},
        limits=DEFAULT_LIMITS,
        allowed_roots=[str(home), str(tmp_path)],
        opening=OpeningLimits(),
        storage_profiles=profiles,
    )
    opener.start()
    try:
        record = opener.read_job(job_text(home, store, tmp_path), str(home), "vision")[0]
        before = opener.open_job(record)
        store.token = ROTATED
        with pytest.raises(SourceError, match="has no file"):  # as fsspec says of a 401
            opener.open_job(record)
        hold(Path(profiles["lake"].options_file), ROTATED)
        after = opener.open_job(record)
    finally:
        opener.close()
    assert (after.order, after.record, after.pipeline) == (
        before.order,
        before.record,
        before.pipeline,
    )
    assert after.catalog.fingerprint == before.catalog.fingerprint


# ---- where secrets do not go ------------------------------------------------------------------


def test_secrets_are_in_no_index_no_order_of_a_worker_and_no_words(home, store, tmp_path, profiles):
    spec = job(home, store, tmp_path)
    index_job(spec, custom_processors={}, storage_profiles=profiles)
    record = submitted(home, store, tmp_path, profiles)
    setup = open_job(record, custom_processors={}, storage_profiles=profiles)
    told = [setup.pipeline, setup.record.spec_json, repr(setup.record), repr(profiles)]
    told.append(repr(opened_sources(spec.sources, profiles)))
    assert not [words for words in told if SECRET in words]
    files = [path for path in (tmp_path / "index").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_an_error_of_the_file_system_quotes_no_secret(home, store, tmp_path, profiles):
    hold(Path(profiles["lake"].options_file), "x")
    odd = {"headers": "hunter2", "client_kwargs": "hunter2-hunter2"}
    Path(profiles["lake"].options_file).write_text(yaml.safe_dump(odd))
    with pytest.raises(ServiceError) as refused:
        index_job(job(home, store, tmp_path), custom_processors={}, storage_profiles=profiles)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("text", ["- hunter2", "hunter2: [", "hunter2"])
def test_a_private_file_that_cannot_be_read_is_not_quoted(home, store, tmp_path, profiles, text):
    Path(profiles["lake"].options_file).write_text(text)
    with pytest.raises(SpecError, match="options_file of storage_profile 'lake'") as refused:
        index_job(job(home, store, tmp_path), custom_processors={}, storage_profiles=profiles)
    assert "hunter2" not in str(refused.value)


def test_a_private_file_that_others_may_read_is_refused(home, store, tmp_path, profiles):
    Path(profiles["lake"].options_file).chmod(0o644)
    with pytest.raises(SpecError, match="read or written by whoever is on this machine"):
        index_job(job(home, store, tmp_path), custom_processors={}, storage_profiles=profiles)
