"""Replay of a compressed KV cache: the trainer's attention sees, at every token, the keys that the engine still had.

A rollout engine that forgets keys draws from another policy than a trainer that attends to everything, at equal
weights. `Rollouts.retention` says until when each key was kept, and `imposed` gives it to the model's attention.

Everything happens in hooks of the attention modules, so that it is there again wherever activations are computed again
(gradient checkpointing), and whatever wraps the model.

Shape suffixes: p positions, b sequences, t columns of a padded batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from offdrift.errors import EngineError
from offdrift.records.rollouts import Retention, Rollouts, place_dtype
from offdrift.segments import Segments, cumulative

MASKED = ("eager", "sdpa")
"""Implementations of attention that take a mask of their own for every sequence, head and layer."""
PROBED = 6
"""Tokens on which attention is tried before anything relies on it."""
ROUNDING = 0.05
"""Mean difference of logits there, in standard deviations, that a mask which hides nothing may make."""


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The model's attention, first layer first.

    Raises: `EngineError` if not every layer has one that takes masks.
    """
    named = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "num_key_value_groups")]
    modules, layers = sorted(named, key=lambda m: int(m.layer_idx)), config_of(model).num_hidden_layers  # type: ignore
    if [m.layer_idx for m in modules] != list(range(layers)):
        raise EngineError(
            f"{type(model).__name__} has {len(modules)} attention modules in {layers} layers; it needs one in each"
        )
    for module in modules:
        kind = module.config._attn_implementation  # type: ignore[union-attr]
        if kind not in MASKED:
            raise EngineError(f'the attention of {type(model).__name__} is "{kind}", which takes no mask; use "sdpa"')
    return modules


def config_of(model: nn.Module) -> Any:
    """Configuration of the language model, whatever wraps it."""
    config = next(c for m in model.modules() if (c := getattr(m, "config", None)) is not None)
    return config.get_text_config()


@torch.no_grad()
def need_led(model: nn.Module) -> None:
    """Refuse a model whose attention does not follow a record of what it may see.

    Where every key stays, log-probs have to be the model's own; where the second one goes, those behind it must change.

    Raises: `EngineError` if one of the two is not so.
    """
    layers, device = len(attention_modules(model)), next(model.parameters()).device
    ids = torch.arange(1, PROBED + 1, device=device)[None] % config_of(model).vocab_size
    places, cuts = torch.arange(PROBED, device=device), torch.tensor([0, PROBED])
    full = torch.full((PROBED, layers, 1), PROBED)
    holed = full.clone()
    holed[1] = PROBED - 1
    was_training, logits = model.training, []
    model.eval()
    for until in (None, full, holed):
        with imposed(model, None if until is None else Retention(until, cuts), places[None], places):
            logits.append(model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float())
    model.train(was_training)
    plain, same, less = logits
    moved = (plain - same).abs().mean() > ROUNDING * plain.std()  # in half precision, other kernels round otherwise
    if moved or torch.equal(plain[0, -1], less[0, -1]):
        raise EngineError(f"the attention of {type(model).__name__} does not follow the masks that it is given")


@contextmanager
def imposed(
    model: nn.Module, retention: Retention | None, positions: Int[Tensor, "b t"], cells: Int[Tensor, " p"]
) -> Iterator[None]:
    """Passes over exactly this padded batch attend to the keys that were kept, and to nothing else.

        visible(q, k) = (k <= q < until_k)   and what the model's own mask allows

    A backward pass belongs inside: it may compute activations again.

    Args:
        retention: None: the model sees what it sees.
        positions: place of every cell in its sequence.
        cells: cells of the flattened batch that hold the record's positions, in their order.

    Raises: `EngineError` if the record is that of another model or batch.
    """
    if retention is None:
        yield
        return
    modules, (_, layers, heads) = attention_modules(model), retention.visible_until.shape
    if layers not in (1, len(modules)):
        raise EngineError(f"retention of {layers} layers, the model has {len(modules)}")
    if len(retention.visible_until) != len(cells):
        raise EngineError(f"retention of {len(retention.visible_until)} positions, the batch has {len(cells)}")
    b, t = positions.shape
    # What has no record (padding, last tokens) is seen by whoever the model's own mask lets see it.
    until = torch.full((b * t, layers, heads), torch.iinfo(torch.int32).max, dtype=torch.int32, device=positions.device)
    until[cells.to(positions.device)] = retention.visible_until.to(positions.device, torch.int32)
    until = until.view(b, t, layers, heads).permute(2, 0, 3, 1)

    def visible(layer: int) -> Bool[Tensor, "b heads t t"]:
        return positions[:, None, :, None] < until[layer][:, :, None, :]

    shared = visible(0) if layers == 1 else None

    def mask_of(layer: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            allowed = by_query(module, visible(layer) if shared is None else shared)
            model_mask = kwargs["attention_mask"]
            if model_mask is None:  # causal, without padding
                model_mask = torch.ones(t, t, dtype=torch.bool, device=allowed.device).tril()
            return args, {**kwargs, "attention_mask": hidden(model_mask, allowed)}

        return hook

    handles = [m.register_forward_pre_hook(mask_of(i), with_kwargs=True) for i, m in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def by_query(module: nn.Module, by_key: Bool[Tensor, "b heads q k"]) -> Bool[Tensor, "b queries q k"]:
    """Repeat marks of key-value heads for the query heads of an attention module."""
    groups: int = module.num_key_value_groups  # type: ignore[assignment]
    return by_key if by_key.shape[1] == 1 or groups == 1 else by_key.repeat_interleave(groups, 1)


def hidden(mask: Tensor, visible: Bool[Tensor, "b heads q k"]) -> Tensor:
    """A mask of attention, of truths or additive, that also hides what is not visible."""
    if mask.dtype == torch.bool:
        return mask & visible
    return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)


def kept_until(
    prompts: Int[Tensor, " b"],
    lengths: Int[Tensor, " b"],
    lost: Bool[Tensor, "m layers heads"],
    victims: Int[Tensor, "n layers heads"],
) -> Int[Tensor, "p layers heads"]:
    """`Retention.visible_until` from what a cache let go, and when.

    Args:
        prompts: tokens of every prompt, `m` in all.
        lengths: tokens of every response, `n` in all.
        lost: keys of the prompts that went once those had been read.
        victims: place of the key that went when the token before each response token was read; negative: none.

    Example:
        >>> until = kept_until(*map(torch.tensor, ([2], [3], [[[True]], [[False]]], [[[-1]], [[-1]], [[1]]])))
        >>> until.flatten().tolist()  # prompt of two: the first goes at place 2, the second at place 3
        [2, 3, 4, 4]
    """
    computed = prompts + lengths - 1
    starts, sequences = cumulative(computed)[:-1], torch.arange(len(prompts))
    of_prompt, of_token = sequences.repeat_interleave(prompts), sequences.repeat_interleave(lengths)
    until = computed.repeat_interleave(computed)[:, None, None].repeat(1, *victims.shape[1:])
    in_prompt = torch.arange(len(of_prompt)) - cumulative(prompts)[of_prompt]
    rows = starts[of_prompt] + in_prompt
    until[rows] = torch.where(lost, prompts[of_prompt][:, None, None], until[rows])
    read_at = prompts[of_token] + torch.arange(len(of_token)) - cumulative(lengths)[of_token] - 1
    token, layer, head = (victims >= 0).nonzero(as_tuple=True)
    until[starts[of_token[token]] + victims[token, layer, head], layer, head] = read_at[token]
    return until.to(place_dtype(int(computed.max())))


@torch.no_grad()
def retention_sums(rollouts: Rollouts) -> dict[str, Tensor]:
    """Sums of the metrics `kv/...`: how many of the earlier keys, itself included, a decoded token could see."""
    retention = rollouts.retention
    assert retention is not None
    segments = Segments(retention.cu_seqlens)
    # Prompts are read whole: the first token that may see less is the one behind the prompt.
    prompts = rollouts.prompt_cu_seqlens.diff()[segments.seq_ids]
    first = torch.maximum(segments.position, prompts)[:, None, None]
    until = retention.visible_until.long()
    pairs = (segments.lengths[segments.seq_ids][:, None, None] - first).expand_as(until)
    return {
        "kv/kept": (until - first).clamp(min=0).sum(),
        "kv/pairs": pairs.sum(),
        "kv/bytes": torch.tensor(until.numel() * retention.visible_until.itemsize),
    }


def distillation(dense: Float[Tensor, "n v"], shadow: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
    """Distance of the policy that sees everything from the one that sees what the cache kept, at every token:

        KL(pi_dense || pi_shadow) = sum_a pi_dense(a) (log pi_dense(a) - log pi_shadow(a))   nats

    Args:
        dense, shadow: tempered logits of the two, -inf on the same tokens.

    Gradient: to `dense` alone, pi_dense (log pi_dense - log pi_shadow - KL).

    Example:
        >>> distillation(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log())
        tensor([0.1438])

    Reference: Shadow Mask Distillation, arXiv:2605.06850.
    """
    logp, other = dense.log_softmax(-1), shadow.detach().log_softmax(-1)
    difference = torch.where(logp > -torch.inf, logp - other, 0.0)
    return (logp.exp() * difference).sum(-1)


def sampled_distillation(logp_dense: Float[Tensor, " n"], logp_shadow: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Estimate of the distance of `distillation` from the sampled token, as in the authors' code:

        k3 = e^d - 1 - d,   d = log pi_shadow - log pi_dense

    That is an estimate of KL(pi_dense || pi_shadow) for tokens of pi_dense. Tokens here are drawn under the compressed
    cache, where its mean is chi^2(pi_shadow || pi_dense) - KL(pi_shadow || pi_dense): 0 where the two agree, positive
    elsewhere, and as heavy-tailed as the ratio itself.

    Gradient: to `logp_dense` alone, 1 - pi_shadow / pi_dense.

    Example:
        >>> dense, shadow = torch.tensor([-0.5, -1.2, -0.9]), torch.tensor([-0.6, -1.0, -1.1])
        >>> sampled_distillation(dense, shadow)
        tensor([0.0048, 0.0214, 0.0187])

    Reference: Shadow Mask Distillation, arXiv:2605.06850.
    """
    d = logp_shadow.detach() - logp_dense
    return d.exp() - 1 - d
