"""One factor of a check: one setting of an engine pair is changed and the divergence measured again.

Every experiment changes one setting of the baseline pair and keeps the sampled tokens wherever the
engine can be made to follow them (`Rescores`). Both measurements are then over the same contexts, so
their difference is the factor's effect and not the luck of another draw. A factor that should change
nothing (batch, caches, repeats, kernels) is also measured against the same engine without the change,
which needs no trainer: `detail["self_kl_mean"]`, `detail["self_abs_log_ratio_max"]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from offdrift.check.bench import Bench
from offdrift.check.measure import NAN, Measured, Outcome, Side, measure
from offdrift.engines.base import Engine
from offdrift.engines.spec import EngineSpec, Option, Pair
from offdrift.errors import NotOfferedError
from offdrift.records.rollouts import Rollouts, Sampling

Cost = Literal["cheap", "engine", "compile"]
"""What a factor takes: scoring or drawing with what is there, another engine, a compiled one."""

Nested = Mapping[str, Any]


class NotOffered(NotOfferedError):
    """An experiment found out that it makes no sense on this pair; the message says why."""


@dataclass(frozen=True)
class Setting:
    """What is held fixed: the weights, the two engines, and how far they are apart."""

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
        """The sampling asked for, without top-k and top-p: a filter that removes one token here and
        another one there is a question of its own."""
        return replace(self.bench.sampling, top_k=0, top_p=1.0)

    @property
    def drawn(self) -> Rollouts:
        """The baseline's draw, or the like without filters, with evidence of whole vocabularies."""
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
        return float(
            log.divergences["kl_rollout_old"][: int(log.cu_seqlens[sequences])].double().mean()
        )

    @property
    def scored(self) -> Measured:
        """`drawn` against the training engine, without any change."""
        if self.unfiltered == self.bench.sampling:
            return self.baseline
        return measure(self.bench, self.drawn, self.train)


@dataclass(frozen=True)
class Found:
    """What an experiment measured."""

    changed: str
    """Which thing became what: "float32 instead of bfloat16"."""
    figures: Measured | None
    """Rollout engine against training engine under the change; None where no KL can be said."""
    without: float
    """Mean KL of the same measurement without the change, nats."""
    why: str = ""
    """One sentence on what the numbers say, where they do not speak for themselves."""
    detail: Nested = field(default_factory=dict)


@dataclass(frozen=True)
class Row(Outcome):
    """An outcome with what only its own factor knows."""

    detail: Nested = field(default_factory=dict)
    """For instance flips per layer, or how far the engine moved from itself; plain values."""


@dataclass(frozen=True)
class Factor:
    """One possible cause of drift, and the experiment that isolates it.

    Example:
        for factor in FACTORS:
            print(factor.name, factor.run(bench, pair, baseline).kl_mean)
    """

    name: str
    what: str
    """One line that teaches."""
    side: Side
    offered: Callable[[Bench, EngineSpec, EngineSpec], str | None]
    experiment: Callable[[Setting], Found]
    cost: Cost = "cheap"

    def applies(self, bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
        """Why this factor is not offered on this pair; None if it is."""
        return self.offered(bench, rollout, train)

    def run(self, bench: Bench, pair: Pair, baseline: Measured) -> Row:
        """Change this one thing and measure again; afterwards the bench holds its weights still.

        Args:
            baseline: the pair without any change: `measure(bench, bench.rollouts(rollout), train)`.

        Raises: what an engine raises that cannot do it; `check` makes a row of that.
        """
        start = time.monotonic()
        why = self.applies(bench, pair.rollout, pair.train)
        if why is not None:
            return Row(self.name, self.what, self.side, status="not offered", why=why)
        try:
            found = self.experiment(Setting(bench, pair.rollout, pair.train, baseline))
        except NotOfferedError as error:
            return Row(self.name, self.what, self.side, status="not offered", why=str(error))
        row = Row(
            self.name,
            self.what,
            self.side,
            found.changed,
            baseline_kl_mean=found.without,
            why=found.why,
            seconds=time.monotonic() - start,
            detail=found.detail,
        )
        names = ("kl_mean", "kl_max", "tv_max", "abs_log_ratio_max", "pearson")
        figures = found.figures
        return row if figures is None else replace(row, **{n: getattr(figures, n) for n in names})


def always(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    """Offered on every pair."""
    return None


def only_vllm(reason: str) -> Callable[[Bench, EngineSpec, EngineSpec], str | None]:
    """Offered if vLLM draws; `reason` says what the other engine lacks."""

    def offered(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
        return None if rollout.kind == "vllm" else f"the {rollout.kind} engine has no {reason}"

    return offered


OPTION = {"vllm": "attention_backend", "transformers": "attn_implementation"}
"""What each engine that is started here calls its attention kernel."""
BACKENDS, IMPLEMENTATIONS = ("TRITON_ATTN", "FLASH_ATTN"), ("eager", "sdpa")
"""Attention kernels by engine: the first is tried, or the second if that is the one in use."""


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


def several_prompts(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    """Offered where a batch has more than one sequence."""
    return "there is one prompt only" if len(bench.prompts) < 2 else None


def _other_dtype(now: str) -> str:
    return "bfloat16" if now == "float32" else "float32"
