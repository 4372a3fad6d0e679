"""A user's ``model.py``. In: its path. Out: its functions, checked; its exceptions are shown at its own lines."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from arachnec.ir.diagnostic import Diagnostic, UserError, user_error
from arachnec.ir.nodes import Span
from arachnec.ir.users_code import line_of, users_frames
from arachnec.models.adapters_on_meta import built_by_libraries
from arachnec.models.compiled_modules import without_compilation
from arachnec.models.neighbours import Source, make_importable, neighbours

if TYPE_CHECKING:
    import torch

    from arachnec.data.clip import VideoClip

P = ParamSpec("P")
R = TypeVar("R")

PACKAGE = Path(__file__).parents[1]
MAKE_MODULES = frozenset({"build", "models", "encoders"})


@dataclass(frozen=True)
class FileForm:
    """A kind of file that users write: which functions it may have, with which arguments, and which it must have.

    ``results`` look at what a function returned: None, or what was returned and what should have been.
    """

    kind: str
    page: str
    arguments: Mapping[str, tuple[str, ...]]
    required: tuple[str, ...]
    results: Mapping[str, Callable[[Any], tuple[str, str] | None]]

    def call(self, name: str) -> str:
        return f"{name}({', '.join(self.arguments[name])})"


def wrong_signature_error(span: Span | None, name: str, arguments: str, signature: str) -> UserError:
    return user_error(
        f"`{name}` cannot be called as {name}({arguments})",
        label=f"it is {name}{signature}",
        help=f"change it to `def {name}({arguments})`, or give what is not meant for arachnec another name",
        span=span,
    )


@dataclass(frozen=True)
class ModelFileRaised(Diagnostic):
    title = "the {kind} raised {exception} in {where}{clips}"
    label = "raised here"
    help = "{remedy}"
    exception: str
    where: str
    remedy: str
    kind: str = "model file"
    clips: str = ""  # that it was called for


def bad_sample_error(span: Span | None, clip: str | int, found: str) -> UserError:
    return user_error(
        f"`sample` returned {found}",
        label=f"for clip {clip}",
        help="return (dict of forward's keyword arguments for one clip, target tensor)",
        span=span,
    )


@dataclass(frozen=True)
class ModelFile:
    """The functions of a model file; each reports the file's own exceptions as a ``UserError`` at the line that raised.

    ``digest`` is the SHA-256 of the source, in hexadecimal; ``modules`` are the files beside it that it imports, by
    their paths in its folder. A model that only predicts, one of a sampler file, has no ``loss``.
    """

    build: Callable[[], torch.nn.Module]
    sample: Callable[[VideoClip, torch.Generator], tuple[dict[str, object], torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    encoders: Callable[[], dict[str, torch.nn.Module]] | None
    path: Path
    digest: str
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    on_step: Callable[[int, Mapping[str, float]], None] | None = None
    modules: tuple[str, ...] = ()
    module: torch.nn.Module | None = None  # the model itself, where it was given and not built

    def span(self, name: str) -> Span | None:
        """Where the file defines ``name``."""
        return definition(self.path, name)


def load_model_file(
    path: str | Path, *, origin: str | Path | None = None, modules: Sequence[str] | None = None
) -> ModelFile:
    """Import ``path`` as a module of its own, and of its folder what it imports. Runs the file's code.

    ``origin`` is the file that ``path`` is a copy of: messages name it as long as it is the same. ``modules`` are the
    only files of the folder that may be imported; found if not given. Raises ``UserError`` for anything wrong.
    """
    return ModelFile(**load_functions(path, MODEL_FILE, origin=origin, modules=modules))


def load_functions(
    path: str | Path, form: FileForm, *, origin: str | Path | None = None, modules: Sequence[str] | None = None
) -> dict[str, Any]:
    """What ``load_model_file`` reads, of a file of any form: its functions by name, ``path``, ``digest``, ``modules``.

    A function that the file does not have, and need not have, is None.
    """
    path = demand_python_file(path, form)
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    modules = neighbours(path) if modules is None else tuple(modules)
    make_importable(path.parent, modules)
    shown = path if origin is None or not _same(Path(origin), source) else Path(origin)
    module = _import(path, digest, shown, form.kind)
    functions = {name: _function(module, shown, name, form) for name in form.arguments}
    return {**functions, "path": shown, "digest": digest, "modules": modules}


def demand_python_file(path: str | Path, form: FileForm) -> Path:
    """Its absolute path. Imports nothing. Raises ``UserError`` where there is no such file."""
    path = Path(path).absolute()
    if not path.is_file() or path.suffix != ".py":
        *calls, last = map(form.call, form.required)
        functions_text = f"{', '.join(calls)} and {last}"
        raise user_error(f"there is no {form.kind} `{path}`", help=f"give a Python file with {functions_text}")
    return path


def _same(origin: Path, source: bytes) -> bool:
    try:
        return origin.read_bytes() == source
    except OSError:
        return False


def definition(path: Path, name: str) -> Span | None:
    """The first line of the top-level ``def`` or assignment of ``name``."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return line_span(path, node.lineno)
        if isinstance(node, ast.Assign) and any(
            isinstance(leaf, ast.Name) and leaf.id == name for target in node.targets for leaf in ast.walk(target)
        ):
            return line_span(path, node.lineno)
    return None


def _import(path: Path, digest: str, shown: Path, kind: str) -> ModuleType:
    name = f"arachnec_model_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{digest[:12]}"
    spec = importlib.util.spec_from_file_location(name, path, loader=Source(name, str(path), str(shown)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look a class's module up there
    try:
        spec.loader.exec_module(module)
    except UserError as error:
        sys.modules.pop(name)
        raise _placed(error, shown) from None
    except (Exception, SystemExit) as error:
        sys.modules.pop(name)
        raise UserError(_raised(error, shown, "its import", kind)) from error
    return module


def _function(module: ModuleType, path: Path, name: str, form: FileForm) -> Any:
    function = getattr(module, name, None)
    arguments = ", ".join(form.arguments[name])
    if function is None:
        if name not in form.required:
            return None
        defined = ", ".join(
            n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__
        )
        place = Span(str(path), 1, 1, 1, 1)
        raise user_error(
            f"the {form.kind} has no `{name}`",
            label=f"found here: {defined or 'no functions'}",
            help=f"add `def {name}({arguments})`; {form.page} says what it returns",
            span=place,
        )
    if name in MAKE_MODULES and _is_module(function):  # callable with anything
        raise wrong_signature_error(definition(path, name), name, arguments, f" = {type(function).__name__}(...)")
    if not callable(function):
        raise wrong_signature_error(definition(path, name), name, arguments, f" = {function!r}")
    with contextlib.suppress(ValueError):  # a C function that does not say
        signature = inspect.signature(function)
        try:
            signature.bind(*form.arguments[name])
        except TypeError:
            raise wrong_signature_error(definition(path, name), name, arguments, str(signature)) from None
    return checked_function(function, path, name, form)


def checked_function(function: Callable[P, R], path: Path, name: str, form: FileForm) -> Callable[P, R]:
    """``function`` with its result checked, and its exceptions told at the line of ``path`` that raised."""
    defined = definition(path, name)  # once: it parses the file, which threads must not do beside each other

    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if name in MAKE_MODULES:
                return built_by_libraries(lambda: function(*args, **kwargs))
            return function(*args, **kwargs)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            if not _frames(error, path) or ran_out_of_memory(error):
                raise  # not the user's code: a bug of ours keeps its traceback
            raise UserError(_raised(error, path, f"{name}()", form.kind)) from error

    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        result: Any = guarded(*args, **kwargs)
        if name == "build" and _is_module(result):
            result = without_compilation(result)
        if name == "sample":
            clip: Any = args[0]
            check_sample(result, lambda: defined, clip.name)
        wrong = form.results[name](result) if name in form.results else None
        if wrong is not None:
            found, expected = wrong
            raise user_error(
                f"`{name}` returned {found}",
                label=f"must return {expected}",
                help=f"return {expected}; {form.page} has an example",
                span=defined,
            )
        return cast(R, result)

    return functools.wraps(function)(checked)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or the host's allocator had no more: no mistake of the line that asked for it."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in str(error)


@contextlib.contextmanager
def own_errors(path: Path, where: str, kind: str = "model file") -> Iterator[None]:
    """Shows what the file's code raised as a ``UserError`` at its line; what the compiler raised below stays a bug."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        below = itertools.takewhile(lambda file: file != path, reversed(frames))
        if path not in frames or ran_out_of_memory(error) or any(PACKAGE in file.parents for file in below):
            raise
        raise UserError(_raised(error, path, where, kind)) from error


def check_sample(result: Any, defined: Callable[[], Span | None], clip: str | int) -> None:
    """Raises ``UserError`` where it is not a pair of keyword arguments and a target.

    ``defined`` looks up the line of ``sample``, and is asked for nothing else: it parses the file.
    """
    import torch

    if not isinstance(result, tuple) or len(result) != 2:
        raise bad_sample_error(defined(), clip, f"{type(result).__name__}, not a pair")
    kwargs, target = result
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise bad_sample_error(defined(), clip, f"{type(kwargs).__name__} in place of keyword arguments")
    if not isinstance(target, torch.Tensor):
        raise bad_sample_error(defined(), clip, f"{type(target).__name__} in place of a target tensor")


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _wrong_model(model: Any) -> tuple[str, str] | None:
    """What ``build`` returned, and what it should have."""
    import torch

    expected = "the model, a torch.nn.Module with parameters that train"
    if not isinstance(model, torch.nn.Module):
        return f"{called(model)}, not a module", expected
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return "a module in which no parameter trains", expected
    return None


def wrong_encoders(encoders: Any) -> tuple[str, str] | None:
    import torch

    expected = "a dict from names to modules, each with `load(clip, device)` and `forward(loaded)`"
    if not isinstance(encoders, dict):
        return called(encoders), expected
    for name, encoder in encoders.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name == "dit":
            return f"an encoder named {name!r}", f"{expected}; names are words other than `dit`"
        if not isinstance(encoder, torch.nn.Module):
            return f"{called(encoder)} as the encoder `{name}`", expected
        if not callable(getattr(encoder, "load", None)):
            return f"an encoder `{name}` ({type(encoder).__name__}) without `load`", expected
    return None


def called(value: Any) -> str:
    """A value by its type; a class by its name."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


MODEL_FILE = FileForm(
    kind="model file",
    page="docs/your_model.md",
    arguments={
        "build": (),
        "sample": ("clip", "generator"),
        "loss": ("prediction", "target"),
        "encoders": (),
        "optimizer": ("parameters",),
        "on_step": ("step", "metrics"),
    },
    required=("build", "sample", "loss"),
    results={"build": _wrong_model, "encoders": wrong_encoders},
)
SAMPLER_FORM = FileForm(  # without what looks at results, which ``models.sampler_file`` adds
    kind="sampler file",
    page="docs/sampling.md",
    arguments={
        "models": (),
        "scheduler": (),
        "start": ("request", "generator"),
        "arguments": ("name", "latents", "timestep", "request", "conditional"),
        "encoders": (),
        "decoder": (),
        "guidance": ("name", "request"),
        "switch": (),
        "predictors": (),
    },
    required=("models", "scheduler", "start", "arguments"),
    results={},
)


def _frames(error: BaseException, path: Path) -> list[traceback.FrameSummary]:
    """The frames of the file; where it has none, those of the user's files that it has its functions from."""
    frames = traceback.extract_tb(error.__traceback__)
    return users_frames(error) or [frame for frame in frames if Path(frame.filename).absolute() == path]


def _placed(error: UserError, path: Path) -> UserError:
    """A diagnostic of an adapter, shown at the line of the model file that called it."""
    frames = _frames(error, path)
    span = _span(frames[-1]) if frames else None
    return UserError(*(d if d.span else dataclasses.replace(d, span=span) for d in error.diagnostics))


def raised_by_user(error: Exception, where: str) -> ModelFileRaised:
    """What code of the user's raised, at its innermost line, which there is."""
    return _raised(error, Path(users_frames(error)[-1].filename), where, MODEL_FILE.kind)


def _raised(error: BaseException, path: Path, where: str, kind: str) -> ModelFileRaised:
    frames = _frames(error, path)
    span = _span(frames[-1]) if frames else line_span(path, 1)
    if isinstance(error, SyntaxError) and error.filename == str(path):
        span = line_span(path, error.lineno or 1)
    message = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    told = f"{type(error).__name__}{': ' if message else ''}{message}"
    return ModelFileRaised(span, told, where, _remedy(error, kind), kind)


def _span(frame: traceback.FrameSummary) -> Span:
    return line_span(Path(frame.filename).absolute(), frame.lineno or 1)


def _remedy(error: BaseException, kind: str) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            "install that package, or put it beside the model file: an executable carries that file and the modules of "
            "its folder that it imports by name"
        )
    if isinstance(error, FileNotFoundError):
        return (
            "give the file by its whole path: an executable carries the model file and the modules of its folder, and "
            "no other files"
        )
    if "Target modules" in str(error) or "target_modules" in str(error):
        return "LoRA's target_modules name layers as model.named_modules() does: to_q, or blocks.0.attn1.to_q"
    if isinstance(error, AttributeError) and error.name == "add_adapter":
        return "a class without it takes an adapter of peft all the same: return peft.get_peft_model(model, config)"
    if "meta tensor" in str(error):
        return "the model is planned under torch.device('meta'), without numbers: see docs/your_model.md"
    return f"correct the {kind}; it runs alone with `python FILE`"


def line_span(path: Path, line: int) -> Span:
    """A whole line of a model file, without its indentation."""
    if not path.is_file():
        return line_of(str(path), line)
    rows = path.read_text(encoding="utf-8", errors="replace").splitlines()
    row = rows[line - 1] if line <= len(rows) else ""
    return Span(str(path), line, len(row) - len(row.lstrip()) + 1, line, len(row) + 1)
