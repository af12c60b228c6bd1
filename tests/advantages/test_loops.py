"""Vectorized estimators against slow ones written from the definition, token by token."""

import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from offdrift.advantages import advantages, generalized_advantage, returns_to_go
from offdrift.segments import Segments
from tests.advantages.batches import Batch, random_batch

GROUPS = [4, 4, 4, 4, 7, 7, 7, 1, 9, 9]


def rows(batch: Batch, name: str) -> list[list[tuple[int, float]]]:
    """(column, value) of the trainable tokens of each sequence."""
    padded = batch.padded[name]
    return [
        [(t, padded[i, t].item()) for t in range(batch.mask.shape[1]) if batch.mask[i, t]]
        for i in range(len(batch.mask))
    ]


def flatten(found: list[list[float]]) -> Tensor:
    return torch.tensor([x for row in found for x in row], dtype=torch.float64)


def check(got: Tensor, expected: Tensor) -> None:
    assert len(got) > 15
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def loop_gae(batch: Batch, gamma: float, lam: float) -> list[list[float]]:
    found = []
    for reward, value in zip(rows(batch, "rewards"), rows(batch, "values")):
        out, v_next, a_next = [], 0.0, 0.0
        for (_, r), (_, v) in zip(reversed(reward), reversed(value)):
            a_next = r + gamma * v_next - v + gamma * lam * a_next
            v_next = v
            out.append(a_next)
        found.append(out[::-1])
    return found


def loop_otb(batch: Batch, weighted: bool, compact: bool, zero_tail: bool = True) -> list[list[float]]:
    logp, squares = rows(batch, "logp_old"), rows(batch, "sum_pi_squared")
    weight, reward = rows(batch, "weight"), rows(batch, "rewards")
    b = len(reward)
    energy, returns, column = [], [], []
    for i in range(b):
        s = [1 - 2 * math.exp(p) + q for (_, p), (_, q) in zip(logp[i], squares[i])]
        if weighted:
            s = [x * w * w for x, (_, w) in zip(s, weight[i])]
        energy.append([sum(s[: k + 1]) for k in range(len(s))])
        returns.append([sum(r for _, r in reward[i][k:]) for k in range(len(s))])
        column.append([k if compact else t for k, (t, _) in enumerate(reward[i])])
    members = defaultdict(list)
    for i, g in enumerate(batch.groups.tolist()):
        members[g].append(i)
    found = []
    held = {g: [w for j in own for _, w in weight[j]] for g, own in members.items()}
    for i, g in enumerate(batch.groups.tolist()):
        unit = min(1.0, max(held[g], default=1.0)) ** 2 if weighted else 1.0
        lengths = sorted((len(reward[j]) for j in members[g]), reverse=True)
        out = []
        for k, t in enumerate(column[i]):
            up = down = 0.0
            for j in members[g]:
                for e, back, other in zip(energy[j], returns[j], column[j]):
                    if other == t:
                        up, down = up + back * e, down + e
            alone = len(lengths) == 1
            longest = not alone and len(reward[i]) == lengths[0] > lengths[1]
            bare = alone or (zero_tail and longest and t >= lengths[1])
            out.append(returns[i][k] - (0.0 if bare else up / (down + 1e-8 * unit)))
        found.append(out)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("compact", [True, False])
def test_token_baseline_is_the_loop(seed, compact, weighted):
    batch = random_batch(seed, GROUPS)
    how = "tir_optimal_token_baseline" if compact else "optimal_token_baseline"
    inputs = {name: x for name, x in batch.inputs(how).items() if weighted or name != "weight"}
    got = advantages(batch.pack(batch.padded["rewards"]), batch.segments, how=how, **inputs)
    check(got, flatten(loop_otb(batch, weighted, compact)))


def test_the_tail_is_exercised():
    batch = random_batch(0, GROUPS)
    tail = flatten(loop_otb(batch, False, True))
    none = flatten(loop_otb(batch, False, True, zero_tail=False))
    assert (tail != none).sum() > 0


@pytest.mark.parametrize(("gamma", "lam"), [(1, 1), (1.0, 0.95), (0.9, 0.8), (0.5, 1.0), (0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("longest", [1, 2, 11, 64])
def test_gae_is_the_loop(gamma, lam, longest):
    batch = random_batch(5, GROUPS * 8, longest=longest)
    reward, value = (batch.pack(batch.padded[name]) for name in ("rewards", "values"))
    got = generalized_advantage(reward, value, batch.segments, gamma=gamma, lam=lam)
    check(got, flatten(loop_gae(batch, gamma, lam)))


def test_gae_of_the_public_entry_is_the_loop_whitened():
    batch = random_batch(6, GROUPS)
    raw = flatten(loop_gae(batch, 0.9, 0.8))
    whitened = (raw - raw.mean()) / (raw.var() + 1e-8).sqrt()
    got = advantages(batch.pack(batch.padded["rewards"]), batch.segments, how="gae", **batch.inputs("gae"))
    check(got, whitened)


def test_doubling_scan_and_prefix_sum_meet_at_gamma_one():
    batch = random_batch(7, GROUPS, longest=200)
    x = batch.pack(batch.padded["rewards"])
    almost = returns_to_go(x, batch.segments, gamma=1 - 1e-15)
    torch.testing.assert_close(returns_to_go(x, batch.segments), almost, rtol=0, atol=1e-9)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [0, 1, 0], [5], [3, 0, 8, 1, 0]])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_returns_of_ragged_and_empty_sequences(lengths, gamma):
    segments = Segments.from_lengths(lengths)
    x = torch.arange(1.0, sum(lengths) + 1, dtype=torch.float64)
    expected = []
    for piece in x.split(lengths) if lengths else []:
        for k in range(len(piece)):
            expected.append(sum(gamma**j * v for j, v in enumerate(piece[k:].tolist())))
    got = returns_to_go(x, segments, gamma=gamma)
    assert len(got) == sum(lengths)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
