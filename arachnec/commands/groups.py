"""Groups of commands that say what a mistyped one may have meant."""

from __future__ import annotations

import difflib

import click


class SuggestingGroup(click.Group):
    """Refuses an unknown command with the nearest known ones."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], known, 1)
            remedy = f"did you mean `{near[0]}`?" if near else f"commands are {', '.join(known)}"
            ctx.fail(f"there is no command `{args[0]}`; {remedy}")
        return super().resolve_command(ctx, args)
