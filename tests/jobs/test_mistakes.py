"""Whoever writes a wrong job file or config is told where, and what to write instead."""

from pathlib import Path
from typing import get_args

import pytest

from dataservice.core.errors import SpecError
from dataservice.core.job import SourceFormat
from dataservice.decode.spec import BUILT_IN
from dataservice.jobs.job_file import read_job
from dataservice.operate.config import read_config

JOB = """\
job: vlm-sft
sources:
  - name: captions
    format: webdataset
    url: "data/captions.tar"
  - name: ocr
    format: parquet
    url: "data/ocr/*.parquet"
    weight: 0.5
index: index/
pipeline:
  tokenizer: tokenizer/
  vision: {kind: qwen2_5_vl}
batch: {samples: 256}
plan:
  memory_tokens: 8192
"""
SOURCES = JOB[JOB.index("  - name") : JOB.index("index:")]


def refused(text: str) -> str:
    """What is said about a job file."""
    with pytest.raises(SpecError) as error:
        read_job(text, Path("/data"))
    said = str(error.value)
    for pydantic in ("Input ", "nput should", "String should", "expected tags", "instance of"):
        assert pydantic not in said
    return said


def changed(before: str, after: str) -> str:
    assert before in JOB
    return JOB.replace(before, after)


def with_key(line: str) -> str:
    return changed("index: index/\n", f"index: index/\n{line}\n")


def test_the_job_file_of_these_tests_is_right():
    assert read_job(JOB, Path("/data")).sources[1].weight == 0.5


# Mistakes of a newcomer: what is written, and the whole line that says so.
MISTAKES = {
    "batch: {samples: 256}": {
        "batch: 256": "line 14, batch: it is 256; give a mapping: `batch: {samples: 256}`",
        "batch: {size: 256}": "line 14, batch.size: there is no such key here; the keys here are "
        "samples and tokens",
        "batch:": "line 14, batch: it is empty; give a mapping with keys such as samples and "
        "tokens. Size of one global batch.",
        "batch: {samples: 256}\n2.5: 3": "line 15, 2.5: there is no such key here; the keys here "
        "are job, sources, weights, mixture_changes, index, pipeline, batch, plan, seed, epochs, "
        "topology, ready_steps, error_budget, validation and layout",
        "batch_size: 256": "line 14, batch_size: there is no such key here; did you mean batch?",
    },
    "  memory_tokens: 8192": {
        "  memory_tokens: 8k": "line 16, plan.memory_tokens: it is '8k'; give a whole number, such "
        "as 8192",
        "  memory_tokens: 16,384": "line 16, plan.memory_tokens: it is '16,384'; give a whole "
        "number, such as 16384",
        "  memory_tokens: 8192\n  strategy: ful": "line 17, plan.strategy: it is 'ful'; choose one "
        "of full, packing, length_grouped or random; did you mean full?",
        "  memory_token: 8192": "line 16, plan.memory_token: there is no such key here; did you "
        "mean memory_tokens?",
    },
    "    weight: 0.5": {
        "    weight: high": "line 9, sources[1].weight: it is 'high'; give a number, such as 1.0",
        "    weight: .inf": "line 9, sources[1].weight: it is inf; give a number, such as 1.0",
        "    weight: .nan": "line 9, sources[1].weight: it is nan; give a number, such as 1.0",
        "    wieght: 0.5": "line 9, sources[1].wieght: there is no such key here; did you mean "
        "weight?",
        "    ignore: thumbnail": "line 9, sources[1].ignore: it is 'thumbnail'; give a list, such "
        "as `ignore: [thumbnail]`",
        "    placeholders: txt": "line 9, sources[1].placeholders: it is 'txt'; choose one of "
        "strict or text; did you mean text?",
        "    storage_options: {anon: true}": "line 9, sources[1].storage_options.anon: it is true; "
        'give text: `anon: "true"`',
        "    error_budget: 0.01": "line 9, sources[1].error_budget: it is 0.01; give a mapping: "
        "`error_budget: {rate: 0.01}`",
    },
    '    url: "data/ocr/*.parquet"': {
        "    url: [a.tar, b.tar]": "line 8, sources[1].url: it is a list; give text, as one "
        "value. Path or URL of the files; `*` and `{000..127}` patterns are expanded.",
        "": "line 6, sources[1].url: required, and missing. Path or URL of the files; `*` and "
        "`{000..127}` patterns are expanded.",
    },
    SOURCES: {
        "  - data/captions.tar\n": "line 3, sources[0]: it is 'data/captions.tar'; give a mapping "
        "with the keys name, url and format",
        SOURCES.split("  - name: ocr")[0].replace("- ", "  "): "line 2, sources: it is a mapping; "
        "give a list: entries that each begin with `- ` and have the keys name, url and format. "
        "The datasets that are mixed.",
    },
    "  vision: {kind: qwen2_5_vl}": {
        "  vision: qwen2_5_vl": "line 13, pipeline.vision: it is 'qwen2_5_vl'; give a mapping: "
        "`vision: {kind: qwen2_5_vl}`",
        "  vision: {kind: qwen2_5_vl, max_pixels: big}": "line 13, pipeline.vision.max_pixels: it "
        "is 'big'; give a whole number, such as 12845056",
        "  vision: {kind: qwen2_5_vl, max_pixel: 3}": "line 13, pipeline.vision.max_pixel: there "
        "is no such key here; did you mean max_pixels?",
        "  audio: {kind: wisper}": "line 13, pipeline.audio.kind: it is 'wisper'; give whisper",
        "  template_date: tomorrow": "line 13, pipeline.template_date: it is 'tomorrow'; give a "
        "date, such as 2026-01-31",
    },
    "index: index/": {
        "": "index: required, and missing. Folder or fsspec URL where `dataservice index` keeps "
        "the index of these sources.",
        "index: index/\nseed: [1]": "line 11, seed: it is a list; give a whole number, such as 0. "
        "Seed of the sample order, which depends only on the seed, the sources and their weights.",
        "index: index/\nepochs: 1.5": "line 11, epochs: it is 1.5; give a whole number of at least "
        "1, such as 1",
        "index: index/\nready_steps: 100": "line 11, ready_steps: it is 100; give a whole number "
        "from 1 to 64, such as 4",
        "index: index/\nmemory_tokens: 8192": "line 11, memory_tokens: there is no such key here; "
        "it belongs under plan",
        "index: index/\nmax_pixels: 8192": "line 11, max_pixels: there is no such key here; it "
        "belongs under pipeline.vision",
    },
    "job: vlm-sft": {
        "job: vlm sft": "line 1, job: it is 'vlm sft'; give 1 to 100 letters, digits, dots, dashes "
        "and underscores, of which the first is a letter or a digit",
        "job: 2024": 'line 1, job: it is 2024; give text: `job: "2024"`',
    },
}
EACH = [(before, after, line) for before, by in MISTAKES.items() for after, line in by.items()]


@pytest.mark.parametrize(("before", "after", "line"), EACH, ids=[each[1] for each in EACH])
def test_a_mistake_gets_one_line_with_its_place_and_what_to_write(before, after, line):
    said = refused(changed(before, after))
    assert f"  {line}\n" in said
    assert said.startswith("the job file has 1 mistake:\n")


def test_the_names_to_choose_from_are_those_of_the_model():
    said = refused(changed("format: parquet", "format: spreadsheet"))
    assert all(name in said for name in get_args(SourceFormat))
    said = refused(changed("kind: qwen2_5_vl", "kind: qwen9_vl"))
    assert "pipeline.vision.kind: it is 'qwen9_vl'; choose one of" in said
    assert "did you mean qwen3_vl?" in said
    said_of_the_model = refused(changed("kind: qwen2_5_vl", "kind: Qwen/Qwen2.5-VL-7B-Instruct"))
    assert "did you mean qwen2_5_vl?" in said_of_the_model
    for text in (said, refused(changed("{kind: qwen2_5_vl}", "{max_pixels: 9}"))):
        assert all(name in text for name in (*BUILT_IN, "custom"))


def test_all_mistakes_are_told_at_once_each_with_its_line():
    text = changed("weight: 0.5", "weight: high").replace("samples: 256", "samples: many")
    said = refused(text.replace("8192", "8k").replace("qwen2_5_vl", "qwen").replace("job:", "jop:"))
    assert said.startswith("the job file has 5 mistakes:\n")
    for place in ("line 9, ", "line 13, ", "line 14, ", "line 16, ", "line 1, jop:"):
        assert sum(place in line for line in said.splitlines()) == 1


def test_a_file_of_nothing_but_mistakes_is_answered_briefly():
    said = refused(JOB + "".join(f"key{number}: 1\n" for number in range(500)))
    assert "the job file has 500 mistakes" in said
    assert "and 480 more" in said
    assert len(said.splitlines()) < 30


def test_a_value_with_several_forms_is_one_mistake():
    for given in (3, "all", {}):
        with pytest.raises(SpecError, match="has 1 mistake:") as error:
            read_config(None, {"allowed_roots": given})
        assert "give a list" in str(error.value)
        assert "one of any" in str(error.value)
    with pytest.raises(SpecError, match=r"1 mistake:\n  allowed_roots\[1\]: it is 3; give text"):
        read_config(None, {"allowed_roots": ["/data", 3]})


# What YAML itself refuses: the text, the line that is named, and the remedy.
@pytest.mark.parametrize(
    ("text", "place", "remedy"),
    [
        (changed("    weight", "\tweight"), "line 9, column 1", "Indent with spaces"),
        (changed("    weight", "   weight"), "line 9, column 4", "Indent it as far as"),
        (changed("job: vlm-sft", "job: vlm: sft"), "line 1, column 9", "quotes around a value"),
        (changed("job: vlm", "job:vlm"), "line 2, column 8", "behind the colon of each key"),
        (changed('captions.tar"', "captions.tar"), "line 8, column 11", "quote above it that is"),
        (changed('"data/ocr/*.parquet"', "*.parquet"), "line 8, column 11", "begins with *"),
        (changed('"data/captions.tar"', "@data"), "line 5, column 10", "quotes around a value"),
        (changed("{samples: 256}", "{samples: 256"), "line 15, column 5", "Close the bracket"),
        (changed("{samples: 256}", '"256'), "line 17, column 1", "Close the quote"),
        (JOB + "seed\n", "line 18, column 1", "Put a colon and a space behind the key"),
    ],
)
def test_what_is_not_yaml_is_named_by_line_with_a_remedy(text, place, remedy):
    said = refused(text)
    assert said.startswith(f"the job file is not YAML: {place}: ")
    assert remedy in said


def test_the_line_that_is_not_yaml_is_shown():
    assert refused(changed("job: vlm-sft", "job: vlm: sft")).endswith("\n  job: vlm: sft")


@pytest.mark.parametrize("again", ["batch: {samples: 9}", "batch: {samples: 9, samples: 8}"])
def test_a_key_that_stands_twice_is_refused_and_not_taken_by_halves(again):
    key = "samples" if again.count("samples") > 1 else "batch"
    text = changed("batch: {samples: 256}", again) if key == "samples" else JOB + again
    assert f"the job file has the key '{key}' twice, in lines 14 and" in refused(text)


def test_a_key_that_a_merge_brings_may_be_given_anew():
    shared = "{name: captions, format: webdataset, url: a.tar, weight: 3}"
    text = changed(SOURCES, f"  - &first {shared}\n  - {{<<: *first, name: ocr, weight: 0.5}}\n")
    assert [source.weight for source in read_job(text, Path("/")).sources] == [3, 0.5]
    assert "line 4, sources[1].weight: it is 'high'" in refused(text.replace("0.5", "high"))


def test_a_config_gets_the_same_words_and_its_flags_no_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("pool: ray\nworkers: two\nteams:\n  a/b: {weight: 1}\n  c: {wait: 1}\n")
    with pytest.raises(SpecError) as error:
        read_config(path, {"pool": "threads"})
    for line in (
        f"the service config {path} has 4 mistakes:",
        "  line 2, workers: it is 'two'; give a whole number from 1 to 4096, such as 2",
        "  pool: it is 'threads'; choose one of ray or local",
        "  line 4, teams.a/b: a name here cannot be 'a/b'; give 1 to 63 letters, digits, dots, "
        "dashes and underscores, of which the first is a letter or a digit",
        "  line 5, teams.c.wait: there is no such key here; did you mean weight?",
    ):
        assert line in str(error.value).splitlines()
    with pytest.raises(SpecError, match=r"stop_within_s: it is inf; give a number of at least 1,"):
        read_config(None, {"stop_within_s": float("inf")})
    with pytest.raises(SpecError, match=r"worker_ports: it is '5'; give a range of ports, such as"):
        read_config(None, {"worker_ports": "5"})
