"""A run with other options than it was compiled with: what they take more, held to every program's free memory."""

from __future__ import annotations

from arachnec.analysis.memory import high_water
from arachnec.analysis.uses import Values
from arachnec.backends.cascade_step import build_model
from arachnec.backends.torch_distributed.weights.shared_weights import META
from arachnec.cluster.topology import machines, node_of
from arachnec.executable.folder import Executable
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Module
from arachnec.models.file import ModelFile
from arachnec.optimizers.proved_state import more_state

OF_STATE = ("dtype", "ema", "optimizer", "groups")


def state_beyond_plan(executable: Executable, model_file: ModelFile, training: Training) -> float:
    """GiB of state that these options take on a rank beyond those of the executable; 0 where they are the same."""
    compiled = executable.training
    if all(getattr(compiled, name) == getattr(training, name) for name in OF_STATE):
        return 0.0
    before, after = ((build_model(model_file, options, META), options) for options in (compiled, training))
    return more_state(model_file, before, after)


def demand_room(module: Module, more: float) -> None:
    """Raises ``UserError`` where some rank has less left than ``more`` GiB."""
    if not more or module.cluster is None:
        return
    values, nodes = Values(module), machines(module.cluster)
    for program in module.programs:
        free = nodes[node_of(module.cluster, program.rank)].memory - high_water(values, program).total
        if free < more:
            dtypes = ", ".join(str(stage.attrs.get("dtype")) for stage in module.stages if stage.trained)
            raise user_error(
                f"the options of this run take {more:.2f} GiB more than was proved: rank {program.rank} has "
                f"{free:.2f} GiB left",
                help=(
                    "compile again with the same --train and --set, so that the plan leaves room for them; the "
                    f"executable was compiled for {dtypes}"
                ),
            )
