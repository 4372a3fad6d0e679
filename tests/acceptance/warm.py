"""What the processes of these tests import."""

from tests.distributed.executor_cases import RUNS

EVERYTHING = (
    *RUNS,
    "diffusers.models.transformers",
    "triton",
    "torch._dynamo",
    "torch.profiler",
    "torch.distributed.run",
    "arachnec.driver",
    "arachnec.commands.compile",
    "arachnec.models.diffusers.wan",
    "arachnec.passes.trace",
    "arachnec.passes.schedule_z3",
    "arachnec.executable.folder",
    "arachnec.codegen.fused_block",
)
