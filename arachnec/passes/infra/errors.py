"""What can be wrong with a pipeline, or with a module for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class UnknownPass(Diagnostic):
    title = "there is no pass `{name}`"
    label = "no such pass"
    help = "{remedy}"
    name: str
    remedy: str


@dataclass(frozen=True)
class UnknownOption(Diagnostic):
    title = "pass `{name}` has no option `{option}`"
    label = "no such option"
    help = "{remedy}"
    name: str
    option: str
    remedy: str


@dataclass(frozen=True)
class WrongOption(Diagnostic):
    title = "option `{option}` of `{name}` cannot be `{found}`"
    label = "expected {expected}"
    help = "`arachnec passes` lists every pass's options and their defaults"
    name: str
    option: str
    found: str
    expected: str


@dataclass(frozen=True)
class RefusedOptions(Diagnostic):
    title = "pass `{name}` refuses its options: {reason}"
    label = "in these options"
    name: str
    reason: str


@dataclass(frozen=True)
class RepeatedOption(Diagnostic):
    title = "option `{option}` of `{name}` is given twice"
    label = "the second"
    help = "remove one of the two"
    name: str
    option: str


@dataclass(frozen=True)
class MalformedPipeline(Diagnostic):
    title = "this is not a pipeline: expected {expected}"
    label = "here"
    help = "a pipeline is written `partition{{policy=dual}},annotate,schedule-z3{{budget=500ms}}`"
    expected: str


@dataclass(frozen=True)
class OptionsOfPipeline(Diagnostic):
    title = "`{name}` is a pipeline and takes no options"
    label = "options here"
    help = "give them to its passes: {written}"
    name: str
    written: str


@dataclass(frozen=True)
class WrongLevel(Diagnostic):
    title = "pass `{name}` needs a {needs} module, and this one is {level}"
    label = "a {level} module"
    help = "{remedy}"
    name: str
    needs: str
    level: str
    remedy: str


@dataclass(frozen=True)
class WrongOrder(Diagnostic):
    title = "pass `{name}` is of scope `model` and stands after `{earlier}`, of scope `iteration`"
    label = "too late"
    help = "what is decided once for the model comes first: {ordered}"
    name: str
    earlier: str
    ordered: str


@dataclass(frozen=True)
class RepeatedPass(Diagnostic):
    title = "pass `{name}` stands twice, and decides once for the model"
    label = "the second"
    help = "remove one of the two"
    name: str


@dataclass(frozen=True)
class BrokenModule(Diagnostic):
    title = "pass `{name}` gave a module that is not right: {count}"
    help = "the errors are listed after this one; `arachnec passes` says what the pass should give"
    name: str
    count: str


@dataclass(frozen=True)
class WrongEnd(Diagnostic):
    title = "`{pipeline}` gives a {level} module, and this command needs a {ends} one"
    help = "end it with the pass that gives a {ends} module; `arachnec passes` lists them"
    pipeline: str
    level: str
    ends: str


@dataclass(frozen=True)
class WrongGivenLevel(Diagnostic):
    title = "pass `{name}` says it gives a {gives} module, and gave a {level} one"
    help = "return `dataclasses.replace(module, level=Level.{word}, ...)`"
    name: str
    gives: str
    level: str
    word: str
