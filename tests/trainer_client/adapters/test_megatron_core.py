"""megatron-core itself beside the adapter; what did not run is listed in `megatron_rank.py`."""

from pathlib import Path

import pytest

from tests.trainer_client.adapters.foreign import MEGATRON, installed, run_ranks

RANK = Path(__file__).with_name("megatron_rank.py")


@pytest.mark.long
def test_ranks_groups_and_the_cut_of_packs_are_those_of_megatron_core(tmp_path):
    run_ranks(installed(MEGATRON, tmp_path), 4, RANK)
