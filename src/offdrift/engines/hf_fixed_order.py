"""Forward passes whose numbers for a sequence do not depend on what else is computed with it, bit for bit.

Sums of floats depend on their order, and kernels choose an order by the shape of a batch: a prompt alone, the same
prompt padded among others, and the same tokens read one by one from a cache get other last bits. `batch_invariant`
changes a model so that every sum has one order:

- Matrix products are made of tiles of `TILE` rows, the last one filled up with zeros. Every tile is a product of one
  shape, whose rows a kernel treats alike.
- Attention reads keys from a sequence's first token on, wherever padding put it, in blocks of `TILE`; blocks are added
  one after the other, and what is masked adds 0.
- Experts are computed one after the other. What is left (norms, activations, softmax over the vocabulary) works row by
  row, and no kernel used here orders it by the number of rows.

The last sentences are about kernels, not about mathematics: `check_invariance` runs the model, and refuses one on
which they do not hold. Engine and trainer that are both changed agree bit for bit at equal weights and one dtype.

`sharded_sum` and `sharded_linear` are the same idea across devices: partial sums of a matrix that is split over
devices, added in one tree however many there are. They are a reference, which emulates the devices.

References: He et al., Defeating Nondeterminism in LLM Inference, 2025 (batch invariance); Zhang et al.,
arXiv:2511.17826 (tree-based invariant kernels); Wasti et al., 2025 (bitwise equal engines).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from offdrift.errors import EngineError, ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TILE = 32
"""Rows of a product, and keys of a block in attention. Fewer waste less where few tokens are decoded at once, more are
faster where many are; any number gives one order, and other bits than another number."""

QUERIES = 8
"""Queries of a product in attention: few, since decoding has one query per sequence."""

ATTENTION = "fixed_order"
"""Name of the attention here among those of transformers."""


class _TiledLinear(torch.autograd.Function):
    """x W^T in tiles of rows; the backward pass is the ordinary one, whose sums have no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _in_tiles(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), (g,) = ctx.saved_tensors, gradients
        return g @ weight, g.t() @ x


def _in_tiles(x: Float[Tensor, "n k"], weight: Float[Tensor, "o k"]) -> Float[Tensor, "n o"]:
    """x W^T as products of one shape, [TILE, k] x [k, o]."""
    n, k = x.shape
    tiles = -(-n // TILE)
    rows = pad(x, (0, 0, 0, tiles * TILE - n)).view(tiles, TILE, k)
    return torch.bmm(rows, weight.t().expand(tiles, k, len(weight))).view(tiles * TILE, -1)[:n]


def tiled_linear(
    x: Float[Tensor, "*n k"], weight: Float[Tensor, "o k"], bias: Float[Tensor, " o"] | None = None
) -> Float[Tensor, "*n o"]:
    """x W^T + b, each row computed in the same order whatever other rows there are.

    Gradient: to all three; its sums are in the order of the kernels.

    Example:
        >>> x, weight = torch.randn(5, 7), torch.randn(3, 7)
        >>> torch.equal(tiled_linear(x, weight)[:1], tiled_linear(x[:1], weight))
        True
    """
    flat = x.reshape(-1, x.shape[-1])
    y = _TiledLinear.apply(flat, weight) if len(flat) else flat @ weight.t()
    y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], len(weight))


def fixed_order_attention(
    module: nn.Module,
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b g k d"],
    value: Float[Tensor, "b g k d"],
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Float[Tensor, "b q h d"], None]:
    """Attention whose sums run over blocks of a sequence's keys, from its first token on; in float32.

        o_i = sum_j e^(s_ij - m_i) v_j / sum_j e^(s_ij - m_i),   s = scaling q k,   m_i = max_j s_ij

    Keys and values are shifted so that block 0 begins with a row's first token, so that padding in front of it moves
    nothing; blocks are added in their order, and the denominator is one more column of the values. Masked keys add 0,
    so more blocks change no bit. Signature of transformers' attention functions.

    Memory: all scores, `heads x queries x keys`, as eager attention. Gradient: to query, key and value.
    """
    if dropout:
        raise EngineError("attention_dropout draws other numbers in another batch; set it to 0 for batch_invariant")
    (b, h, q, d), k = query.shape, key.shape[2]
    blocks, tiles = -(-k // TILE), -(-q // QUERIES)
    visible = attention_mask.expand(b, 1, q, k)
    # The first column that any query of a row sees is the sequence's first token: masks here are causal.
    column = visible.any(2).int().argmax(-1) + torch.arange(blocks * TILE, device=query.device)  # [b, blocks * TILE]
    inside, column = column < k, column.clamp(max=k - 1)
    keys, values = (
        x.float().repeat_interleave(h // x.shape[1], 1).gather(2, column[:, None, :, None].expand(b, h, -1, d))
        for x in (key, value)
    )
    values = torch.cat([values, values.new_ones(*values.shape[:3], 1)], -1)
    visible = visible.gather(3, column[:, None, None].expand(b, 1, q, -1)) & inside[:, None, None]
    visible = pad(visible, (0, 0, 0, tiles * QUERIES - q)).view(b, 1, tiles, QUERIES, blocks, TILE)
    queries = pad(query.float(), (0, 0, 0, tiles * QUERIES - q)).reshape(b * h * tiles, QUERIES, d)

    def blocks_of(x: Tensor) -> list[Tensor]:
        """Each block of keys or values, beside every tile of queries."""
        return [
            block.unsqueeze(2).expand(b, h, tiles, TILE, -1).reshape(b * h * tiles, TILE, -1)
            for block in x.split(TILE, 2)
        ]

    scores = torch.stack([torch.bmm(queries, block.transpose(1, 2)) for block in blocks_of(keys)], 2) * scaling
    scores = scores.view(b, h, tiles, QUERIES, blocks, TILE).masked_fill(~visible, -torch.inf).flatten(4)
    largest = scores.detach().amax(-1, keepdim=True)
    # A query of padding sees nothing, and gets 0.
    shares = (scores - largest.where(largest > -torch.inf, 0.0)).exp().flatten(0, 2)
    total = queries.new_zeros(())
    for share, block in zip(shares.split(TILE, -1), blocks_of(values), strict=True):
        total = total + torch.bmm(share.contiguous(), block)
    result = total[..., :d] / total[..., d:].clamp(min=torch.finfo(torch.float32).tiny)
    result = result.view(b, h, tiles * QUERIES, d)[:, :, :q].transpose(1, 2)
    return result.to(query.dtype).contiguous(), None


@functools.cache
def _register() -> None:
    """Make the attention here, and a Boolean mask that is never left out, known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def whole_mask(*arguments: Any, **options: Any) -> Tensor | None:
        return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    AttentionInterface.register(ATTENTION, fixed_order_attention)
    AttentionMaskInterface.register(ATTENTION, whole_mask)


class _FixedOrder(TorchFunctionMode):
    """While it is on, linear layers are computed in tiles, whoever calls them."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if function is nn.functional.linear:
            return tiled_linear(*arguments, **(options or {}))
        return function(*arguments, **(options or {}))


def _enter(module: nn.Module, arguments: Any) -> None:
    module.__dict__.setdefault("_fixed_orders", []).append(_FixedOrder())
    module.__dict__["_fixed_orders"][-1].__enter__()


def _leave(module: nn.Module, arguments: Any, output: Any) -> None:
    if module.__dict__.get("_fixed_orders"):
        module.__dict__["_fixed_orders"].pop().__exit__(None, None, None)


def is_batch_invariant(model: nn.Module) -> bool:
    """Whether a model, or the one that a data-parallel wrapper holds, was changed by `batch_invariant`."""
    return bool(getattr(getattr(model, "module", model), "batch_invariant", False))


def batch_invariant(model: PreTrainedModel) -> PreTrainedModel:
    """Change a model, in place, so that a sequence's numbers do not depend on what is computed with it; returns it.

    Copies of the model (`copy.deepcopy`) are changed as well. A second call changes nothing.

    Raises: `EngineError` if its attention cannot be replaced, forgets tokens (sliding windows), or is none.
    """
    if is_batch_invariant(model):
        return model
    name, config = type(model).__name__, model.config.get_text_config()
    other = sorted({*(getattr(config, "layer_types", None) or [])} - {"full_attention"})
    if other:
        raise EngineError(
            f"batch_invariant: {name} has layers of type {other[0]!r}, and only full attention is computed in a fixed "
            "order here; leave it out, or choose another model"
        )
    # Families with one window for all layers do not list their types.
    window = getattr(config, "sliding_window", None) if not getattr(config, "layer_types", None) else None
    if window is not None and getattr(config, "use_sliding_window", True):
        raise EngineError(
            f"batch_invariant: {name} has a sliding window of {window} tokens, and only full attention is computed in "
            "a fixed order here; leave it out, or choose another model"
        )
    experts = any("Experts" in type(module).__name__ for module in model.modules())
    _register()
    model.set_attn_implementation(ATTENTION)
    if experts:
        model.set_experts_implementation("eager")
    if config._attn_implementation != ATTENTION or (experts and config._experts_implementation != "eager"):
        raise EngineError(
            f"batch_invariant: {name} has kernels that transformers cannot replace; leave it out, or choose a model "
            "with transformers' own attention functions"
        )
    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)
    model.batch_invariant = True  # type: ignore[assignment]
    return model


PROBE_LENGTHS = (1, 7, TILE - 1, TILE, TILE + 8)
"""Tokens of the sequences that `check_invariance` reads."""


@torch.no_grad()
def invariance_gap(model: PreTrainedModel) -> float:
    """Largest difference of a logit between a sequence alone, padded among others, and read from a cache.

    0 of a model whose numbers do not depend on the batch. Reads `PROBE_LENGTHS` tokens, three times each.
    """
    from transformers import DynamicCache

    vocabulary, device = model.config.get_text_config().vocab_size, model.device
    g = torch.Generator().manual_seed(0)
    longest = max(PROBE_LENGTHS)
    ids = torch.randint(vocabulary, (len(PROBE_LENGTHS), longest), generator=g).to(device)
    lengths = torch.tensor(PROBE_LENGTHS, device=device)[:, None]
    mask = torch.arange(longest, device=device) >= longest - lengths  # flush right
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    was_training = model.training
    model.eval()
    together = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    prompt, read = TILE - 2, []
    for part in (slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, longest))):
        options = {"attention_mask": mask[:, : part.stop].long(), "position_ids": positions[:, part]}
        read.append(model(input_ids=ids[:, part], past_key_values=cache, use_cache=True, **options).logits)
    gaps = [(together - torch.cat(read, 1))[mask]]
    for i, length in enumerate(PROBE_LENGTHS):
        alone = model(input_ids=ids[i : i + 1, -length:], use_cache=False).logits
        gaps.append((together[i, -length:] - alone[0]).flatten())
    model.train(was_training)
    return float(torch.stack([gap.abs().max() for gap in gaps]).max())  # NaN stays NaN


def check_invariance(model: PreTrainedModel) -> None:
    """Refuse a model whose kernels, on this machine and at this dtype, depend on the batch all the same.

    Raises: `EngineError` with the largest difference of a logit.
    """
    gap = invariance_gap(model)
    if gap != 0:  # also refuses NaN
        raise EngineError(
            f"batch_invariant cannot be had: logits of {type(model).__name__} in {model.dtype} on {model.device} "
            f"change by up to {gap:.3g} with what else is in the batch, whose kernels here have no fixed order; leave "
            "it out, or use another dtype or device"
        )


# Across devices: a matrix whose summed dimension is split, as row-parallel layers of tensor parallelism are.

LEAVES = 8
"""Blocks of the summed dimension, hence devices at most whose tree is one."""


def sharded_sum(terms: Sequence[Float[Tensor, "*d"]], *, shards: int, tree: bool) -> Float[Tensor, "*d"]:
    """Terms that are spread over `shards` devices in their order, added in the terms' own precision.

        tree        neighbours are added, then neighbours of these sums, and so on: device borders fall on nodes of one
                    tree, and the sum has the same bits for every number of devices
        otherwise   each device adds its terms one after the other, then the devices' sums are added one after the
                    other: another order for another number of devices

    Raises: `ShapeError` unless the number of terms is a power of two that `shards` divides.

    Example:
        >>> terms = list(torch.tensor([2048.0, 1, 1, 1, -2048, 1, 1, 1]).half())
        >>> [float(sharded_sum(terms, shards=k, tree=False)) for k in (1, 2, 4)]
        [3.0, 3.0, 5.0]
        >>> [float(sharded_sum(terms, shards=k, tree=True)) for k in (1, 2, 4)]
        [5.0, 5.0, 5.0]

    Reference: Zhang et al., arXiv:2511.17826.
    """
    count = len(terms)
    if count & (count - 1) or count == 0 or shards < 1 or count % shards:
        raise ShapeError(f"{count} terms over {shards} devices; a tree needs 2, 4, 8, ... terms, and as many a device")
    add = _tree if tree else _one_by_one
    per_shard = count // shards
    return add([add(terms[i : i + per_shard]) for i in range(0, count, per_shard)])


def _tree(terms: Sequence[Tensor]) -> Tensor:
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _one_by_one(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def sharded_linear(
    x: Float[Tensor, "*n k"], weight: Float[Tensor, "o k"], *, shards: int, tree: bool
) -> Float[Tensor, "*n o"]:
    """x W^T as `shards` devices compute it that have k / shards columns of W each (emulated here, one after the other).

    With `tree` a device multiplies its columns in blocks of k / `LEAVES`, and blocks are added as in `sharded_sum`;
    otherwise it makes one product, and the devices' products are added in order, as an all-reduce may.

    Gradient: to both. Raises: `ShapeError` unless `LEAVES` divides k, and `shards` divides `LEAVES`.
    """
    blocks = LEAVES if tree else shards
    if x.shape[-1] % LEAVES or shards < 1 or LEAVES % shards:
        raise ShapeError(
            f"{x.shape[-1]} columns over {shards} devices; {LEAVES} must divide the one, {shards} {LEAVES}"
        )
    pairs = zip(x.chunk(blocks, -1), weight.chunk(blocks, -1), strict=True)
    return sharded_sum([nn.functional.linear(part, w) for part, w in pairs], shards=shards, tree=tree)


def row_parallel_layers(model: nn.Module) -> list[nn.Linear]:
    """Layers whose summed dimension tensor parallelism splits, by the model's own plan (`tp_plan` of transformers)."""
    plan = {name for name, style in (getattr(model, "tp_plan", None) or {}).items() if style == "rowwise"}
    patterns = [re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in plan]
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.in_features % LEAVES == 0
        and any(pattern.fullmatch(name) for pattern in patterns)
    ]


@contextmanager
def tensor_parallel(model: nn.Module, *, shards: int, tree: bool) -> Iterator[int]:
    """Let a model's row-parallel layers compute as `shards` devices would; yields how many layers there are."""

    def sharded(layer: nn.Module, arguments: tuple[Any, ...], _: Tensor) -> Tensor:
        y = sharded_linear(arguments[0], layer.get_parameter("weight"), shards=shards, tree=tree)
        bias = getattr(layer, "bias", None)
        return y if bias is None else y + bias

    layers = row_parallel_layers(model)
    handles = [layer.register_forward_hook(sharded) for layer in layers]
    try:
        yield len(layers)
    finally:
        for handle in handles:
            handle.remove()
