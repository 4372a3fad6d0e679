"""``check``: the four rules of a lowered program, proved before anything runs. The module comes back unchanged.

``docs/check.md`` says what the rules mean and what a back end must do for them to hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from arachnec.analysis.communicators import HOST_HANDOFFS, Connections, ExecutionModel, HandoffPath, ReceivePosting
from arachnec.analysis.receive_prefetch import prefetched_receives
from arachnec.analysis.uses import Values
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.long_computations import without_garbage_collector
from arachnec.ir.nodes import Level, Module
from arachnec.lowering.programs import no_cluster_error
from arachnec.passes.infra.base import Pass
from arachnec.verification.deadlock import check_deadlock, check_device_limits
from arachnec.verification.encoders import check_encoders
from arachnec.verification.gradient import check_gradient
from arachnec.verification.handoffs import check_message_sizes, check_sources
from arachnec.verification.host_memory import check_host_copies, check_host_memory
from arachnec.verification.inputs import check_cascade_inputs, check_forwards, check_inputs
from arachnec.verification.memory import check_memory, check_memory_claims, handed_sizes
from arachnec.verification.sampling import check_sampling
from arachnec.verification.shards import check_gathers, check_listed_layers, check_residency, check_updated_parameters
from arachnec.verification.sparse import check_heads, check_learning, check_sparse_paths
from arachnec.verification.structure import check_structure
from arachnec.verification.times import check_times


@dataclass(frozen=True)
class Check(Pass):
    """The proof before launch, for a back end that runs handoffs as the options say."""

    needs: ClassVar[Level] = Level.LOWERED
    gives: ClassVar[Level] = Level.LOWERED
    handoffs: HandoffPath = HOST_HANDOFFS.handoffs
    receives: ReceivePosting = HOST_HANDOFFS.receives
    connections: Connections = HOST_HANDOFFS.connections

    def run(self, module: Module) -> Module:
        return checked(module, ExecutionModel(self.handoffs, self.receives, self.connections))


def checked(module: Module, model: ExecutionModel = HOST_HANDOFFS) -> Module:
    """The module itself, or UserError with the first diagnostic of every kind that its programs earn."""
    problems = find_problems(module, model)
    if problems:
        raise UserError(*problems)
    return module


def find_problems(module: Module, model: ExecutionModel = HOST_HANDOFFS) -> tuple[Diagnostic, ...]:
    """What is wrong with a lowered module: the first of every kind of mistake, in the order of the rules."""
    if module.cluster is None:
        return (no_cluster_error(module.span, module.name),)
    values = Values(module)
    with without_garbage_collector():
        for rule in (check_structure, check_forwards, check_listed_layers, check_heads):  # what the others compute with
            if problems := _first_of_each(rule(values)):
                return problems
        return _first_of_each(_broken_rules(values, model, module.cluster.memory))


def _broken_rules(values: Values, model: ExecutionModel, memory: float) -> Iterator[Diagnostic]:
    posted = prefetched_receives(values, model, memory) if model.posted_place_counts else {}
    cost = CostModel(values.module)
    handed = handed_sizes(values, cost)
    yield from check_gradient(values)
    yield from check_sparse_paths(values)
    yield from check_learning(values)
    yield from check_sampling(values)
    yield from check_deadlock(values, model, posted)
    yield from check_message_sizes(values, handed)
    yield from check_device_limits(values, model, posted)
    yield from check_encoders(values)
    yield from check_sources(values)
    yield from check_cascade_inputs(values)
    yield from check_inputs(values)
    yield from check_gathers(values)
    yield from check_updated_parameters(values)
    yield from check_residency(values)
    yield from check_memory_claims(values, cost, handed)
    yield from check_memory(values, model)
    yield from check_host_memory(values)
    yield from check_host_copies(values)
    yield from check_times(values, cost)


def _first_of_each(problems: Iterator[Diagnostic]) -> tuple[Diagnostic, ...]:
    kinds: dict[str, Diagnostic] = {}
    for problem in problems:
        kinds.setdefault(problem.kind, problem)
    return tuple(kinds.values())
