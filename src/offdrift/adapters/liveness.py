"""Liveness: whether each configured part of a method was called, on what, and what it changed.

A correction that never acts is a common silent failure: its log-probs are missing, or copies of each other. A part
whose ratio moves and that still changes nothing is healthy ("idle").
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from offdrift.correction.compose import factors
from offdrift.methods.method import Method

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
    """What one configured part did in a step."""

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
        return PartState(part.formula, kind, tokens, int(changed or 0), state, getattr(part, "on", None))

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
