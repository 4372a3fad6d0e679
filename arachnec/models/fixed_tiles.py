"""VAEs that encode in tiles of one size alone (Diffusers' AutoencoderKLAllegro).

Their ``tiled_encode`` takes one clip, and leaves zeros, without a word, where no whole tile lies. So a clip whose sizes
are no tiles is refused before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError, user_error

Size = tuple[int, int, int]  # frames, height, width


def not_in_tiles_error(clip: str | int, vae: str, tile: str, stride: str, size: str, fitting: str) -> UserError:
    return user_error(
        f"clip `{clip}`: {vae} encodes in tiles of {tile} (frames x height x width), a new one every "
        f"{stride}, and {size} is not covered by whole tiles",
        help=f"give the clip {fitting} in the manifest; what no tile covers would be latents of zeros",
    )


@dataclass(frozen=True)
class FixedTiles:
    """Tiles of a VAE that has no other way to encode."""

    vae: str
    tile: Size
    stride: Size

    @classmethod
    def of(cls, vae: Any) -> FixedTiles | None:
        """Of a VAE, which is set to tiles; None where it encodes clips of any size."""
        tile, stride = getattr(vae, "kernel", None), getattr(vae, "stride", None)
        if not (_is_size(tile) and _is_size(stride) and hasattr(vae, "use_tiling")):
            return None
        vae.use_tiling = True  # it cannot encode otherwise
        return cls(type(vae).__name__, tile, stride)

    def demand(self, clip: VideoClip, size: Size) -> None:
        """Raises ``UserError`` for a clip that whole tiles do not cover."""
        fitting = tuple(_fitting(n, tile, step) for n, tile, step in zip(size, self.tile, self.stride, strict=True))
        if fitting != size:
            words = (_told(lengths) for lengths in (self.tile, self.stride, size, fitting))
            raise not_in_tiles_error(clip.name, self.vae, *words)


def _fitting(size: int, tile: int, stride: int) -> int:
    """The largest size, of at most this where there is one, that tiles cover."""
    return tile + max(0, size - tile) // stride * stride


def _is_size(value: Any) -> TypeGuard[Size]:
    return isinstance(value, tuple) and len(value) == 3 and all(isinstance(length, int) for length in value)


def _told(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))
