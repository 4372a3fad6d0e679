"""What of a stage lies in the hosts' memory, and the bytes of it that come and go. In: a stage. Out: facts of it.

``host`` lists what lies there: the optimizer's state, parameters and gradients, inputs of blocks that run again.
Each comes with those before it.
"""

from __future__ import annotations

from arachnec.ir.nodes import Stage
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.stage_sizes import gradient_element_bytes, trained_count

OPTIMIZER, PARAMETERS, INPUTS = PLACED = ("optimizer", "parameters", "inputs")
IN_FLIGHT = 2  # blocks whose inputs are on the device: of one that runs, and of one on its way
HOST = "host"  # the place


def in_host(stage: Stage) -> tuple[str, ...]:
    """What of a stage lies in host memory."""
    listed = stage.attrs.get("host", ())
    return tuple(str(name) for name in listed) if isinstance(listed, tuple) else ()


def optimizer_in_host(stage: Stage) -> bool:
    return OPTIMIZER in in_host(stage)


def layers_in_host(stage: Stage) -> bool:
    """Whether parameters and gradients lie there, and come and go with every cascade."""
    return PARAMETERS in in_host(stage)


def inputs_in_host(stage: Stage) -> bool:
    """Whether the inputs of blocks that run again do."""
    return INPUTS in in_host(stage)


def own_gradient_bytes(stage: Stage) -> float:
    """Bytes of a rank's gradients: what it takes back in each backward where they lie in its host."""
    return trained_count(stage) * gradient_element_bytes(stage) / (cell_of(stage) or 1)
