"""The documentation holds together: pages are reached, links resolve, names exist, and the words are the field's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_house import FLOORS, ROOT, modules

INDEX = ROOT / "docs" / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^[ ]*```.*?^[ ]*```$", re.M | re.S)
PATH = re.compile(r"\b(?:arachnec|tests|benchmarks|examples|docs)/[\w./]*\w(?:\.\w+|/)?")
NAME = re.compile(r"\barachnec(?:\.\w+)+")
HEADING = re.compile(r"^#+ (.*)$", re.M)
# What this project once called things, and what the field calls them.
DIALECT = {
    r"\brivals?\b": "baseline",
    r"\bpost(?:s|ed|ing)? (?:a |the |its |their )?receives?\b|\breceives? (?:is|are) posted\b": "receive prefetch",
    r"\bequipment\b": "rank context",
    r"\bdata sheet of devices\b|\bdata_sheets\b": "device specs",
    r"\bdice\b": "random generator",
    r"\bsums? of (?:the )?gradients?\b|\bgradient sums?\b": "gradient all-reduce, or synchronisation",
    r"\bcritical chains?\b": "critical path",
    r"\brepack\w*\b": "large neighbourhood search",
    r"\bcircle\b": "cycle",
}
# Pages that say how a plan is searched for are rewritten with the search itself.
EXAMPLE_PATHS = {"before", "one_at_a_time", "static_mesh", "guard", "convolution_rules", "schedule_mine"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Every file that a page links to, and the heading there, as it is written in a link; the page itself for ``#x``."""
    for target in LINK.findall(prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors(page: Path) -> set[str]:
    """What can stand behind a ``#`` in a link to this page, as GitHub makes it of headings."""
    headings = HEADING.findall(prose(page))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {target.name}#{anchor}"


def test_every_page_is_in_the_index() -> None:
    reached = {target for target, _ in links(INDEX)} | {INDEX}
    assert not [name_of(page) for page in ROOT.glob("docs/**/*.md") if page not in reached]
    assert INDEX in {target for target, _ in links(ROOT / "README.md")}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    for path in PATH.findall(prose(page)):
        if Path(path).stem in EXAMPLE_PATHS and page.stem.startswith("add_"):
            continue
        assert (ROOT / path).exists() or _is_made_by_following(page, path), f"{page.name} speaks of {path}"


def _is_made_by_following(page: Path, path: str) -> bool:
    return f"New file `{path}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_module_that_a_page_names_is_there(page: Path) -> None:
    known = modules()
    folders = {".".join(name.split(".")[:depth]) for name in known for depth in range(1, name.count(".") + 1)}
    for name in NAME.findall(page.read_text(encoding="utf-8")):
        module = name if name in known or name in folders else name.rpartition(".")[0]
        assert module in known or module in folders, f"{page.name} speaks of {name}"
        if module in known and module != name:
            source, attribute = known[module].read_text(encoding="utf-8"), name.rpartition(".")[2]
            assert re.search(rf"\b{attribute}\b", source), f"{page.name} speaks of {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    text = prose(page)
    for pattern, better in DIALECT.items():
        found = re.search(pattern, text, re.IGNORECASE)
        assert not found, f"{page.name} says {found[0]!r}: say {better}"


def test_the_drawing_of_the_house_is_the_house() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn: dict[str, int] = {}
    floor = 0
    for number, room in re.findall(r"^ ?([ \d]\d|  ) {2}(\w+) {2,}\S", text, re.M):
        floor = int(number) if number.strip() else floor
        drawn[room] = floor
    unseen = {"version", "__main__"}  # a number, and one line that calls cli
    assert drawn == {room: number for number, rooms in enumerate(FLOORS, 1) for room in rooms if room not in unseen}
