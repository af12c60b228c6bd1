"""Hooks into vLLM in this process: forced tokens, expert routing, hidden states. Nothing here imports vLLM.

Forced tokens replace only the outcome of a draw; the rest goes as in any generation. Experts are taken
where vLLM's own capture (which needs its second model runner, and a GPU) listens. Hidden states are those
of the one call that ends every model, `logits_processor(lm_head, states)`, with one row per request of the
batch; the model runner says which row is whose, and which it will throw away because a prompt was
prefilled only in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.engines.output_head import kept
from offdrift.errors import EngineError

IMPOSED = "offdrift_imposed"
"""Key of a request's `extra_args` under which the tokens stand that it has to follow."""


def _unsupported(why: str) -> str:
    return (
        f"this vLLM cannot be looked into: {why}. Use the pinned version (`make install-vllm`), "
        "or the transformers engine"
    )


def runner_of(llm: Any, *paths: str, unsupported: Callable[[str], str] = _unsupported) -> Any:
    """The model runner in this process, if it has the attributes at these dotted paths.

    Raises: `EngineError` naming what is missing, in the words of `unsupported`.
    """
    worker = getattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker", None)
    runner = getattr(getattr(worker, "worker", worker), "model_runner", None)
    if runner is None:
        raise EngineError(unsupported("it runs in another process (set VLLM_ENABLE_V1_MULTIPROCESSING=0)"))
    for path in paths:
        value: Any = runner
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is None:
            raise EngineError(unsupported(f"its model runner has no {path}"))
    return runner


@contextmanager
def imposed(llm: Any) -> Iterator[None]:
    """Every request with `extra_args[IMPOSED]` draws those tokens, whatever the sampler says.

    Raises: `EngineError` naming what of this vLLM does not allow it.
    """
    runner = runner_of(llm, "sampler.sample", "input_batch.req_ids", "requests")
    if getattr(runner, "speculative_config", None) is not None:
        raise EngineError(_unsupported("speculative decoding draws several tokens at once"))
    sampler = runner.sampler
    drawn = sampler.sample

    def sample(logits: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        tokens, logp = drawn(logits, *arguments, **named)
        requests = [runner.requests[name] for name in runner.input_batch.req_ids]
        for i, request in enumerate(requests):
            forced = (request.sampling_params.extra_args or {}).get(IMPOSED)
            if forced is not None:
                # Of a prompt that is not yet prefilled, vLLM throws the draw away.
                tokens[i] = forced[min(len(request.output_token_ids), len(forced) - 1)]
        return tokens, logp

    sampler.sample = sample
    try:
        yield
    finally:
        del sampler.sample


class RoutesTap:
    """Experts of every token that was computed, in the order of computation."""

    def __init__(self, runner: Any, layers: Sequence[Any]) -> None:
        self.runner, self.layers = runner, layers
        self.experts: list[list[Tensor]] = [[] for _ in layers]  # per layer and step, [tokens, k]
        self.places: list[tuple[str, int]] = []  # request and position of every token

    def take(self, layer: int, experts: Tensor) -> None:
        """Capture function of one layer; the first layer also notes whose tokens these are."""
        runner = self.runner
        ids = runner.input_batch.req_ids
        cuts = runner.query_start_loc.np[: len(ids) + 1].tolist()
        if layer == 0:
            first = runner.input_batch.num_computed_tokens_cpu[: len(ids)].tolist()
            for name, start, stop, done in zip(ids, cuts, cuts[1:], first):
                self.places += [(name, done + j) for j in range(stop - start)]
        self.experts[layer].append(experts[: cuts[-1]].detach().cpu().long())

    def routes(self, requests: Sequence[str], lengths: Sequence[int]) -> Int[Tensor, "p layers k"]:
        """Experts at the first `lengths` positions of these requests, packed in their order.

        Raises: `EngineError` if a position was not computed.
        """
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        slot = {name: (starts[i], lengths[i]) for i, name in enumerate(requests)}
        computed = torch.stack([torch.cat(steps) for steps in self.experts], dim=1)
        experts = torch.full((starts[-1], *computed.shape[1:]), -1)
        for row, (name, position) in enumerate(self.places):
            start, length = slot[name.rpartition("-")[0]]
            if position < length:
                experts[start + position] = computed[row]
        if bool((experts < 0).any()):
            raise EngineError(_unsupported("it did not compute every position of a request"))
        return experts


@contextmanager
def routes_tap(llm: Any) -> Iterator[RoutesTap]:
    """Note the experts of everything that this `vllm.LLM` computes meanwhile.

    Raises: `EngineError` if the model has no routers, or this vLLM does not show their choice.
    """
    paths = ("input_batch.req_ids", "input_batch.num_computed_tokens_cpu", "query_start_loc.np")
    runner = runner_of(llm, "model", *paths)
    layers = [
        module.router for module in runner.model.modules() if hasattr(getattr(module, "router", None), "set_capture_fn")
    ]
    if not layers:
        raise EngineError(_unsupported("its model has no router that shows its choice"))
    tap = RoutesTap(runner, layers)
    try:
        for i, layer in enumerate(layers):
            layer.set_capture_fn(lambda experts, i=i: tap.take(i, experts))
        yield tap
    finally:
        for layer in layers:
            layer.set_capture_fn(None)


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
        inputs: dict[str, Any] = {**dict(zip(names, arguments)), **named}
        states = inputs["hidden_states"]
        ids = self.runner.input_batch.req_ids
        if len(states) != len(ids):
            raise EngineError(_states_unsupported(f"{len(states)} states for {len(ids)} requests"))
        used = ~torch.from_numpy(self.runner.discard_request_mask.np[: len(ids)].copy())
        self.rows.append(states[used.to(states.device)])
        self.requests += [ids[i] for i in used.nonzero().flatten().tolist()]
        if self.head is None:
            self.head = _head(processor, inputs["lm_head"], inputs.get("embedding_bias"))

    def states(self, requests: Sequence[str], lengths: Sequence[int]) -> Float[Tensor, "n d"]:
        """States of the tokens of these requests (ids as `RequestOutput.request_id` has them), packed in their order.

        Later rows of a request than its `lengths` are of tokens that were undone.

        Raises: `EngineError` if a request has fewer states than tokens.
        """
        place = {name: i for i, name in enumerate(requests)}
        of_row = torch.tensor([place[r.rpartition("-")[0]] for r in self.requests])
        counts = torch.bincount(of_row, minlength=len(requests))
        wanted = torch.tensor(lengths)
        if bool((counts < wanted).any()):
            i = int((counts < wanted).nonzero()[0])
            raise EngineError(_states_unsupported(f"request {i} has {int(counts[i])} states for {lengths[i]} tokens"))
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
    paths = ("model.logits_processor", "input_batch.req_ids", "discard_request_mask.np")
    runner = runner_of(llm, *paths, unsupported=_states_unsupported)
    if getattr(runner, "speculative_config", None) is not None:
        raise EngineError(_states_unsupported("speculative decoding has several states per request"))
    tap = StateTap(runner)
    handle = runner.model.logits_processor.register_forward_pre_hook(tap.take, with_kwargs=True)
    try:
        yield tap
    finally:
        handle.remove()


def _head(processor: Any, layer: Any, bias: Tensor | None) -> Head:
    """What the logits processor does with the states, if it is a head that can be recorded."""
    weight = getattr(layer, "weight", None)
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    if processor.logits_as_input or not isinstance(weight, Tensor) or weight.dtype not in kinds:
        raise EngineError(_states_unsupported(f"the output head {type(layer).__name__} is quantized"))
    if layer.tp_size > 1:
        raise EngineError(_states_unsupported("the output head is spread over several processes"))
    if processor.soft_cap is not None and processor.scale != 1:
        raise EngineError(_states_unsupported("its logits are scaled after they are capped"))
    v = processor.org_vocab_size
    dtype = processor.head_dtype or weight.dtype
    rounding = None if dtype == torch.float32 else dtype
    cut = None if bias is None else bias[:v]
    return kept(Head(weight[:v], cut, processor.scale, processor.soft_cap, rounding))


def _states_unsupported(why: str) -> str:
    return (
        f'this vLLM cannot record evidence = "hidden": {why}. Record evidence = "full" or a number '
        "of top log-probs, or use the transformers engine"
    )
