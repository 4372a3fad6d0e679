"""The architecture: where the code lies, and that imports only go down."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "arachnec"

# The layers, lowest first. A package imports packages of lower layers only; docs/architecture.md says what each holds.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("ir", "solver", "kernels", "version"),
    ("data", "cluster", "checkpoint", "analysis", "fusion", "pipelining", "sparsity"),
    ("models", "cost"),
    ("verification", "tracing", "lowering", "simulation", "executable", "launch"),
    ("spmd", "planning", "runtime", "optimizers", "sampling"),
    ("passes", "codegen", "model_state"),
    ("views",),
    ("backends",),
    ("profiling", "export", "equivalence", "caching", "generation"),
    ("report",),
    ("driver",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
# The same inside ``backends/torch_distributed``: folders, and the files that lie beside them.
EXECUTOR = "arachnec.backends.torch_distributed"
EXECUTOR_LAYERS: tuple[tuple[str, ...], ...] = (
    ("options", "reporting", "weights"),
    ("batches", "plans"),
    ("rank",),
    ("executor", "checkpoints"),
    ("run",),
    ("engine", "local_run"),
    ("worker",),
)
LAYER = {package: number for number, packages in enumerate(LAYERS, 1) for package in packages}


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imported(path: Path) -> Iterator[str]:
    """Every module or name that a file imports, wherever in it, as a dotted path."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports() -> nx.DiGraph:
    """Who imports whom among the modules of ``arachnec``, imports inside functions and for types included."""
    known = modules()
    graph = nx.DiGraph()
    graph.add_nodes_from(known)
    for name, path in known.items():
        for target in imported(path):
            module = target if target in known else target.rpartition(".")[0]
            if module in known and module != name:
                graph.add_edge(name, module)
    return graph


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_package_has_a_layer() -> None:
    assert {package(module) for module in modules()} - {""} == set(LAYER)


def test_imports_only_go_down() -> None:
    upward = [
        f"{importer} (layer {LAYER[package(importer)]}) imports {module} (layer {LAYER[package(module)]})"
        for importer, module in imports().edges
        if package(importer) and package(module) and package(importer) != package(module)
        if LAYER[package(module)] >= LAYER[package(importer)]
    ]
    assert not upward, "\n".join(upward)


def test_inside_the_back_end_of_ranks_imports_only_go_down() -> None:
    layer = {name: number for number, names in enumerate(EXECUTOR_LAYERS, 1) for name in names}
    inside = {name: name.removeprefix(f"{EXECUTOR}.").split(".")[0] for name in modules() if f"{EXECUTOR}." in name}
    assert set(inside.values()) == set(layer)
    upward = [
        f"{importer} (layer {layer[inside[importer]]}) imports {module} (layer {layer[inside[module]]})"
        for importer, module in imports().edges
        if importer in inside and module in inside and inside[importer] != inside[module]
        if layer[inside[module]] >= layer[inside[importer]]
    ]
    assert not upward, "\n".join(upward)


def test_imports_inside_a_package_do_not_loop_and_its_folders_are_layers_too() -> None:
    """With every folder inside a package folded to one, at any depth, and with none: no cycle either way."""
    graph = imports().copy()
    # what a package's __init__ offers lazily, for users, is in no layer
    graph.remove_nodes_from([name for name, path in modules().items() if path.name == "__init__.py"])
    assert nx.is_directed_acyclic_graph(graph), nx.find_cycle(graph)
    for depth in range(3, 1 + max(name.count(".") for name in graph)):
        folded = nx.DiGraph()
        for importer, module in graph.edges:
            a, b = (".".join(name.split(".")[:depth]) for name in (importer, module))
            if a != b and package(a) == package(b):
                folded.add_edge(a, b)
        assert nx.is_directed_acyclic_graph(folded), nx.find_cycle(folded)


def test_a_pass_file_holds_one_pass_and_derives_its_name() -> None:
    from arachnec.passes import registry

    files = {path.stem for path in (PACKAGE / "passes").glob("*.py")} - {"__init__", "trace"}
    assert files == {name.replace("-", "_") for name in registry.builtin()}
    for name in registry.builtin():
        kind = registry.builtin().get(name)
        assert kind.name == name
        assert kind.__module__ == f"arachnec.passes.{name.replace('-', '_')}"


@pytest.mark.parametrize("name", ["ir", "solver", "pipelining", "sparsity"])
def test_packages_of_plain_numbers_import_no_torch(name: str) -> None:
    banned = {"torch", "triton"} | ({"z3"} if name == "ir" else set())
    for path in (PACKAGE / name).rglob("*.py"):
        assert not {module.split(".")[0] for module in imported(path)} & banned, path


@pytest.mark.parametrize("part", ["ir", "passes", "kernels", "backends"])
def test_the_parts_are_links_at_the_top(part: str) -> None:
    link = ROOT / part
    assert link.is_symlink()
    assert str(link.readlink()) == f"arachnec/{part}"


def test_kernels_has_no_init_so_that_another_package_of_that_name_wins() -> None:
    assert not (PACKAGE / "kernels" / "__init__.py").exists()


def test_a_folder_of_tests_has_tests_or_folders() -> None:
    """So that each part can be run alone by its name."""
    parts = {file.parent for file in (ROOT / "tests").rglob("test_*.py")}
    assert not [part for part in parts if parts.intersection(part.parents)]


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
