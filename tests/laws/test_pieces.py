"""How a batch is stored, ordered, padded or split changes nothing; what of it is masked is not seen."""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offdrift.batch_info import Observed
from offdrift.laws.batches import HORIZON, Batch, Run, draw, masked, packed, padded, run, seen
from offdrift.methods import METHODS, Method
from offdrift.objectives.prompt_dual import PromptDual
from offdrift.objectives.regression import Regression
from offdrift.stats.drift import DriftStats
from tests.laws.rows import ROWS

SEEDS = range(4)
FEW = (0, 2)
every_row = pytest.mark.parametrize("name", METHODS)
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


def seeds_of(name: str) -> Iterable[int]:
    """Batches, and splits of them: more where a row has something to put together."""
    return SEEDS if ROWS[name].observers else FEW


@functools.cache
def whole(name: str, seed: int) -> Run:
    return run(ROWS[name], packed(draw(seed)))


@functools.cache
def in_pieces(name: str, seed: int) -> tuple[list[list[int]], list[Run], Observed]:
    """A random split into one to eight pieces, each run with what all of them saw together."""
    row, batch = ROWS[name], draw(seed)
    split = random_split(seed)
    given = [packed(batch.chosen(sequences)) for sequences in split]
    observed = functools.reduce(Observed.merge, [seen(row, g) for g in given])
    return split, [run(row, g, observed=observed) for g in given], observed


def random_split(seed: int) -> list[list[int]]:
    """Eight sequences in random order, cut at random places; seed 0: each sequence by itself."""
    g = torch.Generator().manual_seed(50 + seed)
    order = torch.randperm(8, generator=g).tolist()
    if seed == 0:
        return [[i] for i in order]
    cuts = [0, *sorted(torch.randperm(7, generator=g)[:seed].add(1).tolist()), 8]
    return [order[i:j] for i, j in itertools.pairwise(cuts)]


def put_back(batch: Batch, split: list[list[int]], grads: list[Tensor]) -> Tensor:
    """Gradients of pieces, where their tokens were."""
    found = torch.full((sum(batch.lengths),), float("nan"), dtype=torch.float64)
    for sequences, grad in zip(split, grads, strict=True):
        found[batch.rows(sequences)] = grad
    return found


# -- mask -------------------------------------------------------------------------------------------


@every_row
def test_masked_positions_may_hold_anything(name):
    """NaN, infinities and 1e9 in every input, inside of sequences and turns."""
    junk = 0
    for seed in seeds_of(name):
        batch = draw(seed)
        given, mask = masked(batch, seed)
        got = run(METHODS[name], given)
        close(got.loss, whole(name, seed).loss)
        close(got.grad[mask], whole(name, seed).grad)
        assert (got.grad[~mask] == 0).all()
        assert torch.equal(got.keep, whole(name, seed).keep)
        close(got.result.stats.sums, whole(name, seed).result.stats.sums)
        junk += int((~mask).sum())
    assert junk > 20


@every_row
def test_masked_positions_do_not_count_in_the_normalizer(name):
    batch = draw(1)
    given, mask = masked(batch, 1)
    got = run(METHODS[name], given, normalizer=None, horizon=HORIZON)
    close(got.loss, run(METHODS[name], packed(batch), normalizer=None, horizon=HORIZON).loss)
    tokens, sequences = sum(batch.lengths), len(batch.lengths)
    count = {"token_mean": tokens, "fixed": sequences * HORIZON}
    close(got.loss * count.get(METHODS[name].aggregate, sequences), whole(name, 1).loss)
    assert int(mask.sum()) == tokens < len(mask)


@every_row
def test_padded_input_gives_what_packed_input_gives(name):
    row = METHODS[name]
    for seed in (1, 2):
        drawn = draw(seed)
        batch = replace(drawn, turns=[[n] for n in drawn.lengths])  # padded input has no turns
        flat, (given, mask) = run(row, packed(batch)), padded(batch, seed)
        got = run(row, given)
        assert got.grad.shape == mask.shape
        close(got.loss, flat.loss)
        close(got.grad[mask], flat.grad)
        assert (got.grad[~mask] == 0).all()
        weight = given.lp.unpack(got.result.corrected.weight)
        assert weight.shape == mask.shape
        close(weight[mask], flat.result.corrected.weight)
        assert (weight[~mask] == 0).all()
        for a, b in zip(states(got.result.stats), states(flat.result.stats), strict=True):
            close(a, b)


# -- no talk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_a_batch_is_the_sum_of_its_pieces(name):
    for seed in seeds_of(name):
        split, runs, _ = in_pieces(name, seed)
        close(sum(r.loss for r in runs), whole(name, seed).loss)
        got = put_back(draw(seed), split, [r.grad for r in runs])
        close(got, whole(name, seed).grad)
        assert len(runs) == (8 if seed == 0 else seed + 1)


@pytest.mark.parametrize("name", ROWS)
def test_what_the_pieces_saw_is_what_the_whole_saw(name):
    """Given to the whole batch, it changes nothing; it gives the same next method and step size."""
    row = ROWS[name]
    for seed in seeds_of(name):
        _, _, observed = in_pieces(name, seed)
        own = whole(name, seed).result.observed
        assert observed.parts.keys() == own.parts.keys()
        again = run(row, packed(draw(seed)), observed=observed)
        close(again.loss, whole(name, seed).loss)
        close(again.grad, whole(name, seed).grad)
        if row.lr_scale is not None:
            close(*(row.lr_scale.scale(o.parts[row.lr_scale]) for o in (observed, own)))
        check_same_numbers(row.next(observed), row.next(own))


def check_same_numbers(one: Method, other: Method) -> None:
    assert one.objective.formula == other.objective.formula
    assert one.correction.gates == other.correction.gates


LOOKS_LATER = {
    "r2vpo": "what it sees sets the price of the next step",
    "ac_mis_po": "what it sees sets the bounds of the next step",
}


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.observers])
def test_a_row_that_observes_needs_to(name):
    """Its pieces do not add up without what the others saw; else the laws above would prove nothing
    about how observations are put together."""
    row = METHODS[name]
    looks = seen(row, packed(draw(0))).parts.keys() - {row.lr_scale}

    def adds_up(seed: int) -> bool:
        batch = draw(seed)
        batch = batch.with_tokens(a=6 * batch.tokens["a"])  # ST-PPO ignores what is below 1
        alone = torch.cat([run(row, packed(batch.chosen([i]))).grad for i in range(8)])
        return torch.allclose(alone, run(row, packed(batch)).grad, rtol=1e-9, atol=1e-12)

    assert all(map(adds_up, range(8))) == (not looks or name in LOOKS_LATER)


@every_row
def test_permuting_sequences_permutes_gradients(name):
    for seed in seeds_of(name):
        batch = draw(seed)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
        got = run(METHODS[name], packed(batch.chosen(order)))
        close(got.loss, whole(name, seed).loss)
        close(got.grad, whole(name, seed).grad[batch.rows(order)])
        assert order != sorted(order)


@every_row
def test_sequences_without_tokens_change_nothing(name):
    """At the front, in the middle and at the end; their prompt is their own."""
    batch = draw(1)
    full = batch.turns
    turns = [[0], *full[:3], [], [0, 0], *full[3:], [0]]
    where = torch.tensor([1, 2, 3, *range(6, 11)])
    rewards, groups = torch.full((12,), 0.7, dtype=torch.float64), torch.full((12,), 99)
    rewards[where], groups[where] = batch.rewards, batch.groups
    holed = replace(batch, turns=turns, rewards=rewards, groups=groups)
    assert [n for n in holed.lengths if n] == batch.lengths
    got = run(METHODS[name], packed(holed))
    close(got.loss, whole(name, 1).loss)
    close(got.grad, whole(name, 1).grad)
    assert got.result.stats.sums.isfinite().all()
    assert got.result.stats.maxima.isfinite().all()
    # Padded: rows of the mask without a single token.
    flat, bare = (replace(b, turns=[[n] for n in b.lengths]) for b in (batch, holed))
    given, mask = padded(bare, 1)
    assert int((mask.sum(1) == 0).sum()) == 4
    close(run(METHODS[name], given).grad[mask], run(METHODS[name], packed(flat)).grad)


# -- merging statistics ---------------------------------------------------------------------------------


def states(stats: DriftStats) -> list[Tensor]:
    assert len(stats.sum_names) == len(stats.sums) > 10
    return [stats.sums, stats.maxima, stats.logs, *stats.by_position.values()]


@every_row
def test_merging_the_statistics_of_any_split_gives_those_of_one_pass(name):
    for seed in seeds_of(name):
        _, runs, _ = in_pieces(name, seed)
        merged = DriftStats.merge_all([r.result.stats for r in runs])
        once = whole(name, seed).result.stats
        assert merged.sum_names == once.sum_names
        assert merged.max_names == once.max_names
        assert merged.by_position.keys() == once.by_position.keys()
        assert len(once.by_position) == 7
        assert merged.grade == once.grade
        for a, b in zip(states(merged), states(once), strict=True):
            close(a, b)


@every_row
def test_statistics_merge_in_any_order(name):
    _, runs, _ = in_pieces(name, 0)
    stats = [r.result.stats for r in runs]
    left = functools.reduce(DriftStats.merge, stats)
    pairs = [a.merge(b) for a, b in zip(stats[::2], stats[1::2])]
    nested = (pairs[3].merge(pairs[1])).merge(pairs[0].merge(pairs[2]))
    for a, b in zip(states(nested), states(left), strict=True):
        close(a, b)


def test_prompts_are_split_over_pieces_in_these_batches():
    """Otherwise statistics of a prompt would never have to be put together."""
    torn = 0
    for seed in SEEDS:
        groups = draw(seed).groups
        pieces = [set(groups[s].tolist()) for s in random_split(seed)]
        torn += sum(len([p for p in pieces if g in p]) > 1 for g in set(groups.tolist()))
    assert torn > 4
    assert any(isinstance(r.objective, PromptDual | Regression) for r in METHODS.values())
