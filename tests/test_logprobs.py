"""`LogProbs.pack`: what it accepts, what it refuses and how, and that the caller's shape comes back."""

import pytest
import torch

from offdrift import logprobs
from offdrift.errors import BadValueError, EvidenceError, ShapeError
from offdrift.logprobs import FLOORS, POSITIVE_SLACK, UNSCORED_BELOW, LogProbs
from offdrift.loss import policy_loss
from offdrift.ratios import log_ratio
from offdrift.segments import Segments
from offdrift.stats import DriftStats, summarize

NAN, INF = float("nan"), float("inf")


def padded(**fields) -> LogProbs:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    base = torch.tensor([[-1.0, NAN, -2.0], [-3.0, -4.0, INF]])
    return LogProbs.pack(fields.pop("logp_rollout", base), mask=mask, **fields)


def test_padded_input_is_packed_and_masked_tokens_are_gone():
    lp = padded()
    assert lp.logp_rollout.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert lp.segments.lengths.tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_largest_excess_by_rounding_is_accepted_and_the_next_number_is_refused(dtype):
    """float32's .001 is larger than .001: logs of three decimals hold it."""
    most = torch.tensor(POSITIVE_SLACK, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    while most.float() > POSITIVE_SLACK and dtype == torch.float16:
        most = torch.nextafter(most, torch.tensor(0.0, dtype=dtype))
    above = torch.nextafter(most, torch.tensor(1.0, dtype=dtype))
    segments = Segments.from_lengths([2])
    assert len(LogProbs.pack(torch.stack([-most, most]), segments=segments).logp_rollout) == 2
    with pytest.raises(BadValueError, match="at trainable token 1"):
        LogProbs.pack(torch.stack([-most, above]), segments=segments)


def test_what_comes_back_has_the_shape_that_came_in():
    lp = padded()
    assert lp.unpack(torch.tensor([5.0, 6.0, 7.0, 8.0]), fill=-1.0).tolist() == [[5.0, -1.0, 6.0], [7.0, 8.0, -1.0]]
    assert lp.unpack(torch.tensor([True, False, True, True])).tolist() == [[True, False, False], [True, True, False]]


def test_packed_input_with_a_mask_shrinks_sequences_turns_and_groups_alike():
    segments = Segments.from_lengths([3, 2], turns=Segments.from_lengths([1, 2, 2]), group_ids=torch.tensor([4, 4]))
    x = torch.tensor([-1.0, NAN, -3.0, -4.0, -5.0])
    lp = LogProbs.pack(x, segments=segments, mask=torch.tensor([1, 0, 1, 1, 1]))
    assert lp.segments.lengths.tolist() == [2, 2]
    assert lp.segments.turns.lengths.tolist() == [1, 1, 2]
    assert lp.segments.groups.sizes.tolist() == [2]
    assert lp.unpack(torch.ones(4)).tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_only_the_current_policy_carries_gradient():
    leaves = [torch.full((1, 2), -1.0, requires_grad=True) for _ in range(3)]
    lp = LogProbs.pack(*leaves, mask=torch.ones(1, 2))
    assert lp.current.requires_grad
    assert not lp.logp_rollout.requires_grad
    assert not lp.old.requires_grad


def test_a_masked_nan_poisons_neither_loss_nor_gradient():
    leaf = torch.tensor([[-1.0, NAN]], requires_grad=True)
    lp = LogProbs.pack(torch.tensor([[-1.0, NAN]]), leaf, mask=torch.tensor([[1, 0]]))
    (lp.current - lp.logp_rollout).exp().sum().backward()
    assert leaf.grad.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_are_upcast_and_double_is_kept(dtype):
    one = torch.full((1, 1), -1.0)
    assert LogProbs.pack(one.to(dtype), mask=one).logp_rollout.dtype == torch.float32
    assert LogProbs.pack(one.double(), mask=one).logp_rollout.dtype == torch.float64


@pytest.mark.parametrize("field", ["logp_rollout", "logp", "logp_old"])
@pytest.mark.parametrize("value", [NAN, INF, 0.5])
def test_a_bad_value_is_refused_with_field_sequence_and_value(field, value):
    fields = {name: torch.full((5,), -1.0) for name in ("logp_rollout", "logp", "logp_old")}
    fields[field][3] = value
    with pytest.raises(BadValueError, match=rf"{field} of sequence 1 is {value} at trainable token 1"):
        LogProbs.pack(**fields, segments=Segments.from_lengths([2, 3]))


def test_two_policies_that_call_a_token_impossible_never_look_as_if_they_agreed():
    lowest = torch.full((2,), -INF)
    lp = LogProbs.pack(lowest, lowest, lowest, logp_ref=lowest, segments=Segments.from_lengths([2]))
    assert set(FLOORS) == {"logp_rollout", "logp", "logp_old", "logp_ref"}
    for first, second in (
        (lp.reference, lp.current),
        (lp.logp_rollout, lp.old),
        (lp.old, lp.current),
        (lp.logp_rollout, lp.current),
    ):
        assert ((first - second).abs() > 1e3).all()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: LogProbs.pack(x, x[:, :2], mask=torch.ones(2, 3)), ShapeError, r"logp has shape \(2, 2\)"),
        (lambda x: LogProbs.pack(x), ShapeError, "needs mask="),
        (lambda x: LogProbs.pack(x, mask=torch.ones(2, 2)), ShapeError, "mask has shape"),
        (lambda x: LogProbs.pack(x[0]), ShapeError, "packed .tokens. with segments="),
        (lambda x: LogProbs.pack(x[0], segments=Segments.from_lengths([2])), ShapeError, "cu_seqlens ends at 2"),
        (lambda x: LogProbs.pack(x[:0], mask=torch.ones(0, 3)), BadValueError, "empty batch"),
        (lambda x: LogProbs.pack(x, mask=torch.ones(2, 3)).old, EvidenceError, "needs logp_old"),
        (lambda x: LogProbs.pack(x, mask=torch.ones(2, 3)).current, EvidenceError, "needs logp"),
        (lambda x: LogProbs.pack(x, mask=torch.ones(2, 3)).reference, EvidenceError, "needs logp_ref"),
        (lambda x: LogProbs.pack(x, logp_ref=x * float("nan"), mask=torch.ones(2, 3)), BadValueError, "logp_ref of sequence 0 is nan"),
        (lambda x: LogProbs.pack(x, mask=torch.ones(2, 3)).like_caller(x[0]), ShapeError, "expected the log-probs' shape"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused_with_the_way_out(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.full((2, 3), -1.0))


SENTINELS = [-9999.0, -1e4, -1e30, -INF, UNSCORED_BELOW]


@pytest.mark.parametrize("value", SENTINELS)
def test_a_token_without_a_rollout_log_prob_is_unscored_and_has_the_ratio_one(value):
    rollout = torch.tensor([-1.0, value, -2.0])
    leaf = torch.tensor([-1.5, -0.5, -2.5], requires_grad=True)
    lp = LogProbs.pack(rollout, leaf, leaf.detach() - 1, segments=Segments.from_lengths([2, 1]))
    assert lp.unscored.tolist() == [False, True, False]
    for on in ("full", "mismatch", "staleness"):
        assert log_ratio(lp, on=on)[1] == 0
    log_ratio(lp, on="full").sum().backward()
    assert leaf.grad.tolist() == [1.0, 0.0, 1.0]


def test_the_first_unscored_token_of_a_process_is_said_and_every_one_is_counted(caplog, monkeypatch):
    monkeypatch.setattr(logprobs, "_warned", set())
    for value in (-INF, -9999.0):
        lp = LogProbs.pack(torch.tensor([-1.0, value]), torch.tensor([-1.0, -1.0]), segments=Segments.from_lengths([2]))
        assert summarize(DriftStats.of(lp))["batch/unscored_tokens"] == 1
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["logp_rollout holds -inf"]


@pytest.mark.parametrize("shape", [(2, 0), (2, 3)])
def test_sequences_without_a_token_that_trains_are_a_batch_whose_loss_is_zero(shape):
    logp = torch.full(shape, -1.0, requires_grad=True)
    lp = LogProbs.pack(logp.detach(), logp, mask=torch.zeros(shape))
    assert (len(lp.segments), policy_loss(lp, "token_tis", torch.zeros(0)).loss.item()) == (2, 0.0)


def test_a_log_prob_just_above_the_sentinels_is_scored():
    one = torch.tensor([-1.0, UNSCORED_BELOW + 1e-3])
    assert LogProbs.pack(one, segments=Segments.from_lengths([2])).unscored is None


def test_sentinels_in_other_fields_are_floors_and_no_sentinels():
    one = torch.tensor([-1.0, -2.0])
    lowest = torch.tensor([-1.0, -INF])
    lp = LogProbs.pack(one, lowest, lowest, segments=Segments.from_lengths([2]))
    assert lp.unscored is None
    assert lp.current.tolist() == [-1.0, FLOORS["logp"]]


def test_an_unscored_token_is_still_unscored_when_packed_again():
    lp = LogProbs.pack(torch.tensor([-1.0, -INF]), segments=Segments.from_lengths([2]))
    again = LogProbs.pack(lp.logp_rollout, segments=lp.segments)
    assert again.unscored.tolist() == [False, True]


def test_what_is_scored_keeps_sequences_turns_groups_and_the_way_back():
    segments = Segments.from_lengths(
        [2, 1, 2], turns=Segments.from_lengths([1, 1, 1, 2]), group_ids=torch.tensor([3, 3, 5])
    )
    rollout = torch.tensor([-1.0, -9999.0, -9999.0, -4.0, -5.0])
    lp = LogProbs.pack(rollout, segments=segments)
    assert lp.scored.logp_rollout.tolist() == [-1.0, -4.0, -5.0]
    assert lp.scored.segments.lengths.tolist() == [1, 0, 2]
    assert lp.scored.segments.turns.lengths.tolist() == [1, 0, 0, 2]
    assert lp.scored.segments.groups.sizes.tolist() == [2, 1]
    assert lp.scored.unpack(torch.ones(3)).tolist() == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert lp.scored.scored is lp.scored


def test_masked_sentinels_are_masked_and_not_unscored():
    lp = LogProbs.pack(torch.tensor([[-1.0, -9999.0]]), mask=torch.tensor([[1, 0]]))
    assert lp.unscored is None
    padded_too = torch.tensor([[-1.0, 0.0, -INF], [-INF, -2.0, 7.0]])
    lp = LogProbs.pack(padded_too, mask=torch.tensor([[1, 0, 1], [1, 1, 0]]))
    assert lp.scored.unpack(lp.scored.logp_rollout).tolist() == [[-1.0, 0.0, 0.0], [0.0, -2.0, 0.0]]


def test_a_field_on_another_device_is_named():
    segments = Segments.from_lengths([2])
    x, elsewhere = -torch.ones(2), torch.ones(2, device="meta")
    with pytest.raises(BadValueError, match="logp_old is on meta, logp_rollout on cpu"):
        LogProbs.pack(x, logp_old=elsewhere, segments=segments)
    with pytest.raises(BadValueError, match="advantages is on meta, the log-probs on cpu"):
        policy_loss(LogProbs.pack(x, x, segments=segments), "token_is", elsewhere)


def test_segments_know_their_longest_on_the_host():
    assert Segments.from_lengths([2, 0, 5]).longest == 5
    assert Segments(torch.tensor([0])).longest == 0
    moved = Segments.from_lengths([2, 3]).to("cpu")
    assert moved.num_tokens == 5
    assert torch.equal(moved.on_host, torch.tensor([0, 2, 5]))
