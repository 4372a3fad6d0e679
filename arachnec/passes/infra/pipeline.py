"""A pipeline is a string that parses to a tuple of passes and prints back to itself.

``partition{policy=dual,p=1.8},annotate{profile=h100-80g},schedule-z3{budget=500ms},place,lower``. The name of a
pipeline in ``arachnec.passes.infra.named_pipelines`` stands for its passes, alone or among others.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from arachnec.cost.table import Rows
from arachnec.ir.diagnostic import Mistake, Span, UserError, shown, user_error
from arachnec.ir.nodes import Level, Module
from arachnec.ir.verify import verify
from arachnec.passes.infra import options
from arachnec.passes.infra.base import Pass, Registry, Scope, builtin, installed
from arachnec.passes.infra.instruments import Instrument, Moment
from arachnec.passes.infra.named_pipelines import LAYOUT_SCHEDULERS, NAMED, OUR_SCHEDULER

SOURCE = "<passes>"


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order they run."""

    passes: tuple[Pass, ...]

    @classmethod
    def parse(cls, text: str, registry: Registry | None = None) -> Pipeline:
        """The pipeline that ``text`` says; passes are found in ``registry``, else among the installed ones.

        Raises UserError, with the place in ``text``, for an unknown pass, option or value, and for a pass of scope
        ``model`` that stands twice or behind one of scope ``iteration``.
        """
        steps = list(_parse(text, installed() if registry is None else registry))
        passes = tuple(step for step, _ in steps)
        _demand_order(passes, [span for _, span in steps])
        return cls(passes)

    def __str__(self) -> str:
        """Only options that differ from their defaults are written; ``parse`` reads it back to an equal pipeline."""
        return ",".join(map(pass_text, self.passes))

    def run(self, module: Module, instruments: Iterable[Instrument] = ()) -> Module:
        """The module after all passes. The module that goes in, and what every pass gives, is verified.

        Raises UserError where the module's level is not what a pass needs, where the module is not right, and for
        whatever mistake a pass finds. A built-in pass that gives a wrong module is a bug: BrokenPass.
        """
        return self._run(range(len(self.passes)), module, instruments)

    def run_model_part(self, traced: Module, instruments: Iterable[Instrument] = ()) -> Module:
        """The module after the passes of scope ``model``: once for all iterations. Raises what ``run`` raises."""
        return self._run(range(self._model_passes), traced, instruments)

    def run_iteration_part(self, iteration: Module, instruments: Iterable[Instrument] = ()) -> Module:
        """The module of one iteration after the other passes. Raises what ``run`` raises."""
        return self._run(range(self._model_passes, len(self.passes)), iteration, instruments)

    @property
    def iteration_part(self) -> Pipeline:
        """The passes of scope ``iteration`` alone."""
        return self.after(self._model_passes)

    @property
    def _model_passes(self) -> int:
        """How many of the passes, from the first on, are of scope ``model``."""
        return sum(step.scope is Scope.MODEL for step in self.passes)

    def _run(self, indices: range, module: Module, instruments: Iterable[Instrument]) -> Module:
        instruments = tuple(instruments)
        _demand_order(self.passes)
        _demand_levels([self.passes[index] for index in indices], module)
        if problems := verify(module):
            raise UserError(*problems)
        for index in indices:
            module = _run_one(self, index, self.informed[index], module, instruments)
        return module

    @cached_property
    def informed(self) -> tuple[Pass, ...]:
        """The passes as they run, each with what it reads of those behind it."""
        return tuple(step.informed(self.passes[index + 1 :]) for index, step in enumerate(self.passes))

    def demand_fit(self, module: Module) -> None:
        """Raises ``UserError`` where these passes cannot run on the module, one after the other; runs none of them."""
        _demand_order(self.passes)
        _demand_levels(self.passes, module)

    def demand(self, begins: Level, ends: Level) -> None:
        """Raises UserError where these passes do not lead from one level to the other; runs none of them."""
        _demand_order(self.passes)
        level = _demand_levels(self.passes, Module("", begins))
        if level != ends:
            raise user_error(
                f"`{self}` gives a {level.word} module, and this command needs a {ends.word} one",
                help=f"end it with the pass that gives a {ends.word} module; `arachnec passes` lists them",
            )

    def after(self, index: int) -> Pipeline:
        """What remains from pass ``index`` on, that one included."""
        return Pipeline(self.passes[index:])


def follows_layout(step: Pass) -> bool:
    """Whether it is the default's own scheduler: another pass of its name, or one derived from it, runs as it is."""
    return type(step) is builtin().get(OUR_SCHEDULER)


def pass_in_layout(step: Pass, module: Module) -> Pass:
    """The pass that runs where a pipeline says ``step``: for the default's scheduler the one of the module's layout."""
    own = next(name for attribute, name in LAYOUT_SCHEDULERS if attribute is None or attribute in module.attrs)
    if own == OUR_SCHEDULER or not follows_layout(step):
        return step
    kind = builtin().get(own)
    both = options.option_types(kind).keys() & options.option_types(type(step)).keys()
    return kind(**{name: getattr(step, name) for name in both})


def plan_for_comparison(passes: Sequence[Pass], module: Module, rows: Rows) -> Module:
    """The module after the passes, each of which knows those that follow, for a plan that is only compared."""
    for index, step in enumerate(passes):
        module = pass_in_layout(step.informed(tuple(passes[index + 1 :])), module).run_for_comparison(module, rows)
    return module


class BrokenPass(Exception):
    """A built-in pass gave a module that does not verify: a bug of the compiler."""


def pass_text(step: Pass) -> str:
    """``schedule-z3{budget=500ms}``."""
    kinds = options.option_types(type(step))
    defaults = {field.name: _default(field) for field in dataclasses.fields(step)}
    written = [
        f"{name}={options.write(kind, value)}"
        for name, kind in kinds.items()
        if not _equal(value := getattr(step, name), defaults[name])
    ]
    return f"{step.name}{{{','.join(written)}}}" if written else step.name


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _equal(left: object, right: object) -> bool:
    return left == right and repr(left) == repr(right)


def _run_one(pipeline: Pipeline, index: int, step: Pass, module: Module, instruments: Sequence[Instrument]) -> Module:
    moment = Moment(index, step.name, str(pipeline.after(index)), module, 0.0)

    def reporter(doing: str) -> None:
        for instrument in instruments:
            instrument.progress(doing)

    for instrument in instruments:
        instrument.before(moment)
    begin = time.perf_counter()
    try:
        result = pass_in_layout(step, module).run_reporting(module, reporter)
        seconds = time.perf_counter() - begin
        _demand_right(step, module, result)
    except Exception as error:
        for instrument in instruments:
            instrument.failed(dataclasses.replace(moment, seconds=time.perf_counter() - begin), error)
        raise
    finished = dataclasses.replace(moment, module=result, seconds=seconds)
    for instrument in instruments:
        instrument.after(finished)
    return result


def _demand_right(step: Pass, before: Module, after: Module) -> None:
    gives = step.result(before.level)
    if after.level != gives:
        wrong = Mistake(
            None,
            f"pass `{step.name}` says it gives a {gives.word} module, and gave a {after.level.word} one",
            help=f"return `dataclasses.replace(module, level=Level.{gives.name}, ...)`",
        )
        raise _blame(step, UserError(wrong))
    if after is before:  # `check` gives back what was verified
        return
    if problems := verify(after):
        count = f"{len(problems)} error{'s' if len(problems) > 1 else ''}"
        raise _blame(
            step,
            UserError(
                Mistake(
                    None,
                    f"pass `{step.name}` gave a module that is not right: {count}",
                    help="the errors are listed after this one; `arachnec passes` says what the pass should give",
                ),
                *problems,
            ),
        )


def _blame(step: Pass, error: UserError) -> Exception:
    built_in = type(step).__module__.startswith("arachnec.")
    return BrokenPass(str(error)) if built_in else error


def _demand_order(passes: Sequence[Pass], spans: Sequence[Span] = ()) -> None:
    """What is decided once for the model stands once, and before what is planned for each iteration."""
    names = [step.name for step in passes]
    again = next((i for i, step in enumerate(passes) if step.scope is Scope.MODEL and step.name in names[:i]), None)
    if again is not None:
        raise user_error(
            f"pass `{names[again]}` stands twice, and decides once for the model",
            label="the second",
            help="remove one of the two",
            span=spans[again] if spans else None,
        )
    late = next(
        (i for i in range(1, len(passes)) if passes[i].scope is Scope.MODEL and passes[i - 1].scope is Scope.ITERATION),
        None,
    )
    if late is None:
        return
    ordered = sorted(passes, key=lambda step: step.scope is Scope.ITERATION)
    raise user_error(
        f"pass `{passes[late].name}` is of scope `model` and stands after `{passes[late - 1].name}`, of scope "
        "`iteration`",
        label="too late",
        help=f"what is decided once for the model comes first: {','.join(map(pass_text, ordered))}",
        span=spans[late] if spans else None,
    )


def _demand_levels(passes: Sequence[Pass], module: Module) -> Level:
    """The level that the module will have after them."""
    level = module.level
    for step in passes:
        if not step.accepts(level):
            remedy = _remedy(step, level)
            needs = step.needs.word if step.gives > step.needs else f"{step.needs.word} or later"
            raise user_error(
                f"pass `{step.name}` needs a {needs} module, and this one is {level.word}",
                label=f"a {level.word} module",
                help=remedy,
                span=module.span if level == module.level else None,
            )
        level = step.result(level)
    return level


def _remedy(step: Pass, level: Level) -> str:
    if level < step.needs:
        return f"put a pass before it that gives a {step.needs.word} module; `arachnec passes` lists them"
    return f"start from a {step.needs.word} module, or leave `{step.name}` out"


# from text


def _parse(text: str, registry: Registry) -> Iterator[tuple[Pass, Span]]:
    """Every pass and where it is named."""
    if not text.strip():
        raise _malformed("a pass", _span(text, 0, len(text)))
    for start, end in options.elements(text):
        match = re.match(r"\s*([A-Za-z0-9_-]+)\s*", text[start:end])
        if match is None:
            raise _malformed("the name of a pass", _span(text, start, end))
        name, name_at, after = match[1], start + match.start(1), start + match.end()
        body = text[after:end].rstrip()
        if body and not (body.startswith("{") and body.endswith("}")):
            raise _malformed("`,` or `{` after a pass's name", _span(text, after, end))
        if name in registry:
            yield _build(text, name, name_at, body, after, registry), _span(text, name_at, name_at + len(name))
        elif name in NAMED:
            if body:
                raise user_error(
                    f"`{name}` is a pipeline and takes no options",
                    label="options here",
                    help=f"give them to its passes: {shown(NAMED[name])}",
                    span=_span(text, after, end),
                )
            span = _span(text, name_at, name_at + len(name))
            yield from ((step, span) for step, _ in _parse(NAMED[name], registry))
        else:
            raise unknown_pass(name, [*registry, *NAMED], _span(text, name_at, name_at + len(name)))


def _build(text: str, name: str, at: int, body: str, body_at: int, registry: Registry) -> Pass:
    kind = registry.get(name)
    kinds = options.option_types(kind)
    values: dict[str, Any] = {}
    inside = body[1:-1]
    for start, end in options.elements(inside) if inside.strip() else ():
        item = inside[start:end]
        lead = len(item) - len(item.lstrip())
        begin = body_at + 1 + start + lead
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise _malformed("`option=value`", _span(text, begin, body_at + 1 + end))
        span = _span(text, begin, begin + len(key))
        if key not in kinds:
            near = difflib.get_close_matches(key, list(kinds), 1)
            meant = f"did you mean `{near[0]}`? " if near else ""
            remedy = f"{meant}its options are {', '.join(kinds)}" if kinds else "it has no options"
            raise user_error(
                f"pass `{name}` has no option `{shown(key)}`",
                label="no such option",
                help=str(shown(remedy)),
                span=span,
            )
        if key in values:
            raise user_error(
                f"option `{key}` of `{name}` is given twice",
                label="the second",
                help="remove one of the two",
                span=span,
            )
        try:
            values[key] = options.read(kinds[key], value)
        except options.BadOption as error:
            value_at = body_at + 1 + start + item.index("=") + 1
            value_at += len(text[value_at:]) - len(text[value_at:].lstrip())
            raise user_error(
                f"option `{key}` of `{name}` cannot be `{shown(value)}`",
                label=f"expected {error}",
                help="`arachnec passes` lists every pass's options and their defaults",
                span=_span(text, value_at, value_at + max(1, len(value))),
            ) from None
    try:
        return kind(**values)
    except (ValueError, UserError) as error:  # from the pass's own __post_init__
        span = _span(text, at, body_at + len(body) if body else at + len(name))
        if isinstance(error, UserError):
            raise UserError(*(dataclasses.replace(problem, span=span) for problem in error.diagnostics)) from None
        raise user_error(
            f"pass `{name}` refuses its options: {shown(str(error))}", label="in these options", span=span
        ) from None


def unknown_pass(name: str, known: list[str], span: Span | None = None) -> UserError:
    close = difflib.get_close_matches(name, known, 1)
    remedy = f"did you mean `{close[0]}`?" if close else f"passes are {', '.join(known)}"
    return user_error(f"there is no pass `{shown(name)}`", label="no such pass", help=str(shown(remedy)), span=span)


def _malformed(expected: str, span: Span) -> UserError:
    return user_error(
        f"this is not a pipeline: expected {expected}",
        label="here",
        help="a pipeline is written `partition{policy=dual},annotate,schedule-z3{budget=500ms}`",
        span=span,
    )


def _span(text: str, start: int, end: int) -> Span:
    return Span(SOURCE, 1, start + 1, 1, max(end, start + 1) + 1, text.replace("\n", " "))
