"""Pipelines parse and print, run their passes in order, and hold them to their levels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.diagnostic import Diagnostic, UserError, render
from arachnec.ir.nodes import Cascade, Cluster, Level, Module, Phase, Stage
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Attributes, Quantity
from arachnec.passes.infra.base import Duration, Pass, Registry, Scope, builtin, installed, load_file
from arachnec.passes.infra.bisect import command_predicate, first_bad
from arachnec.passes.infra.instruments import Dump, Instrument, Moment, PrintAfter, Reproducer, Timing, pipeline_of
from arachnec.passes.infra.named_pipelines import NAMED, PIPELINES
from arachnec.passes.infra.pipeline import BrokenPass, Pipeline, pass_in_layout
from arachnec.passes.schedule_stages import ScheduleStages
from arachnec.passes.schedule_z3 import ScheduleZ3


@dataclass(frozen=True)
class Cut(Pass):
    """Makes one train cascade of every clip."""

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.PARTITIONED
    policy: Literal["one", "two words"] = "one"
    budget: Duration = Duration(500.0)
    limits: tuple[int, ...] = ()
    words: tuple[str, ...] = ("a",)
    p: float = 1.8
    seed: int = 0
    eager: bool = False
    file: str | None = None
    label: str = ""

    def run(self, module: Module) -> Module:
        cascades = tuple(
            Cascade(str(clip.id), Phase.TRAIN, "dit", (clip.id,), 1, clip.tokens, clip.text) for clip in module.clips
        )
        return replace(module, level=Level.PARTITIONED, cascades=cascades)


@dataclass(frozen=True)
class Keep(Pass):
    """Gives back what it gets; refuses odd numbers, crashes or breaks the module when told to."""

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    even: int = 0
    crash: bool = False
    harm: bool = False
    lie: bool = False

    def __post_init__(self) -> None:
        if self.even % 2:
            raise ValueError(f"{self.even} is odd")

    def run(self, module: Module) -> Module:
        if self.crash:
            raise ZeroDivisionError("told to")
        if self.lie:
            return replace(module, level=Level.LOWERED)
        return module.with_attrs(nonsense=1) if self.harm else module


@dataclass(frozen=True)
class Decide(Pass):
    """Decides for the whole model."""

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    def run(self, module: Module) -> Module:
        return module


REGISTRY = Registry(()).with_passes(Cut, Keep, Decide)
CLUSTER = Cluster(
    "pod",
    Attributes.of(
        nodes=1,
        gpus=2,
        device="cpu",
        memory=Quantity(8, "GiB"),
        flops=Quantity(1, "TFLOP/s"),
        intra=Quantity(10, "GB/s"),
        inter=Quantity(1, "GB/s"),
        latency=Quantity(1, "us"),
        inter_latency=Quantity(1, "us"),
    ),
)
MODULE = Module("m", Level.TRACED, CLUSTER, stages=(Stage("dit", True),))


def parse(text: str) -> Pipeline:
    return Pipeline.parse(text, REGISTRY)


def refused(text: str) -> Diagnostic:
    with pytest.raises(UserError) as caught:
        parse(text)
    return caught.value.diagnostics[0]


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
cuts = st.builds(
    Cut,
    st.sampled_from(["one", "two words"]),
    st.floats(min_value=0, allow_infinity=False).map(Duration),
    st.lists(st.integers(), max_size=3).map(tuple),
    st.lists(words, max_size=3).map(tuple),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(),
    st.booleans(),
    st.none() | words | st.just("none"),
    words,
)


@given(st.lists(cuts | st.builds(Keep, st.integers(0, 9).map(lambda n: 2 * n)), min_size=1, max_size=3))
def test_a_pipeline_prints_to_text_that_parses_to_it(passes: list[Pass]) -> None:
    pipeline = Pipeline(tuple(passes))
    assert parse(str(pipeline)) == pipeline
    assert repr(parse(str(pipeline))) == repr(pipeline)


def test_only_options_that_were_set_are_printed() -> None:
    assert str(Pipeline((Cut(), Keep(even=4)))) == "cut,keep{even=4}"


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("cut", (Cut(),)),
        (" cut { p = 2 , seed = 3 } , keep ", (Cut(p=2.0, seed=3), Keep())),
        ("cut{budget=2s}", (Cut(budget=Duration(2000.0)),)),
        ("cut{budget=1.5min,limits=[1, 2,4]}", (Cut(budget=Duration(90000.0), limits=(1, 2, 4)),)),
        ('cut{policy="two words",words=["a,b","]"]}', (Cut(policy="two words", words=("a,b", "]")),)),
        ("cut{file=a/b.toml,label=none,eager=true}", (Cut(file="a/b.toml", label="none", eager=True),)),
        ("cut{file=none}", (Cut(),)),
    ],
)
def test_what_a_person_writes_is_understood(text: str, passes: tuple[Pass, ...]) -> None:
    assert parse(text).passes == passes


@pytest.mark.parametrize(
    ("text", "kind", "place", "says"),
    [
        ("cut,kep", "there is no pass", 5, "did you mean `keep`?"),
        ("xyzzy", "there is no pass", 1, "passes are cut, keep"),
        ("cut{buget=1s}", "has no option", 5, "did you mean `budget`?"),
        ("cut{budget=5}", "cannot be", 12, "a time with its unit"),
        ("cut{policy=three}", "cannot be", 12, "one of one, two words"),
        ("cut{seed=1.5}", "cannot be", 10, "an integer"),
        ("cut{p=nan}", "cannot be", 7, "a finite number"),
        ("cut{eager=yes}", "cannot be", 11, "true or false"),
        ("cut{limits=3}", "cannot be", 12, "a list such as [1,2,4]"),
        ("cut{seed=1, seed=2}", "is given twice", 13, "given twice"),
        ("cut{seed}", "this is not a pipeline", 5, "`option=value`"),
        ("cut{seed=1", "this is not a pipeline", 4, "`,` or `{`"),
        ("cut,,keep", "this is not a pipeline", 5, "the name of a pass"),
        ("", "this is not a pipeline", 1, "expected a pass"),
        ("keep{even=3}", "refuses its options", 1, "3 is odd"),
        ("default{seed=1}", "is a pipeline and takes no options", 8, "takes no options"),
    ],
)
def test_a_mistake_in_a_pipeline_has_its_place_and_remedy(text: str, kind: str, place: int, says: str) -> None:
    message = refused(text)
    assert kind in message.message
    assert message.span is not None
    assert message.span.column == place
    assert says in render(message)


def test_a_pass_must_get_the_level_it_needs() -> None:
    with pytest.raises(UserError) as caught:
        parse("cut,cut").run(MODULE)
    assert "needs a traced module, and this one is partitioned" in str(caught.value)


def test_a_pass_that_keeps_the_level_takes_later_ones_too() -> None:
    assert parse("keep,cut,keep").run(MODULE).level is Level.PARTITIONED


def test_the_module_that_goes_in_is_verified() -> None:
    with pytest.raises(UserError, match="has no attribute `nonsense`"):
        parse("keep").run(MODULE.with_attrs(nonsense=1))


def test_what_a_pass_gives_is_verified_and_the_pass_is_named() -> None:
    with pytest.raises(UserError) as caught:
        parse("cut,keep{harm=true}").run(MODULE)
    assert [d.message for d in caught.value.diagnostics] == [
        "pass `keep` gave a module that is not right: 1 error",
        "module `@m` has no attribute `nonsense`",
    ]


def test_a_pass_that_does_not_give_its_level_is_named() -> None:
    with pytest.raises(UserError, match="pass `keep` says it gives a traced module, and gave a lowered one"):
        parse("keep{lie=true}").run(MODULE)


def test_a_wrong_module_from_a_pass_of_the_compiler_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keep, "__module__", "arachnec.passes.infra.base")
    with pytest.raises(BrokenPass):
        parse("keep{harm=true}").run(MODULE)


@pytest.mark.parametrize("name", NAMED)
def test_named_pipelines_parse_and_their_levels_fit(name: str) -> None:
    pipeline = Pipeline.parse(name)
    assert Pipeline.parse(str(pipeline)) == pipeline
    level = Level.TRACED
    for step in pipeline.passes:
        assert step.accepts(level), step.name
        level = step.result(level)
    assert level is Level.LOWERED


def test_installed_passes_include_the_built_in_ones() -> None:
    assert {"partition", "schedule-z3", "check"} <= set(builtin()) <= set(installed())


def test_a_file_adds_its_passes_and_the_registry_before_knows_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from arachnec.ir.nodes import Level, Module\n"
        "from arachnec.passes import Pass\n"
        "@dataclass(frozen=True)\n"
        "class DoNothing(Pass):\n"
        "    needs = Level.TRACED\n"
        "    gives = Level.TRACED\n"
        "    times: int = 1\n"
        "    def run(self, module: Module) -> Module:\n"
        "        return module\n"
    )
    more = load_file(path, REGISTRY)
    assert list(more) == ["cut", "keep", "decide", "do-nothing"]
    assert list(REGISTRY) == ["cut", "keep", "decide"]
    assert str(Pipeline.parse("do-nothing{times=3},cut", more)) == "do-nothing{times=3},cut"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("partition{policy=single,tokens=4000}", "tokens is of `dual` and `equal-token`, and the policy is `single`"),
        ("partition{policy=equal-token,p=1.8}", "p is of `dual`, and the policy is `equal-token`"),
        ("sparsify{file=densities.json,density=0.2}", "give one of them"),
        ("stages-dapple{batch=2}", "batch is that of the file `layers`, and there is none"),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Pipeline.parse(text)


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("bucket{mib=-1}", 0),
        ("divide-encoders{ranks=0}", 1),
        ("partition{tokens=0}", 1),
        ("rounds{most=0}", 1),
        ("schedule-dynamic-cp{tokens=0}", 1),
        ("schedule-flexsp{buckets=0}", 1),
        ("schedule-flexsp{micro_batches=-2}", 1),
        ("schedule-genetic{generations=-1}", 0),
        ("schedule-genetic{population=2}", 3),
        ("schedule-pipeline{degree=0}", 1),
        ("schedule-pipeline{degrees=[1,0]}", 1),
        ("schedule-pipeline{schedule=interleaved-1f1b,v=0}", 1),
        ("schedule-pipeline{schedule=kfkb,k=-1}", 1),
        ("schedule-sampling{batch=0}", 1),
        ("schedule-sampling{steps=-1}", 0),
        ("schedule-z3{steps=-1}", 0),
        ("segment{batch=0}", 1),
        ("segment{length=0}", 1),
        ("segment{longest=-1}", 1),
        ("segment{models=0}", 1),
        ("shard-optimizer{stages_each=0}", 1),
        ("shard-parameters{pipeline=0}", 1),
        ("stages-dapple{batch=0,layers=layers.json}", 1),
    ],
)
def test_a_count_below_the_least_is_refused_where_it_stands(text: str, least: int) -> None:
    with pytest.raises(UserError) as caught:
        Pipeline.parse(text)
    (message,) = caught.value.diagnostics
    assert message.label == f"expected an integer, {least} at least"
    assert message.span is not None
    _, _, found = message.title.removesuffix("`").partition(" cannot be `")
    assert found and text[message.span.column - 1 :].startswith(found)


@pytest.mark.parametrize(
    "text", ["schedule-genetic{generations=0,population=3}", "schedule-z3{steps=0}", "bucket{mib=0}"]
)
def test_the_least_of_a_count_is_legal(text: str) -> None:
    assert str(Pipeline.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "there is no file"), ("1 / 0", "ZeroDivisionError"), ("x = 1", "defines no pass"), ("(", "SyntaxError")],
)
def test_a_file_that_adds_nothing_says_why(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=says):
        load_file(path, REGISTRY)


class Recorder(Instrument):
    def __init__(self) -> None:
        self.events: list[str] = []

    def before(self, moment: Moment) -> None:
        self.events.append(f"before {moment.index} {moment.name} of {moment.remaining}")

    def after(self, moment: Moment) -> None:
        self.events.append(f"after {moment.index} {moment.name}: {moment.module.level.word}")

    def failed(self, moment: Moment, error: Exception) -> None:
        self.events.append(f"failed {moment.index} {moment.name}: {error}")


def test_instruments_see_before_after_and_failed() -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        parse("cut{seed=1},keep{crash=true}").run(MODULE, [recorder])
    assert recorder.events == [
        "before 0 cut of cut{seed=1},keep{crash=true}",
        "after 0 cut: partitioned",
        "before 1 keep of keep{crash=true}",
        "failed 1 keep: told to",
    ]


def test_the_parts_of_a_pipeline_are_the_pipeline_with_the_same_numbers() -> None:
    pipeline, recorder = parse("decide,keep,cut"), Recorder()
    model = pipeline.run_model_part(MODULE, [recorder])
    for _ in range(2):
        assert pipeline.run_iteration_part(model, [recorder]) == pipeline.run(MODULE)
    numbers = [event.split(" of ")[0] for event in recorder.events if event.startswith("before")]
    assert numbers == [
        "before 0 decide",
        *["before 1 keep", "before 2 cut"] * 2,
    ]


@pytest.mark.parametrize("text", ["keep,decide", "keep,cut,decide", "keep, decide ,cut"])
def test_a_pass_of_the_model_behind_one_of_an_iteration_is_refused_where_it_stands(text: str) -> None:
    with pytest.raises(UserError, match="pass `decide` is of scope `model` and stands after") as error:
        parse(text)
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.span is not None
    assert text[diagnostic.span.column - 1 :].startswith("decide")
    ordered = diagnostic.text(diagnostic.help).rpartition(": ")[2]
    assert str(parse(ordered)) == ordered


@pytest.mark.parametrize("text", ["decide,decide", "decide,keep, decide"])
def test_a_pass_of_the_model_stands_once(text: str) -> None:
    with pytest.raises(UserError, match="pass `decide` stands twice") as error:
        parse(text)
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.span is not None
    assert diagnostic.span.column - 1 == text.rindex("decide")


def test_a_pipeline_in_the_wrong_order_made_without_text_is_refused_when_it_runs() -> None:
    pipeline = Pipeline((Keep(), Decide()))
    for run in (pipeline.run, pipeline.run_model_part, pipeline.run_iteration_part):
        with pytest.raises(UserError, match="scope"):
            run(MODULE)


def test_what_decides_for_the_model_comes_first_in_every_named_pipeline() -> None:
    scopes = {name: [step.scope.value for step in Pipeline.parse(name).passes] for name in PIPELINES}
    assert all(turns == sorted(turns, reverse=True) for turns in scopes.values())
    assert scopes["fused"][:4] == ["model", "model", "model", "iteration"]


def test_a_crash_leaves_a_file_that_repeats_it(tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(ZeroDivisionError):
        parse("cut,keep{crash=true}").run(MODULE, [Reproducer(tmp_path, told.append)])
    text = (tmp_path / "reproducer_keep.cascade").read_text()
    assert pipeline_of(text) == "keep{crash=true}"
    assert parse_module(text).level is Level.PARTITIONED
    assert "reproducer_keep.cascade" in told[0]
    with pytest.raises(ZeroDivisionError):
        parse(pipeline_of(text) or "").run(parse_module(text))


def test_a_users_mistake_leaves_no_reproducer(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        parse("keep{harm=true}").run(MODULE, [Reproducer(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_dumps_are_numbered_and_each_is_the_module_after_its_pass(tmp_path: Path) -> None:
    parse("keep,cut").run(MODULE, [Dump(tmp_path / "ir")])
    files = sorted((tmp_path / "ir").iterdir())
    assert [path.name for path in files] == ["00_input.cascade", "01_keep.cascade", "02_cut.cascade"]
    assert [parse_module(path.read_text()).level.word for path in files] == ["traced", "traced", "partitioned"]
    assert pipeline_of(files[0].read_text()) == "keep,cut"


def test_the_module_is_printed_after_the_passes_asked_for() -> None:
    some: list[str] = []
    every: list[str] = []
    parse("keep,cut").run(MODULE, [PrintAfter(some.append, frozenset({"cut"})), PrintAfter(every.append)])
    assert [text.splitlines()[0] for text in some] == ["// after cut"]
    assert [text.splitlines()[0] for text in every] == ["// after keep", "// after cut"]
    assert parse_module(some[0]).level is Level.PARTITIONED


def test_timing_lists_every_pass_and_their_sum() -> None:
    timing = Timing()
    parse("keep,cut").run(MODULE, [timing])
    assert [name for name, _, _ in timing.rows] == ["keep", "cut"]
    assert timing.total == sum(seconds for _, seconds, _ in timing.rows)
    assert "total" in timing.table()


@pytest.mark.parametrize("place", [0, 1, 4, 6])
def test_bisect_finds_the_first_bad_pass_wherever_it_is(place: int) -> None:
    passes: list[Pass] = [Keep()] * 7
    passes[place] = Keep(harm=True)
    verdict = first_bad(MODULE, Pipeline(tuple(passes)))
    assert verdict.index == place
    assert "nonsense" not in verdict.before.attrs
    assert "nonsense" in verdict.reason


def test_bisect_finds_a_crash() -> None:
    verdict = first_bad(MODULE, parse("keep,cut,keep{crash=true},keep"))
    assert verdict.index == 2
    assert verdict.reason == "ZeroDivisionError: told to"
    assert verdict.before.level is Level.PARTITIONED


def test_bisect_says_when_all_is_good_and_when_the_input_is_bad() -> None:
    assert first_bad(MODULE, parse("keep,cut")).index is None
    assert first_bad(MODULE.with_attrs(nonsense=1), parse("keep,cut")).index == -1


def test_bisect_refuses_passes_that_do_not_fit_the_module_as_running_them_does() -> None:
    with pytest.raises(UserError) as refused:
        first_bad(MODULE, parse("cut,cut"))
    with pytest.raises(UserError) as run:
        parse("cut,cut").run(MODULE)
    assert refused.value.diagnostics == run.value.diagnostics


def test_bisect_runs_passes_as_the_pipeline_does() -> None:
    told: list[tuple[str, ...]] = []

    class Told(Keep):
        name = "told"

        def informed(self, following: tuple[Pass, ...]) -> Pass:
            told.append(tuple(step.name for step in following))
            return self

    assert first_bad(MODULE, Pipeline((Told(), Keep()))).index is None
    assert told == [("keep",)]


def test_bisect_may_be_told_by_a_command_what_is_good() -> None:
    verdict = first_bad(MODULE, parse("keep,cut,keep"), command_predicate("grep -q '\"traced\"'"))
    assert verdict.index == 1


def test_a_users_own_scheduler_runs_as_it_is_on_the_stages_of_a_layout() -> None:
    @dataclass(frozen=True)
    class Own(ScheduleZ3):
        pass

    plain = Module("m", Level.COSTED)
    module = replace(plain, attrs=plain.attrs.updated(schedule="1f1b"))
    own = Own()
    assert pass_in_layout(own, module) is own
    assert pass_in_layout(ScheduleZ3(steps=3), module) == ScheduleStages(steps=3)
    assert pass_in_layout(ScheduleZ3(steps=3), plain) == ScheduleZ3(steps=3)
