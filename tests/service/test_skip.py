"""After a loss spike: steps are skipped, the audit holds, and what was done can be told."""

import json
import sqlite3
from contextlib import closing

import pytest

from tests.service.support import Ranks, job_file, serving

pytestmark = pytest.mark.long


def test_steps_are_skipped_on_the_way_from_a_checkpoint_at_another_world_size(
    corpus, tmp_path, cli
):
    with serving(tmp_path) as service:
        cli.service = service.address
        cli.ok("job", "submit", job_file(corpus, tmp_path))
        spiked = Ranks(service.address, 3).start().join()
        last = max(spiked.digests)
        assert last >= 8
        kept = Ranks(service.address, 3).start(stop_after=2).join()
        said = cli.ok("job", "skip", "job", "4-6", f"{last}").said
        assert "every attempt from 3 on skips steps 4 to 6" in said
        assert "restart them from a checkpoint that lies before these steps" in said
        resumed = Ranks(service.address, 4).start(state=kept.state).join()
        skipped = {4, 5, 6, last}
        steps = [shard.step for shard in resumed.shards[0]]
        assert steps == [n for n in range(2, last) if n not in skipped]
        assert kept.visits + resumed.visits + spiked.visits_in(skipped) == spiked.visits

        assert "skips steps 4 to 6" in cli.ok("job", "show", "job").said
        (shown,) = json.loads(cli.ok("job", "show", "job", "--json").out)
        assert [(s["first_step"], s["last_step"]) for s in shown["skips"]] == [(4, 6), (last, last)]
        explained = cli.ok("explain", "job", "--step", "5").said
        assert "step 5 of attempt 3 (skipped)" in explained
        assert "attempt 1: committed" in explained
        assert "every attempt from 3 on skips steps 4 to 6" in explained
        replayed = json.loads(cli.ok("job", "replay", "job", "--steps", f"0-{last}", "--json").out)
        assert (replayed["steps"], replayed["differing"]) == (last + 1, [])

        service.stop()
        with closing(sqlite3.connect(tmp_path / "state" / "state.db")) as state:
            state.execute("UPDATE ledger SET plan_digest = 'another' WHERE step = 3")
            state.commit()
        service.start()
        differs = cli("job", "replay", "job", "--steps", f"0-{last}")
        assert (differs.code, "step 3 of attempt 3" in differs.said) == (3, True)
        assert "1 differ" in differs.said
        told = cli("explain", "job", "--step", "3")
        assert (told.code, "differs from the ledger's another" in told.said) == (3, True)
        assert "9-3 is no range of steps" in cli.refused("job", "skip", "job", "9-3")
        assert "'few' is no range" in cli.refused("job", "skip", "job", "few")
