"""The optimizer: AdamW as torch's own, clipping, master copies, averages."""

from __future__ import annotations

import torch
from torch import nn

from arachnec.checkpoint.parts import part_of
from arachnec.executable.training_options import Training
from arachnec.model_state.optimizer import Optimizer, global_norm


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 5).to(dtype)


def give_gradients(module: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in module.parameters():
        value.grad = (scale * torch.randn(value.shape, generator=generator)).to(value.dtype)


def test_fp32_without_clipping_is_torchs_adamw() -> None:
    ours, theirs = model(), model()
    optimizer = Optimizer(dict(ours.named_parameters()), Training(lr=1e-2, clip_norm=0))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    for seed in range(3):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        optimizer.step()
        reference.step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


def test_a_gradient_longer_than_the_limit_is_scaled_to_it_as_a_whole() -> None:
    ours, theirs = model(), model()
    optimizer = Optimizer(dict(ours.named_parameters()), Training(lr=1e-2, clip_norm=0.5))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    for seed in range(3):
        give_gradients(ours, seed, 10.0)
        give_gradients(theirs, seed, 10.0)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert abs(float(optimizer.step()) - float(norm)) < 1e-4
        reference.step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def test_bf16_parameters_are_rounded_from_fp32_masters_that_keep_small_updates() -> None:
    module = model(torch.bfloat16)
    parameters = dict(module.named_parameters())
    optimizer = Optimizer(parameters, Training(lr=1e-5, clip_norm=0, dtype="bf16"))
    before = {name: value.detach().clone() for name, value in parameters.items()}
    state = optimizer.tensors()
    masters = {name: part_of(state[f"master/{name}"]).values.view_as(value) for name, value in parameters.items()}
    for _ in range(400):
        for value in module.parameters():
            value.grad = torch.ones_like(value)
        optimizer.step()
    for name, value in parameters.items():
        assert masters[name].dtype is torch.float32
        # 400 steps of 1e-5: each is below half a unit in the last place of bf16 near 0.4, their sum is not.
        assert (before[name].float() - masters[name]).min() > 3.5e-3
        torch.testing.assert_close(value, masters[name].to(torch.bfloat16), rtol=0, atol=0)


def test_the_average_follows_the_masters_by_its_decay() -> None:
    module = model()
    optimizer = Optimizer(dict(module.named_parameters()), Training(lr=1e-2, ema=0.9))
    expected = module.weight.detach().clone()
    for seed in range(4):
        give_gradients(module, seed)
        optimizer.step()
        expected = 0.9 * expected + 0.1 * module.weight.detach()
    torch.testing.assert_close(optimizer.ema["weight"], expected)


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    module = model()
    optimizer = Optimizer(dict(module.named_parameters()), Training(lr=1e-2))
    before = module.bias.detach().clone()
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    torch.testing.assert_close(module.bias, before, rtol=0, atol=0)


def test_the_norm_of_no_gradients_is_zero() -> None:
    assert global_norm({}) == 0.0
