"""`offdrift watch`: follow a run that is being written, and say what goes wrong, here and elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from offdrift.cli.app import (
    DURING,
    Columns,
    Experts,
    FailOn,
    MethodName,
    RulesFile,
    Screen,
    Temperature,
    app,
    interruptible,
    pairs,
    reaches,
)
from offdrift.cli.exit_codes import ExitCode
from offdrift.errors import BadValueError, check_choice

if TYPE_CHECKING:
    from offdrift.alarms.sender import Sender
    from offdrift.audit.watch import Follower, Row
    from offdrift.audit.watch_judge import RunJudge
    from offdrift.audit.watch_page import WatchPage

OWN = "offdrift"
LAST_S, INTERRUPTED_S = 15.0, 3.0
"""Seconds that alarms under way have when the watch ends, and when Ctrl-C ends it."""
Findings = Sequence[Mapping[str, Any]]
Show = Callable[[str, Mapping[str, float | int], Findings], None]


@app.command(rich_help_panel=DURING, verdict="a finding as severe as --fail-on")
def watch(
    screen: Screen,
    run: Annotated[Path, typer.Argument(help="A run folder, one of its arms, or a log or metrics that grow.")],
    columns: Columns = None,
    rules: RulesFile = None,
    framework: Annotated[
        str, typer.Option(help="Framework whose configuration the fixes show; default as detected.")
    ] = OWN,
    method: MethodName = None,
    temperature: Temperature = None,
    moe: Experts = None,
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.05, max=86_400)] = 2.0,
    until_idle: Annotated[float | None, typer.Option(help="End when nothing was added for this many seconds.")] = None,
    fail_on: FailOn = None,
    on: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="LEVEL COMMAND",
            help="Run a command of the shell for each finding of this level (stop, act, watch, info) or worse. It "
            "gets the finding as variables OFFDRIFT_LEVEL, _WHAT, _WHY, _FIX, _CONFIRM, _LINK, _RUN, _SOURCE, _STEP, "
            '_RULE, _CAUSE, _CONFIDENCE, _HOST and _ID, and as JSON on stdin; quote them as "$OFFDRIFT_WHAT". What '
            "it prints is shown here. After 60 s it is ended.",
        ),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="OFFDRIFT_WEBHOOK",
            show_envvar=False,
            help="Post each finding there as JSON with the same fields, and with a text that Slack and Mattermost show "
            "(Discord: add /slack to its address). Up to five tries; redirects are not followed. The address may "
            "stand in OFFDRIFT_WEBHOOK, where no list of processes shows it.",
        ),
    ] = None,
    webhook_from: Annotated[
        Literal["stop", "act", "watch", "info"], typer.Option(help="The least severe finding that is posted.")
    ] = "watch",
    insecure: Annotated[bool, typer.Option("--insecure", help="Post by http:// to another machine, too.")] = False,
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve the last numbers and all findings at http://HOST:PORT/metrics for Prometheus. Without HOST on "
            "127.0.0.1, which no other machine reaches; deploy/grafana.json shows them.",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write an HTML page there again and again; an open one renews itself.")
    ] = None,
    link: Annotated[
        str, typer.Option(metavar="URL", help="Address at which others see --page, for the links of alarms.")
    ] = "",
) -> None:
    """Follow a run and alert in the terminal: what is wrong, how it is known, and the smallest fix.

    A finding says what has begun. The best one foresaw 3 of 32 losses of reward 20 updates ahead (docs/diagnosis.md).

    Follows runs of `offdrift train` by their metrics, and any other framework's by its log, or by its
    metrics where there is no log of tokens. A run is judged from its beginning, not from when the
    watch starts. Ctrl-C or SIGTERM ends the watch. --json prints steps and findings as JSON lines.

    An alarm is sent once per finding, also if the watch of the same run is started again: what arrived
    where is remembered in ~/.local/state/offdrift (or XDG_STATE_HOME). What did not arrive is sent by the
    next watch. Alarms never hold up the watch; at its end those under way have
    15 seconds, after Ctrl-C 3.

    \b
    offdrift watch runs/tiny
    offdrift watch /data/run/token_exports --framework prime-rl --fail-on stop
    offdrift watch runs/tiny --on act 'mail -s "$OFFDRIFT_WHAT" me@example.org'
    offdrift watch runs/tiny --page watch.html \\
        --webhook https://hooks.slack.com/services/...
    offdrift watch runs/tiny --prometheus 9464
    """
    from offdrift.audit.conclude import check_framework
    from offdrift.audit.watch import Follower
    from offdrift.audit.watch_judge import RunJudge
    from offdrift.judge.rules_record import choose_rules, record_above

    check_framework(framework)
    if not run.exists():
        raise BadValueError(f"there is nothing at {run}; give the folder that the run writes to")
    facts = {"method": method, "temperature": temperature, "mixture_of_experts": moe}
    if link and page is None:
        raise BadValueError(f"--link {link!r} is the address of a page; give --page FILE, too")
    interruptible()
    chosen = choose_rules(rules, *record_above(run))
    if chosen.rules.file:
        screen.note(chosen.words)
    if until_idle is None:
        screen.note("Ctrl-C ends the watch; --until-idle 60 ends it where nothing was added for 60 seconds")
    follower = Follower(run, pairs(columns))
    judge = RunJudge(run, chosen.rules, framework, facts)
    places = alarm_places(on, webhook, webhook_from, insecure=insecure)
    with outputs(screen, run, framework, Destinations(places, prometheus, page, link)) as out:
        stopped, failed = follow(follower, judge, out, Pace(every, until_idle, fail_on))
    if not out.shown:
        screen.note(NO_FORECAST)
    bad, late = follower.unread
    if bad + late:
        screen.warn(f"{bad} bad rows were skipped, and {late} rows of steps that were judged before")
    screen.next(f"offdrift audit {_to_audit(run)}", "every metric, cause and fix, from all that was logged")
    if stopped:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if failed:
        raise typer.Exit(ExitCode.VERDICT)


NO_FORECAST = (
    "Nothing was found. That foretells nothing: the best finding foresaw 3 of 32 losses of reward 20 updates ahead."
)
"""Measured by benchmarks/foreseen.py; docs/diagnosis.md has the numbers."""


@dataclass(frozen=True)
class Pace:
    """When to look, and when to end."""

    every: float
    until_idle: float | None
    fail_on: str | None


@dataclass(frozen=True)
class Destinations:
    """WatchOutputs beside the terminal."""

    places: Sequence[Any] = ()
    """Commands and webhooks."""
    prometheus: str | None = None
    page: Path | None = None
    link: str = ""


@dataclass
class WatchOutputs:
    """Everything that shows rows and findings, in the order in which it is told."""

    screen: Screen
    run: Path
    framework: str
    shows: list[Show] = field(default_factory=list)
    page: WatchPage | None = None
    senders: list[Sender] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    patience: float = LAST_S
    names_framework: list[Any] = field(default_factory=list)
    """Views whose `framework` says whose snippet they show."""
    shown: int = 0
    """Findings shown so far."""

    def show(self, row: Row, findings: Findings) -> None:
        """Show a row and what it set off, and send alarms."""
        from offdrift.alarms.alarm import Alarm

        self.shown += len(findings)
        for show in self.shows:
            show(row.source, row.numbers, findings)
        for finding in findings if self.senders else ():
            link = self.page.link(row.source, finding) if self.page else self.run.absolute().as_uri()
            for sender in self.senders:
                sender.add(Alarm(str(self.run.absolute()), row.source, finding, link))

    def tick(self) -> None:
        """Do what is due though no row has come."""
        if self.page is not None:
            self.page.tick()
            if self.page.problem:
                self.say([("warning", f"{self.page.problem}; the watch goes on")])
        for sender in self.senders:
            self.say(sender.news())

    def say(self, news: Sequence[tuple[str, str]]) -> None:
        """Print messages on stderr, no warning twice."""
        for kind, words in news:
            if kind == "warning" and words not in self.warned:
                self.screen.warn(words)
                self.warned.add(words)
            elif kind != "warning":
                self.screen.note(words)

    def write_fixes_for(self, framework: str) -> None:
        """Show the snippets of another framework."""
        for view in self.names_framework:
            view.framework = framework


def follow(follower: Follower, judge: RunJudge, out: WatchOutputs, pace: Pace) -> tuple[bool, bool]:
    """Judge and show rows until nothing comes, a finding ends it, or Ctrl-C.

    Returns: whether Ctrl-C ended it, and whether a finding was as severe as `pace.fail_on`.
    """
    from offdrift.audit.metrics_only import MISSING
    from offdrift.audit.watch import METRICS

    def judged(rows: Iterator[Row]) -> Iterator[bool]:
        for row in rows:
            out.screen.shown()
            if row.source not in judge.watchers:
                if row.source == METRICS:
                    out.screen.warn(MISSING)
                if judge.framework == OWN:
                    judge.framework = follower.framework or OWN
                    out.write_fixes_for(judge.framework)
            findings = judge.judge(row)
            out.show(row, findings)
            yield any(reaches(finding["severity"], pace.fail_on) for finding in findings)

    stopped, failed, last = False, False, time.monotonic()
    if not out.screen.in_terminal:  # where a table is drawn
        out.screen.doing("reading what is there")
    try:
        while not failed:
            for severe in judged(follower.look()):
                last, failed = time.monotonic(), failed or severe
            out.screen.shown()
            out.tick()
            if pace.until_idle is not None and time.monotonic() - last >= pace.until_idle:
                break
            if not failed:
                time.sleep(pace.every)
    except KeyboardInterrupt:
        stopped, out.patience = True, INTERRUPTED_S
    for severe in judged(follower.finish()):  # the newest step was waiting for a later one
        failed = failed or severe
    return stopped, failed


def alarm_places(
    on: tuple[str, str] | None, webhook: str | None, webhook_from: str, *, insecure: bool = False
) -> list[Any]:
    """Commands and webhooks of the command line. Raises: `BadValueError` and `MethodError` naming the option."""
    from offdrift.alarms.command import Command
    from offdrift.alarms.webhook import Webhook
    from offdrift.judge.findings import URGENCY

    places: list[Any] = []
    if on is not None:
        check_choice("--on LEVEL", on[0], URGENCY)
        places.append(Command(on[1], level=on[0]))
    if webhook is not None:
        places.append(Webhook(webhook, level=webhook_from, insecure=insecure))
    return places


@contextmanager
def outputs(screen: Screen, run: Path, framework: str, choices: Destinations) -> Iterator[WatchOutputs]:
    """Everything that shows the watch; at the end each says its last."""
    from offdrift.audit.watch_page import WatchPage
    from offdrift.audit.watch_view import LiveWatch

    out = WatchOutputs(screen, run, framework)
    server = None
    if choices.prometheus is not None:
        server = serve(choices.prometheus, run, out)
    if choices.page is not None:
        out.page = WatchPage(choices.page, str(run), framework, address=choices.link)
        out.page.tick()
        if out.page.problem:
            raise BadValueError(out.page.problem)
        out.shows.append(out.page.show)
        out.names_framework.append(out.page)
        screen.wrote(page=choices.page)
    if choices.places:
        out.senders = senders(choices.places, run)
    live = None if screen.as_json else LiveWatch(screen.out, str(run), framework, table=not screen.quiet)
    out.shows.append(json_lines(screen) if live is None else live.show)
    out.names_framework += [] if live is None else [live]
    try:
        yield out
    finally:
        if live is not None:
            live.close()
        if out.page is not None:
            out.page.close()
        if server is not None:
            server.close()
        for sender in out.senders:
            out.say(sender.close(out.patience))


def serve(words: str, run: Path, out: WatchOutputs) -> Any:
    """Serve metrics of the watch; says where."""
    from offdrift.alarms.live_metrics import LiveMetrics
    from offdrift.alarms.metrics_server import MetricsServer, listening_address

    metrics = LiveMetrics(str(run))
    server = MetricsServer(listening_address(words), metrics.text)
    out.shows.append(metrics.show)
    out.screen.note(f"metrics: {server.url}")
    return server


def senders(places: Sequence[Any], run: Path) -> list[Sender]:
    """A sender for each place, which remembers what arrived."""
    from offdrift.alarms.sender import Sender
    from offdrift.alarms.sent import SentAlarms, sent_file

    return [Sender(place, SentAlarms(sent_file(run))) for place in places]


def json_lines(screen: Screen) -> Show:
    """A line of JSON for each step and each finding."""
    from offdrift.records.atomic import plain

    def show(source: str, numbers: Mapping[str, float | int], findings: Findings) -> None:
        screen.json(plain({"source": source, "kind": "step", **numbers}), indent=None)
        for finding in findings:
            screen.json(plain({"source": source, "kind": "finding", **finding}), indent=None)

    return show


def _to_audit(run: Path) -> Path:
    """Path to give to `offdrift audit` for a run: the arm with the newest log, if the run has several."""
    if not (run / "run.json").is_file():
        return run
    logs = [log for log in (run / "arms").glob("*/log") if log.is_dir()]
    return max(logs, key=lambda log: log.stat().st_mtime).parent if logs else run
