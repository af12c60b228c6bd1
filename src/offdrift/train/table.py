"""The table of a run, one row per arm, and its summary in one sentence.

Every column has a unit, a better direction and a meaning. The sentence is built from the same numbers. A lead that
the number of held-out prompts cannot tell from chance is called that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offdrift.judge import load_rules
from offdrift.show.json_access import number
from offdrift.show.numbers import duration, fixed, percent, short
from offdrift.train.stored import Arm, Run


@dataclass(frozen=True)
class Cell:
    """One cell: its value, a smaller line under it, and whether it is marked."""

    text: str
    note: str = ""
    flagged: bool = False


@dataclass(frozen=True)
class Column:
    """One column: its name, unit and better direction, and how an arm fills it."""

    id: str
    title: str
    unit: str
    better: str
    meaning: str
    cell: Callable[[Arm], Cell]


def _reward(arm: Arm) -> Cell:
    before, after = arm.figure("reward_before"), arm.figure("reward_after")
    if before is None or after is None:
        return Cell(fixed(after if before is None else before))
    change = after - before
    return Cell(f"{fixed(before)} → {fixed(after)}", f"{'+' if change >= 0 else ''}{fixed(change)}")


def _acceptance(arm: Arm) -> Cell:
    share = arm.figure("acceptance")
    floor = load_rules().limits["acceptance_low"]
    low = share is not None and share < floor
    return Cell(percent(share), f"below {100 * floor:g} %" if low else "", flagged=low)


def _precondition(arm: Arm) -> Cell:
    falsified = arm.figure("falsified_updates")
    if falsified is None:
        return Cell("–")
    if falsified == 0:
        return Cell("not falsified", f"in {arm.updates} updates")
    return Cell("falsified", f"at {falsified:.0f} of {arm.updates} updates", flagged=True)


def _speed(arm: Arm) -> Cell:
    speed, seconds = arm.figure("tokens_per_s"), arm.figure("seconds")
    text = "–" if speed is None else f"{speed:,.0f}"
    return Cell(text, "" if seconds is None else duration(seconds))


COLUMNS = (
    Column(
        "reward",
        "Held-out reward",
        "task",
        "higher is better",
        "Mean reward on held-out prompts before the first and after the last update, and the change.",
        _reward,
    ),
    Column(
        "kl_mean",
        "KL mean",
        "nat",
        "lower is closer to on-policy",
        "KL(rollout || current) of a token, averaged over all tokens and updates: how far the distribution that drew "
        "the tokens is from the one being trained. Its grade is below it: exact, certified interval or sampled.",
        lambda arm: Cell(short(arm.figure("kl_mean")), arm.label("grade")),
    ),
    Column(
        "kl_max",
        "KL max",
        "nat",
        "lower is closer to on-policy",
        "Largest KL(rollout || current) of any token in the run. Trust Region Masking gates on this quantity.",
        lambda arm: Cell(short(arm.figure("kl_max"))),
    ),
    Column(
        "acceptance",
        "Acceptance",
        "of sequences",
        "watch: 70 % or more",
        "Share of sampled sequences that the gate let take part. The Trust Region Masking paper asks to watch for "
        "less than 70 %; a high share is not evidence that masking changed little (Remark 4.3).",
        _acceptance,
    ),
    Column(
        "ess",
        "ESS",
        "of the batch",
        "higher is better",
        "Effective sample size (Σw)² / Σw² over the count, w the raw token ratio of current to "
        "rollout policy: how much of the batch an importance-weighted update can use.",
        lambda arm: Cell(percent(arm.figure("ess_frac"))),
    ),
    Column(
        "ppl_gap",
        "PPL gap",
        "nat",
        "lower is better",
        "Mean over sequences of the absolute difference of mean log-prob between current and rollout policy (eq. 25).",
        lambda arm: Cell(short(arm.figure("log_ppl_gap"))),
    ),
    Column(
        "bound",
        "KL of sequences",
        "nat",
        "lower is tighter",
        "KL(rollout || current) of whole sequences, from exact evidence or upper ends; mean over "
        "updates. Its expectation bounds how far the surrogate is from the true change of the return, "
        "for any two policies and rewards in [0, 1]; this is an estimate of it.",
        lambda arm: Cell(short(arm.figure("bound"))),
    ),
    Column(
        "precondition",
        "Precondition",
        "",
        "watch: not falsified",
        "Whether some sampled token already had more divergence than the trust region allows at every "
        "reachable context, and at how many updates. There the unified bound B* proves nothing.",
        _precondition,
    ),
    Column(
        "speed",
        "Speed",
        "tokens/s",
        "higher is faster",
        "Response tokens per second of wall time, all of training included, and the time the arm took.",
        _speed,
    ),
)


def verdict(run: Run) -> str:
    """One sentence: who ended with the highest held-out reward, and whose acceptance is too low.

    Example:
        >>> arm = Arm("trm_max", True, {"reward_before": 0.25, "reward_after": 0.5})
        >>> verdict(Run("demo", {}, "", None, {}, {}, (arm,)))
        'trm_max went from 0.250 to 0.500 in held-out reward.'

    Reference: Li et al., Trust Region Masking, Remark 4.3 (the 70 % diagnostic).
    """
    if not run.arms:
        return "No arm has started yet."
    running = [arm.name for arm in run.arms if not arm.finished]
    opening = f"So far ({_listed(running)} still running): " if running else ""
    outcome = _outcome(run.arms)
    if not outcome:
        outcome = f"{'no' if opening else 'No'} held-out reward has been recorded yet"
    shares = [(arm.name, share) for arm in run.arms if (share := arm.figure("acceptance")) is not None]
    floor = load_rules().limits["acceptance_low"]
    low = [f"{name} accepted {percent(share)}" for name, share in shares if share < floor]
    if low:
        outcome += (
            f"; {_listed(low)} of its sequences, less than the {100 * floor:g} % that the Trust Region Masking paper "
            "asks to watch for (Remark 4.3)"
        )
    return f"{opening}{outcome}."


def _outcome(arms: Sequence[Arm]) -> str:
    scored = [(after, arm) for arm in arms if (after := arm.figure("reward_after")) is not None]
    if not scored:
        return ""
    best, winner = max(scored, key=lambda pair: pair[0])
    level = [arm.name for after, arm in scored if after == best]
    if len(scored) == 1:
        before = winner.figure("reward_before")
        came = "ended at" if before is None else f"went from {fixed(before)} to"
        return f"{winner.name} {came} {fixed(best)} in held-out reward"
    if len(level) == len(scored):
        return f"{_listed(level)} ended level, at {fixed(best)} in held-out reward"
    if len(level) > 1:
        return f"{_listed(level)} ended level, with the highest held-out reward, {fixed(best)}"
    _, second = max((pair for pair in scored if pair[1] is not winner), key=lambda pair: pair[0])
    error = _error_of_difference(winner, second)
    lead = (winner.figure("reward_after") or 0.0) - (second.figure("reward_after") or 0.0)
    clause = (
        f"{winner.name} ended with the highest held-out reward, {fixed(best)}, {fixed(lead)} ahead of {second.name}"
    )
    if error is None or lead > 2 * error:
        return clause
    return (
        f"{clause} (within the noise of {_prompts(winner):.0f} held-out prompts: two standard errors are "
        f"{fixed(2 * error)})"
    )


def _error_of_difference(a: Arm, b: Arm) -> float | None:
    """Standard error of a difference of mean rewards in [0, 1]: at most sqrt(Σ p(1 - p) / n)."""
    variance = 0.0
    for arm in (a, b):
        reward, prompts = arm.figure("reward_after"), _prompts(arm)
        if reward is None or not prompts or not 0 <= reward <= 1:
            return None
        variance += reward * (1 - reward) / prompts
    return math.sqrt(variance)


def _prompts(arm: Arm) -> float | None:
    return number(arm.evals[-1].get("prompts")) if arm.evals else None


def _listed(names: Sequence[str]) -> str:
    """Names as prose: "a", "a and b", "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
