"""Rules about requests and segments: what a ``denoise`` says of its steps is what its requests say.

In: a ``ModuleIndex`` whose names are right. Out: a diagnostic per mistake. That a chain takes every step once, for
every outcome of its switch, is proved by ``check`` (``arachnec.verification.sampling``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from arachnec.ir.diagnostic import Diagnostic, Mistake, Span
from arachnec.ir.limits import MOST_SAMPLING_STEPS
from arachnec.ir.names import ModuleIndex, label
from arachnec.ir.nodes import Cascade, Clip, Module, Phase, integer, integers
from arachnec.ir.printer import value_text
from arachnec.ir.sampling import (
    OBJECTIVES,
    asked_branches,
    branches_of,
    forecast_of,
    models_of,
    outcomes_of,
    planned_steps,
    segment_of,
)


def wrong_steps_error(span: Span | None, node: str, steps: str, reason: str) -> Mistake:
    return Mistake(
        span,
        f"{node} has steps {steps}, {reason}",
        label=f"steps {steps}",
        help="`steps = [first, last]`, counted from 0: the last of a request of 50 is 49",
    )


def unlike_request_error(span: Span | None, node: str, what: str, value: str, request: int, right: str) -> Mistake:
    return Mistake(
        span,
        f"{node} has {what} = {value}, and its request {request} has {right}",
        label="not its request's",
        help="a batch holds requests of equal steps, branches and window, and says the same",
    )


def wrong_window_error(span: Span | None, clip: int, what: str, value: str, reason: str) -> Mistake:
    return Mistake(
        span,
        f"clip {clip} has {what} {value}, {reason}",
        label=f"{what} {value}",
        help="`window = [least, most]`, 0 <= least <= forecast <= most <= steps",
    )


def switch_unsaid_error(span: Span | None, node: str, reason: str, remedy: str) -> Mistake:
    return Mistake(
        span,
        f"{node} {reason}",
        label=remedy,
        help=(
            "a segment says `switch` where an outcome changes which of its steps it takes, the same rule as "
            "the module's"
        ),
    )


Problems: TypeAlias = Iterator[Diagnostic]


def models_are_one_or_two(index: ModuleIndex) -> Problems:
    module = index.module
    named = module.attrs.get("models")
    if isinstance(named, tuple) and not 1 <= len(named) == len(set(named)) <= 2:
        yield Mistake(
            _at(module, "models"),
            f"{label(module)} has `models` {value_text(named)}",
            label="expected one model, or two different ones",
            help="list the stages that denoise, the first one first",
        )


def objective_is_known(index: ModuleIndex) -> Problems:
    module = index.module
    objective = module.attrs.get("objective", "makespan")
    if objective not in OBJECTIVES:
        known = " or ".join(OBJECTIVES)
        yield Mistake(
            _at(module, "objective"),
            f"{label(module)} has `objective` {value_text(objective)}",
            label=f"expected {known}",
            help="leave `objective` out where the bound is of the makespan",
        )


def segments_fit_their_requests(index: ModuleIndex) -> Problems:
    """Of every ``denoise`` that says its steps."""
    module = index.module
    segments = [c for c in module.cascades if c.phase is Phase.DENOISE and "steps" in c.attrs]
    wrong = list(_windows(index, segments))
    yield from wrong
    for cascade in segments if not wrong else ():
        problem = next(_segment(index, cascade), None)
        if problem is not None:
            yield problem


def _windows(index: ModuleIndex, segments: list[Cascade]) -> Problems:
    """What a request says of its switch."""
    asked = {clip.id for clip in index.module.clips if {"steps", "window", "forecast", "branches"} & set(clip.attrs)}
    for number in sorted(asked | {clip for cascade in segments for clip in cascade.clips}):
        clip = index.clips.get(number)
        if clip is None:
            continue
        steps = integer(clip.attrs.get("steps", 0))
        window = integers(clip.attrs.get("window", (steps, steps)))
        if not 1 <= steps <= MOST_SAMPLING_STEPS:
            reason = f"and a request takes 1 to {MOST_SAMPLING_STEPS}"
            yield wrong_window_error(_at(clip, "steps"), number, "steps", str(steps), reason)
        elif len(window) != 2 or not 0 <= window[0] <= window[1] <= steps:
            shown = value_text(clip.attrs.get("window", window))
            yield wrong_window_error(_at(clip, "window"), number, "window", shown, f"and it takes {steps} steps")
        elif not window[0] <= forecast_of(clip) <= window[1]:
            shown = str(forecast_of(clip))
            yield wrong_window_error(_at(clip, "forecast"), number, "forecast", shown, f"outside {value_text(window)}")
        elif not set(integers(clip.attrs.get("branches", ()))) <= {1, 2}:
            shown = value_text(clip.attrs["branches"])
            yield wrong_window_error(_at(clip, "branches"), number, "branches", shown, "and a step has 1 or 2")


def _segment(index: ModuleIndex, cascade: Cascade) -> Problems:
    module, steps = index.module, integers(cascade.attrs["steps"])
    models = models_of(module)
    shown, span = value_text(cascade.attrs["steps"]), _at(cascade, "steps")
    if len(steps) != 2 or not 0 <= steps[0] <= steps[1]:
        yield wrong_steps_error(span, label(cascade), shown, "which are no first and last step")
        return
    if cascade.stage not in models or len(models) > 2:
        listed = ", ".join(f"@{name}" for name in models) or "none"
        yield Mistake(
            cascade.span,
            f"{label(cascade)} denoises with `@{cascade.stage}`, which is none of the module's models",
            label=f"models are {listed}",
            help="list the stages that denoise as `models` of the module, one or two, the first one first",
        )
        return
    count = steps[1] - steps[0] + 1
    if not 0 <= planned_steps(cascade) <= count:
        yield Mistake(
            _at(cascade, "planned"),
            f"{label(cascade)} is planned to take {planned_steps(cascade)} steps, and it has {count}",
            label="more than it has",
            help=f"write at most `planned = {count}`, or leave it out",
        )
    requests = [index.clips[number] for number in cascade.clips if number in index.clips]
    for clip in requests:
        total = integer(clip.attrs["steps"])
        if steps[1] >= total:
            yield wrong_steps_error(span, label(cascade), shown, f"and its request {clip.id} has {total}")
        asked = asked_branches(clip, models.index(cascade.stage))
        if asked != branches_of(cascade):
            texts = str(branches_of(cascade)), clip.id, str(asked)
            yield unlike_request_error(_at(cascade, "branches"), label(cascade), "branches", *texts)
        for name in ("steps", "window"):
            first, own = requests[0].attrs.get(name), clip.attrs.get(name)
            if first != own:
                shown_first, shown_own = ("none" if value is None else value_text(value) for value in (first, own))
                yield unlike_request_error(
                    cascade.span, label(cascade), f"requests of {name}", shown_first, clip.id, shown_own
                )
    if requests:
        yield from _switch(index, cascade, requests[0], len(requests))


def _switch(index: ModuleIndex, cascade: Cascade, clip: Clip, count: int) -> Problems:
    outcomes, uncertain = outcomes_of(clip), is_uncertain(segment_of(cascade), clip)
    if len(outcomes) > 1 and count > 1:
        shown = f"{outcomes[0]} to {outcomes[-1]}"
        yield Mistake(
            cascade.span,
            f"{label(cascade)} holds {count} requests whose switches come when they come",
            label=f"{count} requests, outcomes {shown}",
            help="requests of one batch take each step together: batch them where the switch is fixed",
        )
    rule, said = index.module.attrs.get("switch"), cascade.attrs.get("switch")
    if uncertain and said is None:
        yield switch_unsaid_error(
            cascade.span, label(cascade), "says no switch, and may take fewer steps", "write `switch`"
        )
    elif said is not None and said != rule:
        what = f"says the switch {value_text(said)}, and the module {'none' if rule is None else value_text(rule)}"
        yield switch_unsaid_error(_at(cascade, "switch"), label(cascade), what, "another rule")


def is_uncertain(segment: tuple[int, int], clip: Clip) -> bool:
    """Whether outcomes of its request's switch differ in which steps a segment takes."""
    first, last = segment
    outcomes = outcomes_of(clip)
    return first < outcomes[-1] and outcomes[0] <= last and len(outcomes) > 1


def _at(node: Module | Cascade | Clip, attribute: str) -> Span | None:
    return node.attrs.span(attribute) or node.span


SAMPLING_RULES = (models_are_one_or_two, objective_is_known, segments_fit_their_requests)
