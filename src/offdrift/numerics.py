"""The few numerical rules that every file shares.

Log-ratios are float32 or better whatever the model's dtype; products of ratios are sums in log space.
An `exp` of a log-ratio that is shown, or that a loss is multiplied by, is guarded by one clamp
(`ratio`). A sum of ratios that divides another, or is divided, is never clamped: it is kept as its
logarithm (`log_sums`), and such logarithms of parts are joined by `logaddexp`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack

from offdrift.errors import BadValueError

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before `exp` (4.9e8 and 2.1e-9): the field's constant."""


def check_tensor(name: str, x: Any, *, integers: bool = False) -> None:
    """Raise `BadValueError` unless `x` is a tensor of real numbers (of integers, if asked for)."""
    if not isinstance(x, Tensor):
        raise BadValueError(
            f"{name} is {'None' if x is None else 'a ' + type(x).__name__}, not a tensor; give "
            f"{'one' if x is None else 'torch.as_tensor(x)'}"
        )
    if x.is_complex() or (integers and (x.is_floating_point() or x.dtype == torch.bool)):
        kind = "integers" if integers else "real numbers"
        raise BadValueError(f"{name} holds {x.dtype}, not {kind}; convert it with .to(...)")


def tensor_of(name: str, x: Any) -> Tensor:
    """Return a sequence or an array of numbers as a tensor; memory is shared where torch can.

    Raises: `BadValueError` naming the field, for texts, missing values, rows of unequal length and numbers too large.

    Example:
        >>> tensor_of("rewards", ["a", 1.0])
        Traceback (most recent call last):
        offdrift.errors.BadValueError: rewards ['a', 1.0] are not numbers; give a number for each
    """
    try:
        if isinstance(x, np.ndarray):
            x = x.copy() if any(step < 0 for step in x.strides) else x  # a[::-1], which torch cannot share
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError, OverflowError) as e:
        excerpt = repr(x[:4] if isinstance(x, list | tuple) else x)[:80]
        raise BadValueError(f"{name} {excerpt} are not numbers; give a number for each") from e


def transformed() -> bool:
    """Whether a transformation of `torch.func` is at work: what it makes dies with it."""
    return peek_interpreter_stack() is not None


def concrete(x: Tensor) -> Tensor:
    """Return the numbers of a tensor that `torch.func` has wrapped, of all mapped batches; the tensor itself otherwise.

    Checks read these: `vmap` does not let one batch at a time be taken to the host. Gradient: none.
    """
    x = x.detach()
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


class cached(cached_property):
    """`cached_property` of tensors, which keeps nothing that a `torch.func` transformation made."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None and transformed():
            return self.func(instance)
        return super().__get__(instance, owner)


def at_least_float32(x: Tensor) -> Tensor:
    """Upcast half precisions and integers to float32; leave float32 and float64 alone."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def clamped(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The log-ratio limited to +-20 nats. Gradient: to `log_ratio`, zero outside the limit."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def largest_of(x: Float[Tensor, "*s n"]) -> Float[Tensor, "*s"]:
    """The maximum of each row; -inf of nothing, so that maxima of pieces combine. Gradient: to the maximum."""
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)


def totals(*terms: Float[Tensor, "*s n"] | tuple[Float[Tensor, "*s n"], Float[Tensor, "*s n"]]) -> Tensor:
    """The sum of each term over its last dimension, a pair standing for its product: float64, `[*s, terms]`.

    On a CPU a sum each, which makes no copy of a term; on an accelerator one sum of all of them, which is two launches
    in place of one for each. Gradient: none is meant to be taken.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> totals(x, (x, x))
        tensor([3., 5.], dtype=torch.float64)
    """
    pairs = [term if isinstance(term, tuple) else (term,) for term in terms]
    if all(x.is_cpu and x.ndim == 1 for pair in pairs for x in pair):
        return torch.stack([torch.dot(*pair) if len(pair) == 2 else pair[0].sum() for pair in pairs]).double()
    return torch.stack([pair[0] * pair[1] if len(pair) == 2 else pair[0] for pair in pairs], -2).sum(-1).double()


def vector_of(numbers: Iterable[Tensor | float], like: Tensor) -> Float[Tensor, " n"]:
    """Numbers, tensors or not, as a float64 vector on the device of `like`: a conversion for each dtype, not for each.

    Example:
        >>> vector_of([torch.tensor(2), 0.5, torch.tensor(1.5)], torch.zeros(1))
        tensor([2.0000, 0.5000, 1.5000], dtype=torch.float64)
    """
    tensors = [x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in numbers]
    tensors = [x.to(like.device) for x in tensors]
    if not tensors:
        return like.new_zeros(0, dtype=torch.float64)
    if len(tensors) < 4 or transformed():
        return torch.stack([x.double() for x in tensors])
    # As long as the dtypes stay together there is nothing to put back in order.
    parts = [torch.stack(list(x)).double() for _, x in itertools.groupby(tensors, key=lambda x: x.dtype)]
    return torch.cat(parts)


_sharing: ContextVar[bool] = ContextVar("_sharing", default=False)


@contextlib.contextmanager
def shared_ratios() -> Iterator[None]:
    """Compute the log-ratios of a batch, and their exponentials, once for all methods that read it without gradient.

    For a replay of many methods: `ratios.log_ratio` gives all of them one tensor, which nobody may write into.
    """
    token = _sharing.set(True)
    try:
        yield
    finally:
        _sharing.reset(token)


def sharing() -> bool:
    """Whether results are shared: within `shared_ratios`, without gradient."""
    return _sharing.get() and not torch.is_grad_enabled()


def share(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The log-ratio, marked so that `ratio` of it is computed once, where results are shared."""
    if sharing() and not hasattr(log_ratio, RATIO):
        setattr(log_ratio, RATIO, None)  # an attribute lives as long as the tensor
    return log_ratio


RATIO = "_offdrift_ratio"
"""Attribute of a shared log-ratio: its ratio, or None until the first `ratio` of it."""


def ratio(log_ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """exp(log_ratio), safe for any finite log-ratio. Gradient: to `log_ratio`, zero beyond +-20.

    Example:
        >>> ratio(torch.tensor([0.0, 1e4]))
        tensor([1.0000e+00, 4.8517e+08])
    """
    if not sharing() or not hasattr(log_ratio, RATIO):
        return clamped(log_ratio).exp()
    if getattr(log_ratio, RATIO) is None:
        setattr(log_ratio, RATIO, clamped(log_ratio).exp())
    return getattr(log_ratio, RATIO)


def log_sums(log_ratio: Float[Tensor, "*s n"]) -> Float[Tensor, "*s 2"]:
    """Logs of the sum of e^l and of the sum of e^2l of each row, float64, at any size of l; -inf for no numbers.

    The largest l is taken out of both. A constant added to every l is added to the first and twice
    to the second, so that what is made of both (an effective sample size) does not see it. Gradient:
    none is meant to be taken.

    Example:
        >>> log_sums(torch.tensor([-5000.0, -5000.0]))  # log 2 is 0.6931
        tensor([-4999.3069, -9999.3069], dtype=torch.float64)
    """
    if not log_ratio.shape[-1]:
        return log_ratio.new_full((*log_ratio.shape[:-1], 2), -torch.inf, dtype=torch.float64)
    # A lower end keeps -inf - -inf from arising where every l is -inf.
    top = log_ratio.amax(-1).clamp(min=torch.finfo(log_ratio.dtype).min)
    scaled = (log_ratio - top[..., None]).exp_()
    top = top.double()
    return totals(scaled, (scaled, scaled)).log() + torch.stack([top, 2 * top], -1)


NEAR = 4.0
"""Nats of |l| up to which e^l is 1 plus the excess, which is summed anyway, and no other exponential is taken: float32
holds the excess to 3e-8 of 1, and so e^l to 2e-6 of itself at l = -4."""

BLOCK = 2**16
"""Tokens per block on a CPU: temporaries of 256 KiB are reused in a core's cache. A temporary of a
whole batch is fresh memory each time, and touching it costs several times the arithmetic."""
PASS = 2 * BLOCK
"""Tokens per block of a pass of some thirty calls, which cost a quarter of the arithmetic on half as many. Twice as
many again would gain little, and float32 sums of squares lose with the length of a block: 4e-6 of them now."""


def blocks(*tensors: Shaped[Tensor, " n"], size: int = BLOCK) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in matching pieces that fit a core's cache; whole where that buys nothing.

    Args:
        size: tokens of a piece; more of them where many calls on each cost as much as their arithmetic.
    """
    if tensors[0].device.type != "cpu" or len(tensors[0]) <= size:
        yield tensors
    else:
        yield from zip(*(x.split(size) for x in tensors), strict=True)


def blockwise(function: Callable[[Tensor], Tensor], x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """An elementwise function of a long tensor without gradient, block by block."""
    parts = [function(block) for (block,) in blocks(x)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# Compiled passes: `compiled.passes`, which is imported where they are asked for.


_asked: ContextVar[bool | None] = ContextVar("_asked", default=None)


@contextlib.contextmanager
def compiled_passes(on: bool = True) -> Iterator[None]:
    """Ask for compiled code, or refuse it, within a block; overrules `OFFDRIFT_COMPILE`.

    That is passes over packed tokens, and exact divergences of any size (of large inputs they compile unasked).

    Numbers agree with the plain ways to rounding, and do not depend on the number of threads.

    Example:
        >>> with compiled_passes(False):
        ...     asked()
        False
    """
    token = _asked.set(on)
    try:
        yield
    finally:
        _asked.reset(token)


def asked(*, unasked: bool = False) -> bool:
    """Whether the user wants compiled passes here; `unasked` is the answer where the user has said nothing."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False
    choice = _asked.get()
    if choice is None:
        choice = {"1": True, "0": False}.get(os.environ.get("OFFDRIFT_COMPILE", ""))
    return unasked if choice is None else choice


# Sums that are the same to the last bit on any machine.


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch with one thread: sums of a thread each, added up, round by how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
