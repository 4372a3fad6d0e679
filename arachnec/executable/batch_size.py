"""How many clips make a global batch, where nothing says it: real clips want a word, and get a proposal."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from arachnec.cluster.topology import machines
from arachnec.data.manifest import Batch, Manifest
from arachnec.ir.diagnostic import Diagnostic, UserError, counted
from arachnec.ir.nodes import Cluster

TOKEN_PIXELS = 4 * 16 * 16  # of a video VAE with strides 4 x 8 x 8 and patches of 2 x 2
TOKEN_BYTES = 140e3  # activations of a token while a transformer of 14B parameters is trained, blocks recomputed


@dataclass(frozen=True)
class NoBatch(Diagnostic):
    title = "`{path}` lists {clips}, and nothing says how many of them make a global batch"
    help = "give --batch N, such as --batch {most}: {reason}; --batch all makes one step of all of them"
    path: str
    clips: str
    most: int
    reason: str


def require_batch(manifest: Manifest, batch: Batch, cluster: Cluster) -> Manifest:
    """The manifest itself. Raises ``UserError`` where its clips are real, and neither it nor ``batch`` says how many
    make a global batch."""
    real = any(clip.path is not None or clip.cached for clip in manifest.clips)
    if batch is None and not manifest.grouped and real:
        raise UserError(_no_batch(manifest, cluster))
    return manifest


def _no_batch(manifest: Manifest, cluster: Cluster) -> NoBatch:
    """Proposes as many clips as the devices can train at once, if each needs half of their memory at most for its
    activations."""
    clips = manifest.clips
    tokens = statistics.median(clip.frames * clip.height * clip.width for clip in clips) / TOKEN_PIXELS
    memory = min(node.memory for node in machines(cluster)) * 2**30
    ranks = max(1, math.ceil(tokens * TOKEN_BYTES / (memory / 2)))
    size = min(max(1, cluster.world // ranks), len(clips))
    reason = f"a clip for {'each device' if ranks == 1 else f'every {ranks} devices'} of this cluster"
    return NoBatch(None, str(manifest.path), counted(len(clips), "clip"), size, reason)
