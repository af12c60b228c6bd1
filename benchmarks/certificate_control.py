"""Distance of certificates with control variates from a gain that is known, and how often they are false.

    python -m benchmarks.certificate_control [--repetitions 40]
    python -m benchmarks.certificate_control --trainer [--prompts 32 128] [--lags 1 8] [--seeds 0 1] [--batches 24]

The worlds of benchmarks/certificate_fresh.py: answers of T tokens of two kinds, whose gain is a finite sum. Compared: ratios
alone, control variates alone, and both mixed, which is what `offdrift certify` takes where the evidence is exact; all with
the direct guarantee's share of alpha = .05. Writes results/certificate_control.json.

With --trainer, the certificates of `offdrift train` at its own sizes: a tiny Qwen3 learns sums after a warm start, and every
batch's certificate is taken twice from the same evidence, with its control variates and without, as a look of the run and at
alpha by itself. Goes on where the file ends.
"""

import argparse
import itertools
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.certificate_fresh import ALPHA, ROLLOUT, at_distance

from offdrift.certificate import betting, samples
from offdrift.certificate.batch import COLUMNS, BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.certificate.confidence import Looks, betting_any
from offdrift.certificate.control import LOWEST, SHARE, control_sums, ratio_means
from offdrift.certificate.samples import SHARES
from offdrift.segments import Segments
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.loop import arm
from offdrift_lab.train.loop.context import begin, set_up
from offdrift_lab.train.loop.loop import train_batches
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.settings.recipe import load_recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "certificate_control.json"
HORIZONS, DISTANCES, SIZES = (16, 64), (0.02, 0.19, 0.83), (64, 128, 256, 1024, 4096)


def measured(horizon: int, kl: float, prompts: int, *, repetitions: int) -> dict[str, float]:
    """Mean distances of the lower ends from the gain, and how many lie above it."""
    g, current = np.random.default_rng(0), at_distance(kl, horizon)
    deviation = math.sqrt(horizon * ROLLOUT * (1 - ROLLOUT))
    needed = int(ROLLOUT * horizon + 0.6 * deviation) + 1 + np.array([-1, 0, 1]) * max(1, int(deviation))

    def returns(chance: float) -> float:
        law = [math.comb(horizon, k) * chance**k * (1 - chance) ** (horizon - k) for k in range(horizon + 1)]
        return float(np.mean([sum(law[max(0, n) :]) for n in needed]))

    gain = returns(current) - returns(ROLLOUT)
    law = {p: torch.tensor([[p, 1 - p]], dtype=torch.float64).log() for p in (ROLLOUT, current)}
    mean = ratio_means(law[ROLLOUT], law[current])
    segments = Segments.from_lengths([horizon] * prompts)
    lows: dict[str, list[float]] = {"direct": [], "control": [], "mixed": []}
    share = ALPHA * SHARES["gain"]
    for _ in range(repetitions):
        hard = needed[g.integers(0, len(needed), prompts)]
        first = g.random((prompts, horizon)) < ROLLOUT
        log_w = np.where(first, math.log(current / ROLLOUT), math.log((1 - current) / (1 - ROLLOUT)))
        sums = control_sums(torch.from_numpy(log_w.ravel()), mean.expand(prompts * horizon), segments).numpy()
        x = np.where(first.sum(1) >= hard, np.expm1(log_w.sum(1)), 0.0)
        y = np.maximum(x - SHARE * sums, LOWEST)
        lows["direct"].append(betting(x, low=-1.0, high=math.inf, alpha=share, sides="low").low)
        lows["control"].append(betting_any([(y, LOWEST)], alpha=share).low)
        lows["mixed"].append(betting_any([(x, -1.0), (y, LOWEST)], alpha=share).low)
    found = {k: gain - float(np.mean(v)) for k, v in lows.items()}
    false = {f"{k}_false": float(np.mean(np.array(v) > gain)) for k, v in lows.items()}
    return {"horizon": horizon, "kl": kl, "prompts": prompts, "gain": gain, **found, **false}


class Evidence(Feature):
    """Keeps what every step knew for its certificate."""

    def __init__(self) -> None:
        self.seen: list[BatchEvidence] = []

    def stepped(self, arm: Any, update: Any) -> Metrics:
        self.seen.append(update.evidence.cpu())
        return Metrics()


def of_run(prompts: int, lag: int, seed: int, batches: int) -> list[dict[str, Any]]:
    """Both certificates of every batch of a run, and its drift."""
    changes = [f"rollout.prompts={prompts}", f"lag.sync_every={lag}", f"seed={seed}", f"batches={batches}"]
    changes += ["rollout.quantization=none", f"log.eval_every={batches}", "log.eval_prompts=32", "log.tokens=false"]
    recipe = load_recipe(ROOT / "recipes" / "tiny.toml", changes=changes, arm="none")
    kept, begun = Evidence(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        at = RunFolder(Path(folder))
        head = begin(recipe, at, False)
        run = set_up(recipe, at, lambda event: None)
        at.create(head | {"trained_return": {}})
        trained, source = arm.start_arm(run, "none", resume=False)
        trained.features = [*trained.features, kept]
        train_batches(trained, source)
        source.close()
    rows = []
    for t, evidence in enumerate(kept.seen, start=1):
        without = evidence.columns.clone()
        without[:, COLUMNS.index("control")] = math.nan
        each = {"mixed": evidence, "direct": replace(evidence, columns=without)}
        row: dict[str, Any] = {"prompts": prompts, "lag": lag, "seed": seed, "batch": t}
        row["kl_seq"] = float(evidence.column("kl_total").mean())
        for name, batch in each.items():
            alone = certify(batch, alpha=ALPHA, prompts="drawn")
            row |= {"gain": alone.estimates["gain"].mean, name: alone.estimates["gain"].low}
            look = certify(batch, alpha=ALPHA, looks=Looks(at=t, of=1, series="this run"), prompts="drawn")
            row[f"{name}, look"] = look.estimates["gain"].low
        rows.append(row)
    print(prompts, lag, seed, f"{time.process_time() - begun:.0f} CPU seconds", flush=True)
    return rows


def of_trainer(options: argparse.Namespace) -> None:
    """Runs that are missing, stored one by one, and what control variates do to their certificates."""
    found = json.loads(options.json.read_text("utf-8"))
    rows = found.setdefault("trainer", [])
    for prompts, lag, seed in itertools.product(options.prompts, options.lags, options.seeds):
        if not any((r["prompts"], r["lag"], r["seed"]) == (prompts, lag, seed) for r in rows):
            rows += of_run(prompts, lag, seed, options.batches)
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for prompts, lag in itertools.product(options.prompts, options.lags):
        of = [r for r in rows if (r["prompts"], r["lag"]) == (prompts, lag) and r["kl_seq"] > 1e-9]
        if of:
            wider = [(r["gain"] - r["mixed"]) / (r["gain"] - r["direct"]) for r in of]
            positive = [sum(r[name] > 0 for r in of) for name in ("direct", "mixed", "direct, look", "mixed, look")]
            kl = np.quantile([r["kl_seq"] for r in of], (0.1, 0.5, 0.9))
            print(prompts, lag, len(of), kl.round(3), np.quantile(wider, (0.1, 0.5, 0.9)).round(3), positive)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--prompts", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--lags", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--batches", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.trainer:
        samples.CONTROL_FROM = arm.CONTROL_FROM = 1  # the rule that keeps them from small batches is what is measured
        of_trainer(options)
        return
    found = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {"rows": []}
    there = {(r["horizon"], r["kl"], r["prompts"]): r for r in found["rows"]}
    cells = itertools.product(HORIZONS, DISTANCES, SIZES)
    rows = [there.get(cell) or measured(*cell, repetitions=options.repetitions) for cell in cells]
    found |= {"repetitions": options.repetitions, "rows": rows}
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for r in rows:
        print(
            r["horizon"],
            r["kl"],
            r["prompts"],
            *(f"{r[k] / r['direct']:.2f}" for k in ("control", "mixed")),
            r["mixed_false"],
        )


if __name__ == "__main__":
    main()
