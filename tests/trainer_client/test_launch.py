import multiprocessing
from pathlib import Path

import pytest
from torch import distributed

from tests.trainer_client.conftest import JOB
from trainer_client import BadArgument, ShardDataset
from trainer_client.launch import VARIABLE, launch_name, of_environment

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8"}
MPI = {"PMIX_NAMESPACE": "prterun-host-42@1", "OMPI_COMM_WORLD_SIZE": "8"}


@pytest.fixture(autouse=True)
def plain_process(monkeypatch):
    for name in (VARIABLE, *TORCHRUN, *SLURM, *MPI):
        monkeypatch.delenv(name, raising=False)


def test_static_launches_without_an_id_differ_by_where_their_ranks_meet():
    first = of_environment(TORCHRUN, 8)
    assert first == "torchrun:none@node-1:29500"
    assert of_environment({**TORCHRUN, "MASTER_PORT": "29501"}, 8) != first
    assert of_environment({**TORCHRUN, "MASTER_ADDR": "node-2"}, 8) != first


def test_hosts_of_one_torchrun_may_count_restarts_differently():
    assert of_environment({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}, 8) == of_environment(
        TORCHRUN, 8
    )


def test_a_restart_on_the_only_host_is_a_launch_of_its_own():
    one = {**TORCHRUN, "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "4f-uuid"}
    again = {**one, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert of_environment(one, 8) == "torchrun:4f-uuid@node-1:29500#0"
    assert of_environment(again, 8) == "torchrun:4f-uuid@node-1:29500#1"


def test_slurm_and_mpi_name_their_launches():
    assert of_environment(SLURM, 8) == "slurm:77.3#0"
    assert of_environment({**SLURM, "SLURM_RESTART_COUNT": "2"}, 8) == "slurm:77.3#2"
    assert of_environment(MPI, 8) == "mpi:prterun-host-42@1"
    assert of_environment({**SLURM, **TORCHRUN}, 8).startswith("torchrun:")


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM, MPI, {}, {"RANK": "0"}], ids=str)
def test_a_launcher_that_did_not_start_all_ranks_names_nothing(environment):
    assert of_environment(environment, 9) == ""


def test_who_starts_the_ranks_knows_best(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launch_name(None, world_size=8) == "torchrun:none@node-1:29500"
    monkeypatch.setenv(VARIABLE, "run-7")
    assert launch_name(None, world_size=8) == "given:run-7"
    assert launch_name("run-8", world_size=8) == "given:run-8"
    assert launch_name("", world_size=8).startswith("torchrun:")


@pytest.mark.parametrize("name", ["x" * 201, "a\nb"])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(BadArgument, match="alike on all ranks and new for each start"):
        launch_name(name, world_size=1)


def test_a_launch_is_sent_with_the_claim(service):
    with ShardDataset(service.address, job=JOB, rank=0, world_size=1, launch="run-7") as dataset:
        next(iter(dataset))
    assert [request.launch for request in service.coordinator.opens] == ["given:run-7"]


def _named_in_group(rank: int, store: Path, counts: tuple[int, int], names) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    names[rank] = [launch_name(None, world_size=count) for count in counts]


def test_ranks_of_a_process_group_agree_and_another_group_has_another_name(tmp_path):
    processes = multiprocessing.get_context("spawn")
    with processes.Manager() as manager:
        found = []
        for number in range(2):
            names = manager.dict()
            ranks = [
                processes.Process(
                    target=_named_in_group, args=(rank, tmp_path / f"{number}", (2, 3), names)
                )
                for rank in range(2)
            ]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(120.0)
            assert names[0] == names[1]
            found.append(names[0])
    assert found[0][0].startswith("group:")
    assert found[0][0] != found[1][0]
    assert found[0][1] == ""  # a job of three ranks, of which the group has two
