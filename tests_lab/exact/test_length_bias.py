"""Which gates punish length: against the closed form, and the real gates on recorded drift."""

import math

import numpy as np
import pytest
import torch

from offdrift.correction.gate import Gate
from offdrift.errors import BadValueError, RecordError, ShapeError
from offdrift.methods import METHODS
from offdrift_lab.exact.length_bias import (
    GATES,
    Stream,
    curves,
    independent_stream,
    packaged,
    read_recording,
    scaling,
    wilson,
    write_recording,
)

P = 2e-3


@pytest.fixture(scope="module")
def stream() -> Stream:
    return independent_stream(sequences=3000, horizon=1024, violation=P)


def test_acceptance_by_the_worst_token_is_one_minus_p_to_the_t(stream):
    """Eq. 97, with the violations that were really drawn; 4 standard errors at every length."""
    p = float((stream.kl > 0.05).double().mean())
    assert abs(p - P) < 1e-4
    found = curves(stream, lengths=[1, 16, 128, 1024])[0]
    assert found.gate == "trm_max"
    for n, a in zip(found.lengths, found.acceptance, strict=True):
        expected = (1 - p) ** n
        assert abs(a - expected) < 4 * math.sqrt(expected * (1 - expected) / 3000) + 1e-9


def test_the_fit_finds_the_exponential_and_its_rate(stream):
    found = curves(stream, lengths=[16, 32, 64, 128, 256, 512, 1024])[0]
    assert found.exponent == pytest.approx(1.0, abs=0.04)
    assert found.rate == pytest.approx(-math.log1p(-P), rel=0.25)


def test_means_do_not_punish_length_and_products_do(stream):
    """Table 2: the worst token decays, means do not; a product of ratios, which it leaves out, does."""
    found = {c.gate: c for c in curves(stream, lengths=[128, 1024], same_at=128)}
    assert len(found) == 5
    for name in ("trm_avg", "ln_trm", "ser"):
        assert found[name].acceptance[1] >= found[name].acceptance[0], name
    for name in ("trm_max", "seq_product"):
        assert found[name].acceptance[1] < 0.5, name


def test_thresholds_are_set_to_accept_the_share_asked_for(stream):
    """Or a little more: sequences tie where the worst of their tokens had the same context."""
    for c in curves(stream, lengths=[64], same_at=64, share=0.7):
        assert 0.7 <= c.acceptance[0] <= 0.705, c.gate


def test_published_thresholds_are_those_of_the_method_table():
    """The gates run here are the rows of the table, not their likenesses."""
    for name in ("trm_max", "trm_avg", "ln_trm", "ser"):
        make, published, _ = GATES[name]
        assert METHODS[name].correction.gates == (make(published),)
    product = GATES["seq_product"]
    weight = METHODS["seq_mis_band"].correction.weights[0]
    gate = product[0](product[1])
    assert isinstance(gate, Gate)
    assert gate.low == pytest.approx(weight.floor)
    assert gate.high == pytest.approx(weight.cap)


def test_the_drawn_ratios_have_mean_one(stream):
    """E_mu[w] = 1: tokens are drawn from the distribution whose log-prob is in the ratio."""
    w = stream.log_ratio.double().exp()
    assert abs(float(w.mean()) - 1) < 4 * float(w.std()) / math.sqrt(w.numel())


def test_a_planted_violation_rejects_from_its_position_on():
    kl = torch.zeros(1, 8)
    kl[0, 5] = 1.0
    planted = Stream("planted", torch.zeros(1, 8), kl)
    found = curves(planted, lengths=[5, 6, 8])[0]
    assert found.acceptance == (1.0, 0.0, 0.0)


def test_the_fit_recovers_any_stretched_exponential():
    lengths = [10, 30, 100, 300]
    for gamma, c in ((0.5, 0.02), (1.0, 1e-3), (0.0, 0.3)):
        fit = scaling(lengths, [math.exp(-c * n**gamma) for n in lengths], 10_000)
        assert fit is not None
        assert fit == pytest.approx((gamma, c), abs=1e-9)
    assert scaling(lengths, [1.0, 1.0, 1.0, 1.0], 10) is None
    assert scaling(lengths, [1.0, 0.9, 1.0, 0.0], 10) is None


def test_wilson_at_the_ends():
    """At 0 of n the upper end is z^2 / (n + z^2)."""
    low, high = wilson(0, 10, z=2.0)
    assert low == 0.0
    assert high == pytest.approx(4 / 14)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [({"violation": 1.5}, BadValueError, "violation = 1.5"), ({"sequences": 0}, BadValueError, "sequences = 0")],
)
def test_bad_streams_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        independent_stream(**{"sequences": 1, "horizon": 4, "violation": 0.1} | change)


@pytest.mark.parametrize("lengths", [[], [0], [2048]])
def test_lengths_beyond_the_stream_are_refused(stream, lengths):
    with pytest.raises(ShapeError, match="1024 tokens"):
        curves(stream, lengths=lengths)


def test_recordings_come_back_and_broken_ones_are_refused(tmp_path):
    kept = independent_stream(sequences=3, horizon=5, violation=0.2)
    write_recording(kept, tmp_path / "a.npz")
    back = read_recording(tmp_path / "a.npz")
    assert back.name == kept.name
    assert torch.equal(back.kl, kept.kl)
    assert torch.equal(back.log_ratio, kept.log_ratio)
    (tmp_path / "b.npz").write_bytes(b"PK nonsense")
    np.savez(tmp_path / "c.npz", name="c", kl=np.full((1, 2), -1.0), log_ratio=np.zeros((1, 2)))
    np.savez(tmp_path / "d.npz", name="d", kl=np.zeros((1, 2)), log_ratio=np.zeros((2, 2)))
    np.savez(tmp_path / "e.npz", name="e", kl=np.array([{}], dtype=object), log_ratio=np.zeros(1))
    for name in ("b", "c", "d", "e", "missing"):
        with pytest.raises(RecordError, match=f"{name}.npz"):
            read_recording(tmp_path / f"{name}.npz")


def test_packaged_recordings_are_real_drift():
    """Two engines' drift on long answers: KL everywhere positive, ratios around one."""
    found = [read_recording(p) for p in packaged()]
    assert len(found) == 2
    for stream in found:
        assert stream.kl.shape == (32, 512)
        assert 1e-4 < float(stream.kl.mean()) < 0.1
        # The mean log-ratio estimates -KL, from the same tokens.
        gap = float(stream.log_ratio.double().mean() + stream.kl.double().mean())
        assert abs(gap) < 5 * float(stream.log_ratio.std()) / math.sqrt(stream.kl.numel())
