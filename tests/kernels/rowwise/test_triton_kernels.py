"""The Triton kernels against float64, in Triton's interpreter."""

import pytest

from tests.kernels.triton_interpreter import in_interpreter

ROUNDING = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.6e-2}


@pytest.mark.parametrize(
    ("kernels", "part"),
    [
        ("interpreted_norm", (0, 2)),
        ("interpreted_norm", (1, 2)),
        ("interpreted_rope", ()),
        ("interpreted_gelu", ()),
        ("interpreted_gate", ()),
        ("sparse.interpreted_sparse", ()),
    ],
)
def test_every_output_and_gradient_is_that_of_float64_to_the_rounding_of_its_storage(
    kernels: str, part: tuple[int, ...]
) -> None:
    cases = in_interpreter(f"tests.kernels.{kernels}", *part)
    wrong = {
        f"{case}: {name}": error
        for case, errors in cases.items()
        for name, error in errors.items()
        if not error <= next(bound for dtype, bound in ROUNDING.items() if dtype in case.split())
    }
    assert cases and not wrong
