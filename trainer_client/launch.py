"""Which launch this rank belongs to: a name that all ranks of one start of a job share, and that
no other start has. It comes from the first of these that gives one:

    launch= or DATASERVICE_LAUNCH           given by whoever starts the ranks
    the store of torch's process group      made by the rank that comes first
    torchrun, srun or mpirun                read from their environment variables
    ""                                      plain processes have no name

The service forms an attempt only of the ranks of one launch. Two launches with the same name, or
with none, could mix their ranks; ranks of one launch with two names would wait for each other in
vain. So a launcher's name is used only where that launcher has started all ranks, and it contains
nothing that may differ between hosts, such as torchrun's count of restarts, which may differ after
a failure.
"""

import os
import secrets
from collections.abc import Mapping

from torch import distributed

from trainer_client.errors import BadArgument

VARIABLE = "DATASERVICE_LAUNCH"
MOST_CHARACTERS = 200
STORE_KEY = "dataservice/launch"


def launch_name(given: str | None, *, world_size: int) -> str:
    """The launch of this process, one of `world_size` ranks. Raises BadArgument."""
    name = os.environ.get(VARIABLE) if given is None else given
    if name:
        return f"given:{_checked(name)}"
    found = _of_process_group(world_size) or of_environment(os.environ, world_size)
    return found[:MOST_CHARACTERS]


def of_environment(environment: Mapping[str, str], world_size: int) -> str:
    """The name that torchrun, Slurm or Open MPI give this launch; empty where none of them has
    started all ranks."""

    def started(count: str) -> bool:
        text = environment.get(count, "")
        return text.isdecimal() and int(text) >= world_size

    if "TORCHELASTIC_RUN_ID" in environment and started("WORLD_SIZE"):
        return _of_torchrun(environment)
    step = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    if all(step) and started("SLURM_STEP_NUM_TASKS"):
        return f"slurm:{'.'.join(step)}#{environment.get('SLURM_RESTART_COUNT', '0')}"
    namespace = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    if namespace and started("OMPI_COMM_WORLD_SIZE"):
        return f"mpi:{namespace}"
    return ""


def _of_torchrun(environment: Mapping[str, str]) -> str:
    # The run id is "none" for a static start on several hosts; the address where the ranks meet
    # tells such starts apart.
    meet = (environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    name = f"torchrun:{environment['TORCHELASTIC_RUN_ID']}@{':'.join(meet)}"
    if environment.get("GROUP_WORLD_SIZE") != "1":
        return name
    return f"{name}#{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _of_process_group(world_size: int) -> str:
    """A random name that the ranks of the default process group share: the store keeps the first
    that is offered, so no rank waits. Empty where there is no group of all ranks."""
    if not distributed.is_available() or not distributed.is_initialized():
        return ""
    if distributed.get_world_size() < world_size:
        return ""
    try:
        store = distributed.distributed_c10d._get_default_store()
        name = store.compare_set(STORE_KEY, "", secrets.token_hex(8))
    except (RuntimeError, NotImplementedError):  # groups of MPI have no store
        return ""
    return f"group:{name.decode()}" if name else ""


def _checked(name: str) -> str:
    if len(name) > MOST_CHARACTERS or not name.isprintable():
        raise BadArgument(
            f"the launch is {name[:80]!r}, {len(name)} characters; give at most "
            f"{MOST_CHARACTERS} printable ones, alike on all ranks and new for each start."
        )
    return name
