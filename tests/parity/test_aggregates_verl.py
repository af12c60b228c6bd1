"""Every aggregation mode of verl against the aggregate of the same meaning; what each divides by."""

from dataclasses import replace

import pytest

from offdrift.aggregate import aggregate
from offdrift.methods import METHODS
from offdrift.objectives import Clipped, Reinforce
from tests.parity.peers import MODES, actor, agree, ours, random_batch, same, verl_loss

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", MODES)
def test_aggregates(verl, how, seed):
    batch = random_batch(seed)
    packed = batch.pack()
    normalizer = {"token_mean": batch.tokens, "fixed": batch.sequences * 31}
    mine = aggregate(
        packed.like_caller(batch.advantages),
        packed.segments,
        how=how,
        normalizer=float(normalizer.get(how, batch.sequences)),
    )
    theirs = verl.core_algos.agg_loss(
        batch.advantages,
        batch.mask,
        MODES[how],
        batch_num_tokens=batch.tokens,
        global_batch_size=batch.sequences,
        loss_scale_factor=31,
    )
    same(mine, theirs)
    assert abs(float(mine)) > 1e-4


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("objective", [Reinforce(), Clipped(dual_clip=3.0)])
def test_aggregates_of_a_loss(verl, objective, how):
    batch = random_batch(5)
    name = "gpg" if isinstance(objective, Reinforce) else "vanilla"
    config = actor(verl, batch, loss_scale_factor=31)
    theirs = verl_loss(verl, name, batch, config, MODES[how])
    row = replace(METHODS["none"], objective=objective, aggregate=how)
    agree(ours(row, batch, horizon=31), *theirs)


def test_token_sum(verl):
    """Not a name of ours: tokens divided by one."""
    batch = random_batch(6)
    theirs = verl_loss(verl, "gpg", batch, actor(verl, batch), "token-sum")
    agree(ours(METHODS["none"], batch, normalizer=1.0), *theirs)


def test_the_horizon_is_the_padded_width_unless_given(verl):
    """verl then divides by the longest response of the micro-batch, and ours must be told."""
    batch = random_batch(6)
    config = actor(verl, batch)
    assert config.loss_scale_factor is None
    theirs = verl_loss(verl, "gpg", batch, config, MODES["fixed"])
    row = replace(METHODS["none"], aggregate="fixed")
    agree(ours(row, batch, horizon=batch.width), *theirs)
    with pytest.raises(ValueError, match="horizon"):
        ours(row, batch)


@pytest.mark.parametrize("how", ["seq_mean_token_sum", "seq_mean_token_mean", "fixed"])
def test_an_empty_sequence_counts_with_us_and_not_with_verl_alone(verl, how):
    """dis.03 for a sequence that was masked before any gate: agreed once the batch size is given."""
    batch = random_batch(6)
    row = replace(METHODS["none"], aggregate=how)
    alone = actor(verl, loss_scale_factor=31)
    alone.global_batch_info["loss_scale_factor"] = 31
    loss, gradient = verl_loss(verl, "gpg", batch, alone, MODES[how])
    filled = int((batch.mask.sum(-1) > 0).sum())
    assert filled == batch.sequences - 1
    mine = ours(row, batch, horizon=31)
    same(loss, mine.loss * batch.sequences / filled)
    same(gradient, mine.gradient * batch.sequences / filled)
    given = actor(verl, batch, loss_scale_factor=31)
    agree(mine, *verl_loss(verl, "gpg", batch, given, MODES[how]))
