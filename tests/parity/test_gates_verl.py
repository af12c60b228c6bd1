"""verl's rejection modes, importance weights and metrics, called in-process, against ours.

Where verl differs on purpose or by accident, a test asserts the difference and says why.
"""

import functools
import math
import operator

import pytest
import torch
from torch import Tensor

from offdrift.correction import Correction, Weight, rejection
from offdrift.errors import MethodError
from tests.parity.peers import Batch, random_batch, same, verl_correction

MODES = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
SEEDS = range(6)


def decided(batch: Batch, *parts) -> tuple[Tensor, Tensor]:
    """Our keep mask and weights in the padded shape."""
    packed = batch.pack()
    joined = functools.reduce(operator.and_, parts, Correction())
    corrected = joined(packed)
    return packed.unpack(corrected.keep), packed.unpack(corrected.weight)


def observed(mode: str, batch: Batch) -> Tensor:
    """What a mode looks at, by formula; k1 as the log-ratio."""
    unit, _, name = mode.rpartition("_")
    x = (batch.old - batch.rollout).clamp(-20, 20)
    x = {"k1": x, "k2": x.square() / 2, "k3": x.exp() - 1 - x}[name]
    rows = [row[keep.bool()] for row, keep in zip(x, batch.mask, strict=True) if keep.any()]
    if unit == "token":
        return torch.cat(rows)
    reduce = {"seq_sum": torch.sum, "seq_mean": torch.mean, "seq_max": torch.max}[unit]
    return torch.stack([reduce(row) for row in rows])


def random_threshold(mode: str, batch: Batch, seed: int) -> str:
    """A threshold that some units pass and some do not; a k1 band whose ends are no inverses."""
    g = torch.Generator().manual_seed(100 + seed)
    q = torch.rand(2, generator=g, dtype=torch.float64) * 0.25
    seen = observed(mode, batch)
    if not mode.endswith("k1"):
        return repr(float(seen.quantile(0.4 + 2 * q[0])))
    # verl's band is one on the inverse ratio, so that it is placed where the inverses are.
    low, high = (-seen).quantile(0.05 + q[0]).exp(), (-seen).quantile(0.95 - q[1]).exp()
    return f"{float(low)!r}_{float(high)!r}"


def test_the_modes_are_verls(verl):
    assert set(MODES) == verl.rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_decides_as_verl(verl, mode, seed):
    batch = random_batch(seed)
    threshold = random_threshold(mode, batch, seed)
    _, mask, _ = verl_correction(verl, batch, rollout_rs=mode, rollout_rs_threshold=threshold)
    keep, _ = decided(batch, rejection(mode, threshold, on="mismatch", k1_band="verl"))
    assert 0 < int(keep.sum()) < batch.tokens
    assert torch.equal(keep, mask)


@pytest.mark.parametrize("mode", [m for m in MODES if m.endswith("k1")])
@pytest.mark.parametrize("width", [1.001, 1.3, 5.0])
def test_one_number_is_a_band_and_its_own_inverse(verl, mode, width):
    kept = 0
    for seed in SEEDS:
        batch = random_batch(seed)
        _, mask, _ = verl_correction(verl, batch, rollout_rs=mode, rollout_rs_threshold=width)
        for band in ("ratio", "verl"):
            keep, _ = decided(batch, rejection(mode, width, on="mismatch", k1_band=band))
            assert torch.equal(keep, mask)
        kept += int(mask.sum())
    assert kept > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_lists_of_modes(verl, seed):
    batch = random_batch(seed)
    g = torch.Generator().manual_seed(seed)
    modes = [MODES[i] for i in torch.randperm(len(MODES), generator=g)[: 2 + seed % 3]]
    thresholds = [random_threshold(mode, batch, seed) for mode in modes]
    _, mask, _ = verl_correction(verl, batch, rollout_rs=", ".join(modes), rollout_rs_threshold=",".join(thresholds))
    gates = [rejection(mode, t, on="mismatch", k1_band="verl") for mode, t in zip(modes, thresholds, strict=True)]
    keep, _ = decided(batch, *gates)
    assert torch.equal(keep, mask)
    # Each of them rejects, and they do not all reject the same.
    alone = [decided(batch, gate)[0] for gate in gates]
    assert all(int(x.sum()) < batch.tokens for x in alone)
    assert any(not torch.equal(x, keep) for x in alone)


def test_one_threshold_for_a_list_and_every_repetition_once(verl):
    batch = random_batch(0)
    modes = "token_k2,seq_mean_k3,token_k2"
    _, mask, _ = verl_correction(verl, batch, rollout_rs=modes, rollout_rs_threshold="0.01")
    gates = [rejection(mode, 0.01, on="mismatch") for mode in modes.split(",")]
    keep, _ = decided(batch, *gates)
    assert torch.equal(keep, mask)
    assert 0 < int(keep.sum()) < batch.tokens
    assert len(functools.reduce(operator.and_, gates, Correction()).gates) == 2


def one_token(ratio: float) -> Batch:
    """A sequence of one token whose mismatch ratio is given."""
    old = torch.full((1, 1), -3.0, dtype=torch.float64)
    rollout = old - math.log(ratio)
    fields = {"old": old, "logp": old, "ref": old, "advantages": -old, "rollout": rollout}
    return Batch(**fields, mask=torch.ones(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("mode", [m for m in MODES if m.endswith("k1")])
@pytest.mark.parametrize(("ratio", "in_band", "inverse_in_band"), [(0.61, True, False), (1.65, False, True)])
def test_verl_applies_a_band_to_the_inverse_ratio(verl, mode, ratio, in_band, inverse_in_band):
    """dis.02: verl compares -log ratio with the logs of the ends, so 0.6_1.6 acts as 0.625_1.667."""
    batch, band = one_token(ratio), "0.6_1.6"
    assert (0.6 <= ratio <= 1.6) == in_band
    assert (0.6 <= 1 / ratio <= 1.6) == inverse_in_band
    _, mask, _ = verl_correction(verl, batch, rollout_rs=mode, rollout_rs_threshold=band)
    assert bool(mask) == inverse_in_band
    keep, _ = decided(batch, rejection(mode, band, on="mismatch", k1_band="verl"))
    assert bool(keep) == inverse_in_band
    keep, _ = decided(batch, rejection(mode, band, on="mismatch"))
    assert bool(keep) == in_band


@pytest.mark.parametrize("mode", ["seq_max_k1", "token_k4", "geometric", "token"])
def test_both_refuse(verl, mode):
    with pytest.raises(ValueError, match="rollout_rs"):
        verl_correction(verl, random_batch(0), rollout_rs=mode, rollout_rs_threshold="0.5_2")
    with pytest.raises(MethodError):
        rejection(mode, "0.5_2", on="mismatch")


@pytest.mark.parametrize("threshold", ["0", "-1", "2_0.5", "0_2", "one"])
def test_both_refuse_the_threshold(verl, threshold):
    with pytest.raises((ValueError, ZeroDivisionError)):
        verl_correction(verl, random_batch(0), rollout_rs="token_k1", rollout_rs_threshold=threshold)
    with pytest.raises(MethodError):
        rejection("token_k1", threshold, on="mismatch")


# -- weights --------------------------------------------------------------------------------------

LIMITS = [
    (2.0, {"cap": 2.0}),
    ("1.3", {"cap": 1.3}),
    ("0.5_5.0", {"floor": 0.5, "cap": 5.0, "outside": "mask"}),
    ("0.9_1.05", {"floor": 0.9, "cap": 1.05, "outside": "mask"}),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("threshold", "limits"), LIMITS)
@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_weights(verl, unit, threshold, limits, normalize, seed):
    batch = random_batch(seed)
    expected, mask, metrics = verl_correction(
        verl, batch, rollout_is=unit, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalize
    )
    weight = Weight(on="mismatch", unit=unit, normalize=normalize, **limits)
    keep, given = decided(batch, weight)
    assert torch.equal(keep, mask)
    assert torch.equal(mask, batch.mask.bool())
    limited = weight(batch.pack()).limited
    assert 0 < int(limited.sum()) < len(limited)
    same(given, expected)
    if normalize:
        assert abs(metrics["rollout_is_batch_norm_factor"] - 1) > 1e-6


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_a_band_that_nothing_is_in_stops_verl_and_not_us(verl, unit):
    """verl's metrics divide by the effective sample size's inverse, which is 0 then."""
    batch, band = random_batch(1), {"floor": 1e-12, "cap": 1e-11, "outside": "mask"}
    with pytest.raises(ZeroDivisionError):
        verl_correction(verl, batch, rollout_is=unit, rollout_is_threshold="1e-12_1e-11")
    _, given = decided(batch, Weight(on="mismatch", unit=unit, normalize=True, **band))
    assert given.numel() > 0
    assert not given.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_are_normalized_before_anything_is_rejected(verl, seed):
    batch = random_batch(seed)
    threshold = random_threshold("seq_mean_k2", batch, seed)
    expected, mask, _ = verl_correction(
        verl,
        batch,
        rollout_is="token",
        rollout_is_batch_normalize=True,
        rollout_rs="seq_mean_k2",
        rollout_rs_threshold=threshold,
    )
    keep, given = decided(
        batch, Weight(on="mismatch", cap=2.0, normalize=True), rejection("seq_mean_k2", threshold, on="mismatch")
    )
    assert torch.equal(keep, mask)
    assert 0 < int(keep.sum()) < batch.tokens
    same(given, expected)
