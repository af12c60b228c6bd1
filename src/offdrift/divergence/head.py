"""The output head of a language model: from hidden states to logits, some tokens of the vocabulary at a time.

Shape suffixes: n tokens, v vocabulary, d hidden size, c vocabulary chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from offdrift.errors import BadValueError, ShapeError
from offdrift.numerics import at_least_float32


def check_positive(**numbers: float | int | None) -> None:
    """Raise `BadValueError` unless each of these is None or positive and finite."""
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise BadValueError(f"{name} is {value}; it must be positive and finite")


@dataclass(frozen=True)
class Head:
    """An output head, from hidden states to logits.

        logits = soft_cap * tanh(scale * (h W^T + b) / soft_cap)

    In this order: product, bias, scale, cap. Each step is rounded to `round_to`, if given, as an
    engine rounds that runs in this dtype. -inf stays -inf through the cap. Float32 products follow
    torch's own settings: leave TF32 off where evidence is computed.

    Args:
        weight: one row per token; a tied head is the embedding matrix itself.
        bias: added to the product; -inf is a token that cannot be drawn (vocabulary padding).
        scale: multiplies the logits, > 0: Cohere's `logit_scale`, 1 / Granite's `logits_scaling`.
        soft_cap: bounds the logits, > 0: Gemma 2's `final_logit_softcapping`. None: no bound.
        round_to: the dtype of the engine's logits, before it upcasts them to sample. None: not
            rounded, products of bfloat16 numbers are summed and kept in float32.

    Example:
        >>> head = Head(torch.tensor([[1.0], [2.0], [3.0]]), scale=0.5, soft_cap=2.0)
        >>> head.scores(torch.tensor([[4.0]]), slice(1, 3))
        tensor([[1.9281, 1.9901]])
    """

    weight: Float[Tensor, "v d"]
    bias: Float[Tensor, " v"] | None = None
    scale: float | int = 1.0
    soft_cap: float | int | None = None
    round_to: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.weight.shape[0] == 0:
            raise ShapeError(
                f"weight has shape {tuple(self.weight.shape)}; a head needs [vocab, hidden size] "
                "with at least one token"
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ShapeError(
                f"bias has shape {tuple(self.bias.shape)}, weight has {tuple(self.weight.shape)}; "
                "give one bias per row of the weight"
            )
        check_positive(scale=self.scale, soft_cap=self.soft_cap)

    def scores(self, hidden: Float[Tensor, "n d"], rows: slice) -> Float[Tensor, "n c"]:
        """Logits of the tokens `rows` of the vocabulary, of states after the model's final norm: see the class.

        Returns: float32 or better. Gradient: none, it is evidence.
        """
        return self.shaped(self.products(hidden, rows))

    @torch.no_grad()
    def products(self, hidden: Float[Tensor, "n d"], rows: slice) -> Float[Tensor, "n c"]:
        """h W^T + b, of dtype `round_to` or float32 or better: what `shaped` makes scores of."""
        bias = None if self.bias is None else self.bias[rows]
        # Autocast would round the product behind the caller's back.
        with torch.autocast(hidden.device.type, enabled=False):
            return _product(hidden, self.weight[rows], bias, self.round_to)

    @torch.no_grad()
    def shaped(self, products: Float[Tensor, "*s"], *, upcast: bool = True) -> Float[Tensor, "*s"]:
        """Products scaled, capped and, if asked for, in float32 or better; works in place and takes the tensor."""
        if self.scale != 1.0:
            products *= self.scale
        if self.soft_cap is not None:
            masked = None if self.bias is None else products == -math.inf
            products.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
            if masked is not None:
                products.masked_fill_(masked, -math.inf)
        return at_least_float32(products) if upcast else products


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None, round_to: torch.dtype | None) -> Tensor:
    """h W^T + b, summed in float32 or better, in a new tensor of dtype `round_to` if given."""
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    if {x.dtype for x in operands} == {round_to} and _multiplies(round_to, hidden.device.type):
        return linear(hidden, weight, bias)
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    if hidden.is_cuda and hidden.dtype == weight.dtype != dtype and _WIDE_PRODUCTS:
        product = torch.mm(hidden, weight.T, out_dtype=dtype)
        product = product if bias is None else product.add_(bias)
    else:
        product = linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return product if round_to is None else product.to(round_to)


_WIDE_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()
"""Whether this torch (2.8 or later) gives float32 products of half-precision matrices on CUDA."""


@cache
def _multiplies(dtype: torch.dtype, device: str) -> bool:
    """Whether the device has instructions for products of this dtype that are summed in float32."""
    if device != "cpu" or dtype in (torch.float32, torch.float64):
        return True
    # Four to five times as fast as float32 where the processor has them; float16 is a third as fast.
    has_mkldnn = torch.backends.mkldnn.is_available()
    return dtype is torch.bfloat16 and has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
