"""What a model file will import of libraries, known without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

# Both find their parts by name when they are asked for; most of what a model takes comes with these.
PARTS = {
    "diffusers": ("diffusers.models.autoencoders", "diffusers.models.transformers"),
    "transformers": ("transformers.modeling_utils",),
}


def imported_libraries(texts: Iterable[bytes]) -> tuple[str, ...]:
    """The parts of libraries that these files import: by themselves, or by our modules of that name."""
    named = {part for text in texts for name in _imports(text) for part in name.split(".")}
    return tuple(module for library, modules in PARTS.items() if library in named for module in modules)


def _imports(text: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # told where the file is run
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
