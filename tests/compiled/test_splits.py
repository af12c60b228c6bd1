"""Sums of compiled passes have the same bits on any split of a batch, merged in any order."""

import math
import random
import shutil
from fractions import Fraction
from functools import reduce
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offdrift.compiled import compiled_passes, passes
from offdrift.correction import Correction, Gate, Weight
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift.stats.digits import PLACES, WIDTH, joined, rounded, rounded_logs
from offdrift.stats.drift import DriftStats

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="there is no C++ compiler"
)


# Digits of a sum.


def numbers(n: int, *, exponents: tuple[int, int], seed: int = 0) -> Tensor:
    draw = random.Random(seed)
    return torch.tensor([draw.uniform(-1, 1) * 2.0 ** draw.randint(*exponents) for _ in range(n)], dtype=torch.float64)


def exactly(digits: Tensor) -> Fraction:
    place, *row = (int(x) for x in digits.tolist())
    return sum(d * Fraction(2) ** (WIDTH * (place - i)) for i, d in enumerate(row))


def in_pieces(x: Tensor, seed: int) -> list[Tensor]:
    draw = random.Random(seed)
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]
    cuts = [0, *sorted(draw.sample(range(1, len(x)), 7)), len(x)]
    return [shuffled[i:j] for i, j in pairwise(cuts)]


def test_digits_hold_a_sum_without_rounding(compiled: None) -> None:
    x = numbers(1000, exponents=(-10, 14))
    digits = passes.digits(x)
    assert exactly(digits) == sum(map(Fraction, x.tolist()))
    assert float(rounded(digits[None])) == pytest.approx(math.fsum(x.tolist()), rel=4e-16, abs=0)


@pytest.mark.parametrize("exponents", [(0, 0), (-25, 30), (-300, 300), (-1000, -700)])
@pytest.mark.parametrize("special", [[], [0.0, -0.0], [math.inf], [math.inf, -math.inf, 1e300], [math.nan, 1.0]])
def test_digits_of_pieces_are_those_of_the_whole(
    compiled: None, exponents: tuple[int, int], special: list[float]
) -> None:
    x = torch.cat([numbers(200, exponents=exponents), torch.tensor(special, dtype=torch.float64)])
    whole = passes.digits(x)
    truth = math.nan if {math.inf, -math.inf} <= set(special) else sum(x.tolist())
    bound = float(x[x.isfinite()].abs().max()) * 2.0**-60
    assert float(rounded(whole[None])) == pytest.approx(truth, rel=1e-13, abs=bound, nan_ok=True)
    for seed in range(5):
        rows = [passes.digits(piece)[None] for piece in in_pieces(x, seed)]
        merged = rounded(reduce(joined, rows))
        assert torch.equal(merged, rounded(whole[None])) or bool(merged.isnan() & whole.isnan().any())


@pytest.mark.parametrize("size", [1.0, 30.0, 20_000.0])
def test_logs_of_sums_at_any_size(compiled: None, size: float) -> None:
    x = size * numbers(300, exponents=(0, 0))
    whole = passes.digits_of_exp(x)
    torch.testing.assert_close(
        rounded_logs(whole), torch.stack([x.logsumexp(0), (2 * x).logsumexp(0)]), rtol=1e-14, atol=1e-14
    )
    for seed in range(5):
        merged = reduce(joined, [passes.digits_of_exp(piece) for piece in in_pieces(x, seed)])
        assert torch.equal(merged, whole)
    nothing = torch.zeros(0, dtype=torch.float64)
    assert rounded_logs(passes.digits_of_exp(nothing)).tolist() == [-math.inf] * 2
    assert torch.equal(joined(passes.digits_of_exp(nothing), whole), whole)
    assert whole.shape == (2, PLACES + 1)


# Statistics of a batch.


LENGTHS = [0, 1, 7, 8, 300, 5000, 0, *range(1, 60)]
CORRECTION = Correction(
    (
        Gate(statistic="ratio", on="full", unit="seq_mean", low=0.99, high=1.01),
        Gate(statistic="k3", on="mismatch", unit="seq_mean", high=0.01),
        Gate(statistic="ratio", on="staleness", unit="token", low=0.5, high=2.0),
    ),
    (Weight(on="mismatch", cap=2.0), Weight(on="staleness", unit="sequence", cap=3.0, outside="mask")),
)


def policies(dtype: torch.dtype, wide: float) -> list[Tensor]:
    """Log-probs of the rollout, old and current policy."""
    g = torch.Generator().manual_seed(0)
    n = sum(LENGTHS)
    rollout = -torch.empty(n).exponential_(2.0, generator=g)
    steps = [0.05 * torch.randn(n, generator=g) * (1 + 30 * (torch.rand(n, generator=g) < 0.02)) for _ in range(2)]
    old = (rollout + steps[0]).clamp(max=0)
    old[::700] -= wide
    return [x.to(dtype) for x in (rollout, old, (old + steps[1]).clamp(max=0))]


def statistics_of(tensors: list[Tensor], sequences: list[int]) -> DriftStats:
    """Of these sequences of the batch, in this order."""
    rollout, old, current = (torch.cat([x.split(LENGTHS)[i] for i in sequences]) for x in tensors)
    segments = Segments.from_lengths([LENGTHS[i] for i in sequences])
    logprobs = LogProbs.pack(rollout, logp=current, logp_old=old, segments=segments)
    divergences = {"kl_rollout_old": Divergence.exact("kl_rollout_old", (rollout - old).abs())}
    return DriftStats.of(logprobs, CORRECTION(logprobs), divergences=divergences, clipped=current > old)


def split(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    order = list(range(len(LENGTHS)))
    draw.shuffle(order)
    cuts = [0, *sorted(draw.sample(range(1, len(order)), 6)), len(order)]
    return [order[i:j] for i, j in pairwise(cuts)]


@pytest.mark.parametrize("wide", [0.0, 25.0, 2000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_of_any_split_have_the_bits_of_one_pass(compiled: None, dtype: torch.dtype, wide: float) -> None:
    tensors = policies(dtype, wide)
    whole = statistics_of(tensors, list(range(len(LENGTHS))))
    assert len(whole.exact_sums.names) > 3 * 17
    assert len(whole.exact_logs.names) == len(whole.log_names) == 14
    for seed in range(4):
        parts = [statistics_of(tensors, sequences) for sequences in split(seed)]
        merged = DriftStats.merge_all(parts)
        nested = (
            parts[3].merge(parts[0]).merge(parts[6].merge(parts[2]).merge(parts[4].merge(parts[5].merge(parts[1]))))
        )
        for found in (merged, nested):
            assert (found.sum_names, found.max_names, found.log_names) == (
                whole.sum_names, whole.max_names, whole.log_names
            )  # fmt: skip
            differ = [n for n, a, b in zip(found.sum_names, found.sums, whole.sums, strict=True) if a != b]
            assert not differ
            assert torch.equal(found.maxima, whole.maxima)
            assert torch.equal(found.logs, whole.logs)
        assert {k: v for k, v in merged.metrics.items() if not math.isnan(v)} == {
            k: v for k, v in whole.metrics.items() if not math.isnan(v)
        }


def test_beside_a_plain_part_the_digits_are_given_up(compiled: None) -> None:
    tensors = policies(torch.float32, 0.0)
    one, other = list(range(40)), list(range(40, len(LENGTHS)))
    whole, first = statistics_of(tensors, one + other), statistics_of(tensors, one)
    with compiled_passes(False):
        plain = statistics_of(tensors, other)
    assert not plain.exact_sums.names
    for merged in (first.merge(plain), plain.merge(first)):
        assert not merged.exact_sums.names
        assert not merged.exact_logs.names
        torch.testing.assert_close(
            merged.sums[[merged.sum_names.index(n) for n in whole.sum_names]], whole.sums, rtol=1e-5, atol=1e-5
        )


def test_sums_that_one_part_alone_has_keep_their_digits(compiled: None) -> None:
    tensors = policies(torch.float32, 0.0)
    rollout, old, _ = tensors
    fewer = DriftStats.of(LogProbs.pack(rollout, logp_old=old, segments=Segments.from_lengths(LENGTHS)))
    more = statistics_of(tensors, list(range(len(LENGTHS))))
    one, other = fewer.merge(more), more.merge(fewer)
    assert set(one.exact_sums.names) == set(other.exact_sums.names) == set(more.exact_sums.names)
    numbers = one.to_host()
    assert numbers == other.to_host()
    assert numbers["mismatch/k3"] == 2 * more.to_host()["mismatch/k3"]
    assert numbers["full/k3"] == more.to_host()["full/k3"]
    mismatch = one.only("mismatch/")
    assert mismatch.merge(mismatch).to_host()["mismatch/k3"] == 2 * numbers["mismatch/k3"]


def test_weights_that_the_guard_of_exp_touched_count_once_and_by_their_logs(compiled: None) -> None:
    rollout, ratio = torch.full((300,), -60.0), torch.linspace(-50, 50, 300)
    logprobs = LogProbs.pack(rollout, logp_old=rollout + ratio, segments=Segments.from_lengths([100, 200]))
    for weight in (Weight(on="mismatch"), Weight(on="mismatch", cap=2.0), Weight(on="mismatch", floor=1e-9, cap=1e9)):
        stats = DriftStats.of(logprobs, Correction(weights=(weight,))(logprobs)).to_host()
        log_w = weight.log_weight(logprobs)
        found = [stats["weight/log_w"], stats["weight/log_w2"]]
        assert found == pytest.approx([float(log_w.logsumexp(0)), float((2 * log_w).logsumexp(0))], rel=1e-9)
