"""A KV cache that forgets: a fixed number of keys per layer and head, whatever the length of the responses.

Prompts are read whole, by ordinary attention. Behind them a layer keeps `Eviction.budget` keys, and every further
token takes the place of the one that its policy lets go, so that memory and the work of a step do not grow. Which
positions were kept until when is noted for `Rollouts.retention`.

Keys carry their positions (rotary embeddings are applied before they are stored), so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from offdrift.engines.retention import attention_modules, by_query, hidden, need_led
from offdrift.errors import EngineError
from offdrift.records.provenance import Eviction

EMPTY = -1
"""Place of a slot that holds no key."""


def priority(
    eviction: Eviction, places: Int[Tensor, "b h s"], mass: Float[Tensor, "b h s"], now: Int[Tensor, " b"]
) -> Float[Tensor, "b h s"]:
    """Priority of every slot: the one with the least goes first. Empty slots have -inf, protected ones +inf.

        window      the place k; protected: k < `protected`
        attention   attention received so far; protected: k > now - `protected`

    Args:
        places: of the keys in their sequences; `EMPTY` where there is none.
        mass: attention that each key has received, summed over tokens and the query heads of its group.
        now: place of the token that is to be read.

    Reference: sinks and window: StreamingLLM, arXiv:2309.17453; accumulated attention and recent keys: H2O,
    arXiv:2306.14048.
    """
    if eviction.policy == "window":
        worth, protected = places.float(), places < eviction.protected
    else:
        worth, protected = mass, places > now[:, None, None] - eviction.protected
    return worth.masked_fill(protected, torch.inf).masked_fill(places == EMPTY, -torch.inf)


class EvictingLayer(DynamicLayer):
    """Keys and values of a layer: all of the prompts while they are read, then those in `budget` slots.

    Args:
        real: what of the prompts is no padding.
    """

    def __init__(self, eviction: Eviction, real: Bool[Tensor, "b w"]) -> None:
        super().__init__()
        self.eviction, self.real = eviction, real
        self.now = real.sum(1)
        """Place of the token that each row reads next."""
        self.columns = 0
        """Tokens read by the longest row, padding included: what the model's own masks are made for."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """The keys and values that the tokens which are being read see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        else:
            assert self.keys is not None
            assert self.values is not None
            at = self.slot[..., None, None].expand(*self.slot.shape, 1, key_states.shape[-1])
            self.keys.scatter_(2, at, key_states)
            self.values.scatter_(2, at[..., :1].expand_as(value_states), value_states)
        self.columns += key_states.shape[-2]
        return self.keys, self.values

    def cut(self, weights: Float[Tensor, "b queries w w"] | None) -> None:
        """The prompts have been read, with these weights of attention: keep the budget's keys of every row and head."""
        assert self.keys is not None
        assert self.values is not None
        b, heads, width, _ = self.keys.shape
        real, budget = self.real, self.eviction.budget
        mass = torch.zeros(b, heads, width, device=real.device)
        if weights is not None:
            mass = received(weights * real[:, None, :, None], heads)
        places = (real.cumsum(1) - 1).masked_fill(~real, EMPTY)[:, None].expand(b, heads, width)
        slots = priority(self.eviction, places, mass, self.now).topk(min(budget, width), -1).indices
        self.lost = real[:, None] & ~torch.zeros_like(places, dtype=torch.bool).scatter(2, slots, True)
        room = (0, max(0, budget - width))
        self.victim = places.new_full((b, heads), EMPTY)
        self.places = nn.functional.pad(places.gather(2, slots), room, value=EMPTY)
        self.mass = nn.functional.pad(mass.gather(2, slots), room)
        self.keys, self.values = (
            nn.functional.pad(x.gather(2, slots[..., None].expand(*slots.shape, x.shape[-1])), (0, 0, *room))
            for x in (self.keys, self.values)
        )

    def make_room(self) -> Bool[Tensor, "b h 1 s"]:
        """Give the next token a slot of every row and head, whosever it was; what that token then sees."""
        worth = priority(self.eviction, self.places, self.mass, self.now)
        self.slot = worth.argmin(-1)
        at = self.slot[..., None]
        self.victim = self.places.gather(2, at).squeeze(2)
        self.places = self.places.scatter(2, at, self.now[:, None, None].expand_as(at))
        self.mass = self.mass.scatter(2, at, 0.0)
        self.now = self.now + 1
        return (self.places != EMPTY)[:, :, None]

    def note(self, weights: Float[Tensor, "b queries q k"] | None) -> None:
        """Take in the weights with which the tokens that were read saw the keys."""
        if not hasattr(self, "places"):
            self.cut(weights)
        elif weights is not None:
            self.mass = self.mass + received(weights, self.mass.shape[1])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The cache of these rows, in this order; a row may be named several times."""
        for name in ("keys", "values", "places", "mass", "now", "real", "victim"):
            if hasattr(self, name):
                setattr(self, name, getattr(self, name).index_select(0, beam_idx))

    def get_seq_length(self) -> int:
        """Tokens that were read, as the model counts them."""
        return self.columns


def received(weights: Float[Tensor, "b queries q k"], heads: int) -> Float[Tensor, "b heads k"]:
    """Attention that keys receive of all queries and of the query heads that share them."""
    b, queries, _, keys = weights.shape
    return weights.float().sum(2).view(b, heads, queries // heads, keys).sum(2)


class Evictions:
    """Keys that the caches of a model have let go, with the layers of the cache that it now decodes with.

    Where layers and heads all do the same, the first one speaks for all.
    """

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self.layers: list[EvictingLayer] = []

    def cache(self, model: PreTrainedModel, mask: Int[Tensor, "b w"]) -> DynamicCache:
        """A new cache, for prompts of this mask."""
        cache = DynamicCache(config=model.config)
        self.layers = [EvictingLayer(self.eviction, mask.bool()) for _ in cache.layers]
        cache.layers[:] = self.layers
        return cache

    def _by_layer(self, name: str) -> Tensor:
        """Stack a field of every layer, behind rows and before heads."""
        if self.eviction.policy == "window":
            return getattr(self.layers[0], name)[:, None, :1]
        return torch.stack([getattr(layer, name) for layer in self.layers], 1)

    @property
    def lost(self) -> Bool[Tensor, "b w layers heads"]:
        """Keys of the prompts that were let go when the prompts had been read."""
        return self._by_layer("lost").movedim(-1, 1)

    @property
    def victims(self) -> Int[Tensor, "b layers heads"]:
        """Place of the key whose slot the token that was read last took; `EMPTY` where it took none."""
        return self._by_layer("victim")


def layer_of(module: nn.Module, kwargs: dict[str, Any]) -> EvictingLayer | None:
    """The layer of such a cache that a pass of an attention module reads; None where it reads none."""
    cache = kwargs.get("past_key_values")
    layer = None if cache is None else cache.layers[module.layer_idx]
    return layer if isinstance(layer, EvictingLayer) else None


@contextmanager
def evicting(model: PreTrainedModel, eviction: Eviction) -> Iterator[Evictions]:
    """Passes with caches of `Evictions.cache` see what those keep; others see everything."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        layer = layer_of(module, kwargs)
        if layer is None or not layer.is_initialized:
            return None
        visible, model_mask = by_query(module, layer.make_room()), kwargs["attention_mask"]
        if model_mask is None or model_mask.dtype == torch.bool:
            everything = torch.ones((), dtype=torch.bool)
        else:
            everything = torch.zeros((), dtype=model_mask.dtype)
        return args, {**kwargs, "attention_mask": hidden(everything.to(visible.device), visible)}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (layer := layer_of(module, kwargs)) is not None:
            layer.note(output[1] if eviction.policy == "attention" else None)

    handles = []
    for module in attention_modules(model):
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield Evictions(eviction)
    finally:
        for handle in handles:
            handle.remove()


def check_eviction(model: PreTrainedModel, eviction: Eviction) -> None:
    """Refuse an eviction that makes no sense, or a model that cannot do it.

    Raises: `EngineError` naming what is wrong.
    """
    if not 0 <= eviction.protected < eviction.budget:
        raise EngineError(
            f"eviction: protected = {eviction.protected} of budget = {eviction.budget} keys; at least one key has to "
            "be free to go"
        )
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {DynamicLayer.__name__}
    if kinds:
        raise EngineError(
            f"the cache of {type(model).__name__} has layers of its own ({', '.join(sorted(kinds))}), which cannot be "
            "compressed; use a model whose attention is full in every layer"
        )
    need_led(model)
