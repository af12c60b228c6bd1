"""What statistics, evidence and records cost in an update of the trainer.

    python benchmarks/step.py [recipes/tiny.toml] [--batches 8] [--arm token_tis] [--json PATH]

Two measurements of the same recipe. *Shares*: seconds inside each part of the trainer's own update, over those of the
update. *Ratio*: the trainer's update beside a bare loop that draws with the same engine (sampled log-probs alone),
scores, weighs and steps the same way, and keeps nothing; batches in turn, medians. Synchronizations are in both, the
verification of them only in the trainer's. Models are not warm-started: every response is as long as it may be.
"""

import argparse
import contextlib
import functools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
from measure import machine

import offdrift_lab.train.data.source as source
import offdrift_lab.train.loop.loop as loop
import offdrift_lab.train.loop.record as record
import offdrift_lab.train.loop.step as step
from offdrift.advantages import advantages
from offdrift.engines.score import chunks, score
from offdrift.logprobs import LogProbs
from offdrift_lab.train.data.episodes import rollout
from offdrift_lab.train.data.source import batch_seed
from offdrift_lab.train.loop.arm import start_arm
from offdrift_lab.train.loop.context import set_up
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.settings.recipe import load_recipe

PARTS = {
    "statistics": [(step.DriftStats, "of"), (step, "signature"), (step, "gradient_power"), (step.Tails, "add"),
                   (step.DriftStats, "merge_all"), (step, "_with_batch_stats"), (record, "summarize")],
    "evidence": [(step, "divergences"), (step.ScoredPiece, "evidence"), (step.ScoredPiece, "token_values"),
                 (record, "certify")],
    "records": [(source.store, "write"), (loop.TokenLog, "write"), (loop, "record_update")],
}  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="recipes/tiny.toml")
    parser.add_argument("--arm", default="token_tis")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="of both loops, in turn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    changes = [f"batches={args.batches}", "warm_start.steps=0", "log.trackers=[]", "log.eval_prompts=1"]
    changes += [f"log.eval_every={10 * args.batches}", f"log.checkpoint_every={10 * args.batches}"]
    changes += [f"arms={{{args.arm}={{method='{args.arm}'}}}}"]
    recipe = load_recipe(args.recipe, changes=changes)
    with tempfile.TemporaryDirectory() as folder:
        run = set_up(recipe, RunFolder(Path(folder)), lambda event: None)
        trainer(run, args.arm)  # imports and caches, once a process
        full, bare = [], []
        for _ in range(args.repeats):
            updates, shares = trainer(run, args.arm)
            full += updates
            arm, _ = start_arm(run, args.arm, resume=False)
            bare += [bare_update(arm, i) for i in range(args.batches)]
        run.engine.close()
    seconds = {"trainer": statistics.median(full), "bare loop": statistics.median(bare)}
    ratio = seconds["trainer"] / seconds["bare loop"]
    result: dict[str, object] = {"recipe": args.recipe, "arm": args.arm, "batches": args.batches}
    result |= {"machine": machine(), "seconds_per_update": seconds, "shares": shares, "ratio": ratio}
    print(f"{args.recipe}, {args.arm}\n{result['machine']}")
    for name, share in shares.items():
        print(f"{name:12}{share:8.1%} of an update")
    print(f"{'together':12}{sum(shares.values()):8.1%}")
    print(f"an update takes {ratio:.2f} times as long as in the bare loop ({seconds['trainer']:.3g} s)")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def trainer(run, name: str) -> tuple[list[float], dict[str, float]]:
    """Seconds of every update, and the share of the updates' time inside each of `PARTS`."""
    inside: dict[str, float] = defaultdict(float)
    depth = [0]

    def timed(part: str, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            # A part inside another counts for the outer one.
            depth[0] += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if depth[0] == 0:
                    inside[part] += time.perf_counter() - start

        return call

    with contextlib.ExitStack() as patches:
        for part, places in PARTS.items():
            for owner, attribute in places:
                wrapped = timed(part, getattr(owner, attribute))
                if isinstance(owner.__dict__[attribute], staticmethod | classmethod):
                    wrapped = staticmethod(wrapped)
                patches.enter_context(mock.patch.object(owner, attribute, wrapped))
        loop.train_arm(run, name, resume=False)
    seconds = [row["throughput/seconds"] for row in run.folder.arm(name).rows("metrics")]
    return seconds, {part: inside[part] / sum(seconds) for part in PARTS}


def bare_update(arm, index: int) -> float:
    """Draw, score, weigh and step once, and synchronize when it is due; keep nothing."""
    run, start = arm.run, time.perf_counter()
    recipe = run.recipe
    if arm.version - run.engine.version >= recipe.lag.sync_every:
        run.engine.load_weights(arm.model.named_parameters(), version=arm.version)
    problems = run.task.sample(recipe.rollout.prompts, seed=batch_seed(recipe.seed, index))
    drawn = rollout(
        run.engine, problems, run.task, run.tokenizer, run.sampling, samples=recipe.rollout.samples, seed=index
    )
    whole = advantages(drawn.rewards, drawn.segments)
    arm.model.train()
    arm.optimizer.zero_grad(set_to_none=True)
    for sequences in chunks(drawn, token_budget=recipe.optim.token_budget):
        piece = drawn.select(sequences)
        scored = score(arm.model, piece, temperature=recipe.rollout.temperature)
        lp = LogProbs.pack(piece.logp_rollout, scored.logp, segments=piece.segments)
        weight = (scored.logp.detach() - piece.logp_rollout).exp().clamp(max=2)
        advantage = whole[drawn.segments.rows(sequences)]
        (-(weight * advantage * lp.logp).sum() / len(drawn.tokens)).backward()
    torch.nn.utils.clip_grad_norm_(arm.model.parameters(), recipe.optim.max_grad_norm)
    arm.optimizer.step()
    arm.version += 1
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
