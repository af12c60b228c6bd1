"""What a compressed KV cache costs a policy, what its replay takes off the mismatch, and what a run learns.

    python benchmarks/kv.py [--budgets 8 10 12 14 16] [--seeds 0 1 2] [--batches 12] [--repeats 3]
        [--only drift|speed|train] [--json PATH]

`drift`: the warm-started tiny model answers sums with caches of several budgets; both sides have its weights in
float32. Per policy and budget: reward, share of keys that tokens saw, bytes recorded per token, and the exact
KL(rollout || trainer) with and without replay. `speed`: long responses with a whole and with compressed caches,
seconds and the most memory that drawing took. `train`: `recipes/kv.toml` for every seed. A JSON file that exists keeps
the rows of other parts and seeds, so that each can be a run of its own.
"""

import argparse
import functools
import json
import tempfile
from pathlib import Path

import torch
from measure import interleaved_medians, machine, peak_mib

from offdrift.engines.hf import TransformersEngine
from offdrift.engines.retention import retention_sums
from offdrift.models import load_model
from offdrift.records.provenance import Eviction, Sampling
from offdrift_lab.train.data.episodes import rollout
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.data.warmstart import warm_start
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.old_policy import score_batch
from offdrift_lab.train.settings.recipe import load_recipe

RECIPE = Path(__file__).parents[1] / "recipes" / "kv.toml"
LAST = 8
"""Batches at a run's end over which its metrics are averaged."""


def eviction_of(policy: str, budget: int) -> Eviction:
    return Eviction(policy, budget, min(4, budget // 2) if policy == "window" else budget // 2)


def drift(budgets, steps=900, prompts=64, samples=8):
    """Rows by policy and budget."""
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    task, sampling = find_task("arithmetic"), Sampling(max_tokens=14, stop_token_ids=(1,))
    model = warm_start(model, tokenizer, task, steps=steps, seed=0).eval()
    problems = task.sample(prompts, seed=0, split="train")
    for policy in ("window", "attention"):
        for budget in budgets:
            engine = TransformersEngine(model, eviction=eviction_of(policy, budget), batch_size=256)
            options = {"samples": samples, "seed": 1, "max_turns": 1, "evidence": "full"}
            drawn = rollout(engine, problems, task, tokenizer, sampling, **options)
            sums = {name: float(x) for name, x in retention_sums(drawn).items()}
            row = {"part": "drift", "policy": policy, "budget": budget, "tokens": len(drawn.tokens)}
            row |= {"reward": float(drawn.rewards.mean()), "kept_frac": sums["kv/kept"] / sums["kv/pairs"]}
            row["bytes_per_token"] = sums["kv/bytes"] / len(drawn.tokens)
            for name, batch in (("without", drawn.with_(retention=None)), ("replayed", drawn)):
                scores = score_batch(model, batch, token_budget=8192, exact=True)
                kl = scores.divergences["kl_rollout_old"].lo.double()
                log_ratio = (scores.logp - drawn.logp_rollout).double()
                row |= {f"kl_{name}_mean": float(kl.mean()), f"kl_{name}_max": float(kl.max())}
                row |= {f"abs_log_ratio_{name}_max": float(log_ratio.abs().max())}
            yield row


def speed(repeats, tokens=240, responses=16, budget=32):
    """Rows by cache, of responses that all have as many tokens."""
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    prompts = [prompt_ids(p, tokenizer) for p in find_task("arithmetic").sample(responses, seed=0, split="train")]
    caches = {"whole": None, "window": eviction_of("window", budget), "attention": eviction_of("attention", budget)}
    draws = {}
    for name, eviction in caches.items():
        engine = TransformersEngine(model, eviction=eviction)
        draws[name] = functools.partial(engine.generate, prompts, Sampling(max_tokens=tokens), seed=0)
    seconds = interleaved_medians(draws, repeats=repeats)
    for name, draw in draws.items():
        row = {"part": "speed", "cache": name, "responses": responses, "tokens": tokens, "seconds": seconds[name]}
        yield row | {"budget": None if name == "whole" else budget, "peak_mib": peak_mib(draw)}


def trained(seed, batches):
    """Rows by arm of the recipe."""
    recipe = load_recipe(RECIPE, changes=[f"seed={seed}", f"batches={batches}", f"log.eval_every={batches}"])
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder) / "run")
        for name in recipe.arms:
            arm = Path(folder) / "run" / "arms" / name
            metrics, evals = (
                [json.loads(x) for x in (arm / f).read_text().splitlines()] for f in ("metrics.jsonl", "eval.jsonl")
            )
            row = {"part": "train", "seed": seed, "arm": name, "batches": batches}
            row |= {"dense_before": evals[0]["reward"], "dense_after": evals[-1]["reward"]}
            row |= {"compressed_before": metrics[0]["reward/mean"]}
            row["compressed_after"] = sum(m["reward/mean"] for m in metrics[-LAST:]) / len(metrics[-LAST:])
            for key in (
                "divergence/kl_rollout_current_mean",
                "full/ess_frac",
                "kv/kept_frac",
                "kv/distill",
                "kv/kl_dense",
            ):
                if metrics[0].get(key) is not None:
                    row |= {f"{key} first": metrics[0][key], f"{key} last": metrics[-1][key]}
            row["seconds"] = sum(m["throughput/seconds"] for m in metrics)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 10, 12, 14, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["drift", "speed", "train"])
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"drift": lambda: drift(args.budgets), "speed": lambda: speed(args.repeats)}
    parts["train"] = lambda: (row for seed in args.seeds for row in trained(seed, args.batches))
    key = lambda row: tuple(row.get(k) for k in ("part", "policy", "budget", "cache", "seed", "arm"))  # noqa: E731
    kept = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    rows = {key(row): row for row in kept}
    for name, part in parts.items():
        for row in part() if args.only in (None, name) else ():
            rows[key(row)] = row
            print(json.dumps(row), flush=True)
            if args.json:  # at once: a run that is cut short keeps what it has
                args.json.write_text(json.dumps({"rows": list(rows.values()), **machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
