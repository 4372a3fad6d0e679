"""How many of a head's keys travel to a rank that computes some of its query groups, on plain numbers.

Inside a machine all of them do. Between machines those that the groups chose, as far as there is room for them, and in
the steps in which the layer learns all, since what is measured there needs them. docs/sparse_planning.md.
"""

from __future__ import annotations

from arachnec.sparsity.learning_steps import SPARSE_EVERY

MARGIN = 1.5  # of room over what groups took when it was last measured


def independent(density: float, groups: int) -> float:
    """The share of key blocks that some of so many groups take, if each chooses by itself. Neighbours choose alike, so
    it is at most this."""
    return 1 - (1 - density) ** groups if density < 1 else 1.0


def keys_sent(density: float, groups: int, inside: float = 1.0) -> float:
    """The share of a head's keys that a rank gets for so many groups, mean over steps. ``inside`` is the share of the
    other ranks that are on its own machine."""
    chosen = min(1.0, MARGIN * independent(density, groups))
    between = 1 / SPARSE_EVERY + (1 - 1 / SPARSE_EVERY) * chosen
    return inside + (1 - inside) * between


def share_inside(degree: int, node: int) -> float:
    """Of the other ranks of a clip, those on one's own machine of ``node`` ranks; all of one rank's."""
    return 1.0 if degree <= max(1, node) else (node - 1) / (degree - 1)
