"""An update by an optimizer of the user's own: what its ``step`` raises is told as the user's mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arachnec.ir.diagnostic import Span, UserError, user_error
from arachnec.ir.users_code import users_frames
from arachnec.models.file import line_span, ran_out_of_memory
from arachnec.optimizers.recipe import Recipe


def failed_update_error(span: Span | None, kind: str, error: str, step: int, place: str) -> UserError:
    return user_error(
        f"`optimizer`, a {kind}, raised {error} in its update of step {step}",
        label=place,
        help=(
            "correct it, and resume from the last whole checkpoint: this step may have updated some "
            "parameters and is kept nowhere"
        ),
        span=span,
    )


@contextmanager
def told_update(recipe: Recipe, kind: str, step: int) -> Iterator[None]:
    """Raises ``UserError`` for what the user's code raised in the update of optimizer step ``step``, from 0.

    That is code of an optimizer that torch does not have, or a hook on one that it has. What torch itself raised, and
    memory that ran out, pass.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = users_frames(error)
        if ran_out_of_memory(error) or (recipe.kind is not None and not frames):
            raise
        message = " ".join(str(error).split())
        told = f"{type(error).__name__}{': ' if message else ''}{message}"
        if not frames:  # a class of an installed package
            raise failed_update_error(recipe.span, kind, told, step, "the optimizer comes from here") from error
        span = line_span(Path(frames[-1].filename), frames[-1].lineno or 1)
        raise failed_update_error(span, kind, told, step, "raised here") from error
