"""Sharded training: every process holds a part of the weights, of their gradients and of the optimizer's state.

    accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP -m offdrift train ...

torch's `fully_shard` (FSDP2) gathers a layer's weights for its pass and gives them back afterwards; accelerate applies
it. Two things follow, and everything here is about them. A forward pass is a meeting: all processes must make the same
number, or they wait forever. And whoever needs whole weights (a rollout engine, the stored model) gathers them, one
tensor after another, in all processes at once.

On CPUs accelerate ignores `--use_fsdp`; `make_accelerator` turns it on there, too, over gloo, by the same path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, gather_object
from accelerate.utils.fsdp_utils import disable_fsdp_ram_efficient_loading
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, StateDictType
from torch.distributed.tensor import DTensor

from offdrift.errors import RecipeError

T = TypeVar("T")


def make_accelerator(**options: Any) -> Accelerator:
    """accelerate as it was launched, but for two things: precision is the recipe's matter, `optim.dtype`; and
    processes on CPUs are sharded if the launch asks for it.

    Args:
        options: of `accelerate.Accelerator`.

    Raises: `RecipeError` if the launch asks for another kind of sharding than is supported.
    """
    accelerator = Accelerator(mixed_precision="no", **options)
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if sharded and accelerator.distributed_type == DistributedType.MULTI_CPU:
        if torch.accelerator.is_available():
            raise RecipeError("--use_fsdp with --cpu on a machine that has an accelerator: leave out one of the two")
        # Processes and their accelerators share these two.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
    if accelerator.distributed_type == DistributedType.FSDP:
        # A new one for every run: it remembers the layers of the first model that it met.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        _check_plugin(accelerator.state.fsdp_plugin)
        # Every process reads all weights: its engine and the reference model have them whole.
        disable_fsdp_ram_efficient_loading()
    elif sharded:
        raise RecipeError("--use_fsdp with one process has nothing to shard: raise --num_processes, or leave it out")
    return accelerator


def _check_plugin(plugin: Any) -> None:
    """Refuse settings of accelerate's FSDP plugin that this trainer has no tests for."""
    refused = {
        "--fsdp_version 1": (plugin.fsdp_version != 2, "set it to 2"),
        "--fsdp_offload_params true": (
            isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "leave it out, and launch more processes",
        ),
        "--fsdp_state_dict_type": (
            plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT,
            "set it to SHARDED_STATE_DICT: checkpoints stay sharded, and the trained model is stored whole anyway",
        ),
    }
    for option, (applies, way_out) in refused.items():
        if applies:
            raise RecipeError(f"{option} is not supported by this trainer; {way_out}")


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's weights are spread over processes."""
    return isinstance(model, FSDPModule)


def local_weights(model: nn.Module, *, trained: bool = False) -> dict[str, Tensor]:
    """This process's part of every weight, by name; all of it where the model is not sharded.

    The tensors share the model's memory: what is written into them, the model's next pass gathers.

    Args:
        trained: only the weights that train.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a pass without gradients leaves the output head gathered
    named = ((_plain(n), p.detach()) for n, p in model.named_parameters() if p.requires_grad or not trained)
    return {name: w.to_local() if isinstance(w, DTensor) else w for name, w in named}


def whole_weights(model: nn.Module, *, on: torch.device | str | None = None) -> Iterator[tuple[str, Tensor]]:
    """All weights by name, each whole in every process; all processes must go through them together.

    Memory: of a sharded model one gathered tensor at a time, if the caller keeps none: the largest is mostly the
    embedding. Nothing is copied of a model that is not sharded, unless `on` is another device.
    """
    for name in local_weights(model):
        weight = model.get_parameter(name)
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        yield name, weight.detach() if on is None else weight.detach().to(on)


def _plain(name: str) -> str:
    """A parameter's name in the model that was loaded, without what recomputing activations adds to it."""
    return name.replace("_checkpoint_wrapped_module.", "")


def in_step(model: nn.Module, pieces: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Pieces for one forward pass each, and whether the piece counts.

    Where the model is sharded, all processes make as many passes as the one with the most pieces: the others repeat
    their last, which does not count.
    """
    if not is_sharded(model):
        yield from ((piece, True) for piece in pieces)
        return
    local = list(pieces)
    for i in range(max(gather_object([len(local)]))):
        yield local[min(i, len(local) - 1)], i < len(local)


def clip_gradients(accelerator: Accelerator, model: nn.Module, limit: float, *, scale: float = 1.0) -> Tensor:
    """Divide a model's gradients by `scale`, and clip their global norm to `limit`; the norm before, on the host."""
    if scale != 1.0:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 / scale)
    norm = accelerator.clip_grad_norm_(model.parameters(), limit)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return torch.as_tensor(0.0 if norm is None else norm).cpu()


def anywhere(model: nn.Module, values: Iterable[T]) -> set[T]:
    """The values of all processes where the model is sharded, else this process's own."""
    local = set(values)
    return set().union(*gather_object([local])) if is_sharded(model) else local
