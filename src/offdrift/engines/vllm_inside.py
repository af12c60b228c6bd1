"""What vLLM can do in this process and has no request for: follow given tokens, say its routing.

`imposed` lets every request go on with tokens that were drawn before. Only the outcome of the draw
is replaced: the prompt is prefilled, each token goes through cache, kernels, head, temperature and
filters as in any generation, and log-probs are reported through the same public fields. So two
engines that differ in one setting can be compared on the same tokens, on the path that draws.

`routes_tap` notes which experts every token was sent to, at the place where vLLM's own capture
(which needs its second model runner, and a GPU) listens.

Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

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

    Args:
        unsupported: the message of an error, given what is missing.

    Raises: `EngineError` naming what is missing.
    """
    worker = getattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker", None)
    runner = getattr(getattr(worker, "worker", worker), "model_runner", None)
    if runner is None:
        raise EngineError(
            unsupported("it runs in another process (set VLLM_ENABLE_V1_MULTIPROCESSING=0)")
        )
    for path in paths:
        found: Any = runner
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is None:
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
            given = (request.sampling_params.extra_args or {}).get(IMPOSED)
            if given is not None:
                # Of a prompt that is not yet prefilled, vLLM throws the draw away.
                tokens[i] = given[min(len(request.output_token_ids), len(given) - 1)]
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
        found = torch.stack([torch.cat(steps) for steps in self.experts], dim=1)
        experts = torch.full((starts[-1], *found.shape[1:]), -1)
        for row, (name, position) in enumerate(self.places):
            start, length = slot[name.rpartition("-")[0]]
            if position < length:
                experts[start + position] = found[row]
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
        module.router
        for module in runner.model.modules()
        if hasattr(getattr(module, "router", None), "set_capture_fn")
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
