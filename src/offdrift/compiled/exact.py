"""Exact divergences of two policies by `exact.cpp`, and their gradients: each row of scores is read once from memory.

Same numbers as `divergence.exact.definition` to rounding, for any row, on CPU tensors of float32 or half precision. The
sums of a row are joined in float64 in an order that the row alone decides: no bit depends on the number of threads,
nor on the other rows. Beyond the results each thread holds two rows of float32 (with TV) and 16 KiB.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.compiled.build import library
from offdrift.compiled.calls import call, in_memory

Loss = Literal["kl_rollout_current", "kl_current_rollout", "entropy"]
"""What has a gradient, in the order of `exact.cpp`."""

FIELDS = 9
"""Of `divergence.exact.ExactDivergences`."""

NORMALIZERS = 4
"""Of both policies: log p = (score - high) / temperature - low."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of scores, in the order of `exact.cpp`."""

THREADS_FROM = 2**18
"""Entries from which threads are worth starting."""


def divergences(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"] | None,
    temperature: float | int,
    *,
    tv: bool = True,
) -> tuple[Float[Tensor, "9 n"], Float[Tensor, "4 n"]] | None:
    """Every field of every row, float32, and the log-normalizers of both policies, float64, for `gradient`.

    Args: as `divergence.fused.exact_divergences`, which checks them; rows may lie apart in memory.

    Returns: None where there is no library, or not for such tensors. Without tokens, or TV, NaN in their places.
    """
    given = (logits_rollout, logits) if tokens is None else (logits_rollout, logits, tokens)
    if not in_memory(*given) or not {logits_rollout.dtype, logits.dtype} <= set(DTYPES):
        return None
    if (kernels := library("exact")) is None:
        return None
    n = len(logits)
    fields, normalizers = torch.empty(FIELDS, n), torch.empty(NORMALIZERS, n, dtype=torch.float64)
    ids = None if tokens is None else tokens.long().contiguous()
    both, facts = _rows(logits_rollout, logits, temperature)
    done = call(kernels.exact_rows, (*both, *facts, ids, int(tv), _threads(logits), fields, normalizers))
    return (fields, normalizers) if done else None


def gradient(
    of: Loss,
    upstream: Float[Tensor, " n"],
    value: Float[Tensor, " n"],
    policies: tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]],
    normalizers: Float[Tensor, "4 n"],
    *,
    temperature: float | int,
) -> Float[Tensor, "n v"]:
    """The gradient of one of the divergences with respect to the current policy's logits: as `kernels.gradient`.

    Args:
        upstream: the gradient of the loss with respect to the divergence of each token.
        value: the divergence.
        policies, temperature: both logits, as they were given to `divergences`.
        normalizers: what it returned.

    Returns: in the dtype of the current policy's logits.

    Raises: `MemoryError` if there is no room for two blocks of scores.
    """
    kernels = library("exact")
    assert kernels is not None, "normalizers come from the library"
    (_, logits), (both, facts) = policies, _rows(*policies, temperature)
    out = torch.empty(logits.shape, dtype=logits.dtype)
    of_rows = torch.stack([upstream.detach().double(), value.detach().double(), *normalizers])
    if not call(kernels.gradient_rows, (*both, *facts, get_args(Loss).index(of), of_rows, _threads(logits), out)):
        raise MemoryError("no room for the gradient of exact divergences")
    return out


def _rows(logits_rollout: Tensor, logits: Tensor, temperature: float | int) -> tuple[tuple[Tensor, ...], ...]:
    """Lay the entries of both policies side by side, and say what `exact.cpp` has to know about them."""
    both = [x.detach() if x.stride(1) == 1 else x.detach().contiguous() for x in (logits_rollout, logits)]
    shape = [*logits.shape, *(DTYPES.index(x.dtype) for x in both), *(x.stride(0) for x in both)]
    return tuple(both), (torch.tensor(shape), torch.tensor([temperature], dtype=torch.float64))


def _threads(logits: Tensor) -> int:
    return torch.get_num_threads() if logits.numel() >= THREADS_FROM else 1
