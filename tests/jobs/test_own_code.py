"""The operator's own classes, as jobs come to use them."""

import sys

import pytest

from dataservice.core.errors import SpecError
from dataservice.jobs.indexing import index_job
from dataservice.jobs.sample_pipeline import pipeline_json, pipeline_of
from dataservice.jobs.setup import build_files, job_records
from tests.jobs.corpus import job_of, make_corpus, write_job

CODE = """
WORD = {word!r}


class Theirs:
    def prepare(self, sample):
        return sample
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A corpus beside a folder from which modules are imported."""
    monkeypatch.syspath_prepend(tmp_path / "code")
    (tmp_path / "code").mkdir()
    return make_corpus(tmp_path / "corpus")


def preparing(home, **paths):
    """The pipeline of a job that names `theirs`, in a service that allows these classes."""
    pipeline = job_of(home).pipeline
    spec = pipeline_json(pipeline).replace('"prepare":[]', '"prepare":[{"name":"theirs"}]')
    assert "theirs" in spec
    return pipeline_of(spec, paths)


def test_a_process_that_imported_code_before_it_was_replaced_tells_so_by_its_digest(
    home, tmp_path, monkeypatch
):
    path = tmp_path / "code" / "their_old_code.py"

    def digest():
        return preparing(home, theirs="their_old_code:Theirs").digests["prepare"]

    path.write_text(CODE.format(word="one"))
    before = digest()
    path.write_text(CODE.format(word="another"))
    assert digest() == before, "it still runs the code of before"
    monkeypatch.delitem(sys.modules, "their_old_code")  # as in a new process
    assert digest() != before


def test_only_what_a_job_names_is_imported(home, tmp_path):
    (tmp_path / "code" / "their_code_alone.py").write_text(CODE.format(word="one"))
    paths = {"theirs": "their_code_alone:Theirs", "color": "not_installed.transforms:Color"}
    assert "prepare" in preparing(home, **paths).digests
    with pytest.raises(
        SpecError, match=r"'theirs' is 'not_installed:No', which cannot be imported"
    ):
        preparing(home, theirs="not_installed:No")
    with pytest.raises(SpecError, match=r"preparer 'theirs' is not in .* which has: color, other"):
        preparing(home, other="their_code_alone:Theirs", color=paths["color"])


def test_a_script_that_is_named_in_place_of_a_module_is_refused_by_name(home, tmp_path):
    (tmp_path / "code" / "their_script.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(SpecError, match=r"cannot be imported: SystemExit: 2"):
        preparing(home, theirs="their_script:Theirs")
    (tmp_path / "code" / "their_exit.py").write_text(
        CODE.format(word="") + "    def __init__(self):\n        raise SystemExit(2)\n"
    )
    with pytest.raises(SpecError, match=r"preparer 'theirs' cannot be made with options"):
        preparing(home, theirs="their_exit:Theirs")


def naming(home, **keys):
    """The text of a job file whose pipeline names code."""
    pipeline = {"tokenizer": "tokenizer", "vision": {"kind": "qwen2_vl"}, **keys}
    return write_job(home, pipeline=pipeline).read_text()


def test_a_job_may_name_a_class_by_its_import_path(home, tmp_path):
    (tmp_path / "code" / "named_by_path.py").write_text(CODE.format(word="one"))
    text = naming(home, prepare=[{"name": "named_by_path:Theirs"}])
    (record,) = job_records(text, str(home))
    assert "prepare" in build_files(record, custom_processors={}).digests
    index_job(job_of(home), custom_processors={})


@pytest.mark.parametrize(
    "keys",
    [
        {"prepare": [{"name": "theirs.tidy:Tidy"}]},
        {"augment": [{"name": "theirs:Mirror"}]},
        {"tokenizer_code": {"name": "theirs:Bytes"}},
        {"vision": {"kind": "custom", "name": "theirs:Square"}},
    ],
)
@pytest.mark.parametrize("team", ["", "vision"])
def test_import_paths_are_taken_from_the_packages_that_the_operator_allows(home, keys, team):
    text = naming(home, **keys)
    for packages in (["theirs"], ["other", "theirs"], None):
        job_records(text, str(home), team, code_packages=packages)
    for packages in ([], ["their"], ["theirs.tidy.more"], ["{team}_code"]):
        with pytest.raises(SpecError, match=r"names the code 'theirs.* by its import path; "):
            job_records(text, str(home), team, code_packages=packages)


def test_a_format_of_ones_own_is_judged_alike(home):
    source = {"name": "a", "format": "custom", "format_code": {"name": "theirs:Lines"}, "url": "a"}
    text = write_job(home, sources=[source]).read_text()
    with pytest.raises(SpecError, match=r"this service takes such names from the packages ours\. "):
        job_records(text, str(home), code_packages=["ours"])


def test_a_teams_own_package_is_its_own(home):
    text = naming(home, prepare=[{"name": "vision_code.tidy:Tidy"}])
    job_records(text, str(home), "vision", code_packages=["{team}_code"])
    for other in ("audio", ""):
        with pytest.raises(SpecError, match=r"takes such names from the packages .*\. Ask"):
            job_records(text, str(home), other, code_packages=["{team}_code"])


def test_a_package_that_the_operator_takes_back_is_refused_at_the_next_opening(home, tmp_path):
    (tmp_path / "code" / "taken_back.py").write_text(CODE.format(word="one"))
    text = naming(home, prepare=[{"name": "taken_back:Theirs"}])
    (record,) = job_records(text, str(home), code_packages=["taken_back"])
    with pytest.raises(SpecError, match=r"takes such names from the packages \(none\)"):
        build_files(record, custom_processors={}, code_packages=[])
