"""Forced decoding on a vLLM server through its own plugin: `--logits-processors offdrift.engines.vllm.forced:Forced`.

vLLM takes the log-probs that it reports before logits processors run (`--logprobs-mode raw_logprobs`, its default). So
a processor that leaves one token over decides what is drawn, and the reported log-prob is still the model's: computed
token by token, from the cache, with the kernels and the batch of any other request. Nothing of vLLM is changed. vLLM's
second model runner, which takes no such plugins, has its own way (`--enable-trace-replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.engines.vllm.taps import IMPOSED

if TYPE_CHECKING:
    Forced: type
    """The plugin; a class of vLLM's, so that it exists only where vLLM does."""

PLUGIN = f"{__name__}:Forced"
"""Name of the plugin on vLLM's command line."""


def leave_only(forced: Sequence[int], drawn: Sequence[int], logits: Float[Tensor, " v"]) -> Float[Tensor, " v"]:
    """Logits from which only the next forced token can be drawn: 0 for it, -inf for all others.

    Args:
        forced: tokens of the whole response.
        drawn: tokens of the response so far.

    A token beyond the vocabulary forces nothing, as an error here would end the server; who asked sees other tokens.
    """
    token = forced[min(len(drawn), len(forced) - 1)]
    if not 0 <= token < len(logits):
        return logits
    return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor(token, device=logits.device), 0.0)


def forced_tokens(extra_args: dict[str, Any] | None) -> list[int] | None:
    """Tokens that a request asks to be led along; None if it asks for none.

    Raises: `ValueError`, which vLLM answers with status 400, for anything but a list of token ids.
    """
    tokens = (extra_args or {}).get(IMPOSED)
    if tokens is None:
        return None
    if not (isinstance(tokens, list) and tokens and all(type(t) is int and t >= 0 for t in tokens)):
        raise ValueError(f"{IMPOSED} must be a list of token ids")
    return tokens


@cache
def plugin() -> type:
    """The class that vLLM loads, made on first use."""
    from offdrift.engines.vllm.engine import request_processor

    base: Any = request_processor()

    class Forced(base):
        """Lead every request that asks for it along given tokens."""

        @classmethod
        def validate_params(cls, params: Any) -> None:
            """Refuse a request whose tokens cannot be read."""
            forced_tokens(params.extra_args)

        def is_argmax_invariant(self) -> bool:
            """Answer vLLM: the likeliest token changes."""
            return False

        def new_req_logits_processor(self, params: Any) -> Callable[..., Tensor] | None:
            """Answer vLLM with the function for one request."""
            tokens = forced_tokens(params.extra_args)
            return None if tokens is None else partial(leave_only, tokens)

    return Forced


def __getattr__(name: str) -> Any:
    if name == "Forced":
        return plugin()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
