"""Is what was configured alive? Each part of a method: was it called, on what, and what did it change.

A correction that is configured and never acts is the most common silent failure of the field: its
log-probs are missing or copies of each other, an option needs another option, a batch is skipped.
A part that looks at a live ratio and finds nothing to change is healthy, and told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from offdrift.correction.compose import factors
from offdrift.methods.method import Method

State = Literal["acted", "measured", "idle", "blind", "not called"]

SAID = {
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
    kind: Literal["gate", "weight", "objective"]
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
        verb = "would change" if self.state == "measured" else "changed"
        counted = "" if self.state == "not called" else f", {self.changed:,} of {self.tokens:,} tokens {verb}"  # fmt: skip
        return f"{self.kind} [{self.part}]: {SAID[self.state]}{counted}"


def undecided(numbers: Mapping[str, float]) -> bool:
    """Whether these tokens cannot tell copies from engines that agree.

    Where the rollout policy was sure of every token, in a micro-batch of one word for instance, honest
    log-probs of any engine are all 0.
    """
    return numbers.get("rollout/nll") == 0 and not any(_moves(numbers, on) for on in ("mismatch", "full"))  # fmt: skip


def liveness(
    numbers: Mapping[str, float],
    method: Method,
    *,
    objective: bool = True,
    applied: bool = True,
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
    parts = _parts(numbers, method, objective)
    if applied:
        return list(parts)
    return [replace(p, state="measured") if p.state == "acted" else p for p in parts]


def _parts(numbers: Mapping[str, float], method: Method, objective: bool) -> Iterator[PartState]:
    tokens = int(numbers.get("n", 0))
    correction = method.correction
    for i, gate in enumerate(correction.gates):
        called = f"gate/{i}/rejected_tokens" in numbers
        changed = int(numbers.get(f"gate/{i}/rejected_tokens", 0))
        yield _state(gate, "gate", tokens, changed, called, numbers)
    if correction.weights:
        # Weights multiply; what is known of a token is their product, and that a ratio of 1 at every
        # token has no part in it.
        called, product = "weight/changed" in numbers, int(numbers.get("weight/changed", 0))
        for weight in correction.weights:
            alone = len(correction.weights) == 1
            changed = product if alone or _sees(weight, numbers) else 0
            yield _state(weight, "weight", tokens, changed, called, numbers)
    if objective:
        called, changed = bool(tokens), int(numbers.get("objective/clipped", 0))
        yield _state(method.objective, "objective", tokens, changed, called, numbers)


def _state(
    part: Any,
    kind: Literal["gate", "weight", "objective"],
    tokens: int,
    changed: int,
    called: bool,
    numbers: Mapping[str, float],
) -> PartState:
    on = getattr(part, "on", None)
    if not called or not tokens:
        state: State = "not called"
    elif changed:
        state = "acted"
    else:
        state = "idle" if _sees(part, numbers) else "blind"
    return PartState(part.formula, kind, tokens, changed, state, on)


def _sees(part: Any, numbers: Mapping[str, float]) -> bool:
    """Whether what the part reads differs from that of equal policies at some token."""
    on = getattr(part, "on", None)
    if on is None or getattr(part, "statistic", None) == "version_lag":
        return True
    if getattr(part, "exact", False):
        largest = [x for name, x in numbers.items() if name.startswith("divergence/") and name.endswith("_max")]  # fmt: skip
        return not largest or any(x != 0 for x in largest)
    return _moves(numbers, on)


def _moves(numbers: Mapping[str, float], on: str) -> bool:
    """Whether the ratio differs from 1 at some token; where it is not logged, its factors decide."""
    names: Iterable[str] = (on,) if f"{on}/l_max" in numbers else sorted(factors(on))  # type: ignore[arg-type]
    return any(numbers.get(f"{name}/{end}", 0.0) != 0 for name in names for end in ("l_max", "-l_min"))  # fmt: skip
