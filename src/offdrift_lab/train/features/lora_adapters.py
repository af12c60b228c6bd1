"""Low-rank adapters in a run, through peft: what trains, what the engine is given, what a checkpoint stores.

    y = (W + (alpha / rank) B A) x        A random, B = 0 at the start; W never changes

Adapters are put into the run's own model, so that there is one copy of W: without them it is the reference policy and
the start of the next arm. The engine is given merged weights under the model's own names. What is stored for an old
policy or a checkpoint are the adapters alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offdrift.errors import RecipeError
from offdrift.judge import num_experts
from offdrift_lab.train.loop.sharded import whole_weights
from offdrift_lab.train.settings.sections import LoraSettings

ADAPTER = "default"
"""peft's name of the only adapter."""


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have adapters, by name; none where peft has put none in."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}


def add_adapters(model: PreTrainedModel, settings: LoraSettings, *, seed: int) -> PreTrainedModel:
    """Put fresh adapters into a model, in place of any that it has; from then on only they train.

    Args:
        seed: of the matrices A; the matrices B are 0, so that the policy is the model's at first.

    Raises: `RecipeError` if peft is absent, a target is no linear layer or matches none, or if the model is a mixture
        of experts and the targets are not named.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as e:
        raise RecipeError("[lora] needs the package peft: pip install 'offdrift[train]'") from e
    if num_experts(model) > 1 and settings.targets == "all-linear":
        raise RecipeError(
            'lora.targets = "all-linear": the experts of this model are no linear layers of their own and would get no '
            'adapters; name the layers that shall have some, for instance lora.targets = ["q_proj", "v_proj"]'
        )
    remove_adapters(model)
    head = model.get_output_embeddings()
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    alpha: Any = settings.alpha
    config = LoraConfig(r=settings.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of targets that are refused below
            torch.default_generator.manual_seed(seed)
            inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as e:
        remove_adapters(model)
        raise RecipeError(f"lora.targets = {settings.targets!r}: {str(e).splitlines()[0]}") from e
    layers = {name: layer.get_base_layer() for name, layer in adapted_layers(model).items()}
    refused = [name for name, base in layers.items() if base is head or not isinstance(base, nn.Linear)]
    if refused:
        remove_adapters(model)
        raise RecipeError(
            f"lora.targets = {settings.targets!r} matches {refused[0]}: adapters of embeddings and of the output head, "
            "which may be one matrix, are not supported; name linear layers between them"
        )
    return model.eval()


def remove_adapters(model: nn.Module) -> None:
    """Take a model's adapters out again; its own weights are as they were, and train."""
    for name, layer in adapted_layers(model).items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    model.requires_grad_(True)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's weights by the names that they have without adapters, W + (alpha / rank) B A where there are some.

    One merged matrix exists at a time. Gradient: none.
    """
    layers = adapted_layers(model)
    parts = {id(p) for layer in layers.values() for n, p in layer.named_parameters() if not n.startswith("base_layer.")}
    bases = {id(layer.get_base_layer().weight): layer for layer in layers.values()}
    for name, weight in model.named_parameters():
        if id(weight) in parts:
            continue
        layer, merged = bases.get(id(weight)), weight.detach()
        if layer is not None:
            merged = merged + layer.get_delta_weight(ADAPTER).detach()
        yield name.replace(".base_layer.", "."), merged


def engine_weights(model: nn.Module, *, on: torch.device | str | None = None) -> Iterator[tuple[str, Tensor]]:
    """A model's weights as an engine takes them: whole, and merged where it has adapters; see `whole_weights`."""
    if not adapted_layers(model):
        yield from whole_weights(model, on=on)
        return
    for name, weight in merged_weights(model):
        yield name, weight if on is None else weight.to(on)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without what its adapters add, and afterwards with it; nothing where it has none."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def keep_trained(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
    """Before accelerate stores a checkpoint: leave out what never changes of models with adapters.

    There are no `weights` of models that are sharded: accelerate writes their shards itself.
    """
    for model, state in zip(models, weights):
        if adapted_layers(model):
            trained = {name.removeprefix("module.") for name, p in model.named_parameters() if p.requires_grad}
            for name in [n for n in state if n.removeprefix("module.") not in trained]:
                del state[name]


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write the adapters as peft does: `PeftModel.from_pretrained(base, folder)` reads them."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    prefixed = {f"base_model.model.{n}": w.cpu().contiguous() for n, w in get_peft_model_state_dict(model).items()}
    save_file(prefixed, folder / "adapter_model.safetensors")
    model.peft_config[ADAPTER].save_pretrained(str(folder))  # type: ignore[operator,union-attr]
