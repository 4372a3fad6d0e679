"""The documentation holds together: pages are reached, links resolve, and names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from arachnec.cli import group
from arachnec.passes.infra.named_pipelines import NOT_COMPARED, PIPELINES
from tests.docs.worked_examples import blocks
from tests.house.test_house import EXECUTOR_LAYERS, LAYERS, ROOT, modules

TOPS = ("arachnec", "tests", "benchmarks", "examples")
INDEX = ROOT / "docs" / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^[ ]*```.*?^[ ]*```$", re.M | re.S)
PATH = re.compile(r"(?<![\w/.~-])(?:arachnec|tests|benchmarks|examples|docs)/[\w./]*\w")
NAME = re.compile(r"\barachnec(?:\.\w+)+")
HEADING = re.compile(r"^#+ (.*)$", re.M)
FILE = re.compile(r"(?<![\w/.~-])(?:\w+/)*\w+\.py\b")
COMMAND = re.compile(r"^(?:\$ )?arachnec ([a-z]+)((?:.*\\\n)*.*)$", re.M)
OPTION = re.compile(r"(?<=\s)--?[a-z][a-z-]*")
READERS_OWN = {"model", "my_model", "mine", "schedule_mine"}  # files of whoever reads


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Every file that a page links to, and the heading there as links write it; the page itself for ``#x``."""
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


def made_by_following(page: Path) -> set[str]:
    """The files that a worked example makes."""
    return {block.path for block in blocks(page) if block.path is not None}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    followed = made_by_following(page)
    for path in PATH.findall(prose(page)):
        ours = any(own == path or own.startswith(f"{path}/") for own in followed)
        assert ours or (ROOT / path).exists() or Path(path).stem in READERS_OWN, f"{page.name} speaks of {path}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_file_that_a_page_names_is_one_of_ours(page: Path) -> None:
    known = {path.relative_to(ROOT).as_posix() for top in TOPS for path in (ROOT / top).rglob("*.py")}
    known |= made_by_following(page)
    for name in FILE.findall(prose(page)):
        ours = any(path == name or path.endswith(f"/{name}") for path in known)
        assert ours or Path(name).stem in READERS_OWN, f"{page.name} speaks of {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_module_that_a_page_names_is_there(page: Path) -> None:
    followed = {path.removesuffix(".py").replace("/", ".") for path in made_by_following(page)}
    known = modules()
    folders = {".".join(name.split(".")[:depth]) for name in known for depth in range(1, name.count(".") + 1)}
    for name in set(NAME.findall(page.read_text(encoding="utf-8"))) - followed - folders - set(known):
        module, _, attribute = name.rpartition(".")
        assert module in followed | folders | set(known), f"{page.name} speaks of {name}"
        if module in known:
            source = known[module].read_text(encoding="utf-8")
            assert re.search(rf"\b{attribute}\b", source), f"{page.name} speaks of {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_a_page_types_is_there_with_its_options(page: Path) -> None:
    for name, rest in COMMAND.findall(page.read_text(encoding="utf-8")):
        command = group.get_command(click.Context(group), name)
        assert command is not None, f"{page.name} types `arachnec {name}`"
        if isinstance(command, click.Group):
            command = command.commands[rest.split()[0]]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        typed = rest if "\\" in rest else rest.partition("  ")[0]  # behind two blanks stands what it does
        unknown = set(OPTION.findall(typed)) - known
        assert not unknown, f"{page.name} types `arachnec {name} {' '.join(unknown)}`"


def test_every_pipeline_that_is_compared_is_described_and_said_to_differ() -> None:
    tables = prose(ROOT / "docs" / "baselines.md").split("## On gloo")[0].split("## What differs from the originals")
    rows = [set(re.findall(r"`([\w-]+)`", " ".join(re.findall(r"^\| (`[^|]*)\|", table, re.M)))) for table in tables]
    compared = set(PIPELINES) - NOT_COMPARED
    assert not compared - rows[0]
    assert not compared - rows[1] - {"default"}


def drawn_in(text: str) -> dict[str, int]:
    """The layer of every package of a drawing, which numbers the first package of a layer."""
    drawn: dict[str, int] = {}
    layer = 0
    for number, package in re.findall(r"^ ?([ \d]\d|  ) {2}(\w+) {2,}\S", text, re.M):
        layer = int(number) if number.strip() else layer
        drawn[package] = layer
    return drawn


def test_the_drawings_of_layers_are_the_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    all_packages, executor = (drawn_in(drawing) for drawing in text.split("```")[3:6:2])
    undrawn = {"version", "__main__"}  # a number, and one line that calls cli
    assert all_packages == {
        package: number for number, packages in enumerate(LAYERS, 1) for package in packages if package not in undrawn
    }
    assert executor == {package: number for number, packages in enumerate(EXECUTOR_LAYERS, 1) for package in packages}


def test_every_function_of_a_walk_is_where_the_page_says() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks = text[text.index("## The walk of a module") : text.index("## Where new code goes")]
    rows = re.findall(r"^\|.*\| (`[^|]+`) \| (`arachnec/[^|]*`) \|$", walks, re.M)
    assert len(rows) > 30
    for functions, places in rows:
        folders = [ROOT / place for place in re.findall(r"`([^`]+)`", places)]
        files = [file for folder in folders for file in (folder.rglob("*.py") if folder.is_dir() else [folder])]
        sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"\w+", functions):
            assert re.search(rf"^ *(?:def|class) {name}\b", sources, re.M), f"no `{name}` in {places}"
