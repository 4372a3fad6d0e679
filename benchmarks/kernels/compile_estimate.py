"""Registers, shared memory and spills of a kernel on a device that need not be there, from Triton's own compiler."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_TARGET = re.compile(r"(0x[0-9a-f]+)\s*$")
MULTIPROCESSOR_REGISTERS, MULTIPROCESSOR_WARPS, MULTIPROCESSOR_SHARED = 65536, 64, 233472


@dataclass(frozen=True)
class Estimate:
    """Of one program: 32-bit registers of a thread, bytes of shared memory, bytes a thread spills; and its warps.

    Of its longest loop, in machine code: instructions, barriers, and the fewest bytes a lane reads or writes at a time
    where it goes over a row (0: there is no loop).
    """

    registers: int
    shared: int
    spilled: int
    warps: int
    instructions: int = 0
    barriers: int = 0
    access: int = 0

    @property
    def resident(self) -> int:
        """Programs that fit one multiprocessor of compute capability 9.0 at a time."""
        by_registers = MULTIPROCESSOR_REGISTERS // (32 * self.warps * -(-self.registers // 8) * 8)
        by_shared = MULTIPROCESSOR_SHARED // (self.shared + 1024)
        return min(by_registers, by_shared, MULTIPROCESSOR_WARPS // self.warps, 32)


class Recorder:
    """Stands for a kernel and keeps what it is launched with; compiles that, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.calls.append((grid, arguments, options))

    def variants(self) -> list[Any]:
        """What Triton tells apart among the launches: each is compiled once."""
        return list(dict.fromkeys(specialisation(self.kernel, given, options) for _, given, options in self.calls))

    def estimates(self, capability: int = 90) -> list[Estimate]:
        return [estimate(self.kernel, arguments, options, capability) for _, arguments, options in self.calls]


def specialisation(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Types, constants, and of numbers that are specialised whether they are 1 or divisible by 16."""
    values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
    key: list[Any] = []
    for parameter in kernel.params:
        value = values.get(parameter.name)
        if isinstance(value, Tensor):
            key.append((value.dtype, value.data_ptr() % 16 == 0))
        elif parameter.is_constexpr or value is None:
            key.append(value)
        elif isinstance(value, float):
            key.append("fp32")
        else:
            generic = parameter.do_not_specialize
            key.append(("i32" if abs(value) < 2**31 else "i64", None if generic else (value == 1, value % 16 == 0)))
    return (*key, *sorted((k, v) for k, v in options.items() if k not in kernel.arg_names))


def estimate(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], capability: int = 90) -> Estimate:
    """Compiles a kernel for the dtypes and numbers of one launch; tensors may be on the meta device."""
    options = dict(options)
    warps = options.pop("num_warps", 4)
    stages = options.pop("num_stages", 3)
    registers_limit = options.pop("maxnreg", None)
    values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
    generic = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    fixed = {p.name for p in kernel.params if p.is_constexpr} | {
        name for name, value in values.items() if value is None
    }
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        value = values[name]
        signature[name] = "constexpr" if name in fixed else _type(value)
        aligned = isinstance(value, Tensor) or (isinstance(value, int) and name not in generic and value % 16 == 0)
        if name not in fixed and aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {name: values[name] for name in fixed}, attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(
        source,
        target=target,
        options={
            "num_warps": warps,
            "num_stages": stages,
            "maxnreg": registers_limit,
            "enable_fp_fusion": True,
        },
    )
    usage, code = (_objdump(compiled.asm["cubin"], option) for option in ("-res-usage", "-sass"))
    figures = dict(re.findall(r"(\w+):(\d+)", usage.split("Function", 1)[1]))
    spilled = int(figures["STACK"]) + int(figures["LOCAL"])
    return Estimate(int(figures["REG"]), compiled.metadata.shared, spilled, warps, *_loop(code))


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _objdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        return subprocess.run([tool, option, binary], capture_output=True, text=True, check=True, timeout=60).stdout


def _loop(code: str) -> tuple[int, int, int]:
    """Instructions, barriers and the narrowest usual access of the longest loop of a disassembled kernel.

    Statistics are a number a row: widths that carry less than a quarter of what another one carries are left out.
    """
    rows_of_code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", code)
    lines = [(int(address, 16), name, operands) for address, name, operands in rows_of_code]
    back = (
        (int(t.group(1), 16), at)
        for at, name, operands in lines
        if name.startswith("BRA") and (t := _TARGET.search(operands))
    )
    first, last = max(
        ((start, end) for start, end in back if start < end), key=lambda span: span[1] - span[0], default=(0, -1)
    )
    names = Counter(name for at, name, _ in lines if first <= at <= last)
    widths: Counter[int] = Counter()
    for name, count in names.items():
        if re.match(r"LDG(STS)?\.|STG\.", name):
            width = re.search(r"\.(64|128|U?16|U?8)\b", name)
            widths[int(width.group(1).strip("U")) // 8 if width else 4] += count
    usual = [width for width, count in widths.items() if 4 * count * width >= max(c * w for w, c in widths.items())]
    barriers = sum(count for name, count in names.items() if name.startswith("BAR"))
    return names.total(), barriers, min(usual, default=0)
