"""Options that several commands have; those of sharding are made from the record of ``shard()``'s own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from trueshard.options import FIELDS, NAMES

Nproc = Annotated[
    int | None, typer.Option("--nproc", help="Processes to start on this machine.", metavar="N", show_default=False)
]
Optimizer = Annotated[str | None, typer.Option(help="adamw, sgd, muon, or a class.", metavar="NAME")]
Tokens = Annotated[
    int | None, typer.Option("--sequence", help="Tokens of a sample.", metavar="N", min=1, show_default=False)
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Take this plan, JSON.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting: train.steps=100. Unset it: train.steps=.", metavar="KEY=VALUE"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def count(what: str) -> Any:
    """Return an option that is a whole number; its default needs no words."""
    return typer.Option(help=what, metavar="N", min=1, show_default=False)


def word(what: str, metavar: str) -> Any:
    """Return an option that is a text; its default needs no words."""
    return typer.Option(help=what, metavar=metavar, show_default=False)


def flag(name: str, what: str) -> Any:
    """Return an option that is on or off."""
    return typer.Option(name, help=what, show_default=False)


def spread(
    name: str, parameters: Iterable[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a command: typer sees ``parameters`` in place of its argument ``name``.

    ``make`` returns the argument for the values that the command line gave them, by name. What the command has as a
    parameter of its own, too, it gets as well.
    """
    inserted = list(parameters)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        local = inspect.signature(command, eval_str=True).parameters
        names = {parameter.name for parameter in inserted}
        shown: list[inspect.Parameter] = []
        for parameter in local.values():
            if parameter.name == name:
                shown += inserted
            elif parameter.name not in names:
                shown.append(parameter)
        shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            argument = make({parameter.name: values[parameter.name] for parameter in inserted})
            return command(**{key: argument if key == name else values[key] for key in local})

        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined] # typer reads it
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return run

    return decorate


def takes_options(leave_out: tuple[str, ...] = (), **defaults: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for a command with an argument ``options``: the options of ``shard()``, one each on the line.

    Args:
        leave_out: options that the command has in a form of its own.
        defaults: where they are not those of ``shard()``.
    """
    names = [name for name in NAMES if name not in leave_out]
    parameters = [_parameter(name, defaults.get(name, FIELDS[name].default)) for name in names]
    return spread("options", parameters, lambda values: {name: _value(name, values[_of_typer(name)]) for name in names})


def _of_typer(name: str) -> str:
    """Return the name of an option's parameter: none that a command may have for itself, such as ``context``."""
    return f"option_{name}"


def _parameter(name: str, default: Any) -> inspect.Parameter:
    """Return an option as typer reads it; its kind follows from the type of its value in text and its default."""
    metadata, flag = FIELDS[name].metadata, f"--{name.replace('_', '-')}"
    help = f"{metadata['help'].split('. ')[0].rstrip('.')}."
    words = _words(metadata["text"])
    if words:
        number = ", or a number of ranks" if int in get_args(metadata["text"]) else ""
        help = f"{help[:-1]}: {', '.join(words)}{number}."
    annotation: Any
    if isinstance(default, bool):
        annotation = Annotated[bool, typer.Option(flag, help=help)]
    elif isinstance(default, int):
        annotation = Annotated[int, typer.Option(flag, help=help, metavar="N", min=metadata["least"])]
    elif list[str] in get_args(metadata["text"]):
        annotation, default = Annotated[list[str] | None, typer.Option(flag, help=help, metavar="NAME")], None
    else:
        metavar = "WORD" if words else "VALUE"
        annotation = Annotated[str | None, typer.Option(flag, help=help, metavar=metavar)]
    return inspect.Parameter(_of_typer(name), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _words(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    words = [word for argument in get_args(annotation) for word in _words(argument)]
    return list(dict.fromkeys(words))


def _value(name: str, text: Any) -> Any:
    """Return an option's value for what the command line gave."""
    if isinstance(text, str) and text.isdecimal() and int in get_args(FIELDS[name].metadata["text"]):
        return int(text)
    return FIELDS[name].default if text is None else text
