"""Changes of one token, judged without importing anything again: a pytest plugin that forks for each of them.

pytest collects the tests once. One fork per processor runs them all, and notes the functions that each enters and what
it takes. Then each change is compiled, and in a fork the code of the function that has it is put in the place of its
own, in every function object there is; the tests that enter that function run until the first that fails, the quickest
first. A change outside of functions, of a default value or a field, is not judged here: that module would have to be
imported again.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

Place = tuple[str, str, int]  # of a function: file, qualified name, first line
SURVIVES, DIES, OUTSIDE = "survives", "dies", "outside of functions"
ENDLESS_S = 40.0  # what a test may take beyond eight times its own


class Outside(Exception):
    """A change of what a module or a class does when it is imported."""


class MutationServer:
    """``judge(server, number, of)`` is called in a fork for each processor, once it is known which tests enter which
    functions of the packages; it asks for the ``fate`` of its share of the changes."""

    def __init__(self, packages: Sequence[Path], judge: Callable[[MutationServer, int, int], None]) -> None:
        self.packages, self.judge = packages, judge
        self.items: dict[str, pytest.Item] = {}
        self.seconds: dict[str, float] = {}
        self.tests: dict[Place, list[str]] = {}
        self.functions: dict[Place, list[FunctionType]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for package in self.packages:
            for file in package.glob("*.py"):
                importlib.import_module(".".join(file.relative_to(Path.cwd()).with_suffix("").parts))
        self._find_functions()
        self._find_tests()
        _on_all_processors(functools.partial(self.judge, self))
        return True

    def fate(self, file: Path, before: str, after: str) -> tuple[str, str]:
        """What becomes of a change of a file's text, and the test that failed."""
        try:
            codes = compile(before, str(file), "exec"), compile(after, str(file), "exec")
            changed = list(self._changed(*codes))
        except SyntaxError:
            return DIES, "the compiler"
        except Outside:
            return OUTSIDE, ""
        tests = sorted({test for place, _ in changed for test in self.tests.get(place, ())}, key=self._cost)

        def run(tell: Callable[[str], int]) -> None:
            for place, code in changed:
                for function in self.functions[place]:
                    function.__code__ = code
            for test in tests:
                tell(test)
                if self._fails(test):
                    tell("")
                    return

        told, signalled = self._forked(run)
        if signalled:
            return DIES, f"{told[-1] if told else ''}: the process ended by {signalled}"
        return (DIES, told[-2]) if told and not told[-1] else (SURVIVES, "")

    def _cost(self, test: str) -> float:
        return self.seconds.get(test, 0.0)

    def _fails(self, test: str) -> bool:
        reports = runtestprotocol(self.items[test], nextitem=None, log=False)
        return any(report.failed for report in reports)

    def _changed(self, before: CodeType, after: CodeType) -> Iterator[tuple[Place, CodeType]]:
        """The outermost functions of two modules, or classes, that differ."""
        if _shallow(before) != _shallow(after):
            raise Outside
        for one, other in zip(_inner(before), _inner(after), strict=True):
            place = _place(one)
            if _deep(one) == _deep(other):
                continue
            if place in self.functions:
                yield place, other
            else:
                yield from self._changed(one, other)

    def _find_functions(self) -> None:
        gc.unfreeze()
        for function in gc.get_objects():
            if type(function) is FunctionType and self._is_ours(function.__code__.co_filename):
                self.functions.setdefault(_place(function.__code__), []).append(function)
        gc.freeze()

    @functools.cache  # noqa: B019 - one server a process
    def _is_ours(self, file: str) -> bool:
        return Path(file).parent in self.packages

    def _find_tests(self) -> None:
        """Every test once, on all processors, each telling which functions it enters."""
        with tempfile.TemporaryDirectory() as folder:
            _on_all_processors(functools.partial(self._note, Path(folder)))
            for file in Path(folder).iterdir():
                for test, seconds, passed, places in map(json.loads, file.read_text().splitlines()):
                    if not passed:
                        raise SystemExit(f"{test} fails without any change")
                    self.seconds[test] = seconds
                    for place in places:
                        self.tests.setdefault(tuple(place), []).append(test)

    def _note(self, folder: Path, number: int, of: int) -> None:
        _silent()
        entered: set[CodeType] = set()

        def enter(frame: FrameType, event: str, value: Any) -> None:
            entered.add(frame.f_code)

        with (folder / str(number)).open("w") as output:
            for test in list(self.items)[number::of]:
                entered.clear()
                begun = time.monotonic()
                threading.settrace(enter)
                sys.settrace(enter)
                passed = not self._fails(test)
                sys.settrace(None)
                places = [_place(code) for code in entered if self._is_ours(code.co_filename)]
                print(json.dumps([test, time.monotonic() - begun, passed, places]), file=output, flush=True)

    def _forked(self, run: Callable[[Callable[[str], int]], None]) -> tuple[list[str], str]:
        """What a fork told, line by line, and what ended it where it did not end by itself."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            _silent()
            code = 1
            try:
                run(lambda text: os.write(writing, f"{text}\n".encode()))
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        os.set_blocking(reading, False)
        told, last, ended, done, status = b"", time.monotonic(), "", 0, 0
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while True:
                if not done:
                    done, status = os.waitpid(child, os.WNOHANG)
                if more := pipe.read(2**16):
                    told, last = told + more, time.monotonic()
                elif done:
                    break
                current = told.decode().splitlines()[-1:]
                if not ended and time.monotonic() - last > ENDLESS_S + 8 * sum(map(self._cost, current)):
                    ended = "us, as it did not end"
                    os.killpg(child, signal.SIGKILL)
                time.sleep(0 if more else 0.01)
        if not ended and status:
            ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an error outside of tests"
        return told.decode().split("\n")[:-1], ended


def _on_all_processors(run: Callable[[int, int], None]) -> None:
    processors = os.cpu_count() or 1
    children = []
    for number in range(processors):
        child = os.fork()
        if not child:
            code = 1
            try:
                run(number, processors)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    if any(ends):
        raise SystemExit("a fork ended with an error")


def _silent() -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(nothing, number)


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _inner(code: CodeType) -> list[CodeType]:
    return [value for value in code.co_consts if isinstance(value, CodeType)]


def _shallow(code: CodeType) -> tuple[Any, ...]:
    constants = [(type(value), repr(value)) for value in code.co_consts if not isinstance(value, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, len(_inner(code))


def _deep(code: CodeType) -> tuple[Any, ...]:
    return _shallow(code), [_deep(inner) for inner in _inner(code)]
