"""One optimizer step: score, correct, take the loss and its gradient, piece by piece.

Pieces are cut by a token budget, so that memory is bounded whatever the batch. Each adds its share of the gradient,
divided by what was *sampled* over all pieces and all processes: the step depends neither on how the batch was cut nor
over how many processes it was spread. Methods that look at the whole step before they act take one more forward pass.

Memory of a piece, beyond the model's own activations: about five float32 tensors of `response tokens x vocabulary`,
at most `token_budget x vocabulary x 20` bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Bool, Float
from torch import Tensor, nn

from offdrift.aggregate import normalizer_of
from offdrift.batch_info import BatchInfo, Observed
from offdrift.certificate import TrustRegion
from offdrift.certificate.batch import BatchEvidence
from offdrift.correction import Corrected
from offdrift.divergence.evidence import Grade
from offdrift.engines.retention import distillation, sampled_distillation
from offdrift.engines.routing import routed, routing_sums
from offdrift.engines.score import chunks, divergences, old_divergences, score
from offdrift.errors import EngineError
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss, policy_loss
from offdrift.methods import Method
from offdrift.records.rollouts import OLD_STATUS
from offdrift.stats.drift import DriftStats, Tails
from offdrift.stats.metrics import gradient_power
from offdrift.stats.signature import signature
from offdrift.train.align import Alignment
from offdrift.train.batch import Batch
from offdrift.train.critic import SUMS, Critic, value_terms
from offdrift.train.old_policy import PolicyScores, named_as_old
from offdrift.train.perturb import Perturbation
from offdrift.train.quantized import error_tokens
from offdrift.train.sharded import clip_gradients, in_step, is_sharded

GROUPS_PER_PROCESS = 2**32


@dataclass(frozen=True)
class TokenView:
    """Per-token values of a step, in the batch's order, on the host: for samples and the token log."""

    keep: Bool[Tensor, " n"]
    """Whether every gate kept the token."""
    weight: Float[Tensor, " n"]
    logp: Float[Tensor, " n"]
    """log-prob under the policy that the step started from, nats."""
    entropy: Float[Tensor, " n"]
    """Entropy of that policy at the token, nats."""
    lower: Mapping[str, Float[Tensor, " n"]]
    """Divergences by name, their lower ends where they are intervals."""
    exact: bool
    """Whether all of them are known exactly."""

    def divergence(self, name: str) -> Float[Tensor, " n"]:
        """A divergence, such as `kl_rollout_current`; NaN where no evidence for it was recorded."""
        return self.lower.get(name, torch.full_like(self.weight, torch.nan))

    @staticmethod
    def joined(rows: Sequence[Tensor], values: Sequence[Mapping[str, Tensor]], *, exact: bool) -> TokenView:
        """The view of a whole step, from each piece's values and their rows in the batch; one transfer to the host."""
        packed = torch.cat([torch.stack(list(x.values())) for x in values], 1).cpu()
        ordered = torch.empty_like(packed)
        ordered[:, torch.cat(list(rows))] = packed
        lower = dict(zip(values[0], ordered, strict=True))
        keep, weight, logp, entropy = map(lower.pop, ("keep", "weight", "logp", "entropy"))
        return TokenView(keep > 0, weight, logp, entropy, lower, exact)


@dataclass(frozen=True)
class Update:
    """Result of a step."""

    stats: DriftStats
    tokens: TokenView | None
    method: Method
    """The method of the next step: the same, unless it adapts."""
    evidence: BatchEvidence | None = None
    """Evidence for a certificate of the step, over all processes, before it was taken."""


@dataclass
class Accumulated:
    """What the pieces of a step have left besides their gradients."""

    region: TrustRegion | None
    view: bool
    loss: Float[Tensor, ""] = field(default_factory=lambda: torch.tensor(0.0))
    stats: list[DriftStats] = field(default_factory=list)
    evidence: list[BatchEvidence] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    token_values: list[dict[str, Tensor]] = field(default_factory=list)
    tails: Tails = field(default_factory=Tails)
    exact: bool = True

    def add(self, piece: ScoredPiece, result: PolicyLoss, rows: Tensor) -> None:
        """Note a piece, whose tokens are these rows of the step."""
        self.tails.add(piece.logprobs)
        self.stats.append(result.stats)
        self.loss = self.loss + result.loss.detach()
        if self.region is not None:
            self.evidence.append(piece.evidence(self.region, result))
        if self.view:
            self.rows.append(rows)
            self.token_values.append(piece.token_values(result))
            self.exact &= all(d.grade is Grade.EXACT for d in piece.divergences.values())

    def tokens(self) -> TokenView | None:
        """Per-token values in the batch's order, if they were asked for."""
        return TokenView.joined(self.rows, self.token_values, exact=self.exact) if self.view else None


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch | Iterable[Batch],
    method: Method,
    *,
    token_budget: int,
    max_grad_norm: float,
    learning_rate: float | None = None,
    version: int = 0,
    view: bool = False,
    region: TrustRegion | None = None,
    half: torch.dtype | None = None,
    loss_scale: float | None = None,
    critic: Critic | None = None,
    align: Alignment | None = None,
    perturb: Perturbation | None = None,
    skip_empty: bool = False,
) -> Update:
    """Take one optimizer step on a batch.

    Args:
        batch: this process's share of the step's sequences; or parts of it, which enter the gradient as they come.
            The gradient is that of the joined batch: it is divided by what all parts sampled once that is known. For
            one process, and methods that do not look at the whole step before they act.
        token_budget: padded tokens per forward pass.
        learning_rate: of this step, before the method's own scale; None: the optimizer's.
        version: optimizer steps taken before this one.
        view: also give per-token values, for samples and the token log.
        region: also collect the evidence for a certificate of this trust region.
        half: precision of the forward passes, see `engines.score.score`.
        loss_scale: what the loss is multiplied by while its gradient is taken; a step whose gradient is then not
            finite is skipped, and `optim/skipped` is 1. See `methods.schedules.LossScale`.
        critic: whose head shares the model's body, and takes this step with it.
        align: the last update's gradient, which is taken out of this one where the two agree too well.
        perturb: noise in the layers' inputs, with which the loss scores the policy; its sizes take a step, too.
        skip_empty: take no step where the gradient is 0 (see `Optim.skip_empty`).

    Returns: statistics over all processes; the gradient norm before clipping is `optim/grad_norm`.

    Raises: `EngineError` if the gradient is not finite and no loss scale was given; the model is left as it was.
    """
    world = accelerator.num_processes
    model.train()
    optimizer.zero_grad(set_to_none=True)
    if perturb is not None:
        perturb.log_sigma.grad = None
    gathered = Accumulated(region, view)
    value_sums = torch.zeros(len(SUMS), dtype=torch.float64, device=accelerator.device)
    scoring: dict[str, Any] = {"version": version, "half": half}
    if isinstance(batch, Batch):
        scoring |= {"perturb": perturb, "critic": critic}
        observed = _accumulate(
            accelerator, model, batch, method, gathered, value_sums, token_budget, loss_scale or 1.0, **scoring
        )
        divisor = 1.0
    else:
        if method.looks_ahead or world > 1 or critic is not None or perturb is not None:
            raise EngineError(
                f"parts of a batch cannot enter the gradient one by one with {world} processes, a shared critic, a "
                f"perturbation, or a method that looks at the whole step first ({method.describe()}); join them"
            )
        batch, divisor = _accumulate_parts(
            accelerator, model, batch, method, gathered, token_budget, loss_scale or 1.0, **scoring
        )
        observed = None
    # Before clipping, and after the average over processes: all of them see the same cosine.
    of_policy = {name: p for name, p in accelerator.unwrap_model(model).named_parameters() if p.requires_grad}
    alignment = {} if align is None else align.project(of_policy)
    trained = model if critic is None else nn.ModuleList([model, critic.model])
    norm = clip_gradients(accelerator, trained, max_grad_norm, scale=(loss_scale or 1.0) * divisor)
    head_norm = None
    if critic is not None:
        own = [x.grad for x in critic.model.parameters() if x.grad is not None]
        # Clipping has divided it by as much as the whole gradient.
        head_norm = torch.nn.utils.get_total_norm(own).cpu() * (norm / max_grad_norm).clamp(min=1)
    total = _with_batch_stats(DriftStats.merge_all(gathered.stats), batch, version)
    total = total.with_sum("optim/loss", gathered.loss / divisor / world)
    if world > 1:  # a few kilobytes; objects, because processes may have different positions
        total = DriftStats.merge_all(gather_object([total.cpu()]))
    if head_norm is not None:
        value_sums = value_sums.cpu() if world == 1 else torch.stack(gather_object([value_sums.cpu()])).sum(0)
        total = total.plus(dict(zip(SUMS, value_sums, strict=True)), {"critic/grad_norm": head_norm})
    total = total.plus(gathered.tails.sums(lambda own: gather_object([own]) if world > 1 else [own]))
    skipped = not bool(norm.isfinite())
    if skipped and loss_scale is None:
        raise EngineError(
            f"the gradient norm is {norm.item()}; the step was not taken. Lower optim.lr, or look "
            "at the last batch's log-ratios (metrics full/abs_log_ratio_max, optim/loss)"
        )
    # The learning rate is scaled, not the gradient: with Adam, scaling that would do nothing.
    lr_scale = 1.0
    if method.lr_scale is not None and observed is not None:
        lr_scale = float(method.lr_scale.scale(observed.parts[method.lr_scale]))
    empty = not bool(norm)
    left_out = (empty and skip_empty) or (align is not None and align.skips(alignment.get("optim/gradient_cosine")))
    sizes: dict[str, Tensor] = {}
    if not (skipped or left_out):
        rates = [group["lr"] for group in optimizer.param_groups]
        with scaled_rates(optimizer, [lr_scale * (rate if learning_rate is None else learning_rate) for rate in rates]):
            optimizer.step()
        sizes = {} if perturb is None else perturb.step(scale=loss_scale or 1.0)
    of_step = {"optim/grad_norm": norm, "optim/empty": float(empty), "optim/lr_scale": lr_scale}
    total = total.plus({}, {**of_step, **alignment, **sizes})
    if loss_scale is not None:
        total = total.with_max("optim/loss_scale", torch.tensor(loss_scale))
        total = total.with_max("optim/skipped", torch.tensor(float(skipped)))
    if skip_empty or (align is not None and align.settings.skip_above is not None):
        total = total.with_max("optim/step_skipped", torch.tensor(float(left_out)))
    method = method if skipped else next_method(method, observed, total)
    evidence = gather_evidence(accelerator, gathered.evidence) if gathered.evidence else None
    return Update(total, gathered.tokens(), method, evidence)


def _accumulate(
    accelerator: Accelerator,
    model: nn.Module,
    batch: Batch,
    method: Method,
    gathered: Accumulated,
    value_sums: Float[Tensor, " sums"],
    token_budget: int,
    loss_scale: float,
    *,
    version: int,
    half: torch.dtype | None,
    perturb: Perturbation | None,
    critic: Critic | None,
) -> Observed | None:
    """Add up the gradient of a batch; what the method observed of the whole step, if it looks at it."""
    rollouts, world = batch.rollouts, accelerator.num_processes
    horizon = rollouts.provenance.sampling.max_tokens
    share = normalizer_of(rollouts.segments, how=method.aggregate, horizon=horizon)
    # Data-parallel wrappers average gradients over processes: multiplying by their number makes it
    # the sum that the global normalizer expects.
    normalizer = (share if world == 1 else float(sum(gather_object([share])))) / world
    pieces = list(chunks(rollouts, token_budget=token_budget))
    passes = len(pieces) if world == 1 else max(gather_object([len(pieces)]))
    noise = _no_noise if perturb is None else functools.partial(perturb.on, version)
    observed = None
    if method.looks_ahead and (passes > 1 or world > 1):
        with torch.no_grad():
            parts = []
            for i, (sequences, counts) in enumerate(in_step(model, pieces)):
                with noise(i), contextlib.ExitStack() as until:
                    part = ScoredPiece(model, batch.select(sequences), version, half, perturb, until=until)
                    part = part.observe(method)
                parts += [part] if counts else []
        parts = parts if world == 1 else gather_object(parts)
        observed = functools.reduce(Observed.merge, parts).to(accelerator.device)
    tokens = len(batch.advantages)
    if critic is not None:
        critic.model.train()
    if critic is not None or batch.distill:
        tokens = tokens if world == 1 else sum(gather_object([tokens]))
    for i in range(passes):
        # Every process makes the same number of backward passes: one that has fewer pieces repeats
        # its last without counting it.
        counts, sequences = i < len(pieces), pieces[min(i, len(pieces) - 1)]
        # Gradients of a sharded model are spread after every piece: added up whole, they would be on every device.
        # Noise stays on during the backward pass, which may compute activations again.
        spread = i == passes - 1 or is_sharded(model)
        with contextlib.ExitStack() as passes_on:
            for part in () if spread and not batch.distill else (model, *(() if critic is None else (critic.model,))):
                passes_on.enter_context(accelerator.no_sync(part))
            passes_on.enter_context(noise(i))
            options = {"with_states": critic is not None, "until": passes_on}
            piece = ScoredPiece(model, batch.select(sequences), version, half, perturb, **options)
            result = piece.loss(method, normalizer, observed)
            loss = result.loss
            if critic is not None:
                value_loss, terms = piece.value_terms(critic)
                loss = loss + critic.settings.coef * value_loss * world / tokens
                value_sums += counts * terms
            accelerator.backward(loss * (counts * loss_scale))
        if batch.distill:
            with contextlib.nullcontext() if spread else accelerator.no_sync(model):
                term, sums = distillation_terms(model, piece, half)
                loss = term * (batch.distill * world / tokens)
                accelerator.backward(loss * (counts * loss_scale))
            result = replace(result.plus(lambda sums=sums: sums), loss=result.loss.detach() + loss.detach())
        if not counts:
            continue
        gathered.add(piece, result, rollouts.segments.rows(sequences))
        if observed is None and method.looks_ahead:
            observed = result.observed  # the only piece is the whole step
    return observed


def distillation_terms(
    model: nn.Module, piece: ScoredPiece, half: torch.dtype | None
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Sum over tokens of Shadow Mask Distillation's term, from a forward pass that sees everything; its sums.

    Gradient: through that pass alone.
    """
    rollouts, shadow = piece.batch.rollouts.with_(retention=None), piece.scored
    exact, temperature = piece.batch.distill_by == "exact", rollouts.provenance.sampling.temperature
    dense = score(model, rollouts, temperature=temperature, half=half, keep_graph=exact)
    if exact:
        term = distillation(dense.logits, shadow.logits).sum()
    else:
        term = sampled_distillation(dense.logp, shadow.logp).sum()
    sums = {"kv/distill": term.detach()}
    cap = piece.batch.tail_log_ratio_cap
    if kl := divergences(rollouts, dense.logits.detach(), tail_log_ratio_cap=cap):
        sums["kv/kl_dense"] = kl["kl_rollout_current"].lo.double().sum()
    return term, sums


def _accumulate_parts(
    accelerator: Accelerator,
    model: nn.Module,
    parts: Iterable[Batch],
    method: Method,
    gathered: Accumulated,
    token_budget: int,
    loss_scale: float,
    *,
    version: int,
    half: torch.dtype | None,
) -> tuple[Batch, float]:
    """Add up the undivided gradients of parts as they come; the joined batch, and what to divide its gradient by."""
    joined: list[Batch] = []
    normalizer, tokens = 0.0, 0
    for part in parts:
        segments, horizon = part.rollouts.segments, part.rollouts.provenance.sampling.max_tokens
        normalizer += normalizer_of(segments, how=method.aggregate, horizon=horizon)
        for sequences in chunks(part.rollouts, token_budget=token_budget):
            with contextlib.ExitStack() as until:
                piece = ScoredPiece(model, part.select(sequences), version, half, until=until)
                result = piece.loss(method, 1.0, None)
                accelerator.backward(result.loss * loss_scale)
            gathered.add(piece, result, segments.rows(sequences) + tokens)
        tokens += len(part.advantages)
        joined.append(part)
    return Batch.joined(joined), normalizer


@contextlib.contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> Iterator[None]:
    """Other learning rates of the optimizer's groups, meanwhile."""
    before = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate


def next_method(method: Method, observed: Observed | None, total: DriftStats) -> Method:
    """The method of the next step: its own state, and the penalty's controller, moved on by what a step saw."""
    if observed is not None:
        method = method.next(observed)
    penalty = method.penalty
    if penalty is not None and penalty.controller is not None:
        sums = total.to_host()
        kl = sums["reference/kl"] / sums["n"]
        coef = penalty.controller.next(penalty.coef, kl=kl, samples=int(sums["b"]))
        method = replace(method, penalty=replace(penalty, coef=coef))
    return method


def _no_noise(piece: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def gather_evidence(accelerator: Accelerator, parts: list[BatchEvidence]) -> BatchEvidence:
    """The evidence of all processes together; every process gets it."""
    local = BatchEvidence.merge_all(parts)
    if accelerator.num_processes == 1:
        return local
    # Each process numbers its own prompts from 0.
    ids = local.group_ids
    shifted = None if ids is None else ids + accelerator.process_index * GROUPS_PER_PROCESS
    return BatchEvidence.merge_all(gather_object([replace(local, group_ids=shifted).cpu()]))


class ScoredPiece:
    """A piece of a batch, scored by the current policy: log-probs, divergences, `BatchInfo`.

    With a perturbation, log-probs are the perturbed policy's; divergences, evidence and what is shown of tokens are of
    the policy without noise (`clean`).
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        version: int,
        half: torch.dtype | None = None,
        perturb: Perturbation | None = None,
        *,
        until: contextlib.ExitStack,
        with_states: bool = False,
    ) -> None:
        """Score the piece.

        Args:
            until: what has to stay as it is until the backward pass is over is closed with it.
            with_states: also give the hidden states that the head reads.
        """
        rollouts, sampling = batch.rollouts, batch.rollouts.provenance.sampling
        clean = None
        with contextlib.nullcontext() if perturb is None else perturb.off():
            logits_old = None if batch.old_logits is None else batch.old_logits(rollouts)
            watch = rollouts.routes is not None
            self.choices = until.enter_context(routed(model, rollouts, replays=batch.replays, watch=watch))
            if perturb is not None:
                with torch.no_grad():
                    clean = score(model, rollouts, temperature=sampling.temperature, half=half)
        self.horizon = sampling.max_tokens
        self.batch = batch
        self.scored = score(
            model,
            rollouts,
            temperature=sampling.temperature,
            keep_graph=logits_old is not None,
            with_states=with_states,
            half=half,
            until=until,
        )
        self.clean = self.scored if clean is None else clean
        device = self.scored.logp.device
        self.divergences = divergences(
            rollouts, self.clean.logits.detach(), tail_log_ratio_cap=batch.tail_log_ratio_cap
        )
        old = None
        if batch.old is not None:
            old = batch.old.map(lambda x: x.to(device))
        elif batch.old_is_current:
            logp = self.scored.logp.detach()
            as_old = named_as_old(self.divergences)
            old = PolicyScores(logp, self.scored.entropy, self.scored.sum_pi_squared, as_old)
        self.logprobs = LogProbs.pack(
            rollouts.logp_rollout.to(device),
            self.scored.logp,
            None if old is None else old.logp,
            logp_ref=None if batch.logp_ref is None else batch.logp_ref.to(device),
            segments=rollouts.segments.to(device),
        )
        if old is not None:
            self.divergences |= old.divergences
        if logits_old is not None:
            self.divergences |= old_divergences(logits_old, self.scored.logits)
        self.advantages = batch.advantages.to(device)
        self.batch_info = BatchInfo(
            divergences=self.divergences,
            entropy=None if old is None else old.entropy,
            vocab=self.scored.logits.shape[1],
            rewards=None if rollouts.rewards is None else rollouts.rewards.to(device),
            sample_weight=None if batch.sample_weight is None else batch.sample_weight.to(device),
            version_lag=(version - rollouts.rollout_version).to(device),
        )

    def loss(self, method: Method, normalizer: float, observed: Observed | None) -> PolicyLoss:
        """Loss of the piece under a method, and its statistics.

        Args:
            normalizer: what the sum over all pieces and processes is divided by.
            observed: what the method observed of the whole step; None if this piece is all of it.
        """
        result = policy_loss(
            self.logprobs,
            method,
            self.advantages,
            replace(self.batch_info, observed=observed or "this_batch"),
            normalizer=normalizer,
            horizon=self.horizon,
        )
        return result.plus(lambda: self._more_sums(result.corrected))

    @torch.no_grad()
    def _more_sums(self, corrected: Corrected) -> dict[str, Tensor]:
        """What the diagnosis reads beside the size of the drift: its shape, the gradient's noise, routing, codes."""
        more = signature(self.logprobs, advantages=self.advantages)
        more["current/entropy"] = self.logprobs.at_scored(self.clean.entropy).sum()
        more |= gradient_power(
            self.scored.sum_pi_squared,
            self.scored.logp.detach(),
            self.advantages,
            self.logprobs.segments,
            weight=corrected.weight.where(corrected.keep, 0.0),
        )
        if self.batch.rollouts.provenance.quantization is not None:
            logp_old = self.logprobs.logp_old
            trainer = self.clean.logp.detach() if logp_old is None else logp_old
            more |= error_tokens(self.batch.rollouts, trainer.cpu() - self.batch.rollouts.logp_rollout.cpu())
        if self.choices is not None:
            kl = self.divergences.get("kl_rollout_current")
            more |= routing_sums(
                self.choices, self.batch.rollouts, replays=self.batch.replays, kl=None if kl is None else kl.lo
            )
        return more

    def value_terms(self, critic: Critic) -> tuple[Float[Tensor, ""], Float[Tensor, " sums"]]:
        """`critic.value_terms` of the piece under a head on the model's body."""
        assert self.batch.values is not None
        assert self.batch.returns is not None
        values = critic.model(self.scored.states).float()
        old, returns = (x.to(values.device) for x in (self.batch.values, self.batch.returns))
        return value_terms(values, old, returns, clip=critic.settings.clip)

    def observe(self, method: Method) -> Observed:
        """Statistics that the method's step-wide parts take of the piece."""
        logprobs = self.logprobs if method.anchor is None else method.anchor(self.logprobs, self.batch_info)
        return method.observe(logprobs, self.advantages, self.batch_info).cpu()

    def evidence(self, region: TrustRegion, result: PolicyLoss) -> BatchEvidence:
        """Evidence about the trust region in the piece."""
        return BatchEvidence.of(
            self.logprobs if self.clean is self.scored else replace(self.logprobs, logp=self.clean.logp),
            self.batch_info.rewards,
            region=region,
            divergences=self.divergences,
            keep=result.corrected.keep,
        )

    def token_values(self, result: PolicyLoss) -> dict[str, Float[Tensor, " n"]]:
        """The piece's columns of a `TokenView`, on its device."""
        columns = {
            "keep": result.corrected.keep,
            "weight": result.corrected.weight,
            "logp": self.clean.logp,
            "entropy": self.clean.entropy,
            **{name: d.lo for name, d in self.divergences.items()},
        }
        return {name: x.detach().float() for name, x in columns.items()}


def _with_batch_stats(stats: DriftStats, batch: Batch, version: int) -> DriftStats:
    """Add rewards, lengths, version lags and old policies, in a form that sums over processes."""
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
    if (turns := rollouts.segments.turns) is not None:
        stats = stats.plus({"turns": float(len(turns)), "turns/n": float(len(rollouts.lengths))})
    if rollouts.mix_alpha is not None and rollouts.mix_kl is not None:
        of_mixture = {
            "alpha": rollouts.mix_alpha.sum(),
            "responses": len(rollouts.mix_alpha),
            "kl": rollouts.mix_kl.sum(),
        }
        stats = stats.plus({f"fusion/{k}": x for k, x in of_mixture.items()}, {"fusion/kl_max": rollouts.mix_kl.max()})
    if rollouts.rewards is not None:
        stats = stats.plus({"reward": rollouts.rewards.sum(), "reward/n": float(len(rollouts.rewards))})
    return stats.plus({f"component/{name}": x.sum() for name, x in (rollouts.components or {}).items()})
