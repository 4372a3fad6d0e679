"""What is said once of the instructions of a stage: whether they wait for its gradients."""

from arachnec.analysis.uses import READS_GRADIENTS
from arachnec.ir.nodes import STAGE_OPS

READ_NONE = {"gather", "reduce", "replan"}


def test_every_instruction_of_a_stage_is_known_to_read_whole_gradients_or_none() -> None:
    new = set(STAGE_OPS) - READ_NONE - set(READS_GRADIENTS)
    assert not new, f"{new} runs before gradients are all-reduced, unless READS_GRADIENTS has it; if right, add it here"
    assert set(STAGE_OPS) >= READ_NONE | set(READS_GRADIENTS)
