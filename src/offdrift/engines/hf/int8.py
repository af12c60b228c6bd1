"""Weights on an int8 grid: a coarser copy of a model, whose drift is real and whose cause is known."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

INT8_LEVELS = 127
"""Largest magnitude on the symmetric int8 grid."""


def int8_grid(weight: Float[Tensor, "*d"], *, dim: int) -> Float[Tensor, "*d"]:
    """The nearest weights on a symmetric int8 grid, one scale per output channel.

    round(w / s) s with s = max|w| / 127, the maximum taken over the input dimension `dim`.

    Gradient: none is meant to flow through it.

    Example:
        >>> int8_grid(torch.tensor([[1.27, 0.004], [0.0, 0.0]]), dim=-1)
        tensor([[1.2700, 0.0000],
                [0.0000, 0.0000]])
    """
    scale = weight.abs().amax(dim, keepdim=True) / INT8_LEVELS
    return (weight / scale.clamp(min=torch.finfo(weight.dtype).tiny)).round() * scale


def matrices(model: nn.Module) -> dict[str, int]:
    """Names of the weights that "int8" rounds, and the input dimension of each.

    Linear layers except the output head, and fused expert tensors `[experts, out, in]` (or
    `[experts, in, out]` where the module says that it is transposed).
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            found[f"{path}.weight"] = -1
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3 and "expert" in path:
                found[f"{path}.{name}"] = -2 if getattr(module, "is_transposed", False) else -1
    return found
