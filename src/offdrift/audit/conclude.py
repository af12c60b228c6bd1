"""Turn the statistics of a log into numbers, findings, a verdict, a suggested method and a certificate, as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offdrift.audit.certificate_evidence import Proof
from offdrift.audit.coverage import coverage, metrics, questions
from offdrift.audit.partial import AuditPartial, Job
from offdrift.audit.tally import Timeline
from offdrift.errors import RecordError, check_choice
from offdrift.judge import Context, Rules, decide, diagnose, escalate, load_rules, regime, verdict
from offdrift.judge.findings import number
from offdrift.judge.kl_choice import kl_of
from offdrift.judge.scatter import break_of
from offdrift.judge.verdict import Action, Escalation, correlation_broken
from offdrift.stats import Alphas
from offdrift.texts import plain, read_json

if TYPE_CHECKING:
    from offdrift.certificate.prompts import PromptDesign

FORMAT = 2
"""1: `coverage.sentences` was called `said`."""
FILE_NAME = "audit.json"
PAGE = "report.html"
"""The page of an audit, which stands beside its JSON."""


def conclude(
    part: AuditPartial,
    job: Job,
    *,
    context: Context | None = None,
    rules: Rules | None = None,
    of: int = 1,
    look: int | None = None,
    prompts: PromptDesign | None = None,
) -> dict[str, Any]:
    """The content of `audit.json`, which holds everything that the page and the comparison of two runs show.

    Args:
        part: everything that was read.
        context: what is known about the run besides its log.
        rules: the diagnosis' rules, if not the built-in ones.
        of, look: which certificates share the probability of error, see `offdrift.certificate.confidence.Looks`.

    Raises: `RecordError` if no row could be read, naming the first bad one.
    """
    source = job.found
    if part.tally is None:
        if not part.bad:
            raise RecordError(f"the files hold no row ({', '.join(source.files[:3])})")
        first = part.bad[0]
        hint = "; name the columns with --columns" if first.row and "list" not in first.reason else ""
        raise RecordError(
            f"no row could be read as {source.format}: {part.unread.rows} bad rows, the first at "
            f"{first.file}:{first.row} ({first.reason}){hint}"
        )
    rules = rules or load_rules()
    tally = part.tally.as_dict(rules.limits)
    since = since_breaks(part.tally.timeline, tally["steps"], rules.limits)
    missing = coverage(part, files=source.files, skipped=len(source.skipped), size=source.bytes)
    overall = {**tally["overall"], **metrics(missing)}
    context = informed(context or Context(framework=source.framework), tally["facets"]["drawn_by"])
    if context.temperature is None:
        context = replace(context, temperature=number(overall, "sampling/temperature"))
    methods = [] if part.counterfactual is None else part.counterfactual.table()
    exact = any(name.startswith(("kl_", "tv_")) for name in tally["has"])
    audit = {
        "format": FORMAT,
        "kind": "audit",
        "offdrift": version("offdrift"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": {
            "detected": source.description,
            "format": source.format,
            "framework": context.framework,
            "files": len(source.files),
            "bytes": source.bytes,
            "paths": list(source.files[:20]),
            "columns": dict(source.columns),
            "proposed": "=".join(source.proposed or ()),
            "sample_rate": job.sample_rate,
        },
        "coverage": missing,
        **tally,
        "overall": overall,
        "since": since,
        "counts": {**tally["counts"], "bad_rows": part.unread.rows},
        "bad_rows": [b._asdict() for b in part.bad],
        "questions": questions({*tally["has"], *(["exact"] if exact else [])}, lags=tally["facets"].get("lag", ())),
        "methods": methods,
        "context": {name: getattr(context, name) for name in KNOWN},
        "certificate": (part.proof or Proof()).as_dict(of=of, look=look, prompts=prompts, limits=rules.limits),
        "alphas": Alphas.of(overall, grade=tally["grade"]).as_dict(),
    }
    return plain(audit | judged(audit, context, rules))


GAPS = tuple(f"{on}/abs_log_ratio_mean" for on in ("mismatch", "full", "staleness"))
"""Metrics whose jump by a factor of `TIMES` parts a log in two."""
TIMES = 2.0
SIGNED = ("advantage/reward_corr",)
"""Metrics whose change of sign does."""


def since_breaks(
    timeline: Timeline, rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Parts of a log that begin where one metric changed at one step and stayed, each with its numbers as a whole.

    What is wrong from a step on is diluted in the numbers of the whole log, and plain in those of its part.

    Args:
        timeline: the points of the log.
        rows: `timeline.rows()`.
        limits: thresholds by name: `window_level` steps at least stand on each side, and the change scores
            `break_score` (`offdrift.judge.scatter.break_of`).

    Returns: rows with "step", "metric", "before", "after", "steps" and "overall", the metrics of the part; for each
        step one.
    """
    parts: dict[int, dict[str, Any]] = {}
    for metric in (*GAPS, *SIGNED):
        places = [i for i, row in enumerate(rows) if math.isfinite(row.get(metric, math.nan))]
        values = [rows[i][metric] for i in places]
        if metric in GAPS:
            values = [math.log(max(x, 1e-12)) for x in values]
        broken = break_of(values, int(limits["window_level"]))
        if broken is None or abs(broken.score) <= limits["break_score"]:
            continue
        turned = broken.before * broken.after < 0
        if not turned if metric in SIGNED else broken.after - broken.before <= math.log(TIMES):
            continue
        first = places[broken.at]
        keys = sorted(timeline.points)[first:]
        part = Timeline(timeline.width, {key: timeline.points[key] for key in keys}).whole()
        before, after = (math.exp(x) if metric in GAPS else x for x in (broken.before, broken.after))
        row = {"step": rows[first]["step"], "metric": metric, "before": before, "after": after, "steps": len(keys)}
        parts.setdefault(first, row | {"overall": part.metrics()})
    return list(parts.values())


KNOWN = (
    "method",
    "temperature",
    "mixture_of_experts",
    "filtered",
    "filter_replayed",
    "cache_replayed",
    "raw_stated",
    "quantized",
)
"""What an audit stores of the context besides its own numbers: facts that another judgement of it needs."""


def judged(audit: Mapping[str, Any], context: Context, rules: Rules) -> dict[str, Any]:
    """The entries of `audit.json` that rules decide: findings, verdict, suggestion, regime, and the rules themselves.

    Args:
        audit: the numbers of a log of tokens, as `audit.json` has them.
        context: what is known about the run besides.
    """
    overall, limits = audit["overall"], rules.limits
    facets = {
        axis: [{**_numbers(row), "label": row["label"]} for row in buckets] for axis, buckets in audit["facets"].items()
    }
    from offdrift.judge.stack import by_stack  # read once, when an audit ends
    from offdrift.show.anchors import on_page

    since = [{**part, "overall": _numbers(part["overall"])} for part in audit.get("since", ())]
    context = replace(context, overall=overall, facets=facets, shapes=audit["shapes"], since=since)
    findings = diagnose([_numbers(step) for step in audit["steps"]], context=context, rules=rules)
    missing, tokens = audit["coverage"]["sentences"], overall.get("batch/tokens") or 0
    if 0 < tokens < limits["few_tokens"]:
        missing = [f"Of {tokens:.0f} tokens no cause can be told from chance.", *missing]
        findings = [f if rules.rules[f.rule].data else f.as_a_hint() for f in findings]
    concluded = verdict(findings, overall, missing=missing, limits=limits)
    if (proposed := audit["source"].get("proposed")) and any(f.rule == UNMEASURED for f in findings):
        field, _, column = proposed.partition("=")
        whose = "the trainer's" if field == "logp_old" else "the engine's"
        concluded["steps"].insert(0, f"If {column} holds {whose} log-probs, audit again with --columns {proposed}.")
    by_numbers = suggest(audit["methods"], overall, limits=limits)
    suggestion = decide(findings, by_numbers, table=audit["methods"], trains=context.method, limits=limits)
    return {
        **rules.as_record(),
        "regime": regime(overall, limits=limits),
        "suggestion": suggestion,
        "stacks": by_stack(context, overall, suggestion),
        "findings": on_page((_without_itself(f.as_dict()) for f in findings), PAGE),
        "verdict": concluded,
    }


UNMEASURED = "nothing_measured"
"""The rule that asks for log-probs of a second policy."""
AUDIT = "offdrift audit LOGS"
"""The snippet of fixes that an audit helps with, which says nothing in an audit."""


def _without_itself(finding: dict[str, Any]) -> dict[str, Any]:
    """A finding as plain data, without advice to make the audit that it stands in."""
    snippets = {name: snippet for name, snippet in finding["snippets"].items() if snippet.strip() != AUDIT}
    return {**finding, "snippets": snippets}


def informed(context: Context, drawn_by: Sequence[Mapping[str, Any]]) -> Context:
    """The context with what the log itself says of how it was drawn, where the context does not know.

    Several engines: the worst is taken, and a temperature only if it is everybody's.

    Args:
        drawn_by: rows with "provenance", as in the audit's facets.
    """
    stated = [row["provenance"] for row in drawn_by if row["provenance"]]
    if not stated:
        return context
    from offdrift.records.provenance import Sampling

    temperatures = {p["sampling"]["temperature"] for p in stated}
    filtered = [p for p in stated if Sampling(**p["sampling"]).filtered]
    warped = [p for p in stated if Sampling(**p["sampling"]).filtered or p["sampling"]["temperature"] != 1]
    evicted = [p for p in stated if p["eviction"] is not None]
    own = {
        "temperature": temperatures.pop() if len(temperatures) == 1 else None,
        "filter_replayed": all("support" in p["replayed"] for p in filtered) if filtered else None,
        "cache_replayed": all("retention" in p["replayed"] for p in evicted) if evicted else None,
        "filtered": bool(filtered),
        "raw_stated": any(p["logprobs"] == "raw" for p in warped),
        "quantized": any(p["quantization"] is not None for p in stated),
    }
    return replace(context, **{name: x for name, x in own.items() if getattr(context, name) is None})


def read_audit(path: Path) -> dict[str, Any]:
    """A stored audit: its folder, or the file in it.

    Raises: `RecordError` if there is none, or it is not an audit of a format known here.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        audit = read_json(file)
    except (OSError, ValueError) as e:
        raise RecordError(f"{path} holds no audit ({e}); run `offdrift audit` first") from e
    if not isinstance(audit, dict) or audit.get("kind") != "audit":
        raise RecordError(f"{file} is not an audit; give the folder that `offdrift audit` wrote")
    if audit.get("format") == 1:
        audit["format"] = FORMAT
        if isinstance(covered := audit.get("coverage"), dict) and "said" in covered:
            covered["sentences"] = covered.pop("said")
    if audit.get("format") != FORMAT:
        raise RecordError(f"{file} has format {audit.get('format')}, this version reads {FORMAT}; audit the log again")
    return audit


def write_audit(result: Mapping[str, Any], folder: Path) -> Path:
    """Store an audit in its folder, whole or not at all."""
    from offdrift.records.atomic import write_json

    write_json(folder / FILE_NAME, result)
    return folder / FILE_NAME


def _numbers(row: Mapping[str, Any]) -> dict[str, float | int]:
    return {k: v for k, v in row.items() if isinstance(v, (int, float))}


# -- the correction to turn on, by what it would have done with this log --------------------------
#
# The ladder of the survey: reject; reject and reweight; repair the system. What each step would have
# rejected and what sample size it would have left is read from the counterfactual table.
#
# The bands of the ladder are centered on no drift. Where weights are older than the policy they correct
# for, every sequence has drifted a little (its mean log-ratio is about -KL), and such a band rejects
# nearly all of them though no tail is heavy. There the tail is measured by a band on single tokens, and
# a step between the two is taken: reweight alone.

Rung = Action | Literal["none", "token TIS"]

LADDERS = {
    "mismatch": ("disabled", "decoupled_geo_rs", "decoupled_geo_rs_token_tis"),
    "full": ("none", "bypass_pg_geo_rs", "bypass_pg_geo_rs_token_tis"),
}
"""What to turn on at each rung, where the old policy was logged and where it was not."""
TAILS = {"mismatch": ("decoupled_token_icepop", "decoupled_token_is"), "full": ("bypass_pg_token_icepop", "token_tis")}
"""The band on single tokens that measures the tail, and truncated weights without any band."""
BAND = "(0.99_1.01)"
"""Names the rows of the table that try the presets with the band that is advised."""


@dataclass(frozen=True)
class DriftOfLog:
    """The numbers of a whole log that decide which correction it asks for; NaN where one is not known."""

    on: str
    """The ratio that is corrected: "mismatch" where the old policy was logged, else "full"."""
    chi2_token: float
    pearson: float
    ppl_ratio: float
    prob_diff_max: float
    ess_frac: float
    kl: float
    """Where only k1 can be believed, its size counts: it is a bias then."""
    lag: float
    limits: Mapping[str, float]

    @classmethod
    def of(cls, overall: Mapping[str, Any], limits: Mapping[str, float]) -> DriftOfLog | None:
        """Take the numbers of the first ratio of `LADDERS` that was measured; None if none was."""
        on = next((x for x in LADDERS if not math.isnan(_number(overall, f"{x}/chi2_token"))), None)
        if on is None:
            return None
        names = ("chi2_token", "pearson", "ppl_ratio", "prob_diff_max", "ess_frac")
        estimate = kl_of([overall], on, limits["ratio_mean_z"])
        return cls(
            on,
            *(_number(overall, f"{on}/{name}") for name in names),
            kl=math.nan if estimate is None else abs(estimate[0]),
            lag=_number(overall, "version_lag/mean"),
            limits=limits,
        )

    @property
    def size(self) -> str:
        return f"KL is {self.kl:.2g} nats per token and token chi2 {self.chi2_token:.2g} ({self.on})"

    @property
    def is_mild(self) -> bool:
        """Whether nothing has to be corrected."""
        t = self.limits
        broken = correlation_broken(self.pearson, prob_diff_max=self.prob_diff_max, kl=self.kl, limits=t)
        return self.kl < t["kl_large"] and self.chi2_token < t["chi2_moderate"] and not broken

    @property
    def mildness(self) -> str:
        """Mild drift in words."""
        t = self.limits
        decorrelated = self.pearson < t["pearson_clean"] and not self.prob_diff_max <= t["prob_diff_visible"]
        clean = self.kl < t["kl_clean"] and not decorrelated and not abs(self.ppl_ratio - 1) > t["ppl_near"]
        what = "mismatch between the engines" if self.on == "mismatch" else "drift"
        return f"there is no meaningful {what}" if clean else f"{what} is mild and correcting it optional"

    def escalated(self, masked: float, ess: float, *, pearson: float | None) -> Escalation:
        """The survey's escalation at the share that rejection masks, and the sample size that it leaves."""
        known: dict[str, Any] = {"prob_diff_max": self.prob_diff_max, "kl": self.kl, "limits": self.limits}
        return escalate(self.chi2_token, masked, ess_after_rs=ess, pearson=pearson, **known)

    def reweighted(self, tail: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any] | None:
        """Token weights alone, where age explains the drift and they are usable; else None.

        Where the log says that weights were older, their age explains a low correlation too. Where it does not say,
        only what the centered band would reject is set aside. Policies of equal weights have nothing to catch up with:
        their engines disagree.

        Args:
            tail, weights: rows of the table, of the methods in `TAILS`.
        """
        if not self.ess_frac >= self.limits["ess_half"] or self.lag == 0:
            return None
        outside = 1 - tail["kept_tokens"]
        unexplained = None if self.lag > 0 else self.pearson
        if self.escalated(outside, self.ess_frac, pearson=unexplained).action == "systems fix":
            return None
        age = f"tokens are {self.lag:.3g} updates old on average"
        if not self.lag > 0:
            age = "the log does not say that the policies hold the same weights; "
            age += "if they do, repair the engines instead"
        return _suggestion(
            "token TIS",
            weights["name"],
            f"{self.size}, with no heavy tail: {outside:.1%} of tokens have a ratio outside [0.5, 5]; a band around no "
            f"drift would mask most of the batch, weights leave an effective sample size of "
            f"{weights['ess_frac']:.1%}; {age}",
        )


def suggest(
    rows: Sequence[Mapping[str, Any]], overall: Mapping[str, Any], *, limits: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The smallest correction that the data ask for, and why.

    Args:
        rows: the counterfactual table (`Counterfactual.table`).
        overall: metrics of the whole log; where the old policy was logged its mismatch decides,
            else the full ratio.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.

    Returns: `method` (a row of `METHODS`; None if none helps or nothing can be said), `settings` for
        `override`, `row` (the method with these settings in the table), `why`, and the `rung` of the
        ladder (None if nothing can be said).

    Example:
        >>> suggest([], {"mismatch/chi2_token": 0.01, "mismatch/k1": 0.001})["method"]
        'disabled'
    """
    t = load_rules().limits if limits is None else limits
    missing = max(overall.get(x) or 0.0 for x in ("data/unread_frac", "batch/unscored_frac"))
    if missing > t["data_most"]:
        why = f"{missing:.0%} of the log is missing, so the rest may suggest the wrong method"
        return _suggestion(None, None, why)
    drift = DriftOfLog.of(overall, t)
    if drift is None:
        log = "log the rollout engine's log-probs, and those of the training engine for the same tokens"
        return _suggestion(None, None, f"drift cannot be measured: {log}")
    on, (nothing, reject, both) = drift.on, LADDERS[drift.on]
    if drift.is_mild:
        return _suggestion("none", nothing, f"{drift.mildness}: {drift.size}")
    tried = {row["name"]: row for row in rows if row["why_not"] is None}
    alone, weighted = tried.get(reject + BAND), tried.get(both + BAND)
    if alone is None or weighted is None:
        return _suggestion(None, None, f"{reject} was not tried on this log, so its cost is unknown")
    ess = weighted["ess_frac"] / weighted["kept_tokens"] if weighted["kept_tokens"] else 0.0
    rung, why = drift.escalated(1 - alone["kept_tokens"], ess, pearson=drift.pearson)
    if rung != "systems fix":
        chosen = alone if rung == "rejection" else weighted
        left = f"{chosen['kept_tokens']:.1%} of tokens stay, effective sample size {chosen['ess_frac']:.1%}"
        return _suggestion(rung, chosen["name"].removesuffix(BAND), f"{why} ({on}); {left}", chosen["settings"])
    repair = _suggestion(rung, None, f"repair the system; no correction is cheaper: {why} ({on})")
    tail, weights = (tried.get(name) for name in TAILS[on])
    return repair if tail is None or weights is None else drift.reweighted(tail, weights) or repair


def _suggestion(rung: Rung | None, method: str | None, why: str, settings: Mapping[str, float] = {}) -> dict[str, Any]:
    row = f"{method}{BAND}" if method and settings else method
    return {"method": method, "why": why, "settings": dict(settings), "row": row, "rung": rung}


def _number(overall: Mapping[str, Any], name: str) -> float:
    """A metric; NaN where it is missing, as where JSON says null."""
    value = overall.get(name)
    return math.nan if value is None else float(value)


FOLDERS_ABOVE = 4
"""How far above a log its `run.json` is looked for."""


def check_framework(name: str) -> None:
    """Raise `MethodError` unless it is a framework whose logs are read, or that fixes or adapters are for."""
    from offdrift.adapters.frameworks import FRAMEWORKS
    from offdrift.judge.metric_names import metric_names
    from offdrift.records.readers.formats.table import SOURCES

    in_fixes = {framework for fix in load_rules().fixes.values() for framework in fix.snippets} - {"python", "shell"}
    names = {*FRAMEWORKS, *metric_names().sources, *(source.framework for source in SOURCES), *in_fixes}
    check_choice("framework", name, sorted(names))


def run_context(
    path: str,
    framework: str,
    *,
    method: str | None = None,
    temperature: float | None = None,
    mixture_of_experts: bool | None = None,
) -> Context:
    """The context of a diagnosis. Options stand above what `run.json` says.

    Args:
        path: the log; the `run.json` of a run of this library is looked for in the folders above it.
        framework: whose configuration fixes are written in.
        method: row of `METHODS` that the run trains with.
        temperature: of the rollouts.
        mixture_of_experts: whether the model routes tokens to experts.

    Example:
        >>> run_context("log.jsonl", "verl", temperature=0.7).temperature
        0.7
    """
    options = {"method": method, "temperature": temperature, "mixture_of_experts": mixture_of_experts}
    run = _run(path)
    if not run:
        return Context(framework=framework, **options)
    from offdrift.show.json_access import mapping, number

    recipe, arms = mapping(run.get("recipe")), _arms(run)
    rollout = mapping(recipe.get("rollout"))
    named = [arm for name, arm in arms.items() if name in Path(path).absolute().parts]
    arm = named[0] if named else next(iter(arms.values())) if len(arms) == 1 else {}
    own, experts = arm.get("method"), mapping(run.get("model")).get("experts")
    stored = {
        "method": own if isinstance(own, str) else None,
        "temperature": number(rollout.get("temperature")),
        "mixture_of_experts": experts if isinstance(experts, bool | int) else None,
    }
    top_k, top_p, min_p = (number(rollout.get(name)) for name in ("top_k", "top_p", "min_p"))
    filtered = (top_k or 0) > 0 or (1 if top_p is None else top_p) < 1 or (min_p or 0) > 0
    replay = mapping(arm.get("replay")) or mapping(recipe.get("replay"))
    return Context(
        framework=framework,
        filter_replayed=bool(replay.get("support")) if filtered else None,
        filtered=filtered if rollout else None,
        **{k: stored[k] if x is None else x for k, x in options.items()},
    )


def _arms(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a run's arms, by name."""
    from offdrift.show.json_access import mapping

    return {name: mapping(arm) for name, arm in mapping(mapping(run.get("recipe")).get("arms")).items()}


def arms_of_run(path: str) -> int:
    """Arms of the run of this library that a log is from; 1 where there is none.

    Example:
        >>> arms_of_run("log.jsonl")
        1
    """
    return max(1, len(_arms(_run(path))))


def _run(path: str) -> dict[str, Any]:
    """The nearest `run.json` above a log; empty where there is none."""
    for folder in (Path(path), *Path(path).absolute().parents[:FOLDERS_ABOVE]):
        with suppress(OSError, ValueError):
            content = read_json(folder / "run.json")
            if isinstance(content, dict) and "recipe" in content:
                return content
    return {}
