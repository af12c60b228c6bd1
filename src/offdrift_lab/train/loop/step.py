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
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

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
from offdrift.divergence.evidence import Distributions, Grade
from offdrift.engines.retention import distillation, sampled_distillation
from offdrift.engines.routing import routed, routing_sums
from offdrift.engines.score import chunks, divergences, old_divergences, rollout_ratio_means, score
from offdrift.errors import EngineError
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss, policy_loss
from offdrift.methods import Method
from offdrift.records.schema import OLD_STATUS
from offdrift.stats.drift import DriftStats, Tails
from offdrift.stats.metrics import gradient_power
from offdrift.stats.signature import signature
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.features.quantization import error_tokens
from offdrift_lab.train.loop.batch import Batch, StreamedBatch
from offdrift_lab.train.loop.old_policy import PolicyScores, named_as_old
from offdrift_lab.train.loop.sharded import clip_gradients, in_step, is_sharded
from offdrift_lab.train.settings.optim import OptimSettings

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
    exact: Set[str]
    """Names of those that are known exactly."""

    def divergence(self, name: str) -> Float[Tensor, " n"]:
        """A divergence, such as `kl_rollout_current`; NaN where no evidence for it was recorded."""
        return self.lower.get(name, torch.full_like(self.weight, torch.nan))

    @staticmethod
    def joined(rows: Sequence[Tensor], values: Sequence[Mapping[str, Tensor]], *, exact: Set[str]) -> TokenView:
        """The view of a whole step, from each piece's values and their rows in the batch; one transfer to the host."""
        packed = torch.cat([torch.stack(list(x.values())) for x in values], 1).cpu()
        ordered = torch.empty_like(packed)
        ordered[:, torch.cat(list(rows))] = packed
        lower = dict(zip(values[0], ordered, strict=True))
        keep, weight, logp, entropy = map(lower.pop, ("keep", "weight", "logp", "entropy"))
        return TokenView(keep > 0, weight, logp, entropy=entropy, lower=lower, exact=exact)


@dataclass(frozen=True, kw_only=True)
class Update:
    """Result of a step."""

    stats: DriftStats
    tokens: TokenView | None
    method: Method
    """The method of the next step: the same, unless it adapts."""
    evidence: BatchEvidence | None = None
    """Evidence for a certificate of the step, over all processes, before it was taken."""
    batch: Batch
    """What the step was taken on; of a streamed batch, its parts joined."""
    norm: Float[Tensor, ""]
    """Of the gradient before it was clipped, on the host."""
    taken: bool
    loss_scale: float | None = None
    """What the loss was multiplied by."""


@dataclass
class Accumulated:
    """Results of the micro-batches of a step, besides gradients."""

    region: TrustRegion | None
    control: bool
    view: bool
    loss: Float[Tensor, ""] = field(default_factory=lambda: torch.tensor(0.0))
    stats: list[DriftStats] = field(default_factory=list)
    evidence: list[BatchEvidence] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    token_values: list[dict[str, Tensor]] = field(default_factory=list)
    tails: Tails = field(default_factory=Tails)
    not_exact: set[str] = field(default_factory=set)
    """Divergences that some piece does not know exactly."""
    observed: Observed | None = None
    """What the method observed of the whole step, if it looks at it."""
    divisor: float = 1.0
    """What the gradient and the loss are still to be divided by."""

    def add(self, piece: ScoredPiece, result: PolicyLoss, rows: Tensor) -> None:
        """Note a piece, whose tokens are these rows of the step."""
        self.tails.add(piece.logprobs)
        self.stats.append(result.stats)
        self.loss = self.loss + result.loss.detach()
        if self.region is not None:
            self.evidence.append(piece.evidence(self.region, result, control=self.control))
        if self.view:
            self.rows.append(rows)
            self.token_values.append(piece.token_values(result))
            self.not_exact |= {name for name, d in piece.divergences.items() if d.grade is not Grade.EXACT}

    def tokens(self) -> TokenView | None:
        """Per-token values in the batch's order, if they were asked for."""
        if not self.view:
            return None
        return TokenView.joined(self.rows, self.token_values, exact=self.token_values[0].keys() - self.not_exact)


@runtime_checkable
class Stepping(Protocol):
    """Attributes of an arm that a training step uses (`train.arm.Arm`)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    method: Method
    version: int
    """Optimizer steps taken before this one."""

    @property
    def accelerator(self) -> Accelerator: ...
    @property
    def features(self) -> Sequence[Feature]: ...
    @property
    def optim(self) -> OptimSettings: ...
    @property
    def half(self) -> torch.dtype | None:
        """Precision of the forward passes, see `engines.score.score`."""
        ...

    @property
    def learning_rate(self) -> float:
        """Learning rate of this step, before the method's own scale."""
        ...

    @property
    def region(self) -> TrustRegion | None:
        """Evidence is collected for a certificate of this trust region."""
        ...

    @property
    def control_variates(self) -> bool:
        """Whether this evidence is to have control variates (`certificate.control`)."""
        ...


@dataclass(kw_only=True)
class Learner:
    """A model that takes steps outside of a run, as for measurements; see `Stepping`."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    method: Method
    features: Sequence[Feature] = ()
    optim: OptimSettings = field(default_factory=OptimSettings)
    half: torch.dtype | None = None
    version: int = 0
    region: TrustRegion | None = None
    control_variates: bool = False

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def train_step(arm: Stepping, batch: Batch | StreamedBatch, *, view: bool = False) -> Update:
    """Take one optimizer step on a batch.

    Args:
        batch: this process's share of the step's sequences; or one whose parts enter the gradient as they come. The
            gradient is then that of the joined batch: it is divided by what all parts sampled once that is known. For
            one process, and methods that do not look at the whole step before they act.
        view: also give per-token values, for samples and the token log.

    Returns: statistics over all processes; the gradient norm before clipping is `optim/grad_norm`. A feature with a
        loss scale skips a step whose gradient is not finite, and features may leave a step out or undo it.

    Raises: `EngineError` if the gradient is not finite and no feature scales the loss; the model is left as it was.
    """
    accelerator, model, features = arm.accelerator, arm.model, arm.features
    model.train()
    arm.optimizer.zero_grad(set_to_none=True)
    for feature in features:
        feature.stepping(arm)
    loss_scale = next((x.loss_scale for x in features if x.loss_scale is not None), None)
    scale = loss_scale or 1.0
    # Gradients, piece by piece.
    gathered = Accumulated(arm.region, arm.control_variates, view)
    if isinstance(batch, StreamedBatch):
        batch = accumulate_parts(arm, batch, gathered, scale)
    else:
        accumulate_pieces(arm, batch, gathered, scale)
    # Before clipping, and after the average over processes: all of them see the same gradient.
    of_policy = {name: p for name, p in accelerator.unwrap_model(model).named_parameters() if p.requires_grad}
    maxima = dict(_all_metrics(feature.gradients(arm, of_policy) for feature in features).maxima)
    beside = modules_beside(features)
    trained = nn.ModuleList([model, *beside]) if beside else model
    norm = clip_gradients(accelerator, trained, arm.optim.max_grad_norm, scale=scale * gathered.divisor)
    total = _over_processes(accelerator, gathered, batch, arm.version)
    if not norm.isfinite() and loss_scale is None:
        raise EngineError(
            f"the gradient norm is {norm.item()}; the step was not taken. Lower optim.lr, or look "
            "at the last batch's log-ratios (metrics full/abs_log_ratio_max, optim/loss)"
        )
    step = OptimizerStep.of(arm, batch, gathered.observed, norm=norm, total=total)
    update = Update(
        stats=total.plus({}, maxima | step.maxima),
        tokens=gathered.tokens(),
        method=next_method(arm.method, gathered.observed, total) if step.finite and not step.undone else arm.method,
        evidence=gather_evidence(accelerator, gathered.evidence) if gathered.evidence else None,
        batch=batch,
        norm=norm,
        taken=step.taken and not step.undone,
        loss_scale=loss_scale,
    )
    more = _all_metrics(feature.stepped(arm, update) for feature in features)
    return replace(update, stats=update.stats.plus(*more)) if any(more) else update


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """The optimizer's step of an update: at a scaled rate, unless a feature leaves it out or undoes it."""

    norm: Float[Tensor, ""]
    """Of the gradient before it was clipped."""
    finite: bool
    """Whether that is; no step is taken otherwise."""
    left_out: bool | None
    """Whether a feature left the step out; None where none ever does."""
    undone: bool
    lr_scale: float

    @classmethod
    def of(cls, arm: Stepping, batch: Batch, observed: Observed | None, *, norm: Tensor, total: DriftStats) -> Self:
        """Take the step on accumulated and clipped gradients.

        Args:
            observed: what the method observed of the whole step.
            total: statistics over all processes.
        """
        opinions = [x for feature in arm.features if (x := feature.leaves_out(arm, norm)) is not None]
        of_features = math.prod(feature.step_scale(arm, total) for feature in arm.features)
        lr_scale, finite = rate_scale(arm.method, observed) * of_features, bool(norm.isfinite())
        left_out = any(opinions) if opinions else None
        undone = False
        if finite and not left_out:
            with scaled_rates(arm.optimizer, [lr_scale * arm.learning_rate for _ in arm.optimizer.param_groups]):
                arm.optimizer.step()
            undone = any(feature.accepts(arm, batch) is False for feature in arm.features)
        return cls(norm=norm, finite=finite, left_out=left_out, undone=undone, lr_scale=lr_scale)

    @property
    def taken(self) -> bool:
        """Whether the optimizer changed the weights."""
        return self.finite and not self.left_out

    @property
    def maxima(self) -> dict[str, Tensor | float]:
        """The step's metrics, the same in all processes."""
        maxima: dict[str, Tensor | float] = {
            "optim/grad_norm": self.norm,
            "optim/empty": float(not bool(self.norm)),
            "optim/lr_scale": self.lr_scale,
        }
        return maxima if self.left_out is None else maxima | {"optim/step_skipped": float(self.left_out)}


def modules_beside(features: Iterable[Feature]) -> list[nn.Module]:
    """Modules that are trained beside the model."""
    return [module for feature in features for module in feature.modules()]


def of_all_processes(accelerator: Accelerator, objects: list[Any]) -> list[Any]:
    """The objects of every process, in all processes."""
    return objects if accelerator.num_processes == 1 else gather_object(objects)


def _all_metrics(metrics: Iterable[Metrics]) -> Metrics:
    """Metrics of several features as one."""
    sums: dict[str, Tensor | float] = {}
    maxima: dict[str, Tensor | float] = {}
    for of_feature in metrics:
        sums |= of_feature.sums
        maxima |= of_feature.maxima
    return Metrics(sums, maxima)


def _over_processes(accelerator: Accelerator, gathered: Accumulated, batch: Batch, version: int) -> DriftStats:
    """Statistics of all pieces, of all processes."""
    world = accelerator.num_processes
    total = _with_batch_stats(DriftStats.merge_all(gathered.stats), batch, version)
    total = total.with_sum("optim/loss", gathered.loss / gathered.divisor / world)
    if world > 1:  # a few kilobytes; objects, because processes may have different positions
        total = DriftStats.merge_all(gather_object([total.cpu()]))
    return total.plus(gathered.tails.sums(lambda tail: of_all_processes(accelerator, [tail])))


def rate_scale(method: Method, observed: Observed | None) -> float:
    """Factor of the learning rate that a method takes from what it observed of the step.

    The learning rate is scaled, not the gradient: with Adam, scaling that would do nothing.
    """
    if method.lr_scale is None or observed is None:
        return 1.0
    return float(method.lr_scale.scale(observed.parts[method.lr_scale]))


def accumulate_pieces(arm: Stepping, batch: Batch, gathered: Accumulated, loss_scale: float) -> Batch:
    """Add up the gradient of a batch, piece by piece; the batch."""
    accelerator, model, method = arm.accelerator, arm.model, arm.method
    rollouts, world = batch.rollouts, accelerator.num_processes
    horizon = rollouts.provenance.sampling.max_tokens
    share = normalizer_of(rollouts.segments, how=method.aggregate, horizon=horizon)
    # Data-parallel wrappers average gradients over processes: multiplying by their number makes it
    # the sum that the global normalizer expects.
    normalizer = float(sum(of_all_processes(accelerator, [share]))) / world
    pieces = list(chunks(rollouts, token_budget=arm.optim.token_budget))
    passes = max(of_all_processes(accelerator, [len(pieces)]))
    if method.needs_whole_step and (passes > 1 or world > 1):
        gathered.observed = observe(arm, batch, pieces)
    adding, tokens = [x for x in arm.features if x.adds_term], len(batch.advantages)
    if adding or batch.distill:
        tokens = sum(of_all_processes(accelerator, [tokens]))
    held = (model, *modules_beside(arm.features))
    for i in range(passes):
        # Every process makes the same number of backward passes: one that has fewer pieces repeats
        # its last without counting it.
        counts, sequences = i < len(pieces), pieces[min(i, len(pieces) - 1)]
        # Gradients of a sharded model are spread after every piece: added up whole, they would be on every device.
        spread = i == passes - 1 or is_sharded(model)
        with contextlib.ExitStack() as passes_on:
            for module in () if spread and not batch.distill else held:
                passes_on.enter_context(accelerator.no_sync(module))
            piece = ScoredPiece(arm, batch.select(sequences), number=i, backward_scope=passes_on)
            result = piece.loss(method, normalizer, gathered.observed)
            loss = result.loss
            for feature in adding:
                loss = loss + feature.term(arm, piece, tokens=tokens, counts=counts)
            accelerator.backward(loss * (counts * loss_scale))
        if batch.distill:
            with contextlib.nullcontext() if spread else accelerator.no_sync(model):
                term, sums = distillation_terms(model, piece, arm.half)
                loss = term * (batch.distill * world / tokens)
                accelerator.backward(loss * (counts * loss_scale))
            result = replace(result.plus(lambda sums=sums: sums), loss=result.loss.detach() + loss.detach())
        if not counts:
            continue
        gathered.add(piece, result, rollouts.segments.rows(sequences))
        if gathered.observed is None and method.needs_whole_step:
            gathered.observed = result.observed  # the only piece is the whole step
    return batch


@torch.no_grad()
def observe(arm: Stepping, batch: Batch, pieces: Sequence[Tensor]) -> Observed:
    """Compute the method's statistics of the whole step, over all processes, with one extra forward pass."""
    parts = []
    for i, (sequences, counts) in enumerate(in_step(arm.model, pieces)):
        with contextlib.ExitStack() as backward_scope:
            part = ScoredPiece(arm, batch.select(sequences), number=i, backward_scope=backward_scope).observe(
                arm.method
            )
        parts += [part] if counts else []
    parts = of_all_processes(arm.accelerator, parts)
    return functools.reduce(Observed.merge, parts).to(arm.accelerator.device)


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


def accumulate_parts(arm: Stepping, batch: StreamedBatch, gathered: Accumulated, loss_scale: float) -> Batch:
    """Add up the undivided gradients of parts as they come; the joined batch. `gathered` gets their divisor."""
    method, world = arm.method, arm.accelerator.num_processes
    if method.needs_whole_step or world > 1 or any(x.adds_term or x.perturbs for x in arm.features):
        raise EngineError(
            f"parts of a batch cannot enter the gradient one by one with {world} processes, a shared critic, a "
            f"perturbation, or a method that looks at the whole step first ({method.describe()}); join them"
        )
    joined: list[Batch] = []
    normalizer, tokens, number = 0.0, 0, 0
    for part in batch.coming:
        segments, horizon = part.rollouts.segments, part.rollouts.provenance.sampling.max_tokens
        normalizer += normalizer_of(segments, how=method.aggregate, horizon=horizon)
        for sequences in chunks(part.rollouts, token_budget=arm.optim.token_budget):
            with contextlib.ExitStack() as backward_scope:
                piece = ScoredPiece(arm, part.select(sequences), number=number, backward_scope=backward_scope)
                result = piece.loss(method, 1.0, None)
                arm.accelerator.backward(result.loss * loss_scale)
            gathered.add(piece, result, segments.rows(sequences) + tokens)
            number += 1
        tokens += len(part.advantages)
        joined.append(part)
    gathered.divisor = normalizer
    return Batch.joined(joined)


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

    Where a feature perturbs, log-probs are the perturbed policy's; divergences, evidence and what is shown of tokens
    are of the policy itself (`clean`).
    """

    def __init__(self, arm: Stepping, batch: Batch, *, number: int = 0, backward_scope: contextlib.ExitStack) -> None:
        """Score the piece.

        Args:
            number: of the piece in the step.
            backward_scope: what has to stay as it is until the backward pass is over is closed with it.
        """
        self.batch, self.number = batch, number
        rollouts, sampling = batch.rollouts, batch.rollouts.provenance.sampling
        options: dict[str, Any] = {"temperature": sampling.temperature, "half": arm.half}
        logits_old = None if batch.old_logits is None else batch.old_logits(rollouts)
        watch, clean = rollouts.routes is not None, None
        self.choices = backward_scope.enter_context(routed(arm.model, rollouts, replays=batch.replays, watch=watch))
        if any(feature.perturbs for feature in arm.features):
            with torch.no_grad():
                clean = score(arm.model, rollouts, **options)
        for feature in arm.features:
            backward_scope.enter_context(feature.scoring(arm, self))
        self.horizon = sampling.max_tokens
        self.scored = score(
            arm.model,
            rollouts,
            **options,
            keep_graph=batch.old_logits is not None,
            with_states=any(feature.adds_term for feature in arm.features),
            backward_scope=backward_scope,
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
            version_lag=(arm.version - rollouts.rollout_version).to(device),
            distributions=None
            if logits_old is None
            else Distributions(logits_old, self.scored.logits, rollouts.tokens.to(device)),
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
        """Further sums for the diagnosis: shape of the drift, gradient noise, routing, quantization codes."""
        more = signature(self.logprobs, advantages=self.advantages)
        more["current/entropy"] = self.logprobs.select_scored(self.clean.entropy).sum()
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

    def observe(self, method: Method) -> Observed:
        """Statistics that the method's step-wide parts take of the piece."""
        logprobs = self.logprobs if method.anchor is None else method.anchor(self.logprobs, self.batch_info)
        return method.observe(logprobs, self.advantages, self.batch_info).cpu()

    def evidence(self, region: TrustRegion, result: PolicyLoss, *, control: bool) -> BatchEvidence:
        """Evidence about the trust region in the piece; with `control`, what control variates need."""
        logits = self.clean.logits.detach()
        means = rollout_ratio_means(self.batch.rollouts, logits) if control else None
        return BatchEvidence.of(
            self.logprobs if self.clean is self.scored else replace(self.logprobs, logp=self.clean.logp),
            self.batch_info.rewards,
            region=region,
            divergences=self.divergences,
            keep=result.corrected.keep,
            ratio_means=means,
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
