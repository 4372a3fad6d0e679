"""What a block gives at a size is told from its graph: shapes, strides and types are those of its own forward."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from arachnec.ir.diagnostic import UserError
from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.known_outputs import forwards_of_shapes
from arachnec.tracing.record import flatten_call
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


def on_meta(twist=None, block=ContiguousBlock):
    with torch.device("meta"):
        model = Model()
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
    blocks = [block for block, _, _ in calls]
    for block in set(blocks):
        block.qkv.forward = never_run
    forwards = forwards_of_shapes(model, captured)
    assert set(forwards) == set(blocks)
    with torch.no_grad():
        assert [forms(forwards[block](*args, **kwargs)) for block, args, kwargs in calls] == expected
    assert flatten_call(blocks[0], *calls[0][1:])[1] == captured.blocks[0].spec


def test_a_call_of_another_form_runs_the_block():
    model = on_meta()
    captured = capture_blocks(model, plain_examples("meta"))
    (block, *_), forward = (
        calls_of(model, captured, sized(2, 2, 2, 3)),
        next(iter(forwards_of_shapes(model, captured).values())),
    )
    text, video = torch.empty(1, 3, WIDTH, device="meta"), torch.empty(1, 8, WIDTH + 1, device="meta")
    with torch.no_grad(), pytest.raises(RuntimeError):  # torch's own, of what does not go together
        forward(text, video=video)
    assert block[0] in forwards_of_shapes(model, captured)


@pytest.mark.parametrize("taken", [lambda x: x.shape[1] < 400, lambda x: x.shape[1] % 2 == 1], ids=["longest", "odd"])
def test_a_block_that_asks_more_of_a_size_is_run(taken):
    def twist(block, x):
        if not taken(x):
            raise ValueError("too long")
        return x

    model = on_meta(twist)
    try:
        captured = capture_blocks(model, plain_examples("meta"))
    except UserError:
        return  # its sizes cannot be symbols at all: nothing is told from its graph
    assert not forwards_of_shapes(model, captured)


def test_a_block_that_is_given_views_is_run():
    model = on_meta(block=Block)
    assert not forwards_of_shapes(model, capture_blocks(model, plain_examples("meta")))
