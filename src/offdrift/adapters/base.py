"""`Adapter`: a method in another framework's training loop, with its metrics, findings and records.

It computes losses or corrections and adds up their statistics. At the end of a step it turns those into
metrics, new findings and, the first time, a line for each configured part: whether it acts.

`liveness` says so of each part: whether it was called, on what, and what it changed. A correction that never acts is a
common silent failure: its log-probs are missing, or copies of each other. A part whose ratio moves and that still
changes nothing is healthy ("idle").
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.adapters.report import PREFIX as PREFIX
from offdrift.adapters.report import Reported, StepReport
from offdrift.adapters.selection import Choice, parse_choice
from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.correction import Corrected
from offdrift.correction.compose import factors
from offdrift.errors import LivenessError, check_choice
from offdrift.judge import Context, Finding, Rules, Watcher, load_rules
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss, policy_loss
from offdrift.methods import Method, override
from offdrift.methods import method as row
from offdrift.numerics import largest_of
from offdrift.records.atomic import write_json
from offdrift.setting import parse_settings
from offdrift.stats import DriftStats, summarize
from offdrift.stats.drift import Tails
from offdrift.stats.signature import signature

if TYPE_CHECKING:
    from offdrift.records.recorder import Recorder


Gather = Callable[[Any], list[Any]]
OnIdle = Literal["error", "warn"]
OF_ENGINE = ("mismatch/", "full/", "rollout/")
"""Metrics that the engine's log-probs are in."""
# Hooks without arguments of their own read OFFDRIFT_METHOD (a row of METHODS), OFFDRIFT_SETTINGS (single values:
# "gate.high=0.02,weight.cap=5"), OFFDRIFT_RECORD (folder to record tokens in), OFFDRIFT_ON_IDLE ("error" or "warn"),
# OFFDRIFT_METRICS ("main", "all", or names with commas).


def environ(name: str) -> str | None:
    """OFFDRIFT_`name`; None if it is not set."""
    return os.environ.get(f"OFFDRIFT_{name}") or None


def environ_settings() -> dict[str, Any]:
    """OFFDRIFT_SETTINGS, as paths for `override`. Raises: `MethodError`."""
    return parse_settings(environ("SETTINGS") or "")


def environ_on_idle() -> OnIdle:
    """OFFDRIFT_ON_IDLE. Raises: `MethodError`."""
    chosen: Any = environ("ON_IDLE") or "error"
    check_choice("OFFDRIFT_ON_IDLE", chosen, get_args(OnIdle))
    return chosen


def environ_metrics() -> str:
    """OFFDRIFT_METRICS. Raises: `MethodError` naming what is no metric."""
    return parse_choice(environ("METRICS") or "main")


class Adapter(Reported):
    """A method attached to another framework's loop.

    Args:
        method: name of a row of `METHODS`, or of code ("mine.py:mine"), or any composition.
        framework: whose terms findings are written in, and the name of the logger.
        settings: single values of the method, as paths for `override`.
        record: where tokens are recorded: a folder, or a `Recorder`; None records nothing.
        context: what else the diagnosis knows of the run.
        rules: a TOML file over the built-in rules; its content is stored beside the record, as rules.json.
        on_idle: "error" if a part that is never called or cannot act ends the run; "warn" if it is
            only logged (both engines equal to the last bit, for instance).
        gather: collects one object of every process, in every process; None if this process sees the
            whole batch.
        metrics: those that `end_step` returns for a tracker: "main", about twelve; "all", 119 where a step has
            three policies; or a list of names, in which * stands for anything. Absent: OFFDRIFT_METRICS, else "main".

    Raises: `MethodError` for an unknown method, setting or metric.

    Example:
        >>> from offdrift.segments import Segments
        >>> adapter = Adapter("token_tis", framework="plain")
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.9]),
        ...                    segments=Segments.from_lengths([2]))
        >>> adapter.loss(lp, torch.ones(2)).loss
        tensor(1.5048)
        >>> round(adapter.end_step(1)["offdrift/full/k3"], 4)
        0.0559
    """

    def __init__(
        self,
        method: str | Method,
        *,
        framework: str,
        settings: Mapping[str, Any] = {},
        record: Recorder | str | Path | None = None,
        context: Context | None = None,
        rules: Path | None = None,
        on_idle: OnIdle = "error",
        gather: Gather | None = None,
        metrics: Choice | None = None,
    ) -> None:
        check_choice("on_idle", on_idle, get_args(OnIdle))
        self.method = override(row(method) if isinstance(method, str) else method, settings)
        self.framework = framework
        self.log = logging.getLogger(f"offdrift.{framework}")
        self._on_idle = on_idle
        self._gather = gather
        context = context or Context()
        name = method if isinstance(method, str) else context.method
        context = replace(context, framework=framework, method=name)
        table = load_rules(rules)
        watcher = Watcher(context=context, rules=table)
        choice = environ_metrics() if metrics is None else parse_choice(metrics)
        self._report = StepReport(watcher, self.log, choice)
        self.recorder = recorder_of(record, framework, rules=table if rules is not None else None)
        """Where tokens are recorded; None records nothing."""
        self._stats: DriftStats | None = None
        self._tails = Tails()
        self._computes_loss = self._skipped = self._checked = False
        self._engineless = False
        self._applied = True

    @property
    def called(self) -> bool:
        """Whether anything was measured since the last step."""
        return self._stats is not None or self._skipped

    @property
    def fired(self) -> list[Finding]:
        """Findings that the last step set off for the first time."""
        return self._report.fired

    def loss(
        self,
        logprobs: LogProbs,
        advantages: Float[Tensor, " n"],
        batch_info: BatchInfo = NO_INFO,
        *,
        normalizer: float | Float[Tensor, ""] | None = None,
        horizon: int | None = None,
    ) -> PolicyLoss:
        """`policy_loss` under the method, with its arguments; its statistics are added to the step."""
        result = policy_loss(logprobs, self.method, advantages, batch_info, normalizer=normalizer, horizon=horizon)
        self._computes_loss = True
        self._add(logprobs, result.stats, advantages, batch_info)
        return result

    def correct(
        self,
        logprobs: LogProbs,
        advantages: Float[Tensor, " n"] | None = None,
        batch_info: BatchInfo = NO_INFO,
        *,
        applied: bool = True,
    ) -> Corrected:
        """Gates and weights alone, for a framework that keeps its own loss. Gradient: none.

        Args:
            applied: False if the framework measures with it and changes nothing.

        Raises: `EvidenceError` if the method needs what the batch does not carry.
        """
        anchored = logprobs if self.method.anchor is None else self.method.anchor(logprobs, batch_info)
        if batch_info.observed is None and self.method.needs_whole_step:
            a = torch.zeros_like(logprobs.logp_rollout) if advantages is None else advantages
            batch_info = replace(batch_info, observed=self.method.observe(anchored, a, batch_info))
        corrected = self.method.correction(anchored, advantages, batch_info)
        stats = DriftStats.of(logprobs, corrected, divergences=batch_info.divergences)
        self._applied = applied
        self._add(logprobs, stats, advantages, batch_info)
        return corrected

    def skip(self) -> None:
        """Note a piece without a token that trains: the hook was called, with nothing to measure.

        Call it in every process that has a part of the step, or in none.
        """
        self._skipped = True

    def without_engine(self, why: str) -> None:
        """Log nothing that compares with the engine, whose place the old policy takes: warns once, with the reason."""
        if not self._engineless:
            self.log.warning("%s: no mismatch is logged, and no audit of this run can show one", why)
        self._engineless = True

    def end_step(self, step: int, *, also: Mapping[str, float] = {}) -> dict[str, float]:
        """Close the step: the chosen metrics to log, by name; {} if no tokens came since the last call.

        New findings and, once, the state of every part go to the log of this framework.

        Args:
            step: number of the optimizer step.
            also: metrics of the framework: "optim/grad_norm", "optim/lr", "reward/mean", ...

        Raises: `LivenessError` if a part is dead, unless `on_idle` is "warn".
        """
        gather = self._gather or (lambda own: [own])
        own, tails = self._stats, self._tails
        self._stats, self._tails = None, Tails()
        parts = [s for s in gather(None if own is None else own.cpu()) if s is not None]
        stats = DriftStats.merge_all(parts).plus(tails.sums(gather)) if parts else None
        numbers = {} if stats is None else stats.to_host()
        empty = self._skipped if stats is None else not numbers["n"]
        if not (self._checked or empty or undecided(numbers)):
            self._checked = True
            objective = self._computes_loss or not numbers
            dead = log_states(self.log, liveness(numbers, self.method, objective=objective, applied=self._applied))
            if dead and self._on_idle == "error":
                raise LivenessError(
                    f"a configured part never acts: {dead}. Give it the log-probs it compares (the engine's "
                    'own, recorded while sampling), or remove it; on_idle="warn" goes on regardless'
                )
        if stats is None:
            return {}
        metrics = summarize(stats)
        if self._engineless:
            metrics = {name: x for name, x in metrics.items() if not name.startswith(OF_ENGINE)}
        metrics = {**metrics, **also}
        return self._report.judge(step, metrics)

    def _add(self, logprobs: LogProbs, stats: DriftStats, advantages: Tensor | None, batch_info: BatchInfo) -> None:
        with torch.no_grad():
            sums: dict[str, Tensor | float] = dict(signature(logprobs, advantages=advantages))
            if batch_info.rewards is not None:
                sums |= {"reward": batch_info.rewards.sum(), "reward/n": float(len(batch_info.rewards))}
            largest = {"length_max": logprobs.segments.lengths.max()}
            if batch_info.version_lag is not None:
                sums |= {"version_lag": logprobs.select_scored(batch_info.version_lag).sum()}
                largest["version_lag_max"] = largest_of(batch_info.version_lag.double())
            stats = stats.plus(sums, largest)
            self._tails.add(logprobs)
        self._stats = stats if self._stats is None else self._stats.merge(stats)


def recorder_of(record: Recorder | str | Path | None, framework: str, rules: Rules | None = None) -> Recorder | None:
    """The recorder that `record` names: itself, or one of a folder, which then holds the rules, too."""
    if record is None or not isinstance(record, (str, Path)):
        return record
    # Only who records needs Arrow.
    from offdrift.records.recorder import Recorder

    recorder = Recorder(record, framework=framework)
    if rules is not None:
        write_json(Path(record) / "rules.json", rules.as_record())
    return recorder


Kind = Literal["gate", "weight", "objective"]
State = Literal["acted", "measured", "idle", "blind", "not called"]

WORDS = {
    "acted": "acted",
    "measured": "measured, not applied",
    "idle": "nothing to change",
    "blind": "cannot act: the log-probs it compares are equal at every token",
    "not called": "was never called",
}


@dataclass(frozen=True)
class PartState:
    """Effect of one configured gate, weight or clip in one step: how many tokens it saw and how many it changed."""

    part: str
    """Its formula."""
    kind: Kind
    tokens: int
    """Tokens that it was asked about."""
    changed: int
    """Tokens that it rejected, weighted other than by 1, or clipped; that it would, if only measured."""
    state: State
    on: str | None = None
    """The ratio it reads."""

    @property
    def dead(self) -> bool:
        """Whether this must be repaired, not merely noted.

        Staleness is 0 by definition before the first update of a batch.
        """
        if self.state == "blind":
            return self.on != "staleness"
        return self.state == "not called"

    def __str__(self) -> str:
        text = f"{self.kind} [{self.part}]: {WORDS[self.state]}"
        if self.state == "not called":
            return text
        verb = "would change" if self.state == "measured" else "changed"
        return f"{text}, {self.changed:,} of {self.tokens:,} tokens {verb}"


def log_states(log: logging.Logger, states: Iterable[PartState]) -> str:
    """Log what each part did, dead ones as warnings; returns the dead ones as one text."""
    states = list(states)
    for state in states:
        log.log(logging.WARNING if state.dead else logging.INFO, "%s", state)
    return "; ".join(str(state) for state in states if state.dead)


def undecided(numbers: Mapping[str, float]) -> bool:
    """Whether copies cannot be told from engines that agree: honest log-probs of tokens that are certain are all 0."""
    sure = numbers.get("rollout/nll") == 0
    return sure and not (_moves(numbers, "mismatch") or _moves(numbers, "full"))


def liveness(
    numbers: Mapping[str, float], method: Method, *, objective: bool = True, applied: bool = True
) -> list[PartState]:
    """The state of every gate and weight, and of the objective, after a step.

    Args:
        numbers: the host copy of the step's `DriftStats`; empty if nothing was called.
        method: what is configured.
        objective: whether the loss is this library's; where a framework keeps its own, only gates
            and weights can act.
        applied: whether the framework takes what gates and weights decide, rather than measuring it.

    Example:
        >>> from offdrift.methods import method
        >>> for part in liveness({}, method("token_tis")): print(part)
        weight [weight token ratio(full), truncate above 2]: was never called
        objective [L = -A log pi]: was never called
    """
    tokens = int(numbers.get("n", 0))

    def state_of(part: Any, kind: Kind, changed: float | int | None) -> PartState:
        """`changed` is None if the part was not called."""
        state: State = "not called"
        if changed and tokens:
            state = "acted" if applied else "measured"
        elif changed is not None and tokens:
            state = "idle" if _moves_input(part, numbers) else "blind"
        return PartState(
            part.formula, kind, tokens, changed=int(changed or 0), state=state, on=getattr(part, "on", None)
        )

    gates, weights = method.correction.gates, method.correction.weights
    parts = [state_of(gate, "gate", numbers.get(f"gate/{i}/rejected_tokens")) for i, gate in enumerate(gates)]
    for weight in weights:
        # Weights multiply, and only their product is known; a ratio of 1 at every token has no part in it.
        changed = numbers.get("weight/changed")
        alone = len(weights) == 1 or _moves_input(weight, numbers)
        parts.append(state_of(weight, "weight", changed if alone or changed is None else 0))
    if objective:
        parts.append(state_of(method.objective, "objective", numbers.get("objective/clipped", 0)))
    return parts


def _moves_input(part: Any, numbers: Mapping[str, float]) -> bool:
    """Whether what the part reads differs from that of equal policies at some token."""
    on = getattr(part, "on", None)
    if on is None or getattr(part, "statistic", None) == "version_lag":
        return True
    if getattr(part, "exact", False):
        names = [n for n in numbers if n.startswith("divergence/") and n.endswith("_max")]
        return not names or any(numbers[name] != 0 for name in names)
    return _moves(numbers, on)


def _moves(numbers: Mapping[str, float], on: str) -> bool:
    """Whether the ratio differs from 1 at some token; where it is not logged, its factors decide."""
    names: Iterable[str] = (on,) if f"{on}/l_max" in numbers else sorted(factors(on))  # type: ignore[arg-type]
    ends = (f"{name}/{end}" for name in names for end in ("l_max", "-l_min"))
    return any(numbers.get(end, 0.0) != 0 for end in ends)
