"""A tokenizer that is code of the user's own: the one in the documents, indexed and trained."""

import json
import os
import shutil
from itertools import pairwise

import pytest
import yaml

from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from tests.documents import ROOT, blocks
from tests.service.small import make_corpus, write_job
from tests.service.support import Ranks, serving

pytestmark = pytest.mark.long

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CUSTOM = {"bytes": "letters:Bytes"}


def test_texts_reach_the_ranks_as_the_ids_of_the_documents_tokenizer(tmp_path, monkeypatch):
    home = make_corpus(tmp_path / "corpus")
    (code,) = (b for b in blocks(ROOT / "docs" / "data.md") if b.file_name == "letters.py")
    (home / "code").mkdir()
    (home / "code" / "letters.py").write_text(code.text)
    shutil.rmtree(home / "tokenizer")
    (home / "tokenizer").mkdir()
    (home / "tokenizer" / "control_tokens.json").write_text(json.dumps(CONTROL))
    (home / "config.yaml").write_text(yaml.safe_dump({"custom_processors": CUSTOM}))
    monkeypatch.syspath_prepend(home / "code")
    path = os.pathsep.join([str(home / "code"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    job = write_job(
        home,
        sources=[{"name": "texts", "format": "jsonl", "url": "texts/*.jsonl"}],
        pipeline={"tokenizer": "tokenizer", "tokenizer_code": {"name": "bytes"}},
        plan={"memory_tokens": 8192},
    )
    index_job(read_job(job.read_text(), home), custom_processors=CUSTOM)
    with serving(tmp_path / "service", "local", "--config", str(home / "config.yaml")) as service:
        service.cli("job", "submit", str(job))
        ranks = Ranks(service.address, 1).start().join()
        texts = (home / "texts" / "texts.jsonl").read_text().splitlines()
        assert ranks.visits == dict.fromkeys(range(len(texts)), 1)
        ids = {
            tuple(segment)
            for shard in ranks.shards[0]
            for microbatch in shard.microbatches
            for segment in split(microbatch)
        }
        assert ids == {(*json.loads(line)["text"].encode(), 256) for line in texts}


def split(microbatch):
    """The ids of each sample of a microbatch."""
    edges = microbatch.cu_seqlens.tolist()
    ids = microbatch.input_ids.tolist()
    return [ids[start:end] for start, end in pairwise(edges)]
