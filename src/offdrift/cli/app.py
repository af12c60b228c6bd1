"""The application that every command belongs to, options that commands share, and where a command prints."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from offdrift.cli.exit_codes import exit_codes_text

if TYPE_CHECKING:
    from offdrift.cli.lines import ProgressLines
    from offdrift.cli.waiting import Waiting
    from offdrift.show.progress import ProgressBar

BEFORE, DURING, AFTER = "Before a run", "During a run", "After a run"
THEORY = "Methods and theory"
"""Panels of the help page, by the question that a command answers."""


class _Help:
    """Help as paragraphs and two columns, plain enough for a terminal of 80 columns.

    A paragraph that begins with a backspace character holds examples, one a line.
    """

    LEFT = 26
    """Widest name of an option; a longer one has a line of its own."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of a command or of a group of commands."""
        out = Console(highlight=False)
        command: Any = self
        usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
        out.print(Text.assemble(("Usage: ", "bold"), usage))
        for paragraph in (command.help or "").split("\n\n"):
            if paragraph.startswith("\b"):
                out.print(Text("\nExamples", style="bold"))
                out.print(Text(textwrap.indent(paragraph[1:].strip("\n"), "  ")), soft_wrap=True)
            else:
                out.print(Text(f"\n{paragraph}"))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, sub in getattr(command, "commands", {}).items():
            sections.setdefault(sub.rich_help_panel or "Commands", []).append((name, sub.help.split("\n\n")[0]))
        for param in command.get_params(ctx):
            kind = "Arguments" if param.param_type_name == "argument" else "Options"
            if record := param.get_help_record(ctx):
                words = re.sub(r"\[default: .{1,24}\]$", lambda m: m[0].replace(" ", "\xa0"), record[1])  # on one line
                sections.setdefault(kind, []).append((record[0].replace(" range>", ">"), words))
        for title, rows in sections.items():
            out.print(Text(f"\n{title}", style="bold"))
            left = min(self.LEFT, max(len(name) for name, _ in rows))
            for name, words in rows:
                grid = Table.grid(padding=(0, 2, 0, 0))
                grid.add_column(width=left)
                grid.add_column()
                if len(name) > left:
                    out.print(Text(f"  {name}", style="cyan"))
                    name = ""
                grid.add_row(Text(name, style="cyan"), Text(words))
                out.print(Padding(grid, (0, 0, 0, 2)))
        if command.epilog:
            out.print()
            out.print(Text(command.epilog))


class _Command(_Help, TyperCommand):
    """A command with this help, which takes no empty word: one is a variable of a shell that was not set."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line.

        Raises: `typer.BadParameter` naming the option or argument that an empty word was given for, or that is missing,
            with an example of the command.
        """
        for i, word in enumerate(args):
            name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            if value.strip() or (name and not equals):
                continue
            options = [option for param in self.params for option in (*param.opts, *param.secondary_opts)]
            before = args[i - 1] if i and args[i - 1] in options else None
            arguments = [str(p.name) for p in self.params if p.param_type_name == "argument"]
            what = name or before or " ".join(arguments) or "a word"
            raise typer.BadParameter(f"{what}: '' is empty; give a value, or leave it out", ctx)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            example = re.search(rf"^ *(offdrift (?:lab )?{ctx.info_name} .*?)(?:  .*)?$", self.help or "", re.MULTILINE)
            if type(error).__name__ == "MissingParameter" and example:
                error.message = f"For example: {example[1]}"
            raise


class _CommandGroup(_Help, TyperGroup):
    """A group of commands with this help."""


class _Application(typer.Typer):
    """Typer whose help texts are the paragraphs of docstrings, with the exit statuses below.

    Every command takes a `screen`; on the command line stand the options that all have in common.
    """

    def command(self, name: str | None = None, verdict: str | None = None, **options: Any) -> Callable[..., Any]:
        """Add a command.

        Args:
            verdict: what exit status 3 means for it.
        """

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            paragraphs = (inspect.getdoc(function) or "").split("\n\n")
            text = "\n\n".join(p if p.startswith("\b") else p.replace("\n", " ") for p in paragraphs)
            epilog = f"Exit status: {exit_codes_text(verdict)}"
            add = typer.Typer.command(self, name, cls=_Command, help=text, epilog=epilog, **options)
            return add(_on_screen(function))

        return register


def _on_screen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command with --json, --quiet and --no-color in place of its screen."""
    signature = inspect.signature(function, eval_str=True)

    @functools.wraps(function)
    def run(as_json: bool, quiet: bool, no_color: bool, **options: Any) -> Any:
        for name, value in options.items():
            values = value if isinstance(value, tuple | list) else (value,)
            if any(isinstance(x, float) and math.isnan(x) for x in values):
                raise typer.BadParameter(f"--{name.replace('_', '-')}: nan is no number")
        screen = Screen(as_json, quiet)
        screen.doing("loading")  # a command imports what it runs, which takes seconds
        try:
            return function(screen=screen, **options)
        finally:
            screen.shown()

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in signature.parameters.values() if p.name != "screen"]
    common = {"as_json": AsJson, "quiet": Quiet, "no_color": NoColor}
    parameters += [inspect.Parameter(name, keyword, default=False, annotation=kind) for name, kind in common.items()]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


app = _Application(
    name="offdrift",
    cls=_CommandGroup,
    help="Measure, correct and certify off-policy drift in reinforcement learning of language models.",
    epilog="Start with: offdrift demo\n\nWhere a message names docs/NAME.md: offdrift docs NAME.\n\n"
    f"Exit status: {exit_codes_text()}",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
lab = _Application(
    name="lab",
    cls=_CommandGroup,
    help="Exact experiments on policies small enough to know everything about them, and laws of what runs recorded.",
    epilog=f"Exit status: {exit_codes_text('a bound or a certificate fails (lab bounds, coverage, three-policies)')}",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(lab, rich_help_panel=THEORY)


def _no_color(chosen: bool) -> bool:
    if chosen:
        os.environ["NO_COLOR"] = "1"  # read by every console from here on, typer's too
    return chosen


def _version(chosen: bool) -> bool:
    if chosen:
        print(f"offdrift {version('offdrift')}")
        raise typer.Exit
    return chosen


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no hints; results and errors only.")]
NoColor = Annotated[
    bool, typer.Option("--no-color", help="Plain text, as NO_COLOR=1.", callback=_no_color, is_eager=True)
]


Columns = Annotated[
    str | None,
    typer.Option(
        help="Map fields to the columns of your log: logp_old=lp,reward=score and so on. A "
        "field without a column, as in entropy=, is not read."
    ),
]
RulesFile = Annotated[
    Path | None,
    typer.Option(
        "--rules",
        metavar="FILE",
        help="TOML file with thresholds and rules of yours, merged over the built-in ones (`offdrift rules`, "
        "docs/rules.md). Default: as the run stored them, else the built-in ones.",
    ),
]


def _loaded(name: str | None) -> str | None:
    """The name of a method; code that it refers to is run, for what is read later runs none."""
    if name is not None and ":" in name:
        from offdrift.methods.load import load_method

        load_method(name)
    return name


def _method_names(incomplete: str) -> list[str]:
    from offdrift.cli.complete import rows_of_methods

    return rows_of_methods(incomplete)


MethodName = Annotated[
    str | None,
    typer.Option(
        help="Method that the run trains with, by its name in `offdrift methods` or in code: mine.py:mine.",
        autocompletion=_method_names,
        callback=_loaded,
    ),
]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature of the rollouts.")]
Experts = Annotated[bool | None, typer.Option("--moe/--dense", help="The model is a mixture of experts, or is not.")]
FailOn = Annotated[
    Literal["watch", "act", "stop"] | None, typer.Option(help="Exit with status 3 on a finding this severe or worse.")
]
Of = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="K",
        help="For certificates: number of policies that you compare on these rollouts, or chose among by looking at "
        "them: a table of checkpoints, the best of a sweep. Each uses 1/K of the probability of error, so that the one "
        "you report holds. Give K also if you report only the best.",
    ),
]
Prompts = Annotated[
    Literal["listed", "drawn"] | None,
    typer.Option(
        help="For certificates, if prompts repeat. J is the mean reward. listed: prompts are a fixed list; J counts "
        "each distinct prompt once. drawn: each group of answers is to a newly drawn prompt; J counts a prompt as "
        "often as it is drawn.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="For certificates, if prompts share a source (a document, a template): the column that names it, texts or "
        "whole numbers. A source is then one draw, and J counts each source once. Without it prompts of one source "
        "pass for independent, and certificates are false too often.",
    ),
]
Look = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="t",
        help="For certificates: number of this look in a series that takes new rollouts each time, such as a "
        "checkpoint per day. It uses 6/(pi t)^2 of the probability of error (.61, .15, .07, ...), so all looks hold "
        "together, however many follow. Count every look, also those that certified nothing.",
    ),
]


def reaches(severity: str, fail_on: str | None) -> bool:
    """Whether a verdict is as severe as --fail-on asks."""
    from offdrift.judge.findings import URGENCY

    return fail_on is not None and severity in URGENCY[: URGENCY.index(fail_on) + 1]


def pairs(columns: str | None) -> dict[str, str]:
    """`a=b,c=d` as a mapping; `a=` maps to "". Raises: `typer.BadParameter` naming what is not a pair.

    Example:
        >>> pairs("logp_old=trainer.lp, reward=score, entropy=")
        {'logp_old': 'trainer.lp', 'reward': 'score', 'entropy': ''}
    """
    names = {}
    for pair in (columns or "").split(","):
        ours, equals, theirs = (x.strip() for x in pair.partition("="))
        if not pair.strip():
            continue
        if not (equals and ours):
            raise typer.BadParameter(
                f"--columns {pair!r}: write our name, =, and the log's column, or nothing behind the "
                "= to leave our field out"
            )
        names[ours] = theirs
    return names


_received: list[int] = []
"""Signals since a command began that ask it to end; of one process, as its handlers are."""


def interruptible() -> Callable[[], None]:
    """Have SIGTERM end the command as Ctrl-C does; returns what a long command calls now and then.

    That raises `KeyboardInterrupt` again if the first one was swallowed: by a library's bare `except:` around its
    imports, or by Python, where the signal came while a `__del__` ran (which Python reports as a traceback and ignores;
    that report is left out, since the interrupt is not lost).
    """
    _received.clear()
    report = sys.unraisablehook

    def unraisable(about: Any) -> None:
        if not (_received and isinstance(about.exc_value, KeyboardInterrupt)):
            report(about)

    sys.unraisablehook = unraisable

    def interrupt(number: int, _: object) -> None:
        _received.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if _received:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, interrupt)
    return check


SUMMING_UP = "summing up"
"""What a command does between its work and its output."""


class Screen:
    """Output of a command: results go to stdout, progress, notes and the next step to stderr.

    Between `doing` and the next output a line says what is being done, where it takes longer than `SILENCE_S`.

    Args:
        as_json: stdout belongs to a machine; what a person would read there is left out.
        quiet: nothing on stderr but errors and warnings.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet, self.interrupted = as_json, quiet, False
        self._out = Console(quiet=as_json)
        self._err = Console(stderr=True, quiet=quiet)
        self._waiting: Waiting | None = None

    @property
    def out(self) -> Console:
        """Console of results."""
        self.shown()
        return self._out

    @property
    def err(self) -> Console:
        """Console of progress and notes."""
        self.shown()
        return self._err

    def doing(self, stage: str) -> None:
        """Say what is being done, if it takes long, until the next output."""
        from offdrift.cli.waiting import Waiting

        if not self.quiet and os.environ.get("RANK", "0") == "0":  # of several processes one speaks
            self._waiting = self._waiting or Waiting(self._err)
            self._waiting.begin(stage)

    def shown(self) -> None:
        """Say no longer what is being done: the output follows, or the end."""
        if self._waiting is not None:
            self._waiting.end()

    @property
    def width(self) -> int:
        return self._out.width

    @property
    def in_terminal(self) -> bool:
        """Whether a person reads stdout: not a pipe, a file or a machine."""
        return self._out.is_terminal and not self.as_json

    def show(self, *views: Any) -> None:
        """Print tables and texts for a person."""
        self.out.print(*views, highlight=False, crop=False)

    def wrote(self, **files: object) -> None:
        """Name the files that were written, each on its line, whole."""
        for what, path in files.items():
            self.out.print(f"{what}: {escape(str(path))}", highlight=False, soft_wrap=True)

    def json(self, value: Any, indent: int | None = 1) -> None:
        """Print a value on stdout for a machine."""
        self.json_text(json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False))

    def json_text(self, text: str) -> None:
        """Print JSON on stdout for a machine."""
        self.shown()
        typer.echo(text)

    def note(self, text: str) -> None:
        """Say something about the work on stderr."""
        self.err.print(text, markup=False, highlight=False, soft_wrap=True, style="dim")

    def warn(self, text: str) -> None:
        """Say on stderr, with --quiet too, why a result is not what was asked for."""
        self.shown()
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True, style="yellow")

    def next(self, command: str, purpose: str) -> None:
        """The line that a command ends with: what to do now."""
        if not self.as_json:
            self.err.print(f"next: [bold]{escape(command)}[/]  # {escape(purpose)}", highlight=False, soft_wrap=True)

    @contextmanager
    def until_interrupted(self, unit: str = "") -> Iterator[Progress]:
        """A progress bar; Ctrl-C ends what runs under it, and `interrupted` says so."""
        with self.progress(unit) as progress:
            try:
                yield progress
            except KeyboardInterrupt:
                self.interrupted = True

    @contextmanager
    def progress(self, unit: str = "") -> Iterator[Progress]:
        """A bar on stderr that vanishes when it is done; off a terminal a line now and then says how far it is."""
        from offdrift.cli.lines import TaskLines
        from offdrift.show.progress import progress_bar

        bar = progress_bar(self.err, unit)
        with bar if self.err.is_terminal else TaskLines(bar, self.note):
            yield bar
        self.doing(SUMMING_UP)

    @contextmanager
    def watching(self, unit: str = "", *, every: bool = False) -> Iterator[ProgressBar | ProgressLines]:
        """Whom long work tells of its stages, while it lasts: a bar on a terminal, else lines.

        A stage of 0 parts is a note, which stays on the screen.

        Args:
            every: off a terminal, write every stage, as where each takes seconds.
        """
        from offdrift.cli.lines import ProgressLines
        from offdrift.show.progress import ProgressBar

        bar = ProgressBar(self.err, unit, self.note) if self.err.is_terminal else ProgressLines(self.note, every=every)
        with bar as watch:
            yield watch
        self.doing(SUMMING_UP)
