"""A view as a terminal of some width prints it."""

import io
from typing import Any

from rich.console import Console


def printed(view: Any, width: int = 100, *, color: bool = False) -> str:
    screen = io.StringIO()
    console = Console(
        file=screen, width=width, force_terminal=color, color_system="standard" if color else None, no_color=not color
    )
    console.print(view, highlight=False)
    return screen.getvalue()


def flat(text: str) -> str:
    """Without frames and line breaks, so that wrapped words are found."""
    return " ".join(text.replace("│", " ").split())
