"""Distance of certificates with control variates from a gain that is known, and how often they are false.

    python benchmarks/certificate_control.py [--repetitions 40]

The worlds of benchmarks/certificate_fresh.py: answers of T tokens of two kinds, whose gain is a finite sum. Compared: ratios
alone, control variates alone, and both mixed, which is what `offdrift certify` takes where the evidence is exact; all with
the direct guarantee's share of alpha = .05. Writes results/certificate_control.json.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from benchmarks.certificate_fresh import ALPHA, ROLLOUT, at_distance

from offdrift.certificate import betting
from offdrift.certificate.confidence import betting_any
from offdrift.certificate.control import LOWEST, SHARE, control_sums, ratio_means
from offdrift.certificate.samples import SHARES
from offdrift.segments import Segments

RESULTS = Path(__file__).parent / "results" / "certificate_control.json"
HORIZONS, DISTANCES, SIZES = (16, 64), (0.02, 0.19, 0.83), (1024, 4096)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [measured(t, kl, n, repetitions=options.repetitions) for t in HORIZONS for kl in DISTANCES for n in SIZES]
    found = {"repetitions": options.repetitions, "rows": rows}
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
