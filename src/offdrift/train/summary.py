"""An arm's row of the final table, from what the arm stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offdrift.certificate.certify import ACCEPTANCE_FLOOR
from offdrift.methods import Method

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
) -> dict[str, Any]:
    """What happened in an arm, in one row; what was not measured is None.

    Means over updates are weighted by tokens (divergences) or plain (shares, bounds).
    """
    tokens = [m["batch/tokens"] for m in metrics]
    summary = {
        "arm": name,
        "method": method_name,
        "description": row.describe(),
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
    for i, gate in enumerate(row.correction.gates):
        if metrics and not any(_known(metrics, f"gate/{i}/drop_frac_token")):
            said.append(f"gate {i} never rejected a token ({gate.formula})")
    limited = [w for w in row.correction.weights if getattr(w, "cap", None) is not None]
    if metrics and limited and not any(_known(metrics, "weight/cap_frac")):
        said.append("no weight ever met its limits (" + "; ".join(w.formula for w in limited) + ")")
    lag = max(map(int, _known(metrics, "old/version_lag")), default=0)
    if lag > 0:
        said.append(
            f"old log-probs were taken up to {lag} updates after the weights that sampled: its "
            "mismatch ratio contains that staleness"
        )
    if any(m.get("divergence/grade") in ("interval", "capped interval") for m in metrics):
        said.append("divergences are lower ends of certified intervals (top-k evidence)")
    return said


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
