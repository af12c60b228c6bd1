"""The GPU program for exact divergences from whole rows of logits: two sweeps over each row.

Imported by `kernels` alone, and only where Triton is. What follows was reasoned, and counted in the
machine code that Triton's compiler writes for sm_90 (`benchmarks/gpu_kl.py --count` counts again). None
of it was timed on a GPU.

Memory. A row of 151,936 bfloat16 scores is 297 KiB, twice that for both policies. No term is known
before both normalizers are, so a row is read twice: once from memory and, if it is still there, once
from the L2 cache (50 MiB on an H100). 132 programs, one per SM, have 77 MiB of rows in flight. The
second sweep runs backward and marks what it has read as the first to go, so that on average half of a
row must be kept: 38 MiB. Hence one program of 16 warps per SM, not two of 8, which would keep twice
that. Float32 scores are twice as large, and partly read twice from memory.

Instructions. The loops compile to 10 + 34.4 per entry of a bfloat16 row pair, 4 of them exponentials;
no register is spilled (98 of 128). 132 SMs of 128 lanes at 1.75 GHz issue 29.6e12 per second: at most
0.67e12 entries, 2.7 TB/s of bfloat16 scores counted once. An H100 reads 3.35 TB/s. So bfloat16 rows are
bound by instructions, float32 rows by memory, and nothing is in the loops that can be elsewhere: no
search for the largest score, no test for infinities. Rows that need either are swept again.
"""

from typing import no_type_check

import triton
import triton.language as tl

from offdrift.divergence.kernels_triton import (
    LN2,
    LOG2E,
    SERIES_BELOW,
    careful_tile,
    columns_of,
    expm1_minus,
    fields_of,
    load_scores,
    log2_prob,
    online_normalizer,
    row_of,
    two_numbers,
)

# Rows with a larger log pi - log mu are left to the careful sweep: beyond it, tokens whose mu
# underflows may still count in chi2.
QUICK_BELOW = tl.constexpr(32.0)
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
def exact_rows(
    scores_rollout,  # [n, v]
    scores,  # [n, v]
    tokens,  # [n], read only if HAS_TOKENS
    out,  # [13, n]: seven fields, two log-probs, high and low of both policies
    stride_rollout,
    stride,
    n,
    width,
    bits,  # log2(e) / temperature of the current policy
    LANES: tl.constexpr,
    R: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
):
    """Normalizers, then every sum, of one row of each policy.

    Weights are relative to the largest score of the first tile: any score of the row will do unless
    another is 88 nats above it, and searching for the largest would cost more than summing.
    The second sweep runs backward: what the first read last is what the L2 still holds.
    """
    tile: tl.constexpr = LANES * R
    row_mu = row_of(scores_rollout, stride_rollout)
    row_pi = row_of(scores, stride)
    tiles = width // tile
    rest = columns_of(tiles * tile, LANES, R)

    first = columns_of(0, LANES, R)
    ref_mu = tl.max(tl.max(load_scores(row_mu, first, width, True, False), 1), 0)
    ref_pi = tl.max(tl.max(load_scores(row_pi, first, width, True, False), 1), 0)
    ref_mu_bits = ref_mu * LOG2E
    ref_pi_bits = ref_pi * bits
    total_mu = tl.zeros([LANES, R], tl.float32)
    total_pi = tl.zeros([LANES, R], tl.float32)
    for i in tl.range(0, tiles, loop_unroll_factor=4):
        columns = columns_of(i * tile, LANES, R)
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
    for i in tl.range(0, tiles):
        columns = columns_of((tiles - 1 - i) * tile, LANES, R)
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

    out += tl.program_id(0)
    # One policy's NaN makes every field NaN, also those that the other alone would decide.
    nan_or_0 = fields[2] * 0.0
    for i in tl.static_range(7):
        field = fields[i] + nan_or_0
        if i == 2:  # rounding may not leave [0, 1], nor make an entropy negative
            field = tl.minimum(field, 1.0, propagate_nan=tl.PropagateNan.ALL)
        if i == 4 or i == 5:
            field = tl.maximum(field, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + i * n, field)
    if HAS_TOKENS:
        token = tl.load(tokens + tl.program_id(0))
        logp_mu = _token_log_prob(row_mu, token, width, high_mu, low_mu, LOG2E)
        logp_pi = _token_log_prob(row_pi, token, width, high_pi, low_pi, bits)
        tl.store(out + 7 * n, logp_mu + nan_or_0)
        tl.store(out + 8 * n, logp_pi + nan_or_0)
    tl.store(out + 9 * n, high_mu)
    tl.store(out + 10 * n, low_mu)
    tl.store(out + 11 * n, high_pi)
    tl.store(out + 12 * n, low_pi)
