"""StatefulDataLoader and accelerate keep the dataset's state themselves, and resume exactly."""

import json

import pytest
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.trainer_client.frameworks.loops import STEPS, everything, ids_of
from trainer_client import MisuseError


@pytest.mark.parametrize("saved_behind", range(STEPS))
def test_a_stateful_data_loader_resumes_behind_the_step_it_was_saved_at(service, saved_behind):
    trained = []
    with service.dataset() as dataset:
        loader = StatefulDataLoader(dataset, batch_size=None)
        for shard in loader:
            trained.append(ids_of(shard))
            if len(trained) == saved_behind + 1:
                state = json.loads(json.dumps(loader.state_dict()))
                break
    loader = StatefulDataLoader(service.dataset(), batch_size=None)
    loader.load_state_dict(state)
    trained += [ids_of(shard) for shard in loader]
    assert trained == everything()


def test_a_stateful_data_loader_that_was_never_asked_resumes_at_the_beginning(service):
    state = StatefulDataLoader(service.dataset(), batch_size=None).state_dict()
    loader = StatefulDataLoader(service.dataset(), batch_size=None)
    loader.load_state_dict(state)
    assert [ids_of(shard) for shard in loader] == everything()


def prepared(dataset):
    """accelerate's loader: fetches one shard ahead, and keeps the state of the one it gives."""
    settings = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    return accelerator.prepare(DataLoader(dataset, batch_size=None))


@pytest.mark.parametrize("saved_behind", range(STEPS))
def test_accelerates_stateful_loader_resumes_behind_the_step_it_was_saved_at(service, saved_behind):
    trained = []
    with service.dataset() as dataset:
        loader = prepared(dataset)
        shards = iter(loader)
        for _ in range(saved_behind + 1):
            trained.append(ids_of(next(shards)))
        state = loader.state_dict()
    resumed = prepared(service.dataset())
    resumed.load_state_dict(state)
    trained += [ids_of(shard) for shard in resumed]
    assert trained == everything()


def test_skipping_the_first_batches_from_the_beginning_is_exact(service):
    loader = skip_first_batches(DataLoader(service.dataset(), batch_size=None), 2)
    assert [ids_of(shard) for shard in loader] == everything()[2:]


def test_skipping_on_top_of_a_state_is_refused(service):
    dataset = service.dataset()
    dataset.load_state_dict({"version": 1, "job": "vlm-sft", "step": 2, "cursor": "cursor-2"})
    loader = skip_first_batches(DataLoader(dataset, batch_size=None), 2)
    with pytest.raises(
        MisuseError, match=r"next 2 steps .*before step 2 already.*ignore_data_skip"
    ):
        next(iter(loader))
