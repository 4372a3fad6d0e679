"""An `encode` cascade on more ranks than clips: they make one clip after the other together, in their own group."""

from dataclasses import replace
from pathlib import Path

from arachnec.executable.folder import write_executable
from arachnec.models.file import load_model_file
from tests.distributed.executor_cases import (
    ENCODER,
    MODEL,
    Work,
    assert_same_gradients,
    clip,
    lowered,
    plain_loop,
    traced,
    train_on,
)

FRAMES = """

class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv3d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.use_tiling = TILES
        self.encoder = nn.Conv3d(4, 4, 1)

    def load(self, clip, device):
        values = torch.linspace(0, 9 + clip.start, 2 * tokens(clip), device=device)
        return values.view(1, 2, clip.frames, clip.height // 8, clip.width // 8).sin()

    def forward(self, x):
        x = self.norm(self.enter(x))
        parts = x.split(1, dim=4) if self.use_tiling else [x]
        return torch.cat([self.encoder(part) for part in parts], 4).flatten(2).mT
"""
CLIPS = (clip("a", 3, 40, 24), clip("b", 3, 40, 24), clip("c", 2, 24, 32))
WORKS = [
    Work((0, 1), (2, 0, 1), 0.0, "vae"),  # two clips, each by all three
    Work((2,), (1, 2), 1.0, "vae"),
    Work((0, 1), (0, 1, 2), 2.0, "dit", ("c0",)),
    Work((2,), (0,), 3.0, "dit", ("c1",)),  # one that took no part gets what they made
]


def test_clips_that_ranks_share_train_as_in_a_plain_loop(tmp_path: Path) -> None:
    for tiles in (False, True):
        folder = tmp_path / str(tiles)
        folder.mkdir()
        source = folder / "source.py"
        source.write_text(MODEL + ENCODER + FRAMES.replace("TILES", str(tiles)))
        module = traced(3, [CLIPS], encoder=True)
        divided = [replace(s, attrs=s.attrs.updated(divides=3 if s.name == "vae" else None)) for s in module.stages]
        module = replace(module, stages=tuple(divided))
        write_executable(
            folder,
            program=lowered(module, WORKS),
            traced=module,
            pipeline="default",
            model_file=load_model_file(source),
            clips=CLIPS,
        )
        report = train_on(3, folder, save_gradients=folder / "g.safetensors")
        loss, gradients = plain_loop(folder, CLIPS)
        assert abs(report["steps"][0]["loss"] - loss) <= 1e-6 * abs(loss)
        assert_same_gradients(folder / "g.safetensors", gradients)


UNREADABLE = """

read = Vae.load


def load(self, clip, device):
    if clip.id == "b" and device.type != "meta":
        raise OSError("no such file")
    return read(self, clip, device)


Vae.load = load
"""


def test_a_clip_that_its_ranks_cannot_read_is_set_aside_and_nobody_waits(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(MODEL + ENCODER + FRAMES.replace("TILES", "False") + UNREADABLE)
    module = traced(3, [CLIPS], encoder=True)
    divided = [replace(s, attrs=s.attrs.updated(divides=3 if s.name == "vae" else None)) for s in module.stages]
    module = replace(module, stages=tuple(divided))
    clips, program = CLIPS, lowered(module, WORKS)
    model_file = load_model_file(source)
    write_executable(tmp_path, program=program, traced=module, pipeline="default", model_file=model_file, clips=clips)
    report = train_on(3, tmp_path, save_gradients=tmp_path / "g.safetensors")
    assert [note["clip"] for note in report["steps"][0]["set_aside"]] == ["b"]
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "model.py").write_text(MODEL + ENCODER + FRAMES.replace("TILES", "False"))
    loss, gradients = plain_loop(whole, [CLIPS[0], CLIPS[2]])
    assert abs(report["steps"][0]["loss"] - loss) <= 1e-6 * abs(loss)
    assert_same_gradients(tmp_path / "g.safetensors", gradients)
