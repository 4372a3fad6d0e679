"""Which layers attend to chosen keys and why the others do not, in sentences."""

from __future__ import annotations

from arachnec.ir.diagnostic import counted
from arachnec.ir.head_density import layer_densities
from arachnec.ir.nodes import Module, Stage
from arachnec.planning.sparse_summary import SparseSummary, sparse_summaries
from arachnec.views.format import ranges


def sparse_sentences(module: Module) -> list[str]:
    """Nothing for a module that no ``sparsify`` went over."""
    sentences = []
    for summary in sparse_summaries(module):
        sentences += of_stage(summary)
    for stage in module.stages:
        sentences += _reasons(stage)
    return sentences


def of_stage(summary: SparseSummary) -> list[str]:
    name, layers = f"@{summary.stage.name}", list(layer_densities(summary.stage))
    heads = f"from {_percent(summary.least)} to {_percent(summary.most)} by head"
    if summary.least == summary.most:
        heads = "the same for every head"
    which = (
        "all layers" if summary.sparse == summary.layers else f"{counted(summary.sparse, 'layer')} ({ranges(layers)})"
    )
    sentences = [
        f"In {name} {which} may attend to chosen keys: predicted {_percent(summary.density)} of the keys, {heads}."
    ]
    if summary.classes:
        by_class = ", ".join(
            f"{_percent(x)} from {counted(tokens, 'token')} on" for tokens, x in summary.classes.items()
        )
        sentences.append(f"By class of length, means of all heads: {by_class}.")
    if summary.measured is not None:
        sentences.append(
            f"A run measured {counted(summary.measured, 'layer')} as sparse by then, and the plan is made for what it "
            "measured; the others attend to all keys and their predictors learn."
        )
    total = len(summary.chosen) + len(summary.dense)
    if summary.chosen:
        shortest = min(cascade.tokens for cascade in summary.chosen)
        does = "does" if total == 1 else "do"
        cascades = f"{len(summary.chosen)} of {counted(total, 'cascade')} {does}"
        sentences.append(f"{cascades}, from {counted(shortest, 'token')} a clip on.")
    if summary.dense:
        longest = max(cascade.tokens for cascade in summary.dense)
        stays = "stays" if total == 1 else "stay"
        cascades = f"{len(summary.dense)} of {counted(total, 'cascade')} {stays} dense"
        sentences.append(
            f"{cascades}, up to {counted(longest, 'token')} a clip: choosing keys and learning which would take longer "
            "than it saves."
        )
    if summary.imbalance > 1:
        how = "cut between query groups" if summary.stage.attrs.get("division") != "heads" else "kept whole"
        sentences.append(
            f"Heads are {how}: of the ranks of a clip the heaviest computes {summary.imbalance:.3f} times the mean, in "
            "the worst layer."
        )
    return sentences


def _reasons(stage: Stage) -> list[str]:
    rows = stage.attrs.get("dense", ())
    assert isinstance(rows, tuple)
    return [f"`{row[0]}` of @{stage.name} attends to all keys: {row[1]}." for row in rows if isinstance(row, tuple)]


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %"
