"""Which libraries a model file will import, without running it."""

from __future__ import annotations

import pytest

from arachnec.models.imported_libraries import PARTS, imported_libraries

DIFFUSERS, TRANSFORMERS = PARTS["diffusers"], PARTS["transformers"]


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("from diffusers import AutoencoderKLWan", DIFFUSERS),
        ("from arachnec.models.diffusers import wan", DIFFUSERS),
        ("import diffusers.models as m", DIFFUSERS),
        ("def encoders():\n    import transformers", TRANSFORMERS),
        ("from transformers import T5Config\nimport diffusers", (*DIFFUSERS, *TRANSFORMERS)),
        ("import torch\nname = 'diffusers'", ()),
        ("from .diffusers import mine", ()),
        ("import (", ()),
        ("import diffusers\0", ()),
    ],
)
def test_a_library_is_found_wherever_the_file_imports_it(text: str, modules: tuple[str, ...]) -> None:
    assert imported_libraries([text.encode()]) == modules


def test_what_a_file_imports_of_its_folder_counts_too() -> None:
    assert imported_libraries([b"import torch", b"import diffusers"]) == DIFFUSERS
