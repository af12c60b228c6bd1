"""What the batch-invariant mode takes off the mismatch and what it costs, and what tensor parallelism adds to it.

    python benchmarks/equal_engines.py [--steps 900] [--prompts 32] [--samples 8] [--models NAMES] [--json PATH]

The tiny dense model and the tiny mixture of experts, after some steps of the recipes' warm start, answer sums; the
trainer scores every token with the same weights at the same precision: KL(rollout || trainer) and log-probs, with the
kernels that torch chooses and in a fixed order. Then CPU seconds of one thread, side by side: a batch drawn, and an update. Then the
mismatch of a trainer whose row-parallel layers are split over 1, 2, 4 and 8 emulated devices, with partial sums in the
order of the devices and in one tree.
"""

import argparse
import copy
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from measure import machine

from offdrift.engines import make_engine
from offdrift.engines.hf_fixed_order import batch_invariant, tensor_parallel
from offdrift.engines.score import score
from offdrift.methods import method
from offdrift.models import load_model
from offdrift.records.provenance import Sampling
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.data.warmstart import warm_start
from offdrift_lab.train.features.loss_scale import LossScale, LossScaling
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.old_policy import score_batch
from offdrift_lab.train.loop.step import Learner, train_step

HALVES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = (1, 2, 4, 8)


def compared(model, rollouts, half) -> dict[str, float]:
    """Exact KL, and log-probs of the drawn tokens, of the engine against the trainer."""
    scores = score_batch(model, rollouts, token_budget=8192, exact=True, half=half)
    kl = scores.divergences["kl_rollout_old"].lo.double()
    apart = (scores.logp - rollouts.logp_rollout).abs()
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "abs_log_ratio_max": float(apart.max()),
        "changed_frac": float((apart > 0).double().mean()),
    }


def cpu_seconds(arms, *, repeats: int) -> dict[str, float]:
    """Median CPU seconds of each arm, all in turn; the first call of each is not counted."""
    seconds = {name: [] for name in arms}
    for i in range(repeats + 1):
        for name, run in arms.items():
            start = time.process_time()
            run()
            if i:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", default="tiny-qwen3,tiny-qwen3-moe")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task, sampling = find_task("arithmetic"), Sampling(max_tokens=14, stop_token_ids=(1,))
    rows, seconds, devices = [], {}, []
    for name in args.models.split(","):
        model, tokenizer = load_model(name, seed=0)
        asked = [prompt_ids(p, tokenizer) for p in task.sample(args.prompts, seed=0, split="train")]
        prompts = [p for p in asked for _ in range(args.samples)]
        warm_start(model, tokenizer, task, steps=args.steps, seed=0)
        own, fixed = model.eval(), batch_invariant(copy.deepcopy(model)).eval()
        for dtype, half in HALVES.items():
            arms = {}
            for kernels, trainer in (("own", own), ("fixed", fixed)):
                engine = make_engine(
                    "transformers", model, dtype=dtype, batch_invariant=kernels == "fixed", batch_size=256
                )
                rollouts = engine.generate(prompts, sampling, seed=1, evidence="full")
                row = {"model": name, "dtype": dtype, "kernels": kernels, "tokens": len(rollouts.tokens)}
                rows.append(row | compared(trainer, rollouts, half))
                print(json.dumps(rows[-1]), flush=True)
                copied, scaling = copy.deepcopy(trainer), LossScaling()
                scaling.scale = LossScale(value=256.0)
                learner = Learner(
                    accelerator=Accelerator(cpu=True),
                    model=copied,
                    optimizer=torch.optim.AdamW(copied.parameters(), lr=0.0),
                    method=method("none"),
                    features=[scaling],
                    half=half,
                )
                batch = Batch(rollouts=rollouts, advantages=torch.randn(len(rollouts.tokens)))
                arms[f"draw, {kernels}"] = partial(engine.generate, prompts, sampling, seed=1)
                arms[f"update, {kernels}"] = partial(train_step, learner, batch)
            taken = cpu_seconds(arms, repeats=args.repeats)
            ratios = {f"{what} ratio": taken[f"{what}, fixed"] / taken[f"{what}, own"] for what in ("draw", "update")}
            seconds[f"{name} {dtype}"] = taken | ratios
            print(json.dumps({"model": name, "dtype": dtype} | taken | ratios), flush=True)
            halved = copy.deepcopy(model).to(getattr(torch, dtype))
            drawn = make_engine("transformers", model, dtype=dtype).generate(
                prompts[:32], sampling, seed=1, evidence="full"
            )
            for tree in (False, True):
                logits = []
                for shards in DEVICES:
                    with torch.no_grad(), tensor_parallel(halved, shards=shards, tree=tree):
                        logits.append(score(halved, drawn).logits)
                moved = [float((x - logits[0]).abs().max()) for x in logits]
                devices.append({"model": name, "dtype": dtype, "tree": tree, "logits moved by": moved})
                print(json.dumps(devices[-1]), flush=True)
    if args.json:
        content = {"rows": rows, "seconds": seconds, "devices": devices, **machine("transformers")}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
