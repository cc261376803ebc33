import os
import stat
from collections.abc import Iterator

import pytest

from dataservice.core.private_files import make_private, others_may, tighten


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The most careless one."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_file_that_is_made_is_its_owner_s_alone(tmp_path):
    make_private(tmp_path / "a")
    assert mode(tmp_path / "a") == 0o600
    assert not others_may(tmp_path / "a")


def test_a_file_that_is_there_keeps_what_it_holds(tmp_path):
    (tmp_path / "a").write_text("held")
    make_private(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "held"


def test_a_mode_is_only_ever_tightened(tmp_path):
    path = tmp_path / "a"
    path.touch(mode=0o664)
    assert others_may(path)
    assert tighten(path, allowed=0o660) == 0o664
    assert mode(path) == 0o660
    assert tighten(path) == 0o660
    assert mode(path) == 0o600
    path.chmod(0o400)
    assert tighten(path) is None
    assert mode(path) == 0o400
    assert tighten(tmp_path / "none") is None
