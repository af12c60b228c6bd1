"""The GPU programs for one vocabulary chunk of recomputed scores, and for gradients.

Imported by `kernels` alone, and only where Triton is.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from offdrift.divergence.kernels_triton import (
    LN2,
    LOG2E,
    careful_tile,
    columns_of,
    faded,
    fields_of,
    load_scores,
    log2_prob,
    online_normalizer,
    row_of,
    shaped,
    two_numbers,
)


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
    found = (zero, zero, zero, zero, zero, zero, zero)
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
        found = careful_tile(found, log2_mu, log2_pi)
    fields = fields_of(found[0], found[1], found[2], found[3], found[4], found[5], found[6])
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
    known = tl.load(value + i).to(tl.float32)
    high_mu = tl.load(normalizers + i)
    low_mu = tl.load(normalizers + n + i)
    high_pi = tl.load(normalizers + 2 * n + i)
    low_pi = tl.load(normalizers + 3 * n + i)
    if OF == "kl_current_rollout":  # no limit where pi draws what mu cannot
        known = tl.where(known == float("inf"), float("nan"), known)
    for start in tl.range(0, width, LANES * R):
        columns = columns_of(start, LANES, R)
        log2_pi = log2_prob(load_scores(row_pi, columns, width, True, True), high_pi, low_pi, bits)
        pi = tl.exp2(log2_pi)
        if OF == "entropy":
            moved = tl.where(pi > 0, -pi * tl.fma(log2_pi, LN2, known), pi * 0.0)
        else:
            log2_mu = log2_prob(load_scores(row_mu, columns, width, True, True), high_mu, low_mu, LOG2E)
            if OF == "kl_rollout_current":
                moved = pi - tl.exp2(log2_mu)
            else:
                x = (log2_pi - log2_mu) * LN2
                moved = tl.where(pi > 0, pi * (x - known), pi * 0.0)
        gradient = tl.where(log2_pi == -float("inf"), 0.0, slope * moved * over_t)
        gradient = tl.where(slope == 0, 0.0, gradient)
        tl.store(row_out + columns, gradient.to(out.dtype.element_ty), mask=columns < width)
