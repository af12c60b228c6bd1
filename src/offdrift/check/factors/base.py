"""A factor of a check: change one setting of an engine pair and measure the divergence again.

Experiments keep the sampled tokens wherever the engine can rescore them (`Rescores`). Both measurements
are then over the same contexts, so their difference is the factor's effect and not that of another
sample. A factor that should change nothing (batch, caches, repeats, kernels) is also measured against
the same engine without the change: `detail["self_kl_mean"]`, `detail["self_abs_log_ratio_max"]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from offdrift.check.bench import Bench
from offdrift.check.measure import NAN, Measured, measure
from offdrift.engines.base import Engine
from offdrift.engines.spec import EngineSpec, Option, Pair
from offdrift.errors import NotOfferedError
from offdrift.records.rollouts import Rollouts, Sampling

Cost = Literal["cheap", "engine", "compile"]
"""What a factor needs: the engines of the pair, another engine, or a compiled one."""
Side = Literal["rollout", "train", "sampling", "sync", "routing"]
"""Where a factor acts."""
Status = Literal["ran", "not offered", "failed", "skipped"]


@dataclass(frozen=True)
class Setting:
    """What an experiment starts from: the weights, the two engines, and their divergence."""

    bench: Bench
    rollout: EngineSpec
    train: EngineSpec
    baseline: Measured

    @property
    def engine(self) -> Engine:
        """The rollout engine, unchanged."""
        return self.bench.engine(self.rollout)

    @property
    def unfiltered(self) -> Sampling:
        """The check's sampling without top-k and top-p, which are factors of their own."""
        return replace(self.bench.sampling, top_k=0, top_p=1.0)

    @property
    def drawn(self) -> Rollouts:
        """The baseline's rollouts, or the like without filters; evidence of whole vocabularies."""
        return self.bench.rollouts(self.rollout, sampling=self.unfiltered)

    @property
    def drawn_kl(self) -> float:
        """Mean KL of `drawn` without any change, nats."""
        return self.scored.kl_mean

    def drawn_kl_of(self, sequences: int) -> float:
        """The same of its first sequences alone, which need not be scored again for that."""
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
    """What an experiment measured."""

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


Offered = Callable[[Bench, EngineSpec, EngineSpec], str | None]
"""(bench, rollout engine, training engine) -> why this pair does not have the factor, or None."""


def always(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    """Offered on every pair."""
    return None


@dataclass(frozen=True)
class Factor:
    """One possible cause of drift, and the experiment that isolates it.

    Example:
        for factor in FACTORS:
            print(factor.name, factor.run(bench, pair, baseline).kl_mean)
    """

    name: str
    what: str
    """The cause in one line."""
    side: Side
    experiment: Callable[[Setting], Effect]
    offered: Offered = always
    cost: Cost = "cheap"

    def applies(self, bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
        """Why this factor is not offered on this pair; None if it is."""
        return self.offered(bench, rollout, train)

    def run(self, bench: Bench, pair: Pair, baseline: Measured) -> Outcome:
        """Change this one thing and measure again; afterwards the bench has its weights still.

        Args:
            baseline: the pair without any change: `measure(bench, bench.rollouts(rollout), train)`.

        Raises: what an engine raises that cannot do it; `check` makes a row of that.
        """
        start = time.monotonic()
        reason = self.applies(bench, pair.rollout, pair.train)
        if reason is not None:
            return Outcome.without(self, "not offered", reason)
        try:
            effect = self.experiment(Setting(bench, pair.rollout, pair.train, baseline))
        except NotOfferedError as error:
            return Outcome.without(self, "not offered", str(error))
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
    side: Side, *, offered: Offered = always, cost: Cost = "cheap"
) -> Callable[[Callable[[Setting], Effect]], Factor]:
    """Make a factor of an experiment: its name, and the first line of its docstring as `what`."""

    def wrap(experiment: Callable[[Setting], Effect]) -> Factor:
        what = (experiment.__doc__ or "").partition("\n")[0]
        return Factor(experiment.__name__, what, side, experiment, offered, cost)

    return wrap


def only_vllm(feature: str) -> Offered:
    """Offered if vLLM draws; `feature` is what the other engines lack."""
    return lambda bench, rollout, train: (
        None if rollout.kind == "vllm" else f"the {rollout.kind} engine has no {feature}"
    )


def several_prompts(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    """Offered where a batch has more than one sequence."""
    return "there is one prompt only" if len(bench.prompts) < 2 else None


OPTION = {"vllm": "attention_backend", "transformers": "attn_implementation"}
"""Name of the attention kernel's option, of each engine that is started here."""
BACKENDS, IMPLEMENTATIONS = ("TRITON_ATTN", "FLASH_ATTN"), ("eager", "sdpa")
"""Attention kernels of vLLM and transformers: the first is tried, or the second where it is in use."""


class Change(NamedTuple):
    """An engine with one setting changed, and the change in words."""

    words: str
    spec: EngineSpec


def dtype_changed(spec: EngineSpec) -> Change:
    """The whole engine at another precision.

    Example:
        >>> dtype_changed(EngineSpec.parse("vllm:bfloat16")).words
        'float32 instead of bfloat16'
    """
    other = _other_dtype(spec.dtype)
    return Change(f"{other} instead of {spec.dtype}", spec.with_(dtype=other))


def head_changed(spec: EngineSpec) -> Change:
    """The output head alone at another precision."""
    now = str(spec.options.get("head_dtype", spec.dtype))
    other = _other_dtype(now)
    words = f"output head in {other} instead of {now}, the rest in {spec.dtype}"
    return Change(words, spec.with_(head_dtype=other))


def attention_changed(spec: EngineSpec, model: torch.nn.Module) -> Change:
    """Another attention kernel."""
    option, (first, second) = OPTION[spec.kind], BACKENDS
    default: Option = "the default"
    if spec.kind == "transformers":
        first, second = IMPLEMENTATIONS
        default = str(getattr(model.config, "_attn_implementation", None) or second)
    now = spec.options.get(option, default)
    other = second if now == first else first
    return Change(f"{other} instead of {now}", spec.with_(**{option: other}))


def _other_dtype(now: str) -> str:
    return "bfloat16" if now == "float32" else "float32"
