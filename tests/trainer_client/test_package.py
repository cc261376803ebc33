"""The package as a whole: what it exports, and what importing it costs a trainer."""

import subprocess
import sys

import pytest

import trainer_client

EXPORTS = """
AccessDenied BadArgument BadData ClientError ClientWarning CorruptPart CursorMismatch
FeatureExchange Fenced Group ItemNotes LossWeightsNotRead MalformedShard MediaNotRead Microbatch
MisuseError ModalityBatch NotFetched PackItems PlanDigestMismatch PlanSummary PositionsNotRead
RankAlreadyClaimed RankOutOfRange RequestRefused ServiceFailed ServiceTimeout ServiceUnreachable
Shard ShardDataset SlowAttention StageReport
StateMismatch Tls UncommittedSteps UnknownJob Wave WorkerUnreachable WrongWorldSize log_mel
normalize_pixels patchify
"""

FRESH_PROCESS = """
import sys
import trainer_client
heavy = {"ray", "pyarrow", "av", "dataservice", "numba", "PIL", "pydantic", "tokenizers"}
print(sorted(heavy & sys.modules.keys()))

from torch.utils.data import DataLoader
dataset = trainer_client.ShardDataset("127.0.0.1:1", job="x", rank=0, world_size=1)
try:
    next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
except trainer_client.MisuseError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def fresh_process() -> str:
    """What a process prints that imports the client and nothing before it."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_the_exported_names_are_these():
    assert trainer_client.__all__ == EXPORTS.split()
    assert all(hasattr(trainer_client, name) for name in EXPORTS.split())


def test_importing_the_client_loads_no_heavy_package(fresh_process):
    assert fresh_process.splitlines()[0] == "[]"


def test_a_data_loader_with_workers_is_refused_with_the_remedy(fresh_process):
    assert "num_workers=0" in fresh_process


def test_every_error_is_a_client_error_and_keeps_its_python_kind():
    kinds = {
        "BadArgument": ValueError,
        "RankOutOfRange": ValueError,
        "MisuseError": RuntimeError,
        "NotFetched": AttributeError,
        "ServiceUnreachable": ConnectionError,
        "ServiceTimeout": TimeoutError,
    }
    errors = [getattr(trainer_client, name) for name in EXPORTS.split()]
    errors = [e for e in errors if isinstance(e, type) and issubclass(e, Exception)]
    notices = [e for e in errors if issubclass(e, Warning)]
    assert {*notices} == {n for n in notices if issubclass(n, trainer_client.ClientWarning)}
    errors = [e for e in errors if e not in notices]
    assert len(errors) == 23
    assert all(issubclass(e, trainer_client.ClientError) for e in errors)
    assert all(issubclass(getattr(trainer_client, n), kind) for n, kind in kinds.items())
