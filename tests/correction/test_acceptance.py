"""Random acceptance has the density that it says, and bounds that follow a share end at it."""

import math
from dataclasses import replace

import pytest
import torch

from offdrift.batch_info import Observed
from offdrift.correction import Correction, FollowingGate, RandomGate
from offdrift.errors import MethodError
from offdrift.laws.batches import packed
from offdrift.logprobs import LogProbs
from offdrift.methods import method, override
from offdrift.segments import Segments
from tests.laws.handmade import made

VOCAB = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
TARGET = torch.tensor([0.2, 0.3, 0.2, 0.3], dtype=torch.float64)
N = 60_000


def drawn(first: torch.Tensor, second: torch.Tensor, *, seed: int = 0) -> tuple[LogProbs, torch.Tensor]:
    """`N` sequences of one token and one of a tail that makes each unlike the others, and the first tokens."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(first, N, replacement=True, generator=draw)
    tail = -torch.rand(N, generator=draw, dtype=torch.float64)
    mu, pi = (torch.stack([p.log()[tokens], tail], 1).flatten() for p in (first, second))
    return LogProbs(mu, Segments.from_lengths([2] * N), pi), tokens


@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0, 6.0])
def test_accepted_tokens_have_the_density_that_it_says(limit):
    gate = RandomGate(limit=limit)
    logprobs, tokens = drawn(VOCAB, TARGET)
    keep = gate.keep(logprobs)[::2]
    a = (TARGET / VOCAB / limit).clamp(max=1)
    density = VOCAB * a / (VOCAB * a).sum()
    found = torch.bincount(tokens[keep], minlength=4) / keep.sum()
    torch.testing.assert_close(found.double(), density, rtol=0, atol=0.008)
    assert float(keep.double().mean()) == pytest.approx(float((VOCAB * a).sum()), abs=0.008)
    assert gate.acceptance(logprobs)[::2].tolist() == pytest.approx(a[tokens].tolist())
    if limit == 6.0:  # the largest ratio: what is left is the second policy
        torch.testing.assert_close(density, TARGET)


@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0])
def test_with_its_weight_and_all_tokens_counted_it_is_the_ratio_in_expectation(limit):
    """E[1(accepted) max(w, limit)] = E[w], whatever the limit: the method's row without a cap."""
    row = override(method("jackpot"), {"gate.limit": limit, "weight.floor": limit, "weight.cap": 100.0})
    logprobs, tokens = drawn(VOCAB, TARGET, seed=1)
    decided = row.correction(logprobs)
    counted = (decided.weight * decided.keep)[::2]
    for token in range(4):
        mean = float(counted[tokens == token].mean())
        assert mean == pytest.approx(float(TARGET[token] / VOCAB[token]), rel=0.05)


def test_chance_is_of_the_sequence_and_the_seed():
    logprobs, _ = drawn(VOCAB, TARGET)
    gate = RandomGate()
    keep = gate.keep(logprobs)
    assert torch.equal(keep, gate.keep(logprobs))
    assert not torch.equal(keep, RandomGate(seed=1).keep(logprobs))
    some = torch.arange(100, 140)
    piece = LogProbs(logprobs.logp_rollout[some], Segments.from_lengths([2] * 20), logprobs.current[some])
    assert torch.equal(gate.keep(piece), keep[some])
    halves = [replace(logprobs, logp_rollout=logprobs.logp_rollout.to(t)) for t in (torch.float32, torch.float64)]
    agree = [gate.keep(h) for h in halves]
    assert float((agree[0] == agree[1]).double().mean()) > 0.999


def gate_of(**settings) -> FollowingGate:
    return FollowingGate(on="mismatch", **settings)


def seen(gate: FollowingGate, log_ratios: list[float]) -> dict:
    batch = packed(made("mismatch", log_ratios, [1.0] * len(log_ratios)))
    return gate.observe(batch.lp, None, batch.batch_info)


@pytest.mark.parametrize("unit", ["seq_sum", "seq_mean"])
def test_a_sequence_is_judged_by_the_size_of_its_sum_or_mean(unit):
    gate = gate_of(unit=unit, width=0.3)
    lengths, l = [2, 2, 1, 3], [0.2, 0.09, 0.2, 0.11, -0.31, 0.4, -0.2, 0.09]  # noqa: E741
    batch = packed(made("mismatch", l, [1.0] * 8, lengths=lengths))
    sums = [0.29, 0.31, 0.31, 0.29]
    inside = [(s if unit == "seq_sum" else s / n) <= 0.3 for s, n in zip(sums, lengths, strict=True)]
    expected = [x for x, n in zip(inside, lengths, strict=True) for _ in range(n)]
    assert gate.keep(batch.lp).tolist() == expected
    assert len(set(inside)) == 2


def test_the_width_moves_to_the_quantile_of_the_step_in_the_log():
    gate = gate_of(width=1.0, target=0.75, rate=0.5)
    step = seen(gate, [0.1, -0.2, 0.4, -0.8])
    assert gate.next(step).width == pytest.approx(math.sqrt(1.0 * 0.4))  # three of four are within 0.4
    assert replace(gate, rate=0.0).next(step) == replace(gate, rate=0.0)
    assert replace(gate, rate=1.0).next(step).width == pytest.approx(0.4)
    still = seen(gate, [0.0, 0.0])
    assert replace(gate, rate=1.0).next(still).width == gate.narrowest
    assert gate.next({"distance": torch.tensor([-1.0]).double()}) == gate


def test_acceptance_comes_to_the_target_and_follows_drift_that_grows():
    draw, gate = torch.Generator().manual_seed(0), gate_of(width=5.0, target=0.8, rate=0.2)
    shares = []
    for step in range(80):
        size = 0.1 if step < 40 else 0.5
        l = (size * torch.randn(400, generator=draw)).tolist()  # noqa: E741
        batch = packed(made("mismatch", l, [1.0] * 400))
        shares.append(float(gate.keep(batch.lp).double().mean()))
        gate = gate.next(seen(gate, l))
    assert shares[0] == 1.0
    assert sum(shares[30:40]) / 10 == pytest.approx(0.8, abs=0.03)
    assert shares[40] < 0.5
    assert sum(shares[70:]) / 10 == pytest.approx(0.8, abs=0.03)


def test_a_method_carries_the_width_on_and_a_checkpoint_restores_it():
    row = method("ac_mis_po")
    (gate,) = row.correction.gates
    batch = packed(made("mismatch", [0.1, -0.2, 0.4, -0.8], [1.0] * 4))
    halves = [row.observe(x.lp, x.advantages, x.batch_info) for x in (batch, batch)]
    merged = halves[0].merge(halves[1])
    after = row.next(merged)
    assert after.correction.gates[0] == gate.next(seen(gate, [0.1, -0.2, 0.4, -0.8] * 2))
    changed = after.changes(row)
    assert set(changed) == {"gate.0.width"}
    assert override(row, changed) == after
    assert row.next(Observed({})) is row


def test_settings_that_mean_nothing_are_refused():
    for make in (
        lambda: RandomGate(limit=0.0),
        lambda: FollowingGate(target=1.5),
        lambda: FollowingGate(rate=-0.1),
        lambda: FollowingGate(width=0.0),
    ):
        with pytest.raises(MethodError):
            make()
    assert Correction((RandomGate(),)).gates[0].exact is False
