"""Gates on FX-A and FX-V: decisions of the methods table, membership at every bound, one-sidedness."""

import math

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.correction import Gate, LengthNeutralGate, rejection
from offdrift.correction.statistics import statistic
from offdrift.divergence.evidence import Divergence, Grade
from offdrift.divergence.interval import topk_divergences
from offdrift.errors import EvidenceError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, override
from offdrift.segments import Segments
from tests.oracles.fixtures import FX_V_KL, FX_V_TV, double, fx_a

# statistic, on, unit, low, high -> keep per token of sequence 1 (4 tokens) and 2 (3 tokens)
TABLE = [
    ("ratio", "mismatch", "token", 0.6, 1.6, [1, 1, 1, 0, 1, 1, 1]),
    ("ratio", "mismatch", "token", 0.7, 1.6, [1, 1, 1, 0, 1, 1, 1]),
    ("k2", "mismatch", "token", None, 0.1, [1, 1, 1, 0, 1, 1, 1]),
    ("k3", "mismatch", "token", None, 0.1, [1, 1, 1, 0, 1, 1, 1]),
    ("ratio", "mismatch", "seq_sum", 0.5, 2.0, [1] * 7),
    ("ratio", "mismatch", "seq_mean", 0.9, 1.2, [0] * 4 + [1] * 3),
    ("ratio", "mismatch", "seq_mean", 0.99, 1.01, [0] * 7),
    ("k2", "mismatch", "seq_sum", None, 0.1, [0] * 4 + [1] * 3),
    ("k3", "mismatch", "seq_sum", None, 0.1, [0] * 4 + [1] * 3),
    ("k2", "mismatch", "seq_mean", None, 0.1, [0] * 4 + [1] * 3),
    ("k3", "mismatch", "seq_mean", None, 0.1, [0] * 4 + [1] * 3),
    ("k2", "mismatch", "seq_max", None, 0.1, [0] * 4 + [1] * 3),
    ("k3", "mismatch", "seq_max", None, 0.1, [0] * 4 + [1] * 3),
    ("k2", "full", "seq_max", None, 0.05, [0] * 4 + [1] * 3),
    ("abs_log_ratio", "full", "seq_max", None, 0.316228, [0] * 4 + [1] * 3),
    ("k3", "full", "seq_mean", None, 0.02, [0] * 7),
    ("k3", "full", "seq_mean", None, 0.001, [0] * 7),
    ("ratio", "mismatch", "seq_max", 0.5, 2.0, [0] * 4 + [1] * 3),
    ("ratio", "mismatch", "seq_max", 1e-5, None, [1] * 7),
    ("ratio", "mismatch", "seq_max", 0.45, None, [0] * 4 + [1] * 3),
    ("ratio", "mismatch", "seq_sum", None, 0.7, [1] * 4 + [0] * 3),
    ("ratio", "mismatch", "seq_sum", 0.7, 2.0, [0] * 4 + [1] * 3),
    ("ratio", "mismatch", "token", 0.8, 1.2, [1, 1, 0, 0, 1, 1, 0]),
    ("ratio", "mismatch", "token", 0.5, 5.0, [1, 1, 1, 0, 1, 1, 1]),
    ("abs_log_ratio", "full", "seq_max", None, 0.3, [0] * 4 + [1] * 3),
    ("ratio_error", "full", "seq_mean", None, 0.1, [0] * 7),
    ("ratio_error", "full", "seq_mean", None, 0.2, [0] * 4 + [1] * 3),
    ("binary_tv", "full", "token", -0.1, 0.1, [0, 0, 1, 1, 1, 0, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("statistic", "on", "unit", "low", "high", "expected"), TABLE)
def test_decisions_of_the_methods_table(statistic, on, unit, low, high, expected):
    lp, _, _ = fx_a()
    gate = Gate(statistic=statistic, on=on, unit=unit, low=low, high=high)
    assert gate.keep(lp).int().tolist() == expected


def one_sequence(n: int, kl: list[float], tv: list[float]):
    lp = LogProbs.pack(torch.full((n,), -1.0), torch.full((n,), -1.0), segments=Segments.from_lengths([n]))
    return lp, {
        "kl_rollout_current": Divergence.exact("kl_rollout_current", torch.tensor(kl)),
        "tv_rollout_current": Divergence.exact("tv_rollout_current", torch.tensor(tv)),
    }


@pytest.mark.parametrize(
    ("statistic", "unit", "high", "expected"),
    [
        ("kl", "token", 0.05, [1, 1, 0]),
        ("tv", "token", 0.08, [0, 1, 0]),
        ("kl", "seq_sum", 0.1, [1, 1, 1]),
        ("kl", "seq_max", 0.05, [0, 0, 0]),
        ("kl", "seq_max", 0.1, [1, 1, 1]),
        ("kl", "seq_mean", 0.001, [0, 0, 0]),
        ("kl", "seq_mean", 0.03, [1, 1, 1]),
        ("tv", "seq_max", 0.08, [0, 0, 0]),
        ("tv", "seq_max", 0.12, [1, 1, 1]),
    ],
)
def test_exact_gates_on_fx_v(statistic, unit, high, expected):
    lp, divergences = one_sequence(3, FX_V_KL, FX_V_TV)
    gate = Gate(statistic=statistic, on="full", unit=unit, high=high)
    assert gate.keep(lp, batch_info=BatchInfo(divergences=divergences)).int().tolist() == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("unit", ["token", "seq_sum", "seq_mean", "seq_max"])
def test_nan_and_infinite_divergence_are_never_inside(unit, bad):
    lp, divergences = one_sequence(2, [0.0, bad], [0.0, 0.0])
    keep = Gate(statistic="kl", on="full", unit=unit, high=1e30).keep(lp, batch_info=BatchInfo(divergences=divergences))
    assert keep.tolist() == ([True, False] if unit == "token" else [False, False])


def of_divergence(kl: Divergence) -> tuple[LogProbs, BatchInfo]:
    n = len(kl.lo)
    lp = LogProbs.pack(torch.full((n,), -1.0), torch.full((n,), -1.0), segments=Segments.from_lengths([2] * (n // 2)))
    return lp, BatchInfo(divergences={kl.name: kl})


@pytest.mark.parametrize("unit", ["token", "seq_sum", "seq_mean", "seq_max"])
@pytest.mark.parametrize("evidence", ["exact", "interval", "capped"])
def test_acceptance_by_the_upper_end_is_certified(unit, evidence):
    """On random distributions no accepted unit has a true KL above the threshold, and rejection by the
    lower end rejects none that is inside. On intervals the two differ, or the test would say nothing."""
    g = torch.Generator().manual_seed(3)
    mu = torch.randn(600, 50, generator=g).mul(4).log_softmax(-1)
    # Every token's two log-probs are within 1.5 nats of each other, which a cap of 2 assumes.
    pi = (mu + torch.rand(600, 1, generator=g) * torch.randn(600, 50, generator=g).clamp(-1, 1)).log_softmax(-1)
    assert (mu - pi).abs().max() < 2
    truth = (mu.exp() * (mu - pi)).sum(-1)
    tokens = mu.exp().multinomial(1, generator=g).squeeze(1)
    rows = torch.arange(600)
    top = mu.topk(12)
    cap = {"exact": None, "interval": None, "capped": 2.0}[evidence]
    if evidence == "exact":
        kl = Divergence.exact("kl_rollout_current", truth)
    else:
        kl, _ = topk_divergences(top.indices, top.values, tokens, mu[rows, tokens], pi, tail_log_ratio_cap=cap)
        assert kl.grade == {"interval": Grade.INTERVAL, "capped": Grade.CAPPED}[evidence]
    lp, batch_info = of_divergence(kl)
    by_sequence = {"seq_sum": lp.segments.sum, "seq_mean": lp.segments.mean, "seq_max": lp.segments.max}
    whole = lambda x: lp.segments.spread(by_sequence[unit](x)) if unit in by_sequence else x  # noqa: E731
    of_unit, high = whole(truth), float(whole(kl.upper).median())
    accepted, kept = (
        Gate(statistic="kl", on="full", unit=unit, high=high, end=end).keep(lp, batch_info=batch_info)
        for end in ("upper", "lower")
    )
    assert 200 < accepted.sum() < 400
    assert (~kept).sum() > 20
    assert (of_unit[accepted] <= high * (1 + 1e-5)).all()
    assert (of_unit[~kept] > high * (1 - 1e-5)).all()
    assert bool((accepted <= kept).all())
    assert torch.equal(accepted, kept) == (evidence == "exact")


def test_a_lower_bound_meets_the_other_end():
    kl = Divergence.interval("kl_rollout_current", torch.tensor([0.1, 0.3]), torch.tensor([0.5, 0.6]))
    lp, batch_info = of_divergence(kl)
    for end, kept in (("lower", [True, True]), ("upper", [False, True])):
        gate = Gate(statistic="kl", on="full", unit="token", low=0.2, end=end)
        assert gate.keep(lp, batch_info=batch_info).tolist() == kept


def test_a_sample_certifies_nothing():
    lp, batch_info = of_divergence(Divergence.sampled("kl_rollout_current", torch.zeros(2)))
    with pytest.raises(EvidenceError, match="backs no guarantee"):
        Gate(statistic="kl", on="full", unit="token", high=1.0, end="upper").keep(lp, batch_info=batch_info)


def test_certified_acceptance_is_a_setting_of_every_exact_row():
    certified = override(METHODS["trm_max"], {"gate.end": "upper"})
    assert (
        certified.describe() == "L = -A ratio(full); keep if upper end of seq_max kl(full) <= 0.05; seq_mean_token_sum"
    )
    wide = Divergence.interval("kl_rollout_current", torch.zeros(2), torch.full((2,), 9.0))
    lp, batch_info = of_divergence(wide)
    for row, kept in ((METHODS["trm_max"], True), (certified, False)):
        assert row.correction(lp, batch_info=batch_info).keep.tolist() == [kept] * 2


@pytest.mark.parametrize("statistic", ["kl", "tv"])
def test_on_staleness_the_divergence_is_that_of_the_old_and_the_current_policy(statistic):
    lp, advantages, _ = fx_a()
    gate = Gate(statistic=statistic, on="staleness", unit="token", high=0.1)
    assert gate.reads == f"{statistic}_old_current"
    wrong = {f"{statistic}_rollout_current": torch.zeros(7)}
    batch_info = BatchInfo(divergences={k: Divergence.exact(k, x) for k, x in wrong.items()})
    with pytest.raises(EvidenceError, match=rf"needs {statistic}_old_current, .*_rollout_current.*old_divergences"):
        gate.keep(lp, advantages, batch_info)
    values = torch.tensor([0.0, 0.2, 0.05, 0.3, 0.1, 0.0, 0.11])
    batch_info = BatchInfo(divergences={gate.reads: Divergence.exact(gate.reads, values)})
    assert gate.keep(lp, advantages, batch_info).int().tolist() == [1, 0, 1, 0, 1, 1, 0]


def test_a_divergence_stops_only_the_push_that_goes_on():
    """DPPO over the whole vocabulary: the side is the sampled token's, the size is the divergence's.

    Log-ratios are [0.05, 0.3, -0.25, 0.1] with A = 1 and [-0.15, 0.2, 0.02] with A = -0.5."""
    lp, advantages, _ = fx_a()
    batch_info = BatchInfo(divergences={"tv_old_current": Divergence.exact("tv_old_current", torch.full((7,), 0.2))})
    gate = Gate(statistic="tv", on="staleness", unit="token", high=0.15, advantage="outward")
    assert gate.keep(lp, advantages, batch_info).int().tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert gate.keep(lp, 0 * advantages, batch_info).all()
    small = BatchInfo(divergences={"tv_old_current": Divergence.exact("tv_old_current", torch.full((7,), 0.15))})
    assert gate.keep(lp, advantages, small).all()


def test_a_gate_without_its_evidence_says_what_to_record():
    lp, _, _ = fx_a()
    with pytest.raises(EvidenceError, match=r'kl_rollout_current.*evidence = "full".*trm_max_k2'):
        Gate(statistic="kl", on="full", unit="seq_max", high=0.05).keep(lp)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"statistic": "k2"}, "needs low=, high="),
        ({"statistic": "k2", "low": 2.0, "high": 1.0}, "nothing could pass"),
        ({"statistic": "ratio", "low": -1.0}, "must be positive"),
        ({"statistic": "ratio", "low": 0.0}, "must be positive"),
        ({"statistic": "k2", "high": 1.0, "end": "upper"}, "certifies nothing"),
        ({"statistic": "kl", "high": 1.0, "unit": "seq_max", "advantage": "outward"}, "no one direction"),
    ],
)
def test_a_gate_that_cannot_mean_anything_is_refused(parts, words):
    with pytest.raises(MethodError, match=words):
        Gate(**{"on": "full", "unit": "token", **parts})


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (Gate(statistic="ratio", on="full", unit="seq_mean", low=math.exp(-0.05), advantage="negative"), [1] * 4 + [0] * 3),
        (Gate(statistic="ratio", on="full", unit="seq_mean", low=math.exp(-0.1), advantage="negative"), [1] * 7),
        (Gate(statistic="ratio", on="staleness", unit="seq_mean", low=math.exp(-0.05), advantage="negative"), [1] * 7),
        (Gate(statistic="ratio", on="full", unit="seq_mean", low=math.exp(-0.05), advantage="positive"), [0] * 4 + [1] * 3),
        (Gate(statistic="binary_tv", on="full", unit="token", low=-0.1, high=0.1, advantage="outward"), [0, 0, 1, 1, 1, 1, 1]),
    ],
    ids=["opsm 0.05", "opsm 0.1", "opsm staleness", "mirrored", "trust_band"],
)  # fmt: skip
def test_gates_that_look_at_the_sign(gate, expected):
    lp, a, _ = fx_a()
    assert gate.keep(lp, a).int().tolist() == expected
    with pytest.raises(MethodError, match="needs advantages"):
        gate.keep(lp)


def test_binary_kl_of_the_methods_table_keeps_corrective_moves():
    lp, a, _ = fx_a()
    expected = [0.01837047, 0.03066477, -0.118443, 0.00030231, -0.01003657, 0.111522, 3.997854e-05]
    got = statistic("binary_kl", lp, on="staleness")
    torch.testing.assert_close(got, double(expected), rtol=0, atol=1e-6)
    gate = Gate(statistic="binary_kl", on="staleness", unit="token", low=-0.05, high=0.05, advantage="outward")
    assert gate.keep(lp, a).all(), "large moves here are all corrective"
    assert gate.keep(lp, -a).int().tolist() == [1, 1, 0, 1, 1, 0, 1]


def test_version_lag():
    lp = LogProbs.pack(double([-1.0] * 4), segments=Segments.from_lengths([1, 1, 1, 1]))
    gate = Gate(statistic="version_lag", on="full", unit="seq_max", high=2.0)
    assert gate.keep(lp, batch_info=BatchInfo(version_lag=torch.tensor([0, 1, 2, 3]))).int().tolist() == [1, 1, 1, 0]
    with pytest.raises(EvidenceError, match="needs version_lag"):
        gate.keep(lp)


@pytest.mark.parametrize(
    ("mode", "threshold", "band", "expected"),
    [
        ("token_k1", "0.7_1.6", "ratio", [1, 1, 1, 0, 1, 1, 1]),
        ("token_k1", "0.7_1.6", "verl", [1, 1, 0, 0, 1, 1, 1]),
        ("token_k1", 2.0, "ratio", [1, 1, 1, 0, 1, 1, 1]),
        ("seq_mean_k1", "0.9_1.2", "ratio", [0] * 4 + [1] * 3),
        ("seq_mean_k1", "0.9_1.2", "verl", [1] * 7),
        ("seq_max_k3", "0.1", "ratio", [0] * 4 + [1] * 3),
    ],
)
def test_rejection_modes_by_name(mode, threshold, band, expected):
    gate = rejection(mode, threshold, on="mismatch", k1_band=band)
    assert gate.keep(fx_a()[0]).int().tolist() == expected


@pytest.mark.parametrize(
    ("mode", "threshold", "words"),
    [
        ("seq_max_k1", 2.0, "k1 is signed"),
        ("seq_k3", 2.0, "not a rejection mode"),
        ("token_k4", 2.0, "not a rejection mode"),
        ("token_k1", "a_b", "not a positive number"),
        ("token_k1", -1.0, "not a positive number"),
        ("token_k3", "0.1_0.2", "must be one number"),
    ],
)
def test_modes_that_do_not_exist_are_refused(mode, threshold, words):
    with pytest.raises(MethodError, match=words):
        rejection(mode, threshold, on="full")


GATE = LengthNeutralGate(high=0.2, eps=0.05, delta=0.01)


def test_weights_score_and_decision_of_eq_98_and_99():
    lp, _, _ = fx_a()
    omega = GATE.position_weights(lp.segments)
    expected = double([0.122474, 0.1, 0.05, 0, 0.1, 0.05, 0])
    torch.testing.assert_close(omega, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lp.segments.sum(omega), double([0.272474, 0.15]), rtol=0, atol=1e-6)
    torch.testing.assert_close(GATE.score(lp), double([0.206679, 0.155071]), rtol=0, atol=1e-6)
    assert GATE.keep(lp).int().tolist() == [0] * 4 + [1] * 3


def test_a_weight_is_at_most_one():
    s = Segments.from_lengths([400])
    omega = LengthNeutralGate(eps=0.05, delta=0.5).position_weights(s)
    assert omega[0] == 1.0
    assert omega[-2].item() == pytest.approx(0.05)


@pytest.mark.parametrize("parts", [{"eps": 0.0}, {"delta": -1.0}, {"high": -0.1}])
def test_parameters_that_mean_nothing_are_refused(parts):
    with pytest.raises(MethodError, match="eps="):
        LengthNeutralGate(**parts)
