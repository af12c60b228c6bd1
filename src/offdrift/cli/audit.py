"""`offdrift audit`: logged rollouts of any framework in, numbers, findings and a page out."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli.app import (
    AFTER,
    Columns,
    Experts,
    FailOn,
    Look,
    MethodName,
    RulesFile,
    Screen,
    Temperature,
    app,
    pairs,
    reaches,
)
from offdrift.cli.exit_codes import ExitCode
from offdrift.errors import BadValueError


@app.command(rich_help_panel=AFTER, verdict="a finding as severe as --fail-on")
def audit(
    screen: Screen,
    logs: Annotated[
        list[str],
        typer.Argument(help="What a run logged: files, folders, globs, URLs (s3://, gs://, ...), or an arm of a run."),
    ],
    columns: Columns = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for audit.json and report.html; default audits/NAME.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that read.", min=1)] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Read on a Ray cluster: auto, host:port, or local.")
    ] = None,
    slice_: Annotated[
        str | None,
        typer.Option(
            "--slice", metavar="I/N", help="Read the I-th of N parts of the log and stop: one for each machine."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how much there is and what it will take; writes nothing.")
    ] = False,
    rules: RulesFile = None,
    framework: Annotated[
        str | None, typer.Option(help="Whose configuration the fixes are written in; default as detected.")
    ] = None,
    method: MethodName = None,
    temperature: Temperature = None,
    moe: Experts = None,
    sample_mib: Annotated[
        int, typer.Option(help="Try every method of the table on about this much of the log, MiB.", min=1)
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
    of: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="Arms or checkpoints whose audits you will compare: the certificate of each spends a K-th of the "
            "probability of error. Default: the arms of the run, if it is one of offdrift's.",
        ),
    ] = None,
    look: Look = None,
) -> None:
    """What happened in a run, from its logs: drift, its cause, and the smallest fix.

    Reads logs of verl, TRL, prime-rl, slime, miles, SkyRL, NeMo-RL, open-instruct and AReaL, records
    of offdrift, and plain JSONL or Parquet (docs/logs.md). Says which format it detected, what the log
    can not answer, and what to log to have it answered. Files may be larger than memory. You can
    interrupt it at any time: the same command continues.

    \b
    offdrift audit runs/tiny/arms/none
    offdrift audit 's3://bucket/run/token_exports/*/rank_*.jsonl' --workers 8
    offdrift audit rollouts.jsonl --columns logp_rollout=vllm_lp --fail-on act
    offdrift audit LOGS --dry-run                  # tokens, hours, memory, slices
    offdrift audit LOGS --slice 3/8 --out SHARED   # a machine each, then without
    """
    from offdrift.audit.conclude import arms_of_run, conclude, run_context, write_audit
    from offdrift.audit.page import write_audit_page
    from offdrift.audit.partial import Job, Part
    from offdrift.audit.stream import audit as stream
    from offdrift.audit.stream import in_process, in_processes, slice_of
    from offdrift.audit.view import audit_view
    from offdrift.judge import load_rules
    from offdrift.records.readers import detect, pieces

    table = load_rules(rules)
    paths = [p for log in logs for p in _logs_of(log)]
    part_of = _slice(slice_)
    started = time.perf_counter()
    source = detect(paths, columns=pairs(columns), limit=max_file_mib << 20)
    folder = out or Path("audits") / _name(logs[0])
    count = len(source.files)
    screen.note(f"reading {count} {'file' if count == 1 else 'files'}, {_size(source.bytes)}")
    plan = pieces(source)
    job = Job(source, sample_rate=min(1.0, sample_mib * 2**20 / max(source.bytes, 1)))
    if dry_run:
        from offdrift.audit.forecast import forecast

        expected = forecast(job, plan, workers=workers)
        if screen.as_json:
            screen.json({"detected": source.said, **expected.as_dict()})
        else:
            screen.show("\n".join([source.said, *expected.sentences()]))
        return
    if part_of is not None:
        plan = slice_of(plan, *part_of)
    if ray is not None:
        from offdrift.audit.stream import on_ray

        run = on_ray(ray)
    else:
        run = in_process if workers == 1 else in_processes(min(workers, max(len(plan), 1)))
    with screen.progress("pieces") as progress:
        task = progress.add_task("reading", total=len(plan))

        def watch(done: int, so_far: Part) -> None:
            tokens = 0 if so_far.tally is None else so_far.tally.tokens
            rate = tokens / max(time.perf_counter() - started, 1e-9)
            progress.update(task, completed=done, description=f"{tokens:,} tokens, {rate:,.0f} per s")

        try:
            part = stream(job, plan, folder=folder, run=run, watch=watch) if plan or part_of is None else Part()
        except KeyboardInterrupt:
            progress.stop()
            again = shlex.join(["offdrift", *sys.argv[1:]])
            screen.warn(
                f"\ninterrupted; what was read is in {folder / 'parts'}. The same command continues:\n  {again}"
            )
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    if part_of is not None:
        tokens = 0 if part.tally is None else part.tally.tokens
        whole = shlex.join(["offdrift", "audit", *logs, "--out", str(folder)])
        numbers = {"slice": part_of[0], "of": part_of[1], "pieces": len(plan), "tokens": tokens}
        if screen.as_json:
            screen.json({**numbers, "folder": str(folder), "next": whole})
        else:
            screen.show(f"slice {slice_}: {len(plan):,} pieces, {tokens:,} tokens, stored in {folder / 'parts'}")
            screen.next(whole, "when all slices are in this folder: merges them, and reads what is missing")
        return
    about = run_context(
        paths[0], framework or source.framework, method=method, temperature=temperature, mixture_of_experts=moe
    )
    result = conclude(part, job, context=about, rules=table, of=of or arms_of_run(paths[0]), look=look)
    result["source"]["seconds"] = time.perf_counter() - started
    file = write_audit(result, folder)
    page = write_audit_page(result, folder)
    if screen.as_json:
        screen.json(result, indent=None)
    else:
        screen.show(audit_view(result, width=screen.width), "")
        screen.wrote(report=page, numbers=file)
    level = result["verdict"]["level"]
    if level in ("act", "stop"):
        screen.next(f"offdrift compare {folder} FIXED", "once the fixed run is audited, too: did it help?")
    else:
        screen.next(f"offdrift audit {logs[0]} --fail-on act", "the same as a test: exit status 3")
    if reaches(level, fail_on):
        raise typer.Exit(ExitCode.VERDICT)


def _slice(text: str | None) -> tuple[int, int] | None:
    """Which part of how many `--slice` asks for.

    Raises: `BadValueError` unless it is I/N with I from 1 to N.
    """
    if text is None:
        return None
    part, _, of = text.partition("/")
    if not (part.isdecimal() and of.isdecimal() and 1 <= int(part) <= int(of)):
        raise BadValueError(f"--slice {text}: give I/N with I from 1 to N, such as 3/8 for the third of eight slices")
    return int(part), int(of)


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
    common = ("/", "runs", "arms", "log", "..", ".")
    parts = [p for p in Path(path.split("://")[-1]).parts if p not in common]
    text = "-".join(parts[-2:]) or "log"
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text).strip("_.") or "log"


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
