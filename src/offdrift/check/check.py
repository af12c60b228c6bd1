"""The zero-update check: the divergence of two engines with the same weights, and its causes.

The rollout engine samples tokens and the training engine scores them. Nothing was learned in between,
so every difference comes from the engines.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from offdrift.check.bench import Bench, EngineSpec, Pair
from offdrift.check.branches import branches, quantized
from offdrift.check.claim import Claim, claimed_equal, claimed_equal_to, with_module
from offdrift.check.compound import check_together, compound
from offdrift.check.declared import quantization_finding, quantization_of
from offdrift.check.ends import end_findings, recorded_ends
from offdrift.check.equality import attempted, bisect, determinism, modules_agree, repeated
from offdrift.check.factors.base import Factor, Outcome
from offdrift.check.measure import Measured, measure
from offdrift.check.other_machine import with_digest
from offdrift.check.paired import paired_rows
from offdrift.check.precision import Explained, explained, unexplained, without_precision
from offdrift.check.recommend import Level, broken_record, defects, level_of, recommended, thresholds, worst
from offdrift.check.server_side import TEXTS, server_findings, server_side
from offdrift.check.verdict import above_limit, conclusion, incomplete, with_claim
from offdrift.errors import BadValueError, RecordError
from offdrift.judge import Context, Finding, Rules, diagnose, load_rules, num_experts
from offdrift.judge.stack import by_stack
from offdrift.records.atomic import plain
from offdrift.records.rollouts import Rollouts
from offdrift.show.anchors import on_page
from offdrift.texts import LARGEST_DATA, read_text

FORMAT = 1
FILE_NAME = "check.json"
PAGE = "check.html"
"""The page of a check, which stands beside its JSON."""


Watch = Callable[[str, int, int], object]
"""Called with the name of a stage, the stages done, and their number."""

OWN_NUMBERS = (
    "kl_mean", "kl_max", "kl_se", "tv_mean", "tv_max", "tv_p95", "chi2_exact", "kl_low", "kl_high",
    "record_deviation", "drawn_z", "tail_log_ratio_cap", "tail_log_ratio_cap_all",
    "abs_log_ratio_max", "pearson", "chi2_token", "delta_router",
)  # fmt: skip
"""Fields of `Measured` that `check.json` lists under `baseline`, before the metrics."""
NOISE_PROMPTS = 8
"""Prompts of the rollouts that measure the training engine against itself."""


def check(
    bench: Bench,
    rollout: EngineSpec,
    train: EngineSpec,
    *,
    factors: Sequence[Factor] = (),
    left_out: Sequence[tuple[Factor, str]] = (),
    noise: bool = True,
    layers: bool = False,
    claim: Literal["equal"] | None = None,
    against: EngineSpec | None = None,
    together: Sequence[Factor] = (),
    digest: str | None = None,
    max_kl: float | None = None,
    rules: Rules | None = None,
    watch: Watch = lambda stage, done, total: None,
) -> dict[str, Any]:
    """The content of `check.json`: baseline, noise, factors, thresholds, findings, verdict, recommendation.

    An interrupt (Ctrl-C) after the baseline ends the check; what was measured is returned, with `"interrupted": true`,
    `"passed": null`, and the verdict "interrupted": no level, and how far it came.

    Args:
        rollout, train: the engines that sample the tokens and that rescore them.
        factors: changed one at a time.
        left_out: factors that are not run, and how to run each; rows of status "skipped".
        noise: also measure each engine against itself, and whether it is deterministic.
        layers: also find the first module whose output differs between the engines.
        claim: "equal": every log-prob has the same bits in both engines; without that the check has not passed.
        against: another rollout engine with the same weights, which is led along the same tokens; a claim is then about
            the two rollout engines.
        together: factors whose settings are changed in every combination, to split their drift (`compound`).
        digest: of another machine's claim, or the path of its check.json, by which the first difference is named; the
            check has not passed if this one's is another.
        max_kl: the largest mean KL(rollout || train) per token to pass with, nats.
        rules: of the diagnosis; default: the built-in ones.
        watch: called before each stage.

    Raises: `BadValueError` for a `max_kl` that is not positive, or for settings `together` that overwrite each other;
        `EngineError` if an engine cannot be made.
    """
    check_max_kl(max_kl)
    rules = rules or load_rules()  # a rule that cannot be read must not cost the measurements
    started, pair = time.monotonic(), Pair(rollout, train)
    total = 3 + 3 * noise + _has_pairs(rollout, against) + (claim is not None) + layers + len(factors)
    total += bool(together)
    bench.train_model(train)  # an impossible training engine is refused before sampling
    check_together(pair, bench, together)
    watch(f"drawing with {rollout}", 0, total)
    rollouts = bench.rollouts(rollout)
    watch(f"scoring with {train}", 1, total)
    baseline = measure(bench, rollouts, train, details=True)
    stages = _Stages(bench, pair, rollouts, baseline, against=against, digest=digest, rules=rules)
    interrupted = False
    try:
        asked = {"noise": noise, "layers": layers, "claim": claim is not None, "together": together}
        for i, stage in enumerate(stages.run(factors, **asked), 2):
            watch(stage, min(i, total - 1), total)
        watch("done", total, total)
    except KeyboardInterrupt:
        interrupted = True
    precision, equality, outcomes = stages.precision, stages.equality, stages.outcomes
    seconds = time.monotonic() - started
    routing = [o.detail["delta_router"] for o in outcomes if "delta_router" in o.detail]
    baseline = replace(baseline, delta_router=routing[0] if routing else math.nan)
    done = {outcome.factor for outcome in outcomes}
    stopped = [(f, "the check was interrupted") for f in factors if f.name not in done]
    not_run = _not_run(bench, rollout, [*stopped, *left_out])
    mixture = num_experts(bench.model) > 1
    equality["ends"] = recorded_ends(rollouts)
    served = [*_declared(bench, rollouts, equality), *server_findings(equality.get("server", {}))]
    concluded = _judged(
        baseline, precision, rollouts, outcomes, served, pair=pair, rules=rules, mixture=mixture, max_kl=max_kl
    )
    if entry := equality.get("claim"):
        concluded["verdict"] = with_claim(entry, concluded["verdict"])
        concluded["passed"] &= entry["equal"] and entry.get("same_digest", True)
    if interrupted:
        concluded |= incomplete(concluded["verdict"], len(outcomes), len(factors))
    return plain(
        {
            "format": FORMAT,
            "kind": "check",
            "offdrift": version("offdrift"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "interrupted": interrupted,
            **_facts(bench, rollout, train, rollouts),
            "sequences": baseline.sequences,
            "tokens": baseline.tokens,
            "seconds": seconds,
            "baseline": {n: getattr(baseline, n) for n in OWN_NUMBERS} | dict(baseline.metrics),
            "precision": precision.as_dict(),
            "noise": {**stages.noises, "kl_mean_se": baseline.kl_se},
            **equality,
            "factors": [o.as_dict() for o in [*outcomes, *not_run]],
            **concluded,
        }
    )


def _has_pairs(rollout: EngineSpec, against: EngineSpec | None) -> bool:
    """Whether the rollout engine can be asked twice for the same tokens, in other company or of another server."""
    return rollout.kind == "openai" or against is not None


@dataclass
class _Stages:
    """Measurements behind the baseline, each kept as soon as it is there."""

    bench: Bench
    pair: Pair
    rollouts: Rollouts
    baseline: Measured
    against: EngineSpec | None
    digest: str | None
    rules: Rules
    noises: dict[str, Any] = field(default_factory=dict)
    equality: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.precision = Explained(
            self.rollouts.provenance.dtype, "the check was interrupted", limits=self.rules.limits
        )

    def run(
        self, factors: Sequence[Factor], *, noise: bool, layers: bool, claim: bool, together: Sequence[Factor]
    ) -> Iterator[str]:
        """Yield the name of each stage before it is measured."""
        bench, (rollout, train) = self.bench, self.pair
        yield "what precision explains"
        stated = bench.states_dtype(rollout)
        self.precision = explained(bench, self.rollouts, self.baseline, train, stated=stated, limits=self.rules.limits)
        if noise:
            yield "drawing again"
            self.noises["repeat"] = repeated(self.rollouts, bench.rollouts(rollout, repeat=1))
            yield "the training engine against itself"
            self.noises["null"] = null_pair(bench, train)
            yield "other batches"
            self.equality["deterministic"] = attempted(determinism, bench, rollout, train)
        measured = (bench, self.pair, self.rollouts, self.baseline, self.against)
        if _has_pairs(rollout, self.against):
            yield "the same tokens"
            self.equality["paired"] = _paired(*measured)
        if rollout.kind == "openai":
            self.equality["server"] = attempted(server_side, bench, rollout, *rendered_texts(bench))
        equal = None
        if claim:
            yield "every bit"
            equal = _claimed(*measured)
            self.equality["claim"] = with_digest(equal.as_dict(), self.digest)
        of_trainer = equal if self.against is None else None
        if layers or (of_trainer is not None and not of_trainer.equal):
            yield "layer by layer"
            found = attempted(bisect, bench, rollout, train)
            self.equality["bisect"] = found | {"elsewhere": self.precision.exceeded and modules_agree(found)}
            if of_trainer is not None:
                self.equality["claim"] = with_digest(with_module(of_trainer, self.equality["bisect"]), self.digest)
        for factor in factors:
            yield factor.name
            self.outcomes.append(factor.run(bench, self.pair, self.baseline))
        if together:
            yield "settings together"
            self.equality["compound"] = attempted(compound, bench, self.pair, self.baseline, together)


def _paired(
    bench: Bench, pair: Pair, rollouts: Rollouts, baseline: Measured, against: EngineSpec | None
) -> list[dict[str, Any]]:
    """Paired differences of the rollout engine, and of the one beside it, on the baseline's tokens."""
    assert baseline.logged is not None
    assert baseline.logged.logp_old is not None
    logp = baseline.logged.logp_old
    return paired_rows(bench, pair.rollout, rollouts, logp, train=pair.train, against=against)


def _declared(bench: Bench, rollouts: Rollouts, measured: Mapping[str, Any]) -> list[Finding]:
    """Findings about the rollout engine's quantization, and about where it ends responses."""
    server = measured.get("server") or {}
    quantization = rollouts.provenance.quantization or (server.get("folder") or {}).get("quantization")
    ends = end_findings(measured["ends"], server.get("ends"), bench.tokenizer)
    return [*quantization_finding(quantization, quantization_of(bench.model)), *ends]


def rendered_texts(bench: Bench) -> tuple[list[str], list[list[int]]]:
    """Some texts, and what the trainer's tokenizer makes of them."""
    texts = [prompt for prompt in BUNDLED if isinstance(prompt, str)][:TEXTS]
    return texts, encoded(texts, bench.tokenizer, vocab_size=bench.vocab_size)


def _claimed(bench: Bench, pair: Pair, rollouts: Rollouts, baseline: Measured, against: EngineSpec | None) -> Claim:
    """The claim of equality to the trainer, or to the engine beside the rollout engine."""
    if against is None:
        return claimed_equal(bench, rollouts, baseline, pair.train)
    return claimed_equal_to(bench, rollouts, pair.rollout, against)


def _facts(bench: Bench, rollout: EngineSpec, train: EngineSpec, rollouts: Rollouts) -> dict[str, Any]:
    """Entries of `check.json` about what was compared: model, engines, sampling, evidence and prompts."""
    return {
        "model": bench.name,
        "rollout": side(rollout, rollouts.provenance.engine_version),
        "train": side(train, version("transformers")),
        "sampling": asdict(rollouts.provenance.sampling),
        "seed": bench.seed,
        "evidence": type(rollouts.evidence).__name__,
        "prompts": len({tuple(p) for p in bench.prompts}),
    }


def _not_run(bench: Bench, rollout: EngineSpec, factors: Sequence[tuple[Factor, str]]) -> list[Outcome]:
    """Rows of factors that were not run, each with why: the engine does not have it, or the reason given."""
    rows = []
    for factor, why in factors:
        lacking = factor.lacking(bench, rollout)
        rows.append(Outcome.without(factor, "not offered" if lacking else "skipped", lacking or why))
    return rows


def check_max_kl(max_kl: float | None) -> None:
    """Raise `BadValueError` unless this is None or a positive number."""
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise BadValueError(f"max_kl = {max_kl}; give the largest mean KL per token to pass with, in nats (0.02)")


def _judged(
    baseline: Measured,
    precision: Explained,
    rollouts: Rollouts,
    outcomes: Sequence[Outcome],
    served: Sequence[Finding],
    *,
    pair: Pair,
    rules: Rules,
    mixture: bool,
    max_kl: float | None,
) -> dict[str, Any]:
    """Judge the measurements for `check.json`: thresholds, findings, verdict and recommendation."""
    sampling = rollouts.provenance.sampling
    rows = thresholds(baseline, rules.limits)
    context = Context(
        same_weights=True,
        mixture_of_experts=mixture,
        quantized=quantized(pair.rollout),
        temperature=sampling.temperature,
        overall=baseline.metrics,
    )
    diagnosed = diagnose([{"step": 0.0, **baseline.metrics}], context=context, rules=rules)
    diagnosed = without_precision(diagnosed, precision, precision.dtype, pair.train.dtype)
    own = broken_record(rows, sampling)
    other = [] if own else unexplained(precision)  # a wrong record explains any difference
    findings = [*(f for f in own if f.cause not in {d.cause for d in diagnosed}), *other, *served, *diagnosed]
    wrong = defects(outcomes)
    severities: list[Level] = [f.severity for f in findings if f.severity != "info"]
    level: Level = "stop" if wrong else worst([level_of(rows), *severities])
    concluded = conclusion(
        baseline,
        rows,
        level=level,
        pair=f"{pair.rollout} against {pair.train}",
        findings=findings,
        wrong=wrong,
        precision=precision,
        limits=rules.limits,
    )
    verdict = concluded.as_dict()
    if max_kl is not None and not baseline.within(max_kl):
        least = baseline.kl_known if baseline.kl_known > max_kl else baseline.kl_low
        verdict = above_limit(verdict, least, max_kl, factors=bool(outcomes))
    advice = recommended(baseline, level=level, findings=findings, mixture_of_experts=mixture, limits=rules.limits)
    return {
        "thresholds": rows,
        **rules.as_record(),
        "findings": on_page((f.as_dict() for f in findings), PAGE),
        "verdict": verdict,
        "recommended": advice,
        "stacks": by_stack(context, baseline.metrics, advice),
        "branches": branches(pair, outcomes),
        "max_kl": max_kl,
        "passed": level != "stop" and not other and baseline.within(max_kl),
    }


def side(spec: EngineSpec, engine_version: str) -> dict[str, Any]:
    """Entry of `check.json` about one engine."""
    return {
        "engine": spec.kind,
        "engine_version": engine_version,
        "dtype": spec.dtype,
        "options": dict(spec.options),
        "spec": str(spec),
    }


def null_pair(bench: Bench, train: EngineSpec) -> dict[str, Any]:
    """Null test: the KL this harness reports for one engine that samples and scores.

    Sampling goes token by token from a cache and scoring all at once, so in half precision even
    this pair differs; in float32 it must not, by more than 1e-6 nat.
    """
    sampling = replace(bench.sampling, max_tokens=min(32, bench.sampling.max_tokens))
    plain_options = {k: v for k, v in train.options.items() if k != "head_dtype"}
    drawer = EngineSpec("transformers", train.dtype, plain_options)
    rollouts = bench.rollouts(drawer, prompts=bench.prompts[:NOISE_PROMPTS], sampling=sampling)
    null = measure(bench, rollouts, train)
    bench.close_engine("transformers")  # a copy of the model
    names = ("tokens", "kl_mean", "kl_max", "tv_max", "abs_log_ratio_max")
    return {"rollout": str(drawer), "train": str(train), **{name: getattr(null, name) for name in names}}


# Prompts: the user's file, or the bundled ones. Engines differ most where distributions are flat.

Prompt = str | tuple[dict[str, str], ...]
"""Text, or the messages of a conversation (`role` and `content`)."""


def read_prompts(path: Path, *, limit: int | None = None) -> list[Prompt]:
    """At most `limit` prompts of a file: one per line, or JSON lines with a `prompt`.

    A .jsonl or .json file has one JSON object per line, whose `prompt` is text or a list of messages.
    In other files each line is a prompt, unchanged. Empty lines are skipped.

    Raises: `RecordError` naming the file, the line and what is wrong with it.
    """
    try:
        text = read_text(path, limit=LARGEST_DATA)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecordError(f"{path}, line {line} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise RecordError(
            f"cannot read {path}: {error.strerror or error}; give a text file, one prompt per line"
        ) from error
    as_json = path.suffix in (".jsonl", ".json")
    prompts: list[Prompt] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_from_json(path, number, line) if as_json else line.rstrip("\r"))
    if not prompts:
        raise RecordError(f"{path} holds no prompts; write one per line")
    return prompts


def encoded(prompts: Sequence[Prompt], tokenizer: Any, *, vocab_size: int, chat: bool = True) -> list[list[int]]:
    """Token ids of prompts; text becomes a user message where the tokenizer has a chat template, if `chat`.

    Raises: `RecordError` for a prompt without tokens, with tokens that the model does not have, or a
        conversation for a tokenizer that has no chat template.
    """
    encoded_prompts = []
    template = getattr(tokenizer, "chat_template", None)
    for i, prompt in enumerate(prompts, start=1):
        text = prompt
        if not isinstance(prompt, str) or (chat and template):
            if not template:
                raise RecordError(f"prompt {i} is a conversation, but the tokenizer has no chat template; give text")
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = list(tokenizer.encode(str(text), add_special_tokens=False))
        if not ids:
            raise RecordError(f"prompt {i} ({str(prompt)[:40]!r}) has no tokens; write something")
        if max(ids) >= vocab_size:
            raise RecordError(
                f"prompt {i} has token id {max(ids)}, but the model has {vocab_size} tokens; the "
                "tokenizer belongs to another model"
            )
        encoded_prompts.append(ids)
    return encoded_prompts


def _from_json(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f'{where} is no JSON ({error}); write {{"prompt": "..."}}') from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    characters = json.dumps(prompt, ensure_ascii=False) if "\\ud" in line.lower() else ""
    if any("\ud800" <= c <= "\udfff" for c in characters):
        raise RecordError(f'{where} has half a surrogate pair in its "prompt", which is no text')
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        keys = ("role", "content")
        if all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in keys) for m in prompt):
            return tuple({k: m[k] for k in keys} for m in prompt)
    raise RecordError(
        f'{where} has no "prompt" that is text or a list of messages with role and content; '
        f"it has {sorted(row)[:8] if isinstance(row, dict) else type(row).__name__}"
    )


BUNDLED = tuple(read_prompts(Path(__file__).with_name("prompts.jsonl")))
