"""How the command line answers an unknown command or option, or a missing argument: with what to write."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup

from paceline.errors import SpecError


class Verbs(TyperGroup):
    """The verbs; an option that is really a setting is answered with the word to write."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _short_faults():
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0][:1] != "-" and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            from paceline.settings.suggest import unknown_command

            raise SpecError(unknown_command(args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _short_faults():
            try:
                return super().invoke(ctx)
            except Exception as fault:
                kind = type(fault).__name__  # click's, which some versions of typer bring as their own
                if kind == "NoSuchOption":
                    _refuse_option(fault)
                if kind == "MissingParameter":
                    raise _missing_argument(fault) from None
                if kind in ("NoSuchOption", "BadParameter", "BadOptionUsage", "BadArgumentUsage", "UsageError"):
                    raise SpecError(_in_one_line(fault)) from None
                raise


@contextmanager
def _short_faults() -> Iterator[None]:
    """Cut what click says of a very long word, which it repeats whole; help is a fault to it as well, and stays."""
    try:
        yield
    except Exception as fault:
        if type(fault).__name__ != "NoArgsIsHelpError" and isinstance(message := getattr(fault, "message", None), str):
            from paceline.settings.read import cut

            fault.message = cut(message, 400)  # type: ignore[attr-defined]
        raise


def _refuse_option(fault: Any) -> None:
    """Say what to write in place of an unknown option, where that is known."""
    from paceline.settings.addresses import all_addresses
    from paceline.settings.read import cut
    from paceline.settings.suggest import elsewhere

    words = " ".join(str(parameter.metavar) for parameter in fault.ctx.command.params)
    known = [key for key in all_addresses() if "[KEY=VALUE]" in words or (key.startswith("on.") and "on.KEY" in words)]
    argument = re.search(rf"\0{re.escape(fault.option_name)}[=\0]([^-\0][^\0]*)", "\0".join(sys.argv))
    value = cut(argument[1]) if argument else "..."
    option = fault.option_name.lstrip("-").replace("-", "_")
    instead = " or ".join(f"{key}={value}" for key in elsewhere(option, known))
    if option == "resume":
        instead = f"paceline resume {value}"
    if instead:
        raise SpecError(f"there is no option {fault.option_name}; write {instead}") from None


def _in_one_line(fault: Any) -> str:
    """Click's own sentence on a word that it cannot use, and where the right ones are listed."""
    from paceline.settings.read import cut

    sentence = cut(fault.format_message().removesuffix("."), 400)
    command = fault.ctx.command_path if fault.ctx else "paceline COMMAND"  # of a missing value, click does not say
    return f"{sentence}; {command} -h lists what there is"


def _missing_argument(fault: Any) -> SpecError:
    """What is said of click's fault that an argument is missing: which one, and what the command takes."""
    command = fault.ctx.command_path
    takes = " ".join(str(each.metavar) for each in fault.ctx.command.params if each.param_type_name == "argument")
    if fault.param.param_type_name == "option":
        option = f"{fault.param.opts[0]} {fault.param.metavar}"
        return SpecError(f"{fault.param.opts[0]} is missing; write {command} {takes} {option}")
    return SpecError(f"{str(fault.param.metavar).split()[0]} is missing; write {command} {takes}")
