"""The field's words in the code, its comments and its texts: what this project once called otherwise stays renamed."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for top in ("arachnec", "tests", "benchmarks", "examples") for path in (ROOT / top).rglob("*.py")]
SOURCES += [path for end in ("js", "html", "css", "lark") for path in (ROOT / "arachnec").rglob(f"*.{end}")]

# What a thing was called here, and what the field calls it. Words of the code, its comments and the documentation.
DIALECT = {
    r"rivals?": "baseline",
    r"equipment": "rank context",
    r"dice": "rng, or random generator",
    r"repack\w*": "large neighbourhood search",
    r"critical chains?": "critical path",
    r"(?:data )?sheets?": "device specs",
    r"turned (?:problem|plan|schedule|module)s?|turned (?:round|around)": "time-reversed",
    r"beside (?:each other )?(?:on|in) (?:the|one|a|each) (?:same )?(?:rank|device|gpu)s?": "co-resident",
    r"(?:the|an|its|no|file|exposed) endings?": "exposed synchronisation; of a file, extension",
    r"sums? of (?:the )?gradients?|gradient sums?": "gradient all-reduce, or synchronisation",
    r"(?:process|group|rank|nccl|gloo) channels?|channels? (?:of|between) (?:groups?|ranks?|pairs?)": "process group",
    r"post(?:s|ed|ing|ings)|posts? (?:a |the )?(?:receive|send)s?": "receive prefetch: it is prefetched, or starts",
}
# The rule "as posted" is over where a host hands its device a receive or a collective: MPI's word, in its proof alone.
AS_POSTED = (
    "arachnec/analysis/execution_model.py",
    "arachnec/passes/check.py",
    "arachnec/verification/deadlock.py",
    "arachnec/verification/device_limits.py",
    "arachnec/verification/event_order.py",
    "docs/check.md",
    "docs/plan_looks_wrong.md",
    "tests/emulator/",
    "tests/verification/test_execution_models.py",
    "tests/verification/test_event_places.py",
    "tests/views/browser.py",  # a method of HTTP
)
# What is all-reduced is no sum: in these rooms `sums` would mean gradients.
SYNCHRONISING = ("model_state", "verification", "lowering", "analysis", "backends", "runtime", "passes", "views")
# Names that say that there is something, and not what.
SAY_NOTHING = {"found", "made", "each", "thing", "things"}
BOUND = re.compile(rf"\b(?:{'|'.join(SAY_NOTHING)})\b\s*(?:=|:|,|\)|\(|in\b)")  # or a word of a sentence


def may_say(path: Path, dialect: str) -> bool:
    place = path.relative_to(ROOT).as_posix()
    return place.startswith("tests/house/") or (dialect.startswith("post") and place.startswith(AS_POSTED))


@cache
def spoken_by(path: Path) -> str:
    return words(path.read_text(encoding="utf-8"))


def words(text: str) -> str:
    """The text in lower case with a blank between the words of every name: ``CriticalPath``, ``critical_path``."""
    return re.sub(r"[\s_-]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)).lower()


@pytest.mark.parametrize("dialect", DIALECT)
def test_the_code_uses_the_words_of_the_field(dialect: str) -> None:
    pattern = re.compile(rf"\b(?:{dialect})\b")
    spoken = [
        f"{path.relative_to(ROOT)} says `{match[0]}`: say {DIALECT[dialect]}"
        for path in SOURCES
        if not may_say(path, dialect)
        for match in pattern.finditer(spoken_by(path))
    ]
    assert not spoken, "\n".join(spoken)


def test_gradients_are_all_reduced_and_not_summed() -> None:
    spoken = [path for room in SYNCHRONISING for path in (ROOT / "arachnec" / room).rglob("*.py")]
    assert not [path for path in spoken if re.search(r"\bsums\b", spoken_by(path))]


OLD_NAMES = [
    "RivalPlan",
    "best_rivals",
    "the data\n    sheet",
    "gradient_sums",
    "DICE",
    "turned_plan",
    "GroupChannel",
    "posted_receives",
]


@pytest.mark.parametrize("name", OLD_NAMES)
def test_a_name_in_the_old_words_is_seen(name: str) -> None:
    assert any(re.search(rf"\b(?:{dialect})\b", words(name)) for dialect in DIALECT)
    assert not any(re.search(rf"\b(?:{dialect})\b", words(NEW_NAMES)) for dialect in DIALECT)


NEW_NAMES = "_Arrivals pipes sheeted __post_init__ in_channels overturned poster depending"


def test_files_are_named_in_the_words_of_the_field() -> None:
    names = [
        path for top in ("arachnec", "tests", "benchmarks", "docs", "examples") for path in (ROOT / top).rglob("*")
    ]
    spoken = [path for path in names if re.search(rf"\b(?:{'|'.join(DIALECT)})\b", words(path.stem))]
    assert not spoken, spoken


def variables(source: str) -> Iterator[tuple[int, str]]:
    """Every variable, parameter and function of a file. A field is none: a diagnostic says what it ``expected`` and
    what it ``found``, as compilers do."""
    tree = ast.parse(source)
    fields = {
        statement.target
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef)
        for statement in kind.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def test_variables_are_named_for_what_they_hold() -> None:
    nameless = [
        f"{path.relative_to(ROOT)}:{line}: `{name}`"
        for path in SOURCES
        if path.suffix == ".py" and BOUND.search(source := path.read_text(encoding="utf-8"))
        for line, name in variables(source)
        if name in SAY_NOTHING
    ]
    assert not nameless, "name them for what they hold:\n" + "\n".join(nameless)


def test_a_nameless_variable_is_seen() -> None:
    source = "def f(made):\n    for each in made: found = each\nclass Wrong:\n    found: str\n"
    assert sorted(variables(source)) == [(1, "f"), (1, "made"), (2, "each"), (2, "found"), (3, "Wrong")]
