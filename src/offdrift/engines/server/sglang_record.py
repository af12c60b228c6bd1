"""Records of SGLang of a draw besides its log-probs, as its releases from 0.5.23 on say it in `meta_info`.

    mask      `output_token_sampling_mask`, ids per token, with the log-probs on it, `output_token_sampling_logprobs`
    experts   `routed_experts`, base64 of int32, [prompt and response but the last token, layers, k] without a header
    states    `hidden_states`, the input of the output head: of the prompt's places, then of each decoding step

A server has each of them only if it was started so; what it offers stands in its `/get_server_info`. No SGLang runs on
the machines that test this: the reader is held against answers in that form.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import EvidenceKind


@dataclass(frozen=True)
class Offers:
    """Records that a server was started to return."""

    mask_tokens: int = 0
    """Largest top-k of a request whose masks it returns (`--sampling-mask-max-tokens`); 0: it returns none."""
    experts: bool = False
    """`--enable-return-routed-experts`."""
    states: bool = False
    """`--enable-return-hidden-states`, or `--return-hidden-states-mode full`."""


def offers(info: Mapping[str, Any]) -> Offers:
    """Read `/get_server_info` as untrusted text.

    Example:
        >>> offers({"sampling_mask_max_tokens": 64, "enable_return_routed_experts": True})
        Offers(mask_tokens=64, experts=True, states=False)
    """
    most = info.get("sampling_mask_max_tokens")
    return Offers(
        most if type(most) is int and most > 0 and not info.get("speculative_algorithm") else 0,
        experts=info.get("enable_return_routed_experts") is True,
        states=info.get("return_hidden_states_mode") == "full" or info.get("enable_return_hidden_states") is True,
    )


@dataclass
class Recording:
    """Requests for records with each draw, and facts of the model that reading the answer takes."""

    offered: Offers
    experts_per_token: int | None = None
    """k of the model's routers; the server encodes experts without their shape."""
    head: Callable[[], Head] | None = None
    """Makes the output head of the weights that the server holds, in float32."""
    dtype: str = "float32"
    _head: Head | None = None

    def masks(self, sampling: Sampling) -> bool:
        """Whether the sampling mask of such a draw is returned: its top-k is finite, and within the server's limit."""
        return sampling.filtered and 1 <= sampling.top_k <= self.offered.mask_tokens

    def without_masks(self) -> Recording:
        """A copy that asks for no masks."""
        return replace(self, offered=replace(self.offered, mask_tokens=0))

    @property
    def routes(self) -> bool:
        """Whether experts are returned and can be read."""
        return self.offered.experts and bool(self.experts_per_token)

    @property
    def states(self) -> bool:
        """Whether hidden states are returned and stand for distributions."""
        return self.offered.states and self.head is not None

    def asked(self, sampling: Sampling, evidence: EvidenceKind) -> dict[str, Any]:
        """Fields of a request beside those of `dialects.request`."""
        fields = {
            "return_sampling_mask": self.masks(sampling),
            "return_routed_experts": self.routes,
            "return_hidden_states": evidence == "hidden",
        }
        return {name: True for name, asked in fields.items() if asked}

    def served_head(self) -> Head:
        """The output head in the server's dtype, as it multiplies."""
        if self._head is None:
            assert self.head is not None
            head, dtype = self.head(), getattr(torch, self.dtype)
            bias = None if head.bias is None else head.bias.to(dtype)
            rounding = None if dtype == torch.float32 else dtype
            self._head = replace(head, weight=head.weight.to(dtype), bias=bias, round_to=rounding)
        return self._head


def renormalized(listed: Any, mask: Sequence[Sequence[Any]], tokens: Sequence[Any]) -> list[Any]:
    """Log-probs of the drawn tokens on their mask, one number per token or one per token of the mask.

    Raises: `EngineError` if they are about other tokens.
    """
    if not isinstance(listed, list) or not len(listed) == len(mask) == len(tokens):
        raise EngineError("the server's answer cannot be used: its sampling mask is about other tokens")
    logp = []
    for row, ids, token in zip(listed, mask, tokens, strict=True):
        if isinstance(row, list):
            if not isinstance(ids, list) or len(row) != len(ids) or token not in ids:
                raise EngineError("the server's answer cannot be used: a sampling mask leaves out the drawn token")
            row = row[ids.index(token)]
        logp.append(row)
    return logp


def on_mask(
    top: Sequence[Sequence[tuple[Any, Any]]], mask: Sequence[Sequence[Any]], shift: Sequence[float]
) -> list[list[tuple[Any, Any]]]:
    """Likeliest tokens before the filters as those behind them: log mu = log p - shift on the mask, else no mass.

    Args:
        shift: log of the mass that each mask holds, nats.
    """
    rows = []
    for row, ids, moved in zip(top, mask, shift, strict=True):
        inside = set(ids)
        rows.append(
            [(t, min(x - moved, 0.0) if t in inside else -9999.0) for t, x in row if isinstance(x, float | int)]
        )
    return rows


def read_flat_experts(encoded: Any, positions: int, k: int) -> Integer[Tensor, "p layers k"]:
    """Experts of so many positions from base64 of int32; int64. Raises: `EngineError` if they do not fill them."""
    try:
        content = base64.b64decode(encoded, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise EngineError(f"routed_experts cannot be read: {str(error)[:200]}") from error
    if not content or len(content) % (4 * positions * k):
        raise EngineError(
            f"routed_experts has {len(content)} bytes, no whole layers of {positions} positions with {k} experts each"
        )
    routes = np.frombuffer(content, dtype="<i4").reshape(positions, -1, k)
    if int(routes.min()) < 0:
        raise EngineError("routed_experts holds a negative number")
    return torch.from_numpy(routes.astype(np.int64))


def read_states(listed: Any, tokens: int, width: int, dtype: torch.dtype) -> Float[Tensor, "n d"]:
    """The states that response tokens were drawn from: the prompt's last, then one per decoding step.

    Raises: `EngineError` if there are fewer than tokens, or of another width than the head.
    """
    if not isinstance(listed, list) or len(listed) < tokens:
        count = len(listed) if isinstance(listed, list) else "no list of"
        raise EngineError(f"hidden_states has {count} steps for {tokens} response tokens")
    rows = []
    for step in listed[:tokens]:
        row = step
        while isinstance(row, list) and row and isinstance(row[-1], list):
            row = row[-1]
        if not isinstance(row, list) or len(row) != width or not all(type(x) in (float, int) for x in row):
            raise EngineError(f"hidden_states[{len(rows)}] is no list of {width} numbers, as the output head reads")
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float32).to(dtype)
