"""To how many text tokens a model's captions are padded. In: how it is called. Out: the length, where there is one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor
from torch.utils._pytree import tree_leaves

from arachnec.data.clip import VideoClip
from arachnec.tracing.sample import ModelSource, arguments_of, clip_of, meta_encoders

PROBED = 2**14  # text tokens; where as many change nothing, captions do not reach the model as tokens


def padded_text(source: ModelSource, clips: Sequence[VideoClip]) -> int | None:
    """The most text tokens of a caption with which the model is given tensors of the same sizes as with these clips'.

    None where captions are not padded, or do not reach the model as tokens.
    """
    like, encoders = min(clips, key=lambda clip: clip.frames * clip.height * clip.width), meta_encoders(source)

    def sizes(text: int) -> list[tuple[int, ...]] | None:
        clip = clip_of(like, (like.frames, like.height, like.width), text)
        try:
            arguments = arguments_of(source, clip, encoders, device="meta")
        except Exception:  # the caption is longer than it takes
            return None
        return [tuple(leaf.shape) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]

    longest = max(clip.text_tokens for clip in clips)
    own = sizes(longest)
    if own is None or sizes(1) != own or sizes(PROBED) == own:
        return None
    return longest + bisect_left(range(longest + 1, PROBED), True, key=lambda text: sizes(text) != own)
