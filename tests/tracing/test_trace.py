"""From a model file to stages: costs in B, S and T, tokens of any clip, and what `sample` may do while planning."""

import math
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import TENSOR
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import Level, Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Quantity
from arachnec.models.file import load_model_file
from arachnec.passes import trace
from arachnec.passes.trace import trace_encoders, trace_model
from arachnec.planning.stage_cuts import parts_of
from arachnec.tracing.dataflow import Cut, record_dataflow, single_blocks
from arachnec.tracing.sample import encoded_shape, sample_of
from tests.commands.small_model import MODEL as SMALL_MODEL
from tests.slow import slow

CLIPS = [
    VideoClip(0, 17, 64, 96, 40),
    VideoClip(1, 1, 32, 32, 8),
    VideoClip(2, 81, 128, 64, 120),
    VideoClip(3, 9, 32, 64, 8),
]
WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, text):
        q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        k, v = (f(text).unflatten(2, (4, -1)).transpose(1, 2) for f in (self.key, self.value))
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.text = nn.Conv3d(3, WIDTH, (1, 2, 2), (1, 2, 2)), nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, video, text, scale=1.0):
        if video.shape[3] % 2 or video.shape[4] % 2:
            raise ValueError("odd latents")
        x, text = self.embed(video).flatten(2).transpose(1, 2), self.text(text)
        for block in self.blocks:
            x = block(x, text)
        return self.head(x) * scale


class VideoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv3d(3, 3, (1, 8, 8), (4, 8, 8))

    def load(self, clip, device):
        return torch.zeros(1, 3, clip.frames, clip.height, clip.width, device=device)

    def forward(self, video):
        return self.convolution(video)


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 16)

    def load(self, clip, device):
        return torch.zeros(1, clip.text_tokens, dtype=torch.int64, device=device)

    def forward(self, tokens):
        return self.table(tokens)


def latent(clip):
    return (clip.frames - 1) // 4 + 1, clip.height // 8, clip.width // 8


def sample(clip, generator):
    noise = torch.randn(1, 3, *latent(clip), generator=generator, device="cpu")
    return {"video": noise, "text": torch.randn(1, clip.text_tokens, 16, generator=generator)}, noise


def sample_encoded(clip, generator):
    latents = clip.encoded["vae"]
    noise = torch.randn(latents.shape, generator=generator)
    return {"video": latents + noise, "text": clip.encoded["text"]}, noise - latents


def source(sample=sample, encoders=None, build=Model):
    return SimpleNamespace(build=build, sample=sample, encoders=encoders, loss=None)


@pytest.fixture(scope="module")
def traced():
    encoders = lambda: {"vae": VideoEncoder(), "text": TextEncoder()}  # noqa: E731
    return trace_model(source(sample_encoded, encoders), CLIPS)


def test_tokens_are_what_the_first_block_is_given(traced):
    assert [traced.tokens(clip) for clip in CLIPS] == [math.prod(latent(clip)) // 4 for clip in CLIPS]


def test_a_clip_that_the_model_cannot_take_is_one_message(traced):
    with pytest.raises(UserError, match=r"clip wide \(17 x 72 x 64, 8 text tokens\): ValueError: odd latents"):
        traced.tokens(VideoClip("wide", 17, 72, 64, 8))


def test_stages_are_the_encoders_and_the_transformer(traced):
    assert [(stage.name, stage.trained) for stage in traced.stages] == [("vae", False), ("text", False), ("dit", True)]
    module = Module("x", Level.TRACED, stages=traced.stages, graphs=traced.graphs)
    assert parse_module(print_module(module)) == module


def test_encoders_alone_have_the_stages_and_tokens_that_they_have_beside_the_transformer(traced):
    encoders = lambda: {"vae": VideoEncoder(), "text": TextEncoder()}  # noqa: E731
    alone = trace_encoders(source(sample_encoded, encoders), CLIPS)
    assert alone.stages == traced.stages[:2]
    assert [alone.tokens(clip) for clip in CLIPS] == [traced.tokens(clip) for clip in CLIPS]


def test_an_encoder_that_ran_beforehand_is_not_run_for_the_shape_that_its_file_has(tmp_path):
    file, vae = tmp_path / "vae.safetensors", VideoEncoder().to("meta")
    save_file({TENSOR: torch.zeros(1, 3, 5, 6, 7, dtype=torch.bfloat16)}, file)
    shapes = []

    def told(clip, generator):
        shapes.append((clip.encoded["vae"].shape, clip.encoded["vae"].dtype))
        return {}, torch.zeros(1)

    cached = replace(CLIPS[0], cached={"vae": file})
    sample_of(source(told), cached, {"vae": vae}, device="meta")
    save_file({TENSOR: torch.tensor(1.0)}, file)  # a run says what is wrong: planned is what the encoder would give
    sample_of(source(told), cached, {"vae": vae}, device="meta")
    file.write_bytes(b"damaged")
    sample_of(source(told), cached, {"vae": vae}, device="meta")
    run = ((1, 3, *latent(CLIPS[0])), torch.float32)
    assert shapes == [((1, 3, 5, 6, 7), torch.bfloat16), run, run]


def test_an_encoder_runs_once_for_clips_that_it_loads_alike():
    vae, runs = VideoEncoder().to("meta"), []
    vae.register_forward_hook(lambda *_: runs.append(1))
    for clip in (CLIPS[0], replace(CLIPS[0], id=7, text_tokens=9), CLIPS[1]):
        assert encoded_shape(vae, clip).shape == (1, 3, *latent(clip))
    assert len(runs) == 2


def test_flops_of_the_stage_are_those_that_pytorch_counts_in_the_model(traced):
    flops = traced.stages[-1].attrs["flops"]
    for batch, clip in ((1, CLIPS[0]), (3, CLIPS[1]), (2, CLIPS[3])):
        # On meta, since the counter does not know the CPU's fused attention.
        with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
            model = Model()
            model(torch.randn(batch, 3, *latent(clip)), torch.randn(batch, clip.text_tokens, 16))
        predicted = flops(B=batch, S=traced.tokens(clip), T=clip.text_tokens) * 1e12
        assert predicted == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_saved_bytes_of_the_stage_are_those_that_autograd_keeps_of_the_model():
    """On a model without fused attention, whose kernels keep their statistics in paddings of their own."""

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

        def forward(self, x, text):
            return x + self.b(torch.nn.functional.gelu(self.a(x))) * text.mean(1, keepdim=True)

    class LocalModel(Model):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Local() for _ in range(3)])

    saved = trace_model(source(build=LocalModel), CLIPS).stages[-1].attrs["saved"]
    model, kept = LocalModel(), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    clip = CLIPS[2]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.randn(2, 3, *latent(clip)), torch.randn(2, clip.text_tokens, 16))
    assert output.requires_grad
    measured = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)
    predicted = saved(B=2, S=math.prod(latent(clip)) // 4, T=clip.text_tokens) * 2**30
    assert predicted == pytest.approx(measured, rel=0.02)


def test_recomputation_keeps_less_and_no_memory_is_quadratic(traced):
    attrs = traced.stages[-1].attrs
    for name in ("saved", "saved_recompute", "workspace", "traffic"):
        assert all(dict(term.powers).get("S", 0) < 2 for term in attrs[name].terms), name
    sizes = {"B": 1, "S": 10_000, "T": 100}
    assert attrs["saved_recompute"](**sizes) < 0.6 * attrs["saved"](**sizes)
    assert attrs["attentions"] == 3 and attrs["heads"] == 4 and attrs["hidden"] == WIDTH and attrs["joint"] is False
    assert attrs["traffic"](**sizes) == pytest.approx(3 * 4 * 4 * 10_000 * WIDTH / 2**30)


def test_state_is_sixteen_bytes_a_trained_parameter(traced):
    sizes = [p.numel() for p in Model().parameters()]
    counters = 4 * len(sizes)  # of the optimizer's steps
    assert traced.stages[-1].attrs["params"] == sum(sizes)
    assert traced.stages[-1].attrs["state"].value * 2**30 == 16 * sum(sizes) + counters


def test_an_encoder_hands_off_its_output(traced):
    vae, text = traced.stages[0].attrs, traced.stages[1].attrs
    clip = CLIPS[0]
    sizes = {"B": 2, "S": traced.tokens(clip), "T": clip.text_tokens}
    assert vae["output"](**sizes) * 2**30 == pytest.approx(2 * 3 * math.prod(latent(clip)) * 4, rel=0.02)
    assert text["output"](**sizes) * 2**30 == pytest.approx(2 * clip.text_tokens * 16 * 4, rel=0.02)
    assert vae["flops"](**sizes) > 0


def values_needed(clip, generator):
    kwargs, target = sample(clip, generator)
    return {**kwargs, "scale": 1.0 if float(kwargs["video"].sum()) else 2.0}, target


def drawn_in_place(clip, generator):
    noise = torch.empty(1, 3, *latent(clip)).normal_(generator=generator)
    return {"video": noise, "text": torch.ones(1, clip.text_tokens, 16, device="cpu")}, noise


def numpy_needed(clip, generator):
    kwargs, target = sample(clip, generator)
    return {**kwargs, "scale": 1.0 + 0.0 * float(kwargs["video"].numpy().mean())}, target


def printed(clip, generator):
    kwargs, target = sample(clip, generator)
    assert f"{kwargs['video'].sum():.2f}"
    return kwargs, target


@pytest.mark.parametrize("function", [sample, values_needed, slow(drawn_in_place), numpy_needed, printed])
def test_any_sample_that_works_on_the_cpu_works_in_planning(function):
    traced = trace_model(source(function), CLIPS)
    assert traced.tokens(CLIPS[2]) == math.prod(latent(CLIPS[2])) // 4
    assert next(iter(traced.counter.model.parameters())).is_meta


def test_a_sample_of_a_model_file_that_looks_at_its_numbers_works_in_planning(tmp_path):
    looking = "\n\ndef sample(clip, generator):\n    assert float(usual(clip, generator)[1].sum()) < 1e6\n"
    text = SMALL_MODEL.replace("def sample", "def usual") + looking + "    return usual(clip, generator)\n"
    (tmp_path / "model.py").write_text(text)
    assert trace_model(load_model_file(tmp_path / "model.py"), [VideoClip(0, 9, 32, 32, 1)]).stages


def test_a_mistake_in_a_sample_of_no_file_names_the_clip():
    def late(clip, generator):
        if clip.frames > 50:
            raise KeyError("latents")
        return sample(clip, generator)

    with pytest.raises(UserError, match=r"cannot take clip 2 .*KeyError: 'latents'"):
        trace_model(source(late), CLIPS).tokens(CLIPS[2])


def test_a_mistake_in_the_shapes_of_a_sample_is_one_message_and_no_logged_traceback(capfd):
    def mismatched(clip, generator):
        kwargs, target = sample(clip, generator)
        return {**kwargs, "text": torch.ones(1, 3, 5) @ torch.ones(1, 4, 16)}, target

    with pytest.raises(UserError, match=r"cannot be run on a small clip of .*RuntimeError"):
        trace_model(source(mismatched), CLIPS)
    assert "Traceback" not in capfd.readouterr().err


BROKEN = """

def sample(clip, generator):
    CALLED.append(clip.frames)
    if clip.frames > 50:
        raise {error}
    return usual(clip, generator)


CALLED = []
"""


@pytest.mark.parametrize("error", ["RuntimeError('too long')", "KeyError('latents')", "NotImplementedError('later')"])
def test_a_mistake_in_sample_is_told_at_its_line_and_sample_is_not_called_again_with_numbers(tmp_path, error):
    (tmp_path / "model.py").write_text(SMALL_MODEL.replace("def sample", "def usual") + BROKEN.format(error=error))
    model_file = load_model_file(tmp_path / "model.py")
    short, long = VideoClip(0, 9, 32, 32, 1), VideoClip(1, 81, 32, 32, 1)
    traced = trace_model(model_file, [short])
    with pytest.raises(UserError, match=r"in sample\(\)") as refused:
        traced.tokens(long)
    (diagnostic,) = refused.value.diagnostics
    assert "raise" in (tmp_path / "model.py").read_text().splitlines()[diagnostic.span.line - 1]
    assert model_file.sample.__wrapped__.__globals__["CALLED"].count(81) == 1


def test_a_caption_of_constant_length_is_a_number():
    def padded(clip, generator):
        kwargs, target = sample(clip, generator)
        return {**kwargs, "text": torch.zeros(1, 77, 16)}, target

    (stage,) = trace_model(source(padded), CLIPS).stages
    assert all("T" not in dict(term.powers) for term in stage.attrs["flops"].terms)


def test_a_model_that_takes_only_its_own_clips_is_recorded_with_those():
    own = [VideoClip(0, 16, 48, 48, 8), VideoClip(1, 8, 48, 48, 8), VideoClip(2, 8, 32, 48, 8)]

    def picky(clip, generator):
        if (clip.frames, clip.height, clip.width) not in {(c.frames, c.height, c.width) for c in own}:
            raise ValueError("not a bucket of mine")
        return sample(clip, generator)

    traced = trace_model(source(picky), own)
    assert [traced.tokens(clip) for clip in own] == [math.prod(latent(clip)) // 4 for clip in own]


def test_a_model_that_cannot_run_is_one_message():
    def broken(clip, generator):
        kwargs, target = sample(clip, generator)
        return {**kwargs, "text": torch.zeros(1, 3, 5)}, target

    with pytest.raises(UserError, match="cannot be run on a small clip"):
        trace_model(source(broken), CLIPS)


def test_a_model_that_refuses_a_precision_is_told_which_arguments_a_run_does_not_cast():
    def double(clip, generator):
        kwargs, target = sample(clip, generator)
        return {**kwargs, "text": kwargs["text"].double()}, target

    with pytest.raises(UserError) as caught:
        trace_model(source(double), CLIPS)
    (diagnostic,) = caught.value.diagnostics
    assert "dtype" in diagnostic.message
    assert "arguments of one dimension, such as timesteps, stay as `sample` gives them" in render(diagnostic)


def test_the_parts_of_a_stage_add_up_to_it(traced):
    """Parameters, state, FLOPs and what is kept, embedding with the first part and head with the last."""
    whole = traced.stages[-1]
    parts = parts_of(whole, (1,))
    assert [part.name for part in parts] == ["dit_0", "dit_1"]
    for name in ("params", "state"):
        values = [part.attrs[name] for part in (*parts, whole)]
        numbers = [value.value if isinstance(value, Quantity) else value for value in values]
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1])
    sizes = {"B": 2, "S": 5040, "T": 64}
    assert sum(part.attrs["flops"](**sizes) for part in parts) == pytest.approx(whole.attrs["flops"](**sizes))
    shared = whole.attrs["block_shared"][0](**sizes)  # kept once by each part
    kept = sum(part.attrs["saved"](**sizes) for part in parts)
    assert kept == pytest.approx(whole.attrs["saved"](**sizes) + shared)
    assert sum(len(part.attrs["layers"]) for part in parts) == len(whole.attrs["layers"])
    assert parts[0].attrs["output"](**sizes) > 0
    assert "output" not in parts[1].attrs


class Hourglass(Model):
    """With layers in no block between its blocks, and a weight that two of these share."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(5)])
        self.middle, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, video, text, scale=1.0):
        x, text = self.embed(video).flatten(2).transpose(1, 2), self.text(text)
        for number, block in enumerate(self.blocks):
            x = block(x, text)
            x = self.middle(x) if number == 1 else x
            x = x + self.twice.weight.mean() if number in (1, 2) else x
        return self.head(x) * scale


def test_a_part_counts_the_parameters_that_it_computes_with():
    """Cells would leave the gradients of others where they are."""
    whole = trace_model(source(build=Hourglass), CLIPS).stages[-1]
    model = Hourglass()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    paths = [f"blocks.{number}" for number in range(5)]
    arguments = {"video": torch.randn(1, 3, 2, 4, 4), "text": torch.randn(1, 6, 16)}
    flow = record_dataflow(model, paths, arguments, lambda output: output)
    for count in range(5):
        for cuts in combinations(range(1, 5), count):
            bounds = pairwise((0, *cuts, 5))
            owned = Cut(flow, tuple(tuple(paths[a:b]) for a, b in bounds)).parameters
            read = frozenset().union(*owned)
            unread = [name for name in sizes if name not in read]
            expected = [sum(sizes[name] for name in names) for names in owned]
            expected[0] += sum(sizes[name] for name in unread)
            assert [part.attrs["params"] for part in parts_of(whole, cuts)] == expected, cuts


class Numbers(Block):
    """Returns a number, and what it was given, beside its tokens."""

    def forward(self, x, text):
        return {"tokens": super().forward(x, text), "count": 3, "text": text, "nothing": None}


class Counting(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Numbers() for _ in range(3)])

    def forward(self, video, text, scale=1.0):
        x, text = self.embed(video).flatten(2).transpose(1, 2), self.text(text)
        for block in self.blocks:
            given = block(x, text)
            x, text = given["tokens"] * given["count"], given["text"]
            x += 1  # in place, as one may with a result
        return self.head(x) * scale


class InPlace(Model):
    def forward(self, video, text, scale=1.0):
        x, text = self.embed(video).flatten(2).transpose(1, 2), self.text(text)
        for block in self.blocks:
            x = block(x, text)
            x += 1
        return self.head(x) * scale


@pytest.mark.parametrize("build", [Counting, InPlace])
def test_blocks_may_return_numbers_and_have_their_results_written_in_place(build):
    assert trace_model(source(build=build), CLIPS).stages[-1].attrs["blocks"][0][1] == 3


def test_what_goes_between_stages_is_what_the_later_ones_read():
    """Of the model by hand: the tokens, and what the embedding made of the text and every block reads; no table."""
    model = Model()
    arguments = {"video": torch.randn(1, 3, 2, 4, 4), "text": torch.randn(1, 6, 16)}
    paths = [name for name, block in model.named_modules() if type(block).__name__ == "Block"]
    flow = record_dataflow(model, paths, arguments, lambda output: output)
    cut = Cut(flow, single_blocks(paths))
    for stage in (0, 1):
        handed = [(flow.calls[output.call].path, flow.form(output).shape) for output in cut.handed_on(stage)]
        assert sorted(handed) == [(paths[stage], (1, 8, WIDTH)), ("text", (1, 6, WIDTH))]
    owned = [sorted(names) for names in cut.parameters]
    assert sorted(name for names in owned for name in names) == sorted(name for name, _ in model.named_parameters())


def test_every_distinct_shape_is_run_through_the_whole_model_and_the_clip_is_named():
    class Choosy(Model):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if output.shape[1] == 11 * 4 * 6:
                raise ValueError("no head for that many")
            return output

    clips = [CLIPS[0], VideoClip("unlucky", 41, 64, 96, 40)]
    traced = trace_model(source(build=Choosy), clips)
    assert traced.tokens(clips[0]) == 5 * 4 * 6
    with pytest.raises(UserError, match=r"cannot take clip unlucky .*no head for that many"):
        traced.tokens(clips[1])
    assert not traced.untried


def test_shapes_past_the_time_of_compiling_are_known_by_name_and_a_loop_of_ones_own_tries_all(monkeypatch):
    monkeypatch.setattr(trace, "TRY_S", 0.0)
    traced = trace_model(source(), CLIPS)
    assert all(traced.tokens(clip) for clip in CLIPS)
    assert set(traced.untried) == {clip.shape for clip in CLIPS}
    assert "a run tries the rest in the background" in traced.unknowns[0]
    traced.counter.try_all(CLIPS)
    assert not traced.untried
