"""Bias and variance of methods' gradients on a neural policy, against an oracle from large on-policy batches.

    python benchmarks/frontier_neural.py [--seeds 0 1] [--lengths 64 256] [--kl 1e-3 1e-2] [--jobs 1] [--json PATH]

The survey's Problem 1 conjectures that beyond 200 tokens

    P = <grad J, E g>^2 / (tr Var(g) + |E g - grad J|^2)

is largest for a unit of correction between token and sequence. `offdrift lab frontier` asks tabular policies, whose
gradient is exact; this asks a Qwen3 of 0.05 million parameters (`tiny-qwen3-draft`), rewarded for the share of digits in
an answer of exactly T tokens. mu has taken three policy-gradient steps from random weights; pi lies in the direction
of the next five, at the distance where the mean KL(mu || pi) of a token is --kl. A step has 64 answers, one to each of
64 prompts, and advantages R - b with one constant b. The oracle is the mean of steps that pi drew itself.

Beside rows of the method table: ratios of the last 8 and 64 tokens (`window`), and the token's ratio times the
other tokens' to a power (`power`: 0 is the token's ratio, 1 the sequence's). Products of means of independent halves are
free of the noise's own square; intervals of 95 % are bootstraps over steps, of mu and of the oracle. A seed takes
about four CPU minutes; goes on where PATH ends.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measure import in_processes, machine
from torch import Tensor, nn

from offdrift.batch_info import BatchInfo
from offdrift.engines import make_engine
from offdrift.engines.score import divergences, score
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import method
from offdrift.models import load_model
from offdrift.records.atomic import write_atomically
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments
from offdrift.stats import Mean, compare_all
from offdrift_lab.exact.frontier import family
from offdrift_lab.train.data.episodes import rollout
from offdrift_lab.train.data.tasks import find_task

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "frontier_neural.json"
ROWS = ("none", "token_is", "minpro", "segment_tis", "geo_is", "vespo", "full_is", "trm_max")
WINDOWS, POWERS = (8, 64), (0.25, 0.5)
STEP = 64
"""Answers of a step."""
TURNS, BOOTSTRAPS, Z = 8, 2000, (2.5, 97.5)
BETWEEN = ("prefix", "turn", "geometric", "variational", "window", "power")


def ratios(log_w: Tensor, segments: Segments) -> dict[str, Tensor]:
    """Weights of each token between its own ratio and its sequence's; no gradient."""
    before = segments.prefix_sum(log_w)
    whole, weights = segments.spread(segments.sum(log_w)), {}
    start = segments.spread(segments.cu_seqlens[:-1])
    for k in WINDOWS:
        edge = torch.arange(len(log_w)) - k
        earlier = torch.where(edge >= start, before[edge.clamp(min=0)], 0.0)
        weights[f"window {k}"] = (before - earlier).exp()
    return weights | {f"power {a:g}": (log_w + a * (whole - log_w)).exp() for a in POWERS}


def coefficients(drawn: Rollouts, logp: Tensor, logits: Tensor, advantages: Tensor, names: tuple[str, ...]) -> dict:
    """Minus the gradient of a step's summed loss by each token's log-prob, of every method."""
    horizon, count = int(drawn.lengths[0]), drawn.num_sequences
    cuts = [horizon // TURNS] * (TURNS - 1) + [horizon - horizon // TURNS * (TURNS - 1)]
    turns = Segments.from_lengths(torch.tensor(cuts * count))
    segments = Segments.from_lengths(drawn.lengths, turns=turns, group_ids=torch.zeros(count, dtype=torch.int64))
    exact = divergences(drawn, logits) if drawn.evidence is not None else {}
    result = {}
    for name in names:
        leaf, row = logp.detach().clone().requires_grad_(), replace(method(name), penalty=None)
        batch = LogProbs.pack(drawn.logp_rollout, leaf, leaf.detach(), segments=segments)
        about = BatchInfo(divergences=exact, rewards=drawn.rewards, observed="this_batch")
        mean_of_means = row.aggregate == "seq_mean_token_mean"
        loss = policy_loss(
            batch, row, segments.spread(advantages), about, normalizer=1.0 / horizon if mean_of_means else 1.0
        ).loss
        result[name] = -torch.autograd.grad(loss, leaf)[0]
    if names == ROWS:
        weights = ratios((logp.detach() - drawn.logp_rollout).double(), segments)
        result |= {name: (w * segments.spread(advantages)).float() for name, w in weights.items()}
    return result


def gradients(model: nn.Module, drawn: Rollouts, baseline: float, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The gradient of one step under every method, flat."""
    assert drawn.rewards is not None
    scores = score(model, drawn)
    parameters = [p for p in model.parameters() if p.requires_grad]
    pushed = coefficients(drawn, scores.logp, scores.logits, drawn.rewards - baseline, names)
    flat = {}
    for i, (name, c) in enumerate(pushed.items()):
        parts = torch.autograd.grad(scores.logp, parameters, c, retain_graph=i < len(pushed) - 1)
        flat[name] = torch.cat([x.flatten() for x in parts]) / drawn.num_sequences
    return flat


class Bed:
    """Prompts, sampling and reward, and the model whose weights change."""

    def __init__(self, seed: int) -> None:
        self.model, self.tokenizer = load_model("tiny-qwen3-draft", seed=seed)
        self.task = find_task("arithmetic", str(HERE.parent / "recipes" / "digits.py:digits"))
        self.seed, self.calls = seed, 0

    def draw(self, steps: int, length: int, evidence: str = "sampled") -> list[Rollouts]:
        """Steps that the present weights draw, of fresh prompts."""
        self.calls += 1
        seed = self.seed * 1_000 + self.calls
        problems = self.task.sample(steps * STEP, seed=seed)
        engine = make_engine("transformers", self.model, batch_size=256, evidence_limit_mib=8192)
        drawn = rollout(
            engine, problems, self.task, self.tokenizer, Sampling(max_tokens=length), samples=1, seed=seed,
            evidence=evidence,  # type: ignore[arg-type]
        )  # fmt: skip
        return [drawn.select(torch.arange(i * STEP, (i + 1) * STEP)) for i in range(steps)]

    def improved(self, steps: int, length: int = 64, lr: float = 1e-3) -> dict[str, Tensor]:
        """The weights after so many steps of Adam from the present ones."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        for _ in range(steps):
            (drawn,) = self.draw(1, length)
            flat, at = gradients(self.model, drawn, float(drawn.rewards.mean()), ("none",))["none"], 0  # type: ignore[union-attr]
            for p in self.model.parameters():
                p.grad = -flat[at : at + p.numel()].view_as(p).clone()
                at += p.numel()
            optimizer.step()
        return copy.deepcopy(self.model.state_dict())


@torch.no_grad()
def mean_kl(model: nn.Module, drawn: Rollouts) -> float:
    """Mean KL(mu || model) of a token, nats."""
    return float(divergences(drawn, score(model, drawn).logits)["kl_rollout_current"].lo.mean())


def moved_to(bed: Bed, start: dict[str, Tensor], end: dict[str, Tensor], drawn: Rollouts, kl: float) -> float:
    """Move the model from `start` towards `end`, or beyond, to a mean KL; returns the KL that it has there."""
    low, high = 0.0, 1.0

    def at(scale: float) -> float:
        bed.model.load_state_dict({n: start[n] + scale * (end[n] - start[n]) for n in start})
        return mean_kl(bed.model, drawn)

    while at(high) < kl and high < 64:
        high *= 2
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) < kl else (low, middle)
    return at(high)


def statistics(gram: np.ndarray, mine: np.ndarray, oracle: np.ndarray) -> tuple[float, float, float, float]:
    """|bias|^2 and tr Var in units of |grad J|^2, P in the same, and the cosine of E g with grad J.

    Args:
        gram: inner products of all steps' gradients.
        mine, oracle: rows of the method's steps and of the oracle's; a bootstrap repeats some.
    """

    def square(rows: np.ndarray) -> float:
        """Of the mean, without the noise's own square: products of different steps alone."""
        block = gram[np.ix_(rows, rows)]
        same = rows[:, None] == rows[None, :]
        return float(block[~same].mean())

    signal, own, cross = square(oracle), square(mine), float(gram[np.ix_(mine, oracle)].mean())
    total = float(gram[mine, mine].mean())
    bias, variance = max(own - 2 * cross + signal, 0.0), total - own
    return (
        bias / signal,
        variance / signal,
        cross**2 / (variance + bias) / signal,
        cross / math.sqrt(signal * max(own, 1e-30)),
    )


def compared(vectors: dict[str, Tensor], oracle: Tensor, seed: int) -> list[dict]:
    """Every method's numbers with intervals, and P relative to that of `token_is`."""
    names, steps = list(vectors), len(next(iter(vectors.values())))
    stacked = torch.cat([*vectors.values(), oracle]).double()
    gram = (stacked @ stacked.T).numpy()
    mine = {n: np.arange(i * steps, (i + 1) * steps) for i, n in enumerate(names)}
    own = np.arange(len(names) * steps, len(stacked))
    rng = np.random.default_rng(seed)
    draws = [(rng.integers(steps, size=steps), rng.integers(len(own), size=len(own))) for _ in range(BOOTSTRAPS)]
    sampled = {n: np.array([statistics(gram, mine[n][a], own[b]) for a, b in draws]) for n in names}
    rows = []
    for n in names:
        values, boot = statistics(gram, mine[n], own), sampled[n]
        relative = boot[:, 2] / sampled["token_is"][:, 2]
        ends = np.percentile(boot, Z, axis=0)
        row: dict = {"method": n, "family": family(method(n)) if n in ROWS else n.split()[0]}
        for i, key in enumerate(("bias2", "variance", "progress", "cosine")):
            row[key] = [values[i], float(ends[0, i]), float(ends[1, i])]
        whole = values[2] / statistics(gram, mine["token_is"], own)[2]
        row["over_token"] = [whole, *map(float, np.percentile(relative, Z))]
        rows.append(row)
    return rows


def measure(seed: int, length: int, kls: list[float], *, steps: int = 24) -> Iterator[dict]:
    """All drifts at one length: mu's steps are the same for all. pi draws twice as many for the oracle."""
    bed = Bed(seed)
    start = bed.improved(3)
    end = bed.improved(5)
    bed.model.load_state_dict(start)
    drawn = bed.draw(steps, length, "full")
    baseline = float(torch.cat([s.rewards for s in drawn]).mean())  # type: ignore[misc]
    for kl in kls:
        begun = time.process_time()
        reached = moved_to(bed, start, end, drawn[0], kl)
        each = [gradients(bed.model, s, baseline, ROWS) for s in drawn]
        vectors = {n: torch.stack([e[n] for e in each]) for n in each[0]}
        on_policy = bed.draw(2 * steps, length)
        oracle = torch.stack([gradients(bed.model, s, baseline, ("none",))["none"] for s in on_policy])
        table = compared(vectors, oracle, seed)
        returns = float(torch.cat([s.rewards for s in on_policy]).mean())  # type: ignore[misc]
        print(f"T = {length}, KL {reached:.3g}, seed {seed}: {time.process_time() - begun:.0f} CPU seconds", flush=True)
        for row in table:
            words = ", ".join(f"{k} {row[k][0]:.3g}" for k in ("bias2", "variance", "cosine"))
            low, high = row["over_token"][1:]
            relative = f"P / P(token_is) {row['over_token'][0]:.3f} ({low:.3f} to {high:.3f})"
            print(f"  {row['method']:12} {words}, {relative}", flush=True)
        yield {
            "seed": seed,
            "tokens": length,
            "asked_kl": kl,
            "kl": reached,
            "steps": steps,
            "return": baseline,
            "return_of_pi": returns,
            "methods": table,
        }


def measured(unit: tuple[int, int, list[float], int]) -> list[dict]:
    """`measure` of a seed, a length, mean KLs and a number of steps."""
    seed, length, kls, steps = unit
    return list(measure(seed, length, kls, steps=steps))


def pooled(rows: list[dict]) -> list[dict]:
    """Of every length, drift and method: P over that of `token_is`, the geometric mean over seeds with its interval.

    Student's of the logarithms; a method is compared with the token's ratio in every length and drift at once, and
    decided by Holm's procedure over all of them.
    """
    logs: dict[tuple[int, float, str], dict[int, float]] = {}
    for row in rows:
        for m in row["methods"]:
            key = (row["tokens"], row["asked_kl"], m["method"])
            logs.setdefault(key, {})[row["seed"]] = math.log(max(m["over_token"][0], 1e-9))
    keys = [key for key in logs if key[2] not in ("token_is", "trm_max")]  # the mask rejects nothing at these drifts
    decided = compare_all([(logs[key], dict.fromkeys(logs[key], 0.0)) for key in keys], larger="better")
    return [
        {
            "tokens": length,
            "kl": kl,
            "method": name,
            "seeds": c.difference.n,
            "over_token": [math.exp(x) if math.isfinite(x) else None for x in interval_of(c.difference)],
            "p_holm": c.p_adjusted,
            "verdict": c.verdict,
        }
        for (length, kl, name), c in zip(keys, decided, strict=True)
    ]


def interval_of(mean: Mean) -> tuple[float, float, float]:
    """Mean and ends, none of them beyond what `exp` takes."""
    return mean.mean, max(mean.low, -700.0), min(mean.high, 700.0) if math.isfinite(mean.high) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--kl", type=float, nargs="*", default=[1e-3, 1e-2])
    parser.add_argument("--steps", type=int, default=24, help="that mu draws; pi draws twice as many")
    parser.add_argument("--jobs", type=int, default=1, help="lengths and seeds at a time, each in a process")
    parser.add_argument("--json", type=Path, default=RESULTS, help="written after every length; what is in it is kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done: dict = {"machine": machine("transformers"), "step": STEP}
    done["rows"] = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    units = []
    for length in sorted(args.lengths, reverse=True):  # the longest first, so that no process waits for one at the end
        for seed in args.seeds:
            there = {row["asked_kl"] for row in done["rows"] if (row["seed"], row["tokens"]) == (seed, length)}
            if missing := [kl for kl in args.kl if kl not in there]:
                units.append((seed, length, missing, args.steps))
    for _, rows in in_processes(measured, units, args.jobs):
        done["rows"] += rows
        done["pooled"] = pooled(done["rows"])
        write_atomically(args.json, lambda partial: Path(partial).write_text(json.dumps(done, indent=1) + "\n"))
    for row in pooled(done["rows"]):
        ends = ", ".join("-" if x is None else f"{x:.3f}" for x in row["over_token"])
        print(
            f"T = {row['tokens']}, KL {row['kl']:g}, {row['method']:12} {ends} ({row['seeds']} seeds) {row['verdict']}"
        )


if __name__ == "__main__":
    main()
