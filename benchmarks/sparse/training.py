"""Training with sparse attention beside dense attention, a window and random lists of equal density.

    python benchmarks/sparse/training.py [--tasks twins,clips,clips-16] [--ways dense,sparse,sparse-8,window,random]
        [--seeds N] [--first SEED] [--steps N] [--kept DIR] [--json FILE]

Tasks are ``twins``, ``clips`` and ``clips-16`` (`training_tasks.py`). ``sparse`` begins dense, trains its predictors,
and each layer turns sparse and dense again by its own measurements; its layers learn in every step. In ``sparse-N``
they learn in the steps in which a run's do (`head_shares.py`), those that are sparse in every Nth. ``window`` and
``random`` attend to the nearest blocks and to drawn ones, in every step and layer as many as ``sparse`` kept there.
All ways see the same clips. Loss is that of clips that none has trained on, every layer as it is then.

Of one clip of these, as training goes on: the attention of its queries that the chosen blocks hold (``mass``), and
``recall``, the share of critical keys that they hold: the keys that are the fewest to hold 90 % of a query's attention,
and in ``twins`` of the keys that are right by construction. At the end both sources of a predictor, trained on the
layers of the dense model: what q and k are made of, and q and k themselves.

With several seeds each begins from other weights and trains on other clips; all are judged by the same. ``sources`` are
of the first. Ways of one seed are a pair: the same weights, clips and order of clips. ``over_dense`` is the mean of the
pairs' ratios, ``error_over_dense`` its standard error. With ``--kept`` every run of a seed and a way is a file there,
which is taken where it is already, and one that was stopped goes on: so runs can be made one by one, by several
processes, and put together by a last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training_tasks import TASKS, Grid, Task

from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks
from arachnec.kernels.sparse.predictor import (
    MASS,
    Projections,
    block_mass,
    held_mass,
    initial_projections,
    kept_blocks,
    predicted_scores,
    score_loss,
    true_scores,
)
from arachnec.kernels.sparse.token_cubes import TokenCubes
from arachnec.kernels.sparse.video_attention import predicted_lists
from arachnec.sparsity.head_shares import learns
from arachnec.spmd.sharded_model import SequenceModel, install
from arachnec.spmd.sparse_layers import Layer, LayerState, SparseCascade, after
from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.record import ExampleCall

WIDTH = 64
WAYS = ("dense", "sparse", "window", "random")


class Block(nn.Module):
    def __init__(self, heads: int, alike: bool) -> None:
        super().__init__()
        self.count = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        if alike:
            with torch.no_grad():
                self.qkv.weight[: 2 * WIDTH] = 1.5 * nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)).repeat(2, 1)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        b, s, c = x.shape
        return tuple(self.qkv(self.norm1(x)).view(b, s, 3, self.count, c // self.count).permute(2, 0, 3, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(task.features[0], WIDTH), nn.Linear(WIDTH, task.features[1])
        self.blocks = nn.ModuleList(Block(task.heads, task.alike) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Run:
    losses: list[tuple[int, float]] = field(default_factory=list)
    history: list[dict[str, object]] = field(default_factory=list)
    kept: list[dict[Layer, list[int] | None]] = field(default_factory=list)  # by step; None: dense
    seconds: float = 0.0
    model: nn.Module | None = None


def fresh(task: Task, seed: int) -> tuple[SequenceModel, dict[Layer, LayerState]]:
    torch.manual_seed(seed)
    model = Model(task)
    examples = []
    for frames in (1, 2):
        for batch in (2, 3):
            grid = (frames, *task.grid[1:])
            tokens = torch.zeros(batch, frames * task.grid[1] * task.grid[2], task.features[0])
            examples.append(ExampleCall({"tokens": tokens}, grid, batch, 0))
    sequence = install(model, capture_blocks(model, examples, verify=False))
    return sequence, sequence.sparsify()


def fixed_lists(way: str, kept: list[int], cubes: TokenCubes, grid: Grid, count: int, seed: int) -> KeyLists:
    """The nearest blocks to each group, or drawn ones."""
    groups, blocks = len(cubes.groups) - 1, len(cubes.blocks) - 1
    place = torch.stack(torch.unravel_index(cubes.order, grid), 1).float()
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


def train(task: Task, way: str, steps: int, seed: int, like: Run | None, saved: Path | None = None) -> Run:
    """``saved`` is a file to go on from where it is there, written at every check."""
    kind, _, cadence = way.partition("-")
    sparse_every = int(cadence or 1)
    sequence, layers = fresh(task, seed)
    optimizer = torch.optim.Adam(sequence.model.parameters(), lr=task.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.rate, total_steps=steps)
    inputs, targets = task.clips(0, task.judged, False)
    cubes, run, every = task.cubes, Run(), max(1, steps // task.checks)
    blocks = len(cubes.blocks) - 1

    def cascade(step: int, count: int, weight: float | None) -> SparseCascade:
        known = layers if kind == "sparse" else {at: replace(state, sparse=False) for at, state in layers.items()}
        replay: dict[Layer, KeyLists | None] = {}
        resting = {
            at
            for number, (at, state) in enumerate(known.items())
            if cadence and not learns(number, step, state.sparse, sparse_every)
        }
        draws = tuple(f"{seed}/{step}/{clip}" for clip in range(count))
        if like is not None:
            for at, kept in like.kept[min(step, len(like.kept) - 1)].items():
                replay[at] = kept and fixed_lists(way, kept, cubes, task.grid, count, step)
        return SparseCascade(
            known, task.grid, draws, weight=weight, sizes=task.sizes, replay=replay, resting=frozenset(resting)
        )

    begin = 0
    if saved is not None and saved.exists():
        known = torch.load(saved, weights_only=False)
        begin, run = known["step"], known["run"]
        for part, name in ((sequence.model, "model"), (optimizer, "optimizer"), (schedule, "schedule")):
            part.load_state_dict(known[name])
        layers = {
            at: replace(state, sparsities=a, densities=b, sparse=c)
            for (at, state), (a, b, c) in zip(layers.items(), known["layers"], strict=True)
        }
    for step in range(begin, steps + 1):
        if step % every == 0 and step > begin and saved is not None:
            parts = {"model": sequence.model, "optimizer": optimizer, "schedule": schedule}
            state = {name: part.state_dict() for name, part in parts.items()}
            rows = [(at.sparsities, at.densities, at.sparse) for at in layers.values()]
            torch.save({"step": step, "run": run, "layers": rows, **state}, saved)
        if step % every == 0 or step == steps:
            with torch.no_grad(), sequence.use(None, sparse=cascade(step, task.judged, None)):
                run.losses.append((step, F.mse_loss(sequence.model(inputs), targets).item()))
            if way != "dense":
                chosen = quality(task, sequence, cascade(step, 1, None))
                run.history.append({"step": step, "layers": chosen})
            print(f"{task.name} {seed} {way:>7} {run.losses[-1]} {json.dumps(run.history[-1:])}", flush=True)
        kept = {n: kept_blocks(s.densities, blocks) if s.sparse else None for n, s in layers.items()}
        run.kept.append(kept)
        if step == steps:
            break
        started = time.process_time()
        tokens, wanted = task.clips(100_000 * seed + step, task.batch, True)
        sparse = cascade(step, task.batch, 1.0 if kind == "sparse" else None)
        with sequence.use(None, sparse=sparse):
            loss = F.mse_loss(sequence.model(tokens), wanted)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        for at, measured in sparse.measured.items() if kind == "sparse" else ():
            layers[at] = after(layers[at], measured, task.largest_loss)
        run.seconds += time.process_time() - started
    run.model = sequence.model
    return run


def quality(task: Task, sequence: SequenceModel, cascade: SparseCascade) -> list[dict[str, object]]:
    """By layer, of the first validation clip: what its lists hold, by head."""
    entered: list[Tensor] = []
    blocks = list(sequence.model.blocks)  # type: ignore[arg-type]
    hooks = [block.register_forward_pre_hook(lambda _, args: entered.append(args[0])) for block in blocks]
    with torch.no_grad(), sequence.use(None, sparse=cascade):
        sequence.model(task.clips(0, task.judged, False)[0][:1])
    for hook in hooks:
        hook.remove()
    cubes = cascade.cubes(task.cubes.video, None)
    size = WIDTH // task.heads
    rows: list[dict[str, object]] = []
    for (layer, lists), block, x in zip(cascade.lists.items(), blocks, entered, strict=True):
        state = cascade.layers[layer]
        row: dict[str, object] = {"sparsity": [round(s, 3) for s in state.sparsities]}
        if lists is not None:
            with torch.no_grad():
                query, key, _ = block.heads(x)
                weights = true_scores(query, key, size**-0.5).softmax(-1)[0]
            table = chosen_blocks(lists, len(cubes.blocks) - 1)[0]
            seen = torch.repeat_interleave(table, cubes.groups.diff(), 1).repeat_interleave(cubes.blocks.diff(), 2)
            seen = seen[:, cubes.places][:, :, cubes.places]
            ranked = weights.sort(-1, descending=True)
            needed = torch.zeros_like(seen).scatter_(2, ranked.indices, ranked.values.cumsum(-1) - ranked.values < MASS)
            row["density"] = _rounded(table.float().mean((1, 2)))
            row["mass"] = _rounded((weights * seen).sum(-1).mean(-1))
            row["recall"] = _rounded((needed & seen).sum((1, 2)) / needed.sum((1, 2)))
            if task.critical is not None:
                right = task.critical(0)[None, :, None].expand(task.heads, -1, 1)
                row["recall_of_twins"] = _rounded(seen.gather(2, right).float().mean((1, 2)))
                row["mass_of_twins"] = _rounded(weights.gather(2, right).mean((1, 2)))
        rows.append(row)
    return rows


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def sources(task: Task, model: nn.Module, steps: int = 150) -> list[dict[str, object]]:
    """For each layer and source of a predictor that is trained on a model that stays as it is: loss, and the share of
    the best choice's attention that chosen blocks hold, on a clip that it has not seen, at one tenth of the keys."""
    cubes, heads, size = task.cubes, task.heads, WIDTH // task.heads
    blocks = len(cubes.blocks) - 1
    rows = []
    for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
        for name in ("made of", "q and k"):
            rng = torch.Generator().manual_seed(0)
            by = initial_projections(heads, WIDTH if name == "made of" else size, size, 16, rng)
            leaves = (by.query.requires_grad_(), by.key.requires_grad_())
            optimizer = torch.optim.Adam(leaves, lr=1e-2)
            for step in range(steps + 1):
                with torch.no_grad():
                    x = model.embed(task.clips(5000 + step, 1, step < steps)[0])  # type: ignore[operator]
                    for before in list(model.blocks)[:layer]:  # type: ignore[arg-type]
                        x = before(x)
                    query, key, _ = block.heads(x)
                    source = block.norm1(x)[:, None] if name == "made of" else None
                    pair = (source, source) if source is not None else (query, key)
                chosen = torch.randint(cubes.video, (64,), generator=rng)
                true = true_scores(query[:, :, chosen], key, size**-0.5)
                loss = score_loss(predicted_scores(pair[0][:, :, chosen], pair[1], Projections(*leaves)), true).mean()
                if step < steps:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            lists = predicted_lists(*pair, Projections(*(x.detach() for x in leaves)), cubes, [blocks // 10] * heads)
            table = chosen_blocks(lists, blocks)
            scores = true_scores(query, key[:, :, cubes.order], size**-0.5)[:, :, cubes.order]
            shares = [
                held_mass(block_mass(part, cubes.blocks), table[:, :, group])
                for group, part in enumerate(scores.split(cubes.groups.diff().tolist(), 2))
            ]
            held, of_best = (torch.stack(part).mean().item() for part in zip(*shares, strict=True))
            rows.append({"layer": layer, "source": name, "loss": round(loss.item(), 4)})
            rows[-1] |= {"held": round(held, 3), "of_best": round(of_best, 3)}
            print(task.name, rows[-1], flush=True)
    return rows


def trained(task: Task, way: str, steps: int, seed: int, like: Run | None, kept: Path | None) -> Run:
    """``train``, or what it came to before: ``kept`` is a folder of runs."""
    file = None if kept is None else kept / f"{task.name}-{steps}-{seed}-{way}.json"
    if file is not None and file.exists():
        known = json.loads(file.read_text())
        rows = [{(path, site): blocks for path, site, blocks in row} for row in known.pop("kept")]
        weights = file.with_suffix(".safetensors")
        return Run(**known, kept=rows, model=_model_of(task, load_file(weights)) if weights.exists() else None)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    saved = None if file is None else file.with_suffix(".state")
    run = train(task, way, steps, seed, like, saved)
    if file is not None:
        rows = [[(*layer, blocks) for layer, blocks in row.items()] for row in run.kept]
        told = {"losses": run.losses, "history": run.history, "seconds": run.seconds, "kept": rows}
        if (way, seed) == ("dense", 0) and run.model is not None:  # for ``sources``
            save_file(dict(run.model.state_dict()), file.with_suffix(".safetensors"))
        file.with_suffix(".part").write_text(json.dumps(told))
        file.with_suffix(".part").rename(file)
        file.with_suffix(".state").unlink(missing_ok=True)
    return run


def _model_of(task: Task, weights: Mapping[str, Tensor]) -> Model:
    model = Model(task)
    model.load_state_dict({name: value for name, value in weights.items() if "sparse_" not in name})
    return model


def compare(task: Task, ways: list[str], steps: int, seed: int, kept: Path | None) -> dict[str, object]:
    runs: dict[str, Run] = {}
    for way in ways:
        like = runs["sparse"] if way in ("window", "random") else None
        runs[way] = trained(task, way, steps, seed, like, kept)
    result: dict[str, object] = {"seed": seed}
    for way, run in runs.items():
        ratio = run.losses[-1][1] / runs["dense"].losses[-1][1] if "dense" in runs else None
        print(f"{task.name} {seed} {way:>7}: loss {run.losses[-1][1]:.5f}, over dense {ratio}, {run.seconds:.0f} s CPU")
        losses = [(step, round(loss, 6)) for step, loss in run.losses]
        result[way] = {"losses": losses, "over_dense": ratio and round(ratio, 4), "cpu_s": round(run.seconds, 1)}
        result[way] |= {"history": run.history} if run.history else {}  # type: ignore[operator]
    dense = runs.get("dense")
    if seed == 0 and dense is not None and dense.model is not None:
        result["sources"] = sources(task, _model_of(task, dense.model.state_dict()))
    return result


def spread(runs: list[dict[str, object]], way: str) -> dict[str, float]:
    """Of this way's last losses over seeds: the mean, the spread (standard deviation over the mean), and the mean,
    spread and standard error of the mean of each seed's loss over that of dense."""
    losses, ratios = (
        [of_way[key] if key == "over_dense" else of_way["losses"][-1][1] for of_way in (run[way] for run in runs)]  # type: ignore[index]
        for key in ("losses", "over_dense")
    )
    told = {"mean": statistics.mean(losses), "spread": statistics.pstdev(losses) / statistics.mean(losses)}
    if None not in ratios:
        told |= {"over_dense": statistics.mean(ratios), "spread_over_dense": statistics.pstdev(ratios)}
        if len(ratios) > 1:
            told |= {"error_over_dense": statistics.stdev(ratios) / len(ratios) ** 0.5}
    return {name: round(value, 6) for name, value in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kept", type=Path, help="a folder of runs: taken where they are there, else trained")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {"torch": torch.__version__}
    ways = options.ways.split(",")
    for name in options.tasks.split(","):
        task = TASKS[name]()
        steps = options.steps or task.steps
        runs: list[dict[str, object]] = []
        for seed in range(options.first, options.first + options.seeds):
            runs.append(compare(task, ways, steps, seed, options.kept))
            of_task = {"grid": task.grid, "sizes": task.sizes, "steps": steps, "batch": task.batch}
            result[name] = {**of_task, "over_seeds": {way: spread(runs, way) for way in ways}, "seeds": runs}
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
