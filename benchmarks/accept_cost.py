"""What `optim.accept` costs where no step fails, by its test.

    python benchmarks/accept_cost.py [recipes/tiny.toml] [--batches 8] [--repeats 3] [--json PATH]

CPU seconds of one thread inside the feature (keeping weights and optimizer state, the test) over those of all else in
the same updates: drawing, scoring, gradients, statistics, records. Every step passes. The engine takes the weights after
every update, as the gap needs it to. Models are not warm-started: every response is as long as it may be. The median of
`--repeats` runs, and all of them.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from measure import machine

from offdrift_lab.train.features.accept import Acceptance
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import load_recipe

TESTS = {
    "kl": "test='kl'",
    "certificate": "test='certificate'",
    "gap, 4 prompts": "test='gap', prompts=4",  # with 8 answers each
    "gap, 2 prompts": "test='gap', prompts=2",  # the default
}
NEVER_FAILS = 1e9


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="recipes/tiny.toml")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe, for all tests")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, dict[str, object]] = {}
    for test in TESTS:
        runs = [_share(args.recipe, test, args.batches, args.set) for _ in range(args.repeats)]
        parts = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        found[test] = parts | {"runs": [round(run["cost"], 4) for run in runs]}
        print(
            f"{test:15} {parts['cost']:6.1%} of an update   keeping {parts['keep']:.1%}   testing {parts['test']:.1%}"
        )
    result = {"recipe": args.recipe, "set": args.set, "batches": args.batches, "tests": found, "machine": machine()}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _share(path: str, test: str, batches: int, more: list[str]) -> dict[str, float]:
    """CPU seconds of the feature over those of the rest of the updates, from the first step to the last."""
    changes = [f"batches={batches}", "warm_start.steps=0", "log.trackers=[]", "log.eval_prompts=1", "lag.sync_every=1"]
    changes += [f"log.eval_every={10 * batches}", f"log.checkpoint_every={10 * batches}", "arms={none={method='none'}}"]
    changes += [f"optim.accept={{{TESTS[test]}, limit={NEVER_FAILS}, final={NEVER_FAILS}}}", *more]
    starts: list[float] = []
    spent = {"keep": 0.0, "test": 0.0}
    stepping, accepts = Acceptance.stepping, Acceptance.accepts

    def timed_stepping(self, arm):
        starts.append(time.process_time())
        if len(starts) == 1:
            stepping(self, arm)  # the first copy of the weights is made once a run
            starts[0] = time.process_time()
            return
        before = time.process_time()
        stepping(self, arm)
        spent["keep"] += time.process_time() - before

    def timed_accepts(self, arm, batch):
        before = time.process_time()
        accepted = accepts(self, arm, batch)
        if len(starts) < batches:
            spent["test"] += time.process_time() - before
        assert accepted
        return accepted

    with contextlib.ExitStack() as patched, tempfile.TemporaryDirectory() as folder:
        patched.enter_context(mock.patch.object(Acceptance, "stepping", timed_stepping))
        patched.enter_context(mock.patch.object(Acceptance, "accepts", timed_accepts))
        patched.enter_context(contextlib.redirect_stdout(None))
        train(load_recipe(path, changes=changes), Path(folder) / "run")
    rest = starts[-1] - starts[0] - sum(spent.values())
    assert len(starts) == batches
    return {"cost": sum(spent.values()) / rest, **{name: x / rest for name, x in spent.items()}, "rest_s": rest}


if __name__ == "__main__":
    main()
