"""Everything in an object store: a real server of S3's protocol, reached over its socket through
a gate that fails as a network does."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from soak.gate import Gate
from tests.service.object_store import object_store
from tests.service.small import SAMPLES, make_corpus, write_job
from tests.service.support import Ranks, ServiceProcess, dataservice, serving, wait_for

pytestmark = pytest.mark.long

BUCKET = "corpora"
ROWS = 4
OUTAGE_STEPS = 6  # more than are decoded ahead


@dataclass(frozen=True)
class Store:
    """A bucket with the small corpus, and the network between it and whoever asks."""

    corpus: Path
    network: Gate

    def job(self, **changes: object) -> Path:
        """A job whose sources and index lie in the bucket."""
        lies = f"s3://{BUCKET}"
        sources = [
            {"name": "images", "format": "webdataset", "url": f"{lies}/images/images-{{0..1}}.tar"},
            {"name": "clips", "format": "jsonl", "url": f"{lies}/clips/clips.jsonl"},
            {"name": "texts", "format": "jsonl", "url": f"{lies}/texts/*.jsonl"},
            {"name": "rows", "format": "parquet", "url": f"{lies}/rows"},
        ]
        return write_job(self.corpus, sources=sources, index=f"{lies}/index", **changes)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    corpus = make_corpus(tmp_path_factory.mktemp("object-store") / "corpus")
    (corpus / "rows").mkdir()
    rows = [{"id": f"row-{number}", "text": "all of it lies far away"} for number in range(ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), corpus / "rows" / "rows.parquet")
    with object_store(corpus, BUCKET, corpus.parent / "store.log") as network:
        made = Store(corpus=corpus, network=network)
        dataservice("index", str(made.job()))
        yield made


def served(store: Store, home: Path) -> tuple[str, ...]:
    """Flags of a service that may read the bucket, and the tokenizer's folder."""
    config = home / "service.yaml"
    roots = [str(store.corpus), f"s3://{BUCKET}"]
    config.write_text(yaml.safe_dump({"workers": 2, "allowed_roots": roots}))
    return ("--config", str(config))


def masked(service: ServiceProcess) -> list[dict[str, object]]:
    (job,) = json.loads(service.cli("job", "show", "job", "--json").stdout)
    return job["quarantine"]


def test_a_job_trains_from_an_object_store_that_holds_its_index_too(store, tmp_path):
    with serving(tmp_path, "local", *served(store, tmp_path)) as service:
        service.cli("job", "submit", str(store.job(epochs=2)))
        ranks = Ranks(service.address, 2).start().join()
        assert masked(service) == []
    assert len(ranks.visits) == SAMPLES + ROWS
    assert set(ranks.visits.values()) == {2}


def test_an_object_store_that_is_away_for_a_while_is_waited_for(store, tmp_path):
    epochs = 12
    with serving(tmp_path, "local", *served(store, tmp_path)) as service:
        service.cli("job", "submit", str(store.job(epochs=epochs, ready_steps=2)))
        ranks = Ranks(service.address, 2, hold_at=4).start()
        wait_for(lambda: ranks.held)
        store.network.cut(lambda _: True)
        ranks.release()
        wait_for(lambda: "storage is asked again" in service.log.read_text())
        before = ranks.steps_done
        store.network.heal()
        wait_for(lambda: ranks.steps_done >= before + OUTAGE_STEPS)
        ranks.join()
        assert masked(service) == []
    assert len(ranks.visits) == SAMPLES + ROWS
    assert set(ranks.visits.values()) == {epochs}


def test_samples_wait_for_an_object_store_however_long_it_is_away_and_status_says_so(
    store, tmp_path
):
    with serving(tmp_path, "local", *served(store, tmp_path)) as service:
        service.cli("job", "submit", str(store.job(epochs=6, ready_steps=2)))
        ranks = Ranks(service.address, 2, hold_at=4).start()
        wait_for(lambda: ranks.held)
        store.network.cut(lambda _: True)
        ranks.release()
        # Longer than requests are repeated for.
        wait_for(lambda: "has not answered for" in service.cli("status", "job").stdout)
        said = service.cli("status", "job").stdout
        assert "none is masked" in " ".join(said.split())
        store.network.heal()
        ranks.join()
        assert masked(service) == []
    assert set(ranks.visits.values()) == {6}
