"""The files of an executable's folder: read whole, within a limit, and told apart where they are damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from arachnec.ir.diagnostic import UserError, text_too_large_error, user_error, writing
from arachnec.ir.limits import LARGEST_PART, LARGEST_PROGRAM

MODULE = ".cascade"
Read = TypeVar("Read")


def not_executable_error(folder: str, reason: str) -> UserError:
    return user_error(
        f"{folder} is not an executable: {reason}",
        help=f"make one with `arachnec compile MODEL --data CLIPS --cluster CLUSTER -o {folder}`",
    )


def read_part(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise not_executable_error(str(folder), f"it has no {name}")
    size = path.stat().st_size
    if name.endswith(MODULE) and size > LARGEST_PROGRAM:
        raise text_too_large_error(str(path), LARGEST_PROGRAM >> 20)
    if size > LARGEST_PART:
        raise not_executable_error(str(folder), f"{name} is larger than {LARGEST_PART // 2**20} MiB")
    with writing(path):
        return path.read_bytes()


def json_part(folder: Path, name: str, data: bytes, kind: type[Read]) -> Read:
    """What a file of the folder says. Raises ``UserError`` where it is no JSON, or not of that form."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)  # before its fields: those of a file cut short may be others
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise user_error(
            f"{folder}/{name} is cut short or damaged: {error}", help="copy the folder again, or compile it again"
        ) from None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise not_executable_error(str(folder), f"{name}: {error}") from None


def text_of(folder: Path, name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_executable_error(str(folder), f"{name} is not UTF-8 text: {error.reason}") from None


def demand_readable(folder: Path, texts: Mapping[str, str]) -> None:
    """Raises ``UserError`` for a module that nothing would read back."""
    for name, text in texts.items():
        if name.endswith(MODULE) and len(text) * 4 > LARGEST_PROGRAM and len(text.encode()) > LARGEST_PROGRAM:
            raise text_too_large_error(str(folder / name), LARGEST_PROGRAM >> 20)
