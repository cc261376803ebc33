"""`dataservice layout`, from a model's name and a cluster file to a job that is planned by it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dataservice.jobs.job_file import read_job
from dataservice.jobs.layer_file import layer_file, write_layer_file
from dataservice.jobs.layout_files import read_cluster, read_model
from dataservice.planning.layout.actions import parse_actions
from dataservice.planning.layout.costs import analytic_profile
from tests.cli.support import CommandLine, says
from tests.service.small import make_corpus, write_job

TWO_GPUS = """
groups:
  - nodes: 1
    gpus_per_node: 2
    device: {peak_flops: 1.0e+15, memory_bytes: 8.0e+10, memory_bytes_per_s: 3.0e+12}
    inside_bytes_per_s: 4.0e+11
    between_bytes_per_s: 5.0e+10
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, cli: CommandLine) -> Path:
    """A corpus with its index, and a cluster file."""
    made = make_corpus(tmp_path_factory.mktemp("layout") / "corpus")
    cli.ok("index", write_job(made), "--processes", "1")
    (made / "cluster.yaml").write_text(TWO_GPUS)
    return made


def lay_out(cli, home, model, *more, cluster="cluster.yaml"):
    job, out = home / "job.yaml", home / "layout.yaml"
    return cli("layout", model, home / cluster, "--job", job, "--out", out, "--steps", "1", *more)


def test_a_shipped_model_is_laid_out_for_the_samples_of_a_job_that_then_names_the_file(cli, home):
    done = lay_out(cli, home, "qwen2-vl-2b")
    assert done.code == 0, done.said
    says(done.said, "qwen2-vl-2b on 2 GPUs", "tensor_parallel", "over the bound", "layout.yaml")
    told = yaml.safe_load((home / "layout.yaml").read_text())
    assert 0 < told["lower_bound_s"] <= told["step_s"]
    text = write_job(home, job="by-layout", layout="layout.yaml", plan={}).read_text()
    spec = read_job(text, home)
    assert spec.plan.memory_tokens == told["job"]["plan"]["memory_tokens"]
    assert spec.topology.pipeline_parallel == told["job"]["topology"]["pipeline_parallel"]


def test_as_json_it_prints_what_it_writes(cli, home):
    done = lay_out(cli, home, "qwen2-vl-2b", "--json")
    assert done.code == 0, done.said
    assert json.loads(done.out) == yaml.safe_load((home / "layout.yaml").read_text())


def test_a_model_that_does_not_fit_is_told_by_how_many_bytes(cli, home):
    done = lay_out(cli, home, "qwen2.5-vl-72b")
    assert done.code == 1
    says(done.said, "bytes a GPU", "too many", "Give at least")
    assert "Traceback" not in done.said


def test_a_name_that_is_nearly_right_is_suggested(cli, home):
    done = lay_out(cli, home, "qwen2-vl-2")
    assert done.code == 1
    says(done.said, "Did you mean", "qwen2-vl-2b")


def test_several_near_names_are_suggested_and_a_list_has_them_all(cli, home):
    done = lay_out(cli, home, "qwen2.5-vl")
    assert done.code == 1
    says(done.said, "qwen2.5-vl-3b", "qwen2.5-vl-7b", "--list")
    listed = cli("layout", "--list")
    assert listed.code == 0, listed.said
    says(listed.said, "qwen2-vl-2b", "omnibal-internvit-6b-llama-3-70b", "billion", "MMScale")


def test_of_a_mix_of_nodes_each_kind_is_laid_out_and_the_fastest_is_named(cli, home):
    group = yaml.safe_load(TWO_GPUS)["groups"][0]
    slow = {**group, "device": {**group["device"], "name": "old", "peak_flops": 1e14}}
    tiny = {**group, "device": {**group["device"], "name": "tiny", "memory_bytes": 1e9}}
    (home / "mixed.yaml").write_text(yaml.safe_dump({"groups": [slow, tiny, group]}))
    done = lay_out(cli, home, "qwen2-vl-2b", cluster="mixed.yaml")
    assert done.code == 0, done.said
    says(done.said, "for 1 × 2 GPU alone", "1 × 2 old alone", "s a step", "1 × 2 tiny alone",
         "bytes a GPU")  # fmt: skip
    told = yaml.safe_load((home / "layout.yaml").read_text())
    assert told["device"] == "GPU"
    old, least = told["other_nodes"]
    assert (old["device"], least["device"], least["step_s"]) == ("old", "tiny", None)
    assert old["step_s"] > told["step_s"]
    mixed = told["mixed_nodes"]
    assert (mixed["encoder_nodes"], mixed["decoder_nodes"]) == ("1 × 2 old", "1 × 2 GPU")
    assert mixed["formula_s"] < told["own_gpus"]["formula_s"]
    says(done.said, "the mix used together: encoders on 1 × 2 old, decoder on 1 × 2 GPU",
         "the runtime trains on one kind")  # fmt: skip


def test_a_step_is_drawn_before_and_after_as_svg_and_png(cli, home):
    pictures = [home / "pipeline.svg", home / "pipeline.png"]
    flags = [word for path in pictures for word in ("--draw", path)]
    done = lay_out(cli, home, "qwen2-vl-2b", *flags)
    assert done.code == 0, done.said
    says(done.said, "drew", "pipeline.svg", "pipeline.png")
    assert "qwen2-vl-2b on 2 GPUs" in pictures[0].read_text()
    assert pictures[1].read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_another_kind_is_refused_before_anything_is_searched(cli, home):
    done = lay_out(cli, home, "qwen2-vl-2b", "--draw", home / "pipeline.pdf")
    assert done.code == 1
    says(done.said, "pipeline.pdf ends with '.pdf'", ".svg or .png")


def test_a_folder_that_is_not_there_is_named_before_anything_is_searched(cli, home):
    done = cli("layout", "qwen2-vl-2b", home / "cluster.yaml", "--out", home / "away" / "a.yaml")
    assert done.code == 1
    says(done.said, "has no folder", "make it first")


def test_encoders_in_bubbles_are_written_as_a_list_of_actions_beside_the_layout(cli, home):
    """Of two stages, since a GPU alone has no room, and its link is slow."""
    group = yaml.safe_load(TWO_GPUS)["groups"][0]
    device = {**group["device"], "memory_bytes": 2.4e10}
    small = {**group, "device": device, "inside_bytes_per_s": 1e9}
    (home / "small.yaml").write_text(yaml.safe_dump({"groups": [small]}))
    done = lay_out(cli, home, "qwen2-vl-2b", "--encoders", "bubbles", cluster="small.yaml")
    assert done.code == 0, done.said
    says(done.said, "encoders in bubbles", "pipelines of PP", "layout.actions")
    told = yaml.safe_load((home / "layout.yaml").read_text())
    assert told["actions"] == "layout.actions"
    actions = parse_actions((home / "layout.actions").read_text())
    assert set(actions.device.tolist()) == {0, 1}
    spec = read_job(write_job(home, job="bubbled", layout="layout.yaml", plan={}).read_text(), home)
    assert (spec.topology.pipeline_parallel, spec.topology.encoder_stage) == (2, "spread")


def test_a_place_of_encoders_that_is_none_is_refused(cli, home):
    done = lay_out(cli, home, "qwen2-vl-2b", "--encoders", "nowhere")
    assert done.code == 1
    says(done.said, "--encoders is 'nowhere'", "first, own, cut, spread, bubbles")


def test_modules_on_gpus_of_their_own_are_told_beside_the_layout(cli, home):
    done = lay_out(cli, home, "qwen2-vl-2b")
    says(done.said, "each module on GPUs of its own", "MMScale's formula", "by the step planner")
    beside = yaml.safe_load((home / "layout.yaml").read_text())["own_gpus"]
    assert [module["name"] for module in beside["modules"]] == ["vision", "decoder"]
    assert beside["formula_s"] > 0
    assert beside["chosen_formula_s"] > 0


def test_a_model_with_a_generator_is_laid_out_by_its_modules(cli, home):
    group = {**yaml.safe_load(TWO_GPUS)["groups"][0], "nodes": 8, "gpus_per_node": 8}
    (home / "many.yaml").write_text(yaml.safe_dump({"groups": [group]}))
    tokens = ("--generator-tokens", "4096")
    done = lay_out(cli, home, "mmscale-mllm-9b", *tokens, cluster="many.yaml")
    assert done.code == 0, done.said
    says(done.said, "mmscale-mllm-9b on 64 GPUs", "generator", "a job cannot name it")
    told = yaml.safe_load((home / "layout.yaml").read_text())
    names = [module["name"] for module in told["own_gpus"]["modules"]]
    assert names == ["vision", "decoder", "generator"]
    assert "job" not in told


def test_what_is_for_replicas_of_one_shape_is_refused_beside_a_generator(cli, home):
    tokens = ("--generator-tokens", "4096")
    for given in (("--encoders", "own"), ("--overlap-gradients",), ("--draw", home / "a.svg")):
        done = lay_out(cli, home, "mmscale-mllm-9b", *tokens, *given)
        assert done.code == 1
        says(done.said, "mmscale-mllm-9b has a generator", f"leave {given[0]} out")


def test_what_cannot_be_written_and_strange_places_are_told_before_anything_is_read(cli, home):
    """There is no index, of which nothing is said."""
    for name in ("taken.yaml", "taken.svg"):
        (home / name).mkdir()
    no_index = ("--index", home / "nowhere", "--batch", "8")
    for given, words in (
        (("--out", home / "taken.yaml"), ("taken.yaml", "cannot be written", "with --out")),
        (("--draw", home / "taken.svg", "--out", home / "new.yaml"), ("taken.svg", "with --draw")),
        (("--encoders", "middle"), ("'middle'", "first, own, cut, spread, bubbles")),
    ):
        done = cli("layout", "qwen2-vl-2b", home / "cluster.yaml", *no_index, *given)
        assert done.code == 1
        says(done.said, *words)
    assert not (home / "new.yaml").exists()


def test_a_layout_does_not_take_the_name_of_its_list_of_actions(cli, home):
    done = cli("layout", "qwen2-vl-2b", home / "cluster.yaml", "--out", home / "layout.actions")
    assert done.code == 1
    says(done.said, "layout.actions", "let it end in .yaml")


def test_a_generator_without_its_tokens_is_asked_for_them(cli, home):
    done = lay_out(cli, home, "mmscale-mllm-9b")
    assert done.code == 1
    says(done.said, "has a generator", "--generator-tokens")
    done = lay_out(cli, home, "qwen2-vl-2b", "--generator-tokens", "5")
    assert done.code == 1
    says(done.said, "has no generator")


def bare(cli, home, *more):
    out = home / "layout.yaml"
    return cli("layout", "qwen2-vl-2b", home / "cluster.yaml", "--out", out, "--steps", "1", *more)


def test_an_index_alone_is_enough_with_the_samples_of_a_step(cli, home):
    done = bare(cli, home, "--index", home / "index", "--batch", "6")
    assert done.code == 0, done.said
    says(done.said, "qwen2-vl-2b on 2 GPUs", "over the bound")


def test_exactly_one_of_a_job_and_an_index_is_asked_for(cli, home):
    index, job = ("--index", home / "index"), ("--job", home / "job.yaml")
    for given, words in {
        (): "exactly one of --job and --index",
        (*index, *job): "either --job or --index, not both",
        index: "give --batch SAMPLES",
        (*job, "--batch", "4"): "--batch is 4, and the job file of --job says its batch",
        (*index, "--batch", "999"): "--batch is 999",
    }.items():
        done = bare(cli, home, *given)
        assert done.code == 1, done.said
        says(done.said, words)


@pytest.mark.long
def test_measured_layers_take_the_place_of_computed_ones(cli, home):
    first = ("--encoders", "first")
    computed = bare(cli, home, "--index", home / "index", "--batch", "6", "--json", *first)
    write_layers(home / "layers.yaml", "qwen2-vl-2b", slower=3.0)
    measured = ("--layers", home / "layers.yaml", "--encoders", "first")
    done = bare(cli, home, "--index", home / "index", "--batch", "6", "--json", *measured)
    assert done.code == 0, done.said
    assert json.loads(done.out)["step_s"] > 1.5 * json.loads(computed.out)["step_s"]
    shown = bare(cli, home, "--index", home / "index", "--batch", "6", *measured)
    says(shown.said, "layers.yaml has them, measured without tensor parallelism")


def test_layers_that_were_measured_on_one_kind_of_nodes_are_refused_for_several(cli, home):
    write_layers(home / "layers.yaml", "qwen2-vl-2b")
    group = yaml.safe_load(TWO_GPUS)["groups"][0]
    (home / "mixed.yaml").write_text(yaml.safe_dump({"groups": [group, group]}))
    given = ("--job", home / "job.yaml", "--layers", home / "layers.yaml")
    done = cli("layout", "qwen2-vl-2b", home / "mixed.yaml", *given)
    assert done.code == 1
    says(done.said, "measured on one kind of nodes", "mixed.yaml has 2", "leave --layers out")


def test_layers_of_another_model_are_refused_with_both_names(cli, home):
    write_layers(home / "layers.yaml", "qwen2-vl-7b")
    given = ("--index", home / "index", "--batch", "6", "--layers", home / "layers.yaml")
    done = bare(cli, home, *given)
    assert done.code == 1
    says(done.said, "layers.yaml is not of qwen2-vl-2b", "decoder.0", "lay out the one")


def write_layers(path, name, *, slower=1.0):
    """A layer file as `calibrate --layers` writes it, of seconds that are computed."""
    profile = analytic_profile(
        read_model(name), read_cluster(path.parent / "cluster.yaml").groups[0]
    )

    def longer(pace):
        return replace(pace, token_s=pace.token_s * slower, square_s=pace.square_s * slower)

    slow = replace(profile, forward=longer(profile.forward), backward=longer(profile.backward))
    made = layer_file(slow, measured=None, held_out={})
    layers = [row for row in made.layers if row.name.rsplit(".", 1)[1].isdigit()]
    halved = [row.model_copy(update=weights_alone(row)) for row in layers]
    write_layer_file(path, made.model_copy(update={"layers": halved}))


def weights_alone(row):
    """Gradients in the type of the weights, as they are measured."""
    weights = row.state_bytes - row.gradient_bytes
    return {"state_bytes": 2 * weights, "gradient_bytes": weights}
