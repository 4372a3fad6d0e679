"""Options that several commands take: which clips, which cluster, how passes run."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from arachnec.data.columns import Columns
from arachnec.data.manifest import ALL
from arachnec.ir.diagnostic import user_error
from arachnec.models.file import MODEL_FILE, FileForm, demand_python_file
from arachnec.models.weights_there import demand_weights_there
from arachnec.passes.infra.base import Registry, installed, load_file
from arachnec.passes.infra.instruments import Dump, Instrument, PrintAfter, Reproducer, Timing
from arachnec.passes.infra.pipeline import Pipeline, unknown_pass

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PassOptions:
    """What a person asked for; ``registry`` holds the installed passes and those of ``files``, given by ``--load``."""

    registry: Registry
    files: tuple[Path, ...]
    print_after: tuple[str, ...]
    print_after_all: bool
    dump: Path | None
    timing: Timing | None

    def pipeline(self, text: str, profile: Path | str | None = None) -> Pipeline:
        """The pipeline that ``text`` says, reading ``profile`` where one is given. Raises UserError."""
        from arachnec.cluster.device_specs import find_device_specs
        from arachnec.cost.profile import read_profile

        pipeline = Pipeline.parse(text, self.registry)
        if profile is None:
            return pipeline
        takers = [index for index, step in enumerate(pipeline.passes) if hasattr(step, "profile")]
        if not takers:
            raise user_error(
                f"no pass of `{pipeline}` takes a profile",
                help="leave --profile out, or put `annotate` into the pipeline",
            )
        if Path(profile).is_file() or find_device_specs(str(profile)) is None:
            read_profile(profile)  # what is wrong with it is told before a model is traced
        passes: list[Any] = list(pipeline.passes)
        for index in takers:
            passes[index] = dataclasses.replace(passes[index], profile=str(profile))
        return Pipeline(tuple(passes))

    def instruments(self) -> tuple[Instrument, ...]:
        """A reproducer on a crash, always; and what the options ask for. Texts go to standard error."""
        tell = functools.partial(click.echo, err=True)
        instruments: list[Instrument] = [Reproducer(self.dump or Path(), tell)]
        if self.print_after_all or self.print_after:
            instruments.append(PrintAfter(tell, None if self.print_after_all else frozenset(self.print_after)))
        if self.dump is not None:
            instruments.append(Dump(self.dump))
        if self.timing is not None:
            instruments.append(self.timing)
        return tuple(instruments)


def pass_options(command: F) -> F:
    """Adds the options to a click command, which gets them as the keyword ``options: PassOptions``."""

    @functools.wraps(command)
    def wrapped(
        *args: Any,
        load: tuple[Path, ...],
        print_ir_after: tuple[str, ...],
        print_ir_after_all: bool,
        dump_ir: Path | None,
        time_passes: bool,
        **kwargs: Any,
    ) -> Any:
        registry = registry_with(load)
        for name in print_ir_after:
            if name not in registry:
                raise unknown_pass(name, list(registry))
        timing = Timing() if time_passes else None
        if timing is not None:
            click.get_current_context().call_on_close(lambda: click.echo(timing.table(), err=True))
        options = PassOptions(registry, load, print_ir_after, print_ir_after_all, dump_ir, timing)
        return command(*args, options=options, **kwargs)

    folder = click.Path(path_type=Path, file_okay=False)
    return functools.reduce(
        lambda inner, option: option(inner),
        (
            click.option("--time-passes", is_flag=True, help="Print how long every pass took."),
            click.option("--dump-ir", metavar="DIR", type=folder, help="Write the module after every pass, numbered."),
            click.option("--print-ir-after-all", is_flag=True, help="Print the module after every pass."),
            click.option("--print-ir-after", metavar="PASS", multiple=True, help="Print the module after this pass."),
            load_option,
        ),
        wrapped,
    )  # type: ignore[return-value]


def registry_with(files: tuple[Path, ...]) -> Registry:
    """The installed passes and those of these files."""
    return functools.reduce(lambda registry, path: load_file(path, registry), files, installed())


load_option = click.option(
    "--load", metavar="FILE.py", multiple=True, type=click.Path(path_type=Path), help="Add the passes of a Python file."
)


class BatchType(click.ParamType):  # type: ignore[type-arg]
    """A number of clips, or ``all``."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["all"]:
        if str(value).lower() == ALL:
            return ALL
        try:
            number: int = click.IntRange(min=1).convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a number of clips, from 1 on, nor `{ALL}`", param, ctx)
        return number


def columns_of(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """The text itself. Raises ``UserError`` where it names no columns."""
    Columns.of(text)
    return text


def data_option(*, required: bool = True, more: str = "") -> Callable[[F], F]:
    return click.option(
        "--data",
        required=required,
        type=click.Path(path_type=Path),
        help=f"The clips: JSONL, JSON, CSV or Parquet{more}.",
    )


columns_option = click.option(
    "--columns",
    default="",
    metavar="KEY=COLUMN,...",
    callback=columns_of,
    help="What its columns are, as in caption=prompt,path=video; values=NAME or values=* goes to clip.values.",
)
batch_option = click.option(
    "--batch", type=BatchType(), help="Clips in a global batch, or `all`, where the manifest does not say."
)


FORMS = "a TOML file, a short form such as 2x8:h100-80g or 4:cpu, or auto: the machine at hand, as `cluster detect`"


def cluster_option(what: str = "", *, default: str | None = None) -> Callable[[Any], Any]:
    """The option; required without a ``default``. ``what`` says which cluster is meant, where not any."""
    text = f"{what}: {FORMS}." if what else f"{FORMS[0].upper()}{FORMS[1:]}."
    return click.option(
        "--cluster", required=default is None, default=default, show_default=default is not None, help=text
    )


def output_folder_option(help: str, *, required: bool = True) -> Callable[[F], F]:
    folder = click.Path(path_type=Path, file_okay=False, writable=True)
    return click.option("-o", "--output", required=required, type=folder, help=help)


def print_json(report: object) -> None:
    json.dump(report, sys.stdout, indent=2)
    print()


def demand_file_can_be_written(path: Path) -> None:
    """Raises ``OSError`` where a file of this name could not be written, before what takes long is done for it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def demand_inputs(model: Path, *, form: FileForm = MODEL_FILE, init: Path | None = None) -> None:
    """Raises ``UserError`` where there is no such Python file, or nothing at ``init``."""
    demand_python_file(model, form)
    if init is not None:
        demand_weights_there(init)
