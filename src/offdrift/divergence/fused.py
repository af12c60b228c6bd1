"""Exact KL and TV without a `[tokens, vocab]` temporary: `exact`, in pieces that fit the cache.

One formula (`exact.kl_and_tv`), two ways to run it. Compiled, a few rows at a time go through one
generated kernel that keeps nothing but one number per row; plain, the same rows go through the
ordinary operators, whose temporaries then stay in the cache. Large inputs are compiled if a compiler
works, which is found out once, at the first large input; the numbers agree to rounding.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.divergence.exact import kl_and_tv
from offdrift.errors import BadValueError, ShapeError

COMPILE_FROM = 2**24
"""Entries of one input from which compiling (10 to 20 s, once per process and dtype) pays."""

COMPILED_CHUNK = 2**21
"""Entries per compiled call: 8 MiB of each input, read three times, stay in a last-level cache."""

PLAIN_CHUNK = {"cpu": 2**18}
"""Entries per plain call: temporaries of 1 MiB each stay in the cache of a core."""

PLAIN_CHUNK_ELSEWHERE = 2**23
"""The same on accelerators, where a call must be large enough to hide its launches."""

_broken: set[str] = set()
"""Device types on which compiling has failed in this process."""


@torch.no_grad()
def exact_divergences(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    *,
    temperature: float = 1.0,
    compiled: bool | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """KL(mu || pi) and TV(mu, pi) at every token, in bounded memory.

        KL = sum_a mu(a) log(mu(a) / pi(a))        TV = 1/2 sum_a |mu(a) - pi(a)|

    Zeros, infinities and rows that are no distribution behave as in `exact.kl_and_tv`. Beyond the
    two results: compiled, about a dozen numbers per token of a chunk; plain, about twelve temporaries
    of 1 to 2 MiB on a CPU (of two rows, if larger). Neither grows with `n`.

    Args:
        logits_rollout: scores of the rollout policy as it was sampled, logits or log-probs, any
            float dtype; -inf is a token it could not draw.
        logits: scores of the current policy, logits or log-probs, any float dtype.
        temperature: what the current policy's logits are divided by; the rollout policy's evidence
            already is what was sampled.
        compiled: None compiles large inputs where that works; True compiles and lets a failure
            through; False never compiles. `TORCH_COMPILE_DISABLE=1` means False.

    Returns: `(kl_rollout_current, tv)`: nats and [0, 1], float32 or better. Gradient: none.

    Raises:
        ShapeError: the two are not `[tokens, vocab]` of one shape, or the vocabulary is empty.
        BadValueError: a temperature that is not positive and finite.

    Example:
        >>> mu = torch.tensor([[0.5, 0.5, 0.0]]).log()
        >>> exact_divergences(mu, torch.tensor([[0.25, 0.5, 0.25]]).log())
        (tensor([0.3466]), tensor([0.2500]))

    Reference: Li et al., Trust Region Masking, arXiv:2512.23075v5, eq. 23 (KL) and
    Definition 2.2 (TV).
    """
    _check(logits_rollout, logits, temperature)
    # A tensor, so that one compiled kernel serves every temperature.
    scale = torch.tensor(temperature, dtype=torch.float32, device=logits.device)
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1" or compiled is False:
        return _plain(logits_rollout, logits, scale)
    if compiled:
        return _compiled(logits_rollout, logits, scale)
    device = logits.device.type
    if logits.numel() < COMPILE_FROM or len(logits) == 1 or device in _broken:
        return _plain(logits_rollout, logits, scale)
    try:
        return _compiled(logits_rollout, logits, scale)
    except Exception:
        # No compiler, or one that fails: whatever the reason, the plain path is right, only slower.
        _broken.add(device)
        return _plain(logits_rollout, logits, scale)


def _plain(logits_rollout: Tensor, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    chunk = PLAIN_CHUNK.get(logits.device.type, PLAIN_CHUNK_ELSEWHERE)
    return _by_rows(kl_and_tv, chunk, logits_rollout, logits, temperature)


def _compiled(logits_rollout: Tensor, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    return _by_rows(_kernel(), COMPILED_CHUNK, logits_rollout, logits, temperature)


@cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    """The compiled definition, for any shape; compiles at its first call for each dtype."""
    # The bare function: argument checkers that tests wrap around it cannot be compiled.
    return torch.compile(inspect.unwrap(kl_and_tv), dynamic=True, fullgraph=True)


def _by_rows(
    divergences: Callable[..., tuple[Tensor, Tensor]],
    chunk: int,
    logits_rollout: Tensor,
    logits: Tensor,
    temperature: Tensor,
) -> tuple[Tensor, Tensor]:
    """Row chunks of between one and two times `chunk` entries, and at least two rows if there are.

    Never a remainder of one row, for which the compiler would make a kernel of its own.
    """
    n, v = logits.shape
    pieces = max(1, n // max(2, chunk // v))
    chunks = zip(logits_rollout.tensor_split(pieces), logits.tensor_split(pieces), strict=True)
    # The compiler would specialize on whatever tensor a view is a view of: detach, and there is none.
    parts = [divergences(a.detach(), b.detach(), temperature) for a, b in chunks]
    return torch.cat([kl for kl, _ in parts]), torch.cat([tv for _, tv in parts])


def _check(logits_rollout: Tensor, logits: Tensor, temperature: float) -> None:
    if logits_rollout.shape != logits.shape or logits.ndim != 2 or logits.shape[1] == 0:
        raise ShapeError(
            f"logits_rollout has shape {tuple(logits_rollout.shape)}, logits has "
            f"{tuple(logits.shape)}; both must be [tokens, vocab] over the same tokens and the same "
            "vocabulary (cut padding entries off the larger one)"
        )
    if not 0 < temperature < float("inf"):
        raise BadValueError(
            f"temperature is {temperature}; the current policy's logits are divided by it, so give "
            "the positive number the rollouts were sampled at"
        )
