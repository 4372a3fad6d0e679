"""Training with sparse attention where the keys that matter are known by construction.

    python benchmarks/sparse/training.py [--steps 200] [--ways dense,sparse,window,random] [--json FILE]

A clip is a grid of 4 x 16 x 16 tokens, cut into cubes of 16 neighbours. Each cube has a twin somewhere else with the
same random code. A token knows its cube's code, its place in the cube, which of the two twins it belongs to, and a
random payload; it must give the payload of the token at its place in the twin. So one key in 1024 matters, and a group
of 64 queries needs 4 of the 64 key blocks.

`sparse` begins dense, trains its predictors, and each layer turns sparse and dense again by its own measurements.
`window` and `random` attend to the nearest blocks and to drawn ones, as many as `sparse` kept per head at its end, from
the step at which it turned. All ways see the same clips. Loss is that of 16 clips that none has trained on. Last, both
sources of a predictor, trained on the dense model's layers: what q and k are made of, and q and k themselves.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks, density
from arachnec.kernels.sparse.predictor import (
    Projections,
    held_mass,
    initial_projections,
    kept_blocks,
    predicted_scores,
    score_loss,
    true_scores,
)
from arachnec.kernels.sparse.token_cubes import TokenCubes, token_cubes
from arachnec.kernels.sparse.video_attention import predicted_lists
from arachnec.spmd.sharded_model import SequenceModel, install
from arachnec.spmd.sparse_layers import Layer, LayerState, SparseCascade, after
from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.record import ExampleCall

GRID, SIZES = (4, 16, 16), (64, 16, 8)
CODE, PAYLOAD, WIDTH, HEADS, CLIPS = 10, 4, 64, 2, 4
WAYS = ("dense", "sparse", "window", "random")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        with torch.no_grad():  # at first tokens attend to those like them, as trained video models do
            self.qkv.weight[: 2 * WIDTH] = 1.5 * nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)).repeat(2, 1)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        b, s, c = x.shape
        return tuple(self.qkv(self.norm1(x)).view(b, s, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(CODE + 7 + PAYLOAD, WIDTH), nn.Linear(WIDTH, PAYLOAD)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def clips(seed: int, count: int, grid: tuple[int, int, int] = GRID) -> tuple[Tensor, Tensor]:
    """Tokens [count, S, features] in raster order, and the payloads of their twins [count, S, PAYLOAD]."""
    rng = torch.Generator().manual_seed(seed)
    cubes = token_cubes(grid, queries=SIZES[0], keys=SIZES[1], cell=SIZES[2])
    blocks, video = len(cubes.blocks) - 1, cubes.video
    size = video // blocks
    inputs, targets = [], []
    for _ in range(count):
        pairs = torch.randperm(blocks, generator=rng).view(2, -1)
        codes = F.normalize(torch.randn(blocks // 2, CODE, generator=rng), dim=1) * CODE**0.5
        code, side = torch.empty(blocks, CODE), torch.empty(blocks, 1)
        for half in (0, 1):
            code[pairs[half]], side[pairs[half]] = codes, 1.0 - 2 * half
        twin = torch.empty(blocks, dtype=torch.int64)
        twin[pairs[0]], twin[pairs[1]] = pairs[1], pairs[0]
        place = torch.arange(size)
        corners = torch.stack([(place >> bit & 1) * 2.0 - 1 for bit in range(4)], 1)
        payload = torch.randn(blocks, size, PAYLOAD, generator=rng)
        rows = [code[:, None].expand(-1, size, -1), corners.expand(blocks, -1, -1), side[:, None].expand(-1, size, -1)]
        rows += [torch.ones(blocks, size, 2), payload]
        inputs.append(torch.cat(rows, 2).reshape(video, -1)[cubes.places])
        targets.append(payload[twin].reshape(video, -1)[cubes.places])
    return torch.stack(inputs), torch.stack(targets)


@dataclass
class Run:
    losses: list[tuple[int, float]]
    history: list[dict[str, object]]
    turned: int | None = None
    seconds: float = 0.0
    kept: Mapping[Layer, list[int]] | None = None
    model: nn.Module | None = None


def fresh() -> tuple[SequenceModel, dict[Layer, LayerState]]:
    torch.manual_seed(0)
    model = Model()
    examples = []
    for clip in (1, 2):
        for batch in (2, 3):
            grid = (clip, 16, 16)
            examples.append(ExampleCall({"tokens": clips(0, batch, grid)[0]}, grid, batch, 0))
    sequence = install(model, capture_blocks(model, examples, verify=False))
    return sequence, sequence.sparsify()


def fixed_lists(way: str, kept: list[int], cubes: TokenCubes, count: int, seed: int) -> KeyLists:
    """The nearest blocks to each group, or drawn ones."""
    groups, blocks = len(cubes.groups) - 1, len(cubes.blocks) - 1
    place = torch.stack(torch.unravel_index(cubes.order, GRID), 1).float()
    middle = [
        torch.stack([part.mean(0) for part in place.split(s.diff().tolist())]) for s in (cubes.groups, cubes.blocks)
    ]
    distance = torch.cdist(*middle).expand(count, len(kept), -1, -1)
    rng = torch.Generator().manual_seed(seed)
    score = distance if way == "window" else torch.rand(count, len(kept), groups, blocks, generator=rng)
    table = torch.zeros(count, len(kept), groups, blocks, dtype=torch.bool)
    for head, keep in enumerate(kept):
        table[:, head].scatter_(2, score[:, head].argsort(-1)[..., :keep], True)
    return KeyLists(table.nonzero()[:, 3].int(), table.sum(-1, dtype=torch.int32))


def train(way: str, steps: int, like: Run | None) -> Run:
    sequence, layers = fresh()
    optimizer = torch.optim.Adam(sequence.model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    validation = clips(1 << 20, 16)
    cubes = token_cubes(GRID, queries=SIZES[0], keys=SIZES[1], cell=SIZES[2])
    run, started = Run([], []), time.process_time()

    def cascade(step: int, count: int, weight: float | None) -> SparseCascade:
        replay: dict[Layer, KeyLists | None] = {}
        if like is not None and like.turned is not None and step >= like.turned:
            assert like.kept is not None
            replay = {at: fixed_lists(way, kept, cubes, count, step) for at, kept in like.kept.items()}
        known = layers if way == "sparse" else {at: replace(state, sparse=False) for at, state in layers.items()}
        return SparseCascade(known, GRID, f"0/{step}/clips", weight=weight, sizes=SIZES, replay=replay)

    for step in range(steps):
        inputs, targets = clips(step, CLIPS)
        sparse = cascade(step, CLIPS, 1.0 if way == "sparse" else None)
        with sequence.use(None, sparse=sparse):
            loss = F.mse_loss(sequence.model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        if way == "sparse":
            layers = {at: after(state, sparse.measured[at]) for at, state in layers.items()}
            if run.turned is None and all(state.sparse for state in layers.values()):
                run.turned = step + 1
        if (step + 1) % 50 == 0 or step + 1 == steps:
            with torch.no_grad(), sequence.use(None, sparse=cascade(step + 1, 16, None)):
                run.losses.append((step + 1, F.mse_loss(sequence.model(validation[0]), validation[1]).item()))
            run.history.append(
                {"step": step + 1}
                | {
                    f"{path}": {
                        "loss": round(sparse.measured[path, n].loss.mean().item(), 4),
                        "held": round(sparse.measured[path, n].held.mean().item(), 4),
                        "of_best": round(sparse.measured[path, n].of_best.mean().item(), 4),
                        "sparsity": [round(x, 3) for x in state.sparsities],
                        "needed": [round(x, 3) for x in state.densities],
                        "computed": None
                        if (lists := sparse.lists[path, n]) is None
                        else [round(x, 3) for x in density(lists, len(cubes.blocks) - 1).mean(0).tolist()],
                    }
                    for (path, n), state in layers.items()
                    if way == "sparse"
                }
            )
            print(f"{way:>7} {run.losses[-1]} {json.dumps(run.history[-1]) if way == 'sparse' else ''}", flush=True)
    run.kept = {at: kept_blocks(state.densities, len(cubes.blocks) - 1) for at, state in layers.items()}
    run.seconds, run.model = time.process_time() - started, sequence.model
    return run


def sources(model: nn.Module, steps: int = 150) -> list[dict[str, object]]:
    """For each layer and source of a predictor that is trained on a model that stays as it is: loss, and the share of
    the best choice's attention that chosen blocks hold, on a clip that it has not seen, at one tenth of the keys."""
    cubes = token_cubes(GRID, queries=SIZES[0], keys=SIZES[1], cell=SIZES[2])
    blocks = len(cubes.blocks) - 1
    rows = []
    for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
        for name in ("made of", "q and k"):
            rng = torch.Generator().manual_seed(0)
            by = initial_projections(HEADS, WIDTH if name == "made of" else WIDTH // HEADS, WIDTH // HEADS, 16, rng)
            leaves = (by.query.requires_grad_(), by.key.requires_grad_())
            optimizer = torch.optim.Adam(leaves, lr=1e-2)
            for step in range(steps + 1):
                with torch.no_grad():
                    x = model.embed(clips(5000 + step, 1)[0])  # type: ignore[operator]
                    for before in list(model.blocks)[:layer]:  # type: ignore[arg-type]
                        x = before(x)
                    query, key, _ = block.heads(x)
                    source = block.norm1(x)[:, None] if name == "made of" else None
                    pair = (source, source) if source is not None else (query, key)
                chosen = torch.randint(cubes.video, (64,), generator=rng)
                true = true_scores(query[:, :, chosen], key, (WIDTH // HEADS) ** -0.5)
                loss = score_loss(predicted_scores(pair[0][:, :, chosen], pair[1], Projections(*leaves)), true).mean()
                if step < steps:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            lists = predicted_lists(*pair, Projections(*(x.detach() for x in leaves)), cubes, [blocks // 10] * HEADS)
            table = chosen_blocks(lists, blocks)
            scores = true_scores(query, key[:, :, cubes.order], (WIDTH // HEADS) ** -0.5)[:, :, cubes.order]
            shares = [
                held_mass(part, table[:, :, group], cubes.blocks)
                for group, part in enumerate(scores.split(cubes.groups.diff().tolist(), 2))
            ]
            held, of_best = (torch.stack(part).mean().item() for part in zip(*shares, strict=True))
            rows.append({"layer": layer, "source": name, "loss": round(loss.item(), 4)})
            rows[-1] |= {"held": round(held, 3), "of_best": round(of_best, 3)}
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, Run] = {}
    for way in options.ways.split(","):
        runs[way] = train(way, options.steps, runs.get("sparse") if way in ("window", "random") else None)
    result: dict[str, object] = {"steps": options.steps}
    for way, run in runs.items():
        ratio = run.losses[-1][1] / runs["dense"].losses[-1][1] if "dense" in runs else None
        print(
            f"{way:>7}: loss {run.losses[-1][1]:.5f}, over dense {ratio and round(ratio, 4)}, {run.seconds:.0f} s CPU"
        )
        result[way] = {"losses": run.losses, "over_dense": ratio, "turned": run.turned, "history": run.history}
    if runs.get("dense") is not None and runs["dense"].model is not None:
        model = Model()
        model.load_state_dict({k: v for k, v in runs["dense"].model.state_dict().items() if "sparse_" not in k})
        result["sources"] = sources(model)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
