"""What routing replay takes off the mismatch, by engine and precision, and what it costs.

    python benchmarks/replay.py [--steps 900] [--prompts 64] [--samples 8] [--vllm] [--json PATH]

The tiny mixture of experts (3 layers, 4 of 16 experts), with random weights and after the warm start of the recipes,
answers sums with the weights that the trainer has in float32; both sides score every token. Per engine: the exact
KL(rollout || trainer) with the trainer's own experts and with the engine's, and where it is. Then seconds, side by
side: a batch drawn with and without recording, an update with and without replay.
"""

import argparse
import copy
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from measure import interleaved_medians, machine

from offdrift.engines import make_engine
from offdrift.engines.routing import at_predictions, flip_rate, flips, routes_of
from offdrift.judge import num_experts
from offdrift.methods import method
from offdrift.models import load_model, save_for_engine
from offdrift.records.provenance import Sampling
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.data.warmstart import warm_start
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.old_policy import score_batch
from offdrift_lab.train.loop.step import Learner, train_step

ENGINES = {
    "transformers float32": ("transformers", {"dtype": "float32"}),
    "transformers float16": ("transformers", {"dtype": "float16"}),
    "transformers bfloat16": ("transformers", {"dtype": "bfloat16"}),
    "transformers int8 weights": ("transformers", {"dtype": "float32", "quantization": "int8"}),
}
VLLM = {
    "vLLM float32": ("vllm", {"dtype": "float32", "max_model_len": 64}),
    "vLLM bfloat16": ("vllm", {"dtype": "bfloat16", "max_model_len": 64}),
}


def compared(model, rollouts) -> dict[str, float]:
    """KL with own and with the engine's experts, nats; flips; and the KL of tokens at flips and elsewhere."""
    own = routes_of(model, rollouts)
    flipped = flips(own.experts, rollouts.routes.experts)
    row = {
        "flip_frac": float(flipped.float().mean()),
        "delta": float(flip_rate(own.experts, rollouts.routes.experts, experts=num_experts(model)).mean()),
    }
    for name, replays in (("own", False), ("replayed", True)):
        scores = score_batch(model, rollouts, token_budget=8192, exact=True, replays=replays)
        kl = scores.divergences["kl_rollout_old"].lo.double()
        row |= {f"{name}_mean": float(kl.mean()), f"{name}_max": float(kl.max())}
        if not replays:
            at = at_predictions(rollouts, flipped.any(1))
            row |= {"tokens_at_flips": float(at.float().mean())}
            row |= {"at_flips": float(kl[at].mean()), "elsewhere": float(kl[~at].mean())}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("tiny-qwen3-moe", seed=0)
    task, sampling = find_task("arithmetic"), Sampling(max_tokens=14, stop_token_ids=(1,))
    asked = [prompt_ids(p, tokenizer) for p in task.sample(args.prompts, seed=0, split="train")]
    prompts = [p for p in asked for _ in range(args.samples)]
    trained = warm_start(copy.deepcopy(model), tokenizer, task, steps=args.steps, seed=0).eval()
    rows = []
    for weights, policy in (("random", model), ("warm start", trained)):
        for name, (kind, options) in {**ENGINES, **(VLLM if args.vllm else {})}.items():
            with tempfile.TemporaryDirectory() as folder:
                save_for_engine(policy, tokenizer, folder)
                engine = make_engine(kind, folder, record_routes=True, **options)
                rollouts = engine.generate(prompts, sampling, seed=1, evidence="full")
                engine.close()
            row = {"weights": weights, "engine": name, "tokens": len(rollouts.tokens)}
            rows.append(row | compared(policy, rollouts))
            print(json.dumps(rows[-1]), flush=True)
    drawing = {r: make_engine("transformers", trained, dtype="bfloat16", record_routes=r) for r in (False, True)}
    rollouts = drawing[True].generate(prompts, sampling, seed=1)
    batch = Batch(rollouts=rollouts, advantages=torch.randn(len(rollouts.tokens)))
    copied, accelerator = copy.deepcopy(trained), Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(copied.parameters(), lr=0.0)
    learner = Learner(accelerator=accelerator, model=copied, optimizer=optimizer, method=method("none"))

    def update(chosen: Batch) -> None:
        train_step(learner, chosen)

    seconds = interleaved_medians(
        {
            "draw": lambda: drawing[False].generate(prompts, sampling, seed=1),
            "draw, routes recorded": lambda: drawing[True].generate(prompts, sampling, seed=1),
            "update": lambda: update(replace(batch, rollouts=rollouts.with_(routes=None))),
            "update, routes compared": lambda: update(batch),
            "update, routes replayed": lambda: update(replace(batch, replays=True)),
        },
        repeats=5,
    )
    print(json.dumps(seconds))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "seconds": seconds, **machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
