"""An arm's row of the final table, from what the arm stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offdrift.certificate.certify import ACCEPTANCE_FLOOR
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
    summary = {
        "arm": name,
        "method": method_name,
        "description": row.describe() + _old_log_probs(old_policy, metrics),
        "updates": len(metrics),
        "reward_before": evals[0]["reward"] if evals else None,
        "reward_after": evals[-1]["reward"] if evals else None,
        "eval_prompts": evals[-1]["prompts"] if evals else None,
        "reward_train_last": metrics[-1]["reward/mean"] if metrics else None,
        "kl_mean": _mean(metrics, "divergence/kl_rollout_current_mean", tokens),
        "kl_max": _largest(metrics, "divergence/kl_rollout_current_max"),
        "acceptance": _mean(metrics, "gate/acceptance_seq"),
        "acceptance_min": _smallest(metrics, "gate/acceptance_seq"),
        "ess_frac": _mean(metrics, "full/ess_frac"),
        "bound": _mean(metrics, "certificate/kl_seq"),
        "falsified_updates": _count(metrics, "certificate/falsified"),
        "log_ppl_gap": _mean(metrics, "full/log_ppl_gap"),
        "tokens_per_s": sum(tokens) / seconds if seconds > 0 else None,
        "seconds": seconds,
        "grade": metrics[-1]["divergence/grade"] if metrics else None,
        "findings": list(findings),
    }
    return {**summary, "notes": notes(row, metrics)}


def notes(row: Method, metrics: Sequence[Row]) -> list[str]:
    """What a reader of the row must know: low acceptance, and configured parts that never acted."""
    said = []
    acceptance = _mean(metrics, "gate/acceptance_seq")
    if acceptance is not None and acceptance < ACCEPTANCE_FLOOR:
        said.append(
            f"accepted {acceptance:.0%} of the sequences, below the 70 % that the Trust Region Masking "
            "paper asks to monitor (Remark 4.3): updates rest on few sequences"
        )
    if metrics:
        said += _without_effect(row, metrics)
    said += _old_policy(metrics)
    if any(m.get("divergence/grade") in ("interval", "capped interval") for m in metrics):
        said.append("divergences are lower ends of certified intervals (top-k evidence)")
    return said


def _without_effect(row: Method, metrics: Sequence[Row]) -> Iterator[str]:
    """Gates, weights and clips that changed no token of the run, and the ratio that gave them no cause."""
    parts = [
        *((g, f"gate/{i}/drop_frac_token", f"gate {i} never rejected a token") for i, g in enumerate(row.correction.gates)),
        *((w, "weight/cap_frac", "no weight ever met its limits") for w in row.correction.weights if getattr(w, "cap", None) is not None),
        *((w, "weight/changed_frac", "no weight ever differed from 1") for w in row.correction.weights),
        (row.objective, "objective/clip_frac_active", "the objective's clip never changed a token"),
    ]  # fmt: skip
    told: set[int] = set()
    for part, key, sentence in parts:
        shares = _known(metrics, key)
        if not shares or any(shares) or id(part) in told:
            continue
        told.add(id(part))
        on = getattr(part, "on", None)
        largest = _largest(metrics, f"{on}/abs_log_ratio_max")
        if largest == 0:
            sentence += f": the {on} ratio was 1 at every token, so nothing was corrected"
        elif largest is not None:
            sentence += f"; the largest |log {on} ratio| was {largest:.2g} nat"
        yield f"{sentence} ({part.formula})"


def _old_log_probs(source: str | None, metrics: Sequence[Row]) -> str:
    """How the old log-probs were come by, for the description; nothing where the method reads none."""
    statuses = _known(metrics, "old/status")
    if not statuses:
        return ""
    return f"; old log-probs {max(statuses, key=OLD_STATUS.index)} ({source})"


def _old_policy(metrics: Sequence[Row]) -> Iterator[str]:
    """What the old log-probs were, where they were not the training engine's at the weights that drew."""
    lag = max(map(int, _known(metrics, "old/version_lag")), default=0)
    if any(_known(metrics, "old/stale_frac")):
        yield (
            f"old log-probs are stale: taken up to {lag} updates after the weights that sampled, so the "
            'mismatch ratio contains staleness; old_policy.from = "sampling" takes them at those weights'
        )
    if any(_known(metrics, "old/approximated_frac")):
        yield "old log-probs are approximated: averaged or interpolated policies, not the one that sampled"
    if any(_known(metrics, "old/missing_frac")):
        yield "old log-probs are missing: the rollout policy stands in for the old one (bypass)"


def _known(metrics: Sequence[Row], key: str) -> list[Any]:
    return [m[key] for m in metrics if m.get(key) is not None]


def _mean(
    metrics: Sequence[Row], key: str, by: Sequence[int | float] | None = None
) -> float | None:
    pairs = [
        (m[key], w)
        for m, w in zip(metrics, by or [1.0] * len(metrics), strict=True)
        if m.get(key) is not None
    ]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None


def _count(metrics: Sequence[Row], key: str) -> int | None:
    known = _known(metrics, key)
    return int(sum(known)) if known else None


def _largest(metrics: Sequence[Row], key: str) -> float | None:
    return max(map(float, _known(metrics, key)), default=None)


def _smallest(metrics: Sequence[Row], key: str) -> float | None:
    return min(map(float, _known(metrics, key)), default=None)
