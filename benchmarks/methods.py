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
from offdrift.methods import METHODS, Method, override
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
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of verl's actor configuration."""
    correction: Any = None
    """verl's rollout correction configuration; where there is one, verl takes metrics, too."""
    check: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
    """Changes to the row and to `fields` under which both must agree, where `note` says why."""
    note: str = ""


def _limits(low: float, high: float, dual: float | None = None) -> dict[str, float]:
    limits = {"clip_ratio_low": low, "clip_ratio_high": high}
    return limits if dual is None else {**limits, "clip_ratio_c": dual}


ALL = {"clip_cov_ratio": 1.0}
PEERS: dict[str, Peer] = {
    "ppo_clip": Peer(loss="vanilla", fields={"clip_ratio_c": NEVER}),
    "dual_clip": Peer(loss="vanilla"),
    "gspo_token": Peer(loss="gspo", fields=_limits(3e-4, 4e-4)),
    "gmpo": Peer(loss="geo_mean", fields=_limits(0.4, 0.4)),
    "sapo": Peer(loss="sapo", fields={"tau_pos": 1.0, "tau_neg": 1.05}),
    "gpg": Peer(loss="gpg"),
    "cispo": Peer(loss="cispo"),
    "dro": Peer(loss="dro", fields={"policy_loss": {"dro_beta": 0.1}}),
    "dppo_tv": Peer(loss="dppo_tv", anchor="rollout", fields=_limits(0.15, 0.15, 20.0)),
    "dppo_kl": Peer(loss="dppo_kl", anchor="rollout", fields=_limits(0.05, 0.05, 20.0)),
    "kl_cov": Peer(
        loss="kl_cov", fields={"policy_loss": {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0}}
    ),
    "clip_cov": Peer(
        loss="clip_cov",
        check=({"objective.fraction": 1.0}, {"policy_loss": {"clip_cov_ratio": 1.0}}),
        note="tokens are chosen at random, in verl by rank: agreement is that of all candidates",
    ),
}


@functools.cache
def load_verl() -> SimpleNamespace | None:
    """The parts of verl that are called, or None where it cannot be imported."""
    try:
        with contextlib.redirect_stderr(None), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return SimpleNamespace(
                core=import_module("verl.trainer.ppo.core_algos"),
                helper=import_module("verl.trainer.ppo.rollout_corr_helper"),
                actor=import_module("verl.workers.config").ActorConfig,
                correction=import_module("verl.trainer.config.algorithm").RolloutCorrectionConfig,
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
    fields = {"policy_loss": {"rollout_correction": correction}}
    return Peer(loss=kind, anchor="rollout", fields=fields, correction=correction)


def verls(
    verl: SimpleNamespace, batch: Batch, row: Method, peer: Peer, *, metrics: bool = False
) -> Callable[[], Outcome]:
    """verl's loss, with or without what it measures besides; it divides by all that was sampled."""
    counts = {"batch_num_tokens": batch.tokens, "global_batch_size": len(batch.mask), "dp_size": 1}
    counts["loss_scale_factor"] = batch.facts["horizon"]
    scale = {"loss_scale_factor": batch.facts["horizon"], "global_batch_info": counts}
    config = verl.actor(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **scale, **peer.fields)
    given, how = batch.padded, HOW[row.aggregate]
    leaf = given["logp"].detach().requires_grad_()
    bypass = peer.correction is not None and peer.correction.bypass_mode

    def run() -> Outcome:
        common = {"log_prob": leaf, "advantages": given["advantages"], "loss_agg_mode": how, "config": config}  # fmt: skip
        if bypass and metrics:
            function = verl.core.get_policy_loss_fn("bypass_mode")
            value, _ = function(
                old_log_prob=given["rollout"], response_mask=batch.mask, **common
            )
            return _with_gradient(value, leaf)
        mask, weights = batch.mask, None
        if peer.correction is not None:
            second = leaf.detach() if bypass else given["old"]
            mask, weights = corrected(verl, peer.correction, second, batch, metrics=metrics)
        common["response_mask"] = mask
        if peer.loss == "reinforce":
            value, _ = verl.core.compute_policy_loss_reinforce(
                given["rollout"], rollout_is_weights=weights, **common
            )
        else:
            function = verl.core.get_policy_loss_fn(peer.loss)
            weights = None if bypass else weights
            value, _ = function(
                old_log_prob=given[peer.anchor], rollout_is_weights=weights, **common
            )
        return _with_gradient(value, leaf)

    return run
