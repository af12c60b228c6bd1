"""`offdrift audit`: logged rollouts of any framework in, numbers, findings and a page out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offdrift.cli.app import (
    AFTER,
    Cluster,
    Columns,
    Experts,
    FailOn,
    Look,
    MethodName,
    Prompts,
    RulesFile,
    Screen,
    Temperature,
    app,
    pairs,
    reaches,
)
from offdrift.cli.exit_codes import ExitCode
from offdrift.errors import BadValueError

if TYPE_CHECKING:
    from offdrift.audit.result import ArmsAudit, Audit


@app.command(rich_help_panel=AFTER, verdict="a finding as severe as --fail-on")
def audit(
    screen: Screen,
    logs: Annotated[
        list[str],
        typer.Argument(
            help="Logs of one run: files, folders, globs, URLs (s3://, gs://, ...), an arm of a run, or a run of arms."
        ),
    ],
    columns: Columns = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for audit.json and report.html; default audits/NAME.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that read the log.", min=1)] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Read on a Ray cluster: auto, host:port, or local.")
    ] = None,
    slice_: Annotated[
        str | None,
        typer.Option("--slice", metavar="I/N", help="Read only part I of N, to split the log over N machines."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate tokens, time and memory; write nothing.")
    ] = False,
    rules: RulesFile = None,
    framework: Annotated[
        str | None, typer.Option(help="Framework whose configuration the fixes show; default as detected.")
    ] = None,
    method: MethodName = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Try a method in a file of yours, too (docs/your-own-method.md); its code is run. Repeatable.",
        ),
    ] = None,
    temperature: Temperature = None,
    moe: Experts = None,
    sample_mib: Annotated[
        int, typer.Option(help="Amount of the log on which all methods are compared, MiB.", min=1)
    ] = 64,
    max_file_mib: Annotated[
        int,
        typer.Option(
            help="Memory limit per file, MiB (per line: 1/64). Larger ones are skipped and listed.",
            min=64,
        ),
    ] = 4096,
    fail_on: FailOn = None,
    of: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="For certificates: number of arms or checkpoints whose audits you will compare. Each certificate "
            "uses 1/K of the probability of error. Default: the arms of the run, if offdrift made it.",
        ),
    ] = None,
    look: Look = None,
    prompts: Prompts = None,
    cluster: Cluster = None,
) -> None:
    """Find drift in the logs of a run: how much, its cause, and the smallest fix.

    Reads logs of verl, TRL, prime-rl, slime, miles, SkyRL, NeMo-RL, Titan-RL, open-instruct and AReaL, records
    of offdrift, and plain JSONL or Parquet (docs/logs.md). Shows the detected format, the questions
    that the log cannot answer, and what to log to answer them. Files may be larger than memory. You
    can interrupt it at any time: the same command continues. Of a run of several arms all are audited and compared;
    the most urgent verdict is the run's. A log of a run that stored its rules is judged by these, unless --rules names
    a file.

    \b
    offdrift audit runs/tiny/arms/none
    offdrift audit runs/tiny                       # all arms, compared
    offdrift audit 's3://bucket/run/token_exports/*/rank_*.jsonl' --workers 8
    offdrift audit rollouts.jsonl --columns logp_rollout=vllm_lp --fail-on act
    offdrift audit LOGS --also mine.py:mine        # try a method of yours, too
    offdrift audit LOGS --dry-run                  # estimate time and memory
    offdrift audit LOGS --slice 3/8 --out SHARED   # one of 8 machines
    """
    part_of = _slice(slice_)
    settings: dict[str, Any] = {
        "columns": pairs(columns),
        "framework": framework,
        "method": method,
        "temperature": temperature,
        "mixture_of_experts": moe,
        "rules": rules,
        "also": also or (),
        "sample_mib": sample_mib,
        "max_file_mib": max_file_mib,
        "workers": workers,
        "ray": ray,
    }
    certificates: dict[str, Any] = {"of": of, "look": look, "prompts": prompts, "cluster": cluster}
    folder = out or Path("audits") / _name(logs[0])
    with screen.watching("pieces") as watch:
        watch("loading", 0, 1)
        from offdrift.cli.waiting import loading

        with loading():
            from offdrift.audit.entry import Expected, Sliced, forecast_of, options_of, read_slice
            from offdrift.audit.entry import audit as audited

        try:
            if dry_run:
                outcome = forecast_of(logs, options_of(**settings), workers=workers)
            elif part_of is not None:
                outcome = read_slice(logs, options_of(**settings), part=part_of, out=folder, watch=watch)
            else:
                outcome = audited(logs, out=folder, progress=watch, **certificates, **settings)
        except KeyboardInterrupt:
            again = shlex.join(["offdrift", *sys.argv[1:]])
            kept = f"what was read is in {folder}. " if not dry_run else ""
            screen.warn(f"\ninterrupted; {kept}The same command continues:\n  {again}")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    if isinstance(outcome, Expected):
        screen.json(outcome.as_dict()) if screen.as_json else screen.show("\n".join(outcome.sentences()))
    elif isinstance(outcome, Sliced):
        whole = shlex.join(["offdrift", "audit", *logs, "--out", str(folder)])
        if screen.as_json:
            screen.json({**outcome.as_dict(), "folder": str(folder), "next": whole})
        else:
            words = f"{outcome.pieces:,} pieces, {outcome.tokens:,} tokens"
            screen.show(f"slice {slice_}: {words}, stored in {folder / 'parts'}")
            screen.next(whole, "when all slices are in this folder: merges them and reads missing ones")
    else:
        _show(screen, outcome, folder, logs[0])
        if reaches(outcome.verdict.level, fail_on):
            raise typer.Exit(ExitCode.VERDICT)


def _show(screen: Screen, result: Audit | ArmsAudit, folder: Path, log: str) -> None:
    """Show an audit that was stored in a folder, and the next step."""
    from offdrift.audit.result import Audit
    from offdrift.audit.view import audit_view

    if screen.as_json:
        screen.json_text(result.to_json())
    elif isinstance(result, Audit):
        screen.show(audit_view(result.data, width=screen.width, folder=str(folder)), "")
    else:
        from offdrift.audit.arms_view import arms_view

        screen.show(arms_view(result, width=screen.width, folder=str(folder)), "")
    screen.wrote(report=folder / result.page, numbers=folder / result.file)
    if result.verdict.level in ("act", "stop"):
        what = shlex.quote(str(folder if isinstance(result, Audit) else folder / result.worst))
        again = f"offdrift audit LOG_AFTER_THE_FIX --out REPAIRED && offdrift compare {what} REPAIRED"
        screen.next(again, "once a run with the fix has written a log: did the fix help?")
    else:
        screen.next(f"offdrift audit {log} --fail-on act", "the same as a test in CI: fails with exit status 3")


def _slice(text: str | None) -> tuple[int, int] | None:
    """Parse `--slice I/N` into (I, N).

    Raises: `BadValueError` unless it is I/N with I from 1 to N.
    """
    if text is None:
        return None
    part, _, of = text.partition("/")
    if not (part.isdecimal() and of.isdecimal() and 1 <= int(part) <= int(of)):
        raise BadValueError(f"--slice {text}: give I/N with I from 1 to N, such as 3/8 for the third of eight slices")
    return int(part), int(of)


def _name(path: str) -> str:
    """A folder name from what was audited."""
    common = ("/", "runs", "arms", "log", "..", ".")
    parts = [p for p in Path(path.split("://")[-1]).parts if p not in common]
    text = "-".join(parts[-2:]) or "log"
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text).strip("_.") or "log"
