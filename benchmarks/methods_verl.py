"""verl's own policy losses, set to the numbers of our rows, on the padded batch."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from methods_batch import Batch
from torch import Tensor

from offdrift.methods import Method
from offdrift.methods.table import FAMILIES

NEVER = 1e9
"""verl's dual clip cannot be switched off."""
HOW = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "fixed": "seq-mean-token-sum-norm",
}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One of verl's functions, set to a row's numbers."""

    function: str
    anchor: str = "old"
    """What it is given as the old policy."""
    limits: tuple[float, ...] = ()
    """clip_ratio_low, clip_ratio_high, clip_ratio_c; verl's own where they end."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of its `policy_loss` configuration."""
    correction: Any = None
    """Its rollout correction configuration, if it corrects; it then takes metrics of drift, too."""
    agree_if: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
    """Changes to the row and to `options` without which they are not meant to agree."""
    note: str = ""


PEERS: dict[str, Peer] = {
    "ppo_clip": Peer(function="vanilla", limits=(0.2, 0.2, NEVER)),
    "dual_clip": Peer(function="vanilla"),
    "gspo_token": Peer(function="gspo", limits=(3e-4, 4e-4)),
    "gmpo": Peer(function="geo_mean", limits=(0.4, 0.4)),
    "sapo": Peer(function="sapo"),
    "gpg": Peer(function="gpg"),
    "cispo": Peer(function="cispo"),
    "dro": Peer(function="dro", options={"dro_beta": 0.1}),
    "dppo_tv": Peer(function="dppo_tv", anchor="rollout", limits=(0.15, 0.15, 20.0)),
    "dppo_kl": Peer(function="dppo_kl", anchor="rollout", limits=(0.05, 0.05, 20.0)),
    "kl_cov": Peer(function="kl_cov", options={"ppo_kl_coef": 1.0}),
    "clip_cov": Peer(
        function="clip_cov",
        agree_if=({"objective.fraction": 1.0}, {"clip_cov_ratio": 1.0}),
        note="both choose among candidates at random: compared with all of them chosen",
    ),
}
"""Beside these, every preset."""


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
        return Peer(function="vanilla", correction=correction)
    function = "vanilla" if correction.loss_type == "ppo_clip" else "reinforce"
    options = {"rollout_correction": correction}
    return Peer(function=function, anchor="rollout", options=options, correction=correction)


def verl_step(
    verl: SimpleNamespace, batch: Batch, row: Method, peer: Peer, *, metrics: bool = False
) -> tuple[Tensor, Tensor]:
    """Correction, loss and gradient as verl computes them, with or without its metrics of drift."""
    leaf = batch.padded["logp"].detach().requires_grad_()
    common = {
        "log_prob": leaf,
        "advantages": batch.padded["advantages"],
        "loss_agg_mode": HOW[row.aggregate],
        "config": _actor(verl, batch, peer),
    }
    anchor, mask, weights = batch.padded[peer.anchor], batch.mask, None
    bypass = peer.correction is not None and peer.correction.bypass_mode
    if peer.correction is not None and not (bypass and metrics):
        second = leaf.detach() if bypass else batch.padded["old"]
        mask, weights = _corrected(verl, batch, peer.correction, second, metrics=metrics)
    if bypass and metrics:  # corrects, counts and pushes by itself
        function = verl.core.get_policy_loss_fn("bypass_mode")
    elif peer.function == "reinforce":
        function = verl.core.compute_policy_loss_reinforce
    else:
        function = verl.core.get_policy_loss_fn(peer.function)
    loss, _ = function(anchor, response_mask=mask, rollout_is_weights=weights, **common)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def _actor(verl: SimpleNamespace, batch: Batch, peer: Peer) -> Any:
    """Its configuration, told to divide by all that was sampled."""
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    counts = {"batch_num_tokens": batch.tokens, "global_batch_size": len(batch.mask), "dp_size": 1}
    return verl.actor(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=verl.options(**peer.options),
        global_batch_info={**counts, "loss_scale_factor": batch.horizon},
        **dict(zip(names, peer.limits)),
    )


def _corrected(
    verl: SimpleNamespace, batch: Batch, config: Any, second: Tensor, *, metrics: bool
) -> tuple[Tensor, Tensor | None]:
    """Mask and weights of its rollout correction."""
    rollout, mask = batch.padded["rollout"], batch.mask
    weighting, rejecting = (
        {f"rollout_{kind}{end}": getattr(config, f"rollout_{kind}{end}") for end in ("", "_threshold")}
        for kind in ("is", "rs")
    )  # fmt: skip
    if metrics:
        correct = verl.helper.compute_rollout_correction_and_rejection_mask
        proto, mask, _ = correct(second, rollout, mask, **weighting, **rejecting)
        return mask, None if proto is None else proto.batch["rollout_is_weights"]
    log_ratio, weights = second - rollout, None
    if config.rollout_is is not None:
        weigh = verl.helper.compute_rollout_correction_weights
        weights, _ = weigh(log_ratio, mask, **weighting)
    if config.rollout_rs is not None:
        mask, _ = verl.helper.compute_rollout_rejection_mask(log_ratio, mask, **rejecting)
    return mask, weights
