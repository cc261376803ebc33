"""Layout files that the planner writes, read by a trainer that knows nothing of the planner."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from benchmarks import workloads
from dataservice.jobs.laid_out import layout_fields, write_actions, write_layout
from dataservice.planning.layout.model import Decoder, Encoder, ModelDescription, Projector
from dataservice.planning.layout.search import LayoutTask, search_layout
from demo.chunks import DemoEncoders, lay_out_model, sum_tied_gradient
from demo.model import DemoModel, ModelConfig
from tests.demo.scripted_steps import ONE_REPLICA, scripted_samples, shard_of, step_plan
from tests.planning.layout.small_models import nodes
from tests.trainer_client.runtime.conftest import run_world
from trainer_client.runtime import (
    GroupPool,
    HiddenStates,
    LayoutError,
    PipelineMesh,
    StageLayout,
    one_forward_one_backward,
    read_bubbles,
    run_pipeline_step,
    run_step,
    spread_encoders,
)
from trainer_client.synthetic import SyntheticJob, SyntheticMedia, synthetic_shards

VISION = Encoder(
    layers=2,
    hidden_size=512,
    heads=8,
    ffn_size=2048,
    input_size=588,
    tokens_per_row=4.0,
    projector=Projector(widths=(2048, 1024)),
)
AUDIO = replace(VISION, name="audio", layers=1, input_size=80, tokens_per_row=2.0)
DECODER = Decoder(layers=5, hidden_size=1024, heads=8, kv_heads=4, ffn_size=4096, vocabulary=8000)
MODEL = ModelDescription(name="demo", decoder=DECODER, encoders=(VISION, AUDIO))
CONFIG = ModelConfig(vocabulary=64, width=32, layers=5, heads=4, kv_heads=2, encoder_width=16)


@pytest.fixture(scope="module")
def searched():
    batches = (workloads.step_samples(workloads.vlm_sft(64, 0)),)
    task = LayoutTask(model=MODEL, group=nodes(1.2e9), batches=batches)
    return task, search_layout(task)


@pytest.fixture(scope="module")
def written(searched, tmp_path_factory):
    """(pipeline stages, virtual stages, encoders' place) → the file of the best such layout."""
    task, layout = searched
    folder = tmp_path_factory.mktemp("layouts")
    files = {}
    for candidate in (layout.best, *layout.others):
        parallel = candidate.replica.parallel
        key = parallel.pipeline_stages, parallel.virtual_stages, parallel.encoder_stage
        if key not in files:
            files[key] = folder / f"{len(files)}.yaml"
            chosen = replace(layout, best=candidate)
            write_layout(files[key], layout_fields(task, chosen))
            write_actions(files[key], chosen)
    return files


def test_encoders_that_are_cut_lie_on_the_chunks_that_the_file_names(written):
    found = 0
    for path in (path for (*_, place), path in written.items() if place == "cut"):
        layout, told = StageLayout.load(path), yaml.safe_load(path.read_text())["stages"]
        cut = layout.encoder_cut
        layers = {
            name: {
                chunk: sum(each.startswith(f"{name}.") and each[-1].isdigit() for each in held)
                for chunk, held in enumerate(of["layers"] for of in told)
            }
            for name in ("vision", "audio")
        }
        for name, parts in cut.parts.items():
            counts = {chunk: end - first for chunk, (first, end) in parts.items()}
            assert counts == {chunk: count for chunk, count in layers[name].items() if count}
        found = max(found, len({chunk for parts in cut.parts.values() for chunk in parts}))
        begins = [chunk for chunk, of in enumerate(told) if "decoder.0" in of["layers"]]
        assert [cut.decoder_chunk] == begins
    assert found > 1, "encoders lie on several chunks"


def test_seconds_of_encoders_that_are_cut_are_those_of_the_parts_in_the_file(written):
    samples = scripted_samples()
    shard = shard_of(step_plan(samples, ONE_REPLICA, [0] * 6), samples, 0)
    path = next(path for (*_, place), path in written.items() if place == "cut")
    layout = StageLayout.load(path)
    shares = yaml.safe_load(path.read_text())["job"]["topology"]["vision_shares"]
    backbone = one_forward_one_backward(layout.stages, layout.virtual_stages, 3)
    schedule = layout.encoder_cut.schedule(backbone, ("vision", "audio"), trains=[True, True])
    found = layout.seconds.timeline(shard, schedule)
    whole = layout.seconds.encoding_s(shard.microbatches[0], "vision")[0]
    parts = {
        span.action.first: span.end_s - span.start_s
        for span in found.encoders
        if (span.action.kind, span.action.microbatch, span.action.encoder) == ("EF", 0, 0)
    }
    assert sum(parts.values()) == pytest.approx(whole)
    held = [share / sum(shares) for share in shares if share > 0]
    for part in range(len(parts) - 1):
        assert parts[part] == pytest.approx(whole * held[part])


def test_every_kind_of_layout_is_found_and_read(written):
    places = {key for key in written if key[0] > 1}
    assert {place for *_, place in places} == {"first", "own", "cut", "spread", "bubbles"}
    assert {virtual for _, virtual, _ in places} == {1, 2}
    for (stages, virtual, found), path in written.items():
        place = "spread" if found == "bubbles" else found  # their list of actions says the rest
        layout, told = StageLayout.load(path), yaml.safe_load(path.read_text())
        assert (layout.stages, layout.virtual_stages) == (stages, virtual)
        assert layout.encoder_stage == place
        assert layout.chunks == len(told["stages"])
        assert layout.tensor_ranks == told["job"]["topology"]["tensor_parallel"]
        counts = [sum(name[-1].isdigit() for name in chunk["layers"]) for chunk in told["stages"]]
        assert np.diff(layout.bounds).tolist() == counts
        encoding = () if place == "spread" else ("vision", "vision", "audio")
        assert layout.modules == encoding + ("llm",) * 5
        if place == "own":
            assert layout.bounds[1] == 3


def test_what_recomputes_in_the_file_recomputes_in_the_model(written):
    hows = set()
    for (stages, *_), path in written.items():
        told = yaml.safe_load(path.read_text())
        named = {n: how for c in told["stages"] for how in ("full", "selective") for n in c[how]}
        layout = StageLayout.load(path)
        spread = layout.encoder_stage == "spread"
        expected = [named.get(f"decoder.{layer}", "none") for layer in range(5)]
        assert list(layout.recompute_of("llm", 5)) == expected
        encoder = [named.get(f"vision.{k}", "full" if spread else "none") for k in range(2)]
        assert list(layout.recompute_of("vision", 2)) == encoder
        hows |= {*expected, *encoder}
        if stages > 1:
            model = DemoModel(CONFIG)
            chunks = lay_out_model(model, layout)
            assert [block.recompute for block in model.layers] == expected
            assert len(chunks) == layout.chunks
    assert hows == {"none", "selective", "full"}


def test_predicted_seconds_are_those_of_the_file(written):
    path = written[2, 1, "first"]
    told = yaml.safe_load(path.read_text())["job"]
    seconds = StageLayout.load(path).seconds
    samples = scripted_samples()
    shard = shard_of(step_plan(samples, ONE_REPLICA, [0] * 6), samples, 0)
    forward, backward = seconds.decoding_s(shard)
    np.testing.assert_allclose((forward + backward).sum(axis=1), 0.25)  # as the shard says
    shares = np.array(told["topology"]["stage_shares"])
    np.testing.assert_allclose(forward, 0.25 / 3 * np.tile(shares / shares.sum(), (3, 1)))
    # The first microbatch's picture is 140 × 84 pixels: 10 × 6 patches.
    cost = told["plan"]["cost"]["vision"]
    both = (
        cost["linear_s_per_token"] * 60 + cost["quadratic_s_per_token2"] * 60**2 + cost["batch_s"]
    )
    first = shard.microbatches[0]
    assert [item.shape for item in first.vision.items] == [(1, 84, 140, 3)]
    assert sum(seconds.encoding_s(first, "vision")) == pytest.approx(both)
    assert seconds.encoding_s(shard.microbatches[0], "vision")[0] == pytest.approx(both / 3)
    assert seconds.encoding_s(replace(first, vision=None), "vision") == (0.0, 0.0)


def test_a_predicted_step_has_encoders_in_the_first_chunk_or_where_they_are_scheduled(written):
    samples = scripted_samples()
    shard = shard_of(step_plan(samples, ONE_REPLICA, [0] * 6), samples, 0)
    backbone = one_forward_one_backward(2, 1, 3)
    first = StageLayout.load(written[2, 1, "first"]).seconds
    forward, _ = first.decoding_s(shard)
    found = first.timeline(shard, backbone)
    encoding = [
        sum(first.encoding_s(microbatch, name)[0] for name in ("vision", "audio"))
        for microbatch in shard.microbatches
    ]
    assert min(encoding) > 0
    np.testing.assert_allclose(found.forward_s[:, 0], forward[:, 0] + encoding)
    np.testing.assert_allclose(found.forward_s[:, 1], forward[:, 1])
    schedule = spread_encoders(backbone, [2, 1], trains=[True, True])
    spread = StageLayout.load(written[2, 1, "spread"]).seconds
    found = spread.timeline(shard, schedule)
    np.testing.assert_allclose(found.forward_s, spread.decoding_s(shard)[0])
    assert len(found.encoders) == 2 * 3 * 2  # encoders, microbatches, directions
    assert sum(found.encoder_s.values()) == pytest.approx(
        sum(
            sum(spread.encoding_s(microbatch, name))
            for microbatch in shard.microbatches
            for name in ("vision", "audio")
        )
    )
    with pytest.raises(LayoutError, match="3 microbatches in 4 chunks"):
        first.timeline(shard, one_forward_one_backward(4, 1, 3))


def small_model():
    torch.manual_seed(3)
    return DemoModel(CONFIG).double()


def small_shard(microbatches):
    """A step with pictures and sounds, as many microbatches as a list of actions was made for."""
    media = SyntheticMedia(images=1.0, sounds=0.5, side_px=(28, 60), sound_s=(0.05, 0.3))
    (shard,) = synthetic_shards(
        SyntheticJob(
            microbatches=microbatches,
            memory_tokens=48,
            sample_tokens=(8, 40),
            vocabulary=CONFIG.vocabulary,
            media=media,
        )
    )
    return shard


def train_by_the_files(rank, size, paths):
    """What a stage finds when it is built by layout files and their lists alone."""
    found = {}
    for path in paths:
        layout, model = StageLayout.load(path), small_model()
        with PipelineMesh(
            stages=layout.stages,
            virtual_stages=layout.virtual_stages,
            tensor_ranks=layout.tensor_ranks,
            encoder_stage=layout.encoder_stage,
            timeout_s=60,
            lane=path.stem,
        ) as mesh:
            actions = path.with_suffix(".actions").read_text()
            schedule, planned = read_bubbles(actions, stages=layout.stages)
            chunks = lay_out_model(model, layout)[mesh.stage :: mesh.stages]
            shard = small_shard(schedule.backbone.microbatches)
            hidden = HiddenStates(width=CONFIG.width, dtype=torch.float64)
            encoders = DemoEncoders(
                model, modalities=("vision",)
            )  # the layout's samples had no sound
            result = run_pipeline_step(
                chunks, shard, mesh, hidden, schedule=schedule, encoders=encoders
            )
            sum_tied_gradient(chunks, mesh)
        mine = {id(weight) for part in (*chunks, encoders) for weight in part.parameters()}
        predicted = layout.seconds.timeline(shard, schedule, modalities=encoders.modalities)
        found[path] = {
            "loss": result.loss,
            "grads": {name: p.grad for name, p in model.named_parameters() if id(p) in mine},
            "ran": {(span.stage, span.action) for span in result.timeline.encoders},
            "planned": {(span.stage, span.action) for span in planned.encoders},
            "predicted": {(span.stage, span.action) for span in predicted.encoders},
        }
    return found


def test_encoders_in_bubbles_are_trained_by_the_two_files_of_their_layout(written, tmp_path):
    paths = [written[2, virtual, "bubbles"] for virtual in (1, 2)]
    trained = run_world(train_by_the_files, 2, tmp_path, paths)
    for path in paths:
        microbatches = yaml.safe_load(path.read_text())["bubbles"]["microbatches"]
        whole = small_model()
        shard = small_shard(microbatches)
        assert any(microbatch.audio for microbatch in shard.microbatches), "the first chunk's"
        loss = run_step(whole, shard, GroupPool(replica=0, replicas=1)).loss
        expected = {name: weight.grad for name, weight in whole.named_parameters()}
        seen = set()
        for found in (answer[path] for answer in trained.values()):
            assert found["loss"] == pytest.approx(loss, rel=1e-10)
            assert found["ran"] == found["planned"] == found["predicted"]
            for name, grad in found["grads"].items():
                assert (grad - expected[name]).norm() <= 1e-10 * expected[name].norm(), name
            seen |= found["grads"].keys()
        assert seen == expected.keys()


@pytest.mark.parametrize("how", ["none", "full"])
def test_encoders_in_bubbles_recompute_what_their_layout_says(written, how):
    plain = yaml.safe_load(written[2, 1, "bubbles"].read_text())
    plain["bubbles"]["recompute"] = how
    layout = StageLayout.of(plain)
    assert layout.recompute_of("vision", 2) == (how,) * 2
    del plain["bubbles"]  # encoders around the pipeline
    assert StageLayout.of(plain).recompute_of("vision", 2) == ("full",) * 2
    with pytest.raises(LayoutError, match="recompute has 'some'"):
        replace(layout, spread_recompute="some")


TRAINER = """
import sys
from trainer_client.runtime import LayoutError, StageLayout
as_yaml, as_json = sys.argv[1:]
found = StageLayout.load(as_yaml)
sys.modules["yaml"] = None  # as where PyYAML is not installed
assert StageLayout.load(as_json) == found
try:
    StageLayout.load(as_yaml)
except LayoutError as error:
    print(error)
print("dataservice" in sys.modules, found.bounds)
"""


def test_a_layout_is_read_without_the_service_and_as_json_without_pyyaml(written, tmp_path):
    as_yaml, as_json = written[2, 1, "first"], tmp_path / "layout.json"
    as_json.write_text(json.dumps(yaml.safe_load(as_yaml.read_text()), indent=2))
    command = [sys.executable, "-c", TRAINER, str(as_yaml), str(as_json)]
    said, found = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "PyYAML, which reads it, is not installed" in said
    assert "`dataservice layout --json`" in said
    assert found == f"False {StageLayout.load(as_yaml).bounds}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "neither JSON nor YAML"),
        ("- 1", "has format None, and this client reads 1"),
        ("format: 2", "has format 2, and this client reads 1"),
        ("format: 1\njob: {topology: {}, plan: {}}", "lacks `job` with `topology` and `plan`, or"),
        ("format: 1\njob: {topology: {}, plan: {}}\nstages: [{stage: 0}]", "or `stages`"),
        (
            "format: 1\njob: {topology: {virtual_stages: 3}, plan: {}}\n"
            "stages: [{stage: 0, layers: [decoder.0]}, {stage: 1, layers: [decoder.1]}]",
            "2 chunks cannot be 3 virtual stages",
        ),
        (
            "format: 1\njob: {topology: {}, plan: {}}\n"
            "stages: [{stage: 1, layers: [decoder.0]}, {stage: 0, layers: [decoder.1]}]",
            r"stand on stages \[1, 0\]; chunk c runs on stage c mod 2",
        ),
    ],
)
def test_a_file_that_is_no_layout_is_refused_with_what_to_do(tmp_path, text, words):
    path = tmp_path / "layout.yaml"
    path.write_text(text)
    with pytest.raises(LayoutError, match=words):
        StageLayout.load(path)
    with pytest.raises(LayoutError, match="cannot be read"):
        StageLayout.load(tmp_path / "none.yaml")
