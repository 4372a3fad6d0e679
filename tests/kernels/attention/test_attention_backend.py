"""The kernel family follows from what a device can run, and a preference counts where it can be kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from arachnec.kernels.attention.attention_backend import PREFERENCE, Capability, attention_backend
from arachnec.kernels.attention.fused_attention import OF_SDPA, capability_of, sdpa_preferring

CPU = Capability("cpu")
A100 = Capability("cuda", (8, 0), cudnn=True)
H100 = Capability("cuda", (9, 0), cudnn=True)
H100_FA3 = Capability("cuda", (9, 0), cudnn=True, flash3=True)
H100_BARE = Capability("cuda", (9, 0))
V100 = Capability("cuda", (7, 0), cudnn=True)


@pytest.mark.parametrize(
    ("capability", "dtype", "head", "masked", "wanted"),
    [
        (CPU, "f32", 128, False, "cpu-flash"),
        (CPU, "bf16", 7, True, "cpu-flash"),
        (A100, "bf16", 128, False, "flash2"),
        (A100, "bf16", 128, True, "efficient"),
        (A100, "f32", 128, False, "efficient"),
        (A100, "f64", 128, False, "math"),
        (A100, "bf16", 12, False, "math"),
        (A100, "bf16", 264, False, "efficient"),
        (H100, "bf16", 128, False, "cudnn"),
        (H100, "f16", 64, False, "cudnn"),
        (H100, "bf16", 256, False, "flash2"),
        (H100, "bf16", 128, True, "efficient"),
        (H100_FA3, "bf16", 128, False, "flash3"),
        (H100_FA3, "bf16", 256, False, "flash3"),
        (H100_FA3, "bf16", 128, True, "efficient"),
        (H100_BARE, "bf16", 128, False, "flash2"),
        (V100, "f16", 64, False, "efficient"),
        (Capability("mps"), "bf16", 64, False, "math"),
    ],
)
def test_the_best_family_that_a_device_runs(
    capability: Capability, dtype: str, head: int, masked: bool, wanted: str
) -> None:
    assert attention_backend(capability, dtype, head, masked=masked) == wanted


def test_heads_of_values_of_another_size_take_a_kernel_that_has_them() -> None:
    assert attention_backend(H100, "bf16", 128, value_size=64) == "efficient"
    assert attention_backend(CPU, "f32", 128, value_size=64) == "math"


def test_a_preference_is_kept_where_the_device_can_and_else_the_best_is_taken() -> None:
    assert attention_backend(H100, "bf16", 128, preferred="flash2") == "flash2"
    assert attention_backend(H100, "bf16", 128, preferred="math") == "math"
    assert attention_backend(H100, "bf16", 128, preferred="flash3") == "cudnn"
    assert attention_backend(H100_FA3, "bf16", 128, preferred="flash2") == "flash3", "it stands in for flash2"
    assert attention_backend(H100, "bf16", 128, masked=True, preferred="cudnn") == "efficient"
    assert attention_backend(CPU, "f32", 128, preferred="cudnn") == "cpu-flash"


def test_the_cpu_is_known_to_be_one() -> None:
    assert capability_of(torch.device("cpu")) == CPU


@pytest.mark.parametrize("family", PREFERENCE)
def test_torch_s_own_attention_prefers_the_family_and_keeps_all_others(family: str) -> None:
    before = _cur_sdpa_kernel_backends(with_priority=True)
    query = torch.randn(1, 2, 5, 8)
    with sdpa_preferring(family):
        inside = _cur_sdpa_kernel_backends(with_priority=True)
        F.scaled_dot_product_attention(query, query, query)
    assert inside[0] == OF_SDPA[family]
    kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    assert set(inside) >= set(kinds)
    assert _cur_sdpa_kernel_backends(with_priority=True) == before
