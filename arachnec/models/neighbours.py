"""The modules beside a model file that it imports. In: the file. Out: their files, and an importer that finds them.

A model file runs as ``python FILE`` would run it, with its own folder first on the path; but only for what is there and
is imported by name, so that an executable can carry exactly that.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from arachnec.ir.diagnostic import Span, user_error
from arachnec.ir.limits import MOST_MODEL_FILES


class Source(SourceFileLoader):
    """Leaves no ``__pycache__`` in an executable's folder, and takes nothing from one. ``shown`` is the file's name in
    messages."""

    def __init__(self, fullname: str, path: str, shown: str | None = None) -> None:
        super().__init__(fullname, path)
        self.shown = shown or path

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.get_filename(fullname)), self.shown)


def neighbours(path: Path) -> tuple[str, ...]:
    """What of the model file's folder it imports, anywhere in it, and what that imports: paths inside the folder.

    A module that is imported from elsewhere already, or belongs to Python, is none. Raises ``UserError`` where they are
    too many; a file that does not parse imports nothing.
    """
    folder, files, waiting = path.parent, dict[str, None](), [(path, "")]
    while waiting:
        file, package = waiting.pop()
        for name in _imported(file, package):
            for part in _with_packages(folder, name):
                relative = part.relative_to(folder).as_posix()
                if relative not in files and part != path:
                    files[relative] = None
                    waiting.append((part, ".".join(Path(relative).parent.parts)))
        if len(files) > MOST_MODEL_FILES:
            raise user_error(
                f"the model file imports {len(files)} modules from its own folder",
                help=f"install them as a package: an executable carries at most {MOST_MODEL_FILES}",
                span=Span(str(path), 1, 1, 1, 1),
            )
    return tuple(sorted(files))


def _imported(file: Path, package: str) -> Iterator[str]:
    """Dotted names; of ``from a import b`` both a and a.b."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _with_packages(folder: Path, name: str) -> Iterator[Path]:
    """The file of a module in the folder, after those of its packages; nothing for a name from elsewhere."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or _is_elsewhere(parts[0], folder):
        return
    place = folder
    for part in parts:
        if (place / part / "__init__.py").is_file():
            yield place / part / "__init__.py"
        elif (place / f"{part}.py").is_file():
            yield place / f"{part}.py"
            return
        elif not (place / part).is_dir():
            return
        place = place / part


def _is_elsewhere(top: str, folder: Path) -> bool:
    """Whether another module of that name is there already; one that a folder's own finder has found is not."""
    known = sys.modules.get(top)
    file = getattr(known, "__file__", None)
    if known is not None:
        return file is not None and not isinstance(known.__loader__, Source) and folder not in Path(file).parents
    if (folder / top / "__init__.py").is_file() or (folder / f"{top}.py").is_file():
        return False
    return importlib.util.find_spec(top) is not None  # a plain folder gives way to a package


class _Folder(MetaPathFinder):
    """Finds a model file's neighbours; what is imported later, inside a function, too."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        if file is None:
            return None
        if file.is_dir():
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(file)]
            return spec
        inside = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=Source(fullname, str(file)), submodule_search_locations=inside
        )


def make_importable(folder: Path, files: Sequence[str]) -> None:
    """Have these files of the folder found by name, in place of those of the model file before."""
    modules: dict[str, Path] = {}
    for relative in files:
        place = Path(relative)
        names = place.parent.parts if place.name == "__init__.py" else (*place.parent.parts, place.stem)
        modules[".".join(names)] = folder / place
        for depth in range(1, len(place.parent.parts) + 1):
            modules.setdefault(".".join(place.parts[:depth]), folder.joinpath(*place.parts[:depth]))
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Folder)]
    for name, module in list(sys.modules.items()):
        old, new = getattr(module, "__file__", None), modules.get(name)
        ours = isinstance(getattr(module, "__loader__", None), Source) and not name.startswith("arachnec_model_")
        if ours and (new is None or old != str(new)):
            del sys.modules[name]
    if modules:
        sys.meta_path.insert(0, _Folder(modules))
