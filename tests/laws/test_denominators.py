"""What a rejected token does to the denominators: nothing, or what a peer makes of it, by name."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offdrift.batch_info import Observed
from offdrift.laws.batches import HORIZON, Batch, draw, packed, run, seen
from offdrift.methods import METHODS, Method
from tests.laws.definitions import anchored, sequences_of, untouched

PEERS = ("accepted", "verl_trainer")
SEEDS = (0, 3)
GATED = [n for n, row in METHODS.items() if row.correction.gates]
by_peer = pytest.mark.parametrize("peer", PEERS)


def sampled(row: Method, batch: Batch) -> int:
    """Tokens, or sequences (times the horizon), before any gate."""
    b = len(batch.lengths)
    return {"token_mean": sum(batch.lengths), "fixed": b * HORIZON}.get(row.aggregate, b)


def accepted(row: Method, batch: Batch, keep: Tensor, peer: str) -> list[float]:
    """What each sequence's summed loss is divided by: counts of kept tokens and sequences."""
    kept = [int(x.sum()) for x in keep.split(batch.lengths)]
    sequences = len([k for k in kept if k]) if peer == "accepted" else len(kept)
    return {
        "token_mean": [sum(kept)] * len(kept),
        "seq_mean_token_mean": [sequences * k for k in kept],
        "seq_mean_token_sum": [sequences] * len(kept),
        "fixed": [sequences * HORIZON] * len(kept),
    }[row.aggregate]


@by_peer
@pytest.mark.parametrize("name", GATED)
def test_denominators_of_peers_count_what_was_kept(name, peer):
    row = METHODS[name]
    other = replace(row, normalizer=peer)
    differs = 0
    for seed in SEEDS:
        batch = draw(seed)
        rest = untouched(row, anchored(row, sequences_of(batch)))
        plain = run(replace(row, aggregate="seq_mean_token_sum"), packed(batch))
        free = untouched(replace(row, aggregate="seq_mean_token_sum"), sequences_of(batch))
        divided = accepted(row, batch, plain.keep, peer)
        expected = torch.cat([g / max(d, 1) for g, d in zip((plain.grad - free).split(batch.lengths), divided)])
        expected = expected + rest / sampled(row, batch)
        got = run(other, packed(batch), normalizer=None, horizon=HORIZON)
        torch.testing.assert_close(got.grad, expected, rtol=1e-9, atol=1e-12)
        usual = run(row, packed(batch), normalizer=None, horizon=HORIZON)
        differs += int(not torch.allclose(usual.grad, got.grad, rtol=1e-6))
    assert differs or row.aggregate != "token_mean"


@by_peer
@pytest.mark.parametrize("name", GATED)
def test_denominators_of_peers_are_those_of_the_whole_step(name, peer):
    row = replace(METHODS[name], normalizer=peer)
    for seed in SEEDS:
        batch = draw(seed)
        split = [[5, 0], [2], [7, 1, 3], [4, 6]]
        given = [packed(batch.chosen(s)) for s in split]
        observed = functools.reduce(Observed.merge, [seen(row, g) for g in given])
        whole = run(row, packed(batch))
        pieces = [run(row, g, observed=observed) for g in given]
        found = torch.full_like(whole.grad, float("nan"))
        for s, p in zip(split, pieces, strict=True):
            found[batch.rows(s)] = p.grad
        torch.testing.assert_close(found, whole.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(sum(p.loss for p in pieces), whole.loss, rtol=1e-9, atol=1e-12)


@by_peer
@pytest.mark.parametrize("name", [n for n in GATED if METHODS[n].penalty or getattr(METHODS[n].objective, "pull", 0)])
def test_with_gate_scope_all_the_other_terms_are_counted_alike(name, peer):
    row = replace(METHODS[name], gate_scope="all")
    for seed in SEEDS:
        batch = draw(seed)
        plain = run(replace(row, aggregate="seq_mean_token_sum"), packed(batch))
        assert (plain.grad[~plain.keep] == 0).all()
        divided = accepted(row, batch, plain.keep, peer)
        expected = [g / max(d, 1) for g, d in zip(plain.grad.split(batch.lengths), divided)]
        got = run(replace(row, normalizer=peer), packed(batch), normalizer=None, horizon=HORIZON)
        torch.testing.assert_close(got.grad, torch.cat(expected), rtol=1e-9, atol=1e-12)
