"""BERT-48 as DAPPLE published it: a profile at batch 2, and two machines of eight V100."""

from __future__ import annotations

from itertools import pairwise

from arachnec.pipelining.hybrid_plan import Instance, Machines
from arachnec.pipelining.profile_file import read_profile


def line(node: str, name: str, forward: float, backward: float, activation: float, parameters: float) -> str:
    times = f"forward_compute_time={forward}, backward_compute_time={backward}"
    return f"{node} -- {name} -- {times}, activation_size={activation}, parameter_size={parameters}"


def bert_48() -> str:
    """The published profile: every layer reads the attention mask too."""
    rows = [
        ("input_ids", 0.01, 0, 9216, 0),
        ("attention_mask", 0.011, 0, 3538944, 0),
        ("embeddings", 0.056, 0, 4325376, 127131648),
        ("reshape_input", 0, 0, 4325376, 0),
        *((f"layer_{k}", 2.69, 4.47, 4325376, 50384896) for k in range(48)),
        ("pooler", 0, 0, 0, 4198400),
    ]
    chain = [0, *range(2, len(rows))]
    edges = [(a, b) for a, b in pairwise(chain)] + [(1, k) for k in range(4, 52)]
    lines = [line(f"node{k}", *row) for k, row in enumerate(rows)] + [f"\tnode{a} -- node{b}" for a, b in edges]
    return "\n".join(lines) + "\n"


V100 = Machines(2, 8)


def bert_instance() -> Instance:
    return Instance(read_profile(bert_48(), "bert48.txt"), V100, 64, 2, 2)
