"""`arachnec opt`, `bisect` and `passes`, as a person meets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arachnec.cli import COMMANDS, run
from arachnec.commands import opt
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module

ROOT = Path(__file__).parents[2]
PLACED = ROOT / "tests/golden/verify/right_placed.cascade"
PASSES = '''
from __future__ import annotations
from dataclasses import dataclass, replace
from arachnec.ir.nodes import Level, Module
from arachnec.passes import Pass

@dataclass(frozen=True)
class Rename(Pass):
    """Renames the module."""
    needs = Level.TRACED
    gives = Level.TRACED
    to: str = "other"
    def run(self, module: Module) -> Module:
        return replace(module, name=self.to)

@dataclass(frozen=True)
class Fall(Pass):
    """Falls over."""
    needs = Level.TRACED
    gives = Level.TRACED
    def run(self, module: Module) -> Module:
        raise ArithmeticError("fell over")
'''


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PASSES)
    return "mine.py"


def test_opt_reads_runs_and_prints(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["opt", str(PLACED), "--load", load, "--passes", "rename{to=new}"]) == 0
    module = parse_module(capsys.readouterr().out)
    assert module.name == "new"
    assert module.cascades == parse_module(PLACED.read_text()).cascades


def test_opt_takes_the_pipeline_from_line_1_and_writes_to_a_file(load: str, tmp_path: Path) -> None:
    (tmp_path / "a.cascade").write_text(f"// arachnec opt --passes rename{{to=new}}\n{PLACED.read_text()}")
    assert run(["opt", "a.cascade", "--load", load, "-o", "b.cascade"]) == 0
    assert parse_module((tmp_path / "b.cascade").read_text()).name == "new"


def test_opt_reads_standard_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "arachnec", "opt", "-", "--passes", "kep"],
        input="module @m",
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no pass `kep`")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["opt", "nowhere.cascade"], "nowhere.cascade cannot be read: No such file or directory"),
        (["opt", str(PLACED)], "no pipeline for"),
        (["opt", "cut.cascade", "--passes", "rename"], "the text ends in the middle of a module"),
        (["opt", "bytes.cascade", "--passes", "rename"], "it is not UTF-8 text"),
        (["opt", str(PLACED), "--passes", "renam"], "did you mean `rename`?"),
        (["opt", str(PLACED), "--passes", "rename{too=a}"], "did you mean `to`?"),
        (["opt", str(PLACED), "--passes", "partition"], "needs a traced module, and this one is placed"),
        (["opt", str(PLACED), "--passes", "rename", "--print-ir-after", "renam"], "did you mean `rename`?"),
        (["opt", str(PLACED), "--passes", "rename", "--load", "gone.py"], "there is no file gone.py"),
        (["opt"], "Missing argument"),
        (["optt"], "did you mean `opt`?"),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], says: str, load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.cascade").write_text(PLACED.read_text()[:900])
    (tmp_path / "bytes.cascade").write_bytes(b"\xff\xfe")
    extra = ["--load", load] if len(arguments) > 1 else []
    assert run([*arguments, *extra]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("command", [["opt", "--passes", "rename", "--load", "mine.py"], ["check"], ["bisect"]])
def test_a_text_that_is_too_large_is_refused_before_it_is_read_whole(
    command: list[str], load: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opt, "LARGEST_MODULE", len(PLACED.read_bytes()) - 1)
    assert run([*command, str(PLACED)]) == 2
    said = capsys.readouterr().err
    assert "is larger than 0 MiB, and no module is read that is" in said
    assert "plan fewer clips in a step" in said


def test_opt_shows_the_module_after_passes_and_their_times(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    watch = ["--print-ir-after", "rename", "--time-passes", "--dump-ir", "ir"]
    assert run(["opt", str(PLACED), "--load", load, "--passes", "rename", *watch]) == 0
    shown = capsys.readouterr().err
    assert "// after rename\nmodule @other" in shown
    assert "total" in shown
    assert sorted(path.name for path in Path("ir").iterdir()) == ["00_input.cascade", "01_rename.cascade"]


def test_a_crash_shows_its_traceback_and_leaves_a_reproducer(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArithmeticError):
        run(["opt", str(PLACED), "--load", load, "--passes", "rename,fall"])
    assert "`arachnec opt reproducer_fall.cascade` repeats it" in capsys.readouterr().err
    with pytest.raises(ArithmeticError):
        run(["opt", "reproducer_fall.cascade", "--load", load])


def test_bisect_names_the_pass_and_writes_what_it_was_given(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bisect", str(PLACED), "--load", load, "--passes", "rename,fall,rename{to=x}"]) == 1
    assert "first bad pass: fall (number 2 of 3)" in capsys.readouterr().out
    assert parse_module(Path("bisect_fall.cascade").read_text()).name == "other"


def test_bisect_by_a_command(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    passes = ["--passes", "rename,rename{to=bad},rename", "--predicate", "! grep -q @bad"]
    assert run(["bisect", str(PLACED), "--load", load, *passes]) == 0
    assert "good after all 3 passes" in capsys.readouterr().out
    assert run(["bisect", str(PLACED), "--load", load, "--passes", "rename,rename{to=bad}", *passes[2:]]) == 1
    assert "first bad pass: rename{to=bad} (number 2 of 2)" in capsys.readouterr().out


def test_passes_lists_loaded_and_built_in_passes_and_pipelines(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["passes", "--load", load]) == 0
    shown = capsys.readouterr().out
    for part in (
        "rename  (traced, once per iteration)",
        "Renames the module.",
        "to = string, default other",
        "schedule-z3  (costed ->",
    ):
        assert part in shown
    assert "data-parallel" in shown


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["opt", "--help"], ["passes"]])
def test_what_should_answer_at_once_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys; from arachnec.cli import run; code = run(sys.argv[1:]);"
        "sys.exit(code or ','.join(sorted({'torch', 'z3', 'scipy', 'matplotlib'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_no_command() -> None:
    commands = [f"arachnec.commands.{name}" for name in COMMANDS]
    script = (
        "import sys; from arachnec.cli import run; run(['--help']); "
        f"print([name for name in {commands} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.endswith("[]\n")
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


def test_opt_prints_what_it_reads_where_no_pass_changes_it(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["opt", str(PLACED), "--load", load, "--passes", "rename{to=m}"]) == 0
    assert capsys.readouterr().out == print_module(parse_module(PLACED.read_text()))
