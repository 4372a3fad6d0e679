"""``arachnec generate``: one message and exit code 2 for every mistake, and no request sampled twice."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from arachnec import cli
from arachnec.commands.generated import generate_here
from arachnec.data.switch import ONE_MODEL, parse_switch
from arachnec.executable.sampling_folder import Settings, StoredRequest
from arachnec.generation import run as generation
from arachnec.generation.plan import asked, demand_latents, forecast, ordered
from arachnec.generation.results import Outcome, Results, Seen, read_seen, record_seen
from arachnec.ir.diagnostic import UserError, render
from arachnec.models.sampler_file import load_sampler_file
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.sampling.loop import Sampling, begin
from benchmarks.sampling.pipelines import wan_model
from tests.generation.cases import ENCODER, FIXED, REQUESTS, SAMPLER, sampling_of, written
from tests.slow import quick

pytest.importorskip("diffusers")
ROW = {"caption": "fox", "frames": 3, "height": 16, "width": 16, "steps": 4, "guidance": 2}


def message(
    folder: Path, capsys: pytest.CaptureFixture[str], *options: str, sampler: str = SAMPLER, **row: object
) -> str:
    (folder / "sampler.py").write_text(sampler)
    (folder / "requests.jsonl").write_text(json.dumps({**ROW, **row}) + "\n")
    words = ["generate", f"{folder}/sampler.py", "--data", f"{folder}/requests.jsonl", "-o", f"{folder}/out"]
    assert cli.run([*words, "--cluster", "2:cpu", *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "help: " in told and "Traceback" not in told
    return told


CLIP = "    clip = request.clip(conditional)\n"
NO_NEGATIVE = SAMPLER.replace(CLIP, f"    if not conditional:\n        return None\n{CLIP}")
WIDE = """

class Wide(Tiny):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)
"""
OTHER_CHANNELS = SAMPLER.replace('"small": lambda: Tiny()', '"small": lambda: Wide()') + WIDE
FEW_STEPS = (
    SAMPLER
    + """

def scheduler():
    from diffusers import DDIMScheduler

    return DDIMScheduler()
"""
)


def scheduled(step: str, timesteps: str = "torch.linspace(1000, 1, steps)", arguments: str = "") -> str:
    """The sampler file with a scheduler of its own."""
    return f"""{SAMPLER}

class Own:
    def set_timesteps(self, steps):
        self.timesteps = {timesteps}

    def step(self, prediction, timestep, latents{arguments}):
        {step}


def scheduler():
    return Own()
"""


def decoding(forward: str) -> str:
    """The sampler file with a decoder of its own."""
    return f"""{SAMPLER}

class Pixels(nn.Module):
    def forward(self, latents):
        {forward}


def decoder():
    return Pixels()
"""


LONE = SAMPLER.replace(', "small": lambda: Tiny()', "")
MISTAKES = {
    "a boundary is a share": (["--switch", "boundary=1.5"], SAMPLER, {}, "a boundary lies in [0, 1]"),
    "a rule has a kind": (["--switch", "adaptve=0.1"], SAMPLER, {}, "did you mean `adaptive=...`?"),
    "the first model is one of the file": (["--first", "big"], SAMPLER, {}, "its models are large, small"),
    "guidance needs a negative branch": ([], NO_NEGATIVE, {}, "request `0` has guidance 2.0, and `arguments` has no"),
    "latents have the models' channels": (
        [],
        OTHER_CHANNELS,
        {},
        "the model `small` predicts 1 x 12 x 5 from",
    ),
    "a scheduler has so many steps": ([], FEW_STEPS, {"steps": 5000}, "cannot take 5000 steps"),
    "a switch is after a step that there is": (
        ["--switch", "fixed=5"],
        SAMPLER,
        {},
        "request `0` has 4 steps, and `fixed=5` switches after 5 at the earliest",
    ),
    "an adaptive switch too": (["--switch", "adaptive=0.1,least=5"], SAMPLER, {}, "give it at least 5 steps"),
    "the file's rule is text": ([], SAMPLER + "\n\ndef switch():\n    return 0.5\n", {}, "`switch` returned float"),
    "the file's guidance is a number": (
        [],
        SAMPLER + '\n\ndef guidance(name, request):\n    return float("nan")\n',
        {},
        "returned nan",
    ),
    "a scheduler has timesteps": ([], scheduled("return latents", "[]"), {}, "4 steps: it has no timesteps"),
    "a step gives latents": ([], scheduled("return None"), {}, "step 1 gives NoneType for latents [1, 2, 3]"),
    "a step keeps their shape": ([], scheduled("return latents[:, :1]"), {}, "step 1 gives [1, 1, 3] for latents"),
    "no step fails": (
        [],
        scheduled("return latents if timestep > 400 else {}[timestep]"),
        {},
        "the scheduler Own cannot take 4 steps: at step 3 KeyError",
    ),
    "a step is called as Diffusers calls it": (
        [],
        scheduled("return latents", arguments=", order"),
        {},
        "at step 1 TypeError",
    ),
    "a function builds its model": (
        [],
        SAMPLER.replace('"small": lambda: Tiny()', '"small": lambda: Tiny(width=9)'),
        {},
        "the sampler file raised TypeError",
    ),
    "a decoder gives pixels": ([], decoding("return latents"), {}, "the decoder gives [1, 12, 4] for latents"),
    "a decoder does not fail": (
        [],
        decoding("raise RuntimeError('no codec')"),
        {},
        "the sampler file raised RuntimeError: no codec in the decoder's forward",
    ),
    "one model switches to no other": (
        ["--switch", "fixed=2"],
        LONE,
        {},
        "`--switch fixed=2` says when a second model takes over, and the sampler file has `large` alone",
    ),
    "nor does its history begin anew": (["--history", "restart"], LONE, {}, "the sampler file has `large` alone"),
    "an unknown key": ([], SAMPLER, {"step": 4}, "did you mean `steps`?"),
}


@pytest.mark.parametrize("encoder", quick({"no encoders": "", "an encoder": ENCODER}, "no encoders"))
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str, encoder: str
) -> None:
    """Before anything runs."""
    options, sampler, row, part = MISTAKES[mistake]
    assert part in message(tmp_path, capsys, "--plan-only", *options, sampler=sampler + encoder, **row)


def test_weights_with_other_names_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = wan_model(1).build()
    model.save_pretrained(tmp_path / "weights")
    path = tmp_path / "weights" / "diffusion_pytorch_model.safetensors"
    stored = load_file(path)
    stored["blocks.0.surplus.weight"] = stored.pop("blocks.0.ffn.net.2.weight")
    save_file(stored, path)
    file = f"""
from arachnec.models.diffusers.sampler import wan_sampler

sampler = wan_sampler(large={str(tmp_path / "weights")!r}, text_length=8)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
"""
    told = message(tmp_path, capsys, "--plan-only", sampler=file, frames=9, height=32, width=48)
    assert "blocks.0.ffn.net.2.weight" in told and "blocks.0.surplus.weight" in told


def test_guidance_is_asked_for_of_every_request(tmp_path: Path) -> None:
    """Of two requests of one size the second alone is guided."""
    path = tmp_path / "sampler.py"
    path.write_text(NO_NEGATIVE + ENCODER)
    sampling = sampling_of(load_sampler_file(path), FIXED)
    plain = replace(REQUESTS[0], id="plain", guidance=1.0)
    demand_latents(sampling, [plain])
    with pytest.raises(UserError, match="request `a` has guidance"):
        demand_latents(sampling, [plain, REQUESTS[0]])


def test_a_step_refuses_a_prediction_that_would_be_broadcast(tmp_path: Path) -> None:
    loop = begin(sampling_of(written(tmp_path), FIXED), REQUESTS[0])
    with pytest.raises(UserError, match="the model `large` predicts 1 x 12 x 1 from latents 1 x 12 x 4"):
        loop.advance(torch.zeros(1, 12, 1))


def test_finished_requests_stay_unless_what_made_them_has_changed(tmp_path: Path) -> None:
    settings = Settings("sampler.py", ("large", "small"), "fixed=3")
    results = Results(tmp_path, settings, "digest")
    request = REQUESTS[0]
    assert results.unfinished(REQUESTS) == REQUESTS
    outcome = Outcome("a", 6, 3, [None, *[0.25] * 5], results.fingerprint(request), 1.0)
    results.write(request, outcome, torch.ones(1, 3), None)
    assert results.unfinished(REQUESTS) == REQUESTS[1:]
    assert results.outcome(request) == outcome
    assert results.unfinished([replace(request, arrival=9.0)]) == ()
    for other in (replace(request, seed=9), replace(request, negative_prompt="x")):
        assert results.unfinished([other]) == (other,)
    for changed in (Results(tmp_path, settings, "other"), Results(tmp_path, replace_switch(settings), "digest")):
        assert changed.unfinished([request]) == (request,)
    results.latents(request).write_bytes(b"half")
    assert results.unfinished([request]) == (request,)


FROM_FOLDER = """
from pathlib import Path
from arachnec.models.initial_weights import initial_weights

FOLDER = Path({folder!r})


class Configured:
    config = {{"shift": float((FOLDER / "shift").read_text()), "_class_name": "Configured"}}

    def set_timesteps(self, steps):
        self.timesteps = torch.linspace(1000, 1000 / steps, steps)

    def step(self, prediction, timestep, latents):
        return latents - prediction


scheduler = Configured


def models():
    return {{"one": from_folder}}


def from_folder():
    model = Tiny()
    weights = initial_weights(FOLDER, model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        weights.fill(model)
    return model
"""


def test_other_weights_in_a_folder_and_other_settings_of_a_scheduler_are_other_latents(tmp_path: Path) -> None:
    shapes = written(tmp_path).build("large").state_dict()
    (folder := tmp_path / "weights").mkdir()
    (folder / "shift").write_text("3.0")
    sampler = written(tmp_path, FROM_FOLDER.format(folder=str(folder)))

    def digest(seed: int, shift: float) -> str:
        torch.manual_seed(seed)
        weights = {name: torch.randn(like.shape) for name, like in shapes.items()}
        save_file(weights, folder / "model.safetensors")
        (folder / "shift").write_text(str(shift))
        settings = Settings(str(sampler.path), ("one",), "always")
        return Results.of(tmp_path, settings, load_sampler_file(sampler.path), "code").digest

    assert digest(1, 3.0) == digest(1, 3.0)
    assert len({digest(1, 3.0), digest(2, 3.0), digest(1, 5.0)}) == 3


def test_a_request_whose_video_is_cut_off_or_gone_is_not_finished(tmp_path: Path) -> None:
    results, request = Results(tmp_path, Settings("sampler.py", ("large",), "always"), "digest"), REQUESTS[0]
    outcome = Outcome("a", 6, None, [], results.fingerprint(request), 1.0)
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:-9]), Path.unlink):
        results.write(request, outcome, torch.ones(1, 3), torch.zeros(1, 3, 2, 16, 16))
        assert results.unfinished([request]) == ()
        damage(results.video(request))
        assert results.unfinished([request]) == (request,)


def replace_switch(settings: Settings) -> Settings:
    import msgspec

    return msgspec.structs.replace(settings, switch="fixed=4")


def test_requests_are_stored_as_they_are_and_failures_are_told_behind_all_others(tmp_path: Path) -> None:
    assert tuple(StoredRequest.of(request).request for request in REQUESTS) == REQUESTS
    sampler = written(tmp_path)
    assert ordered(sampler, "small") == ("small", "large")
    demand_latents(Sampling(sampler, ("large", "small"), FIXED), REQUESTS[:1])


def test_a_request_without_a_result_ends_the_command_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = written(tmp_path)
    settings = Settings(str(sampler.path), ("large", "small"), "fixed=3")
    results = Results(tmp_path, settings, "digest")
    left = generation.Generation(tmp_path / "plan", sampler.path, results, REQUESTS[:1], (), None)
    failed = Outcome("a", 2, None, [], left.results.fingerprint(REQUESTS[0]), 1.0, "its latents are no numbers")

    def ranks_that_fail(path: Path, ignore_errors: bool) -> None:
        path.mkdir(parents=True)
        (path / "a.json").write_bytes(json_of(failed))

    monkeypatch.setattr(generation.shutil, "rmtree", ranks_that_fail)
    with pytest.raises(UserError) as caught:
        generation.run_here(left)
    assert "request `a` has no result: its latents are no numbers" in render(caught.value.diagnostics[0])
    assert json.loads((tmp_path / "report.json").read_text())["requests"][0]["id"] == "a"


def test_an_interrupted_run_says_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(left: generation.Generation, stall_timeout: float | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "run_here", interrupted)
    results = Results(tmp_path, Settings("sampler.py", ("large",), "always"), "digest")
    left = generation.Generation(tmp_path / "plan", tmp_path / "sampler.py", results, REQUESTS, (), None)
    with pytest.raises(KeyboardInterrupt):
        generate_here(left)
    assert "the same command does the requests that are not" in capsys.readouterr().err


def json_of(outcome: Outcome) -> bytes:
    import msgspec

    return msgspec.json.encode(outcome)


def test_sampling_of_one_model_has_no_switch(tmp_path: Path) -> None:
    sampling = sampling_of(written(tmp_path), FIXED, "large")
    assert sampling.bounds(sampling.schedule(REQUESTS[0])) == (6, 6)


def test_a_forecast_is_the_median_of_the_switches_seen_so_far(tmp_path: Path) -> None:
    sampling = sampling_of(written(tmp_path), parse_switch("adaptive=0.1,least=1,most=5"))
    request = REQUESTS[0]  # 6 steps
    names, rule = sampling.names, str(sampling.switch)
    assert forecast(sampling, request).forecast == 3
    record_seen(tmp_path, [Seen(names, rule, 12, k) for k in (2, 4, 12)])
    record_seen(tmp_path, [Seen(names, "adaptive=0.5,least=1", 6, 6)])
    seen = read_seen(tmp_path)
    assert len(seen) == 4 and forecast(sampling, request, seen).forecast == 2
    assert forecast(sampling, request, [Seen(names, rule, 6, 6)]).forecast == 5  # within its window


def test_every_switch_survives_its_text_and_a_pipeline_may_leave_the_second_model_out(tmp_path: Path) -> None:
    for rule in (ONE_MODEL, FIXED, parse_switch("boundary=0.8755551"), parse_switch("adaptive=1e-5,least=2,most=9")):
        assert parse_switch(str(rule)) == rule
    path = written(tmp_path).path
    for name, models in (("generate", ("large", "small")), ("large-only", ("large",))):
        sampling, settings = asked(path, "fixed=2", None, "carry", Pipeline.parse(name))
        assert settings.models == sampling.names == models
