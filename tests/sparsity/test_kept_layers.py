"""What a checkpoint keeps of sparse layers: read back, and of damaged values one message with place and remedy."""

from __future__ import annotations

import pytest
import torch

from arachnec.checkpoint.class_states import CLASSES, VALUES, ClassState, class_tensor
from arachnec.ir.diagnostic import UserError
from arachnec.ir.head_density import LENGTH_CLASSES, ByLength
from arachnec.model_state.measured_layers import HISTORY, KeptLayer, SparsityHistory, kept_history, kept_layers

NAME = "blocks.0.0"
OWN = ClassState((0.5, 0.9), (0.25, 1.0), (1.0, 0.5))
KNOWN = SparsityHistory([0, 1], [{7: ByLength((0.5, 0.25))}] * 2)


def tensors() -> dict[str, torch.Tensor]:
    return {
        f"predictor/layer/{NAME}": torch.tensor([0.5, 0.75, 0.5, 0.125, 1.0], dtype=torch.float64),
        f"{HISTORY}spread/{NAME}": torch.tensor([1.0, 0.25]),
        f"{HISTORY}steps": KNOWN.numbers(),
        f"{HISTORY}layer/{NAME}": KNOWN.of_layer(7, 2),
        f"{HISTORY}by-class/{NAME}": KNOWN.of_classes(7, 2),
        f"{CLASSES}{NAME}": class_tensor({1024: OWN}, 2),
    }


def test_what_was_kept_comes_back_and_of_earlier_versions_what_they_kept() -> None:
    kept = KeptLayer((0.5, 0.75), (0.5, 0.125), True, (1.0, 0.25), {1024: OWN})
    assert kept_layers(tensors(), {7: NAME}, "kept") == {7: kept}
    assert kept_history(tensors(), {7: NAME}, "kept") == KNOWN
    oldest = {name: value for name, value in tensors().items() if not name.startswith(HISTORY)}
    assert kept_layers(oldest, {7: NAME}, "kept") == {7: KeptLayer((0.5, 0.75), (0.5, 0.125), True, None, None)}
    assert kept_history(oldest, {7: NAME}, "kept") == SparsityHistory()


OF_CLASS = LENGTH_CLASSES.index(1024) * VALUES * 2


@pytest.mark.parametrize(
    ("tensor", "place", "value", "told"),
    [
        (f"predictor/layer/{NAME}", 1, torch.nan, "is not finite"),
        (f"predictor/layer/{NAME}", 2, 1.5, "has a density that is no share of the keys"),
        (f"predictor/layer/{NAME}", 4, torch.nan, "does not say whether it is sparse"),
        (f"{HISTORY}spread/{NAME}", 0, torch.inf, "is not finite"),
        (f"{CLASSES}{NAME}", OF_CLASS, torch.nan, "is not finite in the class of 1024 tokens"),
        (
            f"{CLASSES}{NAME}",
            OF_CLASS + 3,
            -1.0,
            "has a density that is no share of the keys in the class of 1024 tokens",
        ),
    ],
)
def test_a_damaged_state_is_one_message_with_place_and_remedy(tensor: str, place: int, value: float, told: str) -> None:
    values = tensors()
    values[tensor][place] = value
    with pytest.raises(
        UserError, match=f"the checkpoint kept is damaged: the state of sparse layer `{NAME}` {told}"
    ) as raised:
        kept_layers(values, {7: NAME}, "kept")
    assert "delete this folder" in raised.value.diagnostics[0].help


@pytest.mark.parametrize(("place", "value"), [(0, -1), (2, 0)])
def test_a_damaged_history_is_one_message(place: int, value: int) -> None:
    values = tensors()
    values[f"{HISTORY}steps"][place] = value
    with pytest.raises(UserError, match="the history of sparse layers has no ascending numbers of steps"):
        kept_history(values, {7: NAME}, "kept")
