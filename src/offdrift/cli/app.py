"""The application that every command belongs to, and its screen."""

from __future__ import annotations

import typer
from rich.console import Console

app = typer.Typer(
    name="offdrift",
    help="Measure, correct and certify off-policy drift in reinforcement learning of language models.",
    epilog="Start with:  offdrift train recipes/tiny.toml",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
lab = typer.Typer(
    name="lab",
    help="Exact experiments on policies small enough to know everything about them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(lab)
console = Console()
