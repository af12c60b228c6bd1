"""Which route to a certificate says most? Lower bounds on a gain that is known, from batches of several sizes.

    python -m benchmarks.certificate_routes [--repetitions 40]

In each world the current policy gains: rewards favor what it does more often. A route is a lower bound on the gain:

    direct       R (prod_t w_t - 1), averaged
    KL           the masked surrogate minus the bounds of accepted prefixes (docs/certificates.md, eq. 7)
    two-sided    the same, minus what it overstates where that is smaller (eq. 15): TRM as `certify` computes it
    variance     the same as KL with sd(R) sqrt(sum_t E[(w_<t - 1)^2 chi2(c_t)]) in place of the bounds (eq. 9)

To be estimated at all, the variance form needs two more limits, so that its terms are bounded: pi' is then mu also
from the first context on with w_<t > 2 or chi2 > 4 delta, and sequences that come there are rejected. It gets alpha
of its own here, taken from nobody. Writes `results/certificate_routes.json` and prints the table of docs/certificates.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from offdrift.certificate import TrustRegion, all_bounds, betting, tightest
from offdrift.certificate.certify import certify
from offdrift.certificate.confidence import Estimate
from offdrift_lab.exact.coverage import World
from offdrift_lab.exact.policy import divergences, perturbed, random_policies, token_kl

RESULTS = Path(__file__).parent / "results" / "certificate_routes.json"
ALPHA, PROMPTS = 0.05, 30
SIZES = (64, 256, 1024, 4096)
WORLDS = [
    (v, t, drift, rate)
    for v, t in ((2, 1), (3, 2), (3, 4), (2, 6))
    for drift in (0.1, 0.3, 1.0)
    for rate in (0.05, 0.5)
]
"""Vocabulary, tokens, standard deviation of the noise on logits (nats), and about how often an answer is right."""
LARGEST_PREFIX, LARGEST_CHI2 = 2.0, 4.0
"""Limits on w_<t, and on chi2 of a context in units of delta, of the variance form."""


def world(vocab: int, horizon: int, drift: float, rate: float) -> World:
    """Thirty prompts; the region holds every context, so that no route pays for rejection by KL."""
    g = torch.Generator().manual_seed(0)
    mu = random_policies(PROMPTS, vocab=vocab, horizon=horizon, generator=g)
    pi = perturbed(mu, scale=drift, generator=g)
    log_ratio = (pi.law() / mu.law()).log()
    liked = math.log(rate / (1 - rate)) + 3 * log_ratio / log_ratio.std()
    rewards = (torch.rand(log_ratio.shape, generator=g, dtype=torch.float64) < torch.sigmoid(liked)).double()
    region = TrustRegion(horizon=horizon, delta=float(divergences(mu, pi).kl_max.max()))
    law = torch.full((PROMPTS,), 1 / PROMPTS, dtype=torch.float64)
    return World(f"T = {horizon}", "", law, mu, pi, rewards, region, SIZES[0], 1)


def variance_terms(w: World) -> tuple[np.ndarray, np.ndarray]:
    """Of every sequence the sum in (9) up to where pi' becomes mu, and whether it never does."""
    vocab, horizon, delta = w.mu.vocab, w.mu.horizon, w.region.delta
    sequence = torch.arange(vocab**horizon)
    before = torch.ones(PROMPTS, len(sequence), dtype=torch.float64)
    inside, total = torch.ones_like(before, dtype=torch.bool), torch.zeros_like(before)
    for t, (mu, pi) in enumerate(zip(w.mu.levels, w.pi.levels, strict=True)):
        context, token = sequence // vocab ** (horizon - t), sequence // vocab ** (horizon - 1 - t) % vocab
        chi2 = ((pi - mu).square() / mu).sum(-1)[:, context]
        limits = (before <= LARGEST_PREFIX) & (chi2 <= LARGEST_CHI2 * delta) & (token_kl(mu, pi)[:, context] <= delta)
        inside = inside & limits
        total = total + torch.where(inside, (before - 1).square() * chi2, 0.0)
        before = before * (pi / mu)[:, context, token]
    return total.flatten().numpy(), inside.flatten().numpy()


def interval(x: np.ndarray, low: float, high: float, share: float, side: str) -> Estimate:
    """As `certify` takes it, with this share of alpha."""
    order = np.random.default_rng(0).permutation(len(x))
    return betting(x[order].clip(low, high), low=low, high=high, alpha=ALPHA * share, sides=side)


def routes(w: World, size: int, repetition: int, terms: np.ndarray, inside: np.ndarray) -> dict[str, float]:
    """The lower bound of every route from one batch, and each route's error."""
    rng = np.random.default_rng([size, repetition])
    rows = w.population.draw(w.law.numpy(), size, 1, rng)
    evidence = replace(w.population.evidence, columns=w.population.evidence.columns[torch.from_numpy(rows)])
    certificate, region = certify(evidence, alpha=ALPHA), w.region
    by_name = {g.name: g for g in certificate.guarantees}
    ends = certificate.estimates
    prefixes = all_bounds(horizon=region.horizon, delta=region.delta, kl_seq=ends["prefix_kl"].high, constants="sharp")
    by_kl = replace(by_name["TRM"], error=min(tightest(prefixes).value, 2 * ends["prefix_shift"].high))
    host, kept = evidence.to_host(), inside[rows]
    rewards, horizon = host["reward"] * kept, region.horizon
    surrogate = interval(rewards * host["excess"], -float(horizon), math.inf, 1 / 16, "low").low
    lost = interval(host["reward"] * ~kept, 0.0, 1.0, 1 / 16, "high").high
    share = min(0.5, interval(rewards, 0.0, 1.0, 1 / 64, "high").high)
    most = horizon * (LARGEST_PREFIX - 1) ** 2 * LARGEST_CHI2 * region.delta
    spread = interval(terms[rows], 0.0, most, 1 / 64, "high").high
    error = math.sqrt(share * (1 - share) * spread)
    return {
        "direct": certificate.gain_of(by_name["direct"]),
        "KL": certificate.gain_of(by_kl),
        "two-sided": certificate.gain_of(by_name["TRM"]),
        "variance": surrogate - error - lost,
        "KL, error": by_kl.error,
        "two-sided, error": by_name["TRM"].error,
        "variance, error": error,
    }


def measure(repetitions: int, tell: Callable[[str], None] = print) -> list[dict]:
    """One row per world and size: medians over batches, and how many batches certify or say a falsehood."""
    found = []
    for settings in WORLDS:
        w = world(*settings)
        terms, inside = variance_terms(w)
        for size in SIZES:
            each = [routes(w, size, i, terms, inside) for i in range(repetitions)]
            names = [n for n in each[0] if "," not in n]
            best = [max(names, key=e.__getitem__) for e in each]
            row = dict(zip(("vocab", "horizon", "drift", "rate"), settings, strict=True))
            row |= {"prompts": size, "repetitions": repetitions, "gain": w.gain}
            row["median"] = {n: float(np.median([e[n] for e in each])) for n in each[0]}
            row["certifies"] = {n: sum(e[n] > 0 for e in each) for n in names}
            row["best"] = {n: best.count(n) for n in names}
            row["false"] = {n: sum(e[n] > w.gain for e in each) for n in names}
            found.append(row)
            tell(f"{settings} {size}: {row['median']}")
    return found


def table(found: list[dict]) -> str:
    """By size: batches in which each route is the best, or certifies; and the median error over that by KL."""
    names = list(found[0]["best"])
    lines = ["| prompts | batches | " + " | ".join(f"{n}: best, certifies" for n in names) + " | error / that by KL |"]
    lines.append("|--:|" + "--:|" * (len(names) + 2))
    for size in SIZES:
        rows = [r for r in found if r["prompts"] == size]
        cells = [f"{sum(r['best'][n] for r in rows)}, {sum(r['certifies'][n] for r in rows)}" for n in names]
        long = [r["median"] for r in rows if r["horizon"] > 1]
        shares = [f"{np.median([m[f'{n}, error'] / m['KL, error'] for m in long]):.2f} ({n})" for n in names[2:]]
        lines.append(
            f"| {size:,} | {sum(r['repetitions'] for r in rows):,} | {' | '.join(cells)} | {', '.join(shares)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--render", action="store_true", help="only print the table again")
    options = parser.parse_args()
    if not options.render:
        RESULTS.write_text(json.dumps(measure(options.repetitions), indent=1) + "\n", encoding="utf-8")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    print(table(found))
    wrong = {n: sum(r["false"][n] for r in found) for n in found[0]["false"]}
    print(f"lower bounds above the gain: {wrong} of {sum(r['repetitions'] for r in found):,} batches")


if __name__ == "__main__":
    main()
