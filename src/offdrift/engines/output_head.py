"""The output head of a model, and hidden states as evidence: `d` numbers that stand for a vocabulary.

    logits = soft_cap tanh(scale (h W^T + b) / soft_cap)        log mu = log softmax(logits / temperature)

What stands between head and logits differs from family to family (Granite divides by `logits_scaling`,
HyperCLOVA X multiplies by it). A configuration therefore only proposes scales and caps; the model's own
logits on a few tokens decide which of them is true, and a model that none explains is refused.

Shape suffixes: n tokens, v vocabulary, d hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offdrift.divergence.head import Head
from offdrift.errors import EngineError
from offdrift.records.rollouts import HiddenStates, Support

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What configurations call a factor of the logits and a bound on them."""

PROBED = 8
"""Tokens on which a head is compared with its model's logits."""
LOGIT_ROUNDING = 16
"""Machine epsilons of the logits' dtype, relative to the largest logit, that two ways of computing
them may differ by: sums in another order, and a rounding after each of product, scale and cap."""

CHECKED = 256
"""Tokens, spread over a batch, whose recorded states must reproduce their log-probs."""
GROSS = 0.1
"""Mean deviation in nats per token that no rounding explains: another head, or another token's state."""

CHUNK = {"cpu": 2**22}
"""Logits computed at a time: 16 MiB in float32, for which the head is read once."""
CHUNK_ELSEWHERE = 2**26


class HeadInput:
    """The last tensor that a model's output head consumed."""

    last: Tensor | None = None


@contextmanager
def head_input(model: nn.Module) -> Iterator[HeadInput]:
    """Note what the model's output head consumes while it runs: after the final norm, whatever else.

    Raises: `EngineError` if the model names no output head.
    """
    consumed = HeadInput()

    def note(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        consumed.last = arguments[0].detach()

    handle = _output_layer(model).register_forward_pre_hook(note)
    try:
        yield consumed
    finally:
        handle.remove()


def compute_head_in(model: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    """Let the model's output head multiply, and give its logits, in this dtype from now on.

    Only the arithmetic changes: states and weights are converted as they are, so a tied head stays
    tied and takes new weights. Call `remove()` on the result to undo it.

    Raises: `EngineError` if the model names no output head.
    """

    def recompute(layer: nn.Module, arguments: tuple[Any, ...], _: Tensor) -> Tensor:
        weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
        bias = None if bias is None else bias.to(dtype)
        return nn.functional.linear(arguments[0].to(dtype), weight.to(dtype), bias)

    return _output_layer(model).register_forward_hook(recompute)


def recast(model: Any, dtype: str, *, head_dtype: str | None = None, **implementations: str | None) -> None:
    """Change the dtype of a model's parameters and head, and its kernels (`attn_implementation`), in place."""
    for parameter in model.parameters():
        # Parameters only: rotary frequencies are buffers, which real engines keep in float32.
        parameter.requires_grad_(False).grad = None
        parameter.data = parameter.data.to(getattr(torch, dtype))
    for name, value in implementations.items():
        if value is not None:
            getattr(model, f"set_{name}")(value)
    if head_dtype is not None:
        compute_head_in(model, getattr(torch, head_dtype))


@torch.no_grad()
def head_of(model: nn.Module) -> Head:
    """The model's output head with its bias, scale, soft cap and rounding; weights are not copied.

    Runs the model (a causal language model of transformers, unwrapped) on a few tokens: the head is the one
    that gives the model's own logits there.

    Raises: `EngineError` if no reading of the configuration reproduces the model's logits.
    """
    layer = _output_layer(model)
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise EngineError(_unknown(model, f"its output head {type(layer).__name__} has no matrix"))
    ids = torch.arange(min(PROBED, len(weight)), device=weight.device)
    with head_input(model) as consumed:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]  # [probed, v]
    if consumed.last is None or logits.shape[-1] != len(weight):
        raise EngineError(_unknown(model, f"{logits.shape[-1]} logits come from a head of {len(weight)} rows"))
    states = consumed.last.reshape(-1, weight.shape[1])[-len(logits) :]
    rounding = None if logits.dtype in (torch.float32, torch.float64) else logits.dtype
    bias = None if bias is None else bias.detach()
    limit = LOGIT_ROUNDING * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scales = [float(s) for name in SCALES if (s := getattr(config, name, None) or 0.0) > 0]
    caps = [float(c) for name in CAPS if (c := getattr(config, name, None) or 0.0) > 0]
    # Readings of the configuration, stated values before none.
    scales = [*scales, *(1 / s for s in scales), 1.0]
    for scale, soft_cap in itertools.product(scales, [*caps, None]):
        head = Head(weight.detach(), bias, scale, soft_cap, rounding)
        scores = head.scores(states, slice(0, len(weight)))
        if float((scores - logits).abs().max()) <= limit:
            return head
    raise EngineError(_unknown(model, "no scale or soft cap of its configuration explains its logits"))


def kept(head: Head) -> Head:
    """A copy in host memory, for as long as the batches that refer to it."""

    def copied(x: Tensor) -> Tensor:
        return x.detach().to("cpu", copy=True)

    bias = None if head.bias is None else copied(head.bias)
    return Head(copied(head.weight), bias, head.scale, head.soft_cap, head.round_to)


def logits_in_pieces(
    evidence: HiddenStates, *, temperature: float = 1.0, support: Support | None = None
) -> Iterator[tuple[slice, Float[Tensor, "c v"]]]:
    """The rollout policy's tempered logits, float32 or better, some tokens at a time, and which.

    -inf where a token is not in `support`. At most `CHUNK` logits are computed at once, or one token's. Gradient: none.
    """
    states, head, v = evidence.states, evidence.head, len(evidence.head.weight)
    rows = max(1, CHUNK.get(states.device.type, CHUNK_ELSEWHERE) // v)
    for start in range(0, max(1, len(states)), rows):
        piece = slice(start, min(start + rows, len(states)))
        logits = head.scores(states[piece], slice(0, v)).div_(temperature)
        if support is not None:
            logits.masked_fill_(support.left_out(piece, v, device=logits.device), -torch.inf)
        yield piece, logits


@torch.no_grad()
def deviations(
    evidence: HiddenStates,
    tokens: Int[Tensor, " n"],
    logp_rollout: Float[Tensor, " n"],
    *,
    temperature: float = 1.0,
    support: Support | None = None,
) -> Float[Tensor, " n"]:
    """Deviation of recorded states and their head from the log-probs recorded with them.

        | log softmax(logits(h_t) / temperature)[token_t] - logp_rollout_t |

    Only rounding in a sound batch: sums in another order, which now and then round a logit of a
    half-precision engine to its neighbor.

    Returns: nats per token. Gradient: none.
    """
    result = torch.empty(len(tokens), dtype=torch.float32)
    for piece, logits in logits_in_pieces(evidence, temperature=temperature, support=support):
        logp = logits.log_softmax(-1).gather(1, tokens[piece, None].long()).squeeze(1)
        result[piece] = (logp - logp_rollout[piece]).abs()
    return result


def check_states(
    evidence: HiddenStates,
    tokens: Int[Tensor, " n"],
    logp_rollout: Float[Tensor, " n"],
    *,
    temperature: float,
    engine: str,
    support: Support | None = None,
) -> None:
    """Refuse states that do not belong to their tokens, or a head that is not the one that sampled.

    Raises: `EngineError` if they miss the log-probs of `CHECKED` tokens by more than `GROSS` nats on average.
    """
    some = torch.linspace(0, len(tokens) - 1, min(CHECKED, len(tokens))).long()
    part = HiddenStates(evidence.states[some], evidence.head)
    part_support = None if support is None else support.select(some)
    mean = float(
        deviations(part, tokens[some], logp_rollout[some], temperature=temperature, support=part_support).mean()
    )
    # Also refuses NaN.
    if not mean <= GROSS:
        raise EngineError(
            f"the hidden states of engine {engine!r} and its output head miss the log-probs it "
            f"reported by {mean:.3g} nats per token (limit {GROSS}): what was recorded is not what "
            'was sampled. Record evidence = "full" or a number of top log-probs instead'
        )


def _output_layer(model: nn.Module) -> nn.Module:
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(layer, nn.Module):
        raise EngineError(_unknown(model, "it names no output head (get_output_embeddings)"))
    return layer


def _unknown(model: nn.Module, why: str) -> str:
    return (
        f'evidence = "hidden" needs an output head that can be recorded, and that of '
        f'{type(model).__name__} is not one: {why}. Record evidence = "full" or a number of top '
        "log-probs instead"
    )
