"""What fused rollouts cost and teach, by what is made of their ratio: the arms of recipes/fusion.toml, several seeds.

    python benchmarks/fusion.py [--seeds 0 1 2] [--arms NAME ...] [--set KEY=VALUE ...] [--json PATH]

Student and teacher are those of the recipe at seed 0, warm-started once; a seed decides prompts and draws. Per arm and
seed: held-out reward before and after, mean training reward, drift, and on which side of PPO's interval the ratios to
the mixture lie when a token is first trained on. What the file of --json already has is not measured again.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from statistics import mean, stdev

import pyarrow.parquet as pq
import torch
from measure import machine

from offdrift.models import load_model, save_for_engine
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.data.warmstart import warm_start
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import ArmFolder
from offdrift_lab.train.settings.recipe import load_recipe

RECIPE = Path(__file__).parents[1] / "recipes" / "fusion.toml"


def sides(files: list[Path]) -> dict[str, float]:
    """Shares of tokens by pi / mu when they are first trained on, and of those whose loss PPO's clip at 0.2 would cut."""
    columns = {"logp": [], "logp_rollout": [], "advantages": []}
    for file in files:
        table = pq.read_table(file)
        for name, parts in columns.items():
            parts.append(torch.tensor(table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)))
    logp, log_mu, advantage = (torch.cat(parts).double() for parts in columns.values())
    w = (logp - log_mu).exp()
    shares = {
        "below": w < 0.8,
        "above": w > 1.2,
        "above_cap": w > 3,
        "clipped_low": (w < 0.8) & (advantage < 0),
        "clipped_high": (w > 1.2) & (advantage > 0),
    }
    return {name: float(share.double().mean()) for name, share in shares.items()} | {"largest": float(w.max())}


def measured(arm: ArmFolder, summary: dict) -> dict[str, float]:
    """Numbers of an arm of a run."""
    metrics = arm.rows("metrics")
    late = metrics[-len(metrics) // 4 :]
    return {
        "before": summary["reward_before"],
        "after": summary["reward_after"],
        "train_reward": mean(m["reward/mean"] for m in metrics),
        "train_reward_late": mean(m["reward/mean"] for m in late),
        "kl_first": metrics[0]["divergence/kl_rollout_current_mean"],
        "mix_kl_first": metrics[0].get("fusion/kl_mean") or 0.0,
        "alpha_first": metrics[0].get("fusion/alpha_mean") or 0.0,
        "kl": mean(m["divergence/kl_rollout_current_mean"] for m in metrics),
        "ess": mean(m["full/ess_frac"] for m in metrics),
        "clipped": mean(m.get("objective/clip_frac_active") or 0.0 for m in metrics),
        "grad_norm_max": max(m["optim/grad_norm"] for m in metrics),
        "seconds": sum(m["throughput/seconds"] for m in metrics),
        "draw_seconds": sum(m.get("throughput/draw_seconds", 0.0) for m in metrics),
        **sides(sorted((arm.path / "log").glob("*.parquet"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", help="some of the recipe's")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to the recipe")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPE, changes=args.set)
    assert recipe.fusion is not None
    chosen = {name: recipe.arms[name] for name in args.arms or recipe.arms}
    rows: list[dict] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text())["rows"]
    with tempfile.TemporaryDirectory() as folder:
        starts = {}
        for name, source, start in (
            ("student", recipe.model, recipe.warm_start),
            ("teacher", recipe.fusion.teacher, recipe.fusion.warm_start),
        ):
            model, tokenizer = load_model(source, seed=0)
            options = {"steps": start.steps, "batch_size": start.batch_size, "lr": start.lr, "target": start.target}
            warm_start(model, tokenizer, find_task(recipe.task), **options, seed=0)
            starts[name] = str(Path(folder) / name)
            save_for_engine(model, tokenizer, starts[name])
        none = recipe.warm_start.model_copy(update={"steps": 0})
        teacher = recipe.fusion.model_copy(update={"teacher": starts["teacher"], "warm_start": none})
        start = {"model": starts["student"], "warm_start": none, "fusion": teacher}
        start["log"] = recipe.log.model_copy(update={"trackers": ()})
        for (name, arm), seed in itertools.product(chosen.items(), args.seeds):
            if any((r["arm"], r["seed"]) == (name, seed) for r in rows):
                continue
            run = Path(folder) / f"{name}-{seed}"
            (summary,) = train(recipe.model_copy(update={**start, "seed": seed, "arms": {name: arm}}), run)
            numbers = measured(ArmFolder(run / "arms" / name), summary)
            row = {"seed": seed, "arm": name, "method": summary["method"], **numbers}
            print(json.dumps(row), flush=True)
            rows = sorted([*rows, row], key=lambda r: (list(recipe.arms).index(r["arm"]), r["seed"]))
            if args.json:
                args.json.write_text(json.dumps({"rows": rows, "changes": args.set, **machine()}, indent=1) + "\n")
    for name in recipe.arms:
        after = [r["after"] for r in rows if r["arm"] == name]
        if after:
            spread = f" +- {stdev(after):.3f}" if len(after) > 1 else ""
            print(f"{name}: held-out reward {mean(after):.3f}{spread} over {len(after)} seeds")


if __name__ == "__main__":
    main()
