"""A diffusion transformer that knows nothing of Diffusers, and everything that capturing refuses."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Level, Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.tracing.blocks import Origin, call_lifted, capture_blocks
from arachnec.tracing.dims import B, S, T
from arachnec.tracing.export import FlatBlock, export_block
from arachnec.tracing.find import find_blocks
from arachnec.tracing.flops import block_flops, token_attentions
from arachnec.tracing.graph import block_graph
from arachnec.tracing.memory import block_memory
from arachnec.tracing.record import ExampleCall, flatten_call

WIDTH, HEADS = 24, 3


class Block(nn.Module):
    """Text tokens join the video's in attention; ``twist`` is what a test changes."""

    def __init__(self, twist=None, dropout=0.0):
        super().__init__()
        self.twist = twist
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)])
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, text, *, video, scale=1.0):
        length = text.shape[1]
        x = torch.cat([text, video], dim=1)
        if self.twist:
            x = self.twist(self, x)
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + scale * self.out[1](self.out[0](y))
        return {"text": x[:, :length], "video": x[:, length:]}


class Model(nn.Module):
    def __init__(self, layers=4, twist=None, between=None, dropout=0.0):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.stages = nn.ModuleList(
            [nn.ModuleList([Block(twist, dropout) for _ in range(layers // 2)]) for _ in range(2)]
        )
        self.between = between

    def forward(self, video, text):
        text, video = self.embed(text), self.embed(video.flatten(2).transpose(1, 2))
        for number, block in enumerate(block for stage in self.stages for block in stage):
            text, video = block(text, video=video).values()
            if self.between:
                video = self.between(number, video)
        return video


def examples(device="cpu"):
    def make(clip, batch, text):
        frames, height, width = clip
        return {
            "video": torch.randn(batch, 4, frames, height, width, device=device),
            "text": torch.randn(batch, text, 4, device=device),
        }

    a, b = (3, 4, 6), (5, 4, 2)
    sizes = [(a, 2, 19), (b, 2, 19), (a, 3, 19), (a, 2, 23), (b, 1, 23)]
    return [ExampleCall(make(*size), *size) for size in sizes]


def scaled(x, setting):
    if callable(setting):
        return setting(x)
    return x * (setting["by"] if isinstance(setting, dict) else setting)


def refused(said, **changes):
    with pytest.raises(UserError) as raised:
        capture_blocks(Model(**changes), examples())
    (diagnostic,) = raised.value.diagnostics
    assert said in diagnostic.message
    return diagnostic


@pytest.fixture(scope="module")
def plain():
    """A model and what was captured of it, for tests that only read."""
    model = Model()
    return model, capture_blocks(model, examples())


def test_nested_lists_of_blocks_are_found_and_are_one_structure(plain):
    model, captured = plain
    assert list(find_blocks(model)) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert [block.name for block in captured.blocks] == ["Block"]
    assert all(any(origin and origin.call == n for origin in call.origins) for n, call in enumerate(captured.calls[1:]))
    assert captured.calls[1].origins == (Origin(0, 0), Origin(0, 1))


def test_inputs_are_named_and_shaped_whatever_way_they_are_passed(plain):
    (block,) = plain[1].blocks
    assert block.input_names == ("text", "video")
    assert block.input_dims == ((B, T, WIDTH), (B, S, WIDTH))
    assert block.output_dims == ((B, T, WIDTH), (B, S, WIDTH))


def test_a_graph_that_is_kept_for_a_run_keeps_neither_weights_nor_inputs(plain):
    exported = plain[1].blocks[0].exported
    assert exported.state_dict and all(value.is_meta for value in exported.state_dict.values())
    assert exported.example_inputs is None


def test_captured_on_meta_is_captured_on_the_cpu():
    torch.manual_seed(0)
    real = Model()
    with torch.device("meta"):
        empty = Model()
    on_meta, on_cpu = capture_blocks(empty, examples("meta")), capture_blocks(real, examples())
    assert [block_graph(block) for block in on_meta.blocks] == [block_graph(block) for block in on_cpu.blocks]
    assert on_meta.calls == on_cpu.calls
    assert all(parameter.is_meta for parameter in empty.parameters())
    block = real.stages[1][1]
    inputs = (torch.randn(1, 7, WIDTH), torch.randn(1, 7, WIDTH))  # a caption as long as the video
    expected = block(inputs[0], video=inputs[1])
    assert torch.equal(
        on_meta.blocks[0].unflatten(call_lifted(on_meta.blocks[0], block, inputs))["video"], expected["video"]
    )


def test_capture_leaves_the_model_as_it_was():
    model = Model().eval()
    model.stages[0][0].gradient_checkpointing = True
    before = copy.deepcopy(model)
    capture_blocks(model, examples())
    assert not any(module.training for module in model.modules())
    assert model.stages[0][0].gradient_checkpointing is True
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert not model._forward_hooks and "forward" not in model.stages[0][0].__dict__


@pytest.mark.parametrize(
    "setting", [lambda by: by, lambda by: {"by": by}, lambda by: partial(torch.mul, other=by)], ids=["n", "{}", "f()"]
)
def test_blocks_with_other_settings_are_other_structures(setting):
    model = Model(twist=lambda block, x: scaled(x, block.alpha))
    for index, block in enumerate(block for stage in model.stages for block in stage):
        block.alpha = setting(1.0 + (index == 3))
    captured = capture_blocks(model, examples())
    assert [block.instances for block in captured.blocks] == [
        ("stages.0.0", "stages.0.1", "stages.1.0"),
        ("stages.1.1",),
    ]


def test_a_difference_that_no_attribute_tells_is_found_in_the_last_block_of_a_structure():
    scales = {}
    model = Model(twist=lambda block, x: x * scales[id(block)])
    scales.update({id(block): 1.0 + (number == 3) for number, block in enumerate(find_blocks(model).values())})
    with pytest.raises(UserError, match="in another block: output 0 is off by"):
        capture_blocks(model, examples())


def test_a_forward_that_a_block_was_given_for_itself_is_its_own_and_stays():
    with torch.device("meta"):
        model = Model()
    own = model.stages[1][1]
    own.forward = partial(type(own).forward, own, scale=2.0)
    captured = capture_blocks(model, examples("meta"))
    assert [len(block.instances) for block in captured.blocks] == [3, 1]
    assert own.forward.keywords == {"scale": 2.0}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_that_a_hook_computes_are_one_structure_on_the_meta_device():
    with torch.device("meta"):
        model = Model()
        for block in find_blocks(model).values():
            torch.nn.utils.weight_norm(block.out[0])
    assert len(capture_blocks(model, examples("meta")).blocks) == 1


def test_settings_that_no_forward_reads_make_no_structure():
    model = Model(twist=lambda block, x: x * block.alpha)
    for index, block in enumerate(block for stage in model.stages for block in stage):
        block.index, block.alpha = index, 1.0 + index % 2
    kinds = {path: type(block) for path, block in find_blocks(model).items()}
    captured = capture_blocks(model, examples())
    assert [block.instances for block in captured.blocks] == [
        ("stages.0.0", "stages.1.0"),
        ("stages.0.1", "stages.1.1"),
    ]
    assert {path: type(block) for path, block in find_blocks(model).items()} == kinds


@pytest.mark.parametrize("use", [lambda video: video * 1.0, lambda video: (video.mean(), video)[1]])
def test_an_output_that_the_model_reads_itself_ends_the_chain(use):
    captured = capture_blocks(Model(between=lambda number, video: use(video) if number == 1 else video), examples())
    assert Origin(1, 1) in captured.escapes
    assert captured.calls[2].origins == (Origin(1, 0), None)


def test_a_call_of_another_form_is_refused(plain):
    model, captured = plain
    (block,) = captured.blocks
    text, video = torch.randn(1, 7, WIDTH), torch.randn(1, 9, WIDTH)
    with pytest.raises(UserError, match="was called with"):
        block.flatten(model.stages[0][0], (text,), {"video": video, "scale": 2.0})


def test_flops_are_those_of_the_formula_in_the_literature(plain):
    (block,) = plain[1].blocks
    joint = S + T
    assert (block_flops(block) - (8 * B * joint * WIDTH**2 + 4 * B * joint**2 * WIDTH)).expand() == 0
    (attention,) = token_attentions(block)
    assert attention.joint and attention.heads == HEADS
    assert (attention.traffic - 4 * 4 * B * joint * WIDTH).expand() == 0


def test_fused_attention_keeps_no_scores_and_the_saved_bytes_are_autograd_s(plain):
    (block,) = plain[1].blocks
    memory = block_memory(block, (True, True))
    token = 4 * (
        WIDTH + 3 * WIDTH + WIDTH + HEADS
    )  # the joined input, q k v in one storage, the output, a logsumexp a head
    assert (memory.saved - B * (S + T) * token).expand() == 0
    assert (memory.chained - 4 * B * (S + T) * WIDTH).expand() == 0
    assert S**2 not in (memory.saved + memory.workspace).expand().atoms()


@pytest.mark.parametrize(("dtype", "weight"), [(torch.bfloat16, True), (torch.float32, False)])
def test_the_rms_norm_of_a_gpu_keeps_its_input_as_it_is(dtype, weight):
    """A CPU's keeps it in fp32, and before the weight once more; of a GPU 2 bytes an element in bf16, and 4 a row."""

    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH, elementwise_affine=weight)

        def forward(self, text, *, video):
            return {"text": text, "video": self.norm(video * 2.0)}

    model = Model().to(dtype)
    model.stages = nn.ModuleList([Normed().to(dtype) for _ in range(2)])
    model.forward = lambda video, text: _run(model, video, text)
    calls = examples()
    for call in calls:
        call.arguments.update({name: value.to(dtype) for name, value in call.arguments.items()})
    (block,) = capture_blocks(model, calls, verify=False).blocks
    of_gpu, of_cpu = (block_memory(block, (False, True), gpu=gpu).saved for gpu in (True, False))
    own = dtype.itemsize * WIDTH  # the doubled video
    assert (of_gpu - B * S * (own + 4)).expand() == 0
    copies = 2 if weight else 1
    assert (of_cpu - B * S * (4 * WIDTH * copies + 4)).expand() == 0


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_gpu_has_no_kernel_of_an_rms_norm_whose_weight_is_of_another_precision():
    class Mixed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)

        def forward(self, text, *, video):
            return {"text": text, "video": self.norm(video.bfloat16()).float()}

    model = Model()
    model.stages = nn.ModuleList([Mixed() for _ in range(2)])
    model.forward = lambda video, text: _run(model, video, text)
    (block,) = capture_blocks(model, examples(), verify=False).blocks
    assert block_memory(block, (False, True), gpu=True).saved == block_memory(block, (False, True)).saved


def test_attention_written_out_is_found_and_its_scores_are_paid_for():
    class Written(Block):
        def forward(self, text, *, video):
            q, k, v = self.qkv(video).chunk(3, dim=2)
            video = video + (q @ k.transpose(1, 2)).softmax(-1) @ v
            return {"text": text, "video": video}

    model = Model()
    model.stages = nn.ModuleList([Written() for _ in range(2)])
    model.forward = lambda video, text: _run(model, video, text)
    (block,) = capture_blocks(model, examples()).blocks
    (attention,) = token_attentions(block)
    assert (attention.traffic - 4 * 4 * B * S * WIDTH).expand() == 0
    assert block_memory(block, (False, True)).saved.coeff(B * S**2) >= 4


def _run(model, video, text):
    text, video = model.embed(text), model.embed(video.flatten(2).transpose(1, 2))
    for block in model.stages:
        text, video = block(text, video=video).values()
    return video


def test_graph_text_names_every_dimension_and_parses_back(plain):
    (block,) = plain[1].blocks
    module = Module("traced", Level.TRACED, graphs=(block_graph(block),))
    text = print_module(module)
    assert parse_module(text) == module
    assert "%video : f32[B, S, 24]" in text and "f32[B, S + T, 72]" in text
    assert '"aten.scaled_dot_product_attention.default"' in text


def test_dropout_that_drops_is_refused_by_name():
    diagnostic = refused("drops activations at random (p = 0.1)", dropout=0.1)
    assert "stages.0.0.out.1" in diagnostic.message


def test_functional_dropout_is_refused_at_its_line():
    diagnostic = refused("at random (p = 0.25)", twist=lambda block, x: F.dropout(x, 0.25, block.training))
    assert diagnostic.span.file == __file__


def test_random_numbers_in_a_block_are_refused_at_their_line():
    diagnostic = refused("draws random numbers of its own", twist=lambda block, x: x + torch.randn_like(x))
    assert diagnostic.span.file == __file__


def test_a_block_that_writes_its_buffer_is_refused():
    refused("writes to calls in its forward", twist=lambda block, x: (block.calls.add_(1), x)[1])


def test_a_branch_on_values_is_refused_at_its_line():
    diagnostic = refused("torch.export cannot capture", twist=lambda block, x: x if x.sum() > 0 else -x)
    assert diagnostic.span.file == __file__


def test_what_only_values_tell_is_wrong_with_a_block_is_refused_at_its_line():
    def mixed(block, x):
        return F.linear(x, block.out[0].weight.bfloat16()).float()

    for twist, reason in ((mixed, "same dtype"), (lambda block, x: _NoBackward.apply(x), "not yet")):
        with torch.device("meta"):
            model = Model(twist=twist)
        with pytest.raises(UserError) as raised:
            capture_blocks(model, examples("meta"))
        (diagnostic,) = raised.value.diagnostics
        assert "runs without values, and not with them" in diagnostic.message
        assert diagnostic.span.file == __file__ and reason in diagnostic.message


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("not yet")


def test_a_size_kept_as_a_number_is_refused():
    refused("fixes a size", twist=lambda block, x: x * 2 if x.shape[1] == 91 else x)


def test_a_graph_that_differs_at_another_shape_is_not_believed():
    with pytest.raises(UserError, match="differs from the model at another shape"):
        capture_blocks(Model(twist=lambda block, x: x * _remembered(x)), examples())


def _remembered(x):
    """1 in eager, 2 under export: what a graph cannot know is wrong in it."""
    return 1.0 + float(torch.compiler.is_exporting())


def test_a_part_without_gradients_is_refused_for_the_graph_would_give_it_some():
    def without(block, x):
        with torch.no_grad():
            weight = block.out[0](x).sigmoid()
        return x * weight

    with pytest.raises(UserError, match="has another gradient of"):
        capture_blocks(Model(twist=without), examples())


def test_a_detached_part_is_captured_as_it_is():
    captured = capture_blocks(Model(twist=lambda block, x: x * block.out[0](x).sigmoid().detach()), examples())
    assert len(captured.blocks) == 1


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match="no repeated blocks"):
        capture_blocks(nn.Sequential(nn.Linear(2, 2)), examples())


def test_a_model_whose_blocks_see_no_clip_is_refused():
    model = Model()
    model.forward = lambda video, text: model.stages[0][0](model.embed(text), video=model.embed(text))
    with pytest.raises(UserError, match="grows with the clip"):
        capture_blocks(model, examples())


def test_a_size_fixed_by_torch_alone_is_not_laid_on_a_line_of_the_caller() -> None:
    x = torch.randn(2, 5)
    block = nn.Linear(5, 3)
    with pytest.raises(UserError, match="fixes a size") as refused:
        export_block("linear", FlatBlock(block, *flatten_call(block, (x,), {})), [x], [[1]])
    assert [diagnostic.span for diagnostic in refused.value.diagnostics] == [None]
