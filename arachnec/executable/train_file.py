"""Training options as a person writes them: ``train.toml``, and ``--set key=value`` on a command line.

In: a file, settings, options that stand already. Out: ``Training``. Later ones stand instead of earlier ones. A table
is laid over the one before key by key, but for ``optimizer`` and ``schedule`` with a ``name``: these begin anew, since
another class has other arguments.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from arachnec.cluster.file import Lines
from arachnec.executable.training_options import (
    OWN_OPTIMIZER,
    BadTraining,
    BadTrainValue,
    Training,
    bad_value,
    verified,
)
from arachnec.ir.diagnostic import Diagnostic, UserError, user_error
from arachnec.ir.limits import LARGEST_SETTINGS
from arachnec.ir.nodes import Span

NAMED = ("optimizer", "schedule")  # tables that say a class of torch
KINDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "a text, in quotes",
    "bool": "true or false",
    "array": "a list, in brackets",
    "object": "a table",
}
OTHER_WORDS = {  # what other trainers call an option, and where it is here
    "learning_rate": "did you mean `lr`?",
    "max_grad_norm": "did you mean `clip_norm`?",
    "gradient_clipping": "did you mean `clip_norm`?",
    "gradient_accumulation_steps": "did you mean `accumulate`?",
    "bf16": 'did you mean `dtype = "bf16"`?',
    "mixed_precision": 'did you mean `dtype = "bf16"`?',
    "precision": 'did you mean `dtype = "bf16"`?',
    "betas": "it is an argument of the optimizer: write it below [optimizer]",
    "eps": "it is an argument of the optimizer: write it below [optimizer]",
    "momentum": "it is an argument of the optimizer: write it below [optimizer]",
    "weight_decay": "it is an argument of the optimizer: write it below [optimizer]",
    "warmup": "write it below [schedule]",
    "warmup_steps": "write `warmup` below [schedule]",
    "batch": "give `compile` the option --batch N",
    "batch_size": "give `compile` the option --batch N",
    "steps": "give `run` the option --steps N",
    "max_steps": "give `run` the option --steps N",
    "epochs": "give `run` the option --steps N: an epoch has as many steps as the manifest has global batches",
}
OF_A_GROUP = ("match", "dimensions")
OWN_KEYS = {"optimizer": ("name",), "schedule": ("name", "warmup"), "groups": OF_A_GROUP}


def unknown_train_key_error(span: Span | None, key: str, suggestion: str) -> UserError:
    return user_error(f"unknown training option `{key}`", label="no such key", help=suggestion, span=span)


def bad_train_file_error(span: Span | None, reason: str) -> UserError:
    return user_error(
        f"the training file is not TOML: {reason}",
        help="text values stand in quotes, one `key = value` a line; docs/training_options.md has examples",
        span=span,
    )


@dataclass(frozen=True)
class Given:
    """Options as they were written, by key, and where."""

    values: Mapping[str, Any]
    lines: Lines


def training_of(
    standing: Training,
    file: Path | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Training:
    """``standing`` with what the file, then the settings, then the flags say.

    Raises ``UserError`` for an unknown key or a value that it cannot have.
    """
    layers = [] if file is None else [read_train_file(file)]
    layers += [setting(text) for text in settings]
    layers.append(Given(flags or {}, Lines(None, "")))
    values = _written(standing)
    for layer in layers:
        _demand_known(layer)
        values = _laid_over(values, layer.values)
        parsed(values, layer.lines)  # a wrong value is shown where it was given
    return parsed(values, layers[-1].lines)


def read_train_file(path: Path) -> Given:
    """A TOML file's tables. Raises ``UserError`` where it is none."""
    if not path.is_file():
        raise user_error(
            f"there is no training file `{path}`",
            help="give the path of a TOML file; docs/training_options.md lists its keys",
        )
    if path.stat().st_size > LARGEST_SETTINGS:
        raise bad_train_file_error(Span(str(path), 1, 1, 1, 2), f"larger than {LARGEST_SETTINGS >> 20} MiB")
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return Given(tomllib.loads(text), Lines(str(path), text))
    except (ValueError, RecursionError) as error:
        position = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(position[1]), int(position[2])) if position else (1, 1)
        span = Span(str(path), line, column, line, column + 1)
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise bad_train_file_error(span, reason) from None


def setting(text: str) -> Given:
    """``optimizer.name=SGD`` as tables. A value that is no TOML is a text."""
    key, equals, value = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise user_error(
            f"`--set {text}` sets nothing", help="write --set KEY=VALUE, as in --set optimizer.weight_decay=0.1"
        )
    try:
        read = tomllib.loads(f"value = {value}")
        inner: Any = read["value"] if set(read) == {"value"} else value
    except (ValueError, RecursionError):
        inner = value.strip()
    for name in reversed(names):
        inner = {name: inner}
    return Given(inner, Lines(None, ""))


def parsed(values: Mapping[str, Any], lines: Lines) -> Training:
    """The options that these tables say. Raises ``UserError``."""
    tables: dict[str, Any] = dict(values)
    tables["optimizer"] = _torch_class(values["optimizer"], "optimizer", lines)
    schedule = dict(_table(values["schedule"], "schedule", lines))
    warmup, name = schedule.pop("warmup", 0), schedule.get("name")
    if name is None and schedule:
        option = next(iter(schedule))
        remedy = 'add `name`, such as name = "CosineAnnealingLR"; without one there is `warmup` alone'
        raise UserError(_bad(lines, f"schedule.{option}", schedule[option], "no scheduler takes it", remedy))
    scheduler = None if name is None else _torch_class(schedule, "schedule", lines)
    tables["schedule"] = {"warmup": warmup, "scheduler": scheduler}
    groups = _list(values["groups"], "groups", lines)
    tables["groups"] = [_group(group, f"groups[{number}]", lines) for number, group in enumerate(groups)]
    try:
        training = msgspec.convert(tables, Training)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        key = place.strip("`").lstrip(".") or "train.toml"
        key = key.replace("scheduler.", "").replace("arguments.", "")
        value, choices = _at(tables, place.strip("`")), _choices(key)
        reason = f"it must be {' or '.join(f'`{choice}`' for choice in choices)}" if choices else _in_words(message)
        near = difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
        remedy = f"did you mean `{near[0]}`?" if near else "docs/training_options.md says what it takes"
        raise UserError(_bad(lines, key, value, reason, remedy)) from None
    try:
        return verified(training)
    except UserError as error:
        raise UserError(*(_placed(diagnostic, lines) for diagnostic in error.diagnostics)) from None


def _written(training: Training) -> dict[str, Any]:
    """Options as tables, as a person would write them."""
    tables: dict[str, Any] = msgspec.to_builtins(training)
    tables["optimizer"] = _flat(tables["optimizer"])
    scheduler = tables["schedule"]["scheduler"]
    tables["schedule"] = {"warmup": training.schedule.warmup, **(_flat(scheduler) if scheduler else {})}
    tables["groups"] = [
        {key: group[key] for key in OF_A_GROUP if group[key] is not None} | group["arguments"]
        for group in tables["groups"]
    ]
    return tables


def _flat(chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": chosen["name"], **chosen["arguments"]}


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with others over them."""
    result = dict(below)
    for key, value in above.items():
        if key in NAMED and isinstance(value, str):
            value = {"name": value}
        under = below.get(key)
        if not isinstance(value, Mapping) or not isinstance(under, Mapping):
            result[key] = value
        elif key in NAMED and "name" in value:
            kept = {"warmup": under["warmup"]} if "warmup" in under else {}
            result[key] = {**kept, **value}
        else:
            result[key] = {**under, **value}
    return result


def _demand_known(given: Given) -> None:
    known = Training.__struct_fields__
    kinds = {field.name: field.type for field in msgspec.structs.fields(Training)}
    for key in given.values:
        if key not in known:
            word = key.lower().replace("-", "_")
            fields = {name: getattr(kind, "__struct_fields__", ()) for name, kind in kinds.items()} | OWN_KEYS
            inner = [name for name in kinds if word in fields[name] and name != "groups"]
            of_table = f"did you mean {' or '.join(f'`{name}.{word}`' for name in inner)}?" if inner else ""
            suggestion = OTHER_WORDS.get(word) or of_table or _suggestion(key, known)
            raise unknown_train_key_error(given.lines.span(key), key, suggestion)
    for key, value in given.values.items():
        kind = kinds[key]
        if isinstance(value, Mapping) and key not in OWN_KEYS and hasattr(kind, "__struct_fields__"):
            for inner in value:
                if inner not in kind.__struct_fields__:
                    suggestion = _suggestion(inner, kind.__struct_fields__)
                    raise unknown_train_key_error(place(given.lines, f"{key}.{inner}"), f"{key}.{inner}", suggestion)


def _suggestion(key: str, known: Sequence[str]) -> str:
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower(), lower, n=1)
    return f"did you mean `{lower[near[0]]}`?" if near else f"the keys are {', '.join(known)}"


def _torch_class(value: Any, key: str, lines: Lines) -> dict[str, Any]:
    arguments = dict(_table(value, key, lines))
    name = arguments.pop("name", OWN_OPTIMIZER.name)
    if key == "optimizer" and "lr" in arguments:
        raise UserError(
            _bad(lines, "optimizer.lr", arguments["lr"], "the learning rate has a key of its own", "lr = ...")
        )
    return {"name": name, "arguments": arguments}


def _group(value: Any, key: str, lines: Lines) -> dict[str, Any]:
    arguments = dict(_table(value, key, lines))
    own = {key: arguments.pop(key) for key in OF_A_GROUP if key in arguments}
    if isinstance(own.get("match"), str):
        own["match"] = [own["match"]]
    if not own:
        remedy = 'add match = ["*bias"], a pattern of names, or dimensions = 1, the most that they have'
        raise UserError(_bad(lines, key, value, "it says of no parameter that it is in it", remedy))
    return {**own, "arguments": arguments}


def _placed(diagnostic: Diagnostic, lines: Lines) -> Diagnostic:
    if isinstance(diagnostic, BadTraining):
        return replace(diagnostic, span=place(lines, diagnostic.option.replace("-", "_")))
    if isinstance(diagnostic, BadTrainValue):
        return replace(diagnostic, span=place(lines, diagnostic.key))
    return diagnostic


def _choices(key: str) -> tuple[str, ...]:
    """The texts of which the option ``timesteps.sampling`` is one; none where its type lists none."""
    kind: Any = Training
    for name in key.split("."):
        fields = msgspec.structs.fields(kind) if hasattr(kind, "__struct_fields__") else ()
        kind = next((field.type for field in fields if field.name == name), None)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _table(value: Any, key: str, lines: Lines) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        example = f"[{key}]" if key in NAMED else "[[groups]]"
        raise UserError(_bad(lines, key, value, "it is a table", f"write {example}, and its keys below"))
    return value


def _list(value: Any, key: str, lines: Lines) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise UserError(_bad(lines, key, value, "it is a list of tables", f"write [[{key}]], and its keys below"))
    return value


def _bad(lines: Lines, key: str, value: object, reason: str, remedy: str) -> BadTrainValue:
    return bad_value(key, value, reason, remedy, place(lines, key))


def place(lines: Lines, key: str) -> Span | None:
    """Where ``schedule.T_max`` or ``groups[1].betas`` stands: behind the head of its table, or the head itself; None
    without a file. Tables of a list are counted from 0."""
    if lines.file is None:
        return None
    rows = lines.text.splitlines()
    table, _, name = key.rpartition(".")
    head, name = _head(rows, table), _without_number(name)
    if key.endswith("]") and (listed := _head(rows, key)) is not None:
        head, name = listed, ""
    if head is None:
        return lines.span(_without_number(table or key))
    for number, row in enumerate(rows[head + 1 :], head + 2):
        if re.match(r"\s*\[", row):
            break
        if name and (match := re.match(rf"\s*({re.escape(name)})\b", row)):
            return Span(lines.file, number, match.start(1) + 1, number, match.end(1) + 1)
    return Span(lines.file, head + 1, 1, head + 1, len(rows[head]) + 1)


def _head(rows: Sequence[str], table: str) -> int | None:
    """The row of ``[schedule]``, or of ``groups[1]`` the second ``[[groups]]``."""
    pattern = rf"\s*\[\[?\s*{re.escape(_without_number(table))}\s*\]"
    heads = [i for i, row in enumerate(rows) if re.match(pattern, row)]
    number = int(table[:-1].rpartition("[")[2]) if table.endswith("]") else 0
    return heads[number] if number < len(heads) else None


def _without_number(key: str) -> str:
    return re.sub(r"\[\d+\]$", "", key)


def located(error: UserError, file: Path | None) -> UserError:
    """What is wrong with options that torch was given, at their lines of the training file."""
    if file is None or not file.is_file():
        return error
    lines = Lines(str(file), file.read_text(encoding="utf-8", errors="replace"))
    diagnostics = (
        replace(d, span=place(lines, d.key)) if isinstance(d, BadTrainValue) and d.span is None else d
        for d in error.diagnostics
    )
    return UserError(*diagnostics)


def _at(tables: Any, path: str) -> Any:
    for name in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            tables = tables[name[0]] if name[0] else tables[int(name[1])]
        except (KeyError, IndexError, TypeError):
            return tables
    return tables


def _in_words(message: str) -> str:
    """What msgspec says of a type, as a person would: ``Expected `float`, got `str` ``."""
    expected = re.match(r"Expected `([^`]*)`", message)
    if expected is not None:
        kinds = [KINDS.get(kind.strip(), kind.strip()) for kind in expected[1].split("|") if kind.strip() != "null"]
        return f"it must be {' or '.join(kinds)}"
    unknown = re.search(r"unknown field (`[^`]*`)", message) or re.search(r"missing required field (`[^`]*`)", message)
    if unknown is not None:
        return f"it has {'no' if 'unknown' in message else 'to have a'} key {unknown[1]}"
    return message[:1].lower() + message[1:]
