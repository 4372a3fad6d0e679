"""Hostile input: whatever stands in a file, a command ends with the product's own errors, and few of them."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from arachnec.backends.simulator import simulate
from arachnec.checkpoint.folder import read_commit
from arachnec.cli import run
from arachnec.cluster.file import parse_cluster
from arachnec.commands.opt import read_text
from arachnec.cost.profile import read_profile
from arachnec.data.manifest import read_manifest
from arachnec.data.requests import read_requests
from arachnec.executable.batches import mixed_manifest
from arachnec.executable.folder import read_header
from arachnec.executable.train_file import training_of
from arachnec.executable.training_options import Training
from arachnec.generation.results import read_seen
from arachnec.ir.diagnostic import Diagnostic, UserError, render_all
from arachnec.ir.limits import LONGEST_ERRORS, MOST_GPUS
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import check_module
from arachnec.passes.check import checked
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.pipelining.csv_format import read_csv
from arachnec.pipelining.profile_file import read_profile_file
from arachnec.planning.duration_table import read_table
from arachnec.sparsity.density_file import read_densities
from arachnec.views.explain import explain
from arachnec.views.format import terminal
from tests.commands.binary_inputs import BINARY, damaged_bytes, other_values
from tests.commands.one_attribute import Change, changes
from tests.pipelining.bert_profile import bert_48

GOLDEN = Path(__file__).parents[1] / "golden"
OPT = "arachnec opt --passes "
SLOW = ("choose_layout", "stages_adaptis", "schedule_genetic")  # they search for seconds
HUGE = "9" * 5000
ROW = {"frames": 9, "height": 32, "width": 48, "text_tokens": 8}


def read_ir(path: Path) -> object:
    module = parse_module(read_text(path), str(path))
    check_module(module)
    return module


def read_mix(path: Path) -> object:
    """A training file whose clips come from manifests that it names; one of them is there."""
    (path.parent / "clips.jsonl").write_text(SEEDS["clips.jsonl"])
    training = training_of(Training(), path)
    if not training.mix.manifests:
        return "no mix"
    sources = [replace(source, data=str(path.parent / "clips.jsonl")) for source in training.mix.manifests]
    return mixed_manifest(replace(training, mix=replace(training.mix, manifests=tuple(sources))))


READERS: dict[str, Callable[[Path], object]] = {
    "module.cascade": read_ir,
    "cluster.toml": parse_cluster,
    "clips.jsonl": read_manifest,
    "clips.csv": read_manifest,
    "table.json": lambda path: read_table(path, parse_cluster("2:cpu")),
    "profile.json": read_profile,
    "executable.json": lambda path: read_header(path.parent),
    "requests.jsonl": read_requests,
    "densities.json": read_densities,
    "switches.jsonl": lambda path: read_seen(path.parent),
    "layers.txt": read_profile_file,
    "schedule.csv": read_csv,
    "train.toml": lambda path: training_of(Training(), path),
    "mix.toml": read_mix,
    "commit.json": lambda path: read_commit(path.parent) or "no checkpoint",
}
SEEDS = {
    "module.cascade": (GOLDEN / "check" / "pipeline_1f1b.cascade").read_text(),
    "cluster.toml": 'nodes = 2\ngpus = 8\ndevice = "h100-80g"\ninter = "25 GB/s"\nnics = "AABBCCDD"\ncores = 4\n',
    "clips.jsonl": "".join(json.dumps(ROW | {"id": name, "caption": "a b"}) + "\n" for name in "ab"),
    "clips.csv": "frames,height,width,text_tokens,id\n9,32,48,8,a\n5,32,48,8,b\n",
    "table.json": '{"unit": "ms", "tasks": [{"name": "D", "stages": [{"stage": "dit", "ms": {"1": 9, "2": 5}}]}]}',
    "profile.json": json.dumps(
        {
            "machine": "m",
            "device": "cpu",
            "stages": [
                {
                    "stage": "dit",
                    "phase": "forward",
                    "measurements": [{"batch": 1, "tokens": 64, "text": 0, "degree": 1, "ms": 2.0}],
                    "fit": {"coefficients": {"B*S": 0.5}, "residuals": [0.0], "held_out": None, "exponent": None},
                }
            ],
            "links": {"latency": 1.0, "intra": 2.0},
        }
    ),
    "executable.json": json.dumps(
        {
            "format": 1,
            "pipeline": "annotate{profile=profile.json},lower",
            "iterations": 1,
            "training": {},
            "fingerprint": {},
            "versions": {},
        }
    ),
}
SEEDS |= {
    "requests.jsonl": "".join(
        json.dumps(
            {"id": name, "caption": "a fox", "frames": 9, "height": 32, "width": 48, "steps": 4, "guidance": 2.5}
        )
        + "\n"
        for name in "ab"
    ),
    "densities.json": json.dumps(
        {
            "model": "Tiny",
            "layers": [
                {"layer": 0, "heads": [0.05, 0.3], "classes": [{"tokens": 1024, "heads": [0.1, 0.2]}]},
                {"layer": 1, "heads": [1]},
            ],
        }
    ),
    "switches.jsonl": json.dumps({"models": ["a", "b"], "switch": "adaptive=0.1", "steps": 8, "switched": 3}) + "\n",
}
SEEDS |= {
    "layers.txt": bert_48(),
    "schedule.csv": "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n",
    "train.toml": (
        'lr = 1e-3\nema = 0.9\naccumulate = 2\n[optimizer]\nname = "AdamW"\nbetas = [0.9, 0.95]\n[[groups]]\n'
        'match = ["*bias"]\nweight_decay = 0.0\n[schedule]\nname = "CosineAnnealingLR"\nT_max = 100\nwarmup = 5\n'
        '[timesteps]\nsampling = "logit-normal"\n[validation]\ndata = "held.jsonl"\nevery = 5\n'
    ),
    "mix.toml": 'seed = 3\n[mix]\nbatch = 2\n[[mix.manifests]]\ndata = "clips.jsonl"\nweight = 2\n',
    "commit.json": json.dumps(
        {
            "format": 2,
            "position": {"steps": 4, "seed": 0, "model": "m", "clips": 12, "data": "d"},
            "files": [{"name": "rank-00000.safetensors", "bytes": 10, "sha256": "0" * 64}],
        }
    ),
}
SHORT = ("", *'{}[]"\\@%=, \n\x00\ud800\U0001f600', "\x1b[2J", "[/bold]", "-1", "0", "1e400", "nan", "//", "../../x")
LONG = (HUGE, "a" * 5000, "[" * 3000, "null", "true", "1000000000")
PIECES = st.sampled_from(SHORT + LONG)
DAMAGE = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.2), PIECES), min_size=1, max_size=4)


def damaged(text: str, damage: list[tuple[float, float, str]]) -> bytes:
    for at, length, piece in damage:
        begin = int(at * len(text))
        text = text[:begin] + piece + text[begin + int(length * len(text)) :]
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGE)
def test_damaged_input_ends_with_errors_of_our_own(
    name: str, damage: list[tuple[float, float, str]], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(damaged(SEEDS[name], damage))
    try:
        READERS[name](path)
    except UserError as error:
        said = render_all(error.diagnostics)
        assert len(said) < 2 * LONGEST_ERRORS
        assert all(letter.isprintable() or letter in "\n\t" for letter in said)


@pytest.mark.parametrize("name", BINARY)
def test_damaged_files_that_are_no_text_end_with_errors_of_our_own(name: str, tmp_path: Path) -> None:
    write, read = BINARY[name]
    for number in range(24):
        rng, path = random.Random(f"{name}/{number}"), tmp_path / str(number) / name
        path.parent.mkdir()
        write(path)
        if number == 0:
            assert read(path) is not None
        elif number % 2:
            other_values(name, path, rng)
        else:
            path.write_bytes(damaged_bytes(name, path.read_bytes(), rng))
        if number:
            try:
                read(path)
            except UserError as error:
                assert len(render_all(error.diagnostics)) < 2 * LONGEST_ERRORS


@pytest.mark.parametrize("name", READERS)
def test_the_inputs_that_are_damaged_are_right(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SEEDS[name])
    assert READERS[name](tmp_path / name) is not None


REFUSED = {
    "digits of a range": ("module.cascade", f'module @a attributes {{ level = "traced", x = [0..{HUGE}] }} {{}}'),
    "digits of a list": ("module.cascade", f'module @a attributes {{ level = "traced", x = [0, {HUGE}] }} {{}}'),
    "digits of a dimension": (
        "module.cascade",
        f'module @a attributes {{ level = "traced" }} {{ graph @g (%0 : f32[{HUGE}]) -> () [] }}',
    ),
    "a billion ranks": (
        "module.cascade",
        'module @a attributes { level = "traced" } { cluster @c { nodes = 1, gpus = 1000000000, device = "cpu",'
        " memory = 1 GiB, flops = 1 TFLOP/s, intra = 1 GB/s, inter = 1 GB/s, latency = 1 us, inter_latency = 1 us } }",
    ),
    "an open string": ("module.cascade", 'module @a attributes { x = "' + "a" * 1_000_000),
    "nested tables": ("cluster.toml", "gpus = " + "[" * 3000),
    "digits of a cluster": ("cluster.toml", f'gpus = {HUGE}\ndevice = "cpu"'),
    "fewer cores than none": ("cluster.toml", 'gpus = 2\ndevice = "cpu"\ncores = -5'),
    "a device of a megabyte": ("cluster.toml", 'gpus = 2\ndevice = "' + "d" * 500_000 + '"'),
    "a key of a megabyte": ("cluster.toml", "k" * 500_000 + " = 2"),
    "half a surrogate pair": ("clips.jsonl", json.dumps(ROW | {"id": "\ud800"})),
    "copies without end": ("clips.jsonl", "\n".join(json.dumps(ROW | {"clips": 2**20, "id": n}) for n in range(64))),
    "a link without speed": ("profile.json", SEEDS["profile.json"].replace('"intra": 2.0', '"intra": 0.0')),
    "a link below nothing": ("profile.json", SEEDS["profile.json"].replace('"intra": 2.0', '"intra": -1.0')),
    "a coefficient below nothing": ("profile.json", SEEDS["profile.json"].replace("0.5", "-0.5")),
    "a coefficient of another name": ("profile.json", SEEDS["profile.json"].replace('"B*S"', '"os.system"')),
    "a profile from elsewhere": (
        "executable.json",
        SEEDS["executable.json"].replace("profile=profile.json", "profile=/etc/passwd"),
    ),
    "a hundred files of passes": (
        "executable.json",
        json.dumps(json.loads(SEEDS["executable.json"]) | {"load": [f"p{n}.py" for n in range(100)]}),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_fill_the_memory_or_mislead_is_refused(case: str, tmp_path: Path) -> None:
    name, text = REFUSED[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as raised:
        READERS[name](tmp_path / name)
    assert len(render_all(raised.value.diagnostics)) < LONGEST_ERRORS


def test_a_device_that_never_ends_is_no_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("check", "/dev/zero")) == 2
    assert "it is no file" in capsys.readouterr().err


def test_many_errors_are_few_and_short() -> None:
    class Wide(Diagnostic):
        title = "x" * 5000

    assert len(render_all([Wide(None)] * 50)) < 1.1 * LONGEST_ERRORS
    assert "... and 49 more" in render_all([Wide(None)] * 50)
    assert "... and 30 more" in render_all([type("Short", (Diagnostic,), {"title": "x"})(None)] * 50)


def test_a_name_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal().print("\x1b[2J[/bold]")
    assert capsys.readouterr().out == "?[2J[/bold]\n"


def test_the_largest_cluster_is_one() -> None:
    assert parse_cluster(f"{MOST_GPUS // 8}x8:h100-80g").world == MOST_GPUS


PROGRAMS = (
    "check/valid.cascade",
    "check/pipeline_zero_bubble.cascade",
    "check/cells_valid.cascade",
    "check/host_valid.cascade",
    "check/heads_valid.cascade",
    "check/two_model_sampling.cascade",
    "lower/buckets.expect",
)


@functools.cache
def changed_programs() -> list[tuple[Module, Change]]:
    modules = (parse_module((GOLDEN / name).read_text(encoding="utf-8")) for name in PROGRAMS)
    return [(module, change) for module in modules for change in changes(module)]


@settings(max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_program_with_one_hostile_attribute_ends_with_errors_of_our_own(share: float) -> None:
    """It is verified, checked, simulated and explained, as the commands do."""
    module, change = changed_programs()[int(share * len(changed_programs()))]
    try:
        changed = parse_module(print_module(change.on(module)))
        check_module(changed)
        checked(changed)
        simulate(changed)
        explain(changed)
    except UserError as error:
        said = render_all(error.diagnostics)
        assert said.startswith("error: ")
        assert len(said) < 2 * LONGEST_ERRORS


@pytest.mark.parametrize("command", ["show", "simulate", "explain"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_with_one_hostile_attribute_is_drawn_and_explained_or_refused(
    command: str, share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all that these commands write, and all that `explain` plans anew."""
    module, change = changed_programs()[int(share * len(changed_programs()))]
    file, (page, drawn, events) = (
        tmp_path / "changed.cascade",
        (tmp_path / name for name in ("p.html", "d.svg", "e.json")),
    )
    file.write_text(print_module(change.on(module)))
    options = {
        "show": ("--html", page, "--svg", drawn, "--trace", events),
        "simulate": ("--svg", drawn, "--trace", events),
        "explain": ("--budget", "1ms"),
    }[command]
    code, said = run((command, str(file), *map(str, options))), capsys.readouterr().err
    assert code == 0 or (code == 2 and said.startswith("error: ")), said
    assert "Traceback" not in said


@functools.cache
def opened_with_passes() -> list[tuple[str, Module, Pipeline]]:
    """The modules of the passes' golden files that are right, and the pipelines they are for."""
    cases = []
    for path in sorted(GOLDEN.glob("*/*.cascade")):
        first, _, _ = (text := path.read_text(encoding="utf-8")).partition("\n")
        if path.parent.name not in SLOW and OPT in first:
            with contextlib.suppress(UserError):
                cases.append((path.stem, parse_module(text), Pipeline.parse(first.split(OPT)[1].split()[0])))
    assert len(cases) > 100
    return cases


@settings(max_examples=40)
@given(case=st.floats(0, 1, exclude_max=True), share=st.floats(0, 1, exclude_max=True))
def test_passes_over_a_module_with_one_hostile_attribute_end_with_errors_of_our_own(case: float, share: float) -> None:
    """As `opt` runs them. A pass that gives a wrong module for it is a bug of the pass."""
    _, module, pipeline = opened_with_passes()[int(case * len(opened_with_passes()))]
    every = list(changes(module))
    assume(every)
    try:
        pipeline.run(parse_module(print_module(every[int(share * len(every))].on(module))))
    except UserError as error:
        assert render_all(error.diagnostics).startswith("error: ")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_that_are_changed_are_right(name: str) -> None:
    module = parse_module((GOLDEN / name).read_text(encoding="utf-8"))
    check_module(module)
    checked(module)
    assert simulate(module).iteration_ms > 0
    assert explain(module)
