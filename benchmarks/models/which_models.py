"""Which models work: every video transformer class of the installed Diffusers, and ten plain styles, at degrees 1 to 4.

    python benchmarks/models/which_models.py [MODEL ...] [--write] [--missing]

Each model, small, trains one step on 4 gloo ranks by a plan whose cascades have degrees 3, 1, 4 and 2 in turn (a model
whose blocks run whole: degree 1), and its gradients are compared with those of a plain loop. The clips are those of
tests/acceptance. A row says what the model took: the step down (docs/models.md), and what a shared clip gathers.
``--write`` puts the rows into benchmarks/results/which_models.json and the table into docs/models.md; with names, only
theirs are measured and the others are kept. ``--missing`` measures those alone that the results have no row of: a run
that was cut short goes on, and one from the start begins without the file of results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "acceptance" / "models")]

import gradient_parity as parity  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "which_models.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
PLAN = parity.START + "assign{degrees=[3,1,4,2]},place," + parity.END
ALONE = parity.START + "assign{degrees=[1]},place," + parity.END

# Class of Diffusers to the acceptance model that is a small one of it.
DIFFUSERS = {
    "AllegroTransformer3DModel": "allegro",
    "AnyFlowTransformer3DModel": "anyflow",
    "ChronoEditTransformer3DModel": "chronoedit",
    "CogVideoXTransformer3DModel": "cogvideox",
    "ConsisIDTransformer3DModel": "consisid",
    "CosmosTransformer3DModel": "cosmos",
    "EasyAnimateTransformer3DModel": "easyanimate",
    "HeliosTransformer3DModel": "helios",
    "HunyuanVideo15Transformer3DModel": "hunyuanvideo_1_5",
    "HunyuanVideoFramepackTransformer3DModel": "hunyuanvideo_framepack",
    "HunyuanVideoTransformer3DModel": "hunyuanvideo",
    "JoyImageEditPlusTransformer3DModel": "joyimage_plus",
    "JoyImageEditTransformer3DModel": "joyimage",
    "Kandinsky5Transformer3DModel": "kandinsky",
    "Kandinsky6Transformer3DModel": "kandinsky6",
    "LTX2VideoTransformer3DModel": "ltx2",
    "LTXVideoTransformer3DModel": "ltx",
    "LatteTransformer3DModel": "latte",
    "MiniMaxH3Transformer3DModel": "minimax_h3",
    "MochiTransformer3DModel": "mochi",
    "MotifVideoTransformer3DModel": "motif_video",
    "SanaVideoTransformer3DModel": "sana_video",
    "SanaWMLTX2RefinerTransformer3DModel": "sana_wm_refiner",
    "SanaWMTransformer3DModel": "sana_wm",
    "SkyReelsV2Transformer3DModel": "skyreels",
    "WanAnimateTransformer3DModel": "wan_animate",
    "WanTransformer3DModel": "wan",
    "WanVACETransformer3DModel": "wan_vace",
}

NO_GRADIENT = "FlexAttention has no backward on a CPU"
NOT_TRIED = {
    "AnyFlowFARTransformer3DModel": NO_GRADIENT,
    "Kandinsky6SRTransformer3DModel": NO_GRADIENT,
    "WanAnimate2Transformer3DModel": "its forward reads a cache that another forward wrote; " + NO_GRADIENT,
}

STYLES = {
    "joint attention over text and video": "joint_streams",
    "attention as two matrix products": "attention_manual",
    "`nn.MultiheadAttention`": "attention_multihead",
    "U-ViT, long skip connections": "u_vit",
    "frames and places in turn, by the number of frames": "mixes_factorised",
    "tokens as a grid": "layout_grid",
    "rows of all clips in one axis": "layout_flat",
    "convolution over the tokens": "mixes_convolution",
    "experts chosen by a router": "experts",
    "a number made of the length": "size_logarithm",
}


def video_classes() -> list[str]:
    """By name: what Diffusers calls 3D or video, and trains."""
    import diffusers.models.transformers as transformers

    names = [name for name in dir(transformers) if re.search(r"(Transformer3D|Video\w*Transformer\w*)Model$", name)]
    return sorted(names)


def measure(style: str, model: str | None) -> dict[str, object]:
    """One row. A class without a small model here is not tried, and says so."""
    if model is None:
        reason = NOT_TRIED.get(style.strip("`"), "no small model of it here")
        return {"name": style, "took": f"not tried: {reason}", "error": None}
    started = time.perf_counter()
    file = parity.MODELS / f"{model}.py"
    row = {"name": style, "model": model, **trained(file, file)}
    if row["error"] is not None and row["error"] > parity.GRADIENT:
        with tempfile.TemporaryDirectory() as scratch:
            row["float64"] = trained(parity.in_float64(file, Path(scratch)), file)["error"]
    return row if row["error"] is None else {**row, "seconds": round(time.perf_counter() - started, 1)}


def trained(file: Path, named: Path) -> dict[str, object]:
    """What the model took, and its worst gradient error, or why there is none. Its clips are those of ``named``."""
    own = named.with_suffix(".jsonl")
    data = own if own.is_file() else parity.ACCEPTANCE / "clips.jsonl"
    with tempfile.TemporaryDirectory() as scratch:
        folder, bench = Path(scratch), parity.Bench()
        expected = folder / "expected.safetensors"
        try:
            loss = bench.call(parity.plain_loop, file, parity.read_clips(data), expected)
            took, degrees = bench.call(steps_of, file, data, timeout=600.0)
            plan = PLAN if degrees is None else ALONE
            ((planned, gradients),) = bench.call(
                parity.run_plans, file, data, {"plan": plan}, folder, timeout=900.0
            ).values()
        except RuntimeError as error:
            planned, gradients, took = None, str(error), "-"
        if planned is None:
            refused = gradients.startswith("REFUSED ")
            said = parity.last_line(gradients.removeprefix("REFUSED "), refused)
            return {"took": f"{'refused' if refused else 'failed'}: {said}", "error": None}
        error, worst = parity.compare(expected, gradients)
    return {
        "took": took,
        "degrees": [1, 2, 3, 4] if degrees is None else degrees,
        "error": error,
        "worst": worst,
        "loss": abs(planned - loss) / abs(loss),
    }


def steps_of(file: Path, data: Path) -> tuple[str, list[int] | None]:
    """What the model takes, in words, and its degrees where not all are legal."""
    from arachnec.data.manifest import read_manifest
    from arachnec.ir.nodes import integers
    from arachnec.models.file import load_model_file
    from arachnec.passes.trace import trace_model

    trace = trace_model(load_model_file(file), read_manifest(data).clips)
    attrs = trace.stages[-1].attrs
    graphs = {"shapes": "a graph for each clip shape", "none": "blocks whole on one rank"}
    words = [graphs[str(attrs["graphs"])]] if "graphs" in attrs else ["one graph"]
    if "most_clips" in attrs:
        words.append("batches of one")
    gathered = [line for line in trace.warnings if line.endswith((" bytes)", ": gathered"))]
    if gathered:
        words.append(f"{len(gathered)} operations gathered")
    return ", ".join(words), list(integers(attrs["degrees"])) if "degrees" in attrs else None


def table(rows: list[dict[str, object]]) -> str:
    lines = ["| model | degrees | what it took | worst gradient error |", "|---|---|---|---|"]
    for row in rows:
        error = "-" if row["error"] is None else f"{row['error']:.1e}"
        error += f"; in float64 {row['float64']:.1e}" if "float64" in row else ""
        degrees = "-" if row["error"] is None else ", ".join(map(str, row["degrees"]))
        lines.append(f"| {row['name']} | {degrees} | {row['took']} | {error} |")
    return "\n".join(lines)


def write(rows: dict[str, dict[str, object]], wanted: list[tuple[str, str | None]]) -> None:
    """The results and the page, after every row: a run that is cut short keeps what it measured."""
    import diffusers
    import torch

    listed = [rows[name] for name, _ in wanted if name in rows]
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__}
    RESULTS.write_text(json.dumps({"versions": versions, "rows": listed}, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    said = f"torch {versions['torch'].split('+')[0]}, Diffusers {versions['diffusers']}:"
    PAGE.write_text(f"{before}{BEGIN}\n{said}\n\n{table(listed)}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of files in tests/acceptance/models; default: all")
    parser.add_argument("--write", action="store_true", help="write the results and the page")
    parser.add_argument("--missing", action="store_true", help="measure what the results have no row of")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    wanted = [(f"`{name}`", DIFFUSERS.get(name)) for name in video_classes()] + list(STYLES.items())
    kept = {row["name"]: row for row in json.loads(RESULTS.read_text())["rows"]} if RESULTS.is_file() else {}
    rows = []
    for name, model in wanted:
        other = arguments.missing or (arguments.models and model not in arguments.models)
        known = kept.get(name) if other else None
        if known is None and arguments.models and model not in arguments.models:
            continue
        if model is None:
            known = None  # costs nothing
        row = known or measure(name, model)
        rows.append(row)
        if known is None:
            print(table([row]).splitlines()[-1], flush=True)
            if arguments.write:
                write(kept | {measured["name"]: measured for measured in rows}, wanted)
    bad = [row for row in rows if row["error"] is not None and not row["error"] <= parity.GRADIENT]
    return 1 if bad or any(str(row["took"]).startswith("failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
