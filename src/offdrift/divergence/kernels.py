"""Exact divergences on a GPU, in Triton: from logits, their gradients, and chunk by chunk.

Same numbers as `exact.definition` to rounding, and no `[tokens, vocab]` tensor but the gradient that
is asked for. The programs are in `kernels_triton`, which is imported at the first call; without Triton
`available` says False and nothing else here works. `TRITON_INTERPRET=1`, set before that, runs the
programs on CPU tensors, slowly, for tests. Timed on an H200 by `benchmarks/one_sweep.py` and `gpu.py`; the numbers
are in `benchmarks/results/`.

Shape suffixes: n tokens, v vocabulary, c vocabulary chunk.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.divergence.exact import ExactDivergences
from offdrift.divergence.head import Head
from offdrift.errors import BadValueError, ShapeError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels read. Float64 is for the plain way, which keeps its digits."""

VECTOR = 16
"""Bytes that one thread loads at once; tiles give each thread that much of a row."""

WARPS = {2: 8, 4: 16}
"""The most warps per program, by bytes of a score: see `kernels_triton`."""


class Sweep(NamedTuple):
    """Launch shape of `one_sweep_rows`."""

    warps: int
    """The most per program."""
    unroll: int
    """Tiles of a block."""
    wide: bool = True
    """Whether the sweep is for any log-ratio, or by a polynomial for those below 3/4: 26 instructions in place of 30.
    The first eighth of a row tells whether that begins; a row that has larger ones later is swept again."""
    words: int = 4
    """That a thread loads at once: scores, or pairs of bfloat16 scores."""
    registers: int | None = None
    """The most per thread."""


SWEEP = Sweep(warps=4, unroll=8, wide=False, words=2, registers=56)
"""See `kernels_triton`."""

FINISHED_TOGETHER = 128
"""Rows of one program of `finish_rows`."""

FINISHING_WARPS = 4
"""Warps of one program of it."""

AGAIN = (4, 8)
"""Entries that a thread of `exact_rows` reads at once, and the most warps: with more, an SM had one program."""

SWEPT_AGAIN = 1024
"""Programs that look for rows to sweep again: a few for each SM, so that they share the work if all rows need it."""

# The compiler's own default differs between versions of Triton.
OPTIONS = {"enable_fp_fusion": False}


class Normalizers(NamedTuple):
    """log Z of both policies in two numbers each, bits: log2 p = (score - high) log2(e) / T - low."""

    high_rollout: Float[Tensor, " n"]
    low_rollout: Float[Tensor, " n"]
    high: Float[Tensor, " n"]
    low: Float[Tensor, " n"]


def available(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether the kernels run on tensors of this device and these dtypes.

    True on GPUs from Ampere on, where Triton is installed, and on CPUs if `TRITON_INTERPRET=1`.
    """
    if not set(dtypes) <= set(DTYPES) or importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


@torch.no_grad()
def with_normalizers(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"] | None = None,
    temperature: float | int = 1.0,
    *,
    tv: bool = True,
) -> tuple[ExactDivergences, Normalizers]:
    """Every exact divergence of every row, the numbers of `exact.definition`, and what `gradient` needs to know.

    All but TV come from one sweep over each row pair, relative to the scores of the drawn token; TV is a second sweep
    with the normalizers of the first. Rows for which that is too coarse (a token that only one policy can draw, a ratio
    beyond e^8, a reference that neither policy is likely to draw) are swept again with more care; the host does not
    wait to know which.

    Args: as `fused.exact_divergences`, which checks them; rows may lie apart in memory. With `tv=False` the field
        `tv` is NaN.

    Returns: float32. Gradient: none. Raises: `BadValueError` for a dtype that is not in `DTYPES`.
    """
    from offdrift.divergence.kernels_triton import finish_rows, one_sweep_rows

    both = (_readable(logits_rollout), _readable(logits))
    n, v = logits.shape
    sums, out = torch.empty(14, n, device=logits.device), torch.empty(13, n, device=logits.device)
    again = torch.empty(n, dtype=torch.int32, device=logits.device)
    drawn = out if tokens is None else tokens.contiguous()
    strides = (both[0].stride(0), both[1].stride(0))
    bits, has_tokens = _bits(temperature), tokens is not None
    sweep, finish = cast("Any", one_sweep_rows), cast("Any", finish_rows)
    if n > 0:
        packed = _packs(both)
        warps = _warps(v, 2 * SWEEP.words if packed else SWEEP.words, SWEEP.warps)
        with torch.cuda.device_of(both[0]):
            sweep[(n,)](
                *(*both, drawn, sums, *strides, n, v, -1 / temperature),
                *(32 * warps, SWEEP.words, has_tokens, tv, packed, SWEEP.unroll, SWEEP.wide),
                num_warps=warps,
                maxnreg=SWEEP.registers,
                **OPTIONS,
            )
            finish[(math.ceil(n / FINISHED_TOGETHER),)](
                *(sums, drawn, out, again, n, v, bits, 1 / temperature, has_tokens, tv, FINISHED_TOGETHER),
                num_warps=FINISHING_WARPS,
                **OPTIONS,
            )
        sweep_again(again, both, tokens, temperature, out)
    token_logps = (None, None) if tokens is None else out[7:9]
    fields = ExactDivergences(*out[:7], *token_logps)
    return fields if tv else fields._replace(tv=torch.full_like(out[2], math.nan)), Normalizers(*out[9:])


@torch.no_grad()
def sweep_again(
    again: Int[Tensor, " n"],
    both: tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]],
    tokens: Int[Tensor, " n"] | None,
    temperature: float | int,
    out: Float[Tensor, "13 n"],
) -> None:
    """All numbers of the rows whose flag in `again` is not 0, by two sweeps or three, whatever is in them.

    Args:
        both: scores of the rollout and of the current policy, as `with_normalizers` reads them.
        out: what is written: seven fields, two log-probs if there are tokens, four normalizers.
    """
    from offdrift.divergence.kernels_triton import exact_rows

    n, v = both[0].shape
    if n == 0:
        return
    each = math.ceil(n / SWEPT_AGAIN)
    drawn = out if tokens is None else tokens.contiguous()
    arguments = (*both, drawn, out, both[0].stride(0), both[1].stride(0), n, v, _bits(temperature), each)
    programs = math.ceil(n / each)
    _launch(exact_rows, both, again, *arguments, programs=programs, most=AGAIN, HAS_TOKENS=tokens is not None)


def _packs(both: tuple[Tensor, ...]) -> bool:
    """Whether two bfloat16 scores of each row can be read as one word of 32 bits."""
    return all(
        x.dtype is torch.bfloat16 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0 and x.shape[1] > 1 for x in both
    )


@torch.no_grad()
def gradient(
    of: Literal["kl_rollout_current", "kl_current_rollout", "entropy"],
    upstream: Float[Tensor, " n"],
    value: Float[Tensor, " n"],
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    normalizers: Normalizers,
    temperature: float | int = 1.0,
) -> Float[Tensor, "n v"]:
    """The gradient of one of the exact divergences, times `upstream`, in the dtype of `logits`.

        kl_rollout_current    upstream (pi - mu) / temperature
        kl_current_rollout    upstream pi (log pi - log mu - KL) / temperature; NaN where the KL is infinite
        entropy               -upstream pi (log pi + H) / temperature

    Args:
        upstream: the gradient of the loss with respect to the divergence of each token.
        value: the divergence.
        logits_rollout, logits, temperature: as they were given to `with_normalizers`; the entropy does
            not read the first.
        normalizers: what it returned.

    Returns: 0 where a logit is -inf and where upstream is 0.
    """
    from offdrift.divergence.kernels_triton import gradient_rows

    both = (_readable(logits_rollout), _readable(logits))
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _launch(
        gradient_rows,
        both,
        *(upstream.contiguous(), value.contiguous(), *both, torch.stack(normalizers), out),
        *(both[0].stride(0), both[1].stride(0), *out.shape),
        *(1 / temperature, _bits(temperature)),
        OF=of,
    )
    return out


@torch.no_grad()
def update_normalizer(
    top: Float[Tensor, " n"],
    total: Float[Tensor, " n"],
    scores: Float[Tensor, "n c"],
    temperature: float | int,
    head: Head,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The largest score so far and sum e^((score - top) / temperature), with one more chunk.

    Args:
        top: before the first chunk -inf, or the lowest finite number.
        total: before the first chunk 0; of any float dtype, in which the chunks meet.
        scores: the chunk, as `head.products` are.

    Returns: the new top and total, in the dtypes of the old.
    """
    from offdrift.divergence.kernels_triton import dtype_of, update_rows

    scores = _readable(scores)
    new_top, new_total = torch.empty_like(top), torch.empty_like(total)
    _launch(
        update_rows,
        (scores,),
        scores,
        *(top.contiguous(), total.contiguous(), new_top, new_total),
        *(scores.stride(0), scores.shape[1], _bits(temperature)),
        *(head.scale, head.soft_cap or 1.0),
        CAPPED=head.soft_cap is not None,
        ROUND=dtype_of(head.round_to),
    )
    return new_top, new_total


@torch.no_grad()
def accumulate(
    sums: Float[Tensor, "7 n"],
    scores: tuple[Float[Tensor, "n c"], Float[Tensor, "n c"]],
    normalizers: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    temperatures: tuple[float | int, float | int],
    heads: tuple[Head, Head],
) -> Float[Tensor, "7 n"]:
    """The first seven fields of `ExactDivergences`, with one more chunk of both policies' scores.

    Args:
        sums: so far, float32 or better. TV may end above 1, by rounding.
        scores: the same chunk of the rollout and of the current policy, as `Head.products` are.
        normalizers: the final (top, total) of each, from `update_normalizer` over all chunks.

    Returns: new sums. NaN for a policy that is no distribution, though not in every field.
    """
    from offdrift.divergence.kernels_triton import accumulate_rows, dtype_of

    both = (_readable(scores[0]), _readable(scores[1]))
    out = torch.empty_like(sums := sums.contiguous())
    _launch(
        accumulate_rows,
        both,
        *both,
        *(x.contiguous() for normalizer in normalizers for x in normalizer),
        *(sums, out),
        *(x.stride(0) for x in both),
        *both[0].shape,
        *(_bits(t) for t in temperatures),
        *(head.scale for head in heads),
        *(head.soft_cap or 1.0 for head in heads),
        CAPPED_ROLLOUT=heads[0].soft_cap is not None,
        CAPPED=heads[1].soft_cap is not None,
        ROUND_ROLLOUT=dtype_of(heads[0].round_to),
        ROUND=dtype_of(heads[1].round_to),
    )
    return out


def _launch(
    kernel: Any,
    rows: tuple[Tensor, ...],
    *arguments: Any,
    programs: int | None = None,
    most: tuple[int, int] | None = None,
    **constants: Any,
) -> None:
    """One program per row, or so many in all, with tiles that fit the row, its dtype and what most says.

    The tiles have at most that many entries for a thread, and the program that many warps.
    """
    n, width = rows[0].shape
    if n == 0:
        return
    size = min(x.element_size() for x in rows)
    r, warps = most or (VECTOR // size, WARPS[size])
    warps = _warps(width, r, warps)
    grid = (n if programs is None else programs,)
    with torch.cuda.device_of(rows[0]):
        kernel[grid](*arguments, LANES=32 * warps, R=r, num_warps=warps, **constants, **OPTIONS)


def _warps(width: int, r: int, most: int) -> int:
    """Warps of a program whose threads read r entries at once: no more than the row has work for."""
    return max(1, min(most, 2 ** round(math.log2(max(1, width / (32 * r))))))


def _readable(rows: Tensor) -> Tensor:
    """Rows whose entries lie side by side, in a dtype that the kernels read."""
    if rows.dtype not in DTYPES:
        raise BadValueError(
            f"the dtype is {rows.dtype}; the GPU kernels read {', '.join(map(str, DTYPES))}: "
            "ask `available(device, dtype)` first, and take the plain way for others"
        )
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ShapeError(f"scores have shape {tuple(rows.shape)}; give [tokens, vocab], vocab > 0")
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _bits(temperature: float | int) -> float:
    return math.log2(math.e) / temperature
