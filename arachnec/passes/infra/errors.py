"""What can be wrong with a pipeline, or with a module for it."""

from __future__ import annotations

from dataclasses import dataclass

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
