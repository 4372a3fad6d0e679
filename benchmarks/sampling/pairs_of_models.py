"""Pairs of models that the benchmarks of sampling plan with: FLOPs by formula, so that a table can be checked by hand.

Of a transformer of width h and L layers, one forward of S tokens takes L ((8 + 4 f / h) S h^2 + 4 S^2 h) FLOP, text
apart (f is the width of the feed-forward layer). At 81 x 480 x 832, 32,760 tokens, that is 1525.0 and 270.5 TFLOP for
Wan2.1's 14B and 1.3B; at CogVideoX's 17,776 tokens 332.2 and 120.0 for its 5B and 2B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arachnec.cluster.file import parse_cluster
from arachnec.data.requests import Request
from arachnec.ir.nodes import Module, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.planning.sampling.requests import SwitchForecast, sampling_module

GIB, BYTES = 2**30, 2  # of a bf16 number
LATENTS = 16 * 4 * 4  # bytes of a token's latents: 16 channels, patches of 2 x 2, fp32


@dataclass(frozen=True)
class Transformer:
    """A model's width, layers, heads, feed-forward width, and parameters."""

    name: str
    hidden: int
    layers: int
    heads: int
    feed_forward: int
    params: float

    def tflop(self, tokens: int) -> float:
        """Of one forward."""
        linear = (8 + 4 * self.feed_forward / self.hidden) * tokens * self.hidden**2
        return self.layers * (linear + 4 * tokens**2 * self.hidden) / 1e12

    def stage(self) -> Stage:
        """As it samples in bf16: its parameters, one block's tensors, and its attention's traffic."""
        width, layers = self.hidden, self.layers
        linear = layers * (8 + 4 * self.feed_forward / width) * width**2 / 1e12
        tensors = (8 * width + 2 * self.feed_forward) * BYTES / GIB
        return Stage(
            self.name,
            False,
            Attributes.of(
                params=int(self.params),
                dtype="bf16",
                hidden=width,
                heads=self.heads,
                attentions=layers,
                flops=formula("TFLOP", (layers * 4 * width / 1e12, 2), (linear, 1)),
                workspace=formula("GiB", (tensors, 1)),
                traffic=formula("GiB", (layers * 4 * width * BYTES / GIB, 1)),
                output=formula("GiB", (LATENTS / GIB, 1)),
                state=Quantity(self.params * BYTES / GIB, "GiB"),
            ),
        )


def formula(unit: str, *terms: tuple[float, int]) -> Formula:
    """Coefficients of B S^n."""
    return Formula(tuple(Term(c, (("B", 1), ("S", power))) for c, power in terms), unit)


@dataclass(frozen=True)
class Pair:
    """A large and a small model of one latent space, and the tokens of a video of theirs."""

    large: Transformer
    small: Transformer
    tokens: int

    @property
    def ratio(self) -> float:
        """FLOPs of a step of the large one over one of the small one."""
        return self.large.tflop(self.tokens) / self.small.tflop(self.tokens)

    def allowed(self, steps: int, large: float) -> float:
        """Speed-up over the large model alone where so many of the steps are its own, by FLOPs."""
        return steps / (large + (steps - large) / self.ratio)


WAN = Pair(
    Transformer("wan_14b", 5120, 40, 40, 13824, 14.29e9), Transformer("wan_1_3b", 1536, 30, 12, 8960, 1.42e9), 32_760
)
COGVIDEOX = Pair(
    Transformer("cogvideox_5b", 3072, 42, 48, 12288, 5.57e9),
    Transformer("cogvideox_2b", 1920, 30, 30, 7680, 1.69e9),
    17_776,
)
PAIRS = {"wan2_1": WAN, "cogvideox": COGVIDEOX}


def tokens_of(request: Request) -> int:
    """For a VAE of stride 4, 8, 8 and patches of 1, 2, 2."""
    return ((request.frames - 1) // 4 + 1) * (request.height // 16) * (request.width // 16)


def module_of(pair: Pair, requests: Sequence[Request], cluster: str, large: int, tokens: int | None = None) -> Module:
    """Requests whose first so many steps are the large model's; ``tokens`` of each, else by its size."""
    return sampling_module(
        requests,
        (lambda request: tokens) if tokens else tokens_of,
        (pair.large.stage(), pair.small.stage()),
        (pair.large.name, pair.small.name),
        parse_cluster(cluster),
        switch=f"fixed={large}",
        forecasts=[SwitchForecast.fixed(min(large, request.steps)) for request in requests],
    )
