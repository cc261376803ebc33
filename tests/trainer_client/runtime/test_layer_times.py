"""Each layer of a model is timed and weighed while a load runs, by a clock that the test turns."""

import itertools

import pytest
import torch
from torch import nn

from dataservice.jobs.calibrate import calibrate_layers, read_measurements
from dataservice.jobs.layer_file import read_layer_file, write_layer_file
from dataservice.planning.layout.profile import LayerWork
from demo.model import DemoModel
from trainer_client.runtime.layer_times import kept_by_layer, layers_of, time_layers
from trainer_client.runtime.measure import main


class Tower(nn.Module):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def ticking():
    """A clock on which every look takes a second."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def run_of(tower: Tower, rows: int = 4):
    def run() -> None:
        made = tower(torch.ones(rows, 8)).sum()
        if made.requires_grad:
            made.backward()

    return run


def test_layers_are_the_members_of_lists_but_not_those_inside_them():
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    whole = nn.Module()
    whole.layers = nn.ModuleList(Mixture() for _ in range(3))
    assert layers_of(whole) == list(whole.layers)
    demo = DemoModel()
    blocks = [demo.encoders["vision"].blocks, demo.encoders["audio"].blocks, demo.layers]
    assert layers_of(demo) == [layer for part in blocks for layer in part]


def test_every_layer_has_its_part_of_both_passes_and_the_rest_is_told():
    tower = Tower()
    found = time_layers(layers_of(tower), run_of(tower), ticking())
    assert found.order == [0, 1, 2]
    assert found.forward_s == {0: 1.0, 1: 1.0, 2: 1.0}
    assert found.backward_s == {2: 1.0, 1: 1.0, 0: 1.0}
    assert found.total_s == found.outside_s + 6.0
    assert found.output_bytes == dict.fromkeys(range(3), 4 * 8 * 4)


def test_a_frozen_layer_takes_no_time_backward_and_keeps_nothing():
    tower = Tower(frozen=True)
    found = time_layers(layers_of(tower), run_of(tower), ticking())
    assert len(found.forward_s) == 3
    assert not found.backward_s
    assert kept_by_layer(layers_of(tower), run_of(tower)) == {}


@pytest.mark.parametrize("rows", [1, 16])
def test_a_layer_keeps_what_autograd_saves_in_it_without_its_weights(rows):
    tower = Tower()
    kept = kept_by_layer(layers_of(tower), run_of(tower, rows))
    assert kept == dict.fromkeys(range(3), rows * 8 * 4)  # its input


def test_hooks_are_gone_after_a_measurement():
    tower, looked = Tower(), []
    time_layers(layers_of(tower), run_of(tower), lambda: looked.append(1) or 0.0)
    before = len(looked)
    run_of(tower)()
    assert len(looked) == before


@pytest.mark.long
def test_a_model_s_layers_become_a_profile_that_a_layout_reads(tmp_path):
    flags = (
        "--model demo.model:DemoModel --layers --lengths 32 64 96 128 192 "
        "--item-tokens 16 32 64 128 256 --repeats 1 --device cpu --out"
    )
    status = main([*flags.split(), str(tmp_path / "m.json")])
    assert status == 0
    measured = read_measurements(tmp_path / "m.json")
    write_layer_file(tmp_path / "layers.yaml", calibrate_layers(measured))
    profile = read_layer_file(tmp_path / "layers.yaml")
    assert profile.names == (
        "vision.0", "vision.1", "vision.head", "audio.0", "audio.head",
        "decoder.0", "decoder.1", "decoder.head",
    )  # fmt: skip
    work = LayerWork.of(
        vision=([64.0], [64.0**2]), audio=([64.0], [64.0**2]), decoder=([128.0], [128.0**2])
    )
    forward, backward = profile.seconds(work)
    assert (forward > 0).all()
    assert (backward > 0).all()
    kept = profile.kept_bytes(work, "none")[0]
    assert kept[5] > profile.kept_bytes(work, "full")[0, 5] > 0
