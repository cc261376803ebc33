"""The schema of a file: what may stand there, each key with the words below its field."""

import pytest
from pydantic import BaseModel

from dataservice.jobs.file_schema import schema_of
from dataservice.jobs.job_file import JobFile
from dataservice.jobs.layout_files import ClusterFile, ModelFile
from dataservice.operate.config import ServiceConfig


@pytest.mark.parametrize("model", [JobFile, ServiceConfig, ClusterFile, ModelFile])
def test_every_key_of_every_part_of_a_file_is_described(model: type[BaseModel]):
    schema = schema_of(model)
    parts = [schema, *schema["$defs"].values()]
    without = [
        f"{part['title']}.{key}"
        for part in parts
        for key, value in part.get("properties", {}).items()
        if not value.get("description") and "const" not in value
    ]
    assert len(parts) > 1
    assert without == []


def test_a_key_has_the_words_of_the_class_that_its_own_inherits_it_from():
    parts = schema_of(ModelFile)["$defs"]
    own, inherited = (parts["Encoder"]["properties"][key] for key in ("name", "hidden_size"))
    assert own["description"]
    assert inherited["description"] == parts["Decoder"]["properties"]["hidden_size"]["description"]
