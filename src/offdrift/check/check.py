"""The zero-update check: the divergence of two engines with the same weights, and its causes.

The rollout engine samples tokens and the training engine scores them. Nothing was learned in between,
so every difference comes from the engines.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offdrift.check.bench import Bench, EngineSpec, Pair
from offdrift.check.equality import attempted, bisect, determinism, repeated
from offdrift.check.factors.base import Factor, Outcome
from offdrift.check.measure import Measured, measure
from offdrift.check.recommend import Level, broken_record, defects, level_of, recommended, sentence, thresholds, worst
from offdrift.errors import BadValueError, RecordError
from offdrift.judge import Context, Rules, diagnose, load_rules, num_experts, verdict
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
    "kl_mean", "kl_max", "kl_se", "tv_mean", "tv_max", "tv_p95", "chi2_exact",
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
    max_kl: float | None = None,
    rules: Rules | None = None,
    watch: Watch = lambda stage, done, total: None,
) -> dict[str, Any]:
    """The content of `check.json`: baseline, noise, factors, thresholds, findings, verdict, recommendation.

    An interrupt (Ctrl-C) after the baseline ends the check; what was measured is returned, with
    `"interrupted": true`.

    Args:
        rollout, train: the engines that sample the tokens and that rescore them.
        factors: changed one at a time.
        left_out: factors that are not run, and how to run each; rows of status "skipped".
        noise: also measure each engine against itself, and whether it is deterministic.
        layers: also find the first module whose output differs between the engines.
        max_kl: the largest mean KL(rollout || train) per token to pass with, nats.
        rules: of the diagnosis; default: the built-in ones.
        watch: called before each stage.

    Raises: `BadValueError` for a `max_kl` that is not positive; `EngineError` if an engine cannot be made.
    """
    check_max_kl(max_kl)
    rules = rules or load_rules()  # a rule that cannot be read must not cost the measurements
    started, pair = time.monotonic(), Pair(rollout, train)
    total = 2 + 3 * noise + layers + len(factors)
    bench.train_model(train)  # an impossible training engine is refused before sampling
    watch(f"drawing with {rollout}", 0, total)
    rollouts = bench.rollouts(rollout)
    watch(f"scoring with {train}", 1, total)
    baseline = measure(bench, rollouts, train, details=True)
    noises: dict[str, Any] = {}
    equality: dict[str, Any] = {}
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        if noise:
            watch("drawing again", 2, total)
            noises["repeat"] = repeated(rollouts, bench.rollouts(rollout, repeat=1))
            watch("the training engine against itself", 3, total)
            noises["null"] = null_pair(bench, train)
            watch("other batches", 4, total)
            equality["deterministic"] = attempted(determinism, bench, rollout, train)
        if layers:
            watch("layer by layer", total - len(factors) - 1, total)
            equality["bisect"] = attempted(bisect, bench, rollout, train)
        for i, factor in enumerate(factors):
            watch(factor.name, total - len(factors) + i, total)
            outcomes.append(factor.run(bench, pair, baseline))
        watch("done", total, total)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.monotonic() - started
    routing = [o.detail["delta_router"] for o in outcomes if "delta_router" in o.detail]
    baseline = replace(baseline, delta_router=routing[0] if routing else math.nan)
    done = {outcome.factor for outcome in outcomes}
    stopped = [(f, "the check was interrupted") for f in factors if f.name not in done]
    not_run = []
    for factor, why in [*stopped, *left_out]:
        lacking = factor.lacking(bench, rollout)
        status = "not offered" if lacking else "skipped"
        not_run.append(Outcome.without(factor, status, lacking or why))
    return plain(
        {
            "format": FORMAT,
            "kind": "check",
            "offdrift": version("offdrift"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "interrupted": interrupted,
            "model": bench.name,
            "rollout": _side(rollout, rollouts.provenance.engine_version),
            "train": _side(train, version("transformers")),
            "sampling": asdict(rollouts.provenance.sampling),
            "seed": bench.seed,
            "evidence": type(rollouts.evidence).__name__,
            "prompts": len({tuple(p) for p in bench.prompts}),
            "sequences": baseline.sequences,
            "tokens": baseline.tokens,
            "seconds": seconds,
            "baseline": {n: getattr(baseline, n) for n in OWN_NUMBERS} | dict(baseline.metrics),
            "noise": {**noises, "kl_mean_se": baseline.kl_se},
            **equality,
            "factors": [o.as_dict() for o in [*outcomes, *not_run]],
            **_judged(baseline, rollouts, outcomes, pair, rules, mixture=num_experts(bench.model) > 1, max_kl=max_kl),
        }
    )


def check_max_kl(max_kl: float | None) -> None:
    """Raise `BadValueError` unless this is None or a positive number."""
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise BadValueError(f"max_kl = {max_kl}; give the largest mean KL per token to pass with, in nats (0.02)")


def _judged(
    baseline: Measured,
    rollouts: Rollouts,
    outcomes: Sequence[Outcome],
    pair: Pair,
    rules: Rules,
    *,
    mixture: bool,
    max_kl: float | None,
) -> dict[str, Any]:
    """What `check.json` concludes from the numbers: thresholds, findings, verdict, recommendation."""
    sampling = rollouts.provenance.sampling
    rows = thresholds(baseline, rules.limits)
    context = Context(
        same_weights=True,
        mixture_of_experts=mixture,
        temperature=sampling.temperature,
        overall=baseline.metrics,
    )
    diagnosed = diagnose([{"step": 0.0, **baseline.metrics}], context=context, rules=rules)
    own = broken_record(rows, sampling)
    findings = [f for f in own if f.cause not in {d.cause for d in diagnosed}] + diagnosed
    wrong = defects(outcomes)
    severities: list[Level] = [f.severity for f in findings if f.severity != "info"]
    level: Level = "stop" if wrong else worst([level_of(rows), *severities])
    text = sentence(baseline, rows, pair=f"{pair.rollout} against {pair.train}", wrong=wrong)
    if not wrong and level != level_of(rows):  # a finding of the diagnosis decided
        text += f" {verdict(findings)['text']}"
    return {
        "thresholds": rows,
        "limits": rules.limits,
        "findings": on_page((f.as_dict() for f in findings), PAGE),
        "verdict": {"level": level, "text": text},
        "recommended": recommended(baseline, level=level, mixture_of_experts=mixture),
        "max_kl": max_kl,
        "passed": level != "stop" and (max_kl is None or baseline.kl_mean <= max_kl),
    }


def _side(spec: EngineSpec, engine_version: str) -> dict[str, Any]:
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
