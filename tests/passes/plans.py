"""Placed modules with random cascades, degrees and ranks, for the tests of what comes after placing."""

from __future__ import annotations

from hypothesis import strategies as st

from arachnec.ir.nodes import Cascade, Clip, Cluster, Level, Module, Phase, Reduce, Stage, Step
from arachnec.ir.values import Attributes, Formula, Quantity, Term


def cluster(nodes: int = 1, gpus: int = 4, memory: float = 80.0) -> Cluster:
    return Cluster(
        "pod",
        Attributes.of(
            nodes=nodes,
            gpus=gpus,
            device="h100-80g",
            memory=Quantity(memory, "GiB"),
            flops=Quantity(300.0, "TFLOP/s"),
            intra=Quantity(450.0, "GB/s"),
            inter=Quantity(50.0, "GB/s"),
            latency=Quantity(10.0, "us"),
            inter_latency=Quantity(20.0, "us"),
        ),
    )


def linear(coefficient: float, unit: str) -> Formula:
    return Formula((Term(coefficient, (("B", 1), ("S", 1))),), unit)


VAE = Stage(
    "vae",
    False,
    Attributes.of(
        state=Quantity(1.0, "GiB"), output=linear(1e-6, "GiB"), forward=linear(1e-3, "ms"), costs="device specs"
    ),
)
DIT = Stage(
    "dit",
    True,
    Attributes.of(
        params=1_000_000,
        state=Quantity(12.0, "GiB"),
        forward=linear(1e-2, "ms"),
        backward=linear(2e-2, "ms"),
        costs="device specs",
    ),
)


def equal_clips(count: int = 1) -> list[Clip]:
    """Clips of 1000 tokens, numbered from 0."""
    return [Clip(number, 17, 480, 832, 0, 1000) for number in range(count)]


def timed(name: str, phase: Phase, clip: int, tokens: int, inputs: tuple[str, ...], when: tuple[float, float],
          ranks: tuple[int, ...]) -> Cascade:  # fmt: skip
    attrs = Attributes.of(
        degree=len(ranks),
        start=Quantity(when[0], "ms"),
        end=Quantity(when[1], "ms"),
        memory=Quantity(1.0 if phase is Phase.ENCODE else 20.0, "GiB"),
        ranks=ranks,
    )
    return Cascade(name, phase, "vae" if phase is Phase.ENCODE else "dit", (clip,), 1, tokens, 0, inputs, attrs)


def module_of(pod: Cluster, clips: list[Clip], cascades: list[Cascade]) -> Module:
    makespan = max(cascade.end for cascade in cascades)
    figures = Attributes.of(makespan=Quantity(makespan, "ms"), bound=Quantity(makespan, "ms"), proved=False)
    trained = tuple(c.name for c in cascades if c.phase is Phase.TRAIN)
    reductions = (Reduce("dit", trained),)
    return Module(
        "step",
        Level.PLACED,
        pod,
        tuple(clips),
        (VAE, DIT) if any(cascade.phase is Phase.ENCODE for cascade in cascades) else (DIT,),
        (),
        tuple(cascades),
        reductions,
        (Step("dit"),),
        (),
        figures,
    )


@st.composite
def placed_modules(draw: st.DrawFn, most: int = 8, *, encoders: bool = True) -> Module:
    """Every clip is encoded on some rank, or none is, and trained on some others, each as early as they are free.
    Without ``encoders`` none is."""
    pod = cluster(nodes=draw(st.integers(1, 2)), gpus=draw(st.integers(1, 4)))
    free = [0.0] * pod.world
    clips: list[Clip] = []
    cascades: list[Cascade] = []
    encoded = encoders and draw(st.booleans())
    for number in range(draw(st.integers(1, most))):
        tokens = draw(st.sampled_from((400, 1560, 7800, 32760)))
        clips.append(Clip(number, 17, 480, 832, 0, tokens))
        inputs: tuple[str, ...] = ()
        ready = 0.0
        if encoded:
            rank = draw(st.integers(0, pod.world - 1))
            start, free[rank] = free[rank], free[rank] + tokens * 1e-3
            ready = free[rank]
            cascades.append(timed(f"e{number}", Phase.ENCODE, number, tokens, (), (start, ready), (rank,)))
            inputs = (f"e{number}",)
        ranks = tuple(draw(st.lists(st.integers(0, pod.world - 1), min_size=1, max_size=pod.world, unique=True)))
        start = max(ready, *(free[rank] for rank in ranks))
        end = start + tokens * 3e-2 / len(ranks)
        for rank in ranks:
            free[rank] = end
        cascades.append(timed(f"t{number}", Phase.TRAIN, number, tokens, inputs, (start, end), ranks))
    return module_of(pod, clips, cascades)


@st.composite
def bucket_sizes(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """How many layers each bucket has; they add up to ``layers``, and only the last may be nothing."""
    remaining = layers
    sizes: list[int] = []
    while remaining and draw(st.booleans()):
        sizes.append(draw(st.integers(1, remaining)))
        remaining -= sizes[-1]
    return (*sizes, remaining)
