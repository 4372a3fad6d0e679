"""What is walked together is equally long, or the place is listed here: nothing at an end is left out in silence."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "arachnec"
# Of plans and proofs, and what deals state out. Where one side may be longer: how often, in which file.
ROOMS = ("analysis", "cost", "lowering", "model_state/cells", "pipelining", "planning", "solver", "verification")
UNEQUAL = {
    "model_state/cells/gradients.py": 1,  # none is reduced where a rank is alone
    "model_state/cells/slots.py": 1,  # an end for every start but the first
    "pipelining/one_f_one_b.py": 1,  # forwards end before backwards
    "pipelining/order_search.py": 1,  # one order of entry, or one for each kind of backward
    "verification/gathers.py": 1,  # a list that is too short or too long is another error
    "verification/message_sizes.py": 1,  # what nobody sends, or nobody receives, is another error
}


def test_what_is_walked_together_is_equally_long_or_listed() -> None:
    unequal: Counter[str] = Counter()
    for room in ROOMS:
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
                    strict = {word.arg: getattr(word.value, "value", None) for word in node.keywords}.get("strict")
                    unequal[path.relative_to(PACKAGE).as_posix()] += strict is not True
    assert {file: count for file, count in unequal.items() if count} == UNEQUAL
