"""Triton functions that the GPU programs of `kernels` share.

Imported by `kernels` alone, and only where Triton is. `no_type_check` keeps run-time argument
checkers, which cannot be compiled, away from them.

A program has one row, of the vocabulary or of a chunk of it, and walks it in tiles of LANES x R
entries. R entries lie side by side in memory and belong to one thread; what a thread has found stays
with it until the end of the row, where all meet once. That is also the pairwise sum that accuracy asks
for: of 151,936 entries a thread adds 37 to each accumulator, and the rest is a tree.

Log-probabilities are in bits, because the hardware's exponential is 2^x:

    log2 p = (score - high) bits - low        bits = log2(e) / temperature

with a normalizer in two numbers, so that it is known better than one float32 can hold. `fma` is
written out, so that the numbers do not depend on whether a compiler fuses on its own. The formulas
are those of `exact.all_terms`.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SERIES_BELOW = tl.constexpr(0.25)
# (e^x - 1 - x) / x^2 on |x| <= 1/4: the interpolant at Chebyshev's five points, as good in float32
# (3e-8, half an ulp) as Taylor's series with one term more.
SERIES_1 = tl.constexpr(0.16666642420070904)
SERIES_2 = tl.constexpr(0.041666636364999815)
SERIES_3 = tl.constexpr(0.008348847788296145)
SERIES_4 = tl.constexpr(0.0013908278590207131)


@triton.jit
@no_type_check
def columns_of(start, LANES: tl.constexpr, R: tl.constexpr):
    return start + tl.arange(0, LANES)[:, None] * R + tl.arange(0, R)[None, :]


@triton.jit
@no_type_check
def row_of(pointer, stride):
    # 64 bits: tokens x vocabulary exceeds 2^31.
    return pointer + tl.program_id(0).to(tl.int64) * stride


@triton.jit
@no_type_check
def load_scores(row, columns, width, MASKED: tl.constexpr, LAST_USE: tl.constexpr):
    """Float32 scores of a tile, -inf beyond the row. At their last use they leave the L2 first."""
    if MASKED:
        x = tl.load(row + columns, mask=columns < width, other=-float("inf"))
    elif LAST_USE:
        x = tl.load(row + columns, eviction_policy="evict_first")
    else:
        x = tl.load(row + columns)
    return x.to(tl.float32)


@triton.jit
@no_type_check
def log2_prob(scores, high, low, bits):
    return tl.fma(scores - high, bits, -low)


@triton.jit
@no_type_check
def whole(lanes):
    return tl.sum(tl.sum(lanes, 1), 0)


@triton.jit
@no_type_check
def faded(total, top, reference, bits):
    """A total relative to `top`, made relative to `reference`. 0 stays 0, and NaN stays NaN."""
    return tl.where(total == 0, 0.0, total * tl.exp2((top - reference) * bits))


@triton.jit
@no_type_check
def _rounded(x, ROUND: tl.constexpr):
    """Float32 numbers as an engine that runs in dtype ROUND would have kept them."""
    return x.to(ROUND).to(tl.float32)


@triton.jit
@no_type_check
def _tanh(x):
    """Within an ulp or two: Taylor's series near 0, where the quotient would cancel."""
    square = x * x
    series = tl.fma(square, 62 / 2835, -17 / 315)
    series = tl.fma(square, series, 2 / 15)
    series = tl.fma(square, series, -1 / 3)
    decayed = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - decayed) / (1 + decayed)
    far = tl.where(x < 0, -far, far)
    return tl.where(tl.abs(x) < 0.25, tl.fma(x * square, series, x), far)


@triton.jit
@no_type_check
def shaped(x, scale, soft_cap, CAPPED: tl.constexpr, ROUND: tl.constexpr):
    """soft_cap tanh(scale x / soft_cap), each step rounded; -inf stays -inf."""
    y = _rounded(x * scale, ROUND)
    if CAPPED:
        y = _rounded(_tanh(_rounded(y / soft_cap, ROUND)), ROUND)
        y = tl.where(x == -float("inf"), x, _rounded(y * soft_cap, ROUND))
    return y


@triton.jit
@no_type_check
def online_normalizer(
    row, width, bits, scale, soft_cap, CAPPED: tl.constexpr, ROUND: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr
):
    """Largest score and total weight relative to it, for any row.

    Each lane keeps its own until the end: one exponential per score and one per tile.
    """
    top = tl.full([LANES], -float("inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, width, LANES * R):
        scores = load_scores(row, columns_of(start, LANES, R), width, True, False)
        scores = shaped(scores, scale, soft_cap, CAPPED, ROUND)
        new_top = tl.maximum(top, tl.max(scores, 1))
        reference = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf is NaN
        weights = tl.sum(tl.exp2((scores - reference[:, None]) * bits), 1)
        total = faded(total, top, reference, bits) + weights
        top = new_top
    row_top = tl.max(top, 0)
    return row_top, tl.sum(faded(total, top, row_top, bits), 0)


@triton.jit
@no_type_check
def two_numbers(reference, total, bits, slip):
    """`high` and `low` of a row whose weights 2^(score bits - reference bits - slip) sum to `total`.

    `high` is the log-normalizer as a score, rounded; `low` is what the rounding lost, in bits.
    """
    whole_bits = tl.floor(tl.log2(total))
    rest = tl.log2(total * tl.exp2(-whole_bits)) + slip  # in [0, 1]: good to 1e-7
    high = reference + (whole_bits + rest) / bits
    return high, tl.fma(reference - high, bits, whole_bits) + rest


@triton.jit
@no_type_check
def expm1_minus(x):
    """e^x - 1 - x for |x| < 1/4."""
    series = tl.fma(x, SERIES_4, SERIES_3)
    series = tl.fma(x, series, SERIES_2)
    series = tl.fma(x, series, SERIES_1)
    return x * x * tl.fma(x, series, 0.5)


@triton.jit
@no_type_check
def careful_tile(sums, log2_mu, log2_pi):
    """The sums with one tile of any row: `exact.all_terms` to the letter."""
    kl, kl_back, tv, chi2, plogp_rollout, plogp, squared = sums
    mu = tl.exp2(log2_mu)
    pi = tl.exp2(log2_pi)
    x = tl.where(log2_pi == log2_mu, 0.0, (log2_pi - log2_mu) * LN2)
    curved = expm1_minus(x)
    rise = x + curved
    near = tl.abs(x) < SERIES_BELOW
    moved = tl.where(near, mu * rise, pi - mu)
    mu_x = tl.where(mu > 0, mu * x, tl.where(x == -float("inf"), x, 0.0))
    pi_x = tl.where(pi > 0, pi * x, tl.where(x == float("inf"), x, 0.0))
    pi2_over_mu = tl.exp2(tl.fma(x, LOG2E, log2_pi))
    return (
        kl + tl.where(near, mu * curved, moved - mu_x),
        kl_back + tl.where(near, mu * tl.fma(x, rise, -curved), pi_x - moved),
        tv + tl.abs(moved),
        chi2 + tl.where(near, moved * rise, pi2_over_mu - pi - moved),
        plogp_rollout + tl.where(mu > 0, mu * log2_mu, 0.0),
        plogp + tl.where(pi > 0, pi * log2_pi, 0.0),
        tl.fma(pi, pi, squared),
    )


@triton.jit
@no_type_check
def fields_of(kl, kl_back, tv, chi2, plogp_rollout, plogp, squared):
    """What `ExactDivergences` holds, from the sums of the lanes."""
    return (
        whole(kl),
        whole(kl_back),
        whole(tv) * 0.5,
        whole(chi2),
        -whole(plogp_rollout) * LN2,
        -whole(plogp) * LN2,
        whole(squared),
    )
