"""The state directory under a real service: full while it runs, damaged when it starts."""

import resource

import pytest

from tests.service.support import Ranks, dataservice, job_file, serving, wait_for
from trainer_client import ServiceFailed

pytestmark = pytest.mark.long


def limit_files(process: int, size_bytes: int) -> None:
    """No file of the process may grow beyond this, as on a disk that is full."""
    _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (size_bytes, hard))


def test_a_state_that_fills_up_ends_the_attempt_and_goes_on_without_a_restart(
    corpus, tmp_path, cli
):
    with serving(tmp_path) as service:
        cli.service = service.address
        cli.ok("job", "submit", job_file(corpus, tmp_path))
        undisturbed = Ranks(service.address, 3).start().join().visits
        first = Ranks(service.address, 3).start(stop_after=2).join()
        assert service.process is not None
        running = Ranks(service.address, 3, hold_at=3).start(state=first.state)
        wait_for(lambda: running.held)
        log = tmp_path / "state" / "state.db-wal"
        limit_files(service.process.pid, log.stat().st_size)
        running.release()
        with pytest.raises(ServiceFailed, match=r"state\.db: .*need not be restarted"):
            running.join()
        assert len(running.errors) == 3
        assert "job" in cli.ok("job", "list").out  # what needs no write is answered
        cli.ok("explain", "job", "--step", "1")
        said = cli.refused("job", "drain", "job")
        assert "state.db" in said
        limit_files(service.process.pid, resource.RLIM_INFINITY)
        rest = Ranks(service.address, 4).start(state=first.state).join()
        assert first.visits + rest.visits == undisturbed
        assert "traceback" not in service.log.read_text().lower()


def test_a_damaged_state_is_refused_and_its_backup_goes_on_where_the_checkpoint_is(
    corpus, tmp_path, cli
):
    state = tmp_path / "state"
    with serving(tmp_path) as service:
        cli.service = service.address
        cli.ok("job", "submit", job_file(corpus, tmp_path))
        undisturbed = Ranks(service.address, 3).start().join().visits
        service.stop()
        service.start()  # with a backup of what was there
        first = Ranks(service.address, 3).start(stop_after=4).join()
        service.stop()
        data = (state / "state.db").read_bytes()
        damaged = data[:4096] + bytes(8192) + data[4096 + 8192 :]
        (state / "state.db").write_bytes(damaged)
        done = dataservice("serve", "--pool", "local", "--state-dir", str(state), check=False)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == 1
        assert "Traceback" not in said
        assert f"cp {state / 'state.backup.db'} {state / 'state.db'}" in said.replace("\n", " ")
        assert (state / "state.db").read_bytes() == damaged
        (state / "state.db").rename(state / "state.db.damaged")
        (state / "state.db").write_bytes((state / "state.backup.db").read_bytes())
        service.start()
        rest = Ranks(service.address, 4).start(state=first.state).join()
        assert first.visits + rest.visits == undisturbed
