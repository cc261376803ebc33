"""The operator's own classes, as jobs come to use them."""

import sys

import pytest

from dataservice.core.errors import SpecError
from dataservice.jobs.sample_pipeline import pipeline_json, pipeline_of
from tests.jobs.corpus import job_of, make_corpus

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
