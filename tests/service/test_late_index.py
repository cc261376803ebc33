"""A job whose locations are read while it runs trains what it trains otherwise."""

import pytest
import yaml

from tests.service.small import SAMPLES
from tests.service.support import Ranks, job_file, serving

pytestmark = pytest.mark.long


def epoch(corpus, home, late_index_samples):
    """The ranks of one epoch. Each has its own cache of indexes, where nothing is kept yet."""
    home.mkdir(parents=True)
    config = {
        "job_opening": {"late_index_samples": late_index_samples},
        "index_cache": str(home / "kept"),
    }
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    with serving(home / "s", "local", "--config", str(home / "config.yaml")) as service:
        service.cli("job", "submit", str(job_file(corpus, home)))
        ranks = Ranks(service.address, 4).start().join()
        service.stop()
    return ranks


def test_its_steps_are_the_same_and_no_sample_is_lost_or_repeated(corpus, tmp_path):
    late, whole = epoch(corpus, tmp_path / "late", 0), epoch(corpus, tmp_path / "whole", SAMPLES)
    assert late.visits == whole.visits
    assert set(late.visits.values()) == {1}
    assert late.digests == whole.digests
