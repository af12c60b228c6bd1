"""One optimizer step: score, correct and push piece by piece, with the normalizer of the whole.

Pieces are cut by a token budget, so that memory is bounded whatever the batch. Each adds its share
of the gradient, divided by what was *sampled* over all pieces and all processes: the step does not
depend on how the batch was cut, nor over how many processes it was spread.

Methods that look at the whole step before they act (a normalized weight, a second moment, ...) take
one more forward pass without gradient wherever the step is cut into several pieces.

Memory of a piece, beyond the model's own activations: about five float32 tensors of
`response tokens x vocabulary`, at most `token_budget x vocabulary x 20` bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from torch import Tensor, nn

from offdrift.aggregate import normalizer_of
from offdrift.batch_info import Facts, Observed
from offdrift.certificate import BatchEvidence, TrustRegion
from offdrift.correction import Corrected
from offdrift.engines.score import Score, chunks, divergences, old_divergences, score
from offdrift.errors import EngineError
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss, policy_loss
from offdrift.methods import Method
from offdrift.records.rollouts import OLD_STATUS, Rollouts
from offdrift.segments import Segments
from offdrift.stats.drift import DriftStats, Tails
from offdrift.stats.metrics import gradient_power
from offdrift.stats.signature import signature
from offdrift.train.assess import Assessment
from offdrift.train.token_view import TokenView, Viewer

GROUPS_PER_PROCESS = 2**32


@dataclass(frozen=True)
class Batch:
    """What a step trains on: rollouts with their advantages and what other policies say of them."""

    rollouts: Rollouts
    advantages: Float[Tensor, " n"]
    old: Assessment | None = None
    """The old policy, where the method reads it."""
    logp_ref: Float[Tensor, " n"] | None = None
    """The reference policy."""
    tail_log_ratio_cap: float | None = None
    """What top-k evidence may assume of its tail, nats; see `engines.score.divergences`."""
    old_status: Int[Tensor, " n"] | None = None
    """How old log-probs were come by, as indices into `OLD_STATUS`; None if the method reads none."""
    old_is_current: bool = False
    """The weights that drew the batch are those of its only update: the step's own forward pass is the
    old policy's, and no other is made."""
    old_logits: Callable[[Rollouts], Tensor] | None = None
    """The old policy's tempered logits of a piece, `[n, v]`, where the method compares whole
    distributions of the old and the current policy: one more forward pass per piece."""

    def select(self, sequences: Tensor) -> Batch:
        """Some of the sequences, as a batch of their own."""
        rows = self.rollouts.segments.rows(sequences)
        return Batch(
            self.rollouts.select(sequences),
            self.advantages[rows],
            None if self.old is None else self.old.select(rows),
            None if self.logp_ref is None else self.logp_ref[rows],
            self.tail_log_ratio_cap,
            None if self.old_status is None else self.old_status[rows],
            self.old_is_current,
            self.old_logits,
        )


@dataclass(frozen=True)
class Update:
    """What a step did."""

    stats: DriftStats
    tokens: TokenView | None
    method: Method
    """The method of the next step: the same, unless it adapts."""
    evidence: BatchEvidence | None = None
    """What a certificate needs to know of the step, over all processes, before it was taken."""


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    method: Method,
    *,
    token_budget: int,
    max_grad_norm: float,
    version: int = 0,
    view: bool = False,
    region: TrustRegion | None = None,
) -> Update:
    """Take one optimizer step on a batch.

    Args:
        batch: this process's share of the step's sequences.
        token_budget: padded tokens per forward pass.
        version: optimizer steps taken before this one.
        view: also give per-token values, for samples and the token log.
        region: also collect the evidence for a certificate of this trust region.

    Returns: statistics over all processes; the gradient norm before clipping is `optim/grad_norm`.

    Raises: `EngineError` if the gradient is not finite; the model is left as it was.
    """
    how, horizon = method.aggregate, batch.rollouts.provenance.sampling.max_tokens
    share = normalizer_of(batch.rollouts.segments, how=how, horizon=horizon)
    world = accelerator.num_processes
    # Data-parallel wrappers average gradients over processes: multiplying by their number makes it
    # the sum that the global normalizer expects.
    normalizer = global_sum(accelerator, share) / world
    model.train()
    optimizer.zero_grad(set_to_none=True)
    stats: list[DriftStats] = []
    evidence: list[BatchEvidence] = []
    viewer = Viewer() if view else None
    tails = Tails()
    observed = _look_ahead(accelerator, model, batch, method, token_budget, version)
    for piece, last, counts in _pieces(accelerator, batch, token_budget):
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            seen = _See(model, batch.select(piece), version)
            result = seen.push(method, normalizer, observed)
            accelerator.backward(result.loss if counts else result.loss * 0.0)
        if counts:
            tails.add(seen.logprobs)
            stats.append(result.stats.with_sum("optim/loss", result.loss.detach() / world))
            if region is not None:
                evidence.append(seen.evidence(region, result))
            if viewer is not None:
                seen.show(viewer, batch.rollouts.segments.rows(piece), result)
            if observed is None and method.looks_ahead:
                observed = result.observed  # the only piece is the whole step
    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
    local = _with_batch_facts(DriftStats.merge_all(stats), batch, version)
    total = gather_stats(accelerator, local).plus(
        tails.sums(lambda mine: gather_object([mine]) if accelerator.num_processes > 1 else [mine])
    )
    norm = torch.as_tensor(0.0 if norm is None else norm).cpu()
    if not bool(norm.isfinite()):
        raise EngineError(
            f"the gradient norm is {norm.item()}; the step was not taken. Lower optim.lr, or look "
            "at the last batch's log-ratios (metrics full/abs_log_ratio_max, optim/loss)"
        )
    scale = _lr_scale(method, observed)
    with _scaled_lr(optimizer, scale):
        optimizer.step()
    total = total.with_max("optim/grad_norm", norm).with_max("optim/lr_scale", torch.tensor(scale))
    proof = gather_evidence(accelerator, evidence) if evidence else None
    shown = None if viewer is None else viewer.view()
    return Update(total, shown, _adapted(method, observed, total), proof)


def gather_stats(accelerator: Accelerator, stats: DriftStats) -> DriftStats:
    """The statistics of all processes together; every process gets them."""
    if accelerator.num_processes == 1:
        return stats
    # A few kilobytes per step; objects, because processes may know different positions.
    pieces = gather_object([stats.cpu()])
    return DriftStats.merge_all(pieces)


def gather_evidence(accelerator: Accelerator, parts: list[BatchEvidence]) -> BatchEvidence:
    """The evidence of all processes together; every process gets it."""
    local = BatchEvidence.merge_all(parts)
    if accelerator.num_processes == 1:
        return local
    # Each process numbers its own prompts from 0.
    ids = local.group_ids
    shifted = None if ids is None else ids + accelerator.process_index * GROUPS_PER_PROCESS
    return BatchEvidence.merge_all(gather_object([replace(local, group_ids=shifted).cpu()]))


def reduce_sum(accelerator: Accelerator, x: Tensor) -> Tensor:
    """A tensor summed over all processes."""
    if accelerator.num_processes == 1:
        return x
    return torch.stack(gather_object([x.cpu()])).sum(0).to(x.device)


def global_sum(accelerator: Accelerator, value: float) -> float:
    """A number summed over all processes."""
    if accelerator.num_processes == 1:
        return value
    return float(sum(gather_object([value])))


class _See:
    """One piece under the current policy: its log-probs, divergences, and what else is known."""

    def __init__(self, model: nn.Module, part: Batch, version: int) -> None:
        self.part = part
        rollouts, sampling = part.rollouts, part.rollouts.provenance.sampling
        logits_old = None if part.old_logits is None else part.old_logits(rollouts)
        self.scored: Score = score(
            model, rollouts, temperature=sampling.temperature, keep_graph=logits_old is not None
        )
        device = self.device = self.scored.logp.device
        self.divergences = divergences(
            rollouts, self.scored.logits.detach(), tail_log_ratio_cap=part.tail_log_ratio_cap
        )
        old = self._old(device)
        self.logprobs = LogProbs.pack(
            rollouts.logp_rollout.to(device),
            self.scored.logp,
            None if old is None else old.logp,
            logp_ref=None if part.logp_ref is None else part.logp_ref.to(device),
            segments=Segments(
                rollouts.cu_seqlens.to(device), group_ids=rollouts.group_ids.to(device)
            ),
        )
        if old is not None:
            self.divergences |= old.divergences
        if logits_old is not None:
            self.divergences |= old_divergences(logits_old, self.scored.logits)
        self.advantages = part.advantages.to(device)
        self.facts = {
            "entropy": None if old is None else old.entropy,
            "vocab": self.scored.logits.shape[1],
            "rewards": None if rollouts.rewards is None else rollouts.rewards.to(device),
            "version_lag": (version - rollouts.rollout_version).to(device),
        }

    def _old(self, device: torch.device) -> Assessment | None:
        """What the old policy says of the piece, on the piece's device."""
        if self.part.old is not None:
            return self.part.old.to(device)
        if not self.part.old_is_current:
            return None
        here, renamed = self.scored, {}
        for name, d in self.divergences.items():
            renamed[name.replace("current", "old")] = replace(
                d, name=name.replace("current", "old")
            )
        return Assessment(here.logp.detach(), here.entropy, here.sum_pi_squared, renamed)

    def push(self, method: Method, normalizer: float, observed: Observed | None) -> PolicyLoss:
        """Loss and statistics of the piece."""
        result = policy_loss(
            self.logprobs,
            method,
            self.advantages,
            divergences=self.divergences,
            **self.facts,
            observed=observed or "this_batch",  # see _look_ahead
            normalizer=normalizer,
            horizon=self.part.rollouts.provenance.sampling.max_tokens,
        )
        # What drift looks like, beside how large it is: the diagnosis reads both at every step.
        more = signature(self.logprobs, advantages=self.advantages)
        more["current/entropy"] = self.logprobs.at_scored(self.scored.entropy).sum()
        more |= self._power(result.corrected)
        return replace(result, stats=result.stats.plus(more))

    def _power(self, corrected: Corrected) -> dict[str, Tensor]:
        """What the piece contributes to the proxies of the gradient's noise."""
        return gradient_power(
            self.scored.sum_pi_squared,
            self.scored.logp.detach(),
            self.advantages,
            self.logprobs.segments,
            weight=corrected.weight.where(corrected.keep, 0.0),
        )

    def evidence(self, region: TrustRegion, result: PolicyLoss) -> BatchEvidence:
        """What the piece says about the trust region."""
        return BatchEvidence.of(
            self.logprobs,
            self.facts["rewards"],
            region=region,
            divergences=self.divergences,
            keep=result.corrected.keep,
        )

    def show(self, viewer: Viewer, rows: Tensor, result: PolicyLoss) -> None:
        """Note what happened to the piece's tokens, which stand at `rows` of the batch."""
        viewer.add(
            rows,
            keep=result.corrected.keep,
            weight=result.corrected.weight,
            logp=self.scored.logp,
            entropy=self.scored.entropy,
            divergences=self.divergences,
        )

    def observe(self, method: Method) -> Observed:
        """What the method's observing parts see of the piece."""
        facts = Facts(divergences=self.divergences, **self.facts)
        lp = self.logprobs if method.anchor is None else method.anchor(self.logprobs, facts)
        return method.observe(lp, self.advantages, facts).cpu()


@torch.no_grad()
def _look_ahead(
    accelerator: Accelerator,
    model: nn.Module,
    batch: Batch,
    method: Method,
    token_budget: int,
    version: int,
) -> Observed | None:
    """What the method's parts see of the whole step; None if no part looks, or one piece is all."""
    if not method.looks_ahead:
        return None
    pieces = list(chunks(batch.rollouts, token_budget=token_budget))
    if len(pieces) == 1 and accelerator.num_processes == 1:
        return None
    seen = [_See(model, batch.select(piece), version).observe(method) for piece in pieces]
    if accelerator.num_processes > 1:
        seen = gather_object(seen)
    return functools.reduce(Observed.merge, seen).to(accelerator.device)


def _lr_scale(method: Method, observed: Observed | None) -> float:
    """What the method multiplies this step's learning rate by."""
    if method.lr_scale is None or observed is None:
        return 1.0
    return float(method.lr_scale.scale(observed.parts[method.lr_scale]))


@contextlib.contextmanager
def _scaled_lr(optimizer: torch.optim.Optimizer, scale: float):
    """The learning rate multiplied for one step: with Adam, scaling the gradient would do nothing."""
    before = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = lr * scale
    try:
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr


def _adapted(method: Method, observed: Observed | None, total: DriftStats) -> Method:
    """The method of the next step: its own state, and the penalty's controller, moved on."""
    if observed is not None:
        method = method.next(observed)
    penalty = method.penalty
    if penalty is None or penalty.controller is None:
        return method
    found = total.to_host()
    kl = found["reference/kl"] / found["n"]
    coef = penalty.controller.next(penalty.coef, kl=kl, samples=int(found["b"]))
    return replace(method, penalty=replace(penalty, coef=coef))


def _with_batch_facts(stats: DriftStats, batch: Batch, version: int) -> DriftStats:
    """Rewards, lengths, version lags and old policies, in a form that adds up over processes."""
    rollouts = batch.rollouts
    if batch.old_status is not None:
        counts = torch.bincount(batch.old_status, minlength=len(OLD_STATUS))
        stats = stats.plus({f"old/{name}": n for name, n in zip(OLD_STATUS, counts, strict=True)})
    scored_at = None if batch.old is None else batch.old.version
    if scored_at is not None:
        stats = stats.with_max("old/version_lag", (scored_at - rollouts.rollout_version).max())
    elif batch.old_is_current:
        stats = stats.with_max("old/version_lag", torch.tensor(0))
    lag = version - rollouts.rollout_version.double()
    stats = stats.with_sum("version_lag", lag.sum()).with_max("version_lag_max", lag.max())
    stats = stats.with_max("length_max", rollouts.lengths.max())
    if rollouts.rewards is None:
        return stats
    counted = {"reward": rollouts.rewards.sum(), "reward/n": float(len(rollouts.rewards))}
    return stats.plus(counted)


def _pieces(accelerator: Accelerator, batch: Batch, token_budget: int):
    """Pieces of the batch as (sequences, is the last, does it count).

    Every process must make the same number of backward passes: one that has fewer pieces repeats
    its last without counting it.
    """
    pieces = list(chunks(batch.rollouts, token_budget=token_budget))
    real = len(pieces)
    if accelerator.num_processes > 1:
        pieces += [pieces[-1]] * (max(gather_object([real])) - real)
    for i, piece in enumerate(pieces):
        yield piece, i == len(pieces) - 1, i < real
