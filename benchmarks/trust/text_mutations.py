"""Ways to break a lowered program's text in one place, on one rank or alike on all. Each changes the lines in place.

A line has all of its attributes: ``rows_of`` joins what the printer wraps.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import verify
from arachnec.passes.check import find_problems

TOKEN = re.compile(r"%\w+|\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b|\btrue\b|\bfalse\b")
ATTRIBUTE = re.compile(r"\w+ = (?:\[[^{}]*?\]|\"[^\"]*\"|[^,{}\[\]]+?)(?:, | (?=\}))")
OPERATION = re.compile(r"^ +(encode|forward|backward|weight|send|receive|gather|reduce|norm|step|free)\b")
OPERATIONS = ("encode", "forward", "backward", "send", "receive", "reduce", "norm", "step", "free")
Rows = list[str]
Mutation = Callable[[Rows, random.Random], None]


def rows_of(module: Module) -> Rows:
    """A module's lines, each with all of its attributes: what the printer wraps is one line."""
    rows: Rows = []
    wrapped = False
    for row in print_module(module).splitlines():
        if wrapped:
            rows[-1] += " }" if row.strip() == "}" else f" {row.strip()}"
            wrapped = row.strip() != "}"
        else:
            rows.append(row)
            wrapped = row.endswith("{") and not row.startswith(("module", "  program"))
    return [row.replace(", }", " }") for row in rows]


def accepted(before: Module, text: str) -> Module | tuple[str, str]:
    """The module of a mutated text, where it is another and nothing is found wrong; else what became of it, and why."""
    try:
        module = parse_module(text, "mutation")
        problems = verify(module) or find_problems(module)
    except UserError as error:
        problems = error.diagnostics
    if problems:
        return "refused", type(problems[0]).__name__
    return ("unchanged", "") if module == before else module


def in_programs(rows: Rows) -> list[int]:
    """The numbers of the lines that are instructions."""
    first = next(number for number, row in enumerate(rows) if row.startswith("  program rank"))
    return [number for number, row in enumerate(rows) if number > first and OPERATION.match(row)]


def named_lines(rows: Rows) -> list[int]:
    """Those of clips, cascades, instructions and what a rank holds."""
    starts = ("  clip ", "  %", "  program rank")
    return [number for number, row in enumerate(rows) if row.startswith(starts)] + in_programs(rows)


def drop(rows: Rows, rng: random.Random) -> None:
    del rows[rng.choice(in_programs(rows))]


def double(rows: Rows, rng: random.Random) -> None:
    at = rng.choice(in_programs(rows))
    rows.insert(at, rows[at])


def swap(rows: Rows, rng: random.Random) -> None:
    own = in_programs(rows)
    at = rng.choice([number for number in own if number + 1 in own] or own)
    rows[at], rows[at + 1] = rows[at + 1], rows[at]


def move(rows: Rows, rng: random.Random) -> None:
    at, to = rng.choice(in_programs(rows)), rng.choice(in_programs(rows))
    rows.insert(to, rows.pop(at))


def copy(rows: Rows, rng: random.Random) -> None:
    at, to = rng.choice(in_programs(rows)), rng.choice(in_programs(rows))
    rows.insert(to, rows[at])


def other_operation(rows: Rows, rng: random.Random) -> None:
    at = rng.choice(in_programs(rows))
    rows[at] = OPERATION.sub(lambda hit: hit[0].replace(hit[1], rng.choice(OPERATIONS)), rows[at])


def other_token(rows: Rows, rng: random.Random) -> None:
    _token_changed(rows, rng.choice(named_lines(rows)), rng, rows)


def _token_changed(rows: Rows, at: int, rng: random.Random, known: Rows) -> None:
    tokens = list(TOKEN.finditer(rows[at]))
    if tokens:
        hit = rng.choice(tokens)
        rows[at] = rows[at][: hit.start()] + _other(hit[0], known, rng) + rows[at][hit.end() :]


def _cleared(rows: Rows, at: int, rng: random.Random, known: Rows) -> None:
    rows[at] = ""


def _other(token: str, rows: Rows, rng: random.Random) -> str:
    if token.startswith("%"):
        return rng.choice(sorted({name for row in rows for name in re.findall(r"%\w+", row)}))
    if token in ("true", "false"):
        return "false" if token == "true" else "true"
    if re.fullmatch(r"\d+", token):
        return str(rng.choice((int(token) + 1, max(0, int(token) - 1), 2 * int(token), 0)))
    return repr(float(token) * rng.choice((0.0, 0.5, 2.0)))


def other_list(rows: Rows, rng: random.Random) -> None:
    _list_changed(rows, rng.choice(named_lines(rows)), rng)


def _list_changed(rows: Rows, at: int, rng: random.Random, known: Rows | None = None) -> None:
    """An element of a list left out, doubled, or two of them swapped."""
    lists = list(re.finditer(r"\[[^\[\]]+\]", rows[at]))
    if not lists:
        return
    hit = rng.choice(lists)
    items = [item for part in hit[0][1:-1].split(",") for item in _expanded(part.strip())]
    kind, place = rng.choice(("drop", "double", "swap", "reverse")), rng.randrange(len(items))
    if kind == "drop":
        del items[place]
    elif kind == "double":
        items.insert(place, items[place])
    elif kind == "reverse":
        items.reverse()
    else:
        other = rng.randrange(len(items))
        items[place], items[other] = items[other], items[place]
    rows[at] = rows[at][: hit.start()] + f"[{', '.join(items)}]" + rows[at][hit.end() :]


def _expanded(item: str) -> list[str]:
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", item)
    return [item] if ends is None else [str(number) for number in range(int(ends[1]), int(ends[2]) + 1)]


def left_out(rows: Rows, rng: random.Random) -> None:
    at = rng.choice(named_lines(rows))
    attributes = list(ATTRIBUTE.finditer(rows[at]))
    if attributes:
        hit = rng.choice(attributes)
        rows[at] = rows[at][: hit.start()] + rows[at][hit.end() :]


def from_elsewhere(rows: Rows, rng: random.Random) -> None:
    """An attribute with the value that it has in another line."""
    at = rng.choice(named_lines(rows))
    attributes = list(ATTRIBUTE.finditer(rows[at]))
    if not attributes:
        return
    hit = rng.choice(attributes)
    name = hit[0].split(" = ")[0]
    others = [other[0] for row in rows for other in ATTRIBUTE.finditer(row) if other[0].startswith(f"{name} = ")]
    rows[at] = rows[at][: hit.start()] + rng.choice(others) + rows[at][hit.end() :]


def added(rows: Rows, rng: random.Random) -> None:
    """An attribute that another line has and this one has not."""
    at = rng.choice(named_lines(rows))
    own = {hit[0].split(" = ")[0] for hit in ATTRIBUTE.finditer(rows[at])}
    others = {hit[0].strip().rstrip(",") for row in rows for hit in ATTRIBUTE.finditer(row)}
    names = sorted({text.split(" = ")[0] for text in others} - own)
    if not own or not names:
        return
    name = rng.choice(names)  # not by how often it stands there
    text = rng.choice(sorted(text for text in others if text.startswith(f"{name} = ")))
    rows[at] = rows[at].replace("{ ", f"{{ {text}, ", 1)


def one_attribute(rows: Rows, rng: random.Random) -> None:
    """A number or a list of an attribute that is drawn by its name, so that the rare ones are drawn too."""
    names = sorted({hit[0].split(" = ")[0] for number in named_lines(rows) for hit in ATTRIBUTE.finditer(rows[number])})
    name = rng.choice(names)
    at = rng.choice([number for number in named_lines(rows) if re.search(rf"\b{name} = ", rows[number])])
    hit = next(hit for hit in ATTRIBUTE.finditer(rows[at]) if hit[0].startswith(f"{name} = "))
    part = [hit[0]]
    if rng.random() < 0.5:
        _list_changed(part, 0, rng)
    if part[0] == hit[0]:
        _token_changed(part, 0, rng, rows)
    rows[at] = rows[at][: hit.start()] + part[0] + rows[at][hit.end() :]


def _what(row: str) -> str:
    """An instruction without its attributes and ranks: alike on all of its ranks."""
    return re.sub(r" (on|to|from) .*", "", row.split("{")[0]).strip()


def drop_everywhere(rows: Rows, rng: random.Random) -> None:
    """An instruction left out on all ranks; of a send its receives too, of a forward its backward."""
    what = _what(rows[rng.choice(in_programs(rows))])
    pairs = {"send": "receive", "receive": "send", "forward": "backward", "backward": "forward"}
    word, _, target = what.partition(" ")
    both = {what, f"{pairs.get(word, word)} {target}"}
    own = set(in_programs(rows))
    rows[:] = [row for number, row in enumerate(rows) if number not in own or _what(row) not in both]


def double_everywhere(rows: Rows, rng: random.Random) -> None:
    what, own = _what(rows[rng.choice(in_programs(rows))]), set(in_programs(rows))
    rows[:] = [r for n, row in enumerate(rows) for r in ([row] * (2 if n in own and _what(row) == what else 1))]


def swap_everywhere(rows: Rows, rng: random.Random) -> None:
    """Two instructions that follow each other, swapped on every rank where they do."""
    own = in_programs(rows)
    at = rng.choice([number for number in own if number + 1 in own] or own[:1])
    pair = _what(rows[at]), _what(rows[at + 1])
    for number in own:
        if number + 1 in own and (_what(rows[number]), _what(rows[number + 1])) == pair:
            rows[number], rows[number + 1] = rows[number + 1], rows[number]


def alike_everywhere(rows: Rows, rng: random.Random) -> None:
    """One change of an instruction's attributes, made to the same text on all ranks and in its cascade."""
    own = in_programs(rows)
    at = rng.choice([number for number in own if ATTRIBUTE.search(rows[number])])
    text = rng.choice(list(ATTRIBUTE.finditer(rows[at])))[0].rstrip(", ")
    part = [text]
    rng.choice((_list_changed, _token_changed, _cleared))(part, 0, rng, rows)
    word, _, target = _what(rows[at]).partition(" ")
    for number, row in enumerate(rows):
        if (number in own and _what(row) in (f"{word} {target}", f"backward {target}")) or (
            target.startswith("%") and row.startswith(f"  {target} = ")
        ):
            row = row if part[0] else row.replace(f"{text}, ", "").replace(f", {text}", "")
            rows[number] = row.replace(text, part[0])


def target_everywhere(rows: Rows, rng: random.Random) -> None:
    """Two cascades swapped in the text of all programs, or two ranks in one program."""
    own = in_programs(rows)
    names = sorted({name for number in own for name in re.findall(r"%\w+", rows[number])})
    if len(names) > 1 and rng.random() < 0.7:
        one, other = rng.sample(names, 2)
        swap = {one: other, other: one}
        ends = [number for number, row in enumerate(rows) if row.startswith("  ]")]
        first = rng.choice([own[0], *(end for end in ends if end < own[-1])])  # from some program on
        for number in own:
            if number >= first:
                rows[number] = re.sub(r"%\w+", lambda name: swap.get(name[0], name[0]), rows[number])
        return
    places = [number for number, row in enumerate(rows) if row.startswith("  program rank ")]
    if len(places) > 1:
        one_at, other_at = rng.sample(places, 2)
        one_row, other_row = (re.match(r"  program rank \d+", rows[place]) for place in (one_at, other_at))
        assert one_row and other_row
        rows[one_at] = other_row[0] + rows[one_at][one_row.end() :]
        rows[other_at] = one_row[0] + rows[other_at][other_row.end() :]


def twice(rows: Rows, rng: random.Random) -> None:
    """Two changes, of any kinds."""
    for mutate in rng.sample(MUTATIONS, 2):
        mutate(rows, rng)


ON_ONE_RANK: tuple[Mutation, ...] = (
    drop, double, swap, move, copy, other_operation, other_token, other_token, other_token, other_list, left_out,
    from_elsewhere, added, one_attribute, one_attribute,
)  # fmt: skip
EVERYWHERE: tuple[Mutation, ...] = (
    drop_everywhere, double_everywhere, swap_everywhere, alike_everywhere, alike_everywhere, alike_everywhere,
    target_everywhere,
)  # fmt: skip
MUTATIONS = ON_ONE_RANK + EVERYWHERE
