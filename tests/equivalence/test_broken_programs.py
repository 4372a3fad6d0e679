"""Programs broken in one place are refused, or change nothing: a few of those that ``benchmarks/trust`` draws."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from arachnec.equivalence.compare import demand_equivalent
from arachnec.passes.check import checked
from benchmarks.trust import interleavings
from benchmarks.trust.program_mutations import judged, sources
from benchmarks.trust.random_programs import random_program
from benchmarks.trust.text_mutations import MUTATIONS, rows_of


@pytest.mark.parametrize("mutate", dict.fromkeys(MUTATIONS), ids=lambda mutate: mutate.__name__)
def test_each_kind_of_mutation_is_refused(mutate) -> None:  # type: ignore[no-untyped-def]
    """Six of each; those that are accepted change nothing that the proof looks at, and the benchmark executes them."""
    known, kinds = sources(0, 2), Counter()
    for number in range(60):
        if kinds.total() == 6:
            break
        rng = random.Random(f"{mutate.__name__}/{number}")
        before = known[rng.choice(sorted(known))]
        rows = rows_of(before)
        mutate(rows, rng)
        kind, _ = judged(before, "\n".join(rows) + "\n", execute=False)
        if kind != "unchanged":
            kinds[kind] += 1
    assert kinds["SURVIVES"] == 0
    assert kinds["refused"] >= 2, kinds


def test_check_z3_and_all_interleavings_agree() -> None:
    stuck = 0
    for number in range(40):
        rng = random.Random(number)
        module = interleavings.broken(random_program(rng, ranks=3, most=4), rng)
        lists = interleavings.meetings(module)
        bad, _ = interleavings.stands_still(lists)
        assert interleavings.no_order(lists) == bad == interleavings.refused(module), number
        stuck += bad
    assert 5 < stuck < 35


def test_a_random_program_that_is_accepted_computes_the_reference() -> None:
    module = checked(random_program(random.Random(5), ranks=3, most=3))
    assert len(module.programs) > 1
    assert demand_equivalent(module).worst < 1e-7
