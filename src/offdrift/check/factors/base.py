"""A factor of a check: change one setting of an engine pair and measure the divergence again.

Experiments keep the sampled tokens wherever the engine can rescore them (`Rescores`): both measurements are
then over the same contexts, and their difference is the factor's effect. A factor that should change nothing
(batch, caches, repeats, kernels) is also measured against the same engine without the change.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from offdrift.check.bench import Bench, EngineSpec, Option, Pair
from offdrift.check.measure import NAN, Measured, measure, measured
from offdrift.divergence.fused import exact_divergences
from offdrift.engines import Rescores
from offdrift.errors import NotOfferedError, OffdriftError
from offdrift.numerics import one_thread
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import EvidenceKind, FullVocab, HiddenStates, Rollouts

Cost = Literal["cheap", "engine", "compile"]
"""Effort of a factor: the engines of the pair, another engine, or a compiled one."""
Side = Literal["rollout", "train", "sampling", "sync", "routing"]
"""The part of the pair that a factor changes."""
Status = Literal["ran", "not offered", "failed", "skipped"]


@dataclass(frozen=True)
class Setting:
    """Start of an experiment: the weights, the two engines, and their divergence."""

    bench: Bench
    rollout: EngineSpec
    train: EngineSpec
    baseline: Measured

    @property
    def engine(self) -> Any:
        """The rollout engine, unchanged."""
        return self.bench.engine(self.rollout)

    @property
    def unfiltered(self) -> Sampling:
        """The check's sampling without filters, which are factors of their own."""
        return self.bench.sampling.unfiltered

    @property
    def drawn(self) -> Rollouts:
        """The baseline's rollouts, or the like without filters; evidence of whole vocabularies."""
        return self.bench.rollouts(self.rollout, sampling=self.unfiltered)

    def drawn_kl_of(self, sequences: int) -> float:
        """Mean KL of the first sequences of `drawn` without any change, nats; nothing is scored again."""
        log = self.scored.logged
        if log is None or "kl_rollout_old" not in log.divergences:
            return NAN
        tokens = int(log.cu_seqlens[sequences])
        return float(log.divergences["kl_rollout_old"][:tokens].double().mean())

    @property
    def scored(self) -> Measured:
        """`drawn` against the training engine, without any change."""
        if self.unfiltered == self.bench.sampling:
            return self.baseline
        return measure(self.bench, self.drawn, self.train)


@dataclass(frozen=True)
class Effect:
    """Result of an experiment."""

    changed: str
    """The change in words: "float32 instead of bfloat16"."""
    after: Measured | None
    """Rollout engine against training engine under the change; None where there is no KL."""
    kl_before: float
    """Mean KL of the same measurement without the change, nats."""
    why: str = ""
    """One sentence on what the numbers mean."""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A factor's row in `check.json`. NaN where nothing was measured."""

    factor: str
    what: str
    """The question in one line."""
    side: Side
    changed: str = ""
    """The change in words: "float32 instead of bfloat16"."""
    kl_mean: float = NAN
    """Mean over tokens of KL(rollout || train) after the change, nats."""
    kl_max: float = NAN
    tv_max: float = NAN
    abs_log_ratio_max: float = NAN
    pearson: float = NAN
    baseline_kl_mean: float = NAN
    """The same mean before the change."""
    status: Status = "ran"
    why: str = ""
    """Why it did not run, or one sentence on what the numbers mean."""
    seconds: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of this factor alone, for instance flips per layer; plain values."""

    @staticmethod
    def without(factor: Factor, status: Status, why: str, *, seconds: float = 0.0) -> Outcome:
        """The row of a factor that was not measured, and why."""
        return Outcome(factor.name, factor.what, factor.side, status=status, why=why, seconds=seconds)

    @property
    def ratio(self) -> float:
        """The change's mean KL over the baseline's; NaN where there is none to compare."""
        return self.kl_mean / self.baseline_kl_mean if self.baseline_kl_mean > 0 else NAN

    def as_dict(self) -> dict[str, Any]:
        """The row as it stands in `check.json`."""
        return {**asdict(self), "ratio": self.ratio}


Change = tuple[str, EngineSpec]
"""The change in words, and an engine with that one setting changed."""
Requirement = Callable[[Bench, EngineSpec], str | None]
"""(bench, rollout engine) -> why this pair does not have the factor, or None."""


def needs(holds: Callable[[Bench, EngineSpec], object], reason: str) -> Requirement:
    """A condition on the pair. Without it the factor is not offered, with a reason that may name {kind} and {model}."""
    return lambda bench, rollout: (
        None if holds(bench, rollout) else reason.format(kind=rollout.kind, model=type(bench.model).__name__)
    )


@dataclass(frozen=True)
class Factor:
    """One possible cause of drift, and the experiment that isolates it."""

    name: str
    what: str
    """The cause in one line."""
    side: Side
    experiment: Callable[[Setting], Effect]
    requirements: tuple[Requirement, ...] = ()
    cost: Cost = "cheap"
    change: Callable[[EngineSpec, nn.Module], Change] | None = None
    """How it changes the specification of its side's engine, where that is all it does."""

    def lacking(self, bench: Bench, rollout: EngineSpec) -> str | None:
        """Why this factor is not offered on this pair; None if it is."""
        return next((reason for needed in self.requirements if (reason := needed(bench, rollout))), None)

    def run(self, bench: Bench, pair: Pair, baseline: Measured) -> Outcome:
        """Change this one thing and measure again; afterwards the bench has its weights still.

        An engine that raises, whatever it throws, costs only this row.
        """
        start = time.monotonic()
        reason = self.lacking(bench, pair.rollout)
        if reason is not None:
            return Outcome.without(self, "not offered", reason)
        try:
            effect = self.experiment(Setting(bench, pair.rollout, pair.train, baseline))
        except NotOfferedError as error:
            return Outcome.without(self, "not offered", str(error))
        except Exception as error:
            why = (str(error).strip().splitlines() or [""])[0][:500]
            why = why if isinstance(error, OffdriftError) else f"{type(error).__name__}: {why}"
            bench.close_engine(pair.rollout.kind)  # its state is unknown
            return Outcome.without(self, "failed", why, seconds=time.monotonic() - start)
        names = ("kl_mean", "kl_max", "tv_max", "abs_log_ratio_max", "pearson")
        return Outcome(
            self.name,
            self.what,
            self.side,
            effect.changed,
            **({} if effect.after is None else {n: getattr(effect.after, n) for n in names}),
            baseline_kl_mean=effect.kl_before,
            why=effect.why,
            seconds=time.monotonic() - start,
            detail=effect.detail,
        )


def factor(
    side: Side, *requirements: Requirement, cost: Cost = "cheap"
) -> Callable[[Callable[[Setting], Effect]], Factor]:
    """Make a factor of an experiment: its name, and the first line of its docstring as `what`."""

    def wrap(experiment: Callable[[Setting], Effect]) -> Factor:
        what = (experiment.__doc__ or "").partition("\n")[0]
        return Factor(experiment.__name__, what, side, experiment=experiment, requirements=requirements, cost=cost)

    return wrap


SEVERAL_PROMPTS = needs(lambda bench, rollout: len(bench.prompts) > 1, "there is one prompt only")


def only_vllm(feature: str) -> Requirement:
    """vLLM samples; `feature` is what the other engines lack."""
    return needs(lambda bench, rollout: rollout.kind == "vllm", f"the {{kind}} engine has no {feature}")


def variant(
    name: str,
    what: str,
    change: Callable[[EngineSpec, nn.Module], Change],
    *requirements: Requirement,
    side: Side = "rollout",
    cost: Cost = "engine",
) -> Factor:
    """A factor that scores the baseline's tokens with another engine on one side of the pair."""

    def experiment(setting: Setting) -> Effect:
        drawn = setting.drawn
        if side == "train":
            words, spec = change(setting.train, setting.bench.model)
            return Effect(words, measured_by(setting, drawn, train=spec), setting.scored.kl_mean)
        words, spec = change(setting.rollout, setting.bench.model)
        forced = teacher_forced(setting, spec, drawn)
        after = measured_by(setting, forced)
        return Effect(words, after, setting.scored.kl_mean, detail=self_difference(drawn, forced))

    return Factor(name, what, side, experiment=experiment, requirements=requirements, cost=cost, change=change)


OPTION = {"vllm": "attention_backend", "transformers": "attn_implementation"}
"""Name of the attention kernel's option, of each engine that is started here."""
BACKENDS, IMPLEMENTATIONS = ("TRITON_ATTN", "FLASH_ATTN"), ("eager", "sdpa")
"""Attention kernels of vLLM and transformers: the first is tried, or the second where it is in use."""


def dtype_changed(spec: EngineSpec, model: nn.Module | None = None) -> Change:
    """The whole engine at another precision."""
    other = _other_dtype(spec.dtype)
    return (f"{other} instead of {spec.dtype}", spec.with_(dtype=other))


def head_changed(spec: EngineSpec, model: nn.Module | None = None) -> Change:
    """The output head alone at another precision."""
    now = str(spec.options.get("head_dtype", spec.dtype))
    other = _other_dtype(now)
    words = f"output head in {other} instead of {now}, the rest in {spec.dtype}"
    return (words, spec.with_(head_dtype=other))


def attention_changed(spec: EngineSpec, model: nn.Module) -> Change:
    """Another attention kernel."""
    option, (first, second) = OPTION[spec.kind], BACKENDS
    default: Option = "the default"
    if spec.kind == "transformers":
        first, second = IMPLEMENTATIONS
        default = str(getattr(model.config, "_attn_implementation", None) or second)
    now = spec.options.get(option, default)
    other = second if now == first else first
    return (f"{other} instead of {now}", spec.with_(**{option: other}))


def _other_dtype(now: str) -> str:
    return "bfloat16" if now == "float32" else "float32"


# Comparisons that factors share.

ENTRIES = 2**24
"""Log-probs of whole vocabularies that an experiment keeps at once: 64 MiB in float32."""
LISTED = 2**22
"""The same, where an engine hands each of them over as a Python object."""
ONE_BY_ONE = 8
"""Sequences that are run alone."""


def teacher_forced(
    setting: Setting, spec: EngineSpec, rollouts: Rollouts, *, sampling: Sampling | None = None
) -> Rollouts:
    """Score the given tokens with another engine and record them as its rollouts.

    Raises: `NotOfferedError` if the engine cannot score tokens that it did not sample.
    """
    engine = setting.bench.engine(spec)
    if not isinstance(engine, Rescores):
        raise NotOfferedError(f"the {spec.kind} engine cannot score tokens that it did not sample")
    return engine.rescore(rollouts, evidence=evidence_of(rollouts), sampling=sampling)


def measured_by(setting: Setting, rollouts: Rollouts, *, train: EngineSpec | None = None) -> Measured:
    """Rollouts against the training engine: the setting's, or another one."""
    return measured(rollouts, setting.bench.score(rollouts, train or setting.train))


def evidence_of(rollouts: Rollouts) -> EvidenceKind:
    """The kind of evidence that the rollouts record."""
    if isinstance(rollouts.evidence, HiddenStates):
        return "hidden"
    return "full" if isinstance(rollouts.evidence, FullVocab) else "sampled"


def scores(rollouts: Rollouts, piece: slice = slice(None)) -> Float[Tensor, "n v"]:
    """Recorded log-probs, or tempered logits, of some tokens over the whole vocabulary.

    Raises: `NotOfferedError` if the rollouts do not record them.
    """
    evidence = rollouts.evidence
    if isinstance(evidence, FullVocab):
        return evidence.logp[piece]
    if isinstance(evidence, HiddenStates):
        head = evidence.head
        whole = head.scores(evidence.states[piece], slice(0, len(head.weight)))
        return whole / rollouts.provenance.sampling.temperature
    raise NotOfferedError("the engine records the log-prob of the drawn token alone")


def recorded_alike(one: Rollouts, other: Rollouts) -> bool:
    """Whether two records hold the same tokens, log-probs and distributions, bit for bit."""
    a, b = one.evidence, other.evidence
    if isinstance(a, FullVocab) and isinstance(b, FullVocab):
        same = torch.equal(a.logp, b.logp)
    elif isinstance(a, HiddenStates) and isinstance(b, HiddenStates):
        same = torch.equal(a.states, b.states) and a.head is b.head
    else:
        same = a is None and b is None
    fields = ("tokens", "cu_seqlens", "logp_rollout")
    return same and all(torch.equal(getattr(one, f), getattr(other, f)) for f in fields)


def self_difference(without: Rollouts, with_change: Rollouts) -> dict[str, object]:
    """An engine against itself under a change, on the same tokens: exact KL, largest |log-ratio|."""
    parts: list[Tensor] = []
    if recorded_alike(without, with_change):
        parts = [torch.zeros(len(without.tokens))]
    else:
        step = max(1, LISTED // scores(without, slice(0, 1)).shape[-1])
        for start in range(0, len(without.tokens), step):
            piece = slice(start, start + step)
            mu, pi = scores(without, piece), scores(with_change, piece)
            with one_thread():  # see `check.rescore`
                parts.append(exact_divergences(mu, pi).kl_rollout_current)
    kl = torch.cat(parts)
    moved = (with_change.logp_rollout - without.logp_rollout).abs()
    return {
        "self_kl_mean": float(kl.double().mean()),
        "self_kl_max": float(kl.max()),
        "self_abs_log_ratio_max": float(moved.max()),
        "self_changed_frac": float((moved > 0).double().mean()),
        "self_tokens": len(moved),
    }


def few(rollouts: Rollouts, *, sequences: int = 10**9, entries: int = ENTRIES, v: int) -> Rollouts:
    """The first sequences: as many as keep `tokens x vocabulary` within `entries`, at least one."""
    fits = int((rollouts.cu_seqlens[1:] * v <= entries).sum())
    return rollouts.select(torch.arange(max(1, min(sequences, fits, rollouts.num_sequences))))


def few_prompts(
    prompts: Sequence[Sequence[int]], sampling: Sampling, *, entries: int, v: int
) -> tuple[list[list[int]], Sampling]:
    """Prompts and a response length (8 or more) that keep `tokens x vocabulary` within `entries`."""
    tokens = max(8, entries // v)
    length = min(sampling.max_tokens, max(8, tokens // 8))
    count = max(1, min(len(prompts), tokens // length))
    return [list(p) for p in prompts[:count]], replace(sampling, max_tokens=length)


def one_by_one(rollouts: Rollouts) -> list[Rollouts]:
    """Every sequence as a batch of its own."""
    return [rollouts.select(torch.tensor([i])) for i in range(rollouts.num_sequences)]
