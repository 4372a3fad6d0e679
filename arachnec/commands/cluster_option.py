"""``--cluster``, as every command takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

FORMS = "a TOML file, a short form such as 2x8:h100-80g or 4:cpu, or auto: the machine at hand, as `cluster detect`"


def cluster_option(what: str = "", *, default: str | None = None) -> Callable[[Any], Any]:
    """The option; required without a ``default``. ``what`` says which cluster is meant, where not any."""
    text = f"{what}: {FORMS}." if what else f"{FORMS[0].upper()}{FORMS[1:]}."
    return click.option(
        "--cluster", required=default is None, default=default, show_default=default is not None, help=text
    )
