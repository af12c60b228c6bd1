"""`offdrift audit`: logged rollouts of any framework in, numbers, findings and a page out."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from offdrift.cli.app import app, console
from offdrift.cli.options import (
    FAILED,
    INTERRUPTED,
    SEVERITIES,
    Columns,
    Experts,
    FailOn,
    MethodName,
    RulesFile,
    Temperature,
    pairs,
    severity,
)
from offdrift.errors import BadValueError


@app.command()
def audit(
    logs: Annotated[
        list[str],
        typer.Argument(
            help="What a run logged: files, folders, globs, URLs (s3://, gs://, ...), or an arm of a run.",
        ),
    ],
    columns: Columns = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for audit.json and report.html; default audits/NAME."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that read.", min=1)] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Read on a Ray cluster: auto, host:port, or local."),
    ] = None,
    rules: RulesFile = None,
    framework: Annotated[
        str | None,
        typer.Option(help="Whose configuration the fixes are written in; default as detected."),
    ] = None,
    method: MethodName = None,
    temperature: Temperature = None,
    moe: Experts = None,
    sample_mib: Annotated[
        int,
        typer.Option(
            help="Try every method of the table on about this much of the log, MiB.", min=1
        ),
    ] = 64,
    max_file_mib: Annotated[
        int,
        typer.Option(
            help="What one file may take in memory or decompress to, MiB, and a 64th of it what "
            "one line may have; the rest is left out and named.",
            min=64,
        ),
    ] = 4096,
    fail_on: FailOn = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print audit.json.")] = False,
) -> None:
    """What happened in a run, from its logs: drift, its cause, and the smallest fix.

    Reads verl, TRL, prime-rl, slime, miles, SkyRL, NeMo-RL, open-instruct, AReaL, our own records, and
    plain JSONL or Parquet (docs/logs.md); says what it detected, what the log can not answer, and what to log to have it
    answered. Files may be larger than memory. Interrupt it at any time: the same command continues.

    \b
    offdrift audit runs/tiny/arms/none
    offdrift audit 's3://bucket/run/token_exports/*/rank_*.jsonl' --workers 8
    offdrift audit rollouts.jsonl --columns logp_rollout=vllm_lp,logp_old=fsdp_lp --fail-on act
    """  # fmt: skip
    from offdrift.audit.conclude import conclude, write_audit
    from offdrift.audit.page import write_audit_page
    from offdrift.audit.partial import Job, Part
    from offdrift.audit.run_context import run_context
    from offdrift.audit.stream import audit as stream
    from offdrift.audit.stream import in_process, in_processes
    from offdrift.audit.view import audit_view
    from offdrift.judge import load_rules
    from offdrift.records.readers import detect, pieces

    limit = severity(fail_on)
    table = load_rules(rules)
    paths = [p for log in logs for p in _logs_of(log)]
    started = time.perf_counter()
    found = detect(paths, columns=pairs(columns), limit=max_file_mib << 20)
    folder = out or Path("audits") / _name(logs[0])
    err = Console(stderr=True)
    many = len(found.files)
    err.print(f"reading {many} {'file' if many == 1 else 'files'}, {_size(found.bytes)}", highlight=False)  # fmt: skip
    plan = pieces(found)
    job = Job(found, sample_rate=min(1.0, sample_mib * 2**20 / max(found.bytes, 1)))
    if ray is not None:
        from offdrift.audit.cluster import on_ray

        run = on_ray(ray)
    else:
        run = in_process if workers == 1 else in_processes(min(workers, max(len(plan), 1)))
    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} pieces"), TimeRemainingColumn(), console=err, transient=True) as progress:  # fmt: skip
        task = progress.add_task("reading", total=len(plan))

        def watch(done: int, so_far: Part) -> None:
            tokens = 0 if so_far.tally is None else so_far.tally.tokens
            rate = tokens / max(time.perf_counter() - started, 1e-9)
            progress.update(
                task, completed=done, description=f"{tokens:,} tokens, {rate:,.0f} per s"
            )

        try:
            part = stream(job, plan, folder=folder, run=run, watch=watch)
        except KeyboardInterrupt:
            progress.stop()
            again = shlex.join(["offdrift", *sys.argv[1:]])
            err.print(f"\ninterrupted; what was read is in {folder / 'parts'}. The same command continues:\n  {again}", markup=False, highlight=False)  # fmt: skip
            raise typer.Exit(INTERRUPTED) from None
    about = run_context(paths[0], framework or found.framework, method=method, temperature=temperature, mixture_of_experts=moe)  # fmt: skip
    result = conclude(part, job, context=about, rules=table)
    result["source"]["seconds"] = time.perf_counter() - started
    file = write_audit(result, folder)
    page = write_audit_page(result, folder)
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
    else:
        console.print(audit_view(result, width=console.width))
        console.print(f"\nreport: {escape(str(page))}    numbers: {escape(str(file))}")
    if SEVERITIES.index(result["verdict"]["level"]) >= limit:
        raise typer.Exit(FAILED)


def _logs_of(path: str) -> list[str]:
    """The log of an arm of our own run, or the path itself."""
    folder = Path(path)
    if (folder / "run.json").is_file():
        arms = sorted(p for p in (folder / "arms").glob("*") if (p / "log").is_dir())
        if len(arms) == 1:
            return [str(arms[0] / "log")]
        names = ", ".join(str(p) for p in arms) or "none that logged its tokens"
        raise BadValueError(f"{path} is a run of several policies; audit one of its arms: {names}")
    return [str(folder / "log")] if (folder / "log").is_dir() else [path]


def _name(path: str) -> str:
    """A folder name from what was audited."""
    parts = [p for p in Path(path.split("://")[-1]).parts if p not in ("/", "runs", "arms", "log", "..", ".")]  # fmt: skip
    text = "-".join(parts[-2:]) or "log"
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text).strip("_.") or "log"


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
