"""Descriptions of models and clusters: those that ship count what is published of them."""

import tomllib
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from dataservice.core.errors import SpecError
from dataservice.jobs import layout_files
from dataservice.jobs.layout_files import read_cluster, read_model, shipped

ROOT = Path(__file__).resolve().parents[2]

PUBLISHED = {
    "qwen2-vl-2b": 2_208_985_600, "qwen2-vl-7b": 8_291_375_616, "qwen2-vl-72b": 73_405_560_320,
    "qwen2.5-vl-3b": 3_754_622_976, "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336, "qwen2.5-vl-72b": 73_410_777_344,
}  # fmt: skip
"""Weights that the files of the models hold, as their cards say."""

ROUNDED = {
    "qwen3-vl-2b": 2.13, "qwen3-vl-4b": 4.44, "qwen3-vl-8b": 8.77, "qwen3-vl-32b": 33.4,
    "qwen3-vl-30b-a3b": 31.1, "qwen3-vl-235b-a22b": 236, "internvl3-1b": 0.94,
    "internvl3-2b": 2.09, "internvl3-8b": 7.94, "internvl3-14b": 15.1, "internvl3-38b": 38.4,
    "internvl3-78b": 78.4, "internvl2.5-4b": 3.71, "llava-1.5-7b": 7.06, "llava-1.5-13b": 13.4,
    "llava-next-7b": 7.06, "llava-next-13b": 13.4, "llava-next-34b": 34.8,
    "llava-onevision-0.5b": 0.894, "llava-onevision-7b": 8.03, "llava-onevision-72b": 73.2,
}  # fmt: skip
"""Billions of weights that the cards of the models round to."""

OMNIBAL_SPLITS = {
    "internvit-6b-llama-3-8b": [16, 17, 20, 24], "internvit-6b-internlm2-20b": [22, 23, 24, 24],
    "internvit-6b-yi-34b": [28, 29, 24, 24],
    "internvit-6b-llama-3-70b": [22, 23, 13, 14, 14, 14, 13, 12],
    "internvit-6b-qwen1.5-110b": [21, 22, 13, 13, 14, 14, 14, 14],
    "eva-clip-1b-internlm2-20b": [43, 16, 15, 14], "eva-clip-8b-internlm2-20b": [17, 18, 23, 22],
    "eva-clip-18b-internlm2-20b": [18, 19, 25, 34],
}  # fmt: skip
"""Layers of the stages in table 9. Those of EVA-CLIP-4B add up to 102, ten fewer than it has."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_model_has_as_many_weights_as_its_files(name: str) -> None:
    assert read_model(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_a_shipped_model_has_the_weights_that_its_card_rounds(name: str) -> None:
    assert read_model(name).parameters / 1e9 == pytest.approx(ROUNDED[name], rel=0.006)


def test_a_shipped_model_is_the_one_that_transformers_makes() -> None:
    config = CONFIG_MAPPING["internvl"](
        vision_config={"attention_bias": True},
        text_config={
            "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
            "vocab_size": 151674,
        },
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert read_model("internvl3-8b").parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", OMNIBAL_SPLITS)
def test_omnibals_models_have_the_layers_of_its_published_stages(name: str) -> None:
    model = read_model(f"omnibal-{name}")
    layers = model.encoders[0].layers + model.decoder.layers
    assert layers == sum(OMNIBAL_SPLITS[name])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("omnibal-internvit-6b-llama-3-8b", (5.5, 8.03)),  # InternViT-6B of V1.5, and its card
        ("omnibal-internvit-6b-internlm2-20b", (5.5, 19.9)),
        ("omnibal-internvit-6b-yi-34b", (5.5, 34.4)),
        ("omnibal-internvit-6b-llama-3-70b", (5.5, 70.6)),
        ("omnibal-internvit-6b-qwen1.5-110b", (5.5, 111)),
        ("omnibal-eva-clip-1b-internlm2-20b", (1.0, 19.9)),
        ("omnibal-eva-clip-4b-internlm2-20b", (4.4, 19.9)),
        ("omnibal-eva-clip-8b-internlm2-20b", (7.5, 19.9)),
        ("omnibal-eva-clip-18b-internlm2-20b", (17.5, 19.9)),
        ("mmscale-mllm-9b", (0.63, 6.74)),
        ("mmscale-mllm-15b", (0.63, 13.0)),
        ("mmscale-mllm-72b", (0.63, 70.6)),
        ("optimus-small", (3.06, 9.2)),  # the paper says 11B, which its 80 layers do not give
        ("optimus-a", (9.66, 68.9)),
        ("optimus-b", (21.8, 68.9)),
        ("optimus-d", (21.8, 174.6)),
    ],
)
def test_the_papers_modules_have_their_weights(name: str, billions: tuple[float, float]) -> None:
    """Within 1.5 %, the vectors of biases and norms being a guess where a paper has none."""
    model = read_model(name)
    found = [model.encoders[0].parameters / 1e9, model.decoder.parameters / 1e9]
    assert found == pytest.approx(list(billions), rel=0.015)


def test_optimus_says_vits_of_3_to_22_billion() -> None:
    for name, billions in (("small", 3), ("a", 10), ("b", 22), ("dual-11b-5b", 10)):
        found = read_model(f"optimus-{name}").encoders[0].parameters / 1e9
        assert found == pytest.approx(billions, rel=0.04)
    dual = read_model("optimus-dual-22b-5b")
    assert dual.encoders[1].parameters / 1e9 == pytest.approx(5.5, rel=0.02)
    assert dual.module_names == ("vision", "vision_2", "decoder")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("internvl3-2b", (28, 12, 2, 1536, 1024)),
        ("internvl2.5-4b", (36, 16, 2, 2048, 1024)),  # DHP writes 8 groups: queries a head of keys
        ("internvl3-8b", (28, 28, 4, 3584, 1024)),
        ("qwen3-vl-2b", (28, 16, 8, 2048, 1024)),
        ("qwen3-vl-4b", (36, 32, 8, 2560, 1024)),
        ("qwen3-vl-8b", (36, 32, 8, 4096, 1152)),
    ],
)
def test_dhps_models_have_the_shapes_of_its_appendix(name: str, shape: tuple[int, ...]) -> None:
    model = read_model(name)
    decoder, encoder = model.decoder, model.encoders[0]
    assert shape == (
        decoder.layers, decoder.heads, decoder.key_heads, decoder.hidden_size, encoder.hidden_size,
    )  # fmt: skip


def test_every_shipped_description_can_be_read() -> None:
    for name in shipped():
        assert read_model(name).source
    assert {"h100", "a800"} <= set(shipped("nodes"))


def test_the_catalog_is_packed_into_the_wheel() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = packed["package-data"]["dataservice.jobs.catalog"]
    assert (layout_files.CATALOG / "__init__.py").exists()  # a folder that setuptools finds
    found = {path for each in patterns for path in layout_files.CATALOG.glob(each)}
    assert {path.name for path in found} == {
        "encoders.yaml", "decoders.yaml", "models.yaml", "nodes.yaml",
    }  # fmt: skip


MODEL = """
name: mine
encoders:
  - use: internvit-6b
    frozen: true
    tokens_per_row: 4
    projector: {widths: [12800, 4096]}
decoder: {use: llama-3-8b, layers: 16}
generator: {parameters: 1000, flops_per_token: 1.0e+6, kept_bytes_per_token: 8}
"""


def test_a_file_takes_parts_by_name_and_changes_them(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    model = read_model(tmp_path / "model.yaml")
    assert model.name == "mine"
    assert model.decoder.layers == 16
    assert model.encoders[0].frozen
    assert model.encoders[0].layers == 45
    assert model.module_names == ("vision", "decoder", "generator")


def test_a_file_begins_with_a_model_that_ships_or_a_config_and_freezes_parts(
    tmp_path: Path,
) -> None:
    CONFIG_MAPPING["llava"]().save_pretrained(tmp_path / "mine")
    for use in ("qwen2.5-vl-7b", "mine", "mine/config.json"):
        file = tmp_path / "model.yaml"
        file.write_text(f"use: {use}\nfrozen: [vision, vision.projector]\n")
        model = read_model(file)
        assert model.encoders[0].frozen
        assert model.encoders[0].projector.frozen
        assert not model.decoder.frozen
        bare = read_model(use if use in shipped() else tmp_path / use)
        assert model.parameters == bare.parameters


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("frozen: [vision]", "either `use`, a model to begin with, or `decoder`"),
        ("use: qwen2.5-vl-7b\ndecoder: {use: llama-3-8b}", "either `use`"),
        ("use: qwen2.5-vl-7b\nencoders: [{use: internvit-6b}]", "leave `encoders` out"),
        ("use: qwen2.5-vl-7b\nfrozen: [audio]", "frozen names 'audio'; the modules are vision,"),
        ("use: nowhere/config.json", "nowhere/config.json cannot be read"),
    ],
)
def test_a_beginning_that_cannot_be_says_why(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(SpecError, match=said):
        read_model(tmp_path / "model.yaml")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("internvit-6b", "internvit-7b", "'internvit-7b'.*Did you mean internvit-6b"),
        ("layers: 16", "layers: many", "line 8, decoder.layers.*'many'.*a whole number"),
        ("layers: 16", "layer: 16", "line 8, decoder.layer: .*layers"),
        ("layers: 16", "layers: 0", "decoder.layers is 0; it must be at least 1"),
        ("4096]", "4000]", "hands on vectors of 4000 numbers, the decoder takes 4096"),
        ("use: llama-3-8b, layers: 16", "layers: 16", "hidden_size.*missing|needs|required"),
        ("parameters: 1000", "parameters: 0", "generator.parameters is 0"),
    ],
)
def test_a_mistake_names_the_line_the_value_and_what_is_allowed(
    before: str, after: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "model.yaml").write_text(MODEL.replace(before, after))
    with pytest.raises(SpecError, match=said):
        read_model(tmp_path / "model.yaml")


def test_a_name_that_is_none_says_which_was_meant() -> None:
    with pytest.raises(SpecError, match="Did you mean qwen3-vl-8b"):
        read_model("qwen3-vl-8B")
    with pytest.raises(SpecError, match="cannot be read"):
        read_model("missing.yaml")


def test_a_cluster_is_a_mix_of_nodes(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "groups:\n  - {use: h100, nodes: 16}\n  - use: a800\n    nodes: 2\n    gpus_per_node: 4\n"
    )
    cluster = read_cluster(file)
    assert cluster.gpus == 136
    assert cluster.groups[1].device.name == "A800 80 GB"
    assert cluster.groups[0].link_bytes_per_s(8) > cluster.groups[0].link_bytes_per_s(16)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("groups: []", "no groups of nodes"),
        ("groups: [{use: h1000, nodes: 1}]", "Did you mean h100"),
        ("groups: [{use: h100, nodes: 0}]", "cluster.nodes is 0"),
        ("groups: [{use: h100}]", "nodes"),
        ("nodes: 3", "nodes.*groups"),
    ],
)
def test_a_cluster_that_cannot_be_says_why(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=said):
        read_cluster(file)
