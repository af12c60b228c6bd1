"""Is a loss of held-out reward foreseen 20 updates ahead, on recipes that nothing was fitted to? From stored runs.

    python benchmarks/foreseen.py [--json FILE]
    python benchmarks/foreseen.py --collect runs/staleness runs/backwards-seeds ...    stores the runs of sweeps first

The 214 runs of `benchmarks/severity.py` (two tasks, 37 recipes, held-out reward every four updates, first update of every
finding), each recipe judged by what the others say; then runs of sweeps, judged by what those 214 say; then, by their
stored metrics, the pretrained runs of `benchmarks/pretrained.py`. A run is lost when its held-out reward is below 70 % of
the best before. Written down before any number was seen: an alarm `AHEAD` updates or more before the loss has foreseen it,
an alarm in a run that keeps its reward is false. Judged are losses that could be foreseen, at update `AHEAD` + 4 or later.
Every predictor gives a score at each evaluation and alarms above a threshold, the lowest with at most `FALSE` false alarms
in the runs that teach. A finding is a score of 0 or 1: where it is told in more than `FALSE` of the runs that keep, that
threshold silences it, so its counts without a threshold stand beside ("as told"). Fitted ones are logistic regressions of
evaluations. Intervals: Clopper-Pearson over runs, 95 %.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offdrift.certificate.confidence import clopper_pearson
from offdrift_lab.evidence.predictor import fit

RESULTS = Path(__file__).parent / "results" / "foreseen.json"
STORED = Path(__file__).parent / "results" / "severity.json"
SWEEPS = Path(__file__).parent / "results" / "foreseen_sweeps.json"
PRETRAINED = Path(__file__).parent / "results" / "pretrained.json"
AHEAD, FALSE, LOST = 20, 0.05, 0.3
RULES = (
    "token_drift", "weight_variance", "stale_engine", "systems_fix", "toxic_tail", "grad_spike", "agreement_gap",
    "wrong_weights", "update_too_large", "low_acceptance", "probability_spike", "all_rejected", "ess_collapse",
)  # fmt: skip
"""Findings of ten runs or more that do not look at the reward."""
ESCALATION = ("weight_variance", "rejection_not_enough", "systems_fix", "token_drift")
"""Findings at the survey's thresholds: ESS below .5 or chi-squared above 1; 10 to 25 % rejected; more than 25 % rejected,
ESS below .3 after that, or correlation below .95; chi-squared above .3 at an ESS of .5 and more."""
Run = Mapping[str, Any]


def lost_at(run: Run) -> int | None:
    """Update of the first evaluation below 70 % of the best before; None if there is none."""
    best = 0.0
    for at, reward in run["held_out"]:
        if reward < (1 - LOST) * best:
            return at
        best = max(best, reward)
    return None


def setting(run: Run, name: str) -> float:
    """A number of the recipe that its name has; 0 if it has none."""
    found = re.search(rf"\b{name} ([0-9.]+)", run["cell"])
    return float(found[1]) if found else 0.0


def times(run: Run) -> list[int]:
    """Evaluations at which a run may be judged: before its loss."""
    end = lost_at(run)
    return [at for at, _ in run["held_out"] if end is None or at < end]


def told(run: Run, rule: str, at: int) -> float:
    return float(run["findings"].get(rule, math.inf) <= at)


def kept(run: Run, at: int) -> float:
    """Held-out reward over the best so far."""
    rewards = [reward for u, reward in run["held_out"] if u <= at]
    return rewards[-1] / max(rewards)


Score = Callable[[Run, int], float]
PLAIN: dict[str, Score] = {
    "learning rate": lambda run, at: setting(run, "lr"),
    "lag": lambda run, at: setting(run, "lag"),
    "learning rate x lag": lambda run, at: setting(run, "lr") * setting(run, "lag"),
    "reward below its best": lambda run, at: -kept(run, at),
    "findings told": lambda run, at: sum(told(run, rule, at) for rule in RULES),
}
"""Predictors without a fit, the first four trivial."""
FITTED: dict[str, Callable[[Run, int], list[float]]] = {
    "settings": lambda run, at: [setting(run, "lr") * 1e3, setting(run, "lag"), kept(run, at), at],
    "findings": lambda run, at: [*(told(run, rule, at) for rule in RULES), at],
    "settings and findings": lambda run, at: [*FITTED["settings"](run, at), *(told(run, r, at) for r in RULES)],
}


def fitted(features: Callable[[Run, int], list[float]], runs: Sequence[Run]) -> Score:
    """A logistic regression of a loss to come at least `AHEAD` updates later."""
    x, y = [], []
    for run in runs:
        end = lost_at(run)
        for at in times(run):
            if end is None or end - at >= AHEAD:
                x.append(features(run, at))
                y.append(end is not None)
    predictor = fit(np.array(x), np.array(y))
    return lambda run, at: float(predictor.probability(np.array([features(run, at)]))[0])


def threshold(score: Score, runs: Sequence[Run]) -> float:
    """Lowest threshold with at most `FALSE` of the runs that keep their reward above it."""
    highest = sorted(max(score(run, at) for at in times(run)) for run in runs if lost_at(run) is None)
    return highest[math.ceil((1 - FALSE) * len(highest)) - 1]


def alarm(run: Run, score: Score, above: float) -> int | None:
    return next((at for at in times(run) if score(run, at) > above), None)


Make = Callable[[Sequence[Run]], Score]


def judged(runs: Sequence[Run], make: Make, teachers: Sequence[Run] | None = None) -> dict[str, Any]:
    """Foreseen losses and false alarms: by `teachers`, else every recipe by what the others say."""
    counts = _Counts()
    if teachers is not None:
        score = make(teachers)
        counts.add(runs, score, threshold(score, teachers))
        return counts.row()
    for recipe in sorted({(r["family"], r["cell"]) for r in runs}):
        others = [r for r in runs if (r["family"], r["cell"]) != recipe]
        score = make(others)
        counts.add([r for r in runs if (r["family"], r["cell"]) == recipe], score, threshold(score, others))
    return counts.row()


def as_told(runs: Sequence[Run], rule: str) -> dict[str, Any]:
    """A rule's finding as an alarm, whatever it costs in runs that keep their reward."""
    counts = _Counts()
    counts.add(runs, lambda run, at: told(run, rule, at), 0.5)
    return counts.row()


class _Counts:
    """What became of runs with and without an alarm."""

    def __init__(self) -> None:
        self.foreseen: list[bool] = []
        self.false: list[bool] = []
        self.late = 0

    def add(self, runs: Sequence[Run], score: Score, above: float) -> None:
        for run in runs:
            end, at = lost_at(run), alarm(run, score, above)
            if end is None:
                self.false.append(at is not None)
            elif end >= AHEAD + 4:
                self.foreseen.append(at is not None and end - at >= AHEAD)
                self.late += at is not None and end - at < AHEAD

    def row(self) -> dict[str, Any]:
        return {"foreseen": share(self.foreseen), "told late": self.late, "false": share(self.false)}


def decisions(runs: Sequence[Run], rule: str) -> dict[str, list[float]]:
    """A rule's finding as a decision to stop, taken at any time before the loss: told in runs that lose, and that keep."""
    told_in = {True: [], False: []}
    for run in runs:
        told_in[lost_at(run) is not None].append(any(told(run, rule, at) for at in times(run)))
    return {"told before a loss": share(told_in[True]), "told, nothing lost": share(told_in[False])}


def share(events: Sequence[bool]) -> list[float]:
    """Count, number, and the exact interval of the share."""
    interval = clopper_pearson(sum(events), len(events))
    return [sum(events), len(events), interval.low, interval.high]


def on(runs: Sequence[Run], teachers: Sequence[Run] | None = None) -> dict[str, Any]:
    """Every predictor on some runs."""
    found: dict[str, Any] = {"runs": len(runs), "lost": sum(lost_at(r) is not None for r in runs)}
    for name, score in PLAIN.items():
        found[name] = judged(runs, lambda _, score=score: score, teachers)
    for rule in RULES:
        found[f"rule {rule}"] = judged(runs, lambda _, rule=rule: lambda run, at: told(run, rule, at), teachers)
    for name, features in FITTED.items():
        found[f"fit to {name}"] = judged(runs, lambda others, features=features: fitted(features, others), teachers)
    found["as told"] = {rule: as_told(runs, rule) for rule in (*RULES, *ESCALATION)}
    found["decisions"] = {rule: decisions(runs, rule) for rule in ESCALATION}
    return found


def collected(folder: Path) -> Iterator[dict[str, Any]]:
    """The finished runs of a sweep: settings, held-out rewards, first update of each finding."""
    content = json.loads((folder / "sweep.json").read_text("utf-8"))
    for run in content["runs"]:
        arm = folder / run["folder"] / "arms" / run["arm"]
        recipe = json.loads((folder / run["folder"] / "run.json").read_text("utf-8"))["recipe"]
        findings = [json.loads(line) for line in read(arm / "findings.jsonl")]
        evals = [json.loads(line) for line in read(arm / "eval.jsonl")]
        values = {k: v for k, v in run["values"].items() if k not in ("optim.lr", "lag.sync_every")}
        lag, lr = recipe["lag"]["sync_every"] - 1, recipe["optim"]["lr"]
        yield {
            "family": content["name"],
            "cell": f"lag {lag}, lr {lr:g}, {run['arm']}" + "".join(f", {k} {v}" for k, v in sorted(values.items())),
            "seed": run["seed"],
            "held_out": [[row["update"], round(row["reward"], 4)] for row in evals],
            "findings": {f["rule"]: f["update"] for f in reversed(findings)},
        }


def read(file: Path) -> list[str]:
    return file.read_text("utf-8").splitlines() if file.exists() else []


def pretrained(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Runs of a pretrained model: the escalation thresholds on their stored metrics, at any time before the loss."""
    rules: dict[str, Callable[[Run, int], bool]] = {
        "ESS below .5": lambda run, at: min(run["metrics"]["ess"][:at]) < 0.5,
        "ESS below .3": lambda run, at: min(run["metrics"]["ess"][:at]) < 0.3,
        "more than 10 % rejected": lambda run, at: min(run["metrics"]["accepted"][:at]) < 0.9,
        "more than 25 % rejected": lambda run, at: min(run["metrics"]["accepted"][:at]) < 0.75,
    }
    rows = [{**run, "held_out": [row[:2] for row in run["evals"]]} for run in runs]
    lost = [lost_at(run) for run in rows]
    late = [end for end in lost if end is not None and end >= AHEAD + 4]
    told_in = {
        name: {
            kind: share(
                [rule(run, end or len(run["metrics"]["ess"])) for run, end in zip(rows, lost) if (end is None) == kept]
            )
            for kind, kept in (("told before a loss", False), ("told, nothing lost", True))
        }
        for name, rule in rules.items()
    }
    return {"runs": len(rows), "lost": sum(end is not None for end in lost), "late enough": len(late), **told_in}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--collect", type=Path, nargs="+", metavar="FOLDER", help="finished sweeps, to be stored first")
    options = parser.parse_args()
    if options.collect:
        rows = [row for folder in options.collect for row in collected(folder)]
        lines = ",\n ".join(json.dumps(row, separators=(",", ":")) for row in rows)
        SWEEPS.write_text(f'{{"runs": [\n {lines}\n]}}\n', encoding="utf-8")
    runs, sweeps = (json.loads(file.read_text("utf-8"))["runs"] for file in (STORED, SWEEPS))
    if isinstance(runs, int):
        raise SystemExit(f"{STORED} has no runs")
    found = on(runs)
    found["sweeps"] = on(sweeps, teachers=runs)
    found["pretrained"] = pretrained(list(json.loads(PRETRAINED.read_text("utf-8"))["runs"].values()))
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for part in (found, found["sweeps"], found["pretrained"]):
        for name, row in part.items():
            if name not in ("sweeps", "pretrained"):
                print(name, row)


if __name__ == "__main__":
    main()
