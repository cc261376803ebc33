"""`dataservice preview` and `index --dry-run`: what they print and write, and what they refuse."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dataservice.cli.show_preview import preview_text
from dataservice.cli.terminal import Terminal
from dataservice.jobs.find_samples import Wanted
from dataservice.jobs.preview import preview_job
from tests.cli.support import says
from tests.decode.files import Files
from tests.jobs.corpus import BAD, SAID, SEEN, decoder, indexed, job_of, make_corpus


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus without an index."""
    return make_corpus(tmp_path_factory.mktemp("preview") / "corpus")


@pytest.fixture
def show(cli, home):
    """Preview one sample of `talks`; what the command did."""

    def run(sample, *more):
        return cli.ok("preview", home / "job.yaml", "--source", "talks", "--sample", sample, *more)

    return run


class Page(HTMLParser):
    """A page as a browser reads it: elements with their attributes, and the text of some."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text[tag] = self.text.get(tag, "") + data

    @property
    def pictures(self) -> list[np.ndarray]:
        """Pixels of the pictures in the page."""
        sources = [attrs["src"] or "" for tag, attrs in self.elements if tag == "img"]
        data = [base64.b64decode(s.removeprefix("data:image/png;base64,")) for s in sources]
        return [np.asarray(Image.open(io.BytesIO(each))) for each in data]


@pytest.fixture
def page(show, tmp_path):
    """The page of one sample."""

    def made(sample):
        show(sample, "--out", tmp_path / "page.html")
        return Page((tmp_path / "page.html").read_text(encoding="utf-8"))

    return made


# ---- text ---------------------------------------------------------------------------------


def test_without_colour_learnt_text_stands_between_marks(show):
    done = show("0")
    _, _, rendering = done.out.partition("tokens\n<|im_start|>")
    assert rendering.strip() == (
        "user\n<|vision_start|>[image 1: 6×8 patches, 12 tokens]<|vision_end|>\n"
        "what is it?<|im_end|>\n<|im_start|>assistant\n⟦a cat\non a mat<|im_end|>⟧"
    )
    says(
        done.said,
        "talks/picture (sample 0 of its source)",
        "talks.jsonl, bytes",
        "line 2",
        "42 LLM tokens, 7 of them learnt; 48 vision encoder tokens",
        "image 1 (cat.jpg): 1 tile of 112×84 pixels, 12 tokens",
    )


def test_clips_and_recordings_say_what_their_encoder_gets(show):
    says(show("clip").said, "clip 1 (walk.mp4): 6 frames of 56×56 pixels, 12 tokens")
    says(show("clip").said, "[clip 1: 3×4×4 patches, 12 tokens]")
    said = show("tone").said
    says(said, "recording 1 (tone.wav): 2.00 s,", "[recording 1: 2.00 s,", "audio encoder tokens")


def test_on_a_terminal_learnt_text_is_green_and_hostile_text_is_only_text(home):
    wanted = Wanted(sample="hostile")
    (made,) = preview_job(job_of(home), wanted, sources=["talks"], custom_processors={})
    sink = io.StringIO()
    terminal = Terminal(file=sink, force_terminal=True, color_system="standard", width=200)
    for line in preview_text(made, marks=False):
        terminal.print(line, highlight=False, soft_wrap=True)
    written = sink.getvalue()
    green = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", written, re.DOTALL))
    assert green == SAID.replace("\x1b", "\\x1b") + "<|im_end|>"
    assert set(re.findall(r"\x1b\[.*?m", written)) == {"\x1b[1m", "\x1b[1;32m", "\x1b[0m"}
    assert written.count("\x1b") == len(re.findall(r"\x1b\[[0-9;]*m", written))
    says(written, "<script>alert(1)</script> & [red]no[/red]", "\\x1b]0;owned", "\\u202eturned")


def test_a_name_has_one_line_whatever_is_in_it(cli, tmp_path):
    home = make_corpus(tmp_path / "corpus")
    record = {"id": "a\nb/c (sample 7 of its source)", "text": "the cat"}
    (home / "talks.jsonl").write_text(json.dumps(record) + "\n")
    out = cli.ok("preview", home / "job.yaml", "--source", "talks").out
    (title,) = [line for line in out.splitlines() if "b/c" in line]
    assert title.startswith("talks/a\\nb/c")


def test_no_text_can_claim_to_be_learnt(show):
    out = show("hostile").out
    says(out, r"\u27e6not learnt\u27e7", "[red]no[/red]", r"\x1b]0;owned")
    assert "\x1b" not in out
    rendering = out.partition("\n<|im_start|>")[2]
    assert (rendering.count("⟦"), rendering.count("⟧")) == (1, 1)


def test_a_bad_sample_shows_its_reason_and_is_no_failure(show, page):
    for key, reason in BAD.items():
        says(show(key).said, f"talks/{key}", "cannot be used:", reason)
    says(page("lost").text["section"], "cannot be used:", BAD["lost"])


def test_very_long_texts_are_cut_in_a_terminal_and_it_is_said(cli, tmp_path):
    moved = make_corpus(tmp_path / "long")
    record = {"id": "long", "text": "page " * 9000}
    (moved / "talks.jsonl").write_text(json.dumps(record) + "\n")
    arguments = ("preview", moved / "job.yaml", "--source", "talks")
    done = cli.ok(*arguments)
    says(done.said, "more characters; --out shows all")
    assert done.out.count("page") < 4100
    cli.ok(*arguments, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count(" page") == 8999


# ---- the page -----------------------------------------------------------------------------


def test_pictures_in_the_page_are_bitwise_what_the_encoder_gets(page, home):
    decode = decoder(home)
    for key, count in (("picture", 1), ("both", 2), ("clip", 6)):
        _, decoded = decode(key)
        expected = [frame for item in decoded.items for frame in item]
        pictures = page(key).pictures
        assert len(pictures) == len(expected) == count
        for picture, frame in zip(pictures, expected, strict=True):
            assert picture.dtype == np.uint8
            assert np.array_equal(picture, frame)


def test_long_clips_show_frames_spread_over_them_and_say_so(cli, tmp_path):
    home = make_corpus(tmp_path / "corpus")
    (home / "walk.mp4").write_bytes(Files.video(200, 8, (56, 56)))
    arguments = ("preview", home / "job.yaml", "--source", "talks", "--sample", "clip")
    cli.ok(*arguments, "--out", tmp_path / "page.html")
    shown = Page((tmp_path / "page.html").read_text())
    _, decoded = decoder(home)("clip")
    frames = [frame for item in decoded.items for frame in item]
    assert len(frames) > len(shown.pictures) == 16
    assert np.array_equal(shown.pictures[0], frames[0])
    assert np.array_equal(shown.pictures[-1], frames[-1])
    says(shown.text["figcaption"], f"16 of {len(frames)} are shown")


def test_the_wave_form_is_that_of_the_sound(page):
    shown = page("tone")
    (points,) = [attrs["points"] or "" for tag, attrs in shown.elements if tag == "polygon"]
    x, y = np.array([point.split(",") for point in points.split()], dtype=float).T
    assert (x.min(), x[: len(x) // 2].max()) == (0, 599)
    # A tone at 16,000 of 32,768 swings by 0.49 of the half height of 30 pixels.
    assert y.min() == pytest.approx(30 - 0.488 * 30, abs=0.6)
    assert y.max() == pytest.approx(30 + 0.488 * 30, abs=0.6)


def test_the_page_marks_what_is_learnt(page):
    shown = page("picture")
    assert shown.text["mark"] == "Marked text" + "a cat\non a mat<|im_end|>"
    says(shown.text["div"], "[image 1: 6×8 patches, 12 tokens]")
    says(shown.text["section"], "talks/picture", "talks.jsonl, bytes", "48 vision encoder tokens")


def test_hostile_text_on_the_page_is_text_and_the_page_needs_nothing_else(page):
    hostile = page("hostile")
    written = str.maketrans({c: c.encode("unicode_escape").decode() for c in "\x1b\x07\u202e"})
    says(hostile.text["div"], SEEN.translate(written), SAID.translate(written))
    for shown in (hostile, page("both"), page("tone")):
        tags = {tag for tag, _ in shown.elements}
        assert tags <= {
            *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "mark", "div"),
            *("section", "span", "figure", "figcaption", "img", "svg", "polygon"),
        }
        for tag, attrs in shown.elements:
            assert not [name for name in attrs if name.startswith("on") or name == "href"]
            if "src" in attrs:
                assert tag == "img"
                assert (attrs["src"] or "").startswith("data:image/png;base64,")
        assert "url(" not in shown.text["style"]
        assert "@import" not in shown.text["style"]
        assert shown.open == []
    policies = [attrs["content"] for tag, attrs in hostile.elements if "http-equiv" in attrs]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_names_of_files_and_keys_are_text_on_the_page_too(cli, tmp_path):
    home = make_corpus(tmp_path / "corpus")
    name = "<b onclick=x>\x1b.jpg"
    (home / name).write_bytes(Files.image(112, 84))
    record = {"id": '"><script>', "image": name, "text": "<image> the cat"}
    (home / "talks.jsonl").write_text(json.dumps(record) + "\n")
    cli.ok("preview", home / "job.yaml", "--source", "talks", "--out", tmp_path / "page.html")
    shown = Page((tmp_path / "page.html").read_text())
    assert not {"b", "script"} & {tag for tag, _ in shown.elements}
    says(shown.text["h2"], 'talks/"><script>')
    says(shown.text["figcaption"], "<b onclick=x>\\x1b.jpg")


def test_a_page_is_written_whole_or_not_at_all(cli, home, tmp_path):
    job = home / "job.yaml"
    said = cli.refused("preview", job, "--out", tmp_path / "none" / "page.html")
    says(said, "page.html cannot be written: No such file or directory. Check --out.")
    (tmp_path / "page.html").write_text("before")
    cli.refused("preview", job, "--source", "talks", "--sample", "no", "--out",
                tmp_path / "page.html")  # fmt: skip
    assert (tmp_path / "page.html").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_source_that_cannot_be_read_fails_behind_the_others(cli, tmp_path):
    home = make_corpus(tmp_path / "corpus")
    (home / "talks.jsonl").write_text("[1]")
    job, out = home / "job.yaml", tmp_path / "page.html"
    says(cli.refused("preview", job), "pages/page-0", "error: source 'talks'", "JSON array")
    says(
        cli.refused("preview", job, "--out", out), "page.html, samples: 1", "error: source 'talks'"
    )
    says(Page(out.read_text()).text["h2"], "pages/page-0")
    done = cli("preview", job, "--json")
    assert done.code == 1
    assert [each["key"] for each in json.loads(done.out)] == ["page-0"]


# ---- data ---------------------------------------------------------------------------------


def test_json_has_everything_but_pixels(show, home):
    (fields,) = json.loads(show("5", "--json").out)
    assert (fields["source"], fields["key"], fields["number"]) == ("talks", "both", 5)
    assert fields["location"]["file"] == str(home / "talks.jsonl")
    assert fields["encoder_tokens"] == {"vision": 48 + 24}
    assert [medium["name"] for medium in fields["media"]] == ["cat.jpg", "mat.png"]
    assert [medium["items"][0]["llm_tokens"] for medium in fields["media"]] == [12, 6]
    assert sum(piece["tokens"] for piece in fields["pieces"]) == fields["llm_tokens"]
    learnt = [piece["text"] for piece in fields["pieces"] if piece["learnt"]]
    assert learnt == ["the mat<|im_end|>"]
    assert len(json.dumps(fields)) < 6000
    (bad,) = json.loads(show("lost", "--json").out)
    says(bad["problem"], BAD["lost"])


def test_notes_go_to_stderr_and_stop_once_there_is_an_index(cli, tmp_path):
    home = make_corpus(tmp_path / "corpus")
    done = cli.ok("preview", home / "job.yaml", "--json", "--longest", "1")
    says(done.err, "'pages' are read from their beginning: no index yet")
    without = json.loads(done.out)
    indexed(home)
    done = cli.ok("preview", home / "job.yaml", "--json", "--longest", "1")
    assert done.err == ""
    assert json.loads(done.out) == without
    assert [each["key"] for each in without] == ["hostile", "page-1"]


# ---- mistakes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (("--source", "tolks"), ["no source 'tolks'; its sources are 'talks', 'pages'"]),
        (("--sample", "0"), ["has 'talks', 'pages'. Give one of them as --source."]),
        (
            ("--source", "talks", "--sample", "99"),
            ["has 6 usable samples", "Give a number from 0 to 5, or a key"],
        ),
        (
            ("--source", "talks", "--sample", "nobody"),
            ["no sample with the key 'nobody' among its 8", "Give a key as the source has it"],
        ),
        (("--sample", "0", "--longest", "2"), ["one of --sample, --random and --longest"]),
        (("--json", "--out", "page.html"), ["--out for a page or --json for data"]),
    ],
)
def test_a_wish_that_cannot_be_met_is_answered_with_what_can(cli, home, arguments, sentences):
    says(cli.refused("preview", home / "job.yaml", *arguments), "error:", *sentences)


def test_numbers_of_samples_are_bounded(cli, home):
    says(cli.refused("preview", home / "job.yaml", "--random", "0", code=2), "equal to 1")
    says(cli.refused("preview", home / "job.yaml", "--longest", "101", code=2), "equal to 100")


# ---- index --dry-run ----------------------------------------------------------------------


def test_a_dry_run_prints_what_an_index_would_and_that_it_was_one(cli, home):
    job = home / "job.yaml"
    done = cli.ok("index", job, "--dry-run", "--rows", "4")
    says(
        done.said,
        "talks: left out 1 ×",
        "First: talks/lost",
        "dry run: at most the first 4 samples of each of 2 files were measured",
        "% of their bytes. Nothing was written",
    )
    assert "left_out.jsonl" not in done.said
    assert not (home / "index").exists()
    fields = json.loads(cli.ok("index", job, "--dry-run", "--rows", "4", "--json").out)
    assert fields["dry_run"] is True
    assert [(each["source"], each["rows"]) for each in fields["sources"]] == [
        ("talks", 2),
        ("pages", 4),
    ]
    assert 0 < fields["read_bytes"] < fields["total_bytes"]


def test_rows_without_a_dry_run_are_refused(cli, home):
    said = cli.refused("index", home / "job.yaml", "--rows", "4")
    says(said, "--rows is for --dry-run")
    assert not (home / "index").exists()


def test_a_dry_run_fails_where_a_source_cannot_be_indexed_and_shows_the_others(cli, home):
    said = cli.refused("index", home / "job.yaml", "--dry-run", "--rows", "1")
    says(
        said, "pages", "dry run: at most the first 1 samples", "error: source 'talks'", BAD["lost"]
    )


@pytest.mark.parametrize("command", [("index",), ("index", "--dry-run"), ("preview",)])
def test_what_the_models_own_processor_does_otherwise_is_said_once(cli, tmp_path, command):
    home = make_corpus(tmp_path / "corpus")
    size = {"shortest_edge": 3136, "longest_edge": 50176}
    Qwen2VLImageProcessorPil(size=size).save_pretrained(home / "tokenizer")
    name, *options = command
    said = " ".join(cli.ok(name, home / "job.yaml", *options).err.split())
    assert said.count("preprocessor_config.json' has size.longest_edge: 50176") == 1
    says(said, "vision: {kind: qwen2_vl, video_min_pixels: 3136, max_pixels: 50176}")
