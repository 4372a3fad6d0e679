"""One request's loop: Diffusers' own latents, both ends of the switch, and a state that can be handed on."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from arachnec.data.switch import Switch, parse_switch, switched_at
from arachnec.ir.diagnostic import UserError
from arachnec.sampling.forward import all_branches, branches_of, joined
from arachnec.sampling.loop import Loop, begin, packed, run, state_bytes, unpack
from arachnec.sampling.schedule import Schedule

pytest.importorskip("diffusers")
from benchmarks.sampling import pipelines
from benchmarks.sampling.pipelines import Case

# numpy's, in how some of Diffusers' schedulers make arrays of tensors
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
]
REQUEST = replace(pipelines.REQUEST, guidance=3.0)
PAIR = pipelines.sampler_file(pipelines.video_sampler(Case("wan", "unipc", 3.0, 0.875)))
MODELS = pipelines.build(PAIR)
PREDICT = all_branches(PAIR, branches_of(PAIR, MODELS.__getitem__))


def loop(rule: str, **options: Any) -> Loop:
    return pipelines.loop(PAIR, MODELS, REQUEST, parse_switch(rule), **options)


def ended(rule: str, **options: Any) -> Loop:
    state = loop(rule, **options)
    run([state], PREDICT)
    return state


@pytest.mark.parametrize(
    "case",
    [
        Case("wan", "unipc", 5.0, 0.875),
        Case("wan", "dpm-sde", 1.0),
        Case("cogvideox", "cogvideox-dpm", 5.0),
        Case("hunyuan_video", "euler", 5.0),
    ],
    ids=str,
)
def test_latents_are_those_of_diffusers_own_pipeline(case: Case) -> None:
    """All schedulers: ``python -m benchmarks.sampling.parity``."""
    assert pipelines.difference(case) < 1e-5


def test_both_ends_of_the_switch_are_one_model_to_the_bit() -> None:
    assert torch.equal(ended("fixed=99").latents, ended("fixed=0", names=("high",)).latents)
    assert torch.equal(ended("fixed=0").latents, ended("fixed=0", names=("low",)).latents)
    between = ended("fixed=3").latents
    assert not torch.equal(between, ended("fixed=0").latents)
    assert not torch.equal(between, ended("fixed=99").latents)


def test_which_model_is_first_is_an_option() -> None:
    assert torch.equal(ended("fixed=0", names=("low", "high")).latents, ended("fixed=99").latents)


def test_an_adaptive_switch_follows_from_its_recorded_trace() -> None:
    free = ended("adaptive=0")
    assert free.switched == 6 and len(free.distances) == 6
    for value in sorted(free.distances[1:]):
        rule = f"adaptive={value * 1.01:.6f},least=2"
        state = ended(rule)
        saved = [None, *state.distances[1:]]
        assert state.switched == switched_at(parse_switch(rule), saved, 6)
        assert torch.equal(state.latents, ended(f"fixed={state.switched}").latents)
    assert ended("adaptive=9,least=2").switched == 2


def test_history_is_carried_over_the_switch_or_restarted() -> None:
    carried, restarted = ended("fixed=3"), ended("fixed=3", restart=True)
    assert not torch.equal(carried.latents, restarted.latents)
    by_hand = loop("fixed=3")
    run([by_hand], PREDICT, 3)
    by_hand.schedule.restart(3)
    run([by_hand], PREDICT)
    assert torch.equal(by_hand.latents, restarted.latents)


SCHEDULERS: dict[str, Callable[[], Any]] = {
    **pipelines.flow_schedulers(),
    **{f"v-{name}": make for name, make in pipelines.diffusion_schedulers().items()},
    **pipelines.other_schedulers(),
}


@functools.cache
def scheduler_of(name: str) -> Any:
    return SCHEDULERS[name]()


def maker(name: str) -> Callable[[], Any]:
    """Of a scheduler as it was made: some take a thousand steps to be made."""
    return lambda: copy.deepcopy(scheduler_of(name))


def stepped(
    schedule: Schedule, first: int, last: int, latents: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    for step in range(first, last):
        latents = schedule.advance(schedule.model_input(latents, step).sin(), step, latents, generator)
    return latents


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("since", "shape"), [(0, (1, 4, 3, 4, 6)), (2, (1, 4, 3, 4, 6)), (0, (1, 12, 4))])
def test_a_history_that_is_handed_on_continues_to_the_bit(name: str, since: int, shape: tuple[int, ...]) -> None:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def begun() -> tuple[Schedule, torch.Generator]:
        schedule = Schedule(maker(name), 6)
        schedule.restart(since)
        return schedule, torch.Generator().manual_seed(2)

    whole, generator = begun()
    expected = stepped(whole, since, len(whole), noise, generator)
    for border in range(since, len(whole) + 1):
        before, generator = begun()
        latents = stepped(before, since, border, noise, generator)
        before.demand_counted(since, border, latents)
        history = before.history(latents)
        after = Schedule(maker(name), 6)
        assert [tensor.dtype for tensor in history] == after.kept(since, border, latents)
        after.restore(since, border, history, shape=latents.shape)
        assert torch.equal(stepped(after, border, len(after), latents, generator), expected), border


def test_equal_requests_take_their_steps_together_and_unequal_arguments_are_not_joined() -> None:
    requests = [replace(REQUEST, id=number, seed=number) for number in range(2)]
    states = [begin(loop("fixed=3").sampling, request) for request in requests]
    run(states, PREDICT)
    for request, state in zip(requests, states, strict=True):
        alone = begin(state.sampling, request)
        run([alone], PREDICT)
        torch.testing.assert_close(state.latents, alone.latents, rtol=1e-5, atol=1e-6)
    one, two = torch.zeros(1, 2), torch.ones(1, 3)
    assert joined([{"x": one, "y": 1}, {"x": one, "y": 1}])["x"].shape == (2, 2)  # type: ignore[index]
    assert joined([{"x": one}, {"x": two}]) is joined([{"y": 1}, {"y": 2}]) is joined([{"x": one}, {"y": one}]) is None


@pytest.mark.parametrize("restart", [False, True])
def test_a_request_is_handed_on_as_bytes_before_any_step(restart: bool) -> None:
    expected = ended("adaptive=0.1,least=2,most=3", restart=restart)
    for border in range(7):
        state = loop("adaptive=0.1,least=2,most=3", restart=restart)
        run([state], PREDICT, border)
        taken = begin(state.sampling, REQUEST)
        assert state_bytes(state) == state_bytes(taken)
        unpack(packed(state), taken)
        assert taken.model == state.model and taken.switched == state.switched
        run([taken], PREDICT)
        assert torch.equal(taken.latents, expected.latents), border
        assert taken.distances[1:] == expected.distances[1:]


class Sum:
    """A scheduler that keeps what no other rank can know."""

    def set_timesteps(self, steps: int) -> None:
        self.timesteps = torch.linspace(1000, 1, steps)
        self.total = 0.0

    def step(self, prediction: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        self.total += float(prediction.sum())
        return latents - prediction


def test_an_object_of_the_form_is_a_scheduler_and_one_that_cannot_be_handed_on_is_refused() -> None:
    schedule = Schedule(Sum, 4)
    latents = stepped(schedule, 0, 2, torch.ones(1, 4), torch.Generator())
    with pytest.raises(UserError, match="Sum keeps other values after step 2"):
        schedule.demand_counted(0, 2, latents)


def test_too_many_steps_for_a_scheduler_are_refused_and_latents_that_are_no_numbers_are_seen() -> None:
    with pytest.raises(UserError, match="cannot take 2000 steps"):
        Schedule(SCHEDULERS["v-ddim"], 2000)
    state = loop("fixed=2")
    run([state], lambda *_: [state.latents * (torch.nan if state.step == 1 else 1.0)])
    assert state.failed and state.step == 2


def test_a_boundary_is_where_the_timesteps_cross_it() -> None:
    numbers = loop("fixed=0").schedule.numbers
    k = ended("boundary=0.875").switched
    assert k is not None and 0 < k < 6
    assert all((number >= 875) == (step < k) for step, number in enumerate(numbers))
    assert Switch("boundary", 0.875).bounds(numbers) == (k, k)
