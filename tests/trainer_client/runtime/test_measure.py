"""The measuring script: who shares what, how items grow, and packs cut as the service cuts."""

import argparse
from dataclasses import replace

import numpy as np
import pytest
import torch

from dataservice.core.layout import member_rows, padded_tokens
from demo.model import DemoModel, ModelConfig
from tests.trainer_client.runtime.random_steps import make_model
from trainer_client.errors import BadArgument
from trainer_client.runtime import GroupPool, measure
from trainer_client.runtime.loads import (
    EncodedAs,
    Groups,
    Load,
    decoder_loads,
    grown,
    make_microbatch,
    partitions,
)
from trainer_client.runtime.measure import build_model, undisturbed_s


@pytest.mark.parametrize(("replicas", "per_node"), [(1, 1), (4, 4), (8, 4), (6, 2), (7, 7)])
def test_groups_are_disjoint_of_one_degree_and_inside_a_node_or_across(replicas, per_node):
    ways = list(partitions(range(1, 9), replicas, per_node))
    assert {way.degree for way in ways} == set(range(1, replicas + 1))
    for way in ways:
        members = [replica for group in way.members for replica in group]
        assert len(members) == len(set(members)) > 0
        assert set(members) <= set(range(replicas))
        for group in way.members:
            assert len(group) == way.degree
            assert (len({replica // per_node for replica in group}) > 1) == way.crosses_node
        assert all(way.of(replica) == (replica,) for replica in set(range(replicas)) - set(members))


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_a_microbatch_is_cut_as_the_service_cuts_it(degree):
    tokens = [7, 64, 31]
    padded = padded_tokens(np.array(tokens), degree)
    positions = np.concatenate([np.arange(n) for n in padded])
    for member in range(degree):
        made = make_microbatch(tokens, tuple(range(degree)), member, torch.device("cpu"))
        rows = member_rows(padded, degree, member)
        assert made.position_ids.tolist() == positions[rows].tolist()
        assert made.cu_seqlens.tolist() == [0, *np.cumsum(padded).tolist()]
        assert made.lengths.tolist() == tokens
        assert len(made.input_ids) == made.local_tokens


def test_items_grow_by_area_by_frames_or_in_time():
    picture, sound = torch.zeros(1, 28, 56, 3), torch.zeros(640)
    area, frames = EncodedAs.parse("vision:4:area"), EncodedAs.parse("vision:4:frames")
    audio = EncodedAs.parse("audio:2:area")
    for times in (1, 2, 5, 12, 100):
        item = grown(picture, times, area)
        assert item.shape[0] == 1
        assert item.shape[1] % 28 == item.shape[2] % 56 == 0
        assert abs(item.numel() / picture.numel() - times) <= times / 4
        assert grown(picture, times, frames).shape == (times, 28, 56, 3)
        assert grown(sound, times, audio).shape == (640 * times,)
    assert grown(picture, 0, area).shape == picture.shape


@pytest.mark.parametrize(
    ("frozen", "backward"), [((), 1), (("decoder",), 1), (("decoder", "vision", "audio"), 0)]
)
def test_a_decoder_is_measured_backward_where_it_trains_or_encoders_before_it(frozen, backward):
    model, passes = make_model(frozen), []
    model.layers[0].mlp.register_full_backward_hook(lambda *_: passes.append("back"))
    alone = Groups(degree=1, crosses_node=False, members=((0,),))
    with GroupPool() as pool:
        (of_one,) = decoder_loads(model, pool, alone, (8,), modalities=("vision", "audio"))
        of_one.run()
    assert passes == ["back"] * backward


def load(members, **more):
    groups = Groups(degree=len(members[0]), crosses_node=False, members=members)
    return Load(phase="llm", tokens=(64,), groups=groups, run=lambda: None, **more)


def test_what_disturbs_a_few_repeats_does_not_show():
    rng = np.random.default_rng(0)
    calm = 0.1 * (1 + 0.005 * rng.standard_normal((4, 9)))
    disturbed = calm * np.where(rng.random(calm.shape) < 0.4, rng.uniform(1.2, 4, calm.shape), 1)
    for members in (((0,), (1,), (2,), (3,)), ((0, 1), (2, 3))):
        assert undisturbed_s(load(members), disturbed) == pytest.approx(0.1, rel=0.02)


def test_a_group_takes_as_long_as_its_slowest_member():
    seconds = np.array([[1.0], [3.0], [2.0], [9.0]])  # the last is in no group
    assert undisturbed_s(load(((0, 1, 2),)), seconds) == 3.0


def test_every_load_is_measured_in_every_round_and_rounds_differ_in_order(monkeypatch):
    ran = []

    def some_loads(model, pool, options):
        for n in range(12):
            one = load(((0,),))
            yield replace(one, tokens=(n,), run=lambda n=n: ran.append(n))

    monkeypatch.setattr(measure, "all_loads", some_loads)
    with GroupPool() as pool:
        found = measure.measure(
            torch.nn.Linear(2, 2), pool, argparse.Namespace(repeats=3), tell=lambda line: None
        )
    rounds = [ran[first : first + 12] for first in range(0, len(ran), 12)]
    assert len(rounds) == 4, "one to warm up"
    assert all(sorted(of_round) == list(range(12)) for of_round in rounds)
    assert len({tuple(of_round) for of_round in rounds}) == 4
    assert [row["tokens"] for row in found["llm"]] == [[n] for n in range(12)]
    assert not any("peak_bytes" in row for row in found["llm"]), "a CPU tells none"


def test_a_peak_stands_beside_its_seconds_where_one_was_measured():
    one = load(((0,),))
    assert one.row(0.5, 2.0**20)["peak_bytes"] == 2.0**20
    assert "peak_bytes" not in one.row(0.5, float("nan"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA tells a peak")
def test_a_peak_is_what_work_adds_to_what_was_there():
    device = torch.device("cuda", 0)
    before = torch.empty(2**22, dtype=torch.uint8, device=device)
    gauge = measure.PeakGauge(device)
    gauge.begin()
    added = torch.empty(2**24, dtype=torch.uint8, device=device)
    del added
    assert 2**24 <= gauge.peak_bytes() < 2**24 + 2**22
    del before


def every_load(rank, size, *flags):
    """Phases and tokens of all loads of a small model, each run once."""
    told = measure.parser().parse_args(
        ["--model", "m", "--out", "o", "--lengths", "32", "--item-tokens", "8", *flags]
    )
    torch.set_num_threads(1)
    with GroupPool(timeout_s=60) as pool:
        model = DemoModel(ModelConfig(width=32, encoder_width=16, layers=1, vocabulary=256))
        told.repeats = 1
        found = measure.measure(model, pool, told, tell=lambda line: None)
        return {
            phase: sorted((tuple(row["tokens"]), row["seconds"]) for row in rows)
            for phase, rows in found.items()
        }


def test_exchanges_and_what_a_step_takes_once_are_measured_by_the_runtime_itself(world):
    answers = world(every_load, 2, "--exchanged-rows", "4", "64")
    assert answers[0] == answers[1], "the same on every rank"
    assert answers[0].keys() == {"llm", "vision", "audio", "exchange", "gradients"}
    assert [tokens for tokens, _ in answers[0]["exchange"]] == [(4,), (64,)]
    assert [tokens for tokens, _ in answers[0]["gradients"]] == [(1,)]
    assert min(seconds for rows in answers[0].values() for _, seconds in rows) > 0


def test_a_wrapped_model_s_sum_of_gradients_is_not_measured_and_one_rank_moves_nothing(world):
    assert "gradients" not in world(every_load, 2, "--wrapped")[0]
    assert world(every_load, 1)[0].keys() == {"llm", "vision", "audio"}


@pytest.mark.parametrize("text", ["video:4:area", "vision:four:area", "vision:4:sideways"])
def test_a_modality_that_is_none_is_refused_with_the_form(text):
    with pytest.raises(BadArgument, match="NAME:TOKENS_PER_ROW:GROWS"):
        EncodedAs.parse(text)


def test_what_is_no_multimodal_model_is_refused_with_what_it_lacks():
    with pytest.raises(BadArgument, match="without decode, encode, dummy_item, encoder_trains"):
        build_model("torch.nn:Identity", torch.device("cpu"), None)
    with pytest.raises(BadArgument, match="cannot be imported"):
        build_model("nowhere:build", torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (("--degrees", "0"), "error: 0 is no number of"),
        (("--lengths", "16", "-5"), "error: -5 is no number of"),
        (("--repeats", "0"), "error: 0 is no number of"),
        (("--dtype", "half-precision"), "error: --dtype 'half-precision' is no type of weights"),
        (("--dtype", "int8"), "error: --dtype 'int8' is no type of weights"),
        (("--device", "gpu"), "error: --device 'gpu' is no device"),
        (("--out", "nowhere/m.json"), "error: --out nowhere/m.json is in a folder that does not"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(capsys, mistake, told):
    given = ("--model", "demo.model:DemoModel", "--out", "m.json", *mistake)
    assert measure.main(given) == 1
    said = capsys.readouterr()
    assert (said.out, said.err[: len(told)]) == ("", told)
