"""Adding the current policy to a packed batch changes no number, reads none, and refuses what packing refuses, later."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offdrift.batch_info import BatchInfo
from offdrift.correction.weight import Weighted
from offdrift.errors import BadValueError, ShapeError
from offdrift.laws.batches import Given, draw, packed, run
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from offdrift.numerics import vector_of
from offdrift.segments import Segments
from offdrift.stats import summarize
from offdrift.stats.drift import DriftStats

every_row = pytest.mark.parametrize("name", METHODS)
READS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default", "aten.equal.default"}


class Reads(TorchDispatchMode):
    """Collects operators that hand a number to the host, for which it waits on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) in READS:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def on_record(batch: Given) -> LogProbs:
    lp = batch.lp
    return LogProbs.pack(lp.logp_rollout, None, lp.logp_old, logp_ref=lp.logp_ref, segments=lp.segments)


def with_current(batch: Given) -> Given:
    return replace(batch, lp=on_record(batch).with_current(batch.leaf))


@every_row
@pytest.mark.parametrize("seed", [0, 2])
def test_every_number_is_that_of_pack(name, seed):
    row, batch = METHODS[name], packed(draw(seed))
    one, other = run(row, batch), run(row, with_current(batch))
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(one.grad, other.grad)
    assert summarize(one.result.stats) == pytest.approx(summarize(other.result.stats), nan_ok=True, rel=0, abs=0)


@every_row
def test_nothing_is_read_before_the_statistics(name, monkeypatch):
    batch = packed(draw(2))
    recorded, tolist, lists = on_record(batch), torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(x) or tolist(x))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # on a host, where it costs nothing, numbers are read
    monkeypatch.setattr(Weighted, "guarded", lambda weighted, *extremes: weighted.exact is not None)  # the same
    sizes_are_on_the_host(recorded)
    with Reads() as reads:
        lp = recorded.with_current(batch.leaf)
        out = policy_loss(lp, METHODS[name], batch.advantages, batch.batch_info, horizon=12)
        out.loss.backward()
        stats = out.stats
        assert (reads.names, lists) == ([], [])
        summarize(stats)
    assert len(lists) == 1


def sizes_are_on_the_host(recorded: LogProbs) -> None:
    """Packing fetched the cuts; what is made of them on the host is no wait, though `Reads` cannot tell."""
    segments = [recorded.segments, recorded.scored.segments]
    for cut in [s for s in (*segments, *(s.turns for s in segments)) if s is not None]:
        assert "on_host" in cut.__dict__
        assert cut.num_tokens >= cut.longest


def tokens(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def small() -> tuple[LogProbs, torch.Tensor]:
    return LogProbs.pack(tokens(-1, -2, -3), None, tokens(-1, -2, -2.9), segments=Segments.from_lengths([2, 1])), (
        tokens(-1.1, -1.9, -3)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.1])
def test_what_is_no_log_prob_is_refused_when_statistics_are_read_alone_or_merged(value):
    lp, logp = small()
    good = policy_loss(lp.with_current(logp), "ppo_clip", tokens(1, 1, -1)).stats
    summarize(good)
    logp[1] = value
    bad = policy_loss(lp.with_current(logp), "ppo_clip", tokens(1, 1, -1)).stats
    for stats in (bad, good.merge(bad), bad.merge(good), bad.cpu()):
        with pytest.raises(BadValueError, match=r"by field: logp: 1\. .*do not take the step"):
            summarize(stats)
    with pytest.raises(BadValueError, match="logp: 2"):
        summarize(bad.merge(bad))


def test_minus_infinity_is_the_floor_and_rounding_above_zero_is_forgiven():
    lp, logp = small()
    logp[0], logp[2] = -math.inf, 1e-4
    want = LogProbs.pack(lp.logp_rollout, logp, lp.logp_old, segments=lp.segments)
    one, other = lp.with_current(logp), want
    assert torch.equal(one.current, other.current)
    assert summarize(DriftStats.of(one)) == summarize(DriftStats.of(other))


@pytest.mark.parametrize(
    ("advantages", "normalizer", "weight", "match"),
    [
        (tokens(1, math.nan, math.inf), None, None, "advantages: 2"),
        (tokens(1, 1, 1), torch.tensor(0.0), None, "normalizer: 1"),
        (tokens(1, 1, 1), torch.tensor(math.nan), None, "normalizer: 1"),
        (tokens(1, 1, 1), None, tokens(1, -math.inf), "sample_weight: 1"),
    ],
)
def test_other_inputs_are_refused_later_too(advantages, normalizer, weight, match):
    lp, logp = small()
    info = BatchInfo(sample_weight=weight)
    out = policy_loss(lp.with_current(logp), "ppo_clip", advantages, info, normalizer=normalizer)
    with pytest.raises(BadValueError, match=match):
        summarize(out.stats)


def test_what_needs_no_device_is_refused_at_once():
    lp, logp = small()
    with pytest.raises(ShapeError, match=r"got \(2,\)"):
        lp.with_current(logp[:2])
    with pytest.raises(BadValueError, match="meta"):
        lp.with_current(logp.to("meta"))
    with pytest.raises(BadValueError, match="normalizer=0"):
        policy_loss(lp.with_current(logp), "ppo_clip", tokens(1, 1, 1), normalizer=0.0)


def test_padded_batches_and_unscored_tokens_are_those_of_pack():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    rollout = torch.tensor([[-1.0, -9999.0, 5.0], [math.nan, -2.0, -0.5]])
    old, logp = rollout.clamp(min=-3) - 0.1, (rollout.clamp(min=-3) + 0.2).clamp(max=-0.2).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    want = policy_loss(LogProbs.pack(rollout, logp, old, mask=mask), "decoupled_ppo", advantages)
    recorded = LogProbs.pack(rollout, None, old, mask=mask)
    sizes_are_on_the_host(recorded)
    with Reads() as reads:
        lp = recorded.with_current(logp)
        out = policy_loss(lp, "decoupled_ppo", advantages)
        assert torch.equal(out.loss, want.loss)
        assert reads.names == ["aten.equal.default"]  # the one above
    assert summarize(out.stats) == summarize(want.stats)
    assert torch.equal(lp.unscored, torch.tensor([False, True, False, False]))


def test_dtypes_are_the_widest_as_in_pack():
    lp, logp = small()
    half = LogProbs.pack(lp.logp_rollout.float(), None, lp.old.float(), segments=lp.segments)
    assert half.with_current(logp.bfloat16()).current.dtype == torch.float32
    wide = half.with_current(logp)
    assert {x.dtype for x in (wide.current, wide.old, wide.logp_rollout)} == {torch.float64}


@pytest.mark.parametrize("seed", range(4))
def test_the_way_of_accelerators_gives_the_numbers_of_the_way_of_cpus(seed, monkeypatch):
    """An accelerator takes all ratios and all sums at once, since launches are dear there."""
    batch = packed(draw(seed))
    expected = policy_loss(batch.lp, "decoupled_ppo", batch.advantages, batch.batch_info).stats.to_host()
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    stats = policy_loss(packed(draw(seed)).lp, "decoupled_ppo", batch.advantages, batch.batch_info).stats.to_host()
    assert stats == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_vector_of_numbers_keeps_their_order_whatever_their_dtypes():
    numbers = [torch.tensor(2), 0.5, torch.tensor(1.5), torch.tensor(3), torch.tensor(0.25, dtype=torch.float64)]
    assert vector_of(numbers, torch.zeros(1)).tolist() == [2, 0.5, 1.5, 3, 0.25]
    assert vector_of([], torch.zeros(1)).dtype == torch.float64
