"""What each old policy costs: seconds per batch, and bytes kept, beside a training step on that batch.

    python benchmarks/old_policy.py [--model tiny-qwen3] [--prompts 32] [--samples 8] [--tokens 14]
                                    [--threads N] [--json PATH]

One batch is drawn by transformers and trained on. Beside one update on it stand: the forward pass
that scores it with the weights at hand (`batch_start`, and part of every other), with a second model,
with snapshots from memory and from disk; and what keeping such weights takes, once per
synchronization. `rollout` and `interpolated` cost nothing, and neither does a batch that was just drawn.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from measure import interleaved_medians, machine

from offdrift.engines import make_engine
from offdrift.methods import method
from offdrift.models import load_model
from offdrift.records.provenance import Sampling
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.old_policy import Averaged, BatchStart, SecondModel, Snapshots
from offdrift_lab.train.loop.sharded import local_weights
from offdrift_lab.train.loop.step import Learner, train_step
from offdrift_lab.train.settings.optim import OptimSettings


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=14)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    accelerator = Accelerator(cpu=True)
    model, _ = load_model(args.model, seed=0)
    engine = make_engine("transformers", model, dtype="float32", batch_size=256)
    engine.load_weights(local_weights(model).items(), version=0)
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, 60, (args.prompts, 8), generator=g).repeat_interleave(args.samples, 0)
    rollouts = engine.generate(prompts.tolist(), Sampling(max_tokens=args.tokens), seed=0)
    rollouts = rollouts.with_(rewards=torch.rand(rollouts.num_sequences, generator=g))
    budget = {"token_budget": 16384}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        start, second = BatchStart(accelerator, path), SecondModel(accelerator, path)
        memory = Snapshots(accelerator, path)
        disk = Snapshots(accelerator, path, on_disk=True)
        average = Averaged(accelerator, path, decay=0.889)
        second.published(model, 0)
        average.published(model, 0)
        for keeper in (memory, disk):
            keeper.retain({0}, model, 0)

        trained = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.0)
        batch = Batch(rollouts=rollouts, advantages=torch.randn(len(rollouts.tokens), generator=g))
        learner = Learner(
            accelerator=accelerator,
            model=trained,
            optimizer=optimizer,
            method=method("none"),
            optim=OptimSettings(max_grad_norm=1.0, **budget),
        )

        def keep(keeper: Snapshots) -> None:
            keeper.retain(set(), model, 1)
            keeper.retain({0}, model, 0)

        arms = {
            "one update": lambda: train_step(learner, batch),
            "score: batch_start": lambda: start.score(model, rollouts, 0, **budget),
            "score: second_model": lambda: second.score(model, rollouts, 1, **budget),
            "score: sampling, memory": lambda: memory.score(model, rollouts, 1, **budget),
            "score: sampling, disk": lambda: disk.score(model, rollouts, 1, **budget),
            "score: ewma": lambda: average.score(model, rollouts, 1, **budget),
            "keep: sampling, memory": lambda: keep(memory),
            "keep: sampling, disk": lambda: keep(disk),
            "keep: second_model": lambda: second.published(model, 0),
            "keep: ewma": lambda: average.stepped(model),
        }  # fmt: skip
        seconds = interleaved_medians(arms, repeats=args.repeats)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    found: dict[str, object] = {
        "model": args.model,
        "machine": machine(),
        "sequences": rollouts.num_sequences,
        "tokens": len(rollouts.tokens),
        "bytes_per_copy_of_the_weights": weights,
        "seconds": seconds,
        "share_of_an_update": {k: s / seconds["one update"] for k, s in seconds.items()},
    }
    print(
        f"{args.model}, {rollouts.num_sequences} sequences, {len(rollouts.tokens):,} tokens; one copy of the weights {weights / 2**20:.1f} MiB\n{found['machine']}"
    )
    for name, s in seconds.items():
        print(f"{name:26}{s:9.3f} s {s / seconds['one update']:8.2f} of an update")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
