"""Time per token of every method, forward and backward, and of verl's own function where it has one.

    python benchmarks/methods.py [--rows a,b] [--quick] [--threads N] [--json PATH [--add]]

On the ragged batch of `correction.py` (512 sequences, log-normal lengths, float32): packed for us,
padded to 8192 for verl. Two figures per row, each in units of `ppo_clip`, measured in between:

    loss     `policy_loss` without its statistics: observe, correct, push, aggregate, backward
    whole    the same with statistics, on the host as metrics

verl's losses take no such statistics and are compared with `loss`; its presets do, and are compared
twice, without them and with them (weights and masks of verl's come with a few metrics either way).
Divergences of whole distributions are random numbers here: `exact_kl.py` times computing them. A row
above 3 times the loss of `ppo_clip` needs a reason in `REASONS`; without one, or where loss or
gradient disagree with verl's, the exit code is 1.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from measure import interleaved_medians, machine
from methods_batch import Batch, make_batch
from methods_verl import Peer, load_verl, peer_of, verl_step
from torch import Tensor

from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, Method, method, override
from offdrift.methods.table import FAMILIES
from offdrift.stats.drift import DriftStats
from offdrift.stats.metrics import summarize

BASE = "ppo_clip"
KINDS = ("loss", "whole")
LIMIT = 3.0
"""Times the loss of `BASE` above which a row has to say why."""
TOLERANCE = 1e-4
"""Of a loss and its gradient, relative to verl's: float32 sums of a million terms."""

SORT = "sorts the step's tokens, in float64"
RANK = "ranks the step's tokens, in float64"
HASH = "; hashes every token, so that the choice does not depend on how the step is split"
PREFIX = "running sums over each response in float64, limits and exponentials of every prefix"
MINIMUM = "running minimum over each response"
REASONS: dict[str, str] = {
    "clip_cov": RANK + HASH,
    "kl_cov": RANK + HASH,
    "kl_cov_exact": RANK + HASH,
    "ln_trm": "weights of every position in float64, two sums over each response",
    "m2po": SORT,
    "m2po_drop": SORT,
    "espo": "sorts each response's tokens by entropy; means over two groups of each",
    "prefix_is": PREFIX,
    "ctpo": PREFIX,
    "ctpo_paper": PREFIX,
    "minpro": MINIMUM,
    "minpro_ppo": MINIMUM,
    "dispo": "four weights, one for each regime of sign and outcome, each over all tokens",
    "tbpo": "geometric means of two ratios for each response, and a clip on both sides",
    "st_ppo": "clips twice: once to see, in float64, what the step's clip removes",
    "troll": "searches for a multiplier at every token, here over a vocabulary of two",
    "deepseek_v32": "gate and clip, and a k3 penalty with an importance ratio of its own",
}
"""What the formula of a slow row needs, for the rows that are or come near to being slow."""

Outcome = tuple[Tensor, Tensor]
"""Loss, and its gradient to logp."""
NO_STATISTICS = DriftStats((), torch.zeros(0), (), torch.zeros(0), (), torch.zeros(0), {})


@contextlib.contextmanager
def without_statistics() -> Iterator[None]:
    """`policy_loss` as it is, except that it summarizes nothing."""
    with patch.object(DriftStats, "of", staticmethod(lambda *_, **__: NO_STATISTICS)):
        yield


def loss(batch: Batch, row: Method) -> Outcome:
    logprobs = batch.fresh()
    with without_statistics():
        out = policy_loss(
            logprobs, row, batch.packed["advantages"], batch.batch_info_for(row, logprobs), horizon=batch.horizon
        )
    return out.loss.detach(), torch.autograd.grad(out.loss, logprobs.current)[0]


def whole(batch: Batch, row: Method) -> Outcome:
    logprobs = batch.fresh()
    out = policy_loss(
        logprobs, row, batch.packed["advantages"], batch.batch_info_for(row, logprobs), horizon=batch.horizon
    )
    summarize(out.stats)
    return out.loss.detach(), torch.autograd.grad(out.loss, logprobs.current)[0]


def loss_from_padded(batch: Batch, row: Method) -> Outcome:
    """`loss`, packing included; for rows that need log-probs alone."""
    given, leaf = batch.padded, batch.padded["logp"].detach().requires_grad_()
    old = given["old"] if row.needs_old else None
    logprobs = LogProbs.pack(given["rollout"], leaf, old, mask=batch.mask)
    advantages = logprobs.like_caller(given["advantages"])
    with without_statistics():
        out = policy_loss(logprobs, row, advantages, horizon=batch.horizon)
    return out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]


# -- one row --------------------------------------------------------------------------------------

Seconds = dict[str, float]


def turn(batch: Batch, row: Method) -> Seconds:
    """A row and `BASE`, once."""
    base = METHODS[BASE]
    arms: dict[str, Callable[[], object]] = {
        f"{BASE}, loss": lambda: loss(batch, base),
        "loss": lambda: loss(batch, row),
        f"{BASE}, whole": lambda: whole(batch, base),
        "whole": lambda: whole(batch, row),
    }
    return interleaved_medians(arms, repeats=1)


def turn_beside_verl(verl: SimpleNamespace, batch: Batch, row: Method, peer: Peer) -> Seconds:
    """A row, packed and padded, and verl's function for it, once."""
    arms: dict[str, Callable[[], object]] = {
        "loss": lambda: loss(batch, row),
        "loss, padded": lambda: loss_from_padded(batch, row),
        "verl": lambda: verl_step(verl, batch, row, peer),
    }
    if peer.correction is not None:
        arms["whole"] = lambda: whole(batch, row)
        arms["verl, with metrics"] = lambda: verl_step(verl, batch, row, peer, metrics=True)
    return interleaved_medians(arms, repeats=1)


def figures(turns: list[Seconds], base: list[Seconds], tokens: int) -> dict[str, Any]:
    """A row's time per token, and that in units of `BASE` in the same round: medians over rounds."""
    times = {kind: median(t[kind] / b[kind] for t, b in zip(turns, base)) for kind in KINDS}
    nanoseconds = {kind: 1e9 * median(t[kind] for t in turns) / tokens for kind in KINDS}
    return {"ns_per_token": nanoseconds, "times_base": times}


def figures_beside_verl(turns: list[Seconds]) -> dict[str, Any]:
    """Seconds, and how many times faster ours are than verl's in the same turn: medians."""
    seconds = {arm: median(t[arm] for t in turns) for arm in turns[0]}
    faster = {ours: _ratio(turns, "verl", ours) for ours in ("loss", "loss, padded")}
    if "whole" in seconds:
        faster["whole"] = _ratio(turns, "verl, with metrics", "whole")
    return {"seconds": seconds, "times_faster": faster}


def _ratio(turns: list[Seconds], above: str, below: str) -> float:
    return median(t[above] / t[below] for t in turns)


def disagreement(verl: SimpleNamespace, batch: Batch, row: Method, peer: Peer) -> dict[str, float | int]:
    """Largest relative difference of our losses and gradients (packed, whole, padded) to verl's."""
    ours_changed, verls_changed = peer.agree_if
    row = override(row, ours_changed)
    peer = replace(peer, options={**peer.options, **verls_changed})
    ways = (False,) if peer.correction is None else (False, True)
    theirs = [verl_step(verl, batch, row, peer, metrics=metrics) for metrics in ways]
    inside, (value, grad) = batch.mask.bool(), loss_from_padded(batch, row)
    mine = [loss(batch, row), whole(batch, row), (value, grad[inside])]
    pairs = [(a, (value, grad[inside])) for a in mine for value, grad in theirs]
    return {
        "loss": max(_distance(a[0], b[0]) for a, b in pairs),
        "gradient": max(_distance(a[1], b[1]) for a, b in pairs),
        "tokens_pushed": int(mine[0][1].count_nonzero()),
    }


def _distance(a: Tensor, b: Tensor) -> float:
    """Of a from b, relative to b; 0 where both are 0."""
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


# -- all rows -------------------------------------------------------------------------------------

Found = Mapping[str, Mapping[str, Any]]


def measure(batch: Batch, methods: Mapping[str, Method], *, repeats: int) -> dict[str, Any]:
    """Rounds over all rows: what disturbs the machine for a while spoils one round, and no median.

    verl's functions, which take most of the time, are in every other round.
    """
    verl, start = load_verl(), time.perf_counter()
    peers = {} if verl is None else {name: peer_of(verl, name) for name in methods}
    mine: dict[str, list[Seconds]] = {name: [] for name in methods}
    beside: dict[str, list[Seconds]] = {name: [] for name in methods}
    for i in range(repeats):
        for name, row in methods.items():
            mine[name].append(turn(batch, row))
            if i % 2 == 0 and (peer := peers.get(name)) is not None:
                beside[name].append(turn_beside_verl(verl, batch, row, peer))
            progress = f"round {i + 1}/{repeats}, {time.perf_counter() - start:4.0f} s, {name:28}"
            print(progress, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)
    base = [_typical(turns) for turns in zip(*mine.values(), strict=True)]
    rows = {name: figures(turns, base, batch.tokens) for name, turns in mine.items()}
    for name, turns in beside.items():
        if turns:
            peer, found = peers[name], figures_beside_verl(turns)
            found["disagreement"] = disagreement(verl, batch, methods[name], peer)
            rows[name]["verl"] = {"function": peer.function, **found, "note": peer.note}
    return rows


def _typical(turns: tuple[Seconds, ...]) -> Seconds:
    """`BASE` in one round: the median of the times that it was beside a row."""
    return {kind: median(t[f"{BASE}, {kind}"] for t in turns) for kind in KINDS}


def failures(rows: Found) -> list[str]:
    """What a run must not pass over."""
    slow = [
        f"{name}: {row['times_base']['loss']:.1f} times the loss of {BASE}, and no reason is given"
        for name, row in rows.items()
        if row["times_base"]["loss"] > LIMIT and name not in REASONS
    ]
    differing = [
        f"{name}: {what} differs from verl's by {row['verl']['disagreement'][what]:.1e} of it"
        for name, row in rows.items()
        for what in ("loss", "gradient")
        if "verl" in row and not row["verl"]["disagreement"][what] <= TOLERANCE
    ]
    return slow + differing


def added(stored: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """A stored result with further rows: each says which machine measured it, and no other row changes."""
    fresh = {name: {**row, "machine": found["machine"]} for name, row in found["rows"].items()}
    failed = [words for words in stored["failures"] if words.partition(":")[0] not in fresh]
    return {
        **stored,
        "rows": {**stored["rows"], **fresh},
        "failures": failed + found["failures"],
        "reasons": {**stored["reasons"], **found["reasons"]},
    }


def show(rows: Found) -> None:
    """A table by family, slowest first."""
    widths = {"loss": 11, "loss, padded": 9, "whole": 8}
    for family, members in FAMILIES.items():
        mine = sorted(members.keys() & rows, key=lambda name: -rows[name]["times_base"]["loss"])
        if mine:
            print(
                f"\n{family:28}{'loss':>9}{'x base':>8}{'whole':>9}{'x base':>8}{'verl/loss':>11}{'/padded':>9}{'/whole':>8}"
            )
        for name in mine:
            row, cells = rows[name], ""
            for kind in KINDS:
                cells += f"{row['ns_per_token'][kind]:9.1f}{row['times_base'][kind]:8.2f}"
            for ours, faster in row.get("verl", {}).get("times_faster", {}).items():
                cells += f"{faster:{widths[ours]}.1f}"
            print(f"{name:28}{cells}")
    print(f"\nns per token; base: {BASE}; verl/: times faster; /whole: both with metrics of drift")


def show_why(rows: Found) -> None:
    """Rows above the limit with their reasons, and how closely verl agrees."""
    slow = {n: row["times_base"]["loss"] for n, row in rows.items()}
    slow = {n: times for n, times in slow.items() if times > LIMIT}
    print(f"\nabove {LIMIT:g} times {BASE}: {len(slow)}")
    for name, times in sorted(slow.items(), key=lambda item: -item[1]):
        print(f"  {name:14}{times:6.1f}  {REASONS.get(name, 'NO REASON IS GIVEN')}")
    peers = {name: row["verl"] for name, row in rows.items() if "verl" in row}
    for what in ("loss", "gradient") if peers else ():
        worst = max(peers, key=lambda name: peers[name]["disagreement"][what])
        by = peers[worst]["disagreement"][what]
        print(f"{what} of {len(peers)} rows: {by:.1e} from verl's at most ({worst})")
    for name, peer in peers.items():
        if peer["note"]:
            print(f"  {name}: {peer['note']}")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(METHODS), help="names, joined by commas")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat: it runs, times are rough")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--add", action="store_true", help="to the rows in --json, each with its machine")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    methods, machine_info = {name: method(name) for name in args.rows.split(",")}, machine("verl")
    batch = make_batch(args.sequences, args.longest)
    print(f"{args.sequences} sequences, {batch.tokens:,} tokens, padded to {args.longest}\n{machine_info}")
    if load_verl() is None:
        print("verl cannot be imported here: ours is timed alone")
    rows = measure(batch, methods, repeats=1 if args.quick else args.repeats)
    show(rows)
    show_why(rows)
    failed = failures(rows)
    print("".join(f"\nFAILED {words}" for words in failed))
    found = {"machine": machine_info, "tokens": batch.tokens, "rows": rows, "failures": failed}
    found["reasons"] = {name: why for name, why in REASONS.items() if name in rows}
    if args.json:
        written = added(json.loads(args.json.read_text()), found) if args.add else found
        args.json.write_text(json.dumps(written, indent=2) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(bool(main()["failures"]))
