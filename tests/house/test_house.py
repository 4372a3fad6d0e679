"""The rules of the house: where the code lives, and that imports only go down."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "arachnec"

BELOW = {
    "ir": {"ir"},
    "kernels": {"kernels"},
    "models": {"models", "data", "ir"},
    "data": {"data", "ir"},
    "passes": {"passes", "kernels", "models", "data", "ir"},
    "backends": {"backends", "passes", "kernels", "models", "data", "ir"},
}


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


@pytest.mark.parametrize("floor", BELOW)
def test_imports_only_go_down(floor: str) -> None:
    allowed = BELOW[floor] | {"version"}
    for path in (PACKAGE / floor).rglob("*.py"):
        parts = {name.split(".")[1] for name in imported_modules(path) if name.startswith("arachnec.")}
        assert parts <= allowed, f"{path.relative_to(ROOT)} imports {sorted(parts - allowed)}"


def test_the_ir_imports_no_torch() -> None:
    for path in (PACKAGE / "ir").rglob("*.py"):
        assert not {n.split(".")[0] for n in imported_modules(path)} & {"torch", "triton", "z3"}, path


@pytest.mark.parametrize("part", ["ir", "passes", "kernels", "backends"])
def test_the_parts_are_links_at_the_top(part: str) -> None:
    link = ROOT / part
    assert link.is_symlink()
    assert str(link.readlink()) == f"arachnec/{part}"


def test_kernels_has_no_init_so_that_another_package_of_that_name_wins() -> None:
    assert not (PACKAGE / "kernels" / "__init__.py").exists()


def test_no_test_folder_is_a_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_a_wheel_would_install_one_import_name() -> None:
    setuptools = pytest.importorskip("setuptools")
    packages = setuptools.find_namespace_packages(str(ROOT), include=["arachnec*"])
    assert {name.split(".")[0] for name in packages} == {"arachnec"}


@pytest.mark.parametrize("arguments", [["--help"], ["passes"]])
def test_help_and_passes_answer_without_heavy_imports(arguments: list[str]) -> None:
    script = (
        "import sys; from arachnec.cli import main; sys.argv = ['arachnec', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'z3', 'scipy', 'diffusers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_version_is_written_once() -> None:
    spec = importlib.util.find_spec("arachnec.version")
    assert spec is not None
    assert "version" not in (ROOT / "pyproject.toml").read_text().split("[project]")[1].split("dynamic")[0].replace(
        "requires-python", ""
    )
