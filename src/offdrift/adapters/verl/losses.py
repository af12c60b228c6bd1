"""Methods as verl policy losses.

In bypass mode verl's old policy *is* the rollout policy; in decoupled mode it is the training engine at the sampling
weights, and the driver has turned the mismatch of the engines into `rollout_is_weights`: a weight on the mismatch,
which a method that contains that ratio already refuses. Nothing is counted twice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.adapters.base import environ, environ_on_idle, environ_settings, liveness, log_states, undecided
from offdrift.adapters.verl.call import Call
from offdrift.adapters.verl.proof import prove_loss
from offdrift.batch_info import LOGITS, NO_INFO, BatchInfo
from offdrift.correction import Correction
from offdrift.correction.compose import WeightLike, factors
from offdrift.correction.weight import Weighted
from offdrift.errors import EvidenceError, LivenessError, MethodError, check_choice
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss, policy_loss
from offdrift.methods import METHODS, Method, method, override
from offdrift.methods.load import absolute, in_code
from offdrift.ratios import RatioName
from offdrift.segments import Segments
from offdrift.stats import DriftStats, summarize

LOG = logging.getLogger("offdrift.verl")

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, float]]]

AGGREGATES = {
    "token-mean": "token_mean",
    "token-sum": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "fixed",
    "seq-mean-token-mean": "seq_mean_token_mean",
}
"""verl's `loss_agg_mode` -> ours."""

DECLARE = (
    "actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction} "
    "(with a + on the command line), and algorithm.rollout_correction.bypass_mode=true"
)


@dataclass(frozen=True, eq=False)
class DriverWeight:
    """The driver's `rollout_is_weights`: a weight on the mismatch that was computed elsewhere."""

    weight: Float[Tensor, " n"]
    on: RatioName = "mismatch"
    advantage: str = "any"
    formula: str = "weight of the driver on ratio(mismatch)"

    def __call__(
        self, logprobs: LogProbs, advantages: Tensor | None = None, batch_info: BatchInfo = NO_INFO
    ) -> Weighted:
        return Weighted(self.weight.detach(), torch.zeros_like(self.weight, dtype=torch.bool))


def policy_loss_named(name: str) -> PolicyLossFn:
    """The row as a function that verl's `register_policy_loss` takes.

    It aggregates by verl's `loss_agg_mode` and divides by the counts of the whole mini-batch, which
    verl passes in `config.global_batch_info`, so that micro-batches and ranks add up. Numbers of the
    method are the row's, changed by `OFFDRIFT_SETTINGS`; verl's `clip_ratio*` are not read.

    Raises, when called: `EvidenceError` naming what the method needs and verl does not pass;
        `MethodError` if a ratio would be counted twice, or counts are missing; `LivenessError` if,
        the first time, a part that was configured cannot act; `FrameworkError` if, then, verl's own plain
        loss is not ours (see `verl.proof`).
    """

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        row, share = configured(name), loss_share(configured(name))
        check_choice("loss_agg_mode", loss_agg_mode, list(AGGREGATES))
        _check(name, row, config, rollout_is_weights)
        if not bool(response_mask.any()):  # a product with zero would keep NaN of the padding
            nothing = torch.zeros_like(log_prob, dtype=torch.bool)
            return log_prob.where(nothing, 0.0).sum(), dict.fromkeys(_metric_names(share), 0.0)
        call = Call(
            old_log_prob,
            log_prob,
            advantages,
            response_mask,
            how=loss_agg_mode,
            config=config,
            weights=rollout_is_weights,
        )
        if share.needs_whole_step:
            _check_whole(name, call)
        result = loss_of(share, call)
        prove_loss(call, loss_of)
        _check_alive(name, share, result.stats)
        # verl averages metrics over micro-batches and ranks, whatever their sizes. One host transfer.
        metrics = summarize(result.stats)
        return result.loss, {k: metrics.get(x, 0.0) for k, x in _metric_names(share).items()}

    loss.__name__ = loss.__qualname__ = f"offdrift_{name}"
    return loss


def _check_whole(name: str, call: Call) -> None:
    """Refuse a micro-batch that is a part of what the method must see at once."""
    tokens, all_tokens = int(call.mask.count_nonzero()), call.counts.get("batch_num_tokens")
    ranks = call.counts.get("dp_size") or 1
    if ranks > 1 or (all_tokens is not None and int(all_tokens) != tokens):
        raise EvidenceError(
            f"offdrift/{name} looks at a whole mini-batch before it acts, and verl hands its loss "
            f"{tokens} of {all_tokens} tokens on one of {ranks} ranks; make the micro-batch the "
            "mini-batch on one rank, or choose another row"
        )


def loss_of(share: Method, call: Call) -> PolicyLoss:
    """The loss of a method on what verl hands over, by verl's aggregate and counts."""
    old = None if reads_rollout(share) else call.old
    packed = LogProbs.pack(call.old, call.logp, old, mask=call.mask)
    correction = share.correction
    if call.weights is not None:
        weight: WeightLike = DriverWeight(packed.like_caller(call.weights))
        correction = correction & weight
    return policy_loss(
        packed,
        replace(share, correction=correction, aggregate=AGGREGATES[call.how]),
        packed.like_caller(call.advantages),
        BatchInfo(observed="this_batch"),  # it is the whole mini-batch, where that matters
        normalizer=_normalizer(call.how, call.counts, packed),
    )


def with_code(find: Callable[..., PolicyLossFn]) -> Callable[..., PolicyLossFn]:
    """verl's look-up of a policy loss that knows methods in code, too: "offdrift//folder/mine.py:mine".

    Any other name is left to verl.
    """

    @functools.wraps(find)
    def look_up(name: str) -> PolicyLossFn:
        method_name = str(name).removeprefix("offdrift/")
        if method_name == name or not in_code(method_name):
            return find(name)
        configured(method_name)  # what is wrong with it is said before the first batch
        return policy_loss_named(method_name)

    return look_up


@functools.cache
def configured(name: str) -> Method:
    """The row of that name, with `OFFDRIFT_SETTINGS` if those are meant for it."""
    chosen = environ("METHOD")
    if chosen is not None and in_code(name) and in_code(chosen):
        chosen, name = absolute(chosen), absolute(name)
    meant = chosen in (None, name)
    return override(method(name), environ_settings() if meant else {})


def _check(name: str, row: Method, config: Any, weights: Tensor | None) -> None:
    """Refuse what verl's call cannot mean."""
    lacks, share = missing(row), driver_share(row)
    if "distributions" in row.needs:
        raise EvidenceError(
            f"offdrift/{name} projects whole distributions of the old and the current policy, and verl hands its "
            f"policy loss log-probs of the drawn tokens alone: {LOGITS}"
        )
    if lacks:
        raise EvidenceError(
            f"offdrift/{name} needs {', '.join(lacks)}; verl hands its policy loss the current and "
            "the old log-probs, advantages, the mask and the driver's weights, and nothing else. "
            f"{len(runnable())} rows need no more: offdrift.adapters.verl.losses.runnable()"
        )
    if reads_rollout(loss_share(row)):
        if weights is not None:
            raise MethodError(
                f"offdrift/{name} contains the full ratio, and verl's driver passed "
                "rollout_is_weights, its mismatch factor, as well: it would count twice. Set "
                "algorithm.rollout_correction.rollout_is=null and bypass_mode=true"
            )
        policy = getattr(config, "policy_loss", None)
        block = None if policy is None else policy.get("rollout_correction", None)
        if not (block is not None and block.get("bypass_mode", False)):
            raise EvidenceError(
                f"offdrift/{name} compares with the rollout policy, whose log-probs verl passes in "
                f"bypass mode alone, and nothing here says that it is on; set {DECLARE}"
            )
    elif weights is None and (share.gates or share.weights):
        parts = "; ".join(p.formula for p in (*share.gates, *share.weights))
        raise EvidenceError(
            f"offdrift/{name} leaves [{parts}] to verl's driver, which passed no "
            f"rollout_is_weights; call offdrift.adapters.verl.install({name!r}) there, or set "
            f"OFFDRIFT_METHOD={name}, with actor_rollout_ref.rollout.calculate_log_probs=true"
        )


def _normalizer(mode: str, counts: Mapping[str, Any], packed: LogProbs) -> float:
    """Denominator of the loss sum of this micro-batch, as in verl's `agg_loss`. Where verl passes no counts, those of
    all sequences that were passed in, including sequences that a gate rejected entirely.

    Where verl passes no counts, of all sequences handed in: those that were rejected whole, too.
    """
    ranks = counts.get("dp_size") or 1
    if mode == "token-sum":
        return 1 / ranks
    key = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    count = counts.get(key)
    if count is None and ranks > 1:
        raise MethodError(f"loss_agg_mode={mode!r} on {ranks} ranks needs {key} of all of them")
    here = packed.segments.num_tokens if mode == "token-mean" else len(packed.segments)
    count = max(float(here if count is None else count), 1.0)
    if mode == "seq-mean-token-sum-norm":
        factor = counts.get("loss_scale_factor")
        if factor is None:
            raise MethodError(
                f"loss_agg_mode={mode!r} needs actor.loss_scale_factor (tokens per sequence); verl's "
                "default is the width of the micro-batch, which differs from one to the next"
            )
        count *= factor
    return count / ranks


def _metric_names(share: Method) -> dict[str, str]:
    """Names of what a call returns for verl to log, always the same as verl demands, and ours."""
    on = "full" if reads_rollout(share) else "staleness"
    same = [f"{on}/k3", f"{on}/abs_log_ratio_mean", f"{on}/log_ppl_gap", "weight/mean"]
    same += ["gate/drop_frac_token"] * bool(share.correction.gates)
    theirs = {"actor/ppo_kl": f"{on}/k1", "actor/pg_clipfrac": "objective/clip_frac_active"}
    return theirs | {f"offdrift/{name}": name for name in same}


_REPORTED: set[str] = set()


def _check_alive(name: str, share: Method, stats: DriftStats) -> None:
    """The first time that it can be told, log what each part of the loss did. Raises: `LivenessError`."""
    if name in _REPORTED:
        return
    strict, numbers = environ_on_idle() == "error", stats.to_host()
    if undecided(numbers):
        return
    _REPORTED.add(name)
    LOG.info("offdrift/%s: %s", name, share.describe())
    dead = log_states(LOG, liveness(numbers, share))
    if dead and strict:
        raise LivenessError(
            f"offdrift/{name}: {dead}. verl's old log-probs equal the current ones: it recomputed "
            "them (bypass_mode=false), or the engines agree to the last bit; OFFDRIFT_ON_IDLE=warn goes on "
            "regardless"
        )


# Which part of a method runs where: verl's driver knows the rollout and the old policy; its policy loss the old and the
# current one, or in bypass mode the rollout and the current one.


def driver_share(row: Method, *, on_mismatch: bool = True) -> Correction:
    """The gates and weights that verl's driver can apply: those on the mismatch (or the others)."""
    gates = tuple(gate for gate in row.correction.gates if (gate.on == "mismatch") == on_mismatch)
    return Correction(gates, tuple(w for w in row.correction.weights if (w.on == "mismatch") == on_mismatch))


def loss_share(row: Method) -> Method:
    """The method without its driver's share."""
    return replace(row, correction=driver_share(row, on_mismatch=False))


@functools.cache
def missing(row: Method) -> tuple[str, ...]:
    """List the inputs that the method needs and verl's policy loss does not get; empty if the method can run.

    Example:
        >>> missing(METHODS["trm_max"]), missing(METHODS["icepop"])
        (('divergences of whole distributions',), ())
    """
    share = loss_share(row)
    lags = any(getattr(g, "statistic", "") == "version_lag" for g in row.correction.gates)
    needs = row.needs | {"version_lag"} if lags else row.needs
    driven = driver_share(row)
    reads_turns = any(
        str(getattr(p, "unit", "")).startswith("turn") or type(p).__name__ == "TurnNormalized" for p in row.parts
    )
    lacks = {
        "divergences of whole distributions": row.needs_divergences and "distributions" not in row.needs,
        "rollout and old log-probs at once": reads_rollout(share) and share.needs_old,
        "turns": reads_turns,
        "log-probs of the reference policy (use actor.use_kl_loss with another row)": row.needs_reference,
        "the learning rate, which this method scales": row.lr_scale is not None,
        "the end of a step, where it adapts": any(hasattr(part, "next") for part in row.parts),
        "advantages in the driver's correction, which comes before them": any(
            signed(p) for p in (*driven.gates, *driven.weights)
        ),
    }
    absent = [f"{name} of the batch" for name in sorted(needs)] + [name for name, lack in lacks.items() if lack]
    if absent:
        return tuple(absent)
    # Try it on two sequences of one token, with what verl passes.
    logp = torch.tensor([-1.0, -2.0])
    bare = LogProbs.pack(logp, logp, logp, segments=Segments.from_lengths([1, 1]))
    try:
        policy_loss(bare, replace(share, aggregate="token_mean"), torch.tensor([1.0, -1.0]))
    except EvidenceError as e:
        return ("prompt groups" if "group_ids" in str(e) else str(e),)
    return ()


def signed(part: Any) -> bool:
    """Whether the part treats tokens by the sign of their advantage."""
    return getattr(part, "advantage", "any") != "any"


def reads_rollout(share: Method) -> bool:
    """Whether the loss compares with the rollout policy: such a method needs bypass mode."""
    return any("mismatch" in factors(getattr(p, "on", None)) for p in share.parts)


def modes(row: Method) -> str:
    """In which of verl's modes the row's loss can run: "bypass", "decoupled", "either" or "none"."""
    if missing(row):
        return "none"
    if reads_rollout(loss_share(row)):
        return "bypass"
    share = driver_share(row)
    return "decoupled" if share.gates or share.weights else "either"


def runnable() -> dict[str, str]:
    """Rows whose loss runs inside verl, and in which mode: "bypass", "decoupled" or "either".

    Example:
        >>> rows = runnable()
        >>> rows["trm_max_k2"], rows["icepop"], rows["ppo_clip"], "trm_max" in rows
        ('bypass', 'decoupled', 'either', False)
    """
    return {name: mode for name, row in METHODS.items() if (mode := modes(row)) != "none"}
