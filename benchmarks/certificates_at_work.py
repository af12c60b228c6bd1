"""How often does a certificate speak on real training runs, which route wins, and how much does it leave out?

    python benchmarks/certificates_at_work.py [--worlds sums digits-8] [--seeds 0 1] [--lags] [--jobs 1] [--json PATH]

A tiny Qwen3 trains by `offdrift train`, never stale. Of two versions of its weights the earlier, mu, draws one answer
to each of several thousand fresh prompts, recording its whole distribution; the later, pi, is certified
by `offdrift.certificate.certify` from samples of 32 to 2048 of these prompts, cut so that no two share one. The truth
is J(pi) - J(mu) on further prompts, answered by both: with its interval of 95 %, paired by prompt.

Worlds: sums of three numbers after a warm start (14 tokens, rewards 0 and 1, lr 1e-4), and the share of digits in an
answer, learned from scratch (8, 32 and 128 tokens, rewards between, lr 3e-4). Lags of 1 to 16 updates. One
thread a run, about three CPU minutes a seed; goes on where PATH ends. With --lags, only this: the mean and the largest
KL(mu || pi) of a token between the weights after 8 updates and those 1 to 64 updates later (sums; 512 answers).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from measure import in_processes, machine
from torch import Tensor, nn

from offdrift.certificate import TrustRegion
from offdrift.certificate.batch import COLUMNS as COLUMNS
from offdrift.certificate.batch import BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.engines import make_engine
from offdrift.engines.score import chunks, divergences, score
from offdrift.logprobs import LogProbs
from offdrift.records.atomic import write_atomically
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import Rollouts
from offdrift_lab.train.data.episodes import rollout
from offdrift_lab.train.loop.arm import start_arm
from offdrift_lab.train.loop.context import RunContext, begin, set_up
from offdrift_lab.train.loop.loop import train_batches
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.settings.recipe import check_recipe

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "certificates_at_work.json"
ALPHA, DELTA = 0.05, 0.05
SIZES = (32, 128, 512, 1024, 2048)
"""Prompts of a certificate."""
REPETITIONS = 16
"""Certificates of one size and pair, at most; they share no prompt."""
PAIRS = [(0, 1), (0, 4), (0, 16), (8, 9), (8, 12)]
"""Versions of the weights, mu and pi: lags of 1, 4 and 16 updates."""
LAGS = (1, 2, 4, 8, 16, 32, 64)
LAG_FROM, LAG_PROMPTS = 8, 512
Z95 = 1.96


@dataclass(frozen=True)
class World:
    """A task of one response length."""

    tokens: int
    recipe: Mapping[str, object]
    pool: int
    """Prompts that mu answers, for certificates."""
    fresh: int
    """Prompts that both answer, for the truth."""
    prompts: int = 16
    samples: int = 4
    """Of a batch of training."""


SUMS = {"task": "arithmetic", "warm_start": {"steps": 900}, "optim": {"lr": 1e-4}}
DIGITS = {
    "reward": str(HERE.parent / "recipes" / "digits.py:digits"),
    "warm_start": {"steps": 0},
    "optim": {"lr": 3e-4},
}
WORLDS = {
    "sums": World(14, SUMS, 2048, 2048, prompts=32, samples=8),
    "digits-8": World(8, DIGITS, 2048, 2048),
    "digits-32": World(32, DIGITS, 2048, 512),
    "digits-128": World(128, DIGITS, 1024, 256),
}


def trained(
    world: World, seed: int, folder: Path, wanted: Collection[int]
) -> tuple[RunContext, dict[int, dict[str, Tensor]]]:
    """A run of `offdrift train`, and its weights after these numbers of updates."""
    content = {
        "name": "at-work",
        "model": "tiny-qwen3",
        "seed": seed,
        "batches": max(wanted),
        "rollout": {
            "prompts": world.prompts,
            "samples": world.samples,
            "max_tokens": world.tokens,
            "dtype": "float32",
            "evidence": "sampled",
        },
        "log": {"eval_every": 999, "eval_prompts": 32, "tokens": False, "trackers": [], "checkpoint_every": 999},
        "arms": {"none": {"method": "none"}},
        **world.recipe,
    }
    recipe, at = check_recipe(content, source="benchmark"), RunFolder(folder)
    head = begin(recipe, at, False)
    weights: dict[int, dict[str, Tensor]] = {}
    run = set_up(recipe, at, lambda event: None)
    at.create(head | {"trained_return": {}})
    arm, source = start_arm(run, "none", resume=False)

    def keep(event) -> None:
        if arm.version in wanted and arm.version not in weights:
            weights[arm.version] = copy.deepcopy(arm.model.state_dict())

    keep(None)
    arm.run = replace(run, watch=keep)
    train_batches(arm, source)
    source.close()
    return run, weights


@torch.no_grad()
def evidence(drawn: Rollouts, model: nn.Module, horizon: int) -> BatchEvidence:
    """What `offdrift certify` would keep of the answers; every prompt is a draw of its own."""
    region, parts, order = TrustRegion(horizon=horizon, delta=DELTA), [], []
    for piece in chunks(drawn, token_budget=16384):
        part = drawn.select(piece)
        scores = score(model, part)
        packed = LogProbs.pack(part.logp_rollout, scores.logp, segments=part.segments)
        exact = divergences(part, scores.logits)
        parts.append(BatchEvidence.of(packed, part.rewards, region=region, divergences=exact))
        order.append(piece)
    whole = BatchEvidence.merge_all(parts)
    back = torch.cat(order).argsort()
    return replace(whole, columns=whole.columns[back], group_ids=torch.arange(len(back)))


def certificates(batch: BatchEvidence, truth: tuple[float, float, float]) -> list[dict]:
    """Of every size the certificates of disjoint samples: what each route says, and what is wrong."""
    rows = []
    for size in (n for n in SIZES if n <= len(batch)):
        each, about = [], []
        for i in range(min(REPETITIONS, len(batch) // size)):
            rows_of = torch.arange(i * size, (i + 1) * size)
            sample = replace(batch, columns=batch.columns[rows_of], group_ids=rows_of)
            proof = certify(sample, alpha=ALPHA)
            gains = {g.name: proof.gain_of(g) for g in proof.guarantees}
            normal = proof.asymptotic["gain"].low
            each.append({"all": proof.gain_low, "normal": normal, **gains})
            paper = certify(sample, alpha=ALPHA, constants="paper")
            each[-1]["paper"] = max(
                (paper.gain_of(g) for g in paper.guarantees if g.name != "direct"), default=-math.inf
            )
            about.append((proof.estimates["acceptance"].mean, proof.unseen))
        names = list(each[0])
        best = [max(("direct", "TRM"), key=lambda n, e=e: e.get(n, -math.inf)) for e in each]
        rows.append(
            {
                "prompts": size,
                "certificates": len(each),
                "median": {n: float(np.median([e[n] for e in each])) for n in names},
                "certifies": {n: sum(e[n] > 0 for e in each) for n in names},
                "best": {n: best.count(n) for n in ("direct", "TRM")},
                "above_truth": {n: sum(e[n] > truth[2] for e in each) for n in names},
                "acceptance": float(np.mean([a for a, _ in about])),
                "unseen": None if about[0][1] is None else float(about[0][1]),
            }
        )
    return rows


def drift(batch: BatchEvidence) -> dict[str, float]:
    """Measured over the whole pool; nats."""
    host, tokens = batch.to_host(), float(batch.column("length").sum())
    reward = torch.from_numpy(host["reward"].copy())
    ratio = torch.from_numpy(np.exp(host["log_product"]))
    return {
        "kl_token": float(host["kl_total"].sum()) / tokens,
        "kl_seq": float(host["kl_total"].mean()),
        "kl_max": float(host["kl_high"].max()),
        "tv_max": float(host["tv_high"].max()),
        "length": tokens / len(batch),
        "surrogate": float((reward * torch.from_numpy(host["excess"].copy())).mean()),
        "gain_by_ratios": float((reward * (ratio - 1)).mean()),
        "reward_sd": float(reward.std()),
    }


def answers(
    run: RunContext, weights: dict[str, Tensor], world: World, problems: list, seed: int, kind: str
) -> Rollouts:
    """One answer to each problem by the transformers engine, as the run draws."""
    run.model.load_state_dict(weights)
    engine = make_engine("transformers", run.model, dtype="float32", batch_size=256, evidence_limit_mib=4096)
    sampling = replace(run.sampling, max_tokens=world.tokens)
    assert isinstance(sampling, Sampling)
    return rollout(engine, problems, run.task, run.tokenizer, sampling, samples=1, seed=seed, evidence=kind)  # type: ignore[arg-type]


def measure(name: str, seed: int) -> list[dict]:
    """All pairs of one run."""
    world, begun, rows = WORLDS[name], time.process_time(), []
    with tempfile.TemporaryDirectory() as folder:
        run, weights = trained(world, seed, Path(folder), {version for pair in PAIRS for version in pair})
    problems = run.task.sample(world.pool + world.fresh, seed=1_000_000 + seed, split="train")
    pool, fresh = problems[: world.pool], problems[world.pool :]
    truths = {}
    for version, w in weights.items():
        rewards = answers(run, w, world, fresh, 7_000 + seed * 100 + version, "sampled").rewards
        assert rewards is not None
        truths[version] = rewards.double()
    for first in sorted({mu for mu, _ in PAIRS}):
        drawn = answers(run, weights[first], world, pool, 9_000 + seed * 100 + first, "full")
        for last in (pi for mu, pi in PAIRS if mu == first):
            run.model.load_state_dict(weights[last])
            batch = evidence(drawn, run.model, world.tokens)
            gained = truths[last] - truths[first]
            mean, se = float(gained.mean()), float(gained.std()) / math.sqrt(len(gained))
            truth = (mean, mean - Z95 * se, mean + Z95 * se)
            rows.append(
                {
                    "world": name,
                    "seed": seed,
                    "tokens": world.tokens,
                    "mu": first,
                    "pi": last,
                    "return_of_mu": float(truths[first].mean()),
                    "truth": truth,
                    "drift": drift(batch),
                    "sizes": certificates(batch, truth),
                }
            )
            print(
                f"{name} seed {seed} {first}->{last}: gain {mean:+.3f} +- {Z95 * se:.3f}, KL_seq "
                f"{rows[-1]['drift']['kl_seq']:.3g}, lower bound by prompts "
                + ", ".join(f"{r['prompts']}: {r['median']['all']:+.3f}" for r in rows[-1]["sizes"]),
                flush=True,
            )
    print(f"{name} seed {seed}: {time.process_time() - begun:.0f} CPU seconds", flush=True)
    return rows


def measured(unit: tuple[str, int]) -> list[dict]:
    """`measure` of a world and a seed."""
    return measure(*unit)


def lags(seed: int) -> list[dict]:
    """Drift between weights that are some updates apart, of one run."""
    world, rows = replace(WORLDS["sums"], prompts=16, samples=4), []
    with tempfile.TemporaryDirectory() as folder:
        run, weights = trained(world, seed, Path(folder), {LAG_FROM, *(LAG_FROM + lag for lag in LAGS)})
    problems = run.task.sample(LAG_PROMPTS, seed=1_000_000 + seed, split="train")
    drawn = answers(run, weights[LAG_FROM], world, problems, 9_000 + seed, "full")
    for lag in LAGS:
        run.model.load_state_dict(weights[LAG_FROM + lag])
        rows.append({"seed": seed, "lag": lag, **drift(evidence(drawn, run.model, world.tokens))})
        print(f"lag {lag}, seed {seed}: KL {rows[-1]['kl_token']:.3g}, largest {rows[-1]['kl_max']:.3g}", flush=True)
    return rows


BINS = ((0.0, 0.1), (0.1, 0.5), (0.5, 2.0), (2.0, math.inf))
"""KL of whole sequences, nats."""


def table(rows: list[dict]) -> str:
    """What was seen: by prompts and drift, by prompts and route, and what certificates leave out of the truth."""
    better = [r for r in rows if r["truth"][1] > 0]
    pairs = [(r, s) for r in better for s in r["sizes"]]
    lines = ["pairs that gain (95 %): " + f"{len(better)} of {len(rows)}", "", "certified, by prompts and KL_seq:"]
    for size in SIZES:
        cells = []
        for low, high in BINS:
            of = [s for r, s in pairs if s["prompts"] == size and low <= r["drift"]["kl_seq"] < high]
            cells.append(f"{sum(s['certifies']['all'] for s in of)}/{sum(s['certificates'] for s in of)}")
        lines.append(f"  {size:5} " + "  ".join(f"[{a:g}, {b:g}) {c}" for (a, b), c in zip(BINS, cells, strict=True)))
    lines += ["", "by world:"]
    for name in WORLDS:
        cells = []
        for size in SIZES:
            of = [s for r, s in pairs if s["prompts"] == size and r["world"] == name]
            cells.append(f"{size}: {sum(s['certifies']['all'] for s in of)}/{sum(s['certificates'] for s in of)}")
        lines.append(f"  {name:11} " + "  ".join(cells))
    lines += [
        "",
        "routes, all pairs: certificates, certified by all, direct, TRM, paper, normal; best direct, TRM; above truth",
    ]
    for size in SIZES:
        of = [s for r in rows for s in r["sizes"] if s["prompts"] == size]
        sums = {n: sum(s["certifies"][n] for s in of) for n in ("all", "direct", "TRM", "paper", "normal")}
        best = {n: sum(s["best"][n] for s in of) for n in ("direct", "TRM")}
        above = {n: sum(s["above_truth"][n] for s in of) for n in sums}
        lines.append(f"  {size:5} {sum(s['certificates'] for s in of)} {[*sums.values()]} {[*best.values()]} {above}")
    lines += ["", "lower bound / true gain, median over pairs that gain, by prompts and KL_seq:"]
    for size in SIZES:
        cells = []
        for low, high in BINS:
            of = [
                s["median"]["all"] / r["truth"][0]
                for r, s in pairs
                if s["prompts"] == size and low <= r["drift"]["kl_seq"] < high
            ]
            cells.append(f"[{low:g}, {high:g}) {np.median(of):+.2f} ({len(of)})" if of else "-")
        lines.append(f"  {size:5} " + "  ".join(cells))
    wrong = [
        (r["world"], r["seed"], r["mu"], r["pi"])
        for r in rows
        if r["truth"][2] < 0
        for s in r["sizes"]
        if s["certifies"]["all"]
    ]
    lines += ["", f"certified although the truth is below 0 (95 %): {wrong or 'none'}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process")
    parser.add_argument("--json", type=Path, default=RESULTS, help="written after every run; runs in it are kept")
    parser.add_argument("--lags", action="store_true", help="only the drift by lag")
    parser.add_argument("--render", action="store_true", help="only print the table again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done: dict = {"machine": machine("transformers"), "alpha": ALPHA, "delta": DELTA, "rows": [], "lags": []}
    if args.json.exists():
        stored = json.loads(args.json.read_text())
        done |= {"rows": stored["rows"], "lags": stored.get("lags", [])}

    if args.render:
        print(table(done["rows"]))
        return

    def store() -> None:
        write_atomically(args.json, lambda partial: Path(partial).write_text(json.dumps(done, indent=1) + "\n"))

    if args.lags:
        missing = [seed for seed in args.seeds if not any(row["seed"] == seed for row in done["lags"])]
        for _, rows in in_processes(lags, missing, args.jobs):
            done["lags"] += rows
            store()
        return
    there = {(row["world"], row["seed"]) for row in done["rows"]}
    units = [(name, seed) for seed in args.seeds for name in args.worlds if (name, seed) not in there]
    for _, rows in in_processes(measured, units, args.jobs):
        done["rows"] += rows
        store()
    print(table(done["rows"]))


if __name__ == "__main__":
    main()
