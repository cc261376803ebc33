"""Documents lead somewhere: every link and anchor, every file that is named, and from the front
page in two steps to what a newcomer looks for."""

import re
from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT, anchors, blocks, code_words, headings, links

SKIPPED = {".venv", ".demo", ".git", "node_modules"}
ALL_PAGES = [
    page for page in sorted(ROOT.rglob("*.md")) if not SKIPPED & set(page.relative_to(ROOT).parts)
]
FRONT_PAGE = ROOT / "README.md"
FRONT_PAGE_LINES = 150

# Paths as text writes them: from the repository's root, in a folder that is known.
PATH = re.compile(
    r"(?:\.ci|benchmarks|dataservice|demo|deploy|docs|examples|protos|soak|tests|tools|trainer_client)"
    r"/[\w./-]*"
)
LANGUAGES = {"sh", "python", "yaml", "text"}
PROGRAMS = r"(?:dataservice|docker|kubectl|make|pip|python|torchrun) "

# What a newcomer looks for, in the words of the front page, and where it leads.
TOPICS = {
    "my data set": ("your data set", "docs/data.md"),
    "my HF model": ("Hugging Face model", "docs/trainers.md#a-hugging-face-model"),
    "Megatron": ("Megatron", "docs/trainers.md#megatron"),
    "Kubernetes": ("Kubernetes", "docs/operations.md#kubernetes"),
    "resume": ("resume", "docs/trainers.md#resume"),
    "why is it waiting": ("why training is waiting", "docs/operations.md#why-is-training-waiting"),
    "how do I add X": ("add", "docs/changing.md"),
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    astray = []
    for link in links(page):
        path, _, anchor = link.target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            astray.append(f"{name_of(page)}: [{link.text}]({link.target})")
    assert astray == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_is_named_exists(page):
    named = {word for word in code_words(page) if PATH.fullmatch(word)}
    assert [
        f"{name_of(page)}: {word}" for word in sorted(named) if not (ROOT / word).exists()
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_its_language_and_what_is_not_run_its_reason(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: say one of {sorted(LANGUAGES)}"
        if block.language == "text":
            commands = re.search(rf"^(?:\$ )?{PROGRAMS}", block.text, re.MULTILINE)
            assert commands is None, f"{block}: commands are no text: say sh"
        if block.not_run is not None:
            assert len(block.not_run.split()) >= 4, f"{block}: give the reason why it is not run"


def test_the_front_page_is_short():
    assert len(FRONT_PAGE.read_text().splitlines()) <= FRONT_PAGE_LINES


@pytest.mark.parametrize(("words", "target"), TOPICS.values(), ids=TOPICS)
def test_a_newcomer_finds_the_page_from_the_front_page_in_two_steps(words, target):
    row = next(
        line for line in FRONT_PAGE.read_text().splitlines() if words in line and "](" in line
    )
    assert f"]({target})" in row
    path, _, anchor = target.partition("#")
    assert not anchor or anchor in anchors(ROOT / path)


def test_every_page_is_reached_from_the_front_page():
    reached = {(ROOT / link.target.partition("#")[0]).resolve() for link in links(FRONT_PAGE)}
    assert [name_of(page) for page in PAGES if page not in reached | {FRONT_PAGE}] == []


@pytest.mark.parametrize(
    "what", ["file format", "processor", "stage", "cost term", "metric", "RPC"]
)
def test_there_is_a_recipe_for_the_usual_additions(what):
    assert any(
        title.startswith("Add ") and what in title for title in headings(ROOT / "docs/changing.md")
    )


def test_every_guarantee_names_a_test_that_exists():
    text = (ROOT / "docs" / "guarantees.md").read_text()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        assert re.search(r"`tests/[\w/]+(?:\.py)?`|`make soak`", section), title
