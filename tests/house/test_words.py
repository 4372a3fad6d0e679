"""The field's words in the code, its comments and its texts: what this project once called otherwise stays renamed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for top in ("arachnec", "tests", "benchmarks", "examples") for path in (ROOT / top).rglob("*.py")]
SOURCES += [path for end in ("js", "html", "css", "lark") for path in (ROOT / "arachnec").rglob(f"*.{end}")]

# What a thing was called here, and what the field calls it.
DIALECT = {
    r"rivals?": "baseline",
    r"equipment": "rank context",
    r"dice": "rng, or random generator",
    r"repack\w*": "large neighbourhood search",
    r"critical chains?": "critical path",
    r"(?:data )?sheets?": "device specs",
    r"sums? of (?:the )?gradients?|gradient sums?": "gradient all-reduce, or synchronisation",
}


def words(text: str) -> str:
    """The text in lower case with a blank between the words of every name: ``CriticalPath``, ``critical_path``."""
    return re.sub(r"[\s_-]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)).lower()


@pytest.mark.parametrize("dialect", DIALECT)
def test_the_code_uses_the_words_of_the_field(dialect: str) -> None:
    pattern = re.compile(rf"\b(?:{dialect})\b")
    spoken = [
        f"{path.relative_to(ROOT)} says `{match[0]}`: say {DIALECT[dialect]}"
        for path in SOURCES
        if path.parent != ROOT / "tests" / "house"
        for match in pattern.finditer(words(path.read_text(encoding="utf-8")))
    ]
    assert not spoken, "\n".join(spoken)


@pytest.mark.parametrize("name", ["RivalPlan", "best_rivals", "the data\n    sheet", "gradient_sums", "DICE"])
def test_a_name_in_the_old_words_is_seen(name: str) -> None:
    assert any(re.search(rf"\b(?:{dialect})\b", words(name)) for dialect in DIALECT)
    assert not any(re.search(rf"\b(?:{dialect})\b", words("_Arrivals pipes sheeted")) for dialect in DIALECT)


def test_files_are_named_in_the_words_of_the_field() -> None:
    names = [
        path for top in ("arachnec", "tests", "benchmarks", "docs", "examples") for path in (ROOT / top).rglob("*")
    ]
    spoken = [path for path in names if re.search(rf"\b(?:{'|'.join(DIALECT)})\b", words(path.stem))]
    assert not spoken, spoken
