"""A pipeline of a team reads no file through a link that leads out of its roots, whenever that came
to be there."""

import json
import os
import shutil

import pytest

from dataservice.core.errors import SpecError
from dataservice.core.named_files import MOST_COPIED_BYTES, judged_by, named_folder, read_named
from dataservice.decode.processors.transformers_image import TransformersImageSpec
from dataservice.decode.spec import PipelineSpec
from dataservice.jobs.sample_pipeline import decoder_of, pipeline_json, pipeline_of, worker_pipeline
from dataservice.sources.roots import Roots
from tests.decode.files import Kitchen


@pytest.mark.parametrize(
    "linked",
    ["tokenizer.json", "tokenizer_config.json", "own.jinja", "preprocessor_config.json"],
)
def test_no_file_of_a_pipeline_is_read_through_a_link_out_of_the_roots(tmp_path, linked):
    team, others = tmp_path / "team", tmp_path / "others"
    team.mkdir()
    Kitchen(team)
    (team / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    processor = {"image_processor_type": "CLIPImageProcessor", "model_type": "clip"}
    (team / "preprocessor_config.json").write_text(json.dumps(processor))
    shutil.copytree(team, others)
    vision = TransformersImageSpec(folder=str(team), patch=14)
    spec = PipelineSpec(tokenizer=str(team), chat_template=str(team / "own.jinja"), vision=vision)
    roots, text = Roots.of([str(team)], "team"), pipeline_json(spec)
    built = pipeline_of(text, {}, roots=roots)
    assert built.fingerprint == pipeline_of(text, {}).fingerprint
    (team / linked).unlink()
    (team / linked).symlink_to(others / linked)
    identity = {name: part.digest for name, part in pipeline_of(text, {}).identity.items()}
    refused = r"does not read there|has no image processor"
    with pytest.raises(SpecError, match=refused):
        pipeline_of(text, {}, roots=roots)
    with pytest.raises(SpecError, match=refused):
        decoder_of({}, worker_pipeline([], spec, identity, roots))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with judged_by(lambda path: True), pytest.raises(OSError, match="no plain file"):
        read_named(tmp_path / "pipe")


def test_no_large_file_of_a_team_is_copied_to_where_all_teams_need_room(tmp_path, monkeypatch):
    team, room = tmp_path / "team", tmp_path / "room"
    for folder in (team, room):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(room))
    names = ["config.json", "other.json"]
    (team / "config.json").write_text("{}")
    with judged_by(lambda path: True), named_folder(str(team), names) as copy:
        assert os.listdir(copy) == ["config.json"]
    with (team / "other.json").open("wb") as file:
        file.truncate(MOST_COPIED_BYTES + 1)
    with judged_by(lambda path: True), pytest.raises(OSError, match="it has 16,777,217 bytes"):
        named_folder(str(team), names).__enter__()
    assert os.listdir(room) == []
