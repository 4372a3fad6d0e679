"""The executor on several gloo ranks: what it computes is what one process computes."""

from __future__ import annotations

from pathlib import Path

import torch

from arachnec.data.clip import VideoClip
from arachnec.models.batch import clip_generator
from arachnec.models.file import load_model_file
from tests.distributed.executor_cases import Work, assert_same_gradients, clip, executable, losses, run

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 1, 24, 16), clip("e", 7))


def plain_loop(folder: Path, clips: tuple[VideoClip, ...], seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """The objective and its gradients, written without anything of the executor: one clip at a time."""
    model_file = load_model_file(folder / "model.py")
    torch.manual_seed(seed)
    model = model_file.build()
    total = 0.0
    for each in clips:
        kwargs, target = model_file.sample(each, clip_generator(seed, 0, each.id))
        loss = model_file.loss(model(**kwargs), target) / len(clips)
        loss.backward()
        total += float(loss.detach())
    return total, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def test_a_plan_of_degree_one_over_two_ranks_has_the_gradients_of_a_plain_loop(tmp_path: Path) -> None:
    works = [Work((0, 1), (0,), 0.0), Work((2,), (1,), 0.0), Work((3,), (0,), 1.0), Work((4,), (1,), 1.0)]
    folder = executable(tmp_path / "build", [CLIPS], works, 2)
    result = run(folder, "--save-gradients", tmp_path / "g.safetensors", "--report", tmp_path / "r.json")
    assert result.returncode == 0, result.stderr
    loss, gradients = plain_loop(folder, CLIPS)
    assert abs(losses(tmp_path / "r.json")[0] - loss) <= 1e-6 * abs(loss)
    assert_same_gradients(tmp_path / "g.safetensors", gradients)
