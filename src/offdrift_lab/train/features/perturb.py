"""Adaptive layerwise perturbation in a run: the loss scores the policy with noise in the input of every layer.

    h_l <- h_l + sigma_l eps_l,    eps_l ~ N(0, I),    sigma_l = exp(psi_l) learned

The ratio's numerator is the perturbed policy; rollout, old and reference policy, evaluation, evidence for certificates,
gates on whole distributions and the token log are about the policy itself, for which a step makes one more forward pass
without gradient. Noise is a function of the run's seed, the update, the process, the piece of the batch and the layer:
a second forward pass over a piece, as activation checkpointing makes one, draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor, nn

from offdrift.errors import RecipeError
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.loop.old_policy import read_weights, write_weights
from offdrift_lab.train.settings.optim import PerturbSettings
from offdrift_lab.train.settings.recipe import Recipe

FILE = "perturbation.safetensors"
"""File of the sizes and of their optimizer in a checkpoint."""


def perturbed(
    hidden: Float[Tensor, "*s d"], log_sigma: Float[Tensor, ""], noise: Float[Tensor, "*s d"]
) -> Float[Tensor, "*s d"]:
    """A layer's input with noise of a learned size.

        h + exp(psi) eps

    Args:
        hidden: hidden states, in their own unit.
        log_sigma: psi.
        noise: eps, of variance 1.

    Gradient: to `hidden` and `log_sigma`. A size that is small beside the precision of `hidden` is lost in rounding:
    1e-6 needs float32.

    Example:
        >>> perturbed(torch.tensor([0.8, -0.5]), torch.tensor(0.1).log(), torch.tensor([0.5, -0.3]))
        tensor([ 0.8500, -0.5300])

    Reference: ALP, arXiv:2603.19470, and its official README.
    """
    return hidden + (log_sigma.exp() * noise).to(hidden.dtype)


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers of a causal language model, first to last.

    Raises: `RecipeError` if they cannot be located.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    layers = next((x for name in ("layers", "h", "blocks") if (x := getattr(decoder, name, None)) is not None), None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise RecipeError(
            f"optim.perturb: {type(model).__name__} has no list of decoder layers (layers, h or blocks of its decoder) "
            "whose inputs could be perturbed; leave optim.perturb out"
        )
    return list(layers)


class Perturbation:
    """Sizes of the noise, their optimizer, and the noise itself while it is on.

    Args:
        model: the trainer's, unwrapped.
        seed: of the run.

    Raises: `RecipeError` if the model's layers cannot be located.
    """

    def __init__(self, model: nn.Module, settings: PerturbSettings, accelerator: Accelerator, *, seed: int) -> None:
        self.layers, self.accelerator, self.seed = decoder_layers(model), accelerator, seed
        start = torch.full((len(self.layers),), math.log(settings.sigma), device=accelerator.device)
        self.log_sigma = nn.Parameter(start)
        self.optimizer = torch.optim.Adam([self.log_sigma], lr=settings.lr)

    @contextmanager
    def on(self, version: int, piece: int) -> Iterator[None]:
        """Perturb every forward pass of the layers, and what is recomputed of it in a backward pass.

        Args:
            version: updates taken before this one.
            piece: number of the piece within the update.
        """
        rank = self.accelerator.process_index
        seed = ((self.seed * 1_000_003 + version) * 4_099 + rank) * 65_537 + piece

        def add_noise(
            layer: int, args: tuple[Any, ...], words: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            hidden = args[0] if args else words["hidden_states"]
            generator = torch.Generator(hidden.device).manual_seed((seed * 1_021 + layer) % 2**63)
            noise = torch.randn(hidden.shape, generator=generator, device=hidden.device)
            hidden = perturbed(hidden, self.log_sigma[layer], noise)
            return ((hidden, *args[1:]), words) if args else (args, {**words, "hidden_states": hidden})

        handles = [
            layer.register_forward_pre_hook(lambda _, args, words, i=i: add_noise(i, args, words), with_kwargs=True)
            for i, layer in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def step(self, *, scale: float = 1.0) -> dict[str, Float[Tensor, ""]]:
        """Move the sizes along their gradient, averaged over processes as the model's is.

        Args:
            scale: what the loss was multiplied by.

        Returns: mean and largest size before the step, as `perturb/...`.
        """
        sigma = self.log_sigma.detach().exp()
        gradient = self.log_sigma.grad
        assert gradient is not None, "no forward pass was perturbed"
        if self.accelerator.num_processes > 1:
            gradient.copy_(torch.stack(gather_object([gradient.cpu()])).mean(0))
        gradient.mul_(1 / scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"perturb/sigma_mean": sigma.mean(), "perturb/sigma_max": sigma.max()}

    def save(self, folder: Path) -> None:
        """Store sizes and optimizer in a checkpoint. Raises: `RecordError` if it cannot be written."""
        write_weights({"log_sigma": self.log_sigma, **self.optimizer.state[self.log_sigma]}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Take back what `save` stored. Raises: `CheckpointError` if it is not there."""
        state = dict(read_weights(folder / FILE))
        with torch.no_grad():
            self.log_sigma.copy_(state.pop("log_sigma"))
        packed = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**packed, "state": {0: state}})


class LayerNoise(Feature):
    """`optim.perturb`: an arm's perturbation, on while a step's pieces are scored, whose sizes take a step with it."""

    perturbs = True
    noise: Perturbation

    def __init__(self, settings: PerturbSettings) -> None:
        self.settings = settings

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> LayerNoise | None:
        return None if recipe.optim.perturb is None else cls(recipe.optim.perturb)

    def check(self, recipe: Recipe, model: Any) -> None:
        decoder_layers(model)

    def start(self, arm: Any) -> None:
        self.noise = Perturbation(arm.inner, self.settings, arm.accelerator, seed=arm.run.recipe.seed)

    def stepping(self, arm: Any) -> None:
        self.noise.log_sigma.grad = None

    def scoring(self, arm: Any, piece: Any) -> AbstractContextManager[None]:
        """Noise in the passes of a piece, the backward pass included, which may compute activations again."""
        return self.noise.on(arm.version, piece.number)

    def stepped(self, arm: Any, update: Any) -> Metrics:
        return Metrics(maxima=self.noise.step(scale=update.loss_scale or 1.0)) if update.taken else Metrics()

    def save(self, folder: Path) -> None:
        self.noise.save(folder)

    def load(self, folder: Path) -> None:
        self.noise.load(folder)
