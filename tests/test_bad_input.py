"""Arbitrary input: an error of this library by name, or a finite result; nothing raw, nothing silent."""

import itertools
import math
from dataclasses import replace
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offdrift import advantages, method, policy_loss, record
from offdrift.batch_info import BatchInfo
from offdrift.divergence.evidence import Divergence
from offdrift.errors import BadValueError, EvidenceError, MethodError, OffdriftError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS
from offdrift.segments import Segments
from offdrift.stats import summarize


@pytest.fixture(autouse=True)
def _as_a_user_calls_it():
    """Without the type checks of the test run, which would refuse before the library does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


NAN, INF = math.nan, math.inf
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ONES = torch.ones(5)
S = Segments.from_lengths([2, 3])


def batch(**fields: Any) -> LogProbs:
    leaf = torch.full((5,), -1.5, requires_grad=True)
    given = {"logp_rollout": torch.full((5,), -1.0), "logp": leaf, "logp_old": leaf.detach() + 0.1}
    return LogProbs.pack(**{**given, "segments": S, **fields})


# -- what is no tensor, and tensors of small integers ----------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [[2.5, 3], [float("nan"), 3], ["a", 3], [None, 3], [2**70, 3], "no", [[1], [2, 3]]], ids=repr
)
def test_lengths_that_are_no_counts_are_refused_by_name(wrong):
    with pytest.raises((BadValueError, ShapeError), match="lengths"):
        Segments.from_lengths(wrong)


def test_an_array_read_backwards_is_an_array():
    assert Segments.from_lengths(np.array([3, 2])[::-1]).lengths.tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.int32])
def test_small_integers_are_integers(dtype):
    cuts, groups = torch.tensor([0, 2, 5], dtype=dtype), torch.tensor([0, 0], dtype=dtype)
    small = Segments(cuts, turns=Segments(torch.tensor([0, 1, 2, 5], dtype=dtype)), group_ids=groups)
    large = Segments(cuts.long(), turns=Segments(torch.tensor([0, 1, 2, 5])), group_ids=groups.long())
    for name in ("gspo", "token_is", "grpo"):
        rewards = torch.tensor([1.0, 0.0])
        losses = [policy_loss(batch(segments=s), name, advantages(rewards, s)).loss for s in (small, large)]
        assert torch.equal(*losses)
    assert small.with_turns(torch.tensor([0, 1, 1, 2, 2], dtype=dtype)).turns.lengths.tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize("field", ["rewards", "mask", "logp_rollout", "advantages", "cu_seqlens", "kl_rollout_old"])
@pytest.mark.parametrize("wrong", [["a", "b"], [None, 1.0], "no"], ids=repr)
def test_a_loop_that_records_what_is_no_number_is_told_the_field(tmp_path, field, wrong):
    given = {"logp_rollout": [-1.0, -1.0], "cu_seqlens": [0, 1, 2], "rewards": [1.0, 0.0]}
    more = {"divergences": {field: wrong}} if field.startswith("kl_") else {field: wrong}
    with pytest.raises(OffdriftError, match=field):
        record(tmp_path, step=1, **{**given, **more})


def test_turns_that_are_no_tensor_are_refused_by_name():
    with pytest.raises(BadValueError, match="turn_ids"):
        S.with_turns("x")
    with pytest.raises(ShapeError, match="turn_ids"):
        S.with_turns(torch.zeros(4, dtype=torch.int64))


def test_advantages_may_be_mapped_over_and_are_checked():
    given = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    lp = batch()

    def loss(a):
        return policy_loss(lp, "token_is", a).loss

    torch.testing.assert_close(torch.func.vmap(loss)(given), torch.stack([loss(a) for a in given]))
    given[1, 2] = NAN
    with pytest.raises(BadValueError, match="advantages"):
        torch.func.vmap(loss)(given)
    logp = torch.full((3, 5), -1.5)
    logp[2, 0] = 1.0
    with pytest.raises(BadValueError, match="logp "):
        torch.func.vmap(lambda x: policy_loss(batch(logp=x), "token_is", ONES).loss)(logp)


# -- groups -----------------------------------------------------------------------------------------


def test_groups_given_beside_segments_are_used():
    lp = batch(group_ids=torch.tensor([4, 4]))
    assert lp.segments.groups.sizes.tolist() == [2]
    assert S.group_ids is None
    same = Segments.from_lengths([2, 3], group_ids=torch.tensor([4, 4]))
    assert batch(segments=same, group_ids=torch.tensor([4, 4])).segments.groups.sizes.tolist() == [2]
    got = advantages(torch.tensor([1.0, 0.0]), lp.segments)
    torch.testing.assert_close(got, lp.segments.spread(torch.tensor([1, -1]) / math.sqrt(2)))


def test_groups_that_contradict_those_of_the_segments_are_refused():
    other = Segments.from_lengths([2, 3], group_ids=torch.tensor([1, 2]))
    with pytest.raises(BadValueError, match=r"group_ids \[4, 4\] contradict those of the segments"):
        batch(segments=other, group_ids=torch.tensor([4, 4]))
    with pytest.raises(BadValueError, match="contradict"):
        advantages(torch.ones(2), other, group_ids=torch.tensor([4, 4]))


@pytest.mark.parametrize(
    ("groups", "error", "words"),
    [
        (torch.tensor([1, 2, 3]), ShapeError, r"group_ids has shape \(3,\) for 2 sequences"),
        (torch.tensor([[1, 2]]), ShapeError, r"group_ids has shape \(1, 2\)"),
        (torch.tensor(1), ShapeError, "group_ids has shape"),
        (torch.tensor([1.0, 2.0]), BadValueError, "group_ids holds torch.float32, not integers"),
        ([1, 2], BadValueError, "group_ids is a list, not a tensor"),
        (np.array([1, 2]), BadValueError, "group_ids is a ndarray, not a tensor"),
    ],
)
def test_malformed_groups_are_refused(groups, error, words):
    for call in (
        lambda: batch(group_ids=groups),
        lambda: LogProbs.pack(-torch.ones(2, 3), mask=torch.ones(2, 3), group_ids=groups),
        lambda: Segments.from_lengths([2, 3], group_ids=groups),
        lambda: batch(segments=Segments(S.cu_seqlens, group_ids=groups)),
        lambda: advantages(torch.ones(2), S, group_ids=groups),
    ):
        with pytest.raises(error, match=words):
            call()


def test_an_estimator_that_compares_siblings_asks_which_they_are():
    rewards = torch.tensor([1.0, 0.0])
    with pytest.raises(EvidenceError, match="'grpo' compares a sequence with the others of its prom"):
        advantages(rewards, S)
    alone = advantages(rewards, S, group_ids=None)
    torch.testing.assert_close(alone, S.spread(rewards / (1 + 1e-6)))
    siblings = advantages(rewards, S, group_ids=torch.tensor([0, 0]))
    assert siblings[0] == -siblings[-1]
    assert advantages(rewards, S, how="reinforce_plus_plus").shape == (5,)


# -- segments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "error"),
    [
        (torch.tensor([1, 5]), ShapeError),
        (torch.tensor([0, 4, 2, 5]), ShapeError),
        (torch.tensor([[0, 5]]), ShapeError),
        (torch.tensor(5), ShapeError),
        (torch.tensor([], dtype=torch.int64), ShapeError),
        (torch.tensor([0.0, 5.0]), BadValueError),
        ([0, 5], BadValueError),
        (torch.tensor([0, 4]), ShapeError),
    ],
)
def test_malformed_cuts_are_refused(cuts, error):
    with pytest.raises(error, match="cu_seqlens"):
        batch(segments=Segments(cuts))


def test_turns_that_go_beyond_the_sequences_are_refused():
    with pytest.raises(ShapeError, match="turns must cut"):
        batch(segments=Segments(S.cu_seqlens, turns=Segments.from_lengths([2, 3, 1])))


def test_cuts_of_32_bits_are_as_good():
    lp = batch(segments=Segments(S.cu_seqlens.int()))
    for name in ("gspo", "seq_tis", "minpro", "trm_avg_k3"):
        one = policy_loss(lp, name, ONES).loss
        torch.testing.assert_close(one, policy_loss(batch(), name, ONES).loss)


def test_a_transformation_leaves_nothing_dead_in_shared_segments():
    segments = Segments.from_lengths([2, 3], turns=Segments.from_lengths([1, 1, 3]), group_ids=torch.tensor([1, 1]))
    leaf = batch().current.detach()

    def loss(x: torch.Tensor, name: str) -> torch.Tensor:
        return policy_loss(batch(logp=x, segments=segments), name, ONES).loss

    for name in ("gspo", "seq_tis", "minpro", "st_ppo", "ppo_clip"):
        fresh = batch(
            logp=leaf.clone().requires_grad_(),
            segments=Segments.from_lengths([2, 3], turns=Segments.from_lengths([1, 1, 3])),
        )
        expected = torch.autograd.grad(policy_loss(fresh, name, ONES).loss, fresh.current)[0]
        got = torch.func.grad(loss)(leaf, name)
        torch.testing.assert_close(got, expected)
        for held in (*vars(segments).values(), *vars(segments.turns).values()):
            assert not isinstance(held, torch.Tensor) or held.tolist() is not None
        torch.testing.assert_close(loss(leaf, name), policy_loss(fresh, name, ONES).loss)
    shared = batch(logp=leaf, segments=segments)
    torch.func.grad(lambda x: (x * policy_loss(shared, "gspo", ONES).loss).sum())(torch.ones(1))
    assert policy_loss(shared, "gspo", ONES).loss.item() is not None


# -- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rollout", "old", "now"), list(itertools.product(DTYPES, repeat=3)))
def test_mixed_dtypes_become_the_widest(rollout, old, now):
    leaf = torch.full((5,), -1.5, dtype=now, requires_grad=True)
    lp = batch(
        logp_rollout=torch.full((5,), -1.0, dtype=rollout),
        logp=leaf,
        logp_old=torch.full((5,), -1.25, dtype=old),
        logp_ref=torch.full((5,), -1.25, dtype=rollout),
    )
    widest = torch.float64 if torch.float64 in (rollout, old, now) else torch.float32
    assert {x.dtype for x in (lp.logp_rollout, lp.old, lp.current, lp.reference)} == {widest}
    for name in ("decoupled_token_is", "gspo", "a3po", "seq_tis"):
        result = policy_loss(lp, name, ONES, BatchInfo(version_lag=ONES))
        (grad,) = torch.autograd.grad(result.loss, leaf)
        assert grad.dtype == now
        assert grad.isfinite().all()
        assert summarize(result.stats)["full/k1"] == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
def test_advantages_of_any_dtype(dtype):
    expected = policy_loss(batch(), "ppo_clip", ONES).loss.double()
    got = policy_loss(batch(), "ppo_clip", ONES.to(dtype)).loss.double()
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_an_advantage_that_is_no_number_is_refused_by_name(value):
    bad = ONES.clone()
    bad[3] = value
    with pytest.raises(BadValueError, match=rf"advantages of sequence 1 is {value} at trainable token 1"):
        policy_loss(batch(), "ppo_clip", bad)
    with pytest.raises(BadValueError, match=f"rewards of sequence 1 is {value}"):
        policy_loss(batch(), "oapl", ONES, BatchInfo(rewards=torch.tensor([0.0, value])))


def test_nan_in_a_mask_trains_nothing():
    with pytest.raises(BadValueError, match="mask is nan at 1 positions"):
        LogProbs.pack(-torch.ones(1, 2), mask=torch.tensor([[1.0, NAN]]))


@pytest.mark.parametrize("value", [0, 0.0, -1.0, NAN, INF, torch.tensor(0.0), torch.tensor(NAN), "6", True])
def test_a_normalizer_is_positive(value):
    with pytest.raises(BadValueError, match="normalizer="):
        policy_loss(batch(), "ppo_clip", ONES, normalizer=value)
    with pytest.raises(ShapeError, match=r"normalizer has shape \(2,\)"):
        policy_loss(batch(), "ppo_clip", ONES, normalizer=torch.ones(2))


def test_what_is_no_tensor_is_refused_with_the_way_out():
    for call, words in (
        (lambda: LogProbs.pack(None, mask=torch.ones(1, 1)), "logp_rollout is None, not a tensor"),  # type: ignore[arg-type]
        (lambda: batch(logp_rollout=np.zeros(5)), r"ndarray, not a tensor; give torch.as_tensor\(x\)"),
        (lambda: batch(logp=[-1.0] * 5), "logp is a list"),
        (lambda: batch(mask=np.ones(5)), "mask is a ndarray"),
        (lambda: batch(segments=[2, 3]), "segments is a list"),
        (lambda: batch(logp=torch.zeros(5, dtype=torch.complex64)), "complex64, not real numbers"),
        (lambda: policy_loss(batch(), "ppo_clip", np.ones(5)), "advantages is a ndarray"),  # type: ignore[arg-type]
        (lambda: policy_loss(batch(), "ppo_clip", None), "advantages is None"),  # type: ignore[arg-type]
        (lambda: advantages(np.ones(2), S, group_ids=None), "rewards is a ndarray"),  # type: ignore[arg-type]
        (lambda: batch().like_caller(np.ones(5)), "is a ndarray"),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadValueError, match=words):
            call()


# -- methods ----------------------------------------------------------------------------------------


def test_a_method_by_name_is_that_method():
    by_name = policy_loss(batch(), "token_tis", ONES).loss
    torch.testing.assert_close(by_name, policy_loss(batch(), method("token_tis"), ONES).loss)
    with pytest.raises(MethodError, match="token_tsi"):
        policy_loss(batch(), "token_tsi", ONES)
    with pytest.raises(MethodError, match="method is a int"):
        policy_loss(batch(), 3, ONES)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match=r"make them with LogProbs\.pack"):
        policy_loss(ONES, "token_tis", ONES)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.needs_whole_step])
def test_a_row_that_looks_at_the_whole_step_asks_what_it_saw(name):
    row = METHODS[name]
    lp = batch(logp_ref=-ONES, group_ids=torch.tensor([1, 1]))
    exact = {name: Divergence.exact(name, lp.logp.square()) for name in row.divergences}
    batch_info = BatchInfo(entropy=ONES, vocab=9, rewards=torch.ones(2), version_lag=ONES, divergences=exact)
    with pytest.raises(EvidenceError, match=r'give BatchInfo\(observed=.*observed="this_batch"'):
        policy_loss(lp, name, ONES, batch_info, normalizer=5.0)
    anchored = lp if row.anchor is None else row.anchor(lp, batch_info)
    one, other = (
        policy_loss(lp, name, ONES, replace(batch_info, observed=observed), normalizer=5.0).loss
        for observed in ("this_batch", row.observe(anchored, ONES, batch_info))
    )
    torch.testing.assert_close(one, other)


# -- anything ---------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([-0.5, -1.0, -3.0, 0.0, -INF, -9999.0, -1e4, NAN, INF, 0.5, 1e-4, -70.0])
WEIRD = st.sampled_from([None, "x", 3, 1.5, [1.0], np.zeros(4), (), {}])


@st.composite
def tensors(draw, shape: tuple[int, ...], numbers: st.SearchStrategy[float] = NUMBERS) -> Any:
    """Mostly a tensor of the shape; now and then of another one, of odd values, or none at all."""
    kind = draw(st.sampled_from(["good"] * 12 + ["shape", "weird", "values"]))
    if kind == "weird":
        return draw(WEIRD)
    if kind == "shape":
        shape = draw(st.sampled_from([(), (0,), (3,), (2, 2), (1, 2, 3), (7,), shape[::-1]]))
    size = math.prod(shape)
    plain = st.sampled_from([-0.5, -1.0, -3.0, -0.1])
    values = draw(st.lists(numbers if kind == "values" else plain, min_size=size, max_size=size))
    dtype = draw(st.sampled_from([*DTYPES, torch.float32, torch.float32]))
    return torch.tensor(values, dtype=dtype).reshape(shape)


MASKS = st.sampled_from([0.0, 1.0, 1.0, 1.0, NAN])
IDS = st.sampled_from([0.0, 1.0, 2.0])


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_malformed_input_meets_our_errors_or_is_used(data):
    """Whatever comes in: a finite loss with a finite gradient, or an error of this library."""
    b, t = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    packed = data.draw(st.booleans())
    shape = (b * t,) if packed else (b, t)
    fields = {name: data.draw(tensors(shape)) for name in ("logp_rollout", "logp", "logp_old")}
    fields |= {name: data.draw(st.one_of(st.none(), tensors(shape))) for name in ("logp_ref",)}
    if data.draw(st.booleans()) or not packed:
        fields["mask"] = data.draw(tensors(shape, MASKS))
        if isinstance(fields["mask"], torch.Tensor):
            fields["mask"] = fields["mask"].abs()
    groups = data.draw(st.one_of(st.none(), tensors((b,), IDS)))
    if isinstance(groups, torch.Tensor) and data.draw(st.booleans()):
        groups = groups.nan_to_num().long()
    fields["group_ids"] = groups
    name = data.draw(st.sampled_from([*METHODS, "nonsense"]))
    advantage = data.draw(tensors(shape, st.sampled_from([1.0, -1.0, NAN, INF])))
    normalizer = data.draw(st.sampled_from([None, None, 3.0, 0, -1.0, NAN, torch.tensor(2.0)]))
    rewards = torch.ones(b)
    try:
        if packed:
            cuts = data.draw(st.lists(st.integers(-1, b * t + 1), min_size=max(b - 1, 0), max_size=max(b - 1, 0)))
            made = torch.tensor([0, *sorted(cuts), b * t] if b else [0])
            fields["segments"] = data.draw(
                st.sampled_from([Segments(made), Segments(made), Segments(made.flip(0)), made])
            )
        if isinstance(fields["logp"], torch.Tensor):
            fields["logp"] = fields["logp"].requires_grad_()
        lp = LogProbs.pack(**fields)
        a = lp.like_caller(advantage)
        lag = torch.ones(len(lp.logp_rollout))
        batch_info = BatchInfo(entropy=lag, vocab=9, rewards=rewards, version_lag=lag, observed="this_batch")
        result = policy_loss(lp, name, a, batch_info, normalizer=normalizer, horizon=4)
        (grad,) = torch.autograd.grad(result.loss, fields["logp"])
        summarize(result.stats)
        assert result.loss.isfinite()
        assert grad.isfinite().all()
        kept = torch.zeros(shape, dtype=torch.bool).reshape(-1)
        kept = ~kept if lp.kept is None else kept.index_fill(0, lp.kept, True)
        assert (grad.reshape(-1)[~kept] == 0).all()
        advantages(rewards, lp.segments, how=data.draw(st.sampled_from(["grpo", "rloo", "opo"])))
    except OffdriftError as e:
        said = str(e)
        assert len(said) > 20
