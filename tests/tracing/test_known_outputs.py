"""What a block gives at a size is told from its graph: shapes, strides and types are those of its own forward."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.captured import forwards_of_shapes
from tests.tracing.test_capture_plain import WIDTH, Block, Model
from tests.tracing.test_capture_plain import examples as plain_examples


def calls_of(model, captured, arguments):
    """The inputs of every captured call of one forward."""
    calls = []

    def note(block, args, kwargs):
        calls.append((block, args, kwargs))

    blocks = [model.get_submodule(path) for block in captured.blocks for path in block.instances]
    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    with torch.no_grad(), torch.device("meta"):
        model(**arguments)
    for hook in hooks:
        hook.remove()
    return calls


def forms(outputs):
    """The stride of a dimension of one place is nobody's."""
    leaves, spec = pytree.tree_flatten(outputs)
    strides = [[stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in leaves]
    return [(x.shape, stride, x.dtype, x.device) for x, stride in zip(leaves, strides, strict=True)], spec


class ContiguousBlock(Block):
    def forward(self, text, *, video, scale=1.0):
        return {name: part.contiguous() for name, part in super().forward(text, video=video, scale=scale).items()}


def on_meta(twist=None, block=ContiguousBlock, kind=Model):
    with torch.device("meta"):
        model = kind()
        model.stages = nn.ModuleList([nn.ModuleList([block(twist) for _ in range(2)])])
        return model


def sized(frames, height, width, text):
    return {
        "video": torch.empty(1, 4, frames, height, width, device="meta"),
        "text": torch.empty(1, text, 4, device="meta"),
    }


def never_run(*args, **kwargs):
    raise AssertionError("the block itself ran")


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (7, 2, 3, 40), (21, 5, 5, 3)])
def test_outputs_are_those_of_the_block(size):
    model = on_meta()
    captured = capture_blocks(model, plain_examples("meta"))
    calls = calls_of(model, captured, sized(*size))
    expected = [forms(block(*args, **kwargs)) for block, args, kwargs in calls]
    blocks = {block for block, _, _ in calls}
    forwards = forwards_of_shapes(model, captured)
    assert set(forwards) == blocks
    with torch.no_grad():
        for block, args, kwargs in calls_of(model, captured, sized(2, 3, 4, 5)):  # met once, the block itself runs
            forwards[block](*args, **kwargs)
        for block in blocks:
            block.qkv.forward = never_run
        assert [forms(forwards[block](*args, **kwargs)) for block, args, kwargs in calls] == expected


def test_sizes_that_do_not_go_together_are_refused_by_the_block():
    model = on_meta()
    forward, *_ = forwards_of_shapes(model, capture_blocks(model, plain_examples("meta"))).values()
    text, video = torch.empty(1, 3, WIDTH, device="meta"), torch.empty(1, 8, WIDTH + 1, device="meta")
    with torch.no_grad():
        forward(text, video=torch.empty(1, 8, WIDTH, device="meta"))
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            forward(text, video=video)


class CountingBlock(ContiguousBlock):
    def forward(self, text, *, video, frames):
        if frames > 9:
            raise ValueError("too many")
        return super().forward(text, video=video)


class CountingModel(Model):
    def forward(self, video, text):
        frames = video.shape[2]
        text, video = self.embed(text), self.embed(video.flatten(2).transpose(1, 2))
        for block in self.stages[0]:
            text, video = block(text, video=video, frames=frames).values()
        return video


def test_a_block_is_run_with_every_number_once():
    model = on_meta(block=CountingBlock, kind=CountingModel)
    captured = capture_blocks(model, plain_examples("meta"))
    ((_, number, fixed),) = captured.blocks[0].constants
    assert number == 3 and not fixed  # the graph does not say what the block makes of another
    forward, *_ = forwards_of_shapes(model, captured).values()
    text, video = torch.empty(1, 3, WIDTH, device="meta"), torch.empty(1, 8, WIDTH, device="meta")
    with torch.no_grad():
        forward(text, video=video, frames=9)
        with pytest.raises(ValueError, match="too many"):
            forward(text, video=video, frames=10)
        for block in model.stages[0]:
            block.qkv.forward = never_run
        forward(text, video=video, frames=9)


@pytest.mark.parametrize("taken", [lambda x: x.shape[1] < 400, lambda x: x.shape[1] % 2 == 1], ids=["longest", "odd"])
def test_a_block_that_asks_more_of_a_size_is_run(taken):
    def twist(block, x):
        if not taken(x):
            raise ValueError("too long")
        return x

    model = on_meta(twist)
    assert not forwards_of_shapes(model, capture_blocks(model, plain_examples("meta")))


def test_a_block_that_is_given_views_is_run():
    model = on_meta(block=Block)
    assert not forwards_of_shapes(model, capture_blocks(model, plain_examples("meta")))
