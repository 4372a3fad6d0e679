"""Sampler files: what is taken from them, and that every mistake has its place and its remedy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arachnec.data.requests import Request
from arachnec.ir.diagnostic import UserError, render
from arachnec.models.sampler_file import SamplerFile, load_sampler_file

REQUEST = Request("a", "fox", 5, 64, 96, text_tokens=4, guidance=3.0)
FILE = """
import torch

class Steps:
    def set_timesteps(self, steps):
        self.timesteps = torch.linspace(1000, 1000 / steps, steps)

    def step(self, prediction, timestep, latents):
        return latents - prediction

class Model(torch.nn.Linear):
    pass

def models():
    return {"large": lambda: Model(3, 3), "small": Model(3, 3)}

scheduler = Steps

def start(request, generator):
    return torch.randn(1, request.frames, 3, generator=generator)

def arguments(name, latents, timestep, request, conditional):
    return {"input": latents} if conditional else None
"""


def loaded(folder: Path, *changes: tuple[str, str], file: str = FILE) -> SamplerFile:
    for before, after in changes:
        assert before in file
        file = file.replace(before, after)
    path = folder / "sampler.py"
    path.write_text(file)
    return load_sampler_file(path)


def message(action: object) -> str:
    assert callable(action)
    with pytest.raises(UserError) as caught:
        action()
    return render(caught.value.diagnostics[0])


def test_a_model_has_the_same_random_weights_whichever_is_built_beside_it(tmp_path: Path) -> None:
    sampler = loaded(tmp_path)
    assert sampler.names() == ("large", "small")
    torch.manual_seed(9)
    first = sampler.build("large").weight
    sampler.build("small")
    assert torch.equal(first, sampler.build("large").weight)


def test_guidance_is_the_requests_unless_the_file_has_one_for_each_model(tmp_path: Path) -> None:
    assert loaded(tmp_path).branches("large", REQUEST) == 2
    own = loaded(tmp_path, file=FILE + "def guidance(name, request):\n    return 1.0 if name == 'small' else 4.0\n")
    assert [(own.scale(name, REQUEST), own.branches(name, REQUEST)) for name in own.names()] == [(4.0, 2), (1.0, 1)]


def test_a_model_is_traced_and_measured_as_a_model_file(tmp_path: Path) -> None:
    file = loaded(tmp_path).model_file("large")
    kwargs, target = file.sample(REQUEST.clip(), torch.Generator().manual_seed(0))
    assert file.build()(**kwargs).shape == target.shape == (1, 5, 3)


def test_a_scheduler_that_takes_no_two_steps_is_traced_with_more(tmp_path: Path) -> None:
    """As PNDM of Diffusers, whose first steps are four."""
    few = ("        self.timesteps", "        assert steps > 3\n        self.timesteps")
    kwargs, _ = loaded(tmp_path, few).model_file("large").sample(REQUEST.clip(), torch.Generator())
    assert kwargs["input"].shape == (1, 5, 3)


MISTAKES = [
    (('{"large": lambda: Model(3, 3), "small": Model(3, 3)}', "[Model(3, 3)]"), "`models` returned list", "names()"),
    (('"small": Model(3, 3)}', '"a": Model, "b": Model(3, 3)}'), "`models` returned 3 models", "names()"),
    (('"small": Model(3, 3)', '"small": Model'), "`models` returned the class Model as the model `small`", "names()"),
    (("lambda: Model(3, 3)", "lambda: None"), "the model `large` is built as NoneType", "build('large')"),
    (("    def step(", "    def stop("), "`scheduler` returned Steps without `step`", "scheduler()"),
    (("return torch.randn(1, ", "return torch.randn(2, "), "`start` returned torch.float32 [2, 5, 3]", "noise()"),
    (('{"input": latents} if', "latents if"), "`arguments` returned Tensor for request `a`", "call(True)"),
    (("import torch", "import torch"), "request `a` has guidance 3.0, and `arguments` has no uncond", "call(False)"),
    (("def start(request, generator)", "def start(request)"), "`start` cannot be called", "load"),
    (("def models()", "def modules()"), "the sampler file has no `models`", "load"),
    (("    return torch.randn(", "    return torch.rand_n("), "the sampler file raised AttributeError", "noise()"),
    (("torch.randn(1, ", "torch.randn(1 << 50, "), "memory does not hold the noise of request `a`, of 5 x", "noise()"),
]


@pytest.mark.parametrize(("change", "title", "where"), MISTAKES)
def test_a_mistake_is_told_in_the_file_with_a_remedy(
    tmp_path: Path, change: tuple[str, str], title: str, where: str
) -> None:
    def action() -> None:
        sampler = loaded(tmp_path, change)
        latents, time = torch.zeros(1, 5, 3), torch.tensor(1.0)
        {
            "names()": sampler.names,
            "build('large')": lambda: sampler.build("large"),
            "scheduler()": sampler.scheduler,
            "noise()": lambda: sampler.noise(REQUEST, torch.Generator()),
            "call(True)": lambda: sampler.call("large", latents, time, REQUEST, True),
            "call(False)": lambda: sampler.call("large", latents, time, REQUEST, False),
        }[where]()

    told = message(action)
    assert title in told
    assert "help: " in told
    assert f"--> {tmp_path}/sampler.py:" in told


def test_there_is_a_file() -> None:
    told = message(lambda: load_sampler_file("nowhere.py"))
    assert "there is no sampler file" in told
    assert "models(), scheduler(), start(request, generator) and arguments(name, latents" in told


def test_a_models_own_prediction_type_is_its_schedulers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from diffusers import WanTransformer3DModel

    from arachnec.models.diffusers.sampler import wan_sampler

    tiny = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16}
    for pipeline, kind in (("flow", "flow_prediction"), ("noise", "epsilon")):
        WanTransformer3DModel(**tiny, num_layers=1).save_pretrained(tmp_path / pipeline / "transformer")
        (tmp_path / pipeline / "scheduler").mkdir()
        config = f'{{"_class_name": "UniPCMultistepScheduler", "prediction_type": "{kind}"}}'
        (tmp_path / pipeline / "scheduler" / "scheduler_config.json").write_text(config)
    flow, noise = (tmp_path / name / "transformer" for name in ("flow", "noise"))
    wan_sampler(large=flow)
    wan_sampler(large=noise, pipeline=tmp_path / "noise")
    told = message(lambda: wan_sampler(large=flow, small=noise))
    assert "other prediction types: flow_prediction and epsilon" in told and "trained with one scheduler" in told
    assert "`large` predicts `epsilon`, and the scheduler UniPCMultistepScheduler takes `flow_prediction`" in message(
        lambda: wan_sampler(large=noise)
    )
    (tmp_path / "noise" / "scheduler" / "scheduler_config.json").write_text("{")
    assert "is not JSON" in message(lambda: wan_sampler(large=noise))


def test_a_scheduler_takes_what_the_family_predicts() -> None:
    """Without folders too."""
    diffusers = pytest.importorskip("diffusers")
    from arachnec.models.diffusers import sampler
    from benchmarks.sampling.pipelines import cogvideox_model, hunyuan_model, wan_model

    euler, ddim = diffusers.FlowMatchEulerDiscreteScheduler, diffusers.DDIMScheduler
    for make, model, right, wrong, said in (
        (sampler.wan_sampler, wan_model(), euler, ddim, "predicts `flow_prediction`, and the scheduler DDIMScheduler"),
        (sampler.hunyuan_sampler, hunyuan_model(), euler, ddim, "predicts `flow_prediction`"),
        (
            sampler.cogvideox_sampler,
            cogvideox_model(),
            lambda: ddim(prediction_type="v_prediction"),
            euler,
            "predicts `v_prediction`, and the scheduler FlowMatchEulerDiscreteScheduler takes `flow_prediction`",
        ),
    ):
        make(model=model, scheduler=right)
        make(model=model, scheduler=object)  # one of the user's own says nothing of it
        told = message(lambda make=make, model=model, wrong=wrong: make(model=model, scheduler=wrong))
        assert said in told and "the scheduler of the model's own pipeline" in told


def test_the_second_cogvideox_sees_the_noise_that_its_own_schedule_knows() -> None:
    pytest.importorskip("diffusers")
    from arachnec.models.diffusers import cogvideox, sampler
    from benchmarks.sampling.pipelines import cogvideox_model

    large = cogvideox_model()
    small = replace(large, alphas=cogvideox.alphas_cumprod(3.0), snr_shift=3.0)
    pair, alone = sampler.cogvideox_sampler(large=large, small=small), sampler.cogvideox_sampler(small=small)
    assert pair.scheduler().config.snr_shift_scale == 1.0 and alone.scheduler().config.snr_shift_scale == 3.0
    for step in (999, 700, 250, 1):
        timestep = torch.tensor(step)

        def seen(video: sampler.VideoSampler, name: str, at: torch.Tensor = timestep) -> int:
            given = video.arguments(name, pair.start(REQUEST, torch.Generator()), at, REQUEST, True)["timestep"]
            assert isinstance(given, torch.Tensor) and given.shape == (1,) and given.dtype == torch.int64
            return int(given)

        assert seen(pair, "large") == seen(alone, "small") == step
        level = abs(large.alphas[step] - small.alphas[seen(pair, "small")])
        assert level == min(abs(large.alphas[step] - alpha) for alpha in small.alphas) < 2e-3
    assert seen(pair, "small", torch.tensor(500)) < 500  # its own schedule is noisier
    assert sampler.cogvideox_sampler(large=large, small=large).alphas is None


def test_hunyuan_takes_the_scheduler_of_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from arachnec.models.diffusers.sampler import hunyuan_sampler
    from benchmarks.sampling.pipelines import hunyuan_model

    (tmp_path / "scheduler").mkdir()
    config = tmp_path / "scheduler" / "scheduler_config.json"
    config.write_text('{"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}')
    scheduler = hunyuan_sampler(model=hunyuan_model(), pipeline=tmp_path).scheduler()
    assert scheduler.config.shift == 5.0
    scheduler.set_timesteps(4)
    sigmas = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    torch.testing.assert_close(scheduler.sigmas, 5 * sigmas / (1 + 4 * sigmas))
    config.write_text('{"_class_name": "DDIMScheduler"}')
    told = message(lambda: hunyuan_sampler(model=hunyuan_model(), pipeline=tmp_path))
    assert "`model` predicts `flow_prediction`, and the scheduler DDIMScheduler takes `epsilon`" in told


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Diffusers' own
def test_noise_is_scaled_for_the_steps_of_its_request() -> None:
    diffusers = pytest.importorskip("diffusers")
    from arachnec.models.diffusers.sampler import cogvideox_sampler
    from benchmarks.sampling.pipelines import cogvideox_model

    def euler() -> Any:
        return diffusers.EulerDiscreteScheduler(prediction_type="v_prediction", timestep_spacing="leading")

    own = cogvideox_sampler(one=cogvideox_model(), scheduler=euler)
    drawn = {}
    for steps in (3, 50):
        scheduler = euler()
        scheduler.set_timesteps(steps)
        request = replace(REQUEST, steps=steps)
        drawn[steps] = own.start(request, torch.Generator().manual_seed(1)) / scheduler.init_noise_sigma
    torch.testing.assert_close(drawn[3], drawn[50])
    assert drawn[3].std() == pytest.approx(1.0, rel=0.1)
