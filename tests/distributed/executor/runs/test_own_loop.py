"""A loop of one's own: the steps of an engine are those of a plain PyTorch loop, on any number of ranks."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import cluster_for
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError, render
from arachnec.models.batch import clip_generator
from arachnec.models.file import load_model_file
from arachnec.models.given_module import with_own_optimizer
from arachnec.optimizers.own_scripts import own_schedule
from tests.distributed.executor_cases import MODEL, QUICK, captured_once
from tests.distributed.harness import run_ranks

ROOT = Path(__file__).parents[4]
SIZES = {"a": 3, "b": 5, "c": 3, "d": 5, "e": 1, "f": 4}
BATCHES = (("a", "b"), ("c", "d"), ("e", "f"), ("b", "a"))


def own_loop() -> Any:
    """The example, imported as a script that runs beside its model."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.append(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location("own_loop", ROOT / "examples" / "own_loop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_losses_are_those_of_a_plain_loop_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    rows = run_ranks(2, _example, tmp_path)
    plain = _plain_example()
    for losses, resumed, reused in rows:
        assert losses == pytest.approx(plain[:3], rel=1e-5)
        assert resumed == pytest.approx(plain[3:], rel=1e-5)
        assert reused == 2  # all four batches have the same shapes; the first is the one that was compiled


def _example(folder: Path) -> tuple[list[float], list[float], int]:
    example = own_loop()
    with captured_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.arachnec, "Engine", partial(example.arachnec.Engine, passes=QUICK))
        first = example.train(folder / "checkpoints", steps=3)
        second = example.train(folder / "checkpoints", steps=3)
    return [s.loss for s in first.steps], [s.loss for s in second.steps], first.plans_reused


def test_a_skipped_step_has_every_metric_and_its_loss_and_norm_are_nan(tmp_path: Path) -> None:
    for skipped, taken in run_ranks(2, _skips, tmp_path):
        assert skipped.keys() == taken.keys()
        assert {name for name, value in skipped.items() if math.isnan(value)} == {"loss", "gradient_norm"}
        assert not any(math.isnan(value) for value in taken.values())


def _skips(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    example = own_loop()

    class NotFinite(example.Latents):  # type: ignore[misc]
        def __getitem__(self, index: int) -> dict[str, Any]:
            item: dict[str, Any] = super().__getitem__(index)
            return item | {"latents": item["latents"] * math.nan} if index == 0 else item

    engine = example.arachnec.Engine(
        example.VideoDiT(width=48, heads=4, layers=2),
        example.DataLoader(NotFinite(), batch_size=3, collate_fn=list),
        sample=example.sample,
        loss=example.loss,
        passes=QUICK,
    )
    with captured_once():
        skipped, taken = (dict(step.metrics) for step in engine)
    return skipped, taken


def _plain_example() -> list[float]:
    """The example's six steps in PyTorch alone: one clip at a time, the mean of their losses."""
    example = own_loop()
    torch.manual_seed(0)
    model = example.VideoDiT(width=48, heads=4, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data, losses = example.Latents(), []
    for step in range(6):
        items = [data[(3 * step + k) % 6] for k in range(3)]
        optimizer.zero_grad()
        total = 0.0
        for item in items:
            sizes = item["frames"], item["height"], item["width"]
            clip = VideoClip(item["id"], *sizes, 6, item["caption"], values={"latents": item["latents"]})
            kwargs, target = example.sample(clip, clip_generator(0, step, clip.id))
            loss = example.loss(model(**kwargs), target) / len(items)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses


@dataclass
class Counted:
    """An iterable dataset that can say where it stands."""

    place: int = 0

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while self.place < len(BATCHES):
            self.place += 1
            yield [_item(name) for name in BATCHES[self.place - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def _item(name: str) -> dict[str, Any]:
    return {"id": name, "frames": SIZES[name], "height": 16, "width": 16, "text_tokens": 0}


def test_an_iterator_ends_the_run_and_is_replayed_or_says_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    ranks = run_ranks(2, _iterators, tmp_path)
    for whole, replayed, stated, other in ranks:
        assert whole == pytest.approx(ranks[0][0])
        assert len(whole) == len(BATCHES)
        assert replayed == pytest.approx(whole[2:])
        assert stated == pytest.approx(whole[2:])
        assert "other clips" in other


def _iterators(folder: Path) -> tuple[Any, ...]:
    from arachnec.backends.torch_distributed.engine import Engine

    def losses(batches: Any, **options: Any) -> list[float]:
        engine = Engine(folder / "model.py", batches, passes=QUICK, seed=3, **options)
        return [step.loss for step in engine]

    def drawn(names: Any = BATCHES) -> Any:
        return ([_item(name) for name in batch] for batch in names)

    with captured_once():
        whole = losses(drawn())
        replayed, stated = folder / "replayed", folder / "stated"
        losses(drawn(), steps=2, checkpoint=replayed)
        losses(Counted(), steps=2, checkpoint=stated)
        try:
            losses(drawn(BATCHES[::-1]), checkpoint=folder / "replayed", resume=True)
            told = ""
        except UserError as error:
            told = render(error.diagnostics[0])
        rest = losses(drawn(), checkpoint=replayed, resume=True)
        said = losses(Counted(), checkpoint=stated, resume=True)
    return whole, rest, said, told


def test_a_mistake_before_ranks_meet_ends_the_script_with_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from arachnec.backends.torch_distributed.engine import Engine
    from arachnec.launch import own_script

    ended: list[tuple[int, bool]] = []
    monkeypatch.setattr(own_script, "end_process", lambda failure, tells: ended.append((failure.exit_code, tells)))
    for rank, tells in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "excepthook", lambda *_: None)
        with pytest.raises(UserError, match="no option `stepps`") as told:
            Engine("model.py", [], stepps=3)
        sys.excepthook(UserError, told.value, None)
        assert ended.pop() == (2, tells)


@pytest.mark.parametrize(
    ("name", "value"),
    [("checkpoint", 3), ("init", True), ("settings", [3]), ("stall_timeout", 0), ("start_timeout", "1"), ("passes", 3)],
)
def test_an_option_of_another_kind_is_refused_before_ranks_meet(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arachnec.backends.torch_distributed.engine import Engine

    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    with pytest.raises(UserError, match=f"Engine's `{name}` is ") as told:
        Engine("model.py", [], **{name: value})
    assert "help: give a " in render(told.value.diagnostics[0])


def test_a_module_that_was_given_begins_with_the_weights_of_a_folder_where_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    assert run_ranks(2, _begun_with, tmp_path) == [True, True]


def _begun_with(folder: Path) -> bool:
    from safetensors.torch import save_file

    from arachnec.backends.torch_distributed.weights.shared_weights import given_module
    from arachnec.executable.training_options import Training

    file = load_model_file(folder / "model.py")
    stored, own = file.build(), file.build()
    with torch.no_grad():
        for number, parameter in enumerate(stored.parameters()):
            parameter.fill_(number)
    if torch.distributed.get_rank() == 0:
        save_file(stored.state_dict(), folder / "model.safetensors")
    begun = given_module(own, Training(), torch.device("cpu"), folder)
    pairs = zip(begun.parameters(), stored.parameters(), strict=True)
    return begun is own and all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("name", "value"), [("resume", True), ("every", 2)])
def test_what_needs_the_folder_of_checkpoints_is_refused_without_it(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arachnec.backends.torch_distributed.engine import Engine

    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    with pytest.raises(UserError, match=f"`{name}` needs the folder of the checkpoints"):
        Engine("model.py", [], **{name: value})


def test_one_setting_is_a_list_of_one() -> None:
    from arachnec.backends.torch_distributed.engine import run_options

    assert run_options({"settings": "lr=3"}).settings == run_options({"settings": ["lr=3"]}).settings == ("lr=3",)


def test_a_rate_that_is_none_is_told_as_such_and_not_as_one_that_differs() -> None:
    from arachnec.backends.torch_distributed.run.step_account import demand_equal_rates

    for rate in (float("nan"), -0.5):
        with pytest.raises(UserError, match=f"in step 3 the learning rate is {rate:g}"):
            demand_equal_rates(3, [(0.0, rate), (0.0, rate)])
    demand_equal_rates(3, [(0.0, 0.5), (-1.0, float("nan")), (0.0, 0.5)])  # the second rank updates nothing
    with pytest.raises(UserError, match="on rank 1 and 0"):
        demand_equal_rates(3, [(0.0, 0.5), (0.0, 0.25)])


def test_a_function_of_the_script_is_told_as_the_scripts() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer)  # type: ignore[call-arg]

    with pytest.raises(UserError, match=r"the script raised TypeError: .* in scheduler"):
        own_schedule(schedule, torch.optim.SGD([torch.zeros(1)]))


def test_a_cluster_with_other_ranks_than_the_script_has_processes_is_told() -> None:
    from arachnec.backends.torch_distributed.engine import _notes_of_ranks

    machine = parse_cluster("2x8:h100-80g")
    assert _notes_of_ranks(machine, machine) == []
    (note,) = _notes_of_ranks(machine, cluster_for(machine, 1))
    assert note == (
        "the cluster has 16 ranks, and the script runs as 1: planned for 1; torchrun starts a process for each rank"
    )


@pytest.mark.parametrize(("name", "value"), [("steps", -1), ("steps", 0), ("every", 2.5), ("batch", True), ("keep", 0)])
def test_a_count_that_is_none_is_refused_before_ranks_meet(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arachnec.backends.torch_distributed.engine import Engine

    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    with pytest.raises(UserError, match=f"Engine's `{name}` is {value}"):
        Engine("model.py", [], **{name: value})


def test_what_a_dataset_does_wrong_is_one_message_and_what_was_trained_is_kept(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for rank, (message, steps) in enumerate(run_ranks(2, _breaks, tmp_path)):
        assert "the dataset raised OSError: the disk is gone after 4 clips" in message, rank
        assert steps == 2


def _breaks(folder: Path) -> tuple[str, int]:
    from arachnec.backends.torch_distributed.checkpoints import checkpoint
    from arachnec.backends.torch_distributed.engine import Engine

    def batches() -> Iterator[list[dict[str, Any]]]:
        for batch in BATCHES[:2]:
            yield [_item(name) for name in batch]
        raise OSError("the disk is gone")

    with captured_once(), pytest.raises(UserError) as told:
        for _ in Engine(folder / "model.py", batches(), passes=QUICK, checkpoint=folder / "checkpoints"):
            pass
    whole = checkpoint.newest(folder / "checkpoints")
    assert whole is not None
    return render(told.value.diagnostics[0]), whole.position.steps


def test_a_loop_that_is_left_keeps_what_it_trained_and_is_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for whole, left, steps, again, resumed in run_ranks(2, _leaves, tmp_path):
        assert left == pytest.approx(whole[:2])
        assert steps == 2
        assert "this Engine's loop was left after 2 steps" in again
        assert resumed == pytest.approx(whole[2:])


def _leaves(folder: Path) -> tuple[list[float], list[float], int, str, list[float]]:
    from arachnec.backends.torch_distributed.checkpoints import checkpoint
    from arachnec.backends.torch_distributed.engine import Engine

    kept = folder / "checkpoints"

    def engine(**options: Any) -> Any:
        return Engine(folder / "model.py", Counted(), passes=QUICK, seed=3, **options)

    with captured_once():
        whole = [step.loss for step in engine()]
        leaving, losses = engine(checkpoint=kept), []
        for step in leaving:
            losses.append(step.loss)
            if step.number == 1:
                break
        newest = checkpoint.newest(kept)
        assert newest is not None
        with pytest.raises(UserError) as told:
            next(iter(leaving))
        resumed = [step.loss for step in engine(checkpoint=kept, resume=True)]
    return whole, losses, newest.position.steps, render(told.value.diagnostics[0]), resumed


def test_the_loop_may_set_the_learning_rate(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for rates, losses, scheduled in run_ranks(2, _sets_rates, tmp_path):
        assert rates == pytest.approx([0.1, 0.05, 0.025, 0.0125])
        assert losses == pytest.approx(scheduled)


def _sets_rates(folder: Path) -> tuple[list[float], list[float], list[float]]:
    from arachnec.backends.torch_distributed.engine import Engine

    def engine(**options: Any) -> Any:
        return Engine(
            folder / "model.py",
            Counted(),
            passes=QUICK,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            **options,
        )

    rates, losses = [], []
    with captured_once():
        own = engine()
        for step in own:
            rates.append(step.metrics["lr"])
            losses.append(step.loss)
            for group in own.optimizer.param_groups:
                group["lr"] *= 0.5
        scheduled = engine(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        return rates, losses, [step.loss for step in scheduled]


def test_ranks_that_would_update_their_copies_in_other_ways_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for optimizers, rates in run_ranks(2, _drifts, tmp_path):
        assert "rank 1 and rank 0 differ in the optimizer" in optimizers
        assert "in step 1 the learning rate is 0.02 on rank 1 and 0.01 on rank 0" in rates


def _drifts(folder: Path) -> tuple[str, ...]:
    from arachnec.backends.torch_distributed.engine import Engine

    rank = torch.distributed.get_rank()

    def taken(rate: float, factor: float) -> str:
        with pytest.raises(UserError) as told:
            engine = Engine(
                folder / "model.py",
                Counted(),
                passes=QUICK,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
                scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, factor),
            )
            for _ in engine:
                pass
        return render(told.value.diagnostics[0])

    with captured_once():
        return taken(0.1 * (rank + 1), 0.1), taken(0.1, 0.1 * (rank + 1))


def test_several_batches_of_an_update_are_drawn_and_a_resumed_run_goes_on_behind_them(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for whole, resumed, clips in run_ranks(2, _accumulates, tmp_path):
        assert len(whole) == 2
        assert resumed == pytest.approx(whole[1:])
        assert clips == [*"abcd"]


def _accumulates(folder: Path) -> tuple[list[float], list[float], list[Any]]:
    from arachnec.backends.torch_distributed.engine import Engine

    def steps(**options: Any) -> list[Any]:
        batches = ([_item(name) for name in batch] for batch in BATCHES)
        return list(Engine(folder / "model.py", batches, passes=QUICK, settings=["accumulate=2"], **options))

    with captured_once():
        whole = steps()
        steps(steps=1, checkpoint=folder / "checkpoints")
        resumed = steps(checkpoint=folder / "checkpoints", resume=True)
    return [s.loss for s in whole], [s.loss for s in resumed], [clip.id for clip in whole[0].clips]


def test_an_optimizer_that_is_made_already_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(UserError, match="`optimizer` is a SGD, not a function of the parameters"):
        with_own_optimizer(load_model_file(tmp_path / "model.py"), optimizer)


def test_a_rank_of_a_cell_says_that_it_has_not_the_whole_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    run_ranks(2, _whole, tmp_path / "model.py")


def _whole(file: Path) -> None:
    from arachnec.backends.torch_distributed.engine import Engine

    for passes, whole in ((QUICK, True), (f"shard-parameters{{cell=2}},{QUICK.partition(',')[2]}", False)):
        engine = Engine(file, ([_item(name) for name in batch] for batch in BATCHES), passes=passes, steps=1)
        assert engine.model_is_whole is whole
        assert len(list(engine)) == 1
