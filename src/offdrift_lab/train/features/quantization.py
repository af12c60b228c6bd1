"""`[quantized]` of a recipe: invariant scaling, noise in norms, and how much of an update the grid lets through.

The forward pass on the rollouts' grid is `engines.grids.put_on_grid`; what corrects for the rest is the arm's method.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from offdrift.engines.grids import GRIDS, grid, matrices
from offdrift.errors import RecipeError
from offdrift.records.rollouts import Rollouts
from offdrift_lab.train.data.group_filter import ngrams
from offdrift_lab.train.settings.rollout import RolloutSettings
from offdrift_lab.train.settings.sections import PositiveFloat, Section

PROBE = ((3, 5, 8, 13, 21, 34, 1, 2),)
"""Token ids for passes that look at how a model is built."""
ERROR_LOG_RATIO = math.log(4)
"""Nats by which the trainer's log-prob of an error token is below the engine's, at least."""
ERROR_NGRAM = 3
INVARIANT = 1e-4
"""How far scaled logits may be off, as a share of the largest: rounding, and nothing else."""


class NoiseSettings(Section):
    """QeRL: Gaussian noise in the engine's norms, drawn anew at each synchronization and smaller from stage to stage;
    see `noise_size` (arXiv:2510.11696)."""

    start: PositiveFloat = 5e-2
    """Standard deviation in the second stage; there is none in the first."""
    end: PositiveFloat = 5e-4
    """Standard deviation in the last stage."""
    stages: Annotated[int, Field(ge=3)] = 10
    """Equal parts of the run."""

    @model_validator(mode="after")
    def _annealed(self) -> NoiseSettings:
        if self.end > self.start:
            raise ValueError(
                f"quantized.noise.end = {self.end} is more than quantized.noise.start = {self.start}; noise is "
                "annealed: exchange the two"
            )
        return self


class QuantizedSettings(Section):
    """Settings for rollouts with quantized weights, besides a correction (docs/quantized.md)."""

    forward: bool = False
    """The trainer's forward passes round as the engine does (`rollout.quantization`), with a straight-through gradient:
    little mismatch is left (Jet-RL, QaRL). The policy that is trained and evaluated is then the one on the grid."""
    scale: PositiveFloat = 1.0
    """QuRL's invariant scaling: matrices behind norms are divided by it at the start, and norms multiplied. The
    function stays, and steps of the optimizer are larger by it, beside those of the grid. 1.5 in the paper."""
    noise: NoiseSettings | None = None
    """Absent: the engine has the trainer's weights. `{}`: with QeRL's noise in its norms, and its log-probs."""

    def check(self, arm: str, *, rollout: RolloutSettings, pipeline: bool, adapters: bool) -> None:
        """Refuse what cannot act.

        Args:
            arm: its name.
            pipeline: whether workers draw beside training.
            adapters: whether low-rank adapters train.

        Raises: `ValueError` naming the field, its value and the way out.
        """
        at = f"arms.{arm}: quantized"
        changed = [
            name for name in ("forward", "scale") if getattr(self, name) != QuantizedSettings.model_fields[name].default
        ]
        for name in changed:
            value = str(getattr(self, name)).lower()
            if rollout.quantization not in GRIDS:
                raise ValueError(
                    f"{at}.{name} = {value} is about the grid of the rollouts, and rollout.quantization = "
                    f"{rollout.quantization!r} is none that the trainer has; set it to one of "
                    f"{', '.join(sorted(GRIDS))}, or leave {name} out"
                )
            if adapters:
                raise ValueError(
                    f"{at}.{name} = {value} with [lora]: the engine rounds merged weights, which the trainer's passes "
                    "do not have; leave one of the two out, or set lora.base for adapters on weights of a grid"
                )
        if self.noise is not None and pipeline:
            raise ValueError(
                f"{at}.noise with [pipeline], whose workers take the trainer's weights; leave one of the two out"
            )
        if self.noise is not None and rollout.engine == "openai":
            raise ValueError(
                f'{at}.noise with rollout.engine = "openai": a server is verified with the trainer\'s weights; use '
                '"vllm" or "transformers"'
            )


@torch.no_grad()
def norm_readers(model: nn.Module) -> dict[str, list[str]]:
    """Norms whose output matrices multiply, and the names of those matrices' modules, found in a forward pass.

    A norm is a module with "norm" in its name and one weight per channel. Norms that only attention or the output head
    reads are left out.
    """
    written: dict[int, tuple[str, Tensor]] = {}
    readers: dict[str, list[str]] = {}
    paths = {path.rpartition(".")[0] for path in matrices(model)}
    handles = []

    def note(path: str, output: Tensor) -> None:
        written[output.untyped_storage().data_ptr()] = path, output  # kept, so that no other has its place in memory

    def look(path: str, arguments: tuple[object, ...]) -> None:
        first = arguments[0] if arguments else None
        if isinstance(first, Tensor) and (norm := written.get(first.untyped_storage().data_ptr())):
            readers.setdefault(norm[0], []).append(path)

    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" in path.rpartition(".")[2] and isinstance(weight, Tensor) and weight.ndim == 1:
            handles.append(module.register_forward_hook(lambda _, __, output, path=path: note(path, output)))
        if path in paths:
            handles.append(module.register_forward_pre_hook(lambda _, arguments, path=path: look(path, arguments)))
    try:
        _logits(model)
    finally:
        for handle in handles:
            handle.remove()
    return readers


def _logits(model: nn.Module) -> Tensor:
    """Logits of the model for the fixed probe tokens, in eval mode."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    try:
        logits: Tensor = model(input_ids=torch.tensor(PROBE, device=device), use_cache=False).logits
        return logits
    finally:
        model.train(training)


@torch.no_grad()
def scale_invariantly(model: nn.Module, s: float) -> None:
    """Divide the matrices that read norms by `s`, and multiply the norms by it: the same function of other weights.

        W (g * x) = (W / s) (s g * x)

    The scale of a row of W follows its maximum, so codes stay, too, and a step of the optimizer, whose size does not
    depend on that of the weights (Adam), is `s` times as large beside the distance of two codes. Exact for powers of 2,
    and to rounding for others. Gradient: none; the model is changed in place.

    Raises: `RecipeError` if it has no such pairs, or is another function afterwards, as where experts' routers read the
        same norm; the model is then as it was.

    Reference: QuRL's update-aware quantization, arXiv:2602.13953 (from secondary sources).
    """
    before, readers = _logits(model), norm_readers(model)
    pairs = [
        (model.get_parameter(f"{norm}.weight"), [model.get_parameter(f"{path}.weight") for path in read])
        for norm, read in readers.items()
        if all(isinstance(model.get_submodule(path), nn.Linear) for path in read)
    ]
    originals = [weight.clone() for norm, read in pairs for weight in (norm, *read)]
    for norm, read in pairs:
        norm.mul_(s)
        for weight in read:
            weight.div_(s)
    error = float((_logits(model) - before).abs().max() / before.abs().max())
    if not pairs or not error <= INVARIANT:
        for weight, original in zip((w for norm, read in pairs for w in (norm, *read)), originals, strict=True):
            weight.copy_(original)
        why = f"logits change by {error:.1e} of the largest" if pairs else "no linear layer reads a norm"
        raise RecipeError(
            f"quantized.scale = {s:g}: {type(model).__name__} is another function when matrices behind norms are "
            f"divided and norms multiplied by it ({why}); leave quantized.scale out"
        )


def noise_size(update: int, updates: int, settings: NoiseSettings) -> float:
    """Standard deviation of the noise in norms at an update of a run of so many; K stages of equal length.

        stage k = floor(K update / updates):   0 for k = 0,   start (end / start)^((k - 1) / (K - 2)) after that

    Example:
        >>> [round(noise_size(k, 10, NoiseSettings()), 8) for k in (0, 1, 2, 9)]
        [0.0, 0.05, 0.02811707, 0.0005]

    Reference: QeRL, arXiv:2510.11696, eq. 8 and its noise scheduler.
    """
    stage = min(settings.stages * update // updates, settings.stages - 1)
    if stage == 0:
        return 0.0
    return settings.start * (settings.end / settings.start) ** ((stage - 1) / (settings.stages - 2))


@contextmanager
def noisy_norms(model: nn.Module, norms: Sequence[str], *, sigma: float, seed: int) -> Iterator[None]:
    """Meanwhile, Gaussian noise in the weights of norms, which acts as noise in the matrices that read them.

        g <- g + sigma N(0, 1),    W ((g + z) * x) = (W + W diag(z / g)) (g * x)

    The weights are put back bit for bit.

    Args:
        norms: their paths, as `norm_readers` has them.
        sigma: in the unit of the norms' weights.

    Reference: QeRL's adaptive quantization noise, arXiv:2510.11696, section 3.3.
    """
    weights = [model.get_parameter(f"{path}.weight") for path in norms] if sigma > 0 else []
    originals = [w.detach().clone() for w in weights]
    generator = torch.Generator().manual_seed(seed % 2**63)
    try:
        with torch.no_grad():
            for weight in weights:
                weight.add_(sigma * torch.randn(weight.shape, generator=generator).to(weight.device))
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


@torch.no_grad()
def put_weights_on_grid(model: nn.Module, name: str) -> None:
    """Round a model's own matrices to a grid, once and in place; embeddings, head and norms stay. Gradient: none."""
    for path, dim in matrices(model).items():
        weight = model.get_parameter(path)
        weight.copy_(grid(name).weights(weight.float(), dim=dim).value)


@dataclass(frozen=True)
class Survival:
    """The matrices of the engine before an optimizer step, to tell what of the step its grid lets through."""

    grid: str
    dims: Mapping[str, int]
    before: Mapping[str, Tensor]

    @staticmethod
    def of(name: str, dims: Mapping[str, int], weights: Iterable[tuple[str, Tensor]]) -> Survival:
        """Keep the weights as they are now. Memory: one copy of the matrices.

        Args:
            dims: the matrices by name, and the input dimension of each (`engines.grids.matrices`).
            weights: as the engine would be given them.
        """
        return Survival(name, dims, {n: w.detach().clone() for n, w in weights if n in dims})

    @torch.no_grad()
    def sums(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Sums behind the metrics `grid/...` after a step, over all matrices; w before and w' after it.

            changed = #{w' != w},   moved = #{code of w' != code of w},   dot = <q(w') - q(w), w' - w>, and the squares

        Gradient: none.
        """
        round_to = grid(self.grid).weights
        total = torch.zeros(5, dtype=torch.float64)
        for name, after in weights:
            if name not in self.dims:
                continue
            old, new = self.before[name].float(), after.detach().float()
            old_coded, new_coded = (round_to(x, dim=self.dims[name]) for x in (old, new))
            step, rounded = (new - old).double(), (new_coded.value - old_coded.value).double()
            moved = old_coded.codes != new_coded.codes
            parts = (step != 0).sum(), moved.sum(), (step * rounded).sum(), step.square().sum(), rounded.square().sum()
            total += torch.stack([x.double() for x in parts]).cpu()
        return dict(zip(("grid/changed", "grid/moved", "grid/dot", "grid/step2", "grid/rounded2"), total, strict=True))


@torch.no_grad()
def error_tokens(rollouts: Rollouts, log_ratio: Float[Tensor, " n"]) -> dict[str, Tensor]:
    """Sums about tokens that the quantized engine drew and the trainer would hardly have drawn, and about repetitions.

        error:      log pi - log mu < -log 4, mu the engine's policy on its grid
        repetition: the response has had the 3-gram that ends with the token before

    QaRL finds garbled, repetitive tokens late in long responses of quantized rollouts, and the correction sees each of
    them by itself. With a forward pass on the same grid the two policies are one, and repetitions alone tell.

    Args:
        log_ratio: log pi - log mu of the trainer that scored the tokens, nats.

    Gradient: none.

    Reference: QaRL, arXiv:2604.07853, which gives no rule; the two limits are a choice of this project.
    """
    sequence, code, whole = ngrams(rollouts.tokens.cpu(), rollouts.lengths.cpu(), ngram=ERROR_NGRAM)
    keys = (sequence * max(1, len(code)) + code)[whole]
    order = keys.argsort(stable=True)
    again = torch.zeros(len(keys), dtype=torch.bool)
    again[order[1:]] = keys[order][1:] == keys[order][:-1]
    repeated = torch.zeros(len(code), dtype=torch.bool)
    repeated[whole.nonzero()[:, 0] + ERROR_NGRAM - 1] = again
    error = log_ratio.cpu() < -ERROR_LOG_RATIO
    place = torch.arange(len(code)) - rollouts.cu_seqlens.cpu()[sequence]
    late = 2 * place >= rollouts.lengths.cpu()[sequence]
    counts = {"errors": error, "repeated": error & repeated, "late": error & late, "repetitions": repeated}
    return {f"error_tokens/{name}": x.double().sum() for name, x in counts.items()}
