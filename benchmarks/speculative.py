"""What a drafter is worth while the policy trains: acceptance over updates, tokens a pass, seconds against none.

    for seed in 0 1 2; do python benchmarks/speculative.py --seed $seed --json benchmarks/results/speculative.json; done

`--tasks sevens --drafters frozen` does a part of it, `--seconds` the last part.

`recipes/speculative.toml` with a quarter of the prompts and twice its learning rate, so that the policy moves: on sums,
whose digits a drafter of one layer cannot compute, and rewarded for sevens, which moves the policy to where a drafter
can follow. Drafters: one that stays as it was, and one that is distilled on every batch, responses weighted by their
rewards or all alike. Each column is a mean over a quarter of the updates. Then, side by side, the seconds that the
warm-started policy takes to draw a batch by itself, and with its drafter and so many proposals. A file named by `--json` gathers
the numbers of all calls.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

import torch
from measure import interleaved_medians, machine

from offdrift.engines.hf import TransformersEngine
from offdrift.models import load_model
from offdrift.records.provenance import Sampling
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.data.warmstart import warm_start
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import load_recipe

RECIPE = Path(__file__).parents[1] / "recipes" / "speculative.toml"
DRAFTERS = {
    "frozen": ['rollout.speculative={model="tiny-qwen3-draft",tokens=4,warm_start=900}'],
    "learns, by rewards": [],
    "learns, all alike": ["rollout.speculative.weighting=none"],
}
TASKS = {"sums": [], "sevens": [f"reward={Path(__file__).resolve()}:sevens"]}
COLUMNS = ("speculative/accepted_frac", "speculative/tokens_per_pass", "speculative/drafter_lag", "reward/mean")
TOKENS = (2, 4)


def sevens(completion: str) -> float:
    """A reward that moves the policy away from where it was: the share of sevens."""
    return completion.count("7") / max(1, len(completion))


def run_of(task: str, name: str, *, seed: int, updates: int, folder: Path) -> dict[str, list[float]]:
    """Metrics of a run, each by quarters of its updates."""
    changes = [f"seed={seed}", f"batches={updates}", f"log.eval_every={updates}", "log.eval_prompts=64"]
    changes += [
        "rollout.prompts=8",
        "optim.lr=2e-4",
        "log.trackers=[]",
        "log.tokens=false",
        *DRAFTERS[name],
        *TASKS[task],
    ]
    train(load_recipe(RECIPE, changes=changes), folder / "run")
    lines = (folder / "run" / "arms" / "token_tis" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    quarter = len(metrics) // 4
    return {
        key: [round(statistics.mean(row[key] for row in metrics[i * quarter :][:quarter]), 4) for i in range(4)]
        for key in COLUMNS
    }


def seconds_of() -> dict[str, dict[str, float]]:
    """Seconds to draw with the warm-started policy: by itself, and with so many proposals; by prompts x responses."""
    task, engines = find_task("arithmetic"), {}
    (policy, tokenizer), (drafter, _) = (load_model(name, seed=0) for name in ("tiny-qwen3", "tiny-qwen3-draft"))
    for model in (policy, drafter):
        warm_start(model, tokenizer, task, steps=900, seed=0)
    engines["none"] = TransformersEngine(policy, batch_size=256)
    for tokens in TOKENS:
        engines[f"{tokens} tokens"] = TransformersEngine(policy, batch_size=256, drafter=drafter, draft_tokens=tokens)
    sampling, result = Sampling(max_tokens=14, stop_token_ids=(1,)), {}
    problems = task.sample(128, seed=1, split="eval")
    for prompts, samples in ((1, 1), (64, 1), (16, 8)):
        asked = [prompt_ids(p, tokenizer) for p in problems[:prompts] for _ in range(samples)]
        result[f"{prompts} x {samples}"] = interleaved_medians(
            {name: lambda e=e, asked=asked: e.generate(asked, sampling, seed=0) for name, e in engines.items()},
            repeats=3,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--seconds", action="store_true", help="measure seconds, and train nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stored = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"rows": []}

    def store() -> None:
        if args.json:
            args.json.write_text(json.dumps(stored | machine(), indent=1) + "\n")

    for task, name in [] if args.seconds else itertools.product(args.tasks, args.drafters):
        row = {"seed": args.seed, "updates": args.updates, "task": task, "drafter": name}
        stored["rows"] = [r for r in stored["rows"] if {k: r[k] for k in row} != row]
        with tempfile.TemporaryDirectory() as folder:
            stored["rows"].append(row | run_of(task, name, seed=args.seed, updates=args.updates, folder=Path(folder)))
        print(json.dumps(stored["rows"][-1]), flush=True)
        store()
    if args.seconds:
        stored["seconds"] = seconds_of()
        print("seconds", json.dumps(stored["seconds"]))
        store()


if __name__ == "__main__":
    main()
