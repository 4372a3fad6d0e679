"""Diffusers' own video transformers, unpatched, at tiny sizes: the captured graph is the block, gradients too."""

import pytest
import torch

from arachnec.ir.diagnostic import UserError
from arachnec.tracing.blocks import call_lifted, capture_blocks
from arachnec.tracing.dims import B, S, T
from arachnec.tracing.record import ExampleCall
from tests.slow import quick
from tests.spmd.sequence_models import randomised

diffusers = pytest.importorskip("diffusers")
TEXT = 32


def latent(clip):
    return (clip[0] - 1) // 4 + 1, clip[1] // 8, clip[2] // 8


def wan(clip, batch, text):
    return {
        "hidden_states": torch.randn(batch, 4, *latent(clip)),
        "timestep": torch.linspace(1, 999, batch),
        "encoder_hidden_states": torch.randn(batch, text, TEXT),
    }


def hunyuan(clip, batch, text):
    mask = torch.ones(batch, text)
    mask[0, text // 2 :] = 0
    return {
        "hidden_states": torch.randn(batch, 4, *latent(clip)),
        "timestep": torch.linspace(1, 999, batch),
        "encoder_hidden_states": torch.randn(batch, text, TEXT),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(batch, 16),
        "guidance": torch.full((batch,), 6.0),
    }


def cogvideox(clip, batch, text):
    frames, height, width = latent(clip)
    return {
        "hidden_states": torch.randn(batch, frames, 4, height, width),
        "timestep": torch.linspace(1, 999, batch),
        "encoder_hidden_states": torch.randn(batch, text, TEXT),
    }


def cogvideox_rotary(clip, batch, text):
    frames, height, width = latent(clip)
    table = torch.randn(frames * height * width // 4, 16)
    return {**cogvideox(clip, batch, text), "image_rotary_emb": (table.cos(), table.sin())}


def ltx(clip, batch, text):
    frames, height, width = latent(clip)
    return {
        "hidden_states": torch.randn(batch, frames * height * width // 4, 4),
        "timestep": torch.linspace(1, 999, batch),
        "encoder_hidden_states": torch.randn(batch, text, TEXT),
        "encoder_attention_mask": torch.ones(batch, text),
        "num_frames": frames,
        "height": height // 2,
        "width": width // 2,
    }


def mochi(clip, batch, text):
    return {
        "hidden_states": torch.randn(batch, 4, *latent(clip)),
        "timestep": torch.linspace(1, 999, batch),
        "encoder_hidden_states": torch.randn(batch, text, TEXT),
        "encoder_attention_mask": torch.ones(batch, text),
    }


def cogvideox_model(rotary):
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, in_channels=4, out_channels=4, text_embed_dim=TEXT,
        time_embed_dim=16, sample_width=12, sample_height=8, sample_frames=9, max_text_seq_length=19,
        use_rotary_positional_embeddings=rotary,
    )  # fmt: skip


MODELS = {
    "wan": (
        lambda: diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=TEXT, freq_dim=16,
            ffn_dim=40, num_layers=3,
        ),
        wan, True, 1,
    ),
    "cogvideox": (lambda: cogvideox_model(False), cogvideox, False, 1),
    "cogvideox-rotary": (lambda: cogvideox_model(True), cogvideox_rotary, True, 1),
    "hunyuan": (
        lambda: diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
            num_single_layers=2, num_refiner_layers=1, text_embed_dim=TEXT, pooled_projection_dim=16,
            rope_axes_dim=(4, 6, 6),
        ),
        hunyuan, True, 2,
    ),
    "ltx": (
        lambda: diffusers.LTXVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24,
            num_layers=2, caption_channels=TEXT,
        ),
        ltx, True, 1,
    ),
}  # fmt: skip


def examples(make, text_moves=True):
    a, b, c = (9, 64, 96), (17, 32, 64), (9, 64, 128)
    wanted = [(a, 2, 19), (b, 2, 19), (c, 2, 19), (a, 3, 19)]
    wanted += [(a, 2, 23), (c, 1, 23)] if text_moves else [(c, 1, 19)]
    return [ExampleCall(make(*size), *size) for size in wanted]


@pytest.fixture(scope="module", params=quick(list(MODELS), "wan", "cogvideox-rotary"))
def captured(request):
    torch.manual_seed(0)
    build, make, text_moves, structures = MODELS[request.param]
    model = randomised(build())
    return model, make, text_moves, structures, capture_blocks(model, examples(make, text_moves))


def test_one_graph_per_structure_whatever_the_number_of_layers(captured):
    _, _, _, structures, result = captured
    assert len(result.blocks) == structures
    paths = [call.path for call in result.calls]
    assert len(paths) == len(set(paths)) == sum(len(block.instances) for block in result.blocks)


def test_blocks_form_one_chain(captured):
    *_, result = captured
    assert all(any(origin and origin.call == n for origin in call.origins) for n, call in enumerate(result.calls[1:]))


def test_every_shape_is_a_combination_of_batch_tokens_and_text(captured):
    _, _, text_moves, _, result = captured
    for block in result.blocks:
        symbols = {
            symbol for node in block.exported.graph.nodes for size in block.dims(node) for symbol in size.free_symbols
        }
        assert symbols == ({B, S, T} if text_moves else {B, S})
        assert block.output_dims[0][:2] == (B, S)


@pytest.mark.parametrize("size", [((9, 32, 96), 1, 31), ((25, 64, 64), 4, 17), ((13, 96, 32), 2, 24)])
def test_graph_equals_eager_in_fp32_at_shapes_it_never_saw(captured, size):
    model, make, text_moves, _, result = captured
    clip, batch, text = size
    for path, inputs, args, kwargs in block_calls(model, result, make(clip, batch, text if text_moves else 19)):
        captured_block, module = result.block_of(path), model.get_submodule(path)
        outputs = call_lifted(captured_block, module, inputs)
        again = tensors(module(*args, **kwargs))
        for a, b in zip(outputs, again, strict=True):
            assert (a - b).abs().max() <= 4e-7 * b.abs().max()  # kernels add in an order that follows memory alignment
        seeds = [torch.randn_like(x) for x in outputs]
        assert_same_gradients(module, inputs, outputs, again, seeds)


def block_calls(model, result, arguments):
    """The first call of every structure while the model runs: what it was given, with gradients wanted for it."""
    first = {result.blocks[call.block].name: call.path for call in reversed(result.calls)}
    calls, handles = [], []

    def wanted(leaf):
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    for path in first.values():

        def hook(module, args, kwargs, path=path):
            args, kwargs = torch.utils._pytree.tree_map(wanted, (args, kwargs))
            calls.append((path, result.block_of(path).flatten(module, args, kwargs), args, kwargs))

        handles.append(model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))
    model.train()
    model(**arguments)
    for handle in handles:
        handle.remove()
    return calls


def assert_same_gradients(module, inputs, actual, expected, seeds):
    sources = [x for x in inputs if x.requires_grad] + list(module.parameters())
    a, b = (torch.autograd.grad(out, sources, seeds, allow_unused=True) for out in (actual, expected))
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x - y).abs().max() <= 1e-6 * max(y.abs().max(), 1e-3)


def tensors(output):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


@pytest.mark.filterwarnings(
    "ignore:In CPU autocast"
)  # Mochi's positions: a region in fp32, which the CPU does not have
def test_a_block_that_loops_over_the_batch_is_refused_with_its_line():
    model = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=12, num_layers=3, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=TEXT, time_embed_dim=16, max_sequence_length=64,
    )  # fmt: skip
    with pytest.raises(UserError) as refused:
        capture_blocks(model, examples(mochi))
    (diagnostic,) = refused.value.diagnostics
    assert "cannot capture MochiTransformerBlock" in diagnostic.message
    assert "fixes a size" in diagnostic.message
