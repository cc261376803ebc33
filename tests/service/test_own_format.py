"""Archives that are read by the class in the documents: indexed, trained, and compared with the
same samples as JSONL."""

import json
import os
import zipfile
from pathlib import Path
from random import Random

import pytest

from demo.media import draw_scene, encode_image
from soak.rank import row_of
from soak.service import dataservice
from tests.documents import ROOT, blocks
from tests.service.small import make_corpus, write_job, write_jsonl
from tests.service.support import Ranks, serving

pytestmark = pytest.mark.long

COUNT = 10
COLUMNS = {"image": "image", "caption": "title"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same samples in archives, one deflated and one stored, and as JSONL; and the code."""
    home, rng = make_corpus(tmp_path / "corpus"), Random(7)
    (code,) = (b for b in blocks(ROOT / "docs" / "data.md") if b.file_name == "zipped.py")
    (home / "code").mkdir()
    (home / "code" / "zipped.py").write_text(code.text)
    monkeypatch.setenv("PYTHONPATH", str(home / "code"), prepend=os.pathsep)
    (home / "pairs").mkdir()
    records = []
    for number in range(COUNT):
        image = encode_image(draw_scene(rng), (112, 84), "jpg", rng)
        (home / "pairs" / f"{number}.jpg").write_bytes(image)
        records.append({"id": f"pair-{number}", "title": f"scene {number} of the quick brown fox"})
    write_jsonl(
        home / "pairs" / "pairs.jsonl",
        [{**each, "image": f"{number}.jpg"} for number, each in enumerate(records)],
    )
    for part, method in enumerate((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED)):
        with zipfile.ZipFile(home / "pairs" / f"part-{part}.zip", "w", method) as archive:
            for number in range(part * COUNT // 2, (part + 1) * COUNT // 2):
                archive.writestr(f"{number}.json", json.dumps(records[number]))
                archive.write(home / "pairs" / f"{number}.jpg", f"{number}.jpg")
    return home


def job_of(home: Path, name: str, **how: object) -> str:
    source = {"name": "pairs", "columns": COLUMNS, **how}
    return str(write_job(home, job=name, sources=[source], index=name, batch={"samples": 5}))


def test_its_samples_are_trained_as_those_of_the_same_data_in_jsonl(home, tmp_path):
    code = {"name": "zipped:Zipped"}
    zipped = {"format": "custom", "format_code": code, "url": "pairs/*.zip"}
    jobs = {
        "zipped": job_of(home, "zipped", **zipped),
        "lines": job_of(home, "lines", format="jsonl", url="pairs/pairs.jsonl"),
    }
    delivered = {}
    for path in jobs.values():
        (indexed,) = json.loads(dataservice("index", path, "--json").stdout)
        assert indexed["rows"] == COUNT
    with serving(tmp_path / "service", "local") as service:
        for name, path in jobs.items():
            service.cli("job", "submit", path)
            ranks = Ranks(service.address, 1, job=name).start().join()
            assert ranks.visits == dict.fromkeys(range(COUNT), 1)
            rows = [row_of(shard, launch=0, world_size=1) for shard in ranks.shards[0]]
            delivered[name] = [(row.step, row.parts, row.items) for row in rows]
    assert delivered["zipped"] == delivered["lines"]
    assert sum(len(items) for _, _, items in delivered["zipped"]) == COUNT
