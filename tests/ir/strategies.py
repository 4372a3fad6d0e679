"""Generated modules. ``any_module(level)`` is whatever the text can say; ``right_module(level)`` also verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, TypeVar

from hypothesis import strategies as st

from arachnec.ir import kinds, nodes, tables
from arachnec.ir.nodes import Level, Module, Phase
from arachnec.ir.values import UNITS, Attributes, Formula, Quantity, Symbol, Term, Value
from arachnec.ir.verify import verify

Table: TypeAlias = dict[str, tables.Row]
finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.from_regex(r"[A-Za-z0-9_.\-]{1,6}", fullmatch=True) | texts
keys = st.from_regex(r"[a-z_]{1,6}", fullmatch=True) | texts
units = st.sampled_from(UNITS)
ranks = st.lists(st.integers(0, 40), max_size=8).map(tuple) | st.integers(0, 9).map(lambda n: tuple(range(n)))
sizes = st.integers(-5, 10**6)
terms = st.builds(
    Term,
    finite,
    st.lists(st.tuples(st.sampled_from(["B", "S", "T", "x_1"]), st.integers(0, 4)), max_size=3).map(tuple),
)
formulas = st.builds(Formula, st.lists(terms, max_size=4).map(tuple), units)
quantities = st.builds(Quantity, finite, units)


def _attributes(values: st.SearchStrategy[Value]) -> st.SearchStrategy[Attributes]:
    return st.dictionaries(keys, values, max_size=4).map(lambda pairs: Attributes(tuple(pairs.items())))


values: st.SearchStrategy[Value] = st.recursive(
    st.booleans() | st.integers() | finite | texts | quantities | st.builds(Symbol, names) | formulas | ranks,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | _attributes(inner),
    max_leaves=6,
)
attributes = _attributes(values)
dimensions = st.integers(-1, 5000) | st.sampled_from(["B", "S", "S + T", "2*S", "(S + 1)//2", "Max(1, S)"])
types = st.builds(
    nodes.TensorType, st.sampled_from(["f32", "bf16", "i64"]), st.lists(dimensions, max_size=4).map(tuple)
)
inputs = st.lists(names, max_size=3).map(tuple)
clips = st.builds(nodes.Clip, sizes, sizes, sizes, sizes, sizes, sizes, attributes)
graphs = st.builds(
    nodes.Graph,
    names,
    st.lists(st.builds(nodes.GraphInput, names, types), max_size=3).map(tuple),
    st.lists(st.builds(nodes.GraphOp, names, texts, inputs, st.none() | types, attributes), max_size=3).map(tuple),
    inputs,
    attributes,
    fused=st.lists(st.builds(nodes.Fused, names, inputs, attributes), max_size=2).map(tuple),
)
cascades = st.builds(
    nodes.Cascade, names, st.sampled_from(list(Phase)), names, ranks, sizes, sizes, sizes, inputs, attributes
)
instructions = st.builds(nodes.Instruction, st.sampled_from([*tables.INSTRUCTION]), names, ranks, attributes)
programs = st.builds(nodes.Program, sizes, st.lists(instructions, max_size=4).map(tuple), attributes)


def any_module(level: Level) -> st.SearchStrategy[Module]:
    def several(item: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
        return st.lists(item, max_size=3).map(tuple)

    return st.builds(
        Module,
        name=names,
        level=st.just(level),
        cluster=st.none() | st.builds(nodes.Cluster, names, attributes),
        clips=several(clips),
        stages=several(st.builds(nodes.Stage, names, st.booleans(), attributes)),
        graphs=several(graphs),
        cascades=several(cascades) if level >= Level.PARTITIONED else st.just(()),
        reductions=several(st.builds(nodes.Reduce, names, inputs, attributes)),
        steps=several(st.builds(nodes.Step, names, attributes)),
        programs=several(programs) if level >= Level.LOWERED else st.just(()),
        attrs=attributes.filter(lambda attrs: "level" not in attrs),
        span=st.none(),
    )


_SAMPLES: dict[str, st.SearchStrategy[Value]] = {
    "int": st.integers(0, 10**9),
    "float": st.floats(0, 1e9),
    "str": texts,
    "bool": st.booleans(),
    "int or bool": st.booleans(),
    "@graph": st.builds(Symbol, names),
    "[int]": ranks,
}
_positive_terms = st.builds(Term, st.floats(0, 1), st.just((("S", 1),)) | st.just((("B", 1), ("S", 2))) | st.just(()))


def _sample(kind: str) -> st.SearchStrategy[Value]:
    if kind.startswith("[["):
        parts = [_sample(part.removesuffix(kinds.OPTIONAL)) for part in kinds.columns(kind)]
        return st.lists(st.tuples(*parts), max_size=2).map(tuple)
    if kind.startswith("[") and kind not in _SAMPLES:
        return st.lists(_sample(kind[1:-1]), max_size=2).map(tuple)
    if kind.endswith(kinds.POSITIVE):
        name = kinds.plain(kind)
        if name in UNITS:
            return st.floats(1e-3, 1e6).map(lambda value: Quantity(value, name))
        return st.integers(1, 10**9) if name == "int" else st.floats(1e-3, 1e6)
    kind = kinds.plain(kind)
    if kind.endswith(" formula"):
        unit = kind.removesuffix(" formula")
        return st.lists(_positive_terms, max_size=3).map(lambda terms: Formula(tuple(terms), unit))
    if kind in UNITS:
        return st.floats(0, 1e6).map(lambda value: Quantity(value, kind))
    return _SAMPLES[kind]


@st.composite
def _by_table(
    draw: st.DrawFn, table: Table, level: Level, *, optional: bool = True, **fixed: Value | None
) -> Attributes:
    """Every attribute the level requires, some it allows; ``fixed`` ones as given, left out where None."""
    pairs: dict[str, Value | None] = {}
    for row in table.values():
        if row.name in fixed:
            pairs[row.name] = fixed[row.name] if row.since <= level else None
        elif row.since <= level and (row.required or (optional and draw(st.booleans()))):
            pairs[row.name] = draw(_sample(row.kind))
        value = pairs.get(row.name)
        assert value is None or kinds.test(row.kind)(value)
    return Attributes.of(**pairs)


Node = TypeVar("Node", nodes.Stage, nodes.Cascade, Module)


def _agreeing(draw: st.DrawFn, table: Table, level: Level, node: Node, module_with: Callable[[Node], Module]) -> Node:
    """The node with a few more attributes, those with which the rest of its module agrees."""
    rows = [row for row in table.values() if row.since <= level and row.name not in node.attrs]
    for row in draw(st.lists(st.sampled_from(rows), max_size=4, unique=True)) if rows else ():
        more = replace(node, attrs=node.attrs.updated(**{row.name: draw(_sample(row.kind))}))
        node = node if verify(module_with(more)) else more
    return node


@st.composite
def right_module(draw: st.DrawFn, level: Level) -> Module:
    """A module that verifies: encode and train cascades one after the other, each on all its ranks."""
    machines, gpus = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    world, count = machines * gpus, draw(st.integers(0, 5))
    clips = tuple(
        nodes.Clip(
            i, 1 + 4 * draw(st.integers(0, 20)), 480, 832, draw(st.integers(0, 512)), draw(st.integers(1, 10**5))
        )
        for i in range(count)
    )
    rack = draw(st.none() | st.integers(1, 4))
    kind = (machines, "a", Quantity(8.0, "GiB"), Quantity(1.0, "TFLOP/s"), Quantity(2.0, "GB/s"))
    mixed = draw(st.sampled_from([None, (kind,)]))
    times = Formula((Term(1e-3, (("S", 1),)),), "ms")
    stages = (
        nodes.Stage("vae", False, draw(_by_table(tables.STAGE, level, optional=False, forward=times))),
        nodes.Stage("dit", True, draw(_by_table(tables.STAGE, level, optional=False, forward=times, backward=times))),
    )
    cascades: list[nodes.Cascade] = []
    for clip in clips if level >= Level.PARTITIONED else ():
        for phase, stage in ((Phase.ENCODE, "vae"), (Phase.TRAIN, "dit")):
            degree = draw(st.integers(1, world))
            ring = draw(st.sampled_from([n for n in range(1, degree + 1) if degree % n == 0]))
            attrs = draw(
                _by_table(
                    tables.CASCADE,
                    level,
                    optional=False,
                    degree=degree,
                    start=Quantity(10.0 * len(cascades), "ms"),
                    end=Quantity(10.0 * len(cascades) + 9, "ms"),
                    ranks=tuple(draw(st.permutations(range(world)))[:degree]),
                    ring=ring,
                    ulysses=degree // ring,
                )
            )
            before = (cascades[-1].name,) if phase is Phase.TRAIN else ()
            name = str(len(cascades))
            cascades.append(nodes.Cascade(name, phase, stage, (clip.id,), 1, clip.tokens, clip.text, before, attrs))
    trained = tuple(cascade.name for cascade in cascades if cascade.phase is Phase.TRAIN)
    everyone = tuple(range(world))
    nics = draw(st.none() | st.text("ABC", min_size=gpus, max_size=gpus))
    sizes = {"nodes": machines, "gpus": gpus, "rack": rack, "mixed": mixed, "nics": nics}
    module = Module(
        name=draw(names),
        level=level,
        cluster=nodes.Cluster("pod", draw(_by_table(tables.CLUSTER, level, **sizes))),
        clips=clips,
        stages=stages,
        cascades=tuple(cascades),
        attrs=draw(_by_table(tables.MODULE, level, optional=False, makespan=Quantity(1e4, "ms"))),
    )
    if level >= Level.SCHEDULED:
        module = replace(
            module,
            reductions=(nodes.Reduce("dit", trained, draw(_by_table(tables.REDUCE, level, ranks=everyone))),),
            steps=(nodes.Step("dit", draw(_by_table(tables.STEP, level, ranks=everyone))),),
        )
    if level >= Level.LOWERED:
        ops = st.sampled_from(sorted(tables.INSTRUCTION))
        programs = []
        for rank in everyone:
            listed = [
                nodes.Instruction(
                    op, "dit" if op in ("reduce", "step") else "0", (), draw(_by_table(tables.INSTRUCTION[op], level))
                )
                for op in draw(st.lists(ops, max_size=3))
            ]
            programs.append(nodes.Program(rank, tuple(listed), draw(_by_table(tables.PROGRAM, level))))
        module = replace(module, programs=tuple(programs))
    return _with_more(draw, module)


def _with_more(draw: st.DrawFn, module: Module) -> Module:
    level = module.level
    for field, table in (("stages", tables.STAGE), ("cascades", tables.CASCADE)):
        for place, node in enumerate(getattr(module, field)):

            def module_with(more: object, *, whole: Module = module, field: str = field, place: int = place) -> Module:
                return replace(whole, **{field: changed(getattr(whole, field), place, more)})

            module = module_with(_agreeing(draw, table, level, node, module_with))
    return _agreeing(draw, tables.MODULE, level, module, lambda more: more)


def changed(items: tuple[object, ...], place: int, item: object) -> tuple[object, ...]:
    return (*items[:place], item, *items[place + 1 :])
