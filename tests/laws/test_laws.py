"""The laws that every row of the method table must obey, on random ragged batches in float64.

Each law is the only one to catch some kind of bug, so no row may skip one without a written reason.
`divergences_of` gives every batch plausible exact divergences, so that the rows on exact KL take
part with some sequences kept and some rejected.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offdrift.aggregate import normalizer_of
from offdrift.correction import Correction
from offdrift.divergence.evidence import Divergence
from offdrift.facts import Facts
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss, policy_loss
from offdrift.methods import METHODS, Method
from offdrift.objectives import Clipped
from offdrift.segments import Segments
from tests.oracles.fixtures import ragged

ROWS = {**METHODS, "ppo": Method(objective=Clipped(dual_clip=3.0), aggregate="seq_mean_token_mean")}
SEEDS = range(4)
every_row = pytest.mark.parametrize("name", ROWS)
every_seed = pytest.mark.parametrize("seed", SEEDS)


def divergences_of(lp: LogProbs, scale: float = 0.02) -> dict[str, Divergence]:
    """KL and TV that depend on the token alone, so that pieces of a batch agree with the whole."""
    kl = scale * (lp.current.detach() - lp.logp_rollout).square()
    return {
        "kl_rollout_current": Divergence.exact("kl_rollout_current", kl),
        "tv_rollout_current": Divergence.exact("tv_rollout_current", (kl / 2).sqrt().clamp(max=1)),
    }


def loss_and_grad(
    lp: LogProbs, row: Method, advantages: Tensor, normalizer: float | None = None
) -> tuple[PolicyLoss, Tensor]:
    result = policy_loss(lp, row, advantages, divergences=divergences_of(lp), normalizer=normalizer)
    (grad,) = torch.autograd.grad(result.loss, lp.current, retain_graph=True)
    return result, grad


def random_advantages(lp: LogProbs, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(1000 + seed)
    per_sequence = torch.randn(len(lp.segments), generator=g, dtype=torch.float64)
    return lp.segments.spread(per_sequence)


@every_row
@every_seed
def test_on_policy_the_gradient_of_the_summed_loss_is_minus_the_advantage(name, seed):
    lp, row = ragged(seed, drift=0.0), ROWS[name]
    a = random_advantages(lp, seed)
    _, grad = loss_and_grad(lp, row, a, normalizer=1.0)
    mean = row.aggregate == "seq_mean_token_mean"
    length = lp.segments.spread(lp.segments.lengths.double()) if mean else 1.0
    torch.testing.assert_close(grad, -a / length, rtol=1e-9, atol=1e-12)


@every_row
@every_seed
def test_masked_positions_may_hold_anything(name, seed):
    lp, row = ragged(seed), ROWS[name]
    a = random_advantages(lp, seed)
    clean, clean_grad = loss_and_grad(lp, row, a)
    g = torch.Generator().manual_seed(seed)
    dirty = dirty_batch(lp, g)
    leaf, packed, mask = dirty
    d = divergences_of(packed)
    result = policy_loss(packed, row, a, divergences=d)
    (grad,) = torch.autograd.grad(result.loss, leaf)
    torch.testing.assert_close(result.loss, clean.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad[mask], clean_grad, rtol=1e-9, atol=1e-12)
    assert (grad[~mask] == 0).all()
    assert int((~mask).sum()) > len(lp.segments)


def dirty_batch(lp: LogProbs, g: torch.Generator) -> tuple[Tensor, LogProbs, Tensor]:
    """The same batch, padded, with junk between and after the real tokens."""
    lengths = lp.segments.lengths.tolist()
    width = max(lengths) + 5
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for i, n in enumerate(lengths):
        mask[i, torch.randperm(width, generator=g)[:n]] = True
    junk = torch.tensor([float("nan"), float("inf"), 1e9, -1e9], dtype=torch.float64)
    filler = junk[torch.randint(0, 4, mask.shape, generator=g)]

    def padded(x: Tensor) -> Tensor:
        out = filler.clone()
        out[mask] = x.detach()
        return out

    leaf = padded(lp.current).requires_grad_()
    packed = LogProbs.pack(padded(lp.logp_rollout), leaf, padded(lp.old), mask=mask)
    return leaf, packed, mask


@every_row
@every_seed
def test_the_batch_is_the_sum_of_its_sequences(name, seed):
    lp, row = ragged(seed), ROWS[name]
    a = random_advantages(lp, seed)
    whole, grad = loss_and_grad(lp, row, a, normalizer=7.0)
    lengths = lp.segments.lengths.tolist()
    losses, grads = [], []
    for x in zip(*(t.detach().split(lengths) for t in (lp.logp_rollout, lp.current, lp.old, a))):
        one = LogProbs.pack(x[0], x[1].clone().requires_grad_(), x[2], segments=Segments.from_lengths([len(x[0])]))  # fmt: skip
        result, piece = loss_and_grad(one, row, x[3], normalizer=7.0)
        losses.append(result.loss)
        grads.append(piece)
    assert len(losses) == len(lengths)
    torch.testing.assert_close(torch.stack(losses).sum(), whole.loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat(grads), grad, rtol=1e-9, atol=1e-12)


@every_row
@every_seed
def test_gates_and_weights_leak_no_gradient(name, seed):
    lp = ragged(seed)
    a = random_advantages(lp, seed)
    leaves = [x.detach().clone().requires_grad_() for x in (lp.logp_rollout, lp.old)]
    open_door = replace(lp, logp_rollout=leaves[0], logp_old=leaves[1])
    corrected = ROWS[name].correction(open_door, a, Facts(divergences=divergences_of(lp)))
    assert not corrected.weight.requires_grad
    # the loss may depend on mu only through an objective's ratio, never through a correction
    result = policy_loss(lp, ROWS[name], a, divergences=divergences_of(lp))
    assert not result.corrected.keep.requires_grad
    assert not result.stats.sums.requires_grad
    _, grad = loss_and_grad(lp, ROWS[name], a)
    frozen, _ = frozen_correction(lp, ROWS[name], a, result)
    torch.testing.assert_close(grad, frozen, rtol=1e-9, atol=1e-12)


def frozen_correction(lp, row, a, result) -> tuple[Tensor, Tensor]:
    """The gradient when what gates and weight decided is put in as constants."""
    pushed = row.objective(lp, a).loss
    kept = result.corrected.keep.double() * result.corrected.weight
    per_token = kept * pushed
    if row.aggregate == "seq_mean_token_mean":
        per_token = per_token / lp.segments.spread(lp.segments.lengths.double())
    loss = per_token.sum() / normalizer_of(lp.segments, how=row.aggregate)
    return torch.autograd.grad(loss, lp.current)[0], loss


@every_row
@every_seed
def test_with_limits_at_their_limits_it_is_plain_importance_sampling(name, seed):
    row = ROWS[name]
    weights = tuple(replace(w, cap=None) for w in row.correction.weights)
    gates = tuple(replace(g, high=1e9) for g in row.correction.gates)
    objective = row.objective
    if isinstance(objective, Clipped):
        objective = replace(objective, eps_low=1.0, eps_high=1e9, dual_clip=None)
    free = replace(row, correction=Correction(gates, weights), objective=objective)
    lp = ragged(seed)
    a = random_advantages(lp, seed)
    _, grad = loss_and_grad(lp, free, a, normalizer=1.0)
    length = lp.segments.spread(lp.segments.lengths.double())
    torch.testing.assert_close(grad, -a * plain_ratio(name, lp, length), rtol=1e-9, atol=1e-12)


def plain_ratio(name: str, lp: LogProbs, length: Tensor) -> Tensor:
    """What multiplies -A in the gradient when nothing is limited, written from the definitions."""
    w = lp.current.detach() - lp.logp_rollout
    if name == "none":
        return torch.ones_like(w)
    if name == "seq_tis":
        return torch.cat([p.sum().exp().expand(len(p)) for p in w.split(lp.segments.lengths.tolist())])  # fmt: skip
    if name == "ppo":
        return (lp.current.detach() - lp.old).exp() / length
    return w.exp()


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.correction.gates])
def test_rejecting_everything_gives_zero_loss_with_a_graph(name):
    row, lp = ROWS[name], ragged(0)
    gates = tuple(replace(g, high=-1.0) for g in row.correction.gates)
    result, grad = loss_and_grad(lp, replace(row, correction=Correction(gates)), random_advantages(lp, 0))  # fmt: skip
    assert result.loss.item() == 0.0
    assert result.loss.requires_grad
    assert (grad == 0).all()
    assert grad.numel() == lp.logp_rollout.numel()


@every_row
def test_a_log_ratio_of_ten_thousand_stays_finite(name):
    lp = LogProbs.pack(
        torch.tensor([-1e4, -1.0, -1.0]).double(),
        torch.tensor([-1.0, -1e4, -1.0]).double().requires_grad_(),
        torch.tensor([-1.0, -1.0, -1e4]).double(),
        segments=Segments.from_lengths([2, 1]),
    )
    result, grad = loss_and_grad(lp, ROWS[name], torch.tensor([1.0, 1.0, -1.0]).double())
    assert result.loss.isfinite()
    assert grad.isfinite().all()
    assert result.stats.sums.isfinite().all()


@every_row
@every_seed
def test_padded_input_gives_what_packed_input_gives(name, seed):
    lp = ragged(seed)
    a = random_advantages(lp, seed)
    packed, packed_grad = loss_and_grad(lp, ROWS[name], a)
    leaf, padded_lp, mask = dirty_batch(lp, torch.Generator().manual_seed(seed))
    result = policy_loss(padded_lp, ROWS[name], a, divergences=divergences_of(padded_lp))
    (grad,) = torch.autograd.grad(result.loss, leaf)
    assert padded_lp.unpack(result.corrected.weight).shape == leaf.shape
    torch.testing.assert_close(result.loss, packed.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad[mask], packed_grad, rtol=1e-12, atol=0)


def test_the_batches_of_these_laws_are_neither_all_kept_nor_all_rejected():
    """Otherwise the gates of the table would not take part in the laws at all."""
    kept = [
        policy_loss(
            lp, row, random_advantages(lp, s), divergences=divergences_of(lp)
        ).corrected.keep
        for row in ROWS.values()
        if row.correction.gates
        for s in SEEDS
        for lp in [ragged(s)]
    ]
    share = torch.cat(kept).double().mean().item()
    assert len(kept) == 6 * len(SEEDS)
    assert 0.05 < share < 0.95
