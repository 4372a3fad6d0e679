"""What a dataset's ``state_dict`` returns, as text in a checkpoint and back: numbers, text, lists, dicts, tensors."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from arachnec.ir.diagnostic import user_error

TAG = "__kind__"


def to_text(state: object) -> str:
    """As JSON. Raises ``UserError`` for an object of another kind, with its place."""
    return json.dumps(_encoded(state, "state"))


def from_text(text: str) -> Any:
    """The state that ``to_text`` was given."""
    return _decoded(json.loads(text))


def _encoded(value: Any, place: str) -> Any:
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {TAG: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        own = value.detach().cpu().contiguous()
        data = base64.b64encode(own.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        return {TAG: str(own.dtype).removeprefix("torch."), "shape": list(own.shape), "data": data}
    if isinstance(value, list | tuple):
        rows = [_encoded(item, f"{place}[{number}]") for number, item in enumerate(value)]
        return rows if isinstance(value, list) else {TAG: "tuple", "rows": rows}
    if isinstance(value, Mapping):
        pairs = [[_encoded(key, place), _encoded(item, f"{place}[{key!r}]")] for key, item in value.items()]
        return {TAG: "dict", "rows": pairs}
    raise user_error(
        f"the dataset's state_dict() has a {type(value).__name__} at `{place}`, which no checkpoint holds",
        help="return numbers, text, bytes, lists, dicts and tensors",
    )


def _decoded(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[TAG]
    if kind == "dict":
        return {_decoded(key): _decoded(item) for key, item in value["rows"]}
    if kind == "tuple":
        return tuple(_decoded(item) for item in value["rows"])
    data = base64.b64decode(value["data"])
    if kind == "bytes":
        return data
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, kind)) if data else torch.empty(0)
    return flat.view(value["shape"])
