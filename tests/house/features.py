"""Features and core, by the tables of ``docs/architecture.md``: who imports whom, and which functions name two.

    python -m tests.house.features

prints the pairs and functions that ``test_features.py`` counts, the three figures, the lines of every feature, and what
is wrong with the tables: files without a row, entries that no file needs.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from tests.house.test_house import PACKAGE, ROOT, imports, modules

PAGE = ROOT / "docs" / "architecture.md"
HEADINGS = ("| feature | folder | files |", "| core | folder | files |")
ROW = re.compile(r"^\| (\w+) \| `(arachnec/[\w/]*)` \| (all|`[^|]+`) \|$")
# The words by which a function speaks of a feature, in its names and strings.
VOCABULARY = {
    "sparse": r"spars|densit|predictor",
    "sampling": r"sampling|denois|guidance|requests?\b",
    "pipelines": r"pipelining|schedule_pipeline|pipeline_(?:plan|rank|place|order|schedule|stage)|stage_cuts"
    r"|balanced_cuts|part_of|dapple|adaptis|1f1b|zero_bubble|zb_",
    "shards": r"\bcells?\b|parameter_cells|shard_parameters|shard_group|reshard",
    "host_memory": r"offload|host_memory|host_state|from_host|to_host|host_copies",
    "encoders": r"divided_encoder|tensor_parallel|spatial|halo|encoder_width",
    "fusion": r"fused|fusion|codegen",
}
PATTERNS = {feature: re.compile(words, re.I) for feature, words in VOCABULARY.items()}


@dataclass(frozen=True)
class Table:
    """The owner of each file and folder that the page names; folders end in ``/``. ``features`` are in the order in
    which imports go down; below them lies the core."""

    owners: dict[str, str]
    features: tuple[str, ...]
    repeated: tuple[str, ...] = ()  # entries that stand in two rows

    def entry(self, path: str) -> str | None:
        """The most specific entry that holds a file."""
        parts = path.split("/")
        folders = ("/".join(parts[:depth]) + "/" for depth in range(len(parts) - 1, 0, -1))
        return next((entry for entry in (path, *folders) if entry in self.owners), None)

    def owner(self, path: str) -> str:
        entry = self.entry(path)
        return "" if entry is None else self.owners[entry]

    def is_feature(self, path: str) -> bool:
        return self.owner(path) in self.features

    def goes_up(self, importer: str, imported: str) -> bool:
        owners = self.owner(importer), self.owner(imported)
        return set(owners) <= set(self.features) and self.features.index(owners[0]) > self.features.index(owners[1])


def read_table(page: str) -> Table:
    """The rows below ``| feature |`` and ``| core |``. Raises ``ValueError`` for a row that says nothing."""
    owners: dict[str, str] = {}
    features: dict[str, None] = {}
    repeated: list[str] = []
    heading = ""
    for line in page.splitlines():
        if line in HEADINGS:
            heading = line
        elif not line.startswith("|"):
            heading = ""
        elif heading and not line.startswith("|--"):
            match = ROW.match(line)
            if match is None or (heading == HEADINGS[1] and match[1] in features):
                raise ValueError(f"not a row of this table: {line}")
            owner, folder, files = match.groups()
            entries = [folder] if files == "all" else [folder + name for name in re.findall(r"`([^`]+)`", files)]
            repeated += [entry for entry in entries if entry in owners]
            owners.update(dict.fromkeys(entries, owner))
            if heading == HEADINGS[0]:
                features[owner] = None
    return Table(owners, tuple(features), tuple(repeated))


@cache
def table() -> Table:
    return read_table(PAGE.read_text(encoding="utf-8"))


def package_files() -> list[str]:
    paths = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def files_without_a_row() -> list[str]:
    return [path for path in package_files() if table().entry(path) is None]


def entries_without_a_file() -> list[str]:
    return sorted(set(table().owners) - {table().entry(path) for path in package_files()})


def imported_files() -> Iterator[tuple[str, str]]:
    """Pairs of files: the importer, and what it imports, wherever in it."""
    paths = {name: path.relative_to(ROOT).as_posix() for name, path in modules().items()}
    yield from ((paths[importer], paths[module]) for importer, module in imports().edges)


def _described(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return sorted(f"{a} ({table().owner(a)}) imports {b} ({table().owner(b)})" for a, b in pairs)


def core_to_feature() -> list[str]:
    return _described((a, b) for a, b in imported_files() if not table().is_feature(a) and table().is_feature(b))


def upward_among_features() -> list[str]:
    return _described((a, b) for a, b in imported_files() if table().goes_up(a, b))


def _spoken(function: ast.AST) -> Iterator[str]:
    """Names and strings of a function's code, its docstrings left out."""
    documented = set()
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if isinstance(node.body[0], ast.Expr):
                documented.add(node.body[0].value)
            if not isinstance(node, ast.AsyncFunctionDef):
                yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documented:
            yield node.value


def named_by(text: str) -> list[str]:
    return [feature for feature, pattern in PATTERNS.items() if pattern.search(text)]


def functions_in(source: str) -> Iterator[tuple[int, str, list[str]]]:
    """Line, name and features of every function that names two or more."""
    if len(named_by(source)) < 2:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            features = named_by(" ".join(_spoken(node)))
            if len(features) > 1:
                yield node.lineno, node.name, features


def functions_naming_two() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} {name}: {', '.join(features)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name, features in functions_in(path.read_text(encoding="utf-8"))
    ]


def lines_by_owner() -> Counter[str]:
    lines: Counter[str] = Counter()
    for path in package_files():
        if path.endswith(".py"):
            lines[table().owner(path)] += len((ROOT / path).read_text(encoding="utf-8").splitlines())
    return lines


def main() -> None:
    counted = {
        "imports from core to feature": core_to_feature(),
        "upward imports among features": upward_among_features(),
        "functions that name two features": functions_naming_two(),
    }
    for name, found_lines in counted.items():
        print(f"{name}:", *found_lines, sep="\n  ")
    lines = lines_by_owner()
    print("lines:", ", ".join(f"{feature} {lines[feature]}" for feature in table().features))
    print("lines in files of features:", sum(lines[feature] for feature in table().features), "of", lines.total())
    for name, paths in (("files without a row", files_without_a_row()), ("no file for", entries_without_a_file())):
        print(f"{name}:", ", ".join(paths) or "none")
    for name, found_lines in counted.items():
        print(f"{name}: {len(found_lines)}")


if __name__ == "__main__":
    main()
