"""What can be wrong with a pipeline, or with a module for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class UnknownPass(Diagnostic):
    title: ClassVar[str] = "there is no pass `{name}`"
    label: ClassVar[str] = "no such pass"
    help: ClassVar[str] = "{remedy}"
    name: str
    remedy: str


@dataclass(frozen=True)
class UnknownOption(Diagnostic):
    title: ClassVar[str] = "pass `{name}` has no option `{option}`"
    label: ClassVar[str] = "no such option"
    help: ClassVar[str] = "{remedy}"
    name: str
    option: str
    remedy: str


@dataclass(frozen=True)
class WrongOption(Diagnostic):
    title: ClassVar[str] = "option `{option}` of `{name}` cannot be `{found}`"
    label: ClassVar[str] = "expected {expected}"
    help: ClassVar[str] = "`arachnec passes` lists every pass's options and their defaults"
    name: str
    option: str
    found: str
    expected: str


@dataclass(frozen=True)
class RefusedOptions(Diagnostic):
    title: ClassVar[str] = "pass `{name}` refuses its options: {reason}"
    label: ClassVar[str] = "in these options"
    name: str
    reason: str


@dataclass(frozen=True)
class RepeatedOption(Diagnostic):
    title: ClassVar[str] = "option `{option}` of `{name}` is given twice"
    label: ClassVar[str] = "the second"
    help: ClassVar[str] = "remove one of the two"
    name: str
    option: str


@dataclass(frozen=True)
class MalformedPipeline(Diagnostic):
    title: ClassVar[str] = "this is not a pipeline: expected {expected}"
    label: ClassVar[str] = "here"
    help: ClassVar[str] = "a pipeline is written `partition{{policy=dual}},annotate,schedule-z3{{budget=500ms}}`"
    expected: str


@dataclass(frozen=True)
class OptionsOfPipeline(Diagnostic):
    title: ClassVar[str] = "`{name}` is a pipeline and takes no options"
    label: ClassVar[str] = "options here"
    help: ClassVar[str] = "give them to its passes: {written}"
    name: str
    written: str


@dataclass(frozen=True)
class WrongLevel(Diagnostic):
    title: ClassVar[str] = "pass `{name}` needs a {needs} module, and this one is {level}"
    label: ClassVar[str] = "a {level} module"
    help: ClassVar[str] = "{remedy}"
    name: str
    needs: str
    level: str
    remedy: str


@dataclass(frozen=True)
class WrongOrder(Diagnostic):
    title: ClassVar[str] = "pass `{name}` is of scope `model` and stands after `{earlier}`, of scope `iteration`"
    label: ClassVar[str] = "too late"
    help: ClassVar[str] = "what is decided once for the model comes first: {ordered}"
    name: str
    earlier: str
    ordered: str


@dataclass(frozen=True)
class RepeatedPass(Diagnostic):
    title: ClassVar[str] = "pass `{name}` stands twice, and decides once for the model"
    label: ClassVar[str] = "the second"
    help: ClassVar[str] = "remove one of the two"
    name: str


@dataclass(frozen=True)
class BrokenModule(Diagnostic):
    title: ClassVar[str] = "pass `{name}` gave a module that is not right: {count}"
    help: ClassVar[str] = "the errors are listed after this one; `arachnec passes` says what the pass should give"
    name: str
    count: str


@dataclass(frozen=True)
class WrongEnd(Diagnostic):
    title: ClassVar[str] = "`{pipeline}` gives a {level} module, and this command needs a {ends} one"
    help: ClassVar[str] = "end it with the pass that gives a {ends} module; `arachnec passes` lists them"
    pipeline: str
    level: str
    ends: str


@dataclass(frozen=True)
class WrongGivenLevel(Diagnostic):
    title: ClassVar[str] = "pass `{name}` says it gives a {gives} module, and gave a {level} one"
    help: ClassVar[str] = "return `dataclasses.replace(module, level=Level.{word}, ...)`"
    name: str
    gives: str
    level: str
    word: str
