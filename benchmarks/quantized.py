"""Training on quantized rollouts, each way beside bf16: reward, drift, what survives the grid, seconds; and vLLM itself.

    python benchmarks/quantized.py [--seeds 0 1 2] [--batches 8] [--groups bf16 w8a8 fp8 qerl] [--costs] [--vllm] [--json PATH]

A tiny Qwen3 after the warm start of the recipes (one start for all) trains on sums. The transformers engine emulates the
grids. Per arm and seed: reward on held-out prompts before and after, the mean over batches of the exact
KL(rollout || trainer) before the first step, and the mean over updates of what the grid lets through. With --costs: CPU seconds of an update, plain, corrected and on each grid.
With --vllm: tokens per CPU second of vLLM's own modes, KL(rollout || trainer) with and without the trainer's pass on
the grid, before and after new weights, and CPU seconds of a synchronization.
"""

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch
from accelerate import Accelerator
from measure import machine

from offdrift.engines import make_engine
from offdrift.engines.grids import GRIDS, instruction_set, on_grid
from offdrift.engines.score import score
from offdrift.errors import EngineError
from offdrift.methods import method
from offdrift.models import load_model, save_for_engine
from offdrift.records.provenance import Sampling
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.data.warmstart import warm_start
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.loop.step import Learner, train_step
from offdrift_lab.train.settings.recipe import check_recipe

ON = {"forward": True}
GROUPS = {
    "bf16": ({"dtype": "bfloat16"}, {}, {"bf16": ("ppo_clip", {})}),
    "w8a8": (
        {"quantization": "w8a8"},
        {},
        {
            "none": ("ppo_clip", {}),
            "FlashRL": ("flashrl", {}),
            "Jet-RL": ("ppo_clip", ON),
            "QaRL": ("tbpo", ON),
            "QuRL": ("qurl", {"scale": 1.5}),
        },
    ),
    "fp8": ({"quantization": "fp8_per_channel"}, {}, {"FP8-RL": ("fp8_rl", {}), "Jet-RL-fp8": ("ppo_clip", ON)}),
    "qerl": (
        {},
        {"lora": {"base": "nvfp4"}},
        {"QeRL": ("token_tis", {"noise": {"start": 5e-2, "end": 5e-4, "stages": 10}}), "QeRL-quiet": ("token_tis", {})},
    ),
}
"""Settings of the rollout, of the recipe, and arms: method and `quantized`."""
SHOWN = {
    "kl": "divergence/kl_rollout_current_mean",
    "k3": "full/k3",
    "moved": "grid/moved_frac",
    "cosine": "grid/update_cosine",
    "errors": "error_tokens/frac",
}


def runs(group: str, start: str, seed: int, batches: int) -> list[dict]:
    """Train the arms of a group; a row each."""
    rollout, more, arms = GROUPS[group]
    content = {
        "name": group,
        "model": start,
        "seed": seed,
        "batches": batches,
        "rollout": {"dtype": "float32", "prompts": 16, "samples": 8, "max_tokens": 14, "evidence": "full", **rollout},
        "optim": {"lr": 5e-4 if more else 1e-4, "minibatches": 2},
        "log": {"eval_every": batches, "eval_prompts": 256, "tokens": False, "trackers": [], "checkpoint_every": 999},
        "arms": {name: {"method": row, "quantized": settings} for name, (row, settings) in arms.items()},
        **more,
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        train(check_recipe(content, source="benchmark"), Path(folder))
        for name in arms:
            files = RunFolder(Path(folder)).arm(name)
            metrics, evals = files.rows("metrics"), files.rows("eval")
            row = {"group": group, "arm": name, "grid": rollout.get("quantization"), "seed": seed}
            row["before"] = evals[0]["reward"]
            row |= {"after": evals[-1]["reward"]}
            for short, metric in SHOWN.items():
                # After the first step on a batch the trainer has moved on: drift is then not the grid's alone.
                fresh = [m for m in metrics if m["batch/updates_before"] == 0 or short in ("moved", "cosine")]
                values = [m[metric] for m in fresh if m.get(metric) is not None]
                row |= {short: mean(values)} if values else {}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


@torch.no_grad()
def kl(model, rollouts) -> dict[str, float]:
    """Exact KL(rollout || trainer) of the rollouts' tokens, nats."""
    mu = rollouts.evidence.logp.double()
    pi = score(model, rollouts).logits.double().log_softmax(-1)
    values = (mu.exp() * (mu - pi)).sum(-1)
    return {"mean": float(values.mean()), "max": float(values.max())}


VLLM = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "quantization": "w8a8"},
    {"dtype": "bfloat16", "quantization": "w8a8"},
    {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16", "quantization": "fp8_per_tensor"},
    {"dtype": "bfloat16", "quantization": "fp8_per_block"},
]


def vllm_mode(options: dict, model, tokenizer) -> dict:
    """A mode of vLLM on this machine; for one that it does not offer, its own words."""
    ahead, sampling = copy.deepcopy(model), Sampling(max_tokens=32)
    with torch.no_grad():
        for weight in ahead.parameters():
            weight.add_(0.1 * weight.roll(1, 0))
    asked = find_task("arithmetic").sample(64, seed=0, split="train")
    prompts, row = [prompt_ids(p, tokenizer) for p in asked], dict(options)
    with tempfile.TemporaryDirectory() as folder:
        save_for_engine(model, tokenizer, folder)
        try:
            engine = make_engine("vllm", folder, max_model_len=64, kv_cache_mib=64, **options)
        except EngineError as error:
            return row | {"refused": str(error)[:400]}
        grid = options.get("quantization") if options.get("quantization") in GRIDS else None
        for weights, policy in (("loaded", model), ("synchronized", ahead)):
            if policy is ahead:
                begin = time.process_time()
                engine.load_weights(ahead.named_parameters(), version=1)
                row["sync_cpu_s"] = time.process_time() - begin
            rollouts = engine.generate(prompts, sampling, seed=1, evidence="full")
            row[weights] = kl(policy, rollouts)
            if grid is not None:
                with on_grid(policy, grid):
                    row[f"{weights}, trainer on the grid"] = kl(policy, rollouts)
        seconds = []
        for _ in range(3):
            begin = time.process_time()
            drawn = engine.generate(prompts, sampling, seed=2)
            seconds.append(time.process_time() - begin)
        row["tokens_per_cpu_s"] = len(drawn.tokens) / sorted(seconds)[1]
        engine.close()
    return row


def costs(model, tokenizer) -> dict[str, float]:
    """CPU seconds of a batch of 128 responses and of an update on it: median of five, in turn."""
    asked = find_task("arithmetic").sample(16, seed=0, split="train")
    prompts = [prompt_ids(p, tokenizer) for p in asked for _ in range(8)]
    sampling = Sampling(max_tokens=14, stop_token_ids=(1,))
    rollouts = make_engine("transformers", model, quantization="w8a8").generate(prompts, sampling, seed=1)
    batch = Batch(rollouts=rollouts, advantages=torch.randn(len(rollouts.tokens)), old_is_current=True)
    updates = {"bf16": ("ppo_clip", None), "FlashRL": ("flashrl", None), "fp8_rl": ("fp8_rl", None)}
    updates |= {f"on the grid, {name}": ("ppo_clip", name) for name in GRIDS}
    accelerator, seconds = Accelerator(cpu=True), {name: [] for name in updates}
    for _ in range(5):
        for name, (row, grid) in updates.items():
            trainer = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.0)
            learner = Learner(accelerator=accelerator, model=trainer, optimizer=optimizer, method=method(row))
            with on_grid(trainer, grid):
                begin = time.process_time()
                train_step(learner, batch)
                seconds[name].append(time.process_time() - begin)
    return {name: sorted(values)[2] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--steps", type=int, default=900, help="of the warm start")
    parser.add_argument("--vllm", type=int, nargs="*", help="modes to measure, by place in VLLM; none given: all")
    parser.add_argument("--costs", action="store_true")
    parser.add_argument("--json", type=Path, help="write the numbers here, and go on with those that are there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    start = warm_start(model, tokenizer, find_task("arithmetic"), steps=args.steps, seed=0).eval()
    done = {"rows": [], "vllm": {}}
    if args.json and args.json.exists():
        done |= json.loads(args.json.read_text())
    with tempfile.TemporaryDirectory() as folder:
        save_for_engine(start, tokenizer, folder)
        for seed in args.seeds:
            for group in args.groups:
                if any((row["group"], row["seed"]) == (group, seed) for row in done["rows"]):
                    continue
                done["rows"] += runs(group, folder, seed, args.batches)
                if args.json:
                    done |= {"batches": args.batches, "instructions": instruction_set(), **machine()}
                    args.json.write_text(json.dumps(done, indent=1) + "\n")
    if args.costs:
        done["costs"] = costs(start, tokenizer)
        print(json.dumps(done["costs"]), flush=True)
    for i in range(len(VLLM)) if args.vllm == [] else args.vllm or ():
        if str(i) not in done["vllm"]:
            done["vllm"][str(i)] = vllm_mode(VLLM[i], start, tokenizer)
            print(json.dumps(done["vllm"][str(i)]), flush=True)
    if args.json:
        done |= {"instructions": instruction_set(), **machine()}
        args.json.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
