"""Time per token of every method, forward and backward, and of verl's own function where it has one.

    python benchmarks/methods.py [--rows a,b] [--quick] [--threads N] [--json PATH]

On the ragged batch of `correction.py` (512 sequences, log-normal lengths, float32): packed for us,
padded to 8192 for verl. Two figures per row, each beside that of `ppo_clip` in the same turn:

    loss     `policy_loss` without its statistics: observe, correct, push, aggregate, backward
    whole    the same with statistics, on the host as metrics

verl's losses take no such statistics, so they are compared with `loss`; its presets do, and are
compared twice, without them and with them. Divergences of whole distributions are random numbers
here: `exact_kl.py` times their computation. A row above 3 times the loss of `ppo_clip` needs a
reason in `REASONS`; without one, or where a loss disagrees with verl's, the exit code is 1.
"""

import argparse
import contextlib
import functools
import io
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from correction import ragged
from measure import interleaved_medians, machine
from torch import Tensor

from offdrift.correction.statistics import divergence_name
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, Method, method, override
from offdrift.methods.table import FAMILIES
from offdrift.segments import Segments
from offdrift.stats.drift import DriftStats
from offdrift.stats.summary import summarize

BASE = "ppo_clip"
LIMIT = 3.0
"""Times the loss of `BASE` above which a row has to say why."""

SORTS = "sorts the step's tokens, in float64"
PREFIX = "running sums over each response in float64, forward and backward"
REASONS: dict[str, str] = {
    "clip_cov": f"{SORTS}; hashes every token, so that the choice does not depend on the split",
    "kl_cov": f"{SORTS}; hashes every token, so that ties do not depend on the split",
    "m2po": SORTS,
    "m2po_drop": SORTS,
    "espo": "sorts each response's tokens by entropy, sums over two groups of each",
    "prefix_is": PREFIX,
    "ctpo": PREFIX,
    "ctpo_paper": PREFIX,
    "minpro": "running minimum of each response: log2(longest) passes over all tokens",
    "minpro_ppo": "running minimum of each response: log2(longest) passes over all tokens",
}
"""What the formula of a slow row needs."""
KINDS = ("loss", "whole")
TOLERANCE = 1e-4
"""Relative; float32 sums of a million terms."""


# -- the batch ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The same tokens twice, with every fact that a method may ask for."""

    cu_seqlens: Tensor
    turns: Tensor
    groups: Tensor
    packed: dict[str, Tensor]
    """rollout, old, logp, ref, advantages."""
    padded: dict[str, Tensor]
    mask: Tensor
    facts: dict[str, Any]
    divergences: dict[str, Divergence]

    @property
    def tokens(self) -> int:
        return len(self.packed["rollout"])

    def fresh(self) -> LogProbs:
        """The packed batch with nothing that an earlier call derived and cached."""
        segments = Segments(self.cu_seqlens, Segments(self.turns), self.groups)
        given, logp = self.packed, self.packed["logp"].detach().requires_grad_()
        return LogProbs(given["rollout"], segments, logp, given["old"], given["ref"])

    def evidence(self, row: Method) -> dict[str, Any]:
        """What `policy_loss` takes besides log-probs; the divergences that the row's gates read."""
        wanted = {divergence_name(g.statistic, g.on) for g in row.correction.gates if g.exact}  # type: ignore[attr-defined]
        return {**self.facts, "divergences": {name: self.divergences[name] for name in wanted}}


def make_batch(sequences: int, longest: int) -> Batch:
    """Prompts of eight responses of three turns; current policy as far from the old as that from the rollout."""
    given, generator = ragged(sequences, longest), torch.Generator().manual_seed(1)
    segments, n = given.segments, given.segments.num_tokens

    def exponential(rate: float) -> Tensor:
        return torch.empty(n).exponential_(rate, generator=generator)

    def moved(by: float) -> Tensor:
        noise = torch.randn(n, generator=generator) * (1 + 8 * (exponential(1.0) > 4.6))
        return (given.old + by * noise).clamp(max=0.0)

    rewards = (torch.rand(sequences, generator=generator) < 0.4).float()
    packed = {
        "rollout": given.rollout,
        "old": given.old,
        "logp": moved(0.05),
        "ref": moved(0.1),
        "advantages": segments.spread((rewards - rewards.mean()) / rewards.std()),
    }
    empty, mask = torch.zeros(sequences, longest), given.mask.bool()
    first, second = segments.lengths // 3, segments.lengths // 3
    turns = torch.stack([first, second, segments.lengths - first - second], dim=1)
    names = [f"{d}_rollout_{policy}" for d in ("kl", "tv") for policy in ("current", "old")]
    return Batch(
        cu_seqlens=segments.cu_seqlens,
        turns=Segments.from_lengths(turns.flatten()).cu_seqlens,
        groups=torch.arange(sequences) // 8,
        packed=packed,
        padded={name: empty.masked_scatter(mask, x) for name, x in packed.items()},
        mask=given.mask,
        facts={
            "entropy": exponential(1.0),
            "vocab": 151_936,
            "rewards": rewards,
            "version_lag": segments.spread(torch.randint(4, (sequences,), generator=generator)),
            "horizon": longest,
        },
        divergences={name: Divergence.exact(name, exponential(1e3)) for name in names},
    )


# -- ours -----------------------------------------------------------------------------------------

Outcome = tuple[Tensor, Tensor]
"""Loss, and its gradient to logp."""
NO_STATISTICS = DriftStats((), torch.zeros(0), (), torch.zeros(0), {})


@contextlib.contextmanager
def without_statistics() -> Iterator[None]:
    """`policy_loss` as it is, except that it summarizes nothing."""
    with patch.object(DriftStats, "of", staticmethod(lambda *_, **__: NO_STATISTICS)):
        yield


def loss(batch: Batch, row: Method) -> Outcome:
    logprobs = batch.fresh()
    with without_statistics():
        out = policy_loss(logprobs, row, batch.packed["advantages"], **batch.evidence(row))
    return _with_gradient(out.loss, logprobs.current)


def whole(batch: Batch, row: Method) -> Outcome:
    logprobs = batch.fresh()
    out = policy_loss(logprobs, row, batch.packed["advantages"], **batch.evidence(row))
    summarize(out.stats)
    return _with_gradient(out.loss, logprobs.current)


def loss_from_padded(batch: Batch, row: Method) -> Outcome:
    """`loss`, packing included; for rows that need no further facts."""
    given, leaf = batch.padded, batch.padded["logp"].detach().requires_grad_()
    old = given["old"] if row.needs_old else None
    logprobs = LogProbs.pack(given["rollout"], leaf, old, mask=batch.mask)
    advantages = logprobs.like_caller(given["advantages"])
    with without_statistics():
        out = policy_loss(logprobs, row, advantages, horizon=batch.facts["horizon"])
    return _with_gradient(out.loss, leaf)


def _with_gradient(value: Tensor, leaf: Tensor) -> Outcome:
    return value.detach(), torch.autograd.grad(value, leaf)[0]


# -- verl -----------------------------------------------------------------------------------------

HOW = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "fixed": "seq-mean-token-sum-norm",
}
NEVER = 1e9
"""verl's dual clip cannot be switched off."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """verl's function for a row, set to the row's numbers."""

    loss: str
    anchor: str = "old"
    limits: tuple[float, ...] = ()
    """clip_ratio_low, clip_ratio_high, clip_ratio_c; verl's own where they end."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of its `policy_loss`."""
    correction: Any = None
    """Its rollout correction; where there is one, it takes metrics, too."""
    check: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
    """Changes to the row, and to `options`, under which both must agree."""
    note: str = ""


PEERS: dict[str, Peer] = {
    "ppo_clip": Peer(loss="vanilla", limits=(0.2, 0.2, NEVER)),
    "dual_clip": Peer(loss="vanilla"),
    "gspo_token": Peer(loss="gspo", limits=(3e-4, 4e-4)),
    "gmpo": Peer(loss="geo_mean", limits=(0.4, 0.4)),
    "sapo": Peer(loss="sapo"),
    "gpg": Peer(loss="gpg"),
    "cispo": Peer(loss="cispo"),
    "dro": Peer(loss="dro", options={"dro_beta": 0.1}),
    "dppo_tv": Peer(loss="dppo_tv", anchor="rollout", limits=(0.15, 0.15, 20.0)),
    "dppo_kl": Peer(loss="dppo_kl", anchor="rollout", limits=(0.05, 0.05, 20.0)),
    "kl_cov": Peer(loss="kl_cov", options={"ppo_kl_coef": 1.0}),
    "clip_cov": Peer(
        loss="clip_cov",
        check=({"objective.fraction": 1.0}, {"clip_cov_ratio": 1.0}),
        note="both choose at random: compared with every candidate chosen",
    ),
}


@functools.cache
def load_verl() -> SimpleNamespace | None:
    """The parts of verl that are called; None where it cannot be imported."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = import_module("verl.workers.config")
            return SimpleNamespace(
                core=import_module("verl.trainer.ppo.core_algos"),
                helper=import_module("verl.trainer.ppo.rollout_corr_helper"),
                correction=import_module("verl.trainer.config.algorithm").RolloutCorrectionConfig,
                actor=config.ActorConfig,
                options=config.PolicyLossConfig,
            )
    except ImportError:
        return None


def peer_of(verl: SimpleNamespace, name: str) -> Peer | None:
    """verl's function for a row; None where it has none."""
    if name not in FAMILIES["presets"]:
        return PEERS.get(name)
    correction = getattr(verl.correction, name)()
    if not correction.bypass_mode:
        return Peer(loss="vanilla", correction=correction)
    kind = "vanilla" if correction.loss_type == "ppo_clip" else "reinforce"
    options = {"rollout_correction": correction}
    return Peer(loss=kind, anchor="rollout", options=options, correction=correction)


def verls(
    verl: SimpleNamespace, batch: Batch, row: Method, peer: Peer, *, metrics: bool = False
) -> Outcome:
    """verl's correction and loss; without the metrics it takes of the correction, or with them."""
    leaf = batch.padded["logp"].detach().requires_grad_()
    common = {
        "log_prob": leaf,
        "advantages": batch.padded["advantages"],
        "loss_agg_mode": HOW[row.aggregate],
        "config": actor_config(verl, batch, peer),
    }
    first, bypass = batch.padded[peer.anchor], peer.anchor == "rollout"
    if metrics and bypass:  # its function corrects, counts and pushes
        function = verl.core.get_policy_loss_fn("bypass_mode")
        value, _ = function(first, response_mask=batch.mask, **common)
        return _with_gradient(value, leaf)
    mask, weights = batch.mask, None
    if peer.correction is not None:
        second = leaf.detach() if bypass else batch.padded["old"]
        mask, weights = corrected(verl, batch, peer.correction, second, metrics=metrics)
    if peer.loss == "reinforce":
        function = verl.core.compute_policy_loss_reinforce
    else:
        function = verl.core.get_policy_loss_fn(peer.loss)
        weights = None if bypass else weights
    value, _ = function(first, response_mask=mask, rollout_is_weights=weights, **common)
    return _with_gradient(value, leaf)


def actor_config(verl: SimpleNamespace, batch: Batch, peer: Peer) -> Any:
    """Its configuration, told to divide by all that was sampled."""
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    counts = {"batch_num_tokens": batch.tokens, "global_batch_size": len(batch.mask), "dp_size": 1}
    return verl.actor(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=verl.options(**peer.options),
        global_batch_info={**counts, "loss_scale_factor": batch.facts["horizon"]},
        **dict(zip(names, peer.limits)),
    )


def corrected(
    verl: SimpleNamespace, batch: Batch, config: Any, second: Tensor, *, metrics: bool
) -> tuple[Tensor, Tensor | None]:
    """Mask and weights of verl's rollout correction."""
    rollout, mask = batch.padded["rollout"], batch.mask
    weighting = {
        "rollout_is": config.rollout_is,
        "rollout_is_threshold": config.rollout_is_threshold,
    }
    rejecting = {
        "rollout_rs": config.rollout_rs,
        "rollout_rs_threshold": config.rollout_rs_threshold,
    }
    if metrics:
        correct = verl.helper.compute_rollout_correction_and_rejection_mask
        weights, mask, _ = correct(second, rollout, mask, **weighting, **rejecting)
        return mask, None if weights is None else weights.batch["rollout_is_weights"]
    log_ratio, weights = second - rollout, None
    if config.rollout_is is not None:
        weigh = verl.helper.compute_rollout_correction_weights
        weights, _ = weigh(log_ratio, mask, **weighting)
    if config.rollout_rs is not None:
        mask, _ = verl.helper.compute_rollout_rejection_mask(log_ratio, mask, **rejecting)
    return mask, weights


# -- one row --------------------------------------------------------------------------------------


def measure(batch: Batch, name: str, repeats: int) -> dict[str, Any]:
    """Seconds of a row beside those of `BASE` and of verl, and whether verl gives the same loss."""
    row, base, verl = METHODS[name], METHODS[BASE], load_verl()
    arms: dict[str, Callable[[], object]] = {
        f"{BASE}, loss": lambda: loss(batch, base),
        f"{BASE}, whole": lambda: whole(batch, base),
        "loss": lambda: loss(batch, row),
        "whole": lambda: whole(batch, row),
    }
    seconds = interleaved_medians(arms, repeats=repeats)
    found: dict[str, Any] = {
        "seconds": seconds,
        "ns_per_token": {kind: 1e9 * seconds[kind] / batch.tokens for kind in KINDS},
        "times_base": {kind: seconds[kind] / seconds[f"{BASE}, {kind}"] for kind in KINDS},
    }
    peer = None if verl is None else peer_of(verl, name)
    if verl is not None and peer is not None:
        found["verl"] = beside_verl(verl, batch, row, peer, repeats=(repeats + 1) // 2)
    return found


def beside_verl(
    verl: SimpleNamespace, batch: Batch, row: Method, peer: Peer, *, repeats: int
) -> dict[str, Any]:
    arms: dict[str, Callable[[], object]] = {
        "loss": lambda: loss(batch, row),
        "loss, padded": lambda: loss_from_padded(batch, row),
        "verl": lambda: verls(verl, batch, row, peer),
    }
    if peer.correction is not None:
        arms["whole"] = lambda: whole(batch, row)
        arms["verl, with metrics"] = lambda: verls(verl, batch, row, peer, metrics=True)
    seconds = interleaved_medians(arms, repeats=repeats)
    faster = {ours: seconds["verl"] / seconds[ours] for ours in ("loss", "loss, padded")}
    if peer.correction is not None:
        faster["whole"] = seconds["verl, with metrics"] / seconds["whole"]
    found = {"function": peer.loss, "seconds": seconds, "times_faster": faster}
    return {**found, "disagreement": disagreement(verl, batch, row, peer), "note": peer.note}


def disagreement(verl: SimpleNamespace, batch: Batch, row: Method, peer: Peer) -> dict[str, float]:
    """Relative difference of all our losses, and of their gradients, to verl's."""
    ours_differ, verls_differ = peer.check
    row, peer = override(row, ours_differ), replace(peer, options={**peer.options, **verls_differ})
    theirs = [verls(verl, batch, row, peer)]
    if peer.correction is not None:
        theirs.append(verls(verl, batch, row, peer, metrics=True))
    inside, given = batch.mask.bool(), loss_from_padded(batch, row)
    mine = [loss(batch, row), whole(batch, row), (given[0], given[1][inside])]
    pairs = [(a, (value, grad[inside])) for a in mine for value, grad in theirs]
    return {
        what: max(float((a[i] - b[i]).norm() / b[i].norm()) for a, b in pairs)
        for i, what in enumerate(("loss", "gradient"))
    }


# -- all rows -------------------------------------------------------------------------------------


def failures(found: Mapping[str, Any]) -> list[str]:
    """What the run may not leave unsaid."""
    slow = [
        f"{name} takes {row['times_base']['loss']:.1f} times the loss of {BASE}: find out why, then say so in REASONS"
        for name, row in found.items()
        if row["times_base"]["loss"] > LIMIT and name not in REASONS
    ]
    differing = [
        f"{name}: {what} differs from verl's by {by:.1e} of it"
        for name, row in found.items()
        for what, by in row.get("verl", {}).get("disagreement", {}).items()
        if not by <= TOLERANCE
    ]
    return slow + differing


def show(found: Mapping[str, Any]) -> None:
    """A table by family, slowest first."""
    head = f"{'':28}{'loss':>9}{'x base':>8}{'whole':>9}{'x base':>8}{'verl/loss':>11}{'/padded':>9}{'/whole':>8}"
    for family, rows in FAMILIES.items():
        mine = sorted(found.keys() & rows, key=lambda name: -found[name]["times_base"]["loss"])
        if mine:
            print(f"\n{family}\n{head}")
        for name in mine:
            row = found[name]
            ours = "".join(
                f"{row['ns_per_token'][k]:9.1f}{row['times_base'][k]:8.2f}" for k in KINDS
            )
            faster = row.get("verl", {}).get("times_faster", {})
            widths = {"loss": 11, "loss, padded": 9, "whole": 8}
            print(f"{name:28}{ours}" + "".join(f"{faster[k]:{w}.1f}" for k, w in widths.items() if k in faster))  # fmt: skip
    print(f"\nloss, whole: ns per token; base: {BASE}; /whole: both with metrics")


def show_reasons(found: Mapping[str, Any]) -> None:
    slow = [name for name in found if found[name]["times_base"]["loss"] > LIMIT]
    print(f"\nabove {LIMIT:g} times {BASE}:" + ("" if slow else " none"))
    for name in slow:
        times = found[name]["times_base"]["loss"]
        print(f"  {name:18}{times:6.1f}  {REASONS.get(name, 'NO REASON IS KNOWN')}")
    with_verl = {name: row["verl"] for name, row in found.items() if "verl" in row}
    if with_verl:
        worst = max(max(v["disagreement"].values()) for v in with_verl.values())
        print(f"{len(with_verl)} losses and gradients agree with verl's to {worst:.1e}")
        for name, v in with_verl.items():
            if v["note"]:
                print(f"  {name}: {v['note']}")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(METHODS), help="names, joined by commas")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat: shows that it runs")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    names = args.rows.split(",")
    batch, facts = make_batch(args.sequences, args.longest), machine("verl")
    print(f"{args.sequences} sequences, {batch.tokens:,} tokens, padded to {args.longest}\n{facts}")
    if load_verl() is None:
        print("verl cannot be imported here: ours is timed alone")
    rows, start = {}, time.perf_counter()
    for i, name in enumerate(names, 1):
        method(name)  # a misspelled one is an error that names its neighbors
        rows[name] = measure(batch, name, 1 if args.quick else args.repeats)
        done = time.perf_counter() - start
        print(f"{i}/{len(names)} {name}, {done:.0f} s", file=sys.stderr)
    show(rows)
    show_reasons(rows)
    found = {"machine": facts, "tokens": batch.tokens, "reasons": REASONS, "rows": rows}
    found["failures"] = failures(rows)
    print("".join(f"\nFAILED: {words}" for words in found["failures"]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(bool(main()["failures"]))
