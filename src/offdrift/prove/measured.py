"""Measured drift as premises of the bounds: from a run, an arm of one, an audit or a check of two engines.

Read from what these store, without torch and without trusting its shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offdrift.errors import RecordError
from offdrift.show.json_access import mapping, number, read_lines
from offdrift.texts import read_json


@dataclass(frozen=True)
class MeasuredDrift:
    """Drift of two policies as a run, an audit or a check measured it: premises of the bounds."""

    premises: dict[str, float]
    """Those of horizon, delta, eps, kl_rate and mean_tv that were measured; horizon in tokens, KL in nats."""
    source: str
    """Where from, and what it cannot say."""

    @property
    def horizon(self) -> int | None:
        """The longest response, where it was measured."""
        tokens = self.premises.get("horizon")
        return None if tokens is None else int(tokens)

    def completed(self, divergences: Mapping[str, float | None], solve: str | None) -> dict[str, float | None]:
        """Fill in what is not given and was measured; a largest token KL that is neither is infinite.

        Args:
            divergences: by premise, None where not given.
            solve: the premise that is looked for, and stays as it is.
        """
        known = {"delta": math.inf, **self.premises}
        if divergences["kl_seq"] is not None or solve == "kl_seq":
            known.pop("kl_rate", None)
        if solve is not None:
            known.pop(solve, None)
        return {name: known.get(name) if x is None else x for name, x in divergences.items()}


MEASURED = {"delta": "kl_{}_max", "eps": "tv_{}_max", "kl_rate": "kl_{}_mean", "mean_tv": "tv_{}_mean"}
"""Metrics by premise; the pair of policies is filled in."""
UNPROVED = (
    "δ and ε are the largest that were met: contexts that nobody met may be worse, so these are estimates. Means per "
    "token are taken at every position."
)


def measured_drift(path: Path) -> MeasuredDrift:
    """The drift in a run's folder, an arm's folder, `audit.json` or `check.json`, or the folder of one.

    Of a run the first arm, and a run may go on. Divergences where they were recorded, of the current policy or else
    of the old one, with their grade; else the mean token KL as estimated from the log-probs of sampled tokens (k3), and
    no maximum.

    Raises: `RecordError` if the path holds none of these, or no drift was measured.
    """
    steps, tokens = _measurements(path)
    for pair in ("rollout_current", "rollout_old"):
        keys = {name: f"divergence/{key.format(pair)}" for name, key in MEASURED.items()}
        values = {name: _over(steps, key, largest=key.endswith("_max")) for name, key in keys.items()}
        if values["kl_rate"] is not None:
            policy = "current" if pair == "rollout_current" else "old"
            grades = sorted({str(s["divergence/grade"]) for s in steps if s.get("divergence/grade")})
            words = f"{' and '.join(grades) or 'recorded'} divergences of the {policy} policy. {UNPROVED}"
            if any("interval" in grade for grade in grades):
                words += " Of intervals the lower ends were recorded: the true drift may be larger."
            break
    else:
        sampled = next((k for k in ("full/k3", "mismatch/k3") if _over(steps, k, largest=False) is not None), None)
        if sampled is None:
            raise RecordError(f"{path} holds no measured drift: neither exact divergences nor k3 of sampled tokens")
        values = {"kl_rate": _over(steps, sampled, largest=False)}
        words = f"sampled tokens alone ({sampled}): an estimate of the mean token KL, and of no maximum."
    premises = {name: value for name, value in values.items() if value is not None}
    if tokens is not None:
        premises["horizon"] = tokens
    if {"eps", "mean_tv"} <= premises.keys():
        premises["mean_tv"] = min(premises["mean_tv"], premises["eps"])
    return MeasuredDrift(premises, f"Measured in {path}: {words}")


def _measurements(path: Path) -> tuple[list[dict[str, Any]], int | None]:
    """Metrics of every step (or one row for the whole log), and the longest response."""
    files = [path / name for name in ("audit.json", "check.json", "run.json")] if path.is_dir() else [path]
    file = next((f for f in files if f.is_file()), None)
    try:
        if file is None:  # an arm
            if not (path / "metrics.jsonl").is_file():
                raise FileNotFoundError("it is no file and holds no metrics.jsonl")
            run = mapping(read_json(path.parent.parent / "run.json"))
            return read_lines(path / "metrics.jsonl")[0], _longest(mapping(run.get("recipe")).get("rollout"))
        head = mapping(read_json(file))
    except (OSError, ValueError) as e:
        raise RecordError(
            f"{path} holds no measured drift ({e}); give a run's folder, an arm's, or an audit.json or check.json"
        ) from e
    if head.get("kind") == "check":
        baseline = mapping(head.get("baseline"))
        row = {
            f"divergence/{key.format('rollout_old')}": baseline.get(key.replace("_{}", "")) for key in MEASURED.values()
        }
        return [baseline | row], _longest(head.get("sampling"))
    if head.get("kind") == "audit":
        overall = mapping(head.get("overall"))
        longest = number(overall.get("response/length_max"))
        return [overall], None if longest is None else int(longest)
    folders = [file.parent / "arms" / arm for arm in mapping(mapping(head.get("recipe")).get("arms"))]
    arms = [folder for folder in folders if (folder / "metrics.jsonl").is_file()]
    if not arms:
        raise RecordError(
            f"{path} holds no measured drift: no arm of it has started; give a run's folder, an arm's, or an "
            "audit.json or check.json"
        )
    return _measurements(arms[0])


def _longest(sampling: object) -> int | None:
    tokens = number(mapping(sampling).get("max_tokens"))
    return None if tokens is None else int(tokens)


def _over(steps: Sequence[dict[str, Any]], key: str, *, largest: bool) -> float | None:
    """Maximum, or mean by tokens, over the steps that hold a metric; None if none does."""
    pairs = [(v, number(s.get("batch/tokens")) or 1.0) for s in steps if (v := number(s.get(key))) is not None]
    if not pairs:
        return None
    values, weights = zip(*pairs)
    return max(values) if largest else float(np.average(values, weights=weights))
