"""The GPU programs of `kernels`, which alone imports them, and only where Triton is.

A program has one row, of the vocabulary or of a chunk of it, and walks it in tiles of LANES x R
entries. R entries lie side by side in memory and belong to one thread; what a thread has found stays
with it until the end of the row, where all meet once. That is also the pairwise sum that accuracy asks
for: of 151,936 entries a thread adds 37 to each accumulator, and the rest is a tree.

Log-probabilities are in bits, because the hardware's exponential is 2^x:

    log2 p = (score - high) bits - low        bits = log2(e) / temperature

with a normalizer in two numbers, so that it is known better than one float32 can hold. `fma` is
written out, so that the numbers do not depend on whether a compiler fuses on its own. The formulas
are those of `exact.all_terms`. `no_type_check` keeps run-time argument checkers, which cannot be
compiled, away from them.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# In float64 programs: the number that LOG2E is in the float32 ones, whose sums they finish.
LOG2E_32 = tl.constexpr(1.4426950216293335)
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
    return row_at(pointer, tl.program_id(0), stride)


@triton.jit
@no_type_check
def row_at(pointer, i, stride):
    # 64 bits: tokens x vocabulary exceeds 2^31.
    return pointer + i.to(tl.int64) * stride


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
def lane_sum(lanes):
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
def log2_of(x):
    """log2 of a number in [1, 2), within an ulp of 1: the hardware's own is off by up to four.

    ln x = 2 atanh((x - 1) / (x + 1)), with x halved above the square root of 2. Once a row, it costs nothing.
    """
    high = x > 1.4142135
    x = tl.where(high, x * 0.5, x)
    s = (x - 1) / (x + 1)  # at most 0.172 in size: the first term left out is 2e-9
    square = s * s
    series = tl.fma(square, 1 / 9, 1 / 7)
    series = tl.fma(square, series, 1 / 5)
    series = tl.fma(square, series, 1 / 3)
    rest = tl.fma(s * square, series, s) * (2 * LOG2E)
    return tl.where(high, rest + 1, rest)


@triton.jit
@no_type_check
def two_numbers(reference, total, bits, slip):
    """`high` and `low` of a row whose weights 2^(score bits - reference bits - slip) sum to `total`.

    `high` is the log-normalizer as a score, rounded; `low` is what the rounding lost, in bits.
    """
    whole_bits = tl.floor(tl.log2(total))
    rest = log2_of(total * tl.exp2(-whole_bits)) + slip  # in [0, 1]
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
    """Compute the fields of `ExactDivergences` from the sums of the lanes."""
    return (
        lane_sum(kl),
        lane_sum(kl_back),
        lane_sum(tv) * 0.5,
        lane_sum(chi2),
        -lane_sum(plogp_rollout) * LN2,
        -lane_sum(plogp) * LN2,
        lane_sum(squared),
    )


# Exact divergences from whole rows of logits, for any row: two sweeps, no term being known before both normalizers are.
# It was the way for all rows (40 % of a copy's bandwidth on an H200 with bfloat16 rows, 54 % with float32, which exceed
# the L2 cache and come from memory twice; 44 % and 52 % on an H100) and is now for those that `finish_rows` marks. The
# second sweep runs backward and marks what it has read as the first to leave the cache.
#
# Tried and not kept, on an H100. Rows in parts for several programs, which wait for each other between the sweeps and
# so keep fewer rows in flight: 49 % and 60 % with parts of 64 and 128 KiB of a pair. The next part's first sweep in
# place of waiting: 43 % and 52 %. More warps of fewer registers: no change.

# Rows with a larger log pi - log mu are left to the careful sweep: beyond it, tokens whose mu
# underflows may still count in chi2.
QUICK_BELOW = tl.constexpr(32.0)
# |log pi - log mu| from which one sweep is not enough.
FAR = tl.constexpr(8.0)
# log2 of a probability that is 0 and, unlike -inf, stays 0 when multiplied by its logarithm.
NO_MASS = tl.constexpr(-1e4)


@triton.jit
@no_type_check
def _weights(total, scores, bits, reference_bits):
    return total + tl.exp2(tl.fma(scores, bits, -reference_bits))


@triton.jit
@no_type_check
def _normalizer(row, width, total, reference, reference_bits, bits, LANES: tl.constexpr, R: tl.constexpr):
    """High and low, from the lanes' weights, or from one more sweep where those say nothing."""
    weight = tl.sum(tl.sum(total, 1), 0)
    slip = -tl.fma(reference, bits, -reference_bits)  # what rounding the product lost
    if (weight < float("inf")) & (tl.abs(slip) < 0.5):
        reference, weight, slip = reference, weight, slip
    else:
        reference, weight = online_normalizer(row, width, bits, 1.0, 1.0, False, tl.float32, LANES, R)
        slip = 0.0
    return two_numbers(reference, weight, bits, slip)


@triton.jit
@no_type_check
def _quick_tile(sums, mu, pi, inside, highs, lows, bits, MASKED: tl.constexpr):
    """The sums with one tile of a row where both policies can draw every token.

    mu and e^x are the only exponentials; the rest follows from rise = e^x - 1 and curved = rise - x.
    """
    kl, kl_both, tv, chi2, plogp_rollout, plogp, squared, largest = sums
    log2_mu = log2_prob(mu, highs[0], lows[0], LOG2E)
    log2_pi = log2_prob(pi, highs[1], lows[1], bits)
    if MASKED:
        log2_mu = tl.where(inside, log2_mu, NO_MASS)
        log2_pi = tl.where(inside, log2_pi, NO_MASS)
    log2_ratio = log2_pi - log2_mu
    x = log2_ratio * LN2
    mu = tl.exp2(log2_mu)
    near = tl.abs(x) < SERIES_BELOW
    curved = expm1_minus(x)
    far_rise = tl.exp2(log2_ratio) - 1
    rise = tl.where(near, x + curved, far_rise)
    curved = tl.where(near, curved, far_rise - x)
    moved = mu * rise
    pi = mu + moved
    return (
        tl.fma(mu, curved, kl),
        tl.fma(moved, x, kl_both),  # KL(mu || pi) + KL(pi || mu)
        tv + tl.abs(moved),
        tl.fma(moved, rise, chi2),
        tl.fma(mu, log2_mu, plogp_rollout),
        tl.fma(pi, log2_pi, plogp),
        tl.fma(pi, pi, squared),
        tl.maximum(largest, x),
    )


@triton.jit
@no_type_check
def _careful_fields(row_mu, row_pi, width, highs, lows, bits_mu, bits_pi, LANES: tl.constexpr, R: tl.constexpr):
    """The seven fields of one row, whatever it holds."""
    zero = tl.zeros([LANES, R], tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero)
    for start in tl.range(0, width, LANES * R):
        columns = columns_of(start, LANES, R)
        inside = columns < width
        mu = load_scores(row_mu, columns, width, True, False)
        pi = load_scores(row_pi, columns, width, True, False)
        # Beyond the row: tokens that neither policy has, also where a normalizer is infinite.
        log2_mu = tl.where(inside, log2_prob(mu, highs[0], lows[0], bits_mu), -float("inf"))
        log2_pi = tl.where(inside, log2_prob(pi, highs[1], lows[1], bits_pi), -float("inf"))
        sums = careful_tile(sums, log2_mu, log2_pi)
    return fields_of(sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6])


@triton.jit
@no_type_check
def _token_log_prob(row, token, width, high, low, bits):
    """Log-prob in nats of the drawn token; NaN for one that the row does not have."""
    inside = (token >= 0) & (token < width)
    score = tl.load(row + tl.where(inside, token, 0)).to(tl.float32)
    log_prob = tl.minimum(log2_prob(score, high, low, bits) * LN2, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(inside, log_prob, float("nan"))


@triton.jit
@no_type_check
def _two_sweeps(
    i,
    scores_rollout,
    scores,
    tokens,
    out,
    stride_rollout,
    stride,
    n,
    width,
    bits,
    LANES: tl.constexpr,
    R: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
):
    """Normalizers, then every sum, of row i of each policy.

    Weights are relative to the largest score of the first tile: any score of the row will do unless
    another is 88 nats above it, and searching for the largest would cost more than summing.
    The second sweep runs backward: what the first read last is what the L2 still holds.
    """
    tile: tl.constexpr = LANES * R
    row_mu = row_at(scores_rollout, i, stride_rollout)
    row_pi = row_at(scores, i, stride)
    tiles = width // tile
    rest = columns_of(tiles * tile, LANES, R)

    first = columns_of(0, LANES, R)
    ref_mu = tl.max(tl.max(load_scores(row_mu, first, width, True, False), 1), 0)
    ref_pi = tl.max(tl.max(load_scores(row_pi, first, width, True, False), 1), 0)
    ref_mu_bits = ref_mu * LOG2E
    ref_pi_bits = ref_pi * bits
    total_mu = tl.zeros([LANES, R], tl.float32)
    total_pi = tl.zeros([LANES, R], tl.float32)
    for k in tl.range(0, tiles, loop_unroll_factor=4):
        columns = columns_of(k * tile, LANES, R)
        mu = load_scores(row_mu, columns, width, False, False)
        pi = load_scores(row_pi, columns, width, False, False)
        total_mu = _weights(total_mu, mu, LOG2E, ref_mu_bits)
        total_pi = _weights(total_pi, pi, bits, ref_pi_bits)
    if tiles * tile < width:
        mu = load_scores(row_mu, rest, width, True, False)
        pi = load_scores(row_pi, rest, width, True, False)
        total_mu = _weights(total_mu, mu, LOG2E, ref_mu_bits)
        total_pi = _weights(total_pi, pi, bits, ref_pi_bits)
    high_mu, low_mu = _normalizer(row_mu, width, total_mu, ref_mu, ref_mu_bits, LOG2E, LANES, R)
    high_pi, low_pi = _normalizer(row_pi, width, total_pi, ref_pi, ref_pi_bits, bits, LANES, R)
    highs = (high_mu, high_pi)
    lows = (low_mu, low_pi)

    zero = tl.zeros([LANES, R], tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    if tiles * tile < width:
        mu = load_scores(row_mu, rest, width, True, True)
        pi = load_scores(row_pi, rest, width, True, True)
        sums = _quick_tile(sums, mu, pi, rest < width, highs, lows, bits, True)
    for k in tl.range(0, tiles):
        columns = columns_of((tiles - 1 - k) * tile, LANES, R)
        mu = load_scores(row_mu, columns, width, False, True)
        pi = load_scores(row_pi, columns, width, False, True)
        sums = _quick_tile(sums, mu, pi, True, highs, lows, bits, False)
    largest = tl.max(tl.max(sums[7], 1), 0)
    fields = fields_of(sums[0], sums[1] - sums[0], sums[2], sums[3], sums[4], sums[5], sums[6])
    # An infinity anywhere in the row has made a sum NaN: 0 log 0, if nothing else.
    sane = fields[0] + fields[1] + fields[2] + fields[3] + fields[4] + fields[5] + fields[6]
    if (sane < float("inf")) & (largest < QUICK_BELOW):
        fields = fields
    else:
        fields = _careful_fields(row_mu, row_pi, width, highs, lows, LOG2E, bits, LANES, R)

    out += i
    # One policy's NaN makes every field NaN, also those that the other alone would decide.
    nan_or_0 = fields[2] * 0.0
    for k in tl.static_range(7):
        field = fields[k] + nan_or_0
        if k == 2:  # rounding may not leave [0, 1], nor make an entropy negative
            field = tl.minimum(field, 1.0, propagate_nan=tl.PropagateNan.ALL)
        if k == 4 or k == 5:
            field = tl.maximum(field, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + k * n, field)
    if HAS_TOKENS:
        token = tl.load(tokens + i)
        logp_mu = _token_log_prob(row_mu, token, width, high_mu, low_mu, LOG2E)
        logp_pi = _token_log_prob(row_pi, token, width, high_pi, low_pi, bits)
        tl.store(out + 7 * n, logp_mu + nan_or_0)
        tl.store(out + 8 * n, logp_pi + nan_or_0)
    tl.store(out + 9 * n, high_mu)
    tl.store(out + 10 * n, low_mu)
    tl.store(out + 11 * n, high_pi)
    tl.store(out + 12 * n, low_pi)


@triton.jit(do_not_specialize=["n", "each"])
@no_type_check
def exact_rows(
    again,  # [n], which rows to compute
    scores_rollout,  # [n, v]
    scores,  # [n, v]
    tokens,  # [n], read only if HAS_TOKENS
    out,  # [13, n]: seven fields, two log-probs, high and low of both policies
    stride_rollout,
    stride,
    n,
    width,
    bits,  # log2(e) / temperature of the current policy
    each,  # rows of a program
    LANES: tl.constexpr,
    R: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
):
    """Every number of the rows that `finish_rows` has marked, whatever is in them.

    A program looks after several rows, since most of them are done already and starting a program costs a microsecond.
    """
    first = tl.program_id(0) * each
    for k in tl.range(0, each):
        i = first + k
        if tl.load(again + i, mask=i < n, other=0) != 0:
            _two_sweeps(
                i,
                scores_rollout,
                scores,
                tokens,
                out,
                stride_rollout=stride_rollout,
                stride=stride,
                n=n,
                width=width,
                bits=bits,
                LANES=LANES,
                R=R,
                HAS_TOKENS=HAS_TOKENS,
            )


# The same from one sweep, all but TV. Weights of a row are relative to the scores A, B of one of its tokens: with
#
#     m = e^(a - A)      x = (b / T - B / T) - (a - A)      r = e^x - 1      c = r - x
#     M = sum m      R = sum m r      C = sum m c      S = sum m r x      Q = sum m r^2
#     L = sum m (a - A)      P = sum m (1 + r) (a - A)      P2 = sum (m (1 + r))^2
#
# and u = R / M, D = -log(1 + u), the difference of the two log-normalizers, everything follows without another look:
#
#     KL(mu || pi) = C / M - (u + D)          KL(pi || mu) = (S - C) / (M + R) + u / (1 + u) + D
#     chi2 = (Q / (1 + u)^2 - u^2) / M ...    see `finish_rows`
#
# No term is large where mu is, because the token is one that was drawn, so that x is small there: the sums may be
# float32, and the corrections, a handful per row, are float64. TV alone has a kink at pi = mu, which moves with D: it
# takes a second sweep, of 15 instructions.
#
# Where |x| < NEAR, a polynomial is all it takes for c: 26 instructions per pair of scores, one of them an
# exponential. The first part of a row tells nearly always whether the rest is like that; if not, the row is swept by
# 30 to 31, with two exponentials. The sweep is bound by instructions, so that what counts is how many there are and
# how many warps wait for memory at a time: two words a thread and 56 registers let an SM have 36 warps (four words
# 28), and tiles whose addresses differ by constants cost one addition of addresses less for each load. Measured on an
# H200 by `one_sweep.py` at a vocabulary of 151,936: eight numbers at 87 % of a copy's bandwidth with bfloat16 scores,
# 103 % with float32; all nine at 51 % and 53 %; rows that begin beyond NEAR at 72 % and 87 %. `ncu`, with 64
# registers and blocks of four: issue slots 81 % busy, 27.1 instructions executed per pair, memory 80 %.
#
# Tried and not kept: tiles of four words (76 to 78 %); 16 warps (51 %); loading a tile ahead of the sums (no gain); the
# largest x^2 as an integer, of which Hopper compares three at once (half an instruction less, and slower).


# (e^-y - 1 + y - y^2 / 2) / y^3 on |y| <= NEAR: the interpolant at Chebyshev's five points.
NEAR = tl.constexpr(0.75)
# One block of so many is swept before the polynomial is relied on.
PROBED = tl.constexpr(8)
NEAR_0 = tl.constexpr(-0.16666666666666666)
NEAR_1 = tl.constexpr(0.04166419512076682)
NEAR_2 = tl.constexpr(-0.008333059106967104)
NEAR_3 = tl.constexpr(0.0014064369329705383)
NEAR_4 = tl.constexpr(-0.0002003602643017344)


@triton.jit
@no_type_check
def _sweep_tile(sums, a, b, inside, offsets, minus_over_t, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """The sums with one tile, for |x| < NEAR or, WIDE, any.

    With -x in place of x no score is negated, which would be an instruction each. Beside the sums, |x|.
    """
    total, moved_total, curved_total, moved_x, moved_rise, m_bits, p_bits, squared = sums
    bits = tl.fma(a, LOG2E, offsets[0])
    minus_x = tl.fma(b, minus_over_t, a) + offsets[1]
    if MASKED:
        bits = tl.where(inside, bits, NO_MASS)
        minus_x = tl.where(inside, minus_x, 0.0)
    m = tl.exp2(bits)
    square = minus_x * minus_x
    if WIDE:
        series = tl.fma(minus_x, SERIES_4, -SERIES_3)
        series = tl.fma(minus_x, series, SERIES_2)
        series = tl.fma(minus_x, series, -SERIES_1)
        near = square * tl.fma(minus_x, series, 0.5)
        far = tl.exp2(minus_x * -LOG2E) - 1 + minus_x
        curved = tl.where(tl.abs(minus_x) < SERIES_BELOW, near, far)
    else:
        series = tl.fma(minus_x, NEAR_4, NEAR_3)
        series = tl.fma(minus_x, series, NEAR_2)
        series = tl.fma(minus_x, series, NEAR_1)
        series = tl.fma(minus_x, series, NEAR_0)
        curved = square * tl.fma(minus_x, series, 0.5)
    rise = curved - minus_x
    moved = m * rise
    p = m + moved
    sums = (
        total + m,
        moved_total + moved,
        tl.fma(m, curved, curved_total),
        tl.fma(moved, minus_x, moved_x),
        tl.fma(moved, rise, moved_rise),
        tl.fma(m, bits, m_bits),
        tl.fma(p, bits, p_bits),
        tl.fma(p, p, squared),
    )
    return sums, tl.abs(minus_x)


@triton.jit
@no_type_check
def _words(row, PACKED: tl.constexpr):
    """A row, or where two bfloat16 scores are one word of 32 bits, its words."""
    if PACKED:
        return row.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return row


@triton.jit
@no_type_check
def _load(row, columns, LAST_USE: tl.constexpr):
    if LAST_USE:
        return tl.load(row + columns, eviction_policy="evict_first")
    return tl.load(row + columns)


@triton.jit
@no_type_check
def _halves(words):
    """Two bfloat16 numbers of a word as float32: a shift and a mask, where the compiler's own way takes three."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _sweep(
    sums,
    furthest,
    start,
    stop,
    offsets,
    row_mu,
    row_pi,
    width,
    minus_over_t,
    LANES: tl.constexpr,
    R: tl.constexpr,
    PACKED: tl.constexpr,
    UNROLL: tl.constexpr,
    LAST_USE: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
):
    """The sums with the whole blocks from `start` to `stop` and, with REST, what the row has beyond whole blocks.

    A block is UNROLL tiles, whose addresses differ by constants: an addition less for each load.
    """
    step: tl.constexpr = LANES * R
    entries: tl.constexpr = 2 * step * UNROLL if PACKED else step * UNROLL
    first_mu = _words(row_mu, PACKED) + columns_of(0, LANES, R)
    first_pi = _words(row_pi, PACKED) + columns_of(0, LANES, R)
    for k in tl.range(start, stop):
        at_mu = first_mu + k * (step * UNROLL)
        at_pi = first_pi + k * (step * UNROLL)
        for j in tl.static_range(UNROLL):
            a = _load(at_mu, j * step, LAST_USE)
            b = _load(at_pi, j * step, LAST_USE)
            if PACKED:
                low_a, high_a = _halves(a)
                low_b, high_b = _halves(b)
                sums, low = _sweep_tile(
                    sums, low_a, low_b, True, offsets, minus_over_t=minus_over_t, MASKED=False, WIDE=WIDE
                )
                sums, high = _sweep_tile(
                    sums, high_a, high_b, True, offsets, minus_over_t=minus_over_t, MASKED=False, WIDE=WIDE
                )
                x = tl.maximum(low, high)
            else:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
                sums, x = _sweep_tile(sums, a, b, True, offsets, minus_over_t=minus_over_t, MASKED=False, WIDE=WIDE)
            furthest = tl.maximum(furthest, x)
    for first in tl.range(width // entries * entries, width if REST else 0, step):
        rest = columns_of(first, LANES, R)
        rest_a = load_scores(row_mu, rest, width, True, True)
        rest_b = load_scores(row_pi, rest, width, True, True)
        sums, x = _sweep_tile(
            sums, rest_a, rest_b, rest < width, offsets, minus_over_t=minus_over_t, MASKED=True, WIDE=WIDE
        )
        furthest = tl.maximum(furthest, x)
    return sums, furthest


@triton.jit
@no_type_check
def _largest(furthest):
    """The largest |x| of a row."""
    return tl.max(tl.max(furthest, 1), 0)


@triton.jit
@no_type_check
def _tv_loaded(tv, a, b, offsets, minus_over_t, PACKED: tl.constexpr, WIDE: tl.constexpr):
    if PACKED:
        low_a, high_a = _halves(a)
        low_b, high_b = _halves(b)
        tv = _tv_tile(tv, low_a, low_b, True, offsets, minus_over_t=minus_over_t, MASKED=False, WIDE=WIDE)
        return _tv_tile(tv, high_a, high_b, True, offsets, minus_over_t=minus_over_t, MASKED=False, WIDE=WIDE)
    else:
        return _tv_tile(tv, a.to(tl.float32), b.to(tl.float32), True, offsets, minus_over_t, MASKED=False, WIDE=WIDE)


@triton.jit(do_not_specialize=["n"])
@no_type_check
def one_sweep_rows(
    scores_rollout,  # [n, v]
    scores,  # [n, v]
    tokens,  # [n], read only if HAS_TOKENS
    out,  # [14, n]: nine sums (S negative), two offsets, both scores of the token, TV's sum
    stride_rollout,
    stride,
    n,
    width,
    minus_over_t,  # -1 / temperature of the current policy
    LANES: tl.constexpr,
    R: tl.constexpr,  # numbers, or words of two, that a thread loads at once
    HAS_TOKENS: tl.constexpr,
    TV: tl.constexpr,
    PACKED: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDE: tl.constexpr,  # for any x
):
    """The sums of one row; without WIDE by a polynomial and, if it has an x that is too large for that, once more."""
    i = tl.program_id(0)
    row_mu = row_at(scores_rollout, i, stride_rollout)
    row_pi = row_at(scores, i, stride)
    step: tl.constexpr = LANES * R
    entries: tl.constexpr = 2 * step * UNROLL if PACKED else step * UNROLL
    blocks = width // entries
    if HAS_TOKENS:
        token = tl.load(tokens + i)
        token = tl.where((token >= 0) & (token < width), token, 0)
        ref_mu = tl.load(row_mu + token).to(tl.float32)
        ref_pi = tl.load(row_pi + token).to(tl.float32)
    else:
        first = columns_of(0, LANES, R)
        ref_mu = tl.max(tl.max(load_scores(row_mu, first, width, True, False), 1), 0)
        ref_pi = tl.max(tl.max(load_scores(row_pi, first, width, True, False), 1), 0)
    offsets = (-(ref_mu * LOG2E), -tl.fma(ref_pi, minus_over_t, ref_mu))

    zero = tl.zeros([LANES, R], tl.float32)
    none = (zero, zero, zero, zero, zero, zero, zero, zero)
    nearest = zero
    if WIDE:
        sums, furthest = _sweep(
            none,
            nearest,
            0,
            blocks,
            offsets,
            row_mu=row_mu,
            row_pi=row_pi,
            width=width,
            minus_over_t=minus_over_t,
            LANES=LANES,
            R=R,
            PACKED=PACKED,
            UNROLL=UNROLL,
            LAST_USE=not TV,
            WIDE=True,
            REST=True,
        )
        largest = _largest(furthest)
    else:
        # The first part of a row tells nearly always whether the whole is within the polynomial's range.
        part = tl.cdiv(blocks, PROBED)
        sums, furthest = _sweep(
            none,
            nearest,
            0,
            part,
            offsets,
            row_mu=row_mu,
            row_pi=row_pi,
            width=width,
            minus_over_t=minus_over_t,
            LANES=LANES,
            R=R,
            PACKED=PACKED,
            UNROLL=UNROLL,
            LAST_USE=not TV,
            WIDE=False,
            REST=False,
        )
        largest = _largest(furthest)
        if largest < NEAR:
            sums, furthest = _sweep(
                sums,
                furthest,
                part,
                blocks,
                offsets,
                row_mu=row_mu,
                row_pi=row_pi,
                width=width,
                minus_over_t=minus_over_t,
                LANES=LANES,
                R=R,
                PACKED=PACKED,
                UNROLL=UNROLL,
                LAST_USE=not TV,
                WIDE=False,
                REST=True,
            )
            largest = _largest(furthest)
        else:
            sums, largest = sums, largest
        if (largest >= NEAR) & (largest < FAR):
            sums, furthest = _sweep(
                none,
                nearest,
                0,
                blocks,
                offsets,
                row_mu=row_mu,
                row_pi=row_pi,
                width=width,
                minus_over_t=minus_over_t,
                LANES=LANES,
                R=R,
                PACKED=PACKED,
                UNROLL=UNROLL,
                LAST_USE=not TV,
                WIDE=True,
                REST=True,
            )
            largest = _largest(furthest)
        else:
            sums, largest = sums, largest
    out += i
    for field in tl.static_range(8):
        tl.store(out + field * n, lane_sum(sums[field]))
    tl.store(out + 8 * n, largest)
    tl.store(out + 9 * n, offsets[0])
    tl.store(out + 10 * n, offsets[1])
    tl.store(out + 11 * n, ref_mu)
    tl.store(out + 12 * n, ref_pi)
    if TV:
        u = lane_sum(sums[1]).to(tl.float64) / lane_sum(sums[0]).to(tl.float64)
        shifted = (offsets[0], offsets[1] + tl.log(1 + u).to(tl.float32))  # x with the right normalizers
        tv = tl.zeros([LANES, R], tl.float32)
        for start in tl.range(blocks * entries, width, step):
            rest = columns_of(start, LANES, R)
            rest_a = load_scores(row_mu, rest, width, True, True)
            rest_b = load_scores(row_pi, rest, width, True, True)
            tv = _tv_tile(tv, rest_a, rest_b, rest < width, shifted, minus_over_t=minus_over_t, MASKED=True, WIDE=True)
        # Backward: what the first sweep read last is what the L2 still holds.
        first_mu = _words(row_mu, PACKED) + columns_of(0, LANES, R)
        first_pi = _words(row_pi, PACKED) + columns_of(0, LANES, R)
        if largest < 1:  # and |D| < 1 for a row that is not swept again
            for k in tl.range(0, blocks):
                at = (blocks - 1 - k) * (step * UNROLL)
                for j in tl.static_range(UNROLL):
                    a = _load(first_mu + at, j * step, True)
                    b = _load(first_pi + at, j * step, True)
                    tv = _tv_loaded(tv, a, b, shifted, minus_over_t, PACKED=PACKED, WIDE=False)
        else:
            for k in tl.range(0, blocks):
                at = (blocks - 1 - k) * (step * UNROLL)
                for j in tl.static_range(UNROLL):
                    a = _load(first_mu + at, j * step, True)
                    b = _load(first_pi + at, j * step, True)
                    tv = _tv_loaded(tv, a, b, shifted, minus_over_t, PACKED=PACKED, WIDE=True)
        tl.store(out + 13 * n, lane_sum(tv))


@triton.jit
@no_type_check
def _tv_tile(tv, a, b, inside, offsets, minus_over_t, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """sum m |e^x - 1|, x with the right normalizers: m |e^x - 1| = 2 m e^(x / 2) |sinh(x / 2)|, one exponential.

    The series is for |x| < 2; WIDE takes the difference of two exponentials beyond it.
    """
    minus_x = tl.fma(b, minus_over_t, a) + offsets[1]
    bits = tl.fma(a, LOG2E, offsets[0])
    if MASKED:
        bits = tl.where(inside, bits, NO_MASS)
        minus_x = tl.where(inside, minus_x, 0.0)
    square = minus_x * minus_x
    series = tl.fma(square, 1 / 322560, 1 / 1920)  # 2 sinh(x / 2) = x (1 + x^2 / 24 + x^4 / 1920 + ...)
    series = tl.fma(square, series, 1 / 24)
    term = tl.exp2(tl.fma(minus_x, LOG2E * -0.5, bits)) * (minus_x * tl.fma(square, series, 1.0))
    if WIDE:
        term = tl.where(tl.abs(minus_x) < 1, term, tl.exp2(tl.fma(minus_x, -LOG2E, bits)) - tl.exp2(bits))
    return tv + tl.abs(term)


@triton.jit(do_not_specialize=["n"])
@no_type_check
def finish_rows(
    sums,  # [14, n], as `one_sweep_rows` left them
    tokens,  # [n], read only if HAS_TOKENS
    out,  # [13, n], as `exact_rows` writes them
    again,  # [n], rows that need `exact_rows`
    n,
    width,
    bits,
    over_t,
    HAS_TOKENS: tl.constexpr,
    TV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The numbers of many rows from their sums, in float64, and which rows are to be swept with more care.

    Those are: rows with an infinity or NaN among the sums (what one policy or both cannot draw); |x| beyond 8 somewhere
    (a token whose m underflows may still count in chi2; r = x + c loses digits); normalizers so far apart that M + R
    loses digits; and rows whose token neither policy is likely to draw, where what cancels is large: C / M and u + D
    beyond 128 times the KL, log M beyond 8 times the entropy.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    total = _column(sums, 0, i, n)
    moved = _column(sums, 1, i, n)
    curved = _column(sums, 2, i, n)
    moved_x = -_column(sums, 3, i, n)
    moved_rise = _column(sums, 4, i, n)
    m_bits = _column(sums, 5, i, n)
    p_bits = _column(sums, 6, i, n)
    squared = _column(sums, 7, i, n)
    furthest = _column(sums, 8, i, n)
    offset_bits = -_column(sums, 9, i, n)
    offset_x = -_column(sums, 10, i, n)
    u = moved / total
    p = total + moved
    # log(1 + u) to 1e-16, which is what a difference of two probabilities would be known to.
    apart = -tl.log(1 + u)  # D
    log_m = tl.log(total)
    log_p = tl.log(p)
    kl = curved / total - (u + apart)
    kl_back = (moved_x - curved) / p + u / (1 + u) + apart
    chi2 = moved_rise / total / ((1 + u) * (1 + u)) - u * u / ((1 + u) * (1 + u))
    entropy_mu = log_m - m_bits / total * LN2
    x_p = moved - curved + moved_x  # sum m (1 + r) x
    entropy_pi = log_p - (p_bits * LN2 + x_p) / p
    sane = curved + moved_x + moved_rise + m_bits + p_bits + squared
    quick = (tl.abs(sane) < float("inf")) & (furthest < FAR) & (tl.abs(apart) < 1)
    quick = quick & (curved / total <= 128 * kl + 1e-12)
    quick = quick & (log_m <= 8 * entropy_mu + 0.25) & (log_p <= 8 * entropy_pi + 0.25)
    tl.store(again + i, tl.where(quick, 0, 1), mask=inside)

    kl = tl.maximum(kl, 0.0)  # by rounding only
    kl_back = tl.maximum(kl_back, 0.0)
    _put(out, 0, i, n, kl)
    _put(out, 1, i, n, kl_back)
    if TV:
        _put(out, 2, i, n, tl.minimum(_column(sums, 13, i, n) / total * 0.5, 1.0))
    _put(out, 3, i, n, tl.maximum(chi2, 0.0))
    _put(out, 4, i, n, tl.maximum(entropy_mu, 0.0))
    _put(out, 5, i, n, tl.maximum(entropy_pi, 0.0))
    _put(out, 6, i, n, squared / (p * p))
    if HAS_TOKENS:
        token = tl.load(tokens + i, mask=inside, other=0)
        ref_mu = _column(sums, 11, i, n)
        ref_pi = _column(sums, 12, i, n)
        of_mu = (ref_mu * LOG2E_32 - offset_bits) * LN2
        of_pi = of_mu + (ref_pi * over_t - ref_mu) + offset_x
        known = (token >= 0) & (token < width)
        _put(out, 7, i, n, tl.where(known, tl.minimum(of_mu - log_m, 0.0), float("nan")))
        _put(out, 8, i, n, tl.where(known, tl.minimum(of_pi - log_p, 0.0), float("nan")))
    # Both log-normalizers in bits, each as a rounded score and what the rounding lost.
    bits_mu = log_m * LOG2E + offset_bits
    bits_pi = (log_p - offset_x) * LOG2E + offset_bits
    high_mu = (bits_mu / LOG2E_32).to(tl.float32)
    high_pi = (bits_pi / bits).to(tl.float32)
    _put(out, 9, i, n, high_mu)
    _put(out, 10, i, n, bits_mu - high_mu.to(tl.float64) * LOG2E_32)
    _put(out, 11, i, n, high_pi)
    _put(out, 12, i, n, bits_pi - high_pi.to(tl.float64) * bits)


@triton.jit
@no_type_check
def _column(sums, k: tl.constexpr, i, n):
    return tl.load(sums + k * n + i, mask=i < n, other=1.0).to(tl.float64)


@triton.jit
@no_type_check
def _put(out, k: tl.constexpr, i, n, x):
    tl.store(out + k * n + i, x.to(tl.float32), mask=i < n)


# One vocabulary chunk of recomputed scores, and gradients.


def dtype_of(dtype: torch.dtype | None) -> tl.dtype:
    """Triton's name for a dtype of torch's; float32, which rounds nothing here, for None."""
    return getattr(tl, str(dtype or torch.float32).removeprefix("torch."))


@triton.jit
@no_type_check
def update_rows(
    scores,  # [n, c]
    top,  # [n], the largest score so far
    total,  # [n], sum of e^((score - top) / temperature) so far
    new_top,
    new_total,
    stride,
    width,
    bits,
    scale,
    soft_cap,
    CAPPED: tl.constexpr,
    ROUND: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
):
    """One policy's normalizers with one more chunk of scores. Totals meet in their own dtype."""
    i = tl.program_id(0)
    row = row_of(scores, stride)
    chunk_top, chunk_total = online_normalizer(row, width, bits, scale, soft_cap, CAPPED, ROUND, LANES, R)
    old_top = tl.load(top + i).to(tl.float32)
    old_total = tl.load(total + i)
    both = tl.maximum(old_top, chunk_top)
    old_total = faded(old_total, old_top, both, bits)
    chunk_total = faded(chunk_total, chunk_top, both, bits)
    tl.store(new_top + i, both)
    tl.store(new_total + i, old_total + chunk_total)


@triton.jit
@no_type_check
def accumulate_rows(
    scores_rollout,  # [n, c]
    scores,  # [n, c]
    top_rollout,
    total_rollout,
    top,
    total,
    sums,  # [7, n], read
    out,  # [7, n], written
    stride_rollout,
    stride,
    n,
    width,
    bits_rollout,
    bits,
    scale_rollout,
    scale,
    soft_cap_rollout,
    soft_cap,
    CAPPED_ROLLOUT: tl.constexpr,
    CAPPED: tl.constexpr,
    ROUND_ROLLOUT: tl.constexpr,
    ROUND: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
):
    """The seven sums with one more chunk of both policies, whose normalizers are final."""
    i = tl.program_id(0)
    row_mu = row_of(scores_rollout, stride_rollout)
    row_pi = row_of(scores, stride)
    total_mu = tl.load(total_rollout + i).to(tl.float32)
    total_pi = tl.load(total + i).to(tl.float32)
    high_mu, low_mu = two_numbers(tl.load(top_rollout + i).to(tl.float32), total_mu, bits_rollout, 0.0)
    high_pi, low_pi = two_numbers(tl.load(top + i).to(tl.float32), total_pi, bits, 0.0)
    zero = tl.zeros([LANES, R], tl.float32)
    totals = (zero, zero, zero, zero, zero, zero, zero)
    for start in tl.range(0, width, LANES * R):
        columns = columns_of(start, LANES, R)
        mu = load_scores(row_mu, columns, width, True, True)
        pi = load_scores(row_pi, columns, width, True, True)
        mu = shaped(mu, scale_rollout, soft_cap_rollout, CAPPED_ROLLOUT, ROUND_ROLLOUT)
        pi = shaped(pi, scale, soft_cap, CAPPED, ROUND)
        # Beyond the chunk: tokens that neither policy has, also where a normalizer is infinite.
        inside = columns < width
        log2_mu = tl.where(inside, log2_prob(mu, high_mu, low_mu, bits_rollout), -float("inf"))
        log2_pi = tl.where(inside, log2_prob(pi, high_pi, low_pi, bits), -float("inf"))
        totals = careful_tile(totals, log2_mu, log2_pi)
    fields = fields_of(totals[0], totals[1], totals[2], totals[3], totals[4], totals[5], totals[6])
    for k in tl.static_range(7):
        tl.store(out + k * n + i, tl.load(sums + k * n + i) + fields[k])


@triton.jit
@no_type_check
def gradient_rows(
    upstream,  # [n]
    value,  # [n], what is differentiated
    scores_rollout,  # [n, v], not read for the entropy
    scores,  # [n, v]
    normalizers,  # [4, n]: high and low of both policies
    out,  # [n, v], contiguous
    stride_rollout,
    stride,
    n,
    width,
    over_t,
    bits,
    OF: tl.constexpr,  # "kl_rollout_current", "kl_current_rollout" or "entropy"
    LANES: tl.constexpr,
    R: tl.constexpr,
):
    """One sweep: the gradient of one number per row with respect to the current policy's scores.

    0 where nothing is to be learned: a score of -inf, or an incoming gradient of 0.
    """
    i = tl.program_id(0)
    row_mu = row_of(scores_rollout, stride_rollout)
    row_pi = row_of(scores, stride)
    row_out = row_of(out, width)
    slope = tl.load(upstream + i).to(tl.float32)
    row_value = tl.load(value + i).to(tl.float32)
    high_mu = tl.load(normalizers + i)
    low_mu = tl.load(normalizers + n + i)
    high_pi = tl.load(normalizers + 2 * n + i)
    low_pi = tl.load(normalizers + 3 * n + i)
    if OF == "kl_current_rollout":  # no limit where pi draws what mu cannot
        row_value = tl.where(row_value == float("inf"), float("nan"), row_value)
    for start in tl.range(0, width, LANES * R):
        columns = columns_of(start, LANES, R)
        log2_pi = log2_prob(load_scores(row_pi, columns, width, True, True), high_pi, low_pi, bits)
        pi = tl.exp2(log2_pi)
        if OF == "entropy":
            moved = tl.where(pi > 0, -pi * tl.fma(log2_pi, LN2, row_value), pi * 0.0)
        else:
            log2_mu = log2_prob(load_scores(row_mu, columns, width, True, True), high_mu, low_mu, LOG2E)
            if OF == "kl_rollout_current":
                moved = pi - tl.exp2(log2_mu)
            else:
                x = (log2_pi - log2_mu) * LN2
                moved = tl.where(pi > 0, pi * (x - row_value), pi * 0.0)
        gradient = tl.where(log2_pi == -float("inf"), 0.0, slope * moved * over_t)
        gradient = tl.where(slope == 0, 0.0, gradient)
        tl.store(row_out + columns, gradient.to(out.dtype.element_ty), mask=columns < width)
