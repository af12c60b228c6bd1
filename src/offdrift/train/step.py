"""One optimizer step: score, correct and push piece by piece, with the normalizer of the whole.

Pieces are cut by a token budget, so that memory is bounded whatever the batch. Each adds its share
of the gradient, divided by what was *sampled* over all pieces and all processes: the step does not
depend on how the batch was cut, nor over how many processes it was spread.

Memory of a piece, beyond the model's own activations: about five float32 tensors of
`response tokens x vocabulary`, at most `token_budget x vocabulary x 20` bytes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor, nn

from offdrift.aggregate import normalizer_of
from offdrift.divergence.evidence import Divergence
from offdrift.engines.score import chunks, divergences, score
from offdrift.errors import EngineError
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss, policy_loss
from offdrift.methods import Method
from offdrift.rollouts.records import Rollouts
from offdrift.segments import Segments
from offdrift.stats.drift import DriftStats


@dataclass(frozen=True)
class Batch:
    """What a step trains on: rollouts with their advantages and, if needed, old log-probs."""

    rollouts: Rollouts
    advantages: Float[Tensor, " n"]
    logp_old: Float[Tensor, " n"] | None = None

    def select(self, sequences: Tensor) -> Batch:
        """Some of the sequences, as a batch of their own."""
        rows = self.rollouts.segments.rows(sequences)
        old = None if self.logp_old is None else self.logp_old[rows]
        return Batch(self.rollouts.select(sequences), self.advantages[rows], old)


@dataclass(frozen=True)
class TokenView:
    """Per-token values of a step, in the batch's order: what the report's samples show."""

    keep: Tensor
    weight: Tensor
    kl: Tensor
    tv: Tensor


@dataclass(frozen=True)
class Update:
    """What a step did."""

    stats: DriftStats
    tokens: TokenView | None


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
) -> Update:
    """Take one optimizer step on a batch.

    Args:
        batch: this process's share of the step's sequences.
        token_budget: padded tokens per forward pass.
        version: optimizer steps taken before this one.
        view: also give per-token values, for samples.

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
    shown = _empty_view(batch) if view else None
    for piece, last, counts in _pieces(accelerator, batch, token_budget):
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            result, evidence = _push(model, batch.select(piece), method, normalizer)
            accelerator.backward(result.loss if counts else result.loss * 0.0)
        if counts:
            stats.append(result.stats.with_sum("optim/loss", result.loss.detach() / world))
            if shown is not None:
                _show(shown, batch.rollouts.segments.rows(piece), result, evidence)
    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
    local = _with_batch_facts(DriftStats.merge_all(stats), batch.rollouts, version)
    total = gather_stats(accelerator, local)
    norm = torch.as_tensor(0.0 if norm is None else norm).cpu()
    if not bool(norm.isfinite()):
        raise EngineError(
            f"the gradient norm is {norm.item()}; the step was not taken. Lower optim.lr, or look "
            "at the last batch's log-ratios (metrics full/abs_log_ratio_max, optim/loss)"
        )
    optimizer.step()
    return Update(total.with_max("optim/grad_norm", norm), shown)


@torch.no_grad()
def score_old(model: nn.Module, rollouts: Rollouts, *, token_budget: int) -> Float[Tensor, " n"]:
    """log pi_old: the training engine's log-probs at the weights it has now. Gradient: none."""
    out = torch.empty(len(rollouts.tokens))
    temperature = rollouts.provenance.sampling.temperature
    model.eval()
    for piece in chunks(rollouts, token_budget=token_budget):
        part = rollouts.select(piece)
        rows = rollouts.segments.rows(piece)
        out[rows] = score(model, part, temperature=temperature).logp.float().cpu()
    return out


def gather_stats(accelerator: Accelerator, stats: DriftStats) -> DriftStats:
    """The statistics of all processes together; every process gets them."""
    if accelerator.num_processes == 1:
        return stats
    # A few kilobytes per step; objects, because processes may know different positions.
    pieces = gather_object([stats.cpu()])
    return DriftStats.merge_all(pieces)


def global_sum(accelerator: Accelerator, value: float) -> float:
    """A number summed over all processes."""
    if accelerator.num_processes == 1:
        return value
    return float(sum(gather_object([value])))


def _push(
    model: nn.Module, part: Batch, method: Method, normalizer: float
) -> tuple[PolicyLoss, dict[str, Divergence]]:
    """Forward pass and loss of one piece, and the divergences its gates saw."""
    rollouts = part.rollouts
    sampling = rollouts.provenance.sampling
    scored = score(model, rollouts, temperature=sampling.temperature)
    device = scored.logp.device
    lp = LogProbs.pack(
        rollouts.logp_rollout.to(device),
        scored.logp,
        None if part.logp_old is None else part.logp_old.to(device),
        segments=Segments(rollouts.cu_seqlens.to(device)),
    )
    evidence = divergences(rollouts, scored.logits)
    result = policy_loss(
        lp,
        method,
        part.advantages.to(device),
        divergences=evidence,
        normalizer=normalizer,
        horizon=sampling.max_tokens,
    )
    return replace(
        result, stats=result.stats.with_sum("current/entropy", scored.entropy.sum())
    ), evidence


def _with_batch_facts(stats: DriftStats, rollouts: Rollouts, version: int) -> DriftStats:
    """Rewards, lengths and version lags, in a form that adds up over processes."""
    lag = version - rollouts.rollout_version.double()
    stats = stats.with_sum("version_lag", lag.sum()).with_max("version_lag_max", lag.max())
    stats = stats.with_max("length_max", rollouts.lengths.max())
    if rollouts.rewards is None:
        return stats
    return stats.with_sum("reward", rollouts.rewards.sum())


def _show(
    view: TokenView, rows: Tensor, result: PolicyLoss, evidence: dict[str, Divergence]
) -> None:
    """Note what happened to a piece's tokens at their places in the batch."""
    view.keep[rows] = result.corrected.keep.cpu()
    view.weight[rows] = result.corrected.weight.float().cpu()
    for name, target in (("kl", view.kl), ("tv", view.tv)):
        if found := evidence.get(f"{name}_rollout_current"):
            target[rows] = found.lo.float().cpu()


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


def _empty_view(batch: Batch) -> TokenView:
    n = len(batch.rollouts.tokens)
    nothing = float("nan")
    return TokenView(
        torch.zeros(n, dtype=torch.bool),
        torch.ones(n),
        torch.full((n,), nothing),
        torch.full((n,), nothing),
    )
