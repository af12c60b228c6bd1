"""`audit`: the audit of a log, or of every arm of a run, as a function. The command is a caller of it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from offdrift.audit.conclude import arms_of_run, check_framework, conclude, run_context
from offdrift.audit.partial import AuditPartial, Job
from offdrift.audit.result import ArmsAudit, Audit
from offdrift.audit.small_files import bundled
from offdrift.audit.stream import Run, in_process, in_processes, on_ray, slice_of
from offdrift.audit.stream import audit as read_all
from offdrift.errors import BadValueError, MethodError, check_count
from offdrift.judge import Context, Rules
from offdrift.judge.rules_record import Chosen, choose_rules, record_above
from offdrift.records.readers import Detected, Piece, pieces
from offdrift.records.readers.recognize import recognize
from offdrift.show.numbers import counted, size_in_words
from offdrift.show.progress import Watch, watched

if TYPE_CHECKING:
    from offdrift.audit.forecast import Forecast
    from offdrift.certificate.prompts import PromptDesign
    from offdrift.records.readers.metrics import MetricLog

OF_METRICS = (
    "An audit reads tokens: what gradient norms and held-out rewards show is in the run's own report.html, and in "
    "`offdrift watch` of it."
)
"""Where findings are that an arm of a run has beside those of its log."""
Location = str | os.PathLike[str]
NOTHING: Mapping[str, str] = MappingProxyType({})


def audit(
    path: Location | Sequence[Location],
    *,
    columns: Mapping[str, str] = NOTHING,
    out: Location | None = None,
    framework: str | None = None,
    method: str | None = None,
    temperature: float | None = None,
    mixture_of_experts: bool | None = None,
    rules: Rules | Location | None = None,
    also: Sequence[str] = (),
    of: int | None = None,
    look: int | None = None,
    prompts: PromptDesign | None = None,
    cluster: str | None = None,
    workers: int = 1,
    ray: str | None = None,
    sample_mib: int = 64,
    max_file_mib: int = 4096,
    progress: bool | Watch = False,
) -> Audit | ArmsAudit:
    """Find drift in the log of a run: how much, its cause, and the smallest fix. Prints nothing.

    Args:
        path: log of one run: a file, folder, glob or URL, or several; an arm of a run of this library, or the folder of
            such a run. A run of several arms gives an `ArmsAudit` of all that logged their tokens.
        columns: column of the log by field, where it has a name of its own; "" leaves the field out.
        out: folder for `audit.json`, `report.html` and the parts that were read, from which an interrupted audit goes
            on; of a run of several arms with a folder for each. Default: nothing is stored.
        framework: whose configuration the fixes show; default as detected.
        method: row of `METHODS` that the run trains with; default as `run.json` says.
        temperature: of the rollouts; default as the log or `run.json` says.
        mixture_of_experts: whether the model routes tokens to experts; default as `run.json` says.
        rules: rules of the diagnosis, or the TOML file that changes them; default: those that the run stored, else the
            built-in ones.
        also: methods in files of yours that are tried, too, as "mine.py:mine"; their code is run.
        of: number of policies whose certificates are compared; default: the arms of the run.
        look: number of this look in a series, from 1.
        prompts: "listed" or "drawn", for a certificate where prompts repeat.
        cluster: column that names what prompts share, for a certificate where some share a source: the same as
            `columns={"cluster": ...}`.
        workers: processes that read.
        ray: address of a Ray cluster that reads instead.
        sample_mib: amount of the log on which all methods are compared, MiB.
        max_file_mib: memory limit per file, MiB; larger ones are left out and listed.
        progress: True shows a bar on stderr; a function is called with stage, parts done and parts.

    Raises: `RecordError` if there is no log, or no row of it can be read; `BadValueError` for an option that cannot be;
        `MethodError` for a framework or method that is not known; `RecipeError` for a rules file; `EngineError` if a
        process that reads is lost.

    Example:
        >>> import tempfile
        >>> from offdrift.audit.demo import write_demo
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = audit(write_demo(Path(folder)))
        >>> found.verdict.level, found.findings[0].rule
        ('act', 'wrong_weights')
    """
    if cluster is not None and prompts is not None:
        raise BadValueError("cluster and prompts are both given: a cluster is one draw, whatever its prompts; give one")
    options = options_of(
        columns=columns if cluster is None else {**columns, "cluster": cluster},
        framework=framework,
        method=method,
        temperature=temperature,
        mixture_of_experts=mixture_of_experts,
        rules=rules,
        also=also,
        workers=workers,
        ray=ray,
        sample_mib=sample_mib,
        max_file_mib=max_file_mib,
    )
    looks = {"of": of, "look": look, "prompts": prompts}
    for name in ("of", "look"):
        check_count(name, 1 if looks[name] is None else looks[name])
    paths = [os.fspath(p) for p in ([path] if isinstance(path, str | os.PathLike) else path)]
    arms = arms_at(paths)
    with watched(progress) as watch:
        if arms is None:
            result: Audit | ArmsAudit = one_log(logs_of(paths), options, looks, out=out, watch=watch)
        else:
            result = ArmsAudit(
                {
                    name: one_log([log], options, looks, out=out and Path(out) / name, watch=_named(name, watch))
                    for name, log in arms.items()
                }
            )
        if out is not None:
            watch(f"writing {out}", 0, 1)
            result.write(out)
    return result


@dataclass(frozen=True, kw_only=True)
class Options:
    """The way in which logs are read and judged."""

    columns: Mapping[str, str]
    context: Mapping[str, Any]
    """What the caller says of the run, by argument of `run_context`; None is not said."""
    rules: Rules | Path | None
    """Those of the caller, or their file; None: as the run stored them."""
    also: tuple[tuple[str, str], ...]
    """Methods in files of the caller: absolute names, and the hashes of their files."""
    run: Run
    sample_mib: int
    max_file_mib: int

    def source(self, paths: Sequence[str]) -> Detected | MetricLog:
        """Find the log at some paths. Raises: `RecordError` if there is none."""
        return recognize(paths, columns=self.columns, limit=self.max_file_mib << 20)

    def job(self, source: Detected) -> Job:
        """The way in which its pieces are read."""
        return Job(source, min(1.0, self.sample_mib * 2**20 / max(source.bytes, 1)), self.also)

    def judged_by(self, path: str) -> Chosen:
        """The rules by which a log is judged."""
        if isinstance(self.rules, Rules):
            return Chosen(self.rules, f"Judged by {self.rules.title}.", given=True)
        return choose_rules(self.rules, *record_above(path))

    def plan(self, source: Detected) -> list[Piece]:
        """The pieces that are read, in order; neighboring small files are one."""
        return bundled(pieces(source), dict(zip(source.files, source.sizes, strict=True)))

    def context_of(self, path: str, framework: str) -> Context:
        """The facts that are known about the run of a log besides it."""
        said = {name: value for name, value in self.context.items() if name != "framework"}
        return run_context(path, self.context.get("framework") or framework, **said)


def options_of(
    *,
    columns: Mapping[str, str] = NOTHING,
    rules: Rules | Location | None = None,
    also: Sequence[str] = (),
    workers: int = 1,
    ray: str | None = None,
    sample_mib: int = 64,
    max_file_mib: int = 4096,
    **context: Any,
) -> Options:
    """The arguments of `audit` as options. Raises: as that."""
    for name, number in (("workers", workers), ("sample_mib", sample_mib), ("max_file_mib", max_file_mib)):
        check_count(name, number)
    if context.get("framework") is not None:
        check_framework(context["framework"])
    return Options(
        columns=columns,
        context=context,
        rules=rules if rules is None or isinstance(rules, Rules) else Path(rules),
        also=in_files(also),
        run=on_ray(ray) if ray is not None else in_process if workers == 1 else in_processes(workers),
        sample_mib=sample_mib,
        max_file_mib=max_file_mib,
    )


def in_files(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Absolute names of methods in files, each with the hash of what was run.

    Raises: `MethodError` if one cannot be loaded or is not known; `BadValueError` for a name of the table, or two that
        look alike.
    """
    from offdrift.methods.load import absolute, code_source, displayed, in_code
    from offdrift.methods.table import method

    for name in names:
        if in_code(name):
            continue
        try:
            method(name)
        except MethodError as e:
            raise MethodError(f"--also: {e}; a method of yours is named as in --also mine.py:mine") from e
        raise BadValueError(
            f"--also {name}: every method of the table is tried anyway; give code, as in --also mine.py:mine"
        )
    hashes = {name: code_source(name).sha256 for name in dict.fromkeys(map(absolute, names))}
    if len({*map(displayed, hashes)}) < len(hashes):
        raise BadValueError(f"--also {' --also '.join(hashes)}: names of two files look alike; rename one")
    return tuple(hashes.items())


def one_log(
    paths: Sequence[str], options: Options, looks: Mapping[str, Any], *, out: Location | None, watch: Watch
) -> Audit:
    """Audit one log; with `out`, parts that were read stand there.

    Args:
        looks: arguments `of`, `look` and `prompts` of `conclude`; `of` may be None.
    """
    started = time.perf_counter()
    watch("looking for logs", 0, 1)
    source = options.source(paths)
    context, chosen = options.context_of(paths[0], source.framework), options.judged_by(paths[0])
    words = {"judged_by": chosen.words}
    if not isinstance(source, Detected):
        from offdrift.audit.metrics_only import conclude_metrics

        return Audit(conclude_metrics(source, context=context, rules=chosen.rules) | words)
    plan, job = options.plan(source), options.job(source)
    watch(f"reading {amount(source)}", 0, 0)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="offdrift-audit-") as folder:
            part = read_pieces(job, plan, folder=Path(folder), run=options.run, watch=watch)
    else:
        part = read_pieces(job, plan, folder=Path(out), run=options.run, watch=watch)
    watch("drawing conclusions", len(plan), len(plan))
    looks = {**looks, "of": looks["of"] or arms_of_run(paths[0])}
    data = conclude(part, job, context=context, rules=chosen.rules, **looks)
    data |= words
    if (Path(paths[0]).parent / "metrics.jsonl").is_file():
        data["coverage"]["remarks"].append(OF_METRICS)
    data["source"]["seconds"] = time.perf_counter() - started
    return Audit(data)


def read_pieces(job: Job, plan: list[Piece], *, folder: Path, run: Run, watch: Watch) -> AuditPartial:
    """Read pieces of a log into parts in a folder, and merge them; `watch` hears of tokens and their rate."""
    started = time.perf_counter()

    def after_piece(done: int, so_far: AuditPartial) -> None:
        tokens = 0 if so_far.tally is None else so_far.tally.tokens
        rate = tokens / max(time.perf_counter() - started, 1e-9)
        watch(f"{tokens:,} tokens, {rate:,.0f} per s", done, len(plan))

    return read_all(job, plan, folder=folder, run=run, watch=after_piece)


@dataclass(frozen=True)
class Sliced:
    """A slice of a log that was read, for an audit whose work several machines share."""

    slice: int
    of: int
    pieces: int
    tokens: int

    def as_dict(self) -> dict[str, int]:
        """As plain data."""
        return asdict(self)


def read_slice(paths: Sequence[str], options: Options, *, part: tuple[int, int], out: Path, watch: Watch) -> Sliced:
    """Read slice I of N of a log's pieces into `out`.

    Raises: `BadValueError` of metrics, which are read at once, and of a run of several arms.
    """
    if arms_at(paths) is not None:
        raise BadValueError(f"{paths[0]} is a run of several arms: slice the log of one of them")
    source = options.source(logs_of(paths))
    if not isinstance(source, Detected):
        raise BadValueError(f"--slice {part[0]}/{part[1]}: metrics are read at once; leave it out")
    plan = slice_of(options.plan(source), *part)
    watch(f"reading a slice of {amount(source)}", 0, 0)
    tally = read_pieces(options.job(source), plan, folder=out, run=options.run, watch=watch).tally if plan else None
    return Sliced(*part, len(plan), 0 if tally is None else tally.tokens)


@dataclass(frozen=True)
class Expected:
    """The log at some paths, and what reading it would cost; metrics cost nothing."""

    detected: str
    cost: Forecast | None

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"detected": self.detected, **(self.cost.as_dict() if self.cost is not None else {})}

    def sentences(self) -> list[str]:
        """Lines for a person."""
        return [self.detected, *(self.cost.sentences() if self.cost is not None else [])]


def forecast_of(paths: Sequence[str], options: Options, *, workers: int) -> Expected:
    """Estimate the cost of an audit; of a run of several arms of all of them together."""
    from offdrift.audit.forecast import forecast

    source = options.source(list((arms_at(paths) or {}).values()) or logs_of(paths))
    if not isinstance(source, Detected):
        return Expected(source.description, None)
    return Expected(source.description, forecast(options.job(source), options.plan(source), workers=workers))


def arms_at(paths: Sequence[str]) -> dict[str, str] | None:
    """The logs of a run of several arms, by arm; None of anything else.

    Raises: `BadValueError` for such a run beside other paths, or if none of its arms logged tokens.
    """
    for path in paths:
        folder = Path(path)
        if not (folder / "run.json").is_file():
            continue
        arms = {p.name: str(p / "log") for p in sorted((folder / "arms").glob("*")) if (p / "log").is_dir()}
        if not arms:
            raise BadValueError(
                f"{path} is a run of which no arm logged its tokens; set log.tokens = true in its recipe, or audit "
                "another log"
            )
        if len(arms) > 1 and len(paths) > 1:
            raise BadValueError(f"{path} is a run of several policies; audit it alone, or one of its arms")
        if len(arms) > 1:
            return arms
    return None


def logs_of(paths: Sequence[str]) -> list[str]:
    """The logs at some paths: that of an arm, or of the only arm of a run; any other path is a log itself."""
    logs = []
    for path in paths:
        folder = Path(path)
        arms = sorted((folder / "arms").glob("*/log")) if (folder / "run.json").is_file() else [folder / "log"]
        logs += [str(log) for log in arms if log.is_dir()] or [path]
    return logs


def amount(source: Detected) -> str:
    """Files and their size, in words."""
    return f"{counted(len(source.files), 'file')}, {size_in_words(source.bytes)}"


def _named(arm: str, watch: Watch) -> Callable[[str, int, int], object]:
    return lambda stage, done, total: watch(f"{arm}: {stage}", done, total)
