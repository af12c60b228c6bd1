"""GAC: a gradient without what it repeats of the last one."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from offdrift.errors import ShapeError


class Projected(NamedTuple):
    """A gradient without its excess of agreement with the last one, and how far they agreed."""

    grad: Float[Tensor, " p"]
    cosine: Float[Tensor, ""]


def gac_projection(
    grad: Float[Tensor, " p"], previous: Float[Tensor, " q"] | None, threshold: float = 0.3, strength: float = 1.0
) -> Projected:
    """Remove from a gradient what it repeats of the last one, if they agree too well.

        c = <g, p> / (|g| |p|);   where c > threshold:  g <- g - strength (<g, p> / |p|^2) p

    Opposed and zero gradients stay as they are. Call it before the norm is clipped. For a gradient in
    parts (layers, shards), add up the three products and use `gac_coefficient`.

    Unverified: best reading. Threshold and strength are this library's, and no step is skipped.

    Args:
        previous: the last step's gradient; None at the first step.
        threshold: cosine above which to project. On-policy, cosines are near 0.
        strength: share of the parallel part that is removed.

    Raises: `ShapeError` if the gradients have different sizes.

    Example:
        >>> import torch
        >>> gac_projection(torch.tensor([0.8, 0.6, 0.0]), torch.tensor([1.0, 0.0, 0.0]))
        Projected(grad=tensor([0.0000, 0.6000, 0.0000]), cosine=tensor(0.8000))

    Reference: GAC, arXiv:2603.01501.
    """
    if previous is None:
        return Projected(grad, grad.new_zeros(()))
    if previous.shape != grad.shape:
        raise ShapeError(f"grad has {len(grad)} entries, previous {len(previous)}")
    products = (grad @ previous, grad @ grad, previous @ previous)
    coefficient, cosine = gac_coefficient(*products, threshold=threshold, strength=strength)
    return Projected(grad - coefficient * previous, cosine)


def gac_coefficient(
    dot: Float[Tensor, ""],
    square: Float[Tensor, ""],
    previous_square: Float[Tensor, ""],
    *,
    threshold: float = 0.3,
    strength: float = 1.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Coefficient of the last gradient that `gac_projection` subtracts, and the cosine, from <g,p>, |g|^2, |p|^2.

    Example:
        >>> import torch
        >>> gac_coefficient(torch.tensor(0.8), torch.tensor(1.0), torch.tensor(1.0))
        (tensor(0.8000), tensor(0.8000))
    """
    present = (square > 0) & (previous_square > 0)
    norms = square.sqrt() * previous_square.sqrt()
    cosine = (dot / norms.where(present, 1.0)).where(present, 0.0)
    share = dot / previous_square.where(present, 1.0)
    return (strength * share).where(cosine > threshold, 0.0), cosine
