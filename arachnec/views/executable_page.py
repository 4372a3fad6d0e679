"""The page of an executable: what ``arachnec compile``, ``run`` and ``show --html`` write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arachnec.data.clip import VideoClip
from arachnec.executable.folder import versions
from arachnec.ir.nodes import Module
from arachnec.views.explain import summary
from arachnec.views.planned_and_measured import cost_sources, differences
from arachnec.views.timeline import Timeline, planned
from arachnec.views.timeline_page import page

PAGE = "timeline.html"  # its name in an executable's folder


def executable_page(
    module: Module,
    *measured: Timeline,
    pipeline: str | None = None,
    clips: Sequence[VideoClip] = (),
    libraries: Mapping[str, str] | None = None,
) -> str:
    """The page of a lowered module.

    ``measured`` are timelines of runs of it, ``clips`` those of the whole manifest by their ids, ``libraries`` the
    versions it was compiled with, by default those that are installed.
    """
    cluster = module.cluster
    assert cluster is not None, "a lowered module has a cluster"
    about = {
        "cluster": f"@{cluster.name}",
        "stages": ", ".join(
            f"@{stage.name}" + (f" ({source})" if (source := stage.attrs.get("source")) else "")
            for stage in module.stages
        ),
        "costs from": cost_sources(module),
        "pipeline": pipeline or "",
    } | dict(libraries if libraries is not None else versions())
    about = {word: text for word, text in about.items() if text}
    plan = planned(module)
    sentences = [(section.title, section.sentences) for section in summary(module, plan)]
    notes = differences(module, plan, measured[-1]) if measured else []
    return page(module, plan, *measured, clips=clips, about=about, sentences=sentences, notes=notes)
