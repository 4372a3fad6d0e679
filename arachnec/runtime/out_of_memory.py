"""One message where a rank runs out of memory: what the plan says it holds, beside what its device says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from arachnec.analysis.memory import Usage, high_water, usages
from arachnec.analysis.uses import Values
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Module, Program
from arachnec.models.file import ran_out_of_memory
from arachnec.runtime.device_runtime import DeviceMemory, DeviceRuntime

FRAGMENTS = 0.1  # of the device's memory that is reserved and not allocated: too much
FOREIGN = 3.0  # GiB that nobody of this process' allocator holds: more than communicators take


@contextmanager
def explained_memory(
    runtime: DeviceRuntime, module: Module, program: Program, index: int = -1, where: str = "the start"
) -> Iterator[None]:
    """Shows what ran out of memory inside as a ``UserError``. ``index``: of the instruction; -1 before the first."""
    try:
        yield
    except Exception as error:
        raise_explained(error, runtime, module, program, index, where)
        raise


def raise_explained(
    error: Exception, runtime: DeviceRuntime, module: Module, program: Program, index: int, where: str
) -> None:
    """Raises ``UserError`` for an error that says that memory ran out."""
    if ran_out_of_memory(error):
        raise _explain(str(error), runtime, module, program, index, where) from error


def _explain(said: str, runtime: DeviceRuntime, module: Module, program: Program, index: int, where: str) -> UserError:
    values = Values(module)
    here = next(usage for usage in usages(values, program) if usage.index == index)
    highest, memory = high_water(values, program), runtime.memory()
    told = where if index < 0 else f"`{_name(program, index)}` of {where}"
    return user_error(
        f"rank {program.rank} ran out of memory in {told} (host {socket.gethostname()}, {runtime.name()})\n"
        f"  by the plan: {_parts(here)}; at most {highest.total:.2f} GiB, {_place(program, highest.index)}\n"
        f"  on the device: {memory.total:.2f} GiB, of which {memory.allocated:.2f} allocated, "
        f"{memory.reserved:.2f} reserved, {memory.free:.2f} free\n"
        f"  {said.partition(chr(10))[0][:300]}",
        help=_remedy(memory, highest),
    )


def _parts(usage: Usage) -> str:
    parts = (
        ("state", usage.state),
        ("saved for backward", usage.saved),
        ("values", usage.values),
        ("workspace", usage.workspace),
    )
    return f"{usage.total:.2f} GiB = " + " + ".join(f"{name} {size:.2f}" for name, size in parts)


def _remedy(memory: DeviceMemory, highest: Usage) -> str:
    foreign = memory.total - memory.free - memory.reserved
    if memory.free_is_shared and foreign > FOREIGN:
        first = f"{foreign:.1f} GiB are held outside this rank's allocator: end other processes on the device; "
    elif memory.reserved - memory.allocated > FRAGMENTS * memory.total:
        first = "much is reserved in pieces too small: keep expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF; "
    elif memory.allocated > highest.total:
        first = "more is allocated than the plan knows of: measure this model with `arachnec profile`; "
    else:
        first = ""
    return first + (
        "or compile again for devices with less memory (`memory` in the cluster file), so that clips are shared by "
        "more ranks or computed again"
    ).removeprefix("" if first else "or ")


def _place(program: Program, index: int) -> str:
    return "before the first instruction" if index < 0 else f"in `{_name(program, index)}`"


def _name(program: Program, index: int) -> str:
    instruction = program.instructions[index]
    return f"{instruction.op} %{instruction.target}"
