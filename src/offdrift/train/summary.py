"""An arm's row of the final table, from what the arm stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from offdrift.judge import load_rules
from offdrift.methods import Method
from offdrift.records.rollouts import OLD_STATUS

Row = Mapping[str, Any]


def summarize_arm(
    name: str,
    row: Method,
    method_name: str,
    metrics: Sequence[Row],
    evals: Sequence[Row],
    *,
    seconds: float,
    findings: Sequence[Row] = (),
    old_policy: str | None = None,
) -> dict[str, Any]:
    """What happened in an arm, in one row; what was not measured is None.

    Args:
        old_policy: where its old log-probs were from, `old_policy.from` of the recipe.

    Means over updates are weighted by tokens (divergences) or plain (shares, bounds).
    """
    tokens = [m["batch/tokens"] for m in metrics]
    description = row.describe()
    if statuses := _recorded(metrics, "old/status"):
        worst = max(statuses, key=OLD_STATUS.index)
        description += f"; old log-probs {worst} ({old_policy})"
    falsified = _recorded(metrics, "certificate/falsified")
    summary = {
        "arm": name,
        "method": method_name,
        "description": description,
        "updates": len(metrics),
        "reward_before": evals[0]["reward"] if evals else None,
        "reward_after": evals[-1]["reward"] if evals else None,
        "eval_prompts": evals[-1]["prompts"] if evals else None,
        "reward_train_last": metrics[-1]["reward/mean"] if metrics else None,
        "kl_mean": _mean(metrics, "divergence/kl_rollout_current_mean", tokens),
        "kl_max": _extreme(max, metrics, "divergence/kl_rollout_current_max"),
        "acceptance": _mean(metrics, "gate/acceptance_seq"),
        "acceptance_min": _extreme(min, metrics, "gate/acceptance_seq"),
        "ess_frac": _mean(metrics, "full/ess_frac"),
        "bound": _mean(metrics, "certificate/kl_seq"),
        "falsified_updates": int(sum(falsified)) if falsified else None,
        "log_ppl_gap": _mean(metrics, "full/log_ppl_gap"),
        "tokens_per_s": sum(tokens) / seconds if seconds > 0 else None,
        "seconds": seconds,
        "grade": metrics[-1]["divergence/grade"] if metrics else None,
        "findings": list(findings),
    }
    return {**summary, "notes": [*_notes(row, metrics)]}


def _notes(row: Method, metrics: Sequence[Row]) -> Iterator[str]:
    """What a reader of the row must know: few sequences, parts without effect, weak evidence."""
    acceptance = _mean(metrics, "gate/acceptance_seq")
    floor = load_rules().limits["acceptance_low"]
    if acceptance is not None and acceptance < floor:
        yield (
            f"accepted {acceptance:.0%} of the sequences, below the {100 * floor:g} % that the Trust Region Masking "
            "paper asks to monitor (Remark 4.3): updates rest on few sequences"
        )
    yield from _without_effect(row, metrics)
    lag = max(map(int, _recorded(metrics, "old/version_lag")), default=0)
    if any(_recorded(metrics, "old/stale_frac")):
        yield (
            f"old log-probs are stale: taken up to {lag} updates after the weights that sampled, so the "
            'mismatch ratio contains staleness; old_policy.from = "sampling" takes them at those weights'
        )
    if any(_recorded(metrics, "old/approximated_frac")):
        yield "old log-probs are approximated: averaged or interpolated policies, not the one that sampled"
    if any(_recorded(metrics, "old/missing_frac")):
        yield "old log-probs are missing: the rollout policy stands in for the old one (bypass)"
    if any(m.get("divergence/grade") in ("interval", "capped interval") for m in metrics):
        yield "divergences are lower ends of certified intervals (top-k evidence)"


def _without_effect(row: Method, metrics: Sequence[Row]) -> Iterator[str]:
    """Gates, weights and clips that changed no token of the run, and the ratio that gave them no cause."""
    parts: list[tuple[Any, str, str]] = []
    for i, gate in enumerate(row.correction.gates):
        parts.append((gate, f"gate/{i}/drop_frac_token", f"gate {i} never rejected a token"))
    weights = row.correction.weights
    capped = [w for w in weights if getattr(w, "cap", None) is not None]
    parts += [(w, "weight/cap_frac", "no weight ever met its limits") for w in capped]
    parts += [(w, "weight/changed_frac", "no weight ever differed from 1") for w in weights]
    clipped = "the objective's clip never changed a token"
    parts.append((row.objective, "objective/clip_frac_active", clipped))
    reported: set[int] = set()
    for part, key, sentence in parts:
        shares = _recorded(metrics, key)
        if not shares or any(shares) or id(part) in reported:
            continue
        reported.add(id(part))
        on = getattr(part, "on", None)
        largest = _extreme(max, metrics, f"{on}/abs_log_ratio_max")
        if largest == 0:
            sentence += f": the {on} ratio was 1 at every token, so nothing was corrected"
        elif largest is not None:
            sentence += f"; the largest |log {on} ratio| was {largest:.2g} nat"
        yield f"{sentence} ({part.formula})"


def _recorded(metrics: Sequence[Row], key: str) -> list[Any]:
    return [m[key] for m in metrics if m.get(key) is not None]


def _mean(metrics: Sequence[Row], key: str, by: Sequence[int | float] | None = None) -> float | None:
    pairs = [(m[key], w) for m, w in zip(metrics, by or [1.0] * len(metrics), strict=True) if m.get(key) is not None]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None


def _extreme(pick: Callable[..., Any], metrics: Sequence[Row], key: str) -> float | None:
    return pick(map(float, _recorded(metrics, key)), default=None)
