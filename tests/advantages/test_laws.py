"""What every estimator must satisfy, whatever its formula."""

import inspect
import threading
from typing import get_args

import pytest
import torch
from torch import Tensor

from offdrift.advantages import ADVANTAGES, AdvantageName, advantages
from offdrift.segments import Segments
from tests.advantages.batches import Batch, random_batch
from tests.oracles.fixtures import double

GROUPS = [3, 3, 3, 3, 8, 8, 8, 5, 5, 5, 5, 5]
BY_SEQUENCE = [
    "grpo",
    "grpo_vectorized",
    "dr_grpo",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "gdpo",
]
OVER_THE_BATCH = ["batch_mean", "gpg", "gdpo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "gae"]
WITHOUT_SIBLINGS = ["batch_mean", "gae", "reinforce_plus_plus", "remax"]
EVERY = list(ADVANTAGES)


def run(how: str, batch: Batch, **options) -> Tensor:
    rewards = batch.pack(batch.padded["rewards"])
    return advantages(rewards, batch.segments, how=how, **batch.inputs(how), **options)


def assert_close(got: Tensor, expected: Tensor, *, at_least: int = 1) -> None:
    assert len(got) >= at_least
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_the_table_has_every_name_once_and_only_known_inputs():
    assert set(ADVANTAGES) == set(get_args(AdvantageName))
    assert len(ADVANTAGES) == 18
    known = set(inspect.signature(advantages).parameters)
    for row in ADVANTAGES.values():
        assert {*row.needs, *row.reads} <= known
        assert row.summary
        assert row.reference.startswith("arXiv:")


@pytest.mark.parametrize("how", BY_SEQUENCE)
@pytest.mark.parametrize(("reward", "size"), [(10.1, 6), (100.3, 8), (0.1, 3)])
def test_rounding_of_equal_float32_rewards_is_not_an_advantage(how, reward, size):
    s = Segments.from_lengths(list(range(size)), group_ids=torch.zeros(size).long())
    rewards = torch.full((size,), reward)
    got = advantages(rewards, s, how=how, components=torch.stack([rewards, -rewards], 1))
    assert len(got) == size * (size - 1) // 2
    assert (got == 0).all()


@pytest.mark.parametrize("how", ["optimal_token_baseline", "tir_optimal_token_baseline", "opob"])
def test_equal_rewards_leave_the_optimal_baselines_their_epsilon(how):
    s = Segments.from_lengths([2, 2], group_ids=torch.zeros(2).long())
    half = torch.full((4,), 0.5).double()  # s = 1 - 2/2 + 1/2 = 1/2 on every token
    got = advantages(double([0.7, 0.7]), s, how=how, logp_old=half.log(), sum_pi_squared=half)
    weights = double([2.0] * 4) if how == "opob" else double([1.0, 2.0, 1.0, 2.0])
    torch.testing.assert_close(got, 0.7 * 1e-8 / (weights + 1e-8), rtol=1e-6, atol=0)


@pytest.mark.parametrize("how", EVERY)
def test_permuted_sequences_give_permuted_advantages(how):
    batch = random_batch(1, GROUPS)
    order = torch.randperm(len(GROUPS), generator=torch.Generator().manual_seed(2))
    expected = run(how, batch)[batch.segments.rows(order)]
    assert_close(run(how, batch.select(order)), expected, at_least=25)


@pytest.mark.parametrize("how", EVERY)
def test_group_names_do_not_matter(how):
    batch = random_batch(1, GROUPS)
    renamed = Batch(batch.mask, -7 * batch.groups, batch.padded, batch.per_sequence)
    assert_close(run(how, renamed), run(how, batch), at_least=25)


@pytest.mark.parametrize("how", EVERY)
def test_a_sequence_reward_is_a_reward_on_its_last_token(how):
    s = Segments.from_lengths([2, 3, 0, 1], group_ids=torch.tensor([1, 1, 2, 2]))
    batch = random_batch(3, [1, 1, 2, 2])
    per_token = {"values", "logp_old", "sum_pi_squared", "weight", "position", "entropy"}
    wanted = batch.inputs(how)
    inputs = {name: x for name, x in wanted.items() if name not in per_token}
    for name in per_token & set(wanted):
        inputs[name] = s.position if name == "position" else torch.full((6,), 0.25).double().log().neg()
    by_token = double([0.0, 1.5, 0.0, 0.0, -0.5, 2.0])
    expected = advantages(by_token, s, how=how, **inputs)
    assert_close(advantages(double([1.5, -0.5, 0.0, 2.0]), s, how=how, **inputs), expected)


ALONE = {
    "grpo": 3 / (1 + 1e-6),
    "grpo_vectorized": 3 / (1 + 1e-6),
    "dr_grpo": 3.0,
    "rloo": 3.0,
    "rloo_vectorized": 0.0,
    "opo": 3.0,
    "gpg": 3.0,
    "optimal_token_baseline": 3.0,
    "tir_optimal_token_baseline": 3.0,
    "opob": 3 * 1e-8 / (1 + 1e-8),
    "reinforce_plus_plus_baseline": 0.0,  # whitened: one value, no spread
    "gdpo": 0.0,
}


@pytest.mark.parametrize("how", ALONE)
def test_a_lone_sequence(how):
    half = double([0.5, 0.5])
    got = advantages(
        double([3.0]),
        Segments.from_lengths([2]),
        how=how,
        components=double([[3.0]]),
        logp_old=half.log(),
        sum_pi_squared=half,
        group_ids=None,
    )
    torch.testing.assert_close(got, double([ALONE[how]] * 2), rtol=0, atol=1e-15)


@pytest.mark.parametrize("how", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
def test_one_token_cannot_be_whitened(how):
    inputs = {"values": double([0.5]), "components": double([[3.0]])}
    got = advantages(double([3.0]), Segments.from_lengths([1]), how=how, group_ids=None, **inputs)
    assert got.tolist() == [0.0]


@pytest.mark.parametrize("how", EVERY)
@pytest.mark.parametrize("lengths", [[0, 0], []])
def test_a_batch_without_tokens_has_no_advantages(how, lengths):
    b = len(lengths)
    got = advantages(
        torch.ones(b),
        Segments.from_lengths(lengths, group_ids=torch.zeros(b).long()),
        how=how,
        values=torch.zeros(0),
        greedy_rewards=torch.zeros(b),
        components=torch.zeros(b, 2),
        logp_old=torch.zeros(0),
        sum_pi_squared=torch.zeros(0),
        weight=torch.zeros(0),
        entropy=torch.zeros(0),
    )
    assert got.shape == (0,)


@pytest.mark.parametrize("how", EVERY)
def test_no_gradient_and_the_dtype_of_the_rewards(how):
    batch = random_batch(4, GROUPS)
    inputs = {
        name: x.float().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in batch.inputs(how).items()
    }
    rewards = batch.pack(batch.padded["rewards"]).float().requires_grad_()
    got = advantages(rewards, batch.segments, how=how, **inputs)
    assert not got.requires_grad
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), run(how, batch), rtol=1e-4, atol=1e-4)


def test_whole_numbers_are_rewards_too():
    s = Segments.from_lengths([1, 1], group_ids=torch.zeros(2).long())
    got = advantages(torch.tensor([1, 0]), s, how="dr_grpo")
    torch.testing.assert_close(got, torch.tensor([0.5, -0.5]))


# -- which sequences make the baseline ----------------------------------------------------------


@pytest.mark.parametrize("how", EVERY)
def test_kept_get_what_they_would_without_the_rejected(how):
    batch = random_batch(5, GROUPS)
    keep = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1]).bool()
    kept = keep.nonzero().squeeze(-1)
    among_all = run(how, batch, baseline_over="kept", keep=keep)
    expected = run(how, batch.select(kept))
    assert_close(among_all[batch.segments.rows(kept)], expected, at_least=20)
    if how != "remax":
        assert (run(how, batch, keep=keep) != among_all).any(), "sampled and kept must differ here"


@pytest.mark.parametrize("how", EVERY)
def test_keeping_all_is_sampling_all(how):
    batch = random_batch(6, GROUPS)
    keep = torch.ones(len(GROUPS)).bool()
    expected = run(how, batch)
    assert torch.equal(run(how, batch, baseline_over="kept", keep=keep), expected)
    assert torch.equal(run(how, batch, keep=~keep), expected), "sampled does not read keep"


@pytest.mark.parametrize("how", [h for h in EVERY if h not in WITHOUT_SIBLINGS])
def test_a_group_without_kept_sequences_has_nothing_to_compare_with(how):
    batch = random_batch(7, GROUPS, empty=0)
    got = run(how, batch, baseline_over="kept", keep=batch.groups != 8)
    alone = batch.segments.spread(batch.groups == 8)
    assert alone.sum() > 5
    assert (got[alone] == 0).all()
    assert (got[~alone] != 0).any()


KEPT_BY_HAND = {
    # group of [4, 1, 0 | 7]: 7 was rejected; mean of the kept 5/3
    "dr_grpo": [7 / 3, -2 / 3, -5 / 3, 16 / 3],
    # each against the other kept: (1+0)/2, (4+0)/2, (4+1)/2; the rejected against all three
    "rloo": [3.5, -1.0, -2.5, 16 / 3],
    "rloo_vectorized": [3.5, -1.0, -2.5, 16 / 3],
    # lengths 1, 2, 1: b = (4 + 2 + 0) / 4
    "opo": [2.5, -0.5, -1.5, 5.5],
    # two of three kept rewards are nonzero: alpha = 3/2
    "gpg": [3.5, -1.0, -2.5, 8.0],
    # squares (49 + 4 + 25) / 9 / 2 = 13/3; lead 4 - 1
    "grpo_passk": [3 / ((13 / 3) ** 0.5 + 1e-6), 0.0, 0.0, 0.0],
    "grpo": [x / ((13 / 3) ** 0.5 + 1e-6) for x in (7 / 3, -2 / 3, -5 / 3, 16 / 3)],
}


@pytest.mark.parametrize("how", KEPT_BY_HAND)
def test_baseline_over_the_kept_by_hand(how):
    s = Segments.from_lengths([1, 2, 1, 1], group_ids=torch.zeros(4).long())
    keep = torch.tensor([True, True, True, False])
    rewards = double([4.0, 1.0, 0.0, 7.0])
    got = advantages(rewards, s, how=how, baseline_over="kept", keep=keep)
    assert_close(got[torch.tensor([0, 1, 3, 4])], double(KEPT_BY_HAND[how]), at_least=4)


def test_a_rejected_tie_takes_nothing_from_the_best_kept():
    s = Segments.from_lengths([1, 1, 1, 1], group_ids=torch.zeros(4).long())
    keep = torch.tensor([True, True, True, False])
    rewards = double([4.0, 1.0, 0.0, 4.0])
    got = advantages(rewards, s, how="grpo_passk", baseline_over="kept", keep=keep)
    assert_close(got, double([3 / ((13 / 3) ** 0.5 + 1e-6), 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("how", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_zero_tail_is_that_of_the_longest_kept(how):
    # Kept: 3 tokens with reward 5, 1 token with reward 1; rejected: 3 tokens with reward 2.
    s = Segments.from_lengths([3, 1, 3], group_ids=torch.zeros(3).long())
    half = torch.full((7,), 0.5).double()  # s = 1/2 on every token, equal at the first column
    got = advantages(
        double([5.0, 1.0, 2.0]),
        s,
        how=how,
        baseline_over="kept",
        keep=torch.tensor([True, True, False]),
        logp_old=half.log(),
        sum_pi_squared=half,
    )
    expected = double([2.0, 5.0, 5.0, -2.0, -1.0, -3.0, -3.0])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)  # the 1e-8 in B, times 5


@pytest.mark.parametrize("how", WITHOUT_SIBLINGS)
def test_without_siblings_a_group_may_be_rejected_as_a_whole(how):
    batch = random_batch(7, GROUPS, empty=0)
    got = run(how, batch, baseline_over="kept", keep=batch.groups != 8)
    assert (got[batch.segments.spread(batch.groups == 8)] != 0).sum() > 5


@pytest.mark.parametrize("how", OVER_THE_BATCH)
def test_nothing_kept_leaves_nothing_to_whiten_by(how):
    batch = random_batch(7, GROUPS)
    got = run(how, batch, baseline_over="kept", keep=torch.zeros(len(GROUPS)).bool())
    assert len(got) > 25
    assert (got == 0).all()


def test_one_kept_sibling():
    s = Segments.from_lengths([1, 1], group_ids=torch.zeros(2).long())
    choice = {"baseline_over": "kept", "keep": torch.tensor([True, False])}
    rewards = double([3.0, 1.0])
    assert advantages(rewards, s, how="dr_grpo", **choice).tolist() == [3.0, 1.0]
    assert advantages(rewards, s, how="rloo", **choice).tolist() == [3.0, -2.0]
    assert advantages(rewards, s, how="grpo_passk", **choice).tolist() == [0.0, 0.0]


# -- many processes -----------------------------------------------------------------------------


def in_processes(how: str, parts: list[Batch], *, share: bool) -> list[Tensor]:
    """Each part in its own thread; `total` waits for all of them and adds."""
    barrier, given = threading.Barrier(len(parts), timeout=20), [torch.empty(0)] * len(parts)
    found = [torch.empty(0)] * len(parts)

    def work(rank: int) -> None:
        def total(x: Tensor) -> Tensor:
            given[rank] = x
            barrier.wait()
            added = torch.stack(list(given)).sum(0)
            barrier.wait()
            return added

        found[rank] = run(how, parts[rank], **({"total": total} if share else {}))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("how", EVERY)
def test_a_batch_split_by_group_over_processes_is_one_batch(how):
    batch = random_batch(8, GROUPS)
    halves = [(batch.groups == 8).nonzero().squeeze(-1), (batch.groups != 8).nonzero().squeeze(-1)]
    expected = [run(how, batch)[batch.segments.rows(half)] for half in halves]
    parts = [batch.select(half) for half in halves]
    shared, apart = (in_processes(how, parts, share=share) for share in (True, False))
    for got, want in zip(shared, expected, strict=True):
        assert_close(got, want, at_least=5)
    talks = any(not torch.allclose(x, y, atol=1e-6) for x, y in zip(apart, expected))
    assert talks == (how in OVER_THE_BATCH)
