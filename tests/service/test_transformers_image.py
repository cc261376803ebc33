"""A model that is not built in, by the folder in which it is published: indexed and trained."""

import json

import pytest

from tests.service.small import IMAGES, indexed_job, make_corpus, write_job
from tests.service.support import Ranks, serving

pytestmark = pytest.mark.long


def test_pictures_reach_the_ranks_through_the_processor_of_a_models_folder(tmp_path):
    home = make_corpus(tmp_path / "corpus")
    (home / "model").mkdir()
    plain = {"image_processor_type": "BlipImageProcessor", "size": {"height": 56, "width": 56}}
    (home / "model" / "preprocessor_config.json").write_text(json.dumps(plain))
    vision = {"kind": "transformers", "folder": "model", "patch": 14, "merge": 2}
    pictures = {"name": "images", "format": "webdataset", "url": "images/images-*.tar"}
    job = {
        "sources": [pictures],
        "pipeline": {"tokenizer": "tokenizer", "vision": vision},
        "batch": {"samples": IMAGES},
    }
    path = indexed_job(home, **job)
    with serving(tmp_path / "service", "local") as service:
        service.cli("job", "submit", str(path))
        ranks = Ranks(service.address, 2).start().join()
        assert ranks.visits == dict.fromkeys(range(IMAGES), 1)
        (listed,) = json.loads(service.cli("job", "list", "--json").stdout)
        assert not listed.get("bad_samples")
        changed = {**plain, "image_mean": [0.5, 0.5, 0.5]}
        (home / "model" / "preprocessor_config.json").write_text(json.dumps(changed))
        service.cli("job", "delete", "job")
        refused = service.cli("job", "submit", str(write_job(home, **job)), check=False)
        assert refused.returncode != 0
        assert "dataservice index" in refused.stderr + refused.stdout
