"""Ratios of rollouts, or fresh answers of both policies: which lower bound on a gain that is known is closer?

    python -m benchmarks.certificate_fresh [--repetitions 100]

Answers of T tokens of two kinds; the rollout policy draws the first with probability .3, the current one more often.
A prompt is right from a number of such tokens on: a common one, or one standard deviation more or less. All
expectations are finite sums. The same number of prompts for both, one answer of each policy that answers. Writes
`results/certificate_fresh.json` and prints the table of docs/certificates.md.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from offdrift.certificate import betting
from offdrift.certificate.samples import SHARES

RESULTS = Path(__file__).parent / "results" / "certificate_fresh.json"
ALPHA, ROLLOUT = 0.05, 0.3
HORIZONS, DISTANCES, SIZES = (16, 128), (0.02, 0.19, 0.83, 2.0), (256, 1024, 4096)
"""Tokens, KL of sequences in nats, and prompts."""


@dataclass(frozen=True)
class Row:
    """Mean distances of the lower ends from the gain, and shares that certify one."""

    horizon: int
    kl: float
    prompts: int
    gain: float
    direct: float
    fresh: float
    direct_certified: float
    fresh_certified: float


def kl_of(current: float, horizon: int) -> float:
    """KL of sequences between the rollout policy and one that draws the first kind with this probability."""
    p, q = ROLLOUT, current
    return horizon * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))


def at_distance(kl: float, horizon: int) -> float:
    """The larger probability at which the KL of sequences is `kl`, by bisection."""
    low, high = ROLLOUT, 1 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if kl_of(middle, horizon) < kl else (low, middle)
    return low


def measured(horizon: int, kl: float, prompts: int, *, repetitions: int) -> Row:
    """Both routes on seeded batches of one world."""
    g, current = np.random.default_rng(0), at_distance(kl, horizon)
    deviation = math.sqrt(horizon * ROLLOUT * (1 - ROLLOUT))
    needed = int(ROLLOUT * horizon + 0.6 * deviation) + 1 + np.array([-1, 0, 1]) * max(1, int(deviation))
    chance = {p: _returns(p, horizon, needed) for p in (ROLLOUT, current)}
    gain = chance[current] - chance[ROLLOUT]
    more, less = math.log(current / ROLLOUT), math.log((1 - current) / (1 - ROLLOUT))
    lows: dict[str, list[float]] = {"direct": [], "fresh": []}
    for _ in range(repetitions):
        hard = needed[g.integers(0, len(needed), prompts)]
        old, again, new = (g.binomial(horizon, p, prompts) for p in (ROLLOUT, ROLLOUT, current))
        ratio = np.exp(old * more + (horizon - old) * less)
        share = ALPHA * SHARES["gain"]
        x = np.where(old >= hard, ratio - 1, 0.0)
        lows["direct"].append(betting(x, low=-1.0, high=math.inf, alpha=share, sides="low").low)
        paired = (new >= hard).astype(float) - (again >= hard)
        lows["fresh"].append(betting(paired, low=-1.0, high=1.0, alpha=ALPHA, sides="low").low)
    distance = {k: gain - float(np.mean(x)) for k, x in lows.items()}
    certified = {f"{k}_certified": float(np.mean(np.array(x) > 0)) for k, x in lows.items()}
    return Row(horizon, kl, prompts, gain, **distance, **certified)


def _returns(chance: float, horizon: int, needed: np.ndarray) -> float:
    """Mean over prompts of the probability of at least so many tokens of the first kind."""
    law = [math.comb(horizon, k) * chance**k * (1 - chance) ** (horizon - k) for k in range(horizon + 1)]
    return float(np.mean([sum(law[max(0, n) :]) for n in needed]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=100)
    repetitions = parser.parse_args().repetitions
    rows = [measured(t, kl, n, repetitions=repetitions) for t in HORIZONS for kl in DISTANCES for n in SIZES]
    RESULTS.write_text(json.dumps({"repetitions": repetitions, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    print(
        "| T | KL of sequences | prompts | gain | direct, below it by | fresh, below it by | fresh / direct | certify |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for r in rows:
        both = f"{r.direct_certified:.2f}, {r.fresh_certified:.2f}"
        cells = (r.horizon, r.kl, f"{r.prompts:,}", f"{r.gain:.3f}", f"{r.direct:.3f}", f"{r.fresh:.3f}")
        print(f"| {' | '.join(map(str, cells))} | {r.fresh / r.direct:.2f} | {both} |")


if __name__ == "__main__":
    main()
