"""How fast modules print, parse and verify: ``python benchmarks/ir_speed.py [CASCADES]`` (10,000 unless told).

Prints processor seconds, the best of three.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from arachnec.ir.nodes import Cascade, Clip, Cluster, Level, Module, Phase, Reduce, Stage, Step
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.ir.verify import verify


def placed_module(count: int) -> Module:
    """A placed iteration of ``count`` train cascades on 8 of 1,024 ranks each."""
    world = 1024
    cluster = Attributes.of(
        nodes=world // 8,
        gpus=8,
        device="h100-80g",
        memory=Quantity(80, "GiB"),
        flops=Quantity(400, "TFLOP/s"),
        intra=Quantity(450, "GB/s"),
        inter=Quantity(50, "GB/s"),
        latency=Quantity(3, "us"),
        inter_latency=Quantity(10, "us"),
    )
    time_of = Formula((Term(1.9e-9, (("B", 1), ("S", 2))), Term(2.4e-5, (("B", 1), ("S", 1))), Term(1.1)), "ms")
    cascades = []
    for number in range(count):
        node, turn = number % (world // 8), number // (world // 8)
        attrs = Attributes.of(
            degree=8,
            start=Quantity(100.125 * turn, "ms"),
            end=Quantity(100.125 * (turn + 1), "ms"),
            ranks=tuple(range(8 * node, 8 * node + 8)),
            ulysses=4,
            ring=2,
        )
        cascades.append(Cascade(str(number), Phase.TRAIN, "dit", (number,), 1, 32760, 226, (), attrs))
    ends = Quantity(100.125 * (count // (world // 8) + 1), "ms")
    return Module(
        name="speed",
        level=Level.PLACED,
        cluster=Cluster("pod", cluster),
        clips=tuple(Clip(number, 81, 480, 832, 226, 32760) for number in range(count)),
        stages=(Stage("dit", True, Attributes.of(forward=time_of, backward=time_of, costs="device specs")),),
        cascades=tuple(cascades),
        reductions=(Reduce("dit", tuple(cascade.name for cascade in cascades)),),
        steps=(Step("dit"),),
        attrs=Attributes.of(makespan=ends, bound=ends, proved=False),
    )


def seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def main(count: int) -> None:
    module = placed_module(count)
    text = print_module(module)
    assert parse_module(text) == module
    assert verify(module) == ()
    print(f"{count} cascades, {len(text) / 1e6:.2f} MB")
    print(f"print   {seconds(lambda: print_module(module)):6.2f} s")
    print(f"parse   {seconds(lambda: parse_module(text)):6.2f} s")
    print(f"verify  {seconds(lambda: verify(module)):6.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
