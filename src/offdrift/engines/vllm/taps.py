"""Hooks into vLLM in this process: forced tokens, expert routing, hidden states, supports. Nothing here imports vLLM.

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
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.engines.output_head import kept
from offdrift.errors import EngineError
from offdrift.records.rollouts import Support, expert_dtype
from offdrift.segments import cumulative

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
    sample_token = sampler.sample

    def sample(logits: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        tokens, logp = sample_token(logits, *arguments, **named)
        requests = [runner.requests[name] for name in runner.input_batch.req_ids]
        for i, request in enumerate(requests):
            forced = (request.sampling_params.extra_args or {}).get(IMPOSED)
            if forced is not None:
                # vLLM throws away the draw of a prompt that is not yet prefilled.
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
        self.runner = runner
        self.dtype = expert_dtype(max(layer.global_num_experts for layer in layers))
        self.experts: list[list[Tensor]] = [[] for _ in layers]  # per layer and step, [tokens, k]
        self.steps: list[tuple[list[str], Tensor, Tensor]] = []  # requests, their tokens and the first one's position

    def take(self, layer: int, experts: Tensor) -> None:
        """Capture function of one layer; the first layer also notes whose tokens these are."""
        runner = self.runner
        ids = list(runner.input_batch.req_ids)
        cuts = torch.from_numpy(runner.query_start_loc.np[: len(ids) + 1].copy()).long()
        if layer == 0:
            first = torch.from_numpy(runner.input_batch.num_computed_tokens_cpu[: len(ids)].copy()).long()
            self.steps.append((ids, cuts.diff(), first))
        self.experts[layer].append(experts[: int(cuts[-1])].detach().cpu().to(self.dtype))

    def routes(self, requests: Sequence[str], lengths: Int[Tensor, " b"]) -> Integer[Tensor, "p layers k"]:
        """Experts at the first `lengths` positions of these requests, packed in their order.

        Raises: `EngineError` if a position was not computed.
        """
        number, starts = {name: i for i, name in enumerate(requests)}, cumulative(lengths)
        computed = torch.stack([torch.cat(steps) for steps in self.experts], dim=1)
        places = []
        for ids, counts, first in self.steps:
            request = torch.tensor([number[name.rpartition("-")[0]] for name in ids]).repeat_interleave(counts)
            within = torch.arange(len(request)) - cumulative(counts)[:-1].repeat_interleave(counts)
            position = first.repeat_interleave(counts) + within
            places.append((starts[request] + position).where(position < lengths[request], -1))
        place = torch.cat(places)
        experts = computed.new_empty(int(starts[-1]), *computed.shape[1:])
        experts[place[place >= 0]] = computed[place >= 0]
        if len(place[place >= 0].unique()) < len(experts):
            raise EngineError(_unsupported("it did not compute every position of a request"))
        return experts


@contextmanager
def routes_tap(llm: Any) -> Iterator[RoutesTap]:
    """Note the experts of everything that this `vllm.LLM` computes meanwhile.

    Raises: `EngineError` if the model has no routers, or this vLLM does not show their choice.
    """
    paths = ("input_batch.req_ids", "input_batch.num_computed_tokens_cpu", "query_start_loc.np")
    runner = runner_of(llm, "model", *paths)
    routers = (getattr(module, "router", None) for module in runner.model.modules())
    layers: list[Any] = [router for router in routers if hasattr(router, "set_capture_fn")]
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


class DrawTap:
    """Something that one `LLM.generate` has for every draw, in the order of the draws."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.requests: list[str] = []  # of every draw: vLLM's internal id, "REQUEST-RANDOM"

    def used(self) -> Bool[Tensor, " r"]:
        """Mark rows of the batch whose token vLLM will not throw away, and note whose draws they are."""
        ids = self.runner.input_batch.req_ids
        used = ~torch.from_numpy(self.runner.discard_request_mask.np[: len(ids)].copy())
        self.requests += [ids[i] for i in used.nonzero().flatten().tolist()]
        return used

    def order(self, requests: Sequence[str], lengths: Sequence[int]) -> Int[Tensor, " n"]:
        """The draws of the tokens of these requests (ids as `RequestOutput.request_id` has them), in their order.

        Later draws of a request than its `lengths` are of tokens that were undone.

        Raises: `EngineError` if a request has fewer draws than tokens.
        """
        place = {name: i for i, name in enumerate(requests)}
        of_row = torch.tensor([place[r.rpartition("-")[0]] for r in self.requests])
        counts = torch.bincount(of_row, minlength=len(requests))
        limits = torch.tensor(lengths)
        if bool((counts < limits).any()):
            i = int((counts < limits).nonzero()[0])
            raise EngineError(_unsupported(f"request {i} has {int(counts[i])} draws for {lengths[i]} tokens"))
        order = torch.argsort(of_row, stable=True)
        starts = counts.cumsum(0) - counts
        within = torch.arange(len(order)) - starts[of_row[order]]
        return order[within < limits[of_row[order]]]


class SupportTap(DrawTap):
    """The tokens that the sampler's filters left over at every draw."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.steps: list[Support] = []

    def take(self, processed: Tensor | None) -> None:
        """Note the log-probs that a step draws from."""
        if processed is None or len(processed) != len(self.runner.input_batch.req_ids):
            raise EngineError(_unsupported("its sampler does not show the log-probs that each request draws from"))
        used = self.used()
        self.steps.append(Support.of(processed[used.to(processed.device)] > -torch.inf).cpu())

    def support(self, requests: Sequence[str], lengths: Sequence[int]) -> Support:
        """Support left over at the tokens of these requests; see `order`."""
        support = Support.joined(self.steps)
        assert support is not None
        return support.select(self.order(requests, lengths))


@contextmanager
def support_tap(llm: Any) -> Iterator[SupportTap]:
    """Note what the filters leave over at everything that this `vllm.LLM` draws meanwhile.

    Taken where top-k and top-p end, behind min-p and all else that changes logits: the sampler draws from these very
    log-probs. `logprobs=-1` would show them, too, as lists over the whole vocabulary.

    Raises: `EngineError` naming what of this vLLM does not allow it.
    """
    paths = ("sampler.topk_topp_sampler.forward", "input_batch.req_ids", "discard_request_mask.np")
    runner = runner_of(llm, *paths)
    if getattr(runner, "speculative_config", None) is not None:
        raise EngineError(_unsupported("speculative decoding draws several tokens at once"))
    sampler, tap = runner.sampler.topk_topp_sampler, SupportTap(runner)
    filtered = sampler.forward

    def forward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        tokens, processed = filtered(*arguments, **named)
        tap.take(processed)
        return tokens, processed

    sampler.forward = forward
    try:
        yield tap
    finally:
        sampler.forward = filtered


class StateTap(DrawTap):
    """Tap of the states that the output head reads at every draw."""

    def __init__(self, runner: Any, head: Head | None = None) -> None:
        super().__init__(runner)
        self.head = head
        self.rows: list[Tensor] = []  # per step, [requests, hidden]

    def take(self, processor: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Forward pre-hook of the logits processor: note its states, and once its head."""
        names = ("lm_head", "hidden_states", "embedding_bias")
        inputs: dict[str, Any] = {**dict(zip(names, arguments)), **named}
        states = inputs["hidden_states"]
        ids = self.runner.input_batch.req_ids
        if len(states) != len(ids):
            raise EngineError(_states_unsupported(f"{len(states)} states for {len(ids)} requests"))
        self.rows.append(states[self.used().to(states.device)])
        if self.head is None:
            self.head = _head(processor, inputs["lm_head"], inputs.get("embedding_bias"))

    def states(self, requests: Sequence[str], lengths: Sequence[int]) -> Float[Tensor, "n d"]:
        """States at the tokens of these requests; see `order`."""
        rows = torch.cat(self.rows)
        return rows[self.order(requests, lengths).to(rows.device)].cpu()


@contextmanager
def state_tap(llm: Any, head: Head | None = None) -> Iterator[StateTap]:
    """Take the states of everything that this `vllm.LLM` draws meanwhile, and its head unless it is given.

    Raises: `EngineError` naming what of this vLLM, or of this model, does not allow it.
    """
    paths = ("model.logits_processor", "input_batch.req_ids", "discard_request_mask.np")
    runner = runner_of(llm, *paths, unsupported=_states_unsupported)
    if getattr(runner, "speculative_config", None) is not None:
        raise EngineError(_states_unsupported("speculative decoding has several states per request"))
    tap = StateTap(runner, head)
    handle = runner.model.logits_processor.register_forward_pre_hook(tap.take, with_kwargs=True)
    try:
        yield tap
    finally:
        handle.remove()


def _head(processor: Any, layer: Any, bias: Tensor | None) -> Head:
    """Output head that the logits processor applies to the states. Raises: `EngineError` if it cannot be recorded."""
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


FP8_MAX = 448.0
"""Largest number of FP8 E4M3."""
ROOM = 2.0
"""How many times the largest key or value may still grow before it is cut off; a factor of two costs no bit."""


@contextmanager
def cache_scales(llm: Any) -> Iterator[None]:
    """Afterwards, the FP8 cache of every layer has scales for the keys and values that were written meanwhile.

        s = 2 max|k| / 448, the same for values: of each layer, over all heads and tokens

    vLLM itself leaves the scales at 1, where small values lose their bits and large ones are cut off at 448.

    Raises: `EngineError` if this vLLM does not show its cache.

    Reference: inference-side calibration after each synchronization, FP8-RL, arXiv:2601.18150.
    """
    runner = runner_of(llm, "model")
    layers = [m for m in runner.model.modules() if hasattr(m, "_k_scale_float") and hasattr(m, "impl")]
    if not layers or not all(hasattr(layer.impl, "do_kv_cache_update") for layer in layers):
        raise EngineError(_unsupported("it does not show what it writes into its cache"))
    largest = [[0.0, 0.0] for _ in layers]

    def watch(layer: Any, maxima: list[float]) -> None:
        inner = layer.impl.do_kv_cache_update

        def update(module: Any, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> None:
            for i, x in enumerate((key, value)):
                maxima[i] = max(maxima[i], float(x.abs().max()))
            inner(module, key, value, *arguments, **named)

        layer.impl.do_kv_cache_update = update

    for layer, maxima in zip(layers, largest, strict=True):
        watch(layer, maxima)
    try:
        yield
    finally:
        for layer in layers:
            del layer.impl.do_kv_cache_update
    for layer, (key, value) in zip(layers, largest, strict=True):
        for name, amax in (("_k_scale", key), ("_v_scale", value)):
            scale = ROOM * amax / FP8_MAX or 1.0
            getattr(layer, name).fill_(scale)
            setattr(layer, f"{name}_float", scale)
