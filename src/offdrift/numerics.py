"""The few numerical rules that every file shares.

Log-ratios are float32 or better whatever the model's dtype; `exp` of a log-ratio happens in exactly
one function, with exactly one clamp; products of ratios are sums in log space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before `exp` (4.9e8 and 2.1e-9): the field's constant."""


def at_least_float32(x: Tensor) -> Tensor:
    """Upcast half precisions and integers to float32; leave float32 and float64 alone."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def clamped(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The log-ratio limited to +-20 nats. Gradient: to `log_ratio`, zero outside the limit."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """exp(log_ratio), safe for any finite log-ratio. Gradient: to `log_ratio`, zero beyond +-20.

    Example:
        >>> ratio(torch.tensor([0.0, 1e4]))
        tensor([1.0000e+00, 4.8517e+08])
    """
    return clamped(log_ratio).exp()


BLOCK = 2**16
"""Tokens per block on a CPU: temporaries of 256 KiB are reused in a core's cache. A temporary of a
whole batch is fresh memory each time, and touching it costs several times the arithmetic."""


def blocks(*tensors: Shaped[Tensor, " n"]) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in matching pieces that fit a core's cache; whole where that buys nothing."""
    if tensors[0].device.type != "cpu" or len(tensors[0]) <= BLOCK:
        yield tensors
    else:
        yield from zip(*(x.split(BLOCK) for x in tensors), strict=True)


def blockwise(function: Callable[[Tensor], Tensor], x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """An elementwise function of a long tensor without gradient, block by block."""
    parts = [function(block) for (block,) in blocks(x)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
