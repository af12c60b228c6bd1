"""The hidden states that vLLM's output head consumed, taken while it draws.

vLLM has no request for them: its `extract_hidden_states` replaces the drafter of speculative
decoding and writes files of prompts. But the last thing every model does with a state is one call,
`logits_processor(lm_head, states)`, with one row per request of the batch, and in this process that
module can be hooked. Which row belongs to which request the model runner says, and also which rows
it will throw away because a prompt was prefilled only in part.

Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.engines.heads import kept
from offdrift.engines.vllm_inside import runner_of
from offdrift.errors import EngineError


class StateTap:
    """The rows of one `LLM.generate`, in the order in which they were computed."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.rows: list[Tensor] = []  # per step: what was not thrown away, [requests, hidden]
        self.requests: list[str] = []  # of every row: vLLM's internal id, "REQUEST-RANDOM"
        self.head: Head | None = None

    def take(self, processor: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Forward pre-hook of the logits processor: note its states, and once its head."""
        names = ("lm_head", "hidden_states", "embedding_bias")
        given: dict[str, Any] = {**dict(zip(names, arguments)), **named}
        states = given["hidden_states"]
        ids = self.runner.input_batch.req_ids
        if len(states) != len(ids):
            raise EngineError(_unsupported(f"{len(states)} states for {len(ids)} requests"))
        used = ~torch.from_numpy(self.runner.discard_request_mask.np[: len(ids)].copy())
        self.rows.append(states[used.to(states.device)])
        self.requests += [ids[i] for i in used.nonzero().flatten().tolist()]
        if self.head is None:
            self.head = _head(processor, given["lm_head"], given.get("embedding_bias"))

    def states(self, requests: Sequence[str], lengths: Sequence[int]) -> Float[Tensor, "n d"]:
        """States of the tokens of these requests, packed in their order.

        Args:
            requests: ids as `RequestOutput.request_id` has them.
            lengths: tokens of each; later rows of a request are of tokens that were undone.

        Raises: `EngineError` if a request has fewer states than tokens.
        """
        place = {name: i for i, name in enumerate(requests)}
        of_row = torch.tensor([place[r.rpartition("-")[0]] for r in self.requests])
        counts = torch.bincount(of_row, minlength=len(requests))
        wanted = torch.tensor(lengths)
        if bool((counts < wanted).any()):
            i = int((counts < wanted).nonzero()[0])
            raise EngineError(
                _unsupported(f"request {i} has {int(counts[i])} states for {lengths[i]} tokens")
            )
        order = torch.argsort(of_row, stable=True)
        starts = counts.cumsum(0) - counts
        within = torch.arange(len(order)) - starts[of_row[order]]
        chosen = order[within < wanted[of_row[order]]]
        rows = torch.cat(self.rows)
        return rows[chosen.to(rows.device)].cpu()


@contextmanager
def state_tap(llm: Any) -> Iterator[StateTap]:
    """Take the states of everything that this `vllm.LLM` draws meanwhile.

    Raises: `EngineError` naming what of this vLLM, or of this model, does not allow it.
    """
    runner = _runner(llm)
    tap = StateTap(runner)
    handle = runner.model.logits_processor.register_forward_pre_hook(tap.take, with_kwargs=True)
    try:
        yield tap
    finally:
        handle.remove()


def _runner(llm: Any) -> Any:
    """The model runner in this process, if it has what a tap reads."""
    paths = ("model.logits_processor", "input_batch.req_ids", "discard_request_mask.np")
    runner = runner_of(llm, *paths, unsupported=_unsupported)
    if getattr(runner, "speculative_config", None) is not None:
        raise EngineError(_unsupported("speculative decoding has several states per request"))
    return runner


def _head(processor: Any, layer: Any, bias: Tensor | None) -> Head:
    """What the logits processor does with the states, if it is a head that can be recorded."""
    weight = getattr(layer, "weight", None)
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    if processor.logits_as_input or not isinstance(weight, Tensor) or weight.dtype not in kinds:
        raise EngineError(_unsupported(f"the output head {type(layer).__name__} is quantized"))
    if layer.tp_size > 1:
        raise EngineError(_unsupported("the output head is spread over several processes"))
    if processor.soft_cap is not None and processor.scale != 1:
        raise EngineError(_unsupported("its logits are scaled after they are capped"))
    v = processor.org_vocab_size
    dtype = processor.head_dtype or weight.dtype
    rounding = None if dtype == torch.float32 else dtype
    cut = None if bias is None else bias[:v]
    return kept(Head(weight[:v], cut, processor.scale, processor.soft_cap, rounding))


def _unsupported(why: str) -> str:
    return (
        f'this vLLM cannot record evidence = "hidden": {why}. Record evidence = "full" or a number '
        "of top log-probs, or use the transformers engine"
    )
