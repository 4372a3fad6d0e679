"""The kernel family of attention that a forward's instruction names."""

from __future__ import annotations

from collections.abc import Sequence

from arachnec.cluster.device_specs import find_device_specs
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Cascade, Cluster, Instruction, Phase, Stage
from arachnec.kernels.attention.attention_backend import PREFERENCE, Capability, attention_backend


def demand_known(name: object, node: Cascade | Instruction) -> None:
    """Raises UserError, at the node, for a name that no kernel family has."""
    if name not in PREFERENCE:
        raise user_error(
            f"there is no attention back end `{name}`",
            help=f"write one of {', '.join(PREFERENCE)}, or leave `attention` out",
            span=node.attrs.span("attention") or node.span,
        )


def with_attention(
    cascades: Sequence[Cascade], stages: Sequence[Stage], cluster: Cluster, wanted: str | None
) -> tuple[Cascade, ...]:
    """The cascades, each that has a forward with the kernel family of its attention.

    A cascade keeps what it names. The others get ``wanted``, or the best that the cluster's device runs, the same for
    all grids of a stage. None gets any where the stage does not say its heads, or the cluster mixes devices or has one
    that is not known: the run chooses then.
    """
    capability = _capability(cluster)
    names = {stage.name: wanted or _best(stage, capability) for stage in stages}
    return tuple(_named(cascade, names[cascade.stage]) for cascade in cascades)


def _named(cascade: Cascade, name: str | None) -> Cascade:
    if cascade.phase not in (Phase.TRAIN, Phase.FORWARD, Phase.DENOISE):
        return cascade
    if "attention" in cascade.attrs:
        demand_known(cascade.attrs["attention"], cascade)
        return cascade
    return cascade if name is None else cascade.with_attrs(attention=name)


def _best(stage: Stage, capability: Capability | None) -> str | None:
    size = head_size(stage)
    if size is None or capability is None:
        return None
    return attention_backend(capability, str(stage.attrs.get("dtype", "f32")), size)


def head_size(stage: Stage) -> int | None:
    """Elements of one head; None where the stage does not say its width and heads, or has no self-attention."""
    hidden, heads = stage.attrs.get("hidden"), stage.attrs.get("heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or stage.attrs.get("attentions") == 0:
        return None
    return hidden // heads


def _capability(cluster: Cluster) -> Capability | None:
    specs = find_device_specs(str(cluster.attrs.get("device")))
    if specs is None or "mixed" in cluster.attrs:
        return None
    return Capability("cpu") if specs.name == "cpu" else Capability("cuda", specs.compute, cudnn=True)
