"""What ranks send each other in cascades and between iterations, and how long it takes, the optimizer's step too.

Ulysses all-to-all (arXiv 2309.14509, section 3), ring attention (arXiv 2310.01889), the gather behind the last block;
each alpha-beta over the links that its groups really use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from arachnec.cluster.device_specs import copy_speed, find_device_specs, update_bandwidth
from arachnec.cluster.topology import Link, group_link, machines, packed_ranks, penalty, ring_link, ulysses_link
from arachnec.cost.compute import Share, is_divided, passes_of, shares
from arachnec.cost.memory import GIB
from arachnec.cost.sparse_attention import NO_LOAD, SparseLoad, SparseLoads
from arachnec.cost.strategy import Attention
from arachnec.ir.host_placement import layers_in_host, optimizer_in_host
from arachnec.ir.nodes import Cascade, Cluster, Phase, Stage, integer, quantity
from arachnec.ir.parameter_cells import cell_of, layer_sizes
from arachnec.ir.sampling import CODING, as_forward, branches_of, planned_steps
from arachnec.ir.stage_sizes import (
    count_in,
    element_bytes,
    evaluated,
    gib,
    gradient_bytes,
    gradient_element_bytes,
    token_bytes,
    trained_count,
)


@dataclass(frozen=True)
class Volumes:
    """Of one cascade, over all its forwards and backwards; bytes are those of one rank."""

    ulysses: int
    ring: int
    traded: float = 0.0  # bytes in all-to-alls of ``ulysses`` ranks, what stays on the rank included
    trades: float = 0.0  # all-to-alls
    passed: float = 0.0  # bytes handed to the next rank of the ring
    hops: float = 0.0  # times that it hands something on
    gathered: float = 0.0  # bytes of whole tensors gathered from all ranks
    gathers: float = 0.0
    dealt: float = (
        0.0  # bytes in all-to-alls of all ranks (heads of sparse layers, frames and places); of the rank that gets most
    )
    deals: float = 0.0

    @property
    def degree(self) -> int:
        return self.ulysses * self.ring

    @property
    def messages(self) -> float:
        """Latencies that follow one another."""
        return self.trades * _steps(self.ulysses) + self.hops + (self.gathers + self.deals) * _steps(self.degree)

    @property
    def moved(self) -> float:
        """Bytes that leave a rank."""
        whole = (self.gathered + self.dealt) * _share_sent(self.degree)
        return self.traded * _share_sent(self.ulysses) + self.passed + whole


def volumes(
    *,
    ulysses: int,
    ring: int,
    heads: int,
    attentions: int,
    traffic: float,
    forward: float,
    backward: float,
    output: float | None = None,
    sparse: SparseLoad = NO_LOAD,
    exchanged: float = 0.0,
    exchanges: int = 0,
    most: Share | None = None,
) -> Volumes:
    """Of ``forward`` forwards and ``backward`` backwards.

    ``traffic`` are the GiB of q, k, v and the output over all ``attentions`` of one forward, ``output`` the bytes of
    what the last block gives; where that is not known, those of one attention's output are taken. The ``sparse`` layers
    take no part in all-to-alls of heads by number and in the ring: queries, keys and values go to who computes them.
    ``exchanged`` are the GiB of tokens that factorised attention deals out anew, in so many ``exchanges``. ``most`` is
    the largest share of tokens on a rank, and of an Ulysses group, where they are not even.
    """
    degree = ulysses * ring
    if degree == 1 or not (attentions or exchanges):
        return Volumes(ulysses, ring)
    per_attention = traffic * GIB / max(1, attentions)
    dense, passes = attentions - sparse.layers, forward + backward
    most = most or Share(1 / degree, 1 / ring)
    share = per_attention * dense * most.tokens
    around = (forward + 2 * backward) * (ring - 1)  # backward also carries the gradients of keys and values
    largest = math.ceil(heads / ulysses) / heads * ulysses  # where heads do not divide, one rank trades more
    return Volumes(
        ulysses,
        ring,
        traded=passes * share * largest if ulysses > 1 else 0.0,
        trades=passes * 2 * dense if ulysses > 1 else 0.0,
        passed=around * per_attention * dense * most.queries / ulysses / 2,
        hops=around * dense,
        # the shards of the last block's output are gathered once, and their gradients scattered in backward
        gathered=passes * (per_attention / 4 if output is None else output),
        gathers=passes,
        dealt=passes * (per_attention * sparse.received + exchanged * GIB * most.tokens),
        deals=passes * (2 * sparse.layers + exchanges),
    )


def encoder_volumes(cascade: Cascade, stage: Stage, split: Attention) -> Volumes:
    """Of the ranks of an encoder: its output, and where they divide clips their halos, each an exchange of its own."""
    gathered = evaluated(stage, "output", cascade) * GIB
    if not is_divided(cascade, stage, split.ulysses * split.ring):
        return Volumes(split.ulysses, split.ring, gathered=gathered, gathers=1)
    gathered += evaluated(stage, "halo", cascade) * GIB
    gathers = cascade.batch * (1 + count_in(stage, "exchanges"))
    return Volumes(split.ulysses, split.ring, gathered=gathered, gathers=gathers)


def _largest(shares: Sequence[Share] | None) -> Share | None:
    """The most tokens of a rank, and the most of an Ulysses group."""
    if shares is None:
        return None
    return Share(max(share.tokens for share in shares), max(share.queries for share in shares))


def _steps(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def _share_sent(ranks: int) -> float:
    return (ranks - 1) / ranks


def collective_time(link: Link, size: float, ranks: int, calls: float, contention: float) -> float:
    """ms of ``calls`` collectives in which each rank moves ``size`` bytes in all, less what stays with itself."""
    inside = size * max(link.inside / link.intra, link.hosted / link.host) / 1e9
    outside = size * max(max(link.outside, link.carried) / link.inter * contention, link.shared / link.uplink) / 1e9
    steps = math.ceil(math.log2(ranks)) * calls
    return (inside + outside) * 1e3 + steps * link.latency * 1e-3


def hop_time(link: Link, size: float, calls: float, contention: float) -> float:
    """ms of one step around the ring, summed over ``calls`` attentions; the slowest hop sets the pace."""
    speed = link.inter / contention / max(1.0, link.carried) if link.outside else link.intra
    return (
        size * max(1 / speed, link.hosted / link.host, link.shared / link.uplink) / 1e9 * 1e3
        + calls * link.latency * 1e-3
    )


@dataclass(frozen=True)
class GroupLinks:
    """The links of a cascade's ranks."""

    everyone: Link
    ulysses: Link
    ring: Link
    contention: float


@lru_cache(maxsize=1 << 14)
def links_of(cluster: Cluster, group: tuple[int, ...], ulysses: int) -> GroupLinks:
    """The links of a group, ``ulysses`` of whose ranks trade heads; every layout of a model asks for the same ones."""
    return GroupLinks(
        group_link(cluster, group),
        ulysses_link(cluster, group, ulysses),
        ring_link(cluster, group, ulysses),
        penalty(cluster, group),
    )


@dataclass(frozen=True)
class Communication:
    """Communication times in ms of cascades of these stages on a cluster."""

    stages: Mapping[str, Stage]
    cluster: Cluster
    sparse: SparseLoads
    _links: dict[tuple[object, ...], GroupLinks] = field(default_factory=dict, repr=False, compare=False)
    _sent: dict[tuple[object, ...], tuple[float, float | None, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def time(
        self, cascade: Cascade, degree: int, attention: Attention, recompute: int, ranks: tuple[int, ...] | None
    ) -> float:
        """ms that the cascade's ranks send; without ``ranks`` the first ``degree`` ones."""
        sent = self.volumes(cascade, attention, recompute)
        if not sent.messages:
            return 0.0
        links = self._links_of(degree, ranks, attention.ulysses)
        total = collective_time(links.everyone, sent.gathered, degree, sent.gathers, links.contention)
        total += collective_time(links.everyone, sent.dealt, degree, sent.deals, links.contention)
        total += collective_time(links.ulysses, sent.traded, attention.ulysses, sent.trades, links.contention)
        return total + hop_time(links.ring, sent.passed, sent.hops, links.contention)

    def exchange(self, cascade: Cascade, degree: int, ranks: tuple[int, ...] | None) -> float:
        """ms in which a ``denoise`` whose branches lie on ranks of their own gathers what each predicts, every step."""
        if cascade.phase is not Phase.DENOISE:
            return 0.0
        steps, branches = planned_steps(cascade), branches_of(cascade)
        group = self._group(degree, ranks)
        size = evaluated(self.stages[cascade.stage], "output", cascade) * GIB * branches * steps
        link, contention = group_link(self.cluster, group), penalty(self.cluster, group)
        return collective_time(link, size, branches, steps, contention)

    def volumes(self, cascade: Cascade, attention: Attention, recompute: int) -> Volumes:
        """What each rank of the cascade sends to the others."""
        stage = self.stages[cascade.stage]
        if cascade.phase in CODING:
            return encoder_volumes(cascade, stage, attention)
        forward, backward = passes_of(cascade, stage, recompute)
        cascade = as_forward(cascade)
        traffic, output, exchanged = self._sizes_sent(cascade, stage)
        return volumes(
            ulysses=attention.ulysses,
            ring=attention.ring,
            heads=count_in(stage, "heads") or attention.ulysses,
            attentions=count_in(stage, "attentions"),
            traffic=traffic,
            forward=forward,
            backward=backward,
            output=output,
            sparse=self.sparse.of(cascade, attention.ulysses * attention.ring),
            exchanged=exchanged,
            exchanges=count_in(stage, "exchanges"),
            most=_largest(shares(cascade, attention)),
        )

    def _sizes_sent(self, cascade: Cascade, stage: Stage) -> tuple[float, float | None, float]:
        """GiB of ``traffic``, bytes of the last block's output, GiB of ``halo``, whatever the degree."""
        key = cascade.stage, cascade.batch, cascade.tokens, cascade.text
        if key not in self._sent:
            output = token_bytes(stage, cascade.batch * cascade.tokens)
            self._sent[key] = evaluated(stage, "traffic", cascade), output, evaluated(stage, "halo", cascade)
        return self._sent[key]

    def _links_of(self, degree: int, ranks: tuple[int, ...] | None, ulysses: int) -> GroupLinks:
        key = (degree if ranks is None else ranks, ulysses)
        links = self._links.get(key)
        if links is None:
            links = self._links[key] = links_of(self.cluster, self._group(degree, ranks), ulysses)
        return links

    def _group(self, degree: int, ranks: tuple[int, ...] | None) -> tuple[int, ...]:
        return packed_ranks(self.cluster, degree) if ranks is None else ranks


NORM_BYTES = 8
UPDATED = 28  # bytes that AdamW reads and writes of a parameter: master and moments both, the gradient read
ASSUMED_BANDWIDTH = 1000.0  # GB/s of a device's own memory, where its specs are not known


def reduce_time(cluster: Cluster, stage: Stage, ranks: tuple[int, ...], size: float | None = None) -> float:
    """ms of the all-reduce of a trained stage's gradients over these ranks (ring: 2 (n-1)/n of the bytes).

    Where the optimizer is dealt out it is a reduce-scatter, half of that. Of a stage in cells these are the ranks that
    hold one shard, and its gradients are that shard's. ``size`` is the bytes of a bucket of them; without it they go
    all at once.
    """
    size = gradient_bytes(stage) / (cell_of(stage) or 1) if size is None else size
    if len(ranks) < 2 or not size:
        return 0.0
    link, measured = group_link(cluster, ranks), cluster.attrs.get("all_reduce")
    if measured is not None:
        link = replace(link, intra=quantity(measured))
    summed = ring_passes(stage) * collective_time(link, size, len(ranks), 1, penalty(cluster, ranks))
    # those that lie in host memory are brought, and taken back
    return summed + (2 * size / (copy_speed(cluster) * 1e6) if layers_in_host(stage) else 0.0)


def norm_time(cluster: Cluster, ranks: tuple[int, ...]) -> float:
    """ms of summing one number over these ranks: the squared norm of their gradients."""
    return all_reduce_time(cluster, ranks, NORM_BYTES)


def all_reduce_time(cluster: Cluster, ranks: tuple[int, ...], size: float) -> float:
    """ms of an all-reduce of so many bytes over these ranks, on plain links."""
    if len(ranks) < 2:
        return 0.0
    return 2 * collective_time(group_link(cluster, ranks), size, len(ranks), 1, penalty(cluster, ranks))


def ring_passes(stage: Stage) -> int:
    """How often a ring carries every byte of the gradients: reduce-scatter, and all-gather where all need them."""
    return 1 if "sharded" in stage.attrs and "cell" not in stage.attrs else 2


def gather_time(cluster: Cluster, stage: Stage, ranks: tuple[int, ...], layers: Sequence[int]) -> float:
    """ms of gathering what each of these ranks has updated of these layers, one after another."""
    if len(ranks) < 2:
        return 0.0
    link, contention = group_link(cluster, ranks), penalty(cluster, ranks)
    sizes, cell = layer_sizes(stage), cell_of(stage) or 1
    bytes_of = (sizes[layer].trained * element_bytes(stage) / cell for layer in layers)
    return sum(collective_time(link, size, len(ranks), 1, contention) for size in bytes_of if size)


def step_time(cluster: Cluster, stage: Stage) -> float:
    """ms of the optimizer, which reads and writes the stage's state once."""
    specs = [find_device_specs(name) for name in {machine.device for machine in machines(cluster)}]
    bandwidth = min(device.bandwidth if device else ASSUMED_BANDWIDTH for device in specs)
    if "update" in stage.attrs:  # measured with the whole state on every rank
        return quantity(stage.attrs["update"]) / integer(stage.attrs.get("sharded", 1)) / (cell_of(stage) or 1)
    if optimizer_in_host(stage):
        return host_update_time(cluster, stage)
    return 2 * gib(stage.attrs.get("state")) * GIB / (bandwidth * 1e9) * 1e3


def host_update_time(cluster: Cluster, stage: Stage) -> float:
    """ms of an optimizer on the hosts' processors, whose memory bounds it; all ranks of a node update at once.

    Gradients that lie on the device are copied out before, and the parameters back in.
    """
    own = trained_count(stage) / integer(stage.attrs.get("sharded", 1)) / (cell_of(stage) or 1)
    update = own * UPDATED * cluster.gpus / (update_bandwidth(cluster) * 1e6)
    if layers_in_host(stage):
        return update
    return update + own * (gradient_element_bytes(stage) + element_bytes(stage)) / (copy_speed(cluster) * 1e6)
