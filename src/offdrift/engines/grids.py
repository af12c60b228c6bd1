"""Grids of few bits on which rollout engines hold weights and activations, and the trainer's forward pass on the same.

    q(x) = c(x) s(x)        s: the scale of a row or a block, c: the nearest code, a number of the grid

A grid is a pair of pure functions of tensors, for weights and for the inputs of linear layers. Engines without kernels
for a grid emulate it: the values are those that a kernel of exact arithmetic multiplies, at the speed of full weights.
`on_grid` does the same to a trainer's model, whose gradient goes straight through the rounding (Jet-RL, QaRL).
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offdrift.errors import EngineError
from offdrift.texts import check_file, read_json

INT8_LEVELS = 127
"""Largest magnitude on the symmetric int8 grid."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest number of FP8 E4M3."""
FP8_LEAST_SCALE = 1 / (FP8_MAX * 512)
"""Smallest scale of a row, as in vLLM."""
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4 E2M1."""
FP4_BLOCK = 16
"""Neighbors along the input dimension that share a scale in NVFP4."""


class Coded(NamedTuple):
    """A tensor as codes and scales, of shapes that broadcast; its value is their product."""

    codes: Tensor
    scale: Tensor

    @property
    def value(self) -> Tensor:
        """The numbers that are multiplied."""
        return self.codes * self.scale


def int8(x: Float[Tensor, "*b d"], *, dim: int = -1) -> Coded:
    """Symmetric int8: one scale per row along `dim`.

        s = max|x| / 127,   c = round(x / s), half to even

    Gradient: none is meant to flow through it.

    Example:
        >>> int8(torch.tensor([2.54, 0.013, -0.031])).codes
        tensor([127.,   1.,  -2.])

    Reference: W8A8 as in compressed-tensors' "int-quantized"; FlashRL's int8 rollouts.
    """
    scale = x.abs().amax(dim, keepdim=True) / INT8_LEVELS
    return Coded((x / scale.clamp(min=torch.finfo(x.dtype).tiny)).round(), scale)


def fp8(x: Float[Tensor, "*b d"], *, dim: int = -1) -> Coded:
    """FP8 E4M3: one scale per row along `dim`.

        s = max(max|x| / 448, 1 / (448 * 512)),   c = the nearest E4M3 number to x / s

    Gradient: none is meant to flow through it.

    Example:
        >>> fp8(torch.tensor([448.0, 17.0, -0.3])).codes.tolist()
        [448.0, 16.0, -0.3125]

    Reference: vLLM's "fp8_per_channel" (weights per output channel, activations per token); FP8-RL, arXiv:2601.18150.
    """
    scale = (x.abs().amax(dim, keepdim=True) / FP8_MAX).clamp(min=FP8_LEAST_SCALE)
    return Coded((x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).to(x.dtype), scale)


def nvfp4(x: Float[Tensor, "*b d"], *, dim: int = -1) -> Coded:
    """NVFP4: FP4 E2M1 numbers, an FP8 scale for every 16 neighbors along `dim`, and a float32 scale of the tensor.

        S = max|x| / (6 * 448),   s = E4M3(max over the block |x| / (6 S)) S,   c = the nearest E2M1 number to x / s

    Codes and scales are as long as `x` along `dim`, since each block has a scale of its own. Gradient: none is meant to
    flow through it.

    Example:
        >>> nvfp4(torch.tensor([6.0, 2.4, -0.2, 5.1])).codes.tolist()
        [6.0, 2.0, -0.0, 6.0]

    Reference: QeRL, arXiv:2510.11696, eq. 2 and 3.
    """
    rows = x.movedim(dim, -1)
    width = rows.shape[-1]
    blocks = nn.functional.pad(rows, (0, -width % FP4_BLOCK)).unflatten(-1, (-1, FP4_BLOCK))
    tiny, largest = torch.finfo(x.dtype).tiny, FP4_NUMBERS[-1]
    total = (x.abs().amax() / (largest * FP8_MAX)).clamp(min=tiny)
    scale = (blocks.abs().amax(-1, keepdim=True) / (largest * total)).clamp(max=FP8_MAX).to(FP8).to(x.dtype) * total
    numbers = torch.tensor(FP4_NUMBERS, dtype=x.dtype, device=x.device)
    between = (numbers[1:] + numbers[:-1]) / 2
    between[1::2] = between[1::2].nextafter(numbers[:1])  # halfway goes to the even code, of which 0 is the first
    magnitude = numbers[torch.bucketize(blocks.abs() / scale.clamp(min=tiny), between)]
    codes = magnitude.copysign(blocks)
    pieces = (y.flatten(-2)[..., :width].movedim(-1, dim) for y in (codes, scale.expand_as(blocks)))
    return Coded(*pieces)


class RoundingGrid(NamedTuple):
    """Rounding of an engine: of its matrices, and of what it multiplies them with."""

    weights: Callable[..., Coded]
    activations: Callable[..., Coded] | None
    """Of the input of every linear layer, one scale per token; None: inputs stay as they are."""


GRIDS = {
    "int8": RoundingGrid(int8, None),
    "w8a8": RoundingGrid(int8, int8),
    "fp8_per_channel": RoundingGrid(fp8, fp8),
    "nvfp4": RoundingGrid(nvfp4, None),
}
"""Grids by the name that engines and recipes have for them."""


def grid(name: str) -> RoundingGrid:
    """A grid by name. Raises: `EngineError` if there is none."""
    if name not in GRIDS:
        raise EngineError(f"quantization = {name!r}: the grids that can be emulated are {', '.join(sorted(GRIDS))}")
    return GRIDS[name]


def matrices(model: nn.Module) -> dict[str, int]:
    """Names of the weights that a grid rounds, and the input dimension of each.

    Linear layers except the output head, and fused expert tensors `[experts, out, in]` (or
    `[experts, in, out]` where the module says that it is transposed).
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    dims: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            dims[f"{path}.weight"] = -1
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3 and "expert" in path:
                dims[f"{path}.{name}"] = -2 if getattr(module, "is_transposed", False) else -1
    return dims


def fused_experts(model: nn.Module) -> str | None:
    """Name of the first fused tensor of experts among a model's matrices; None if there is none."""
    return next((path for path in matrices(model) if model.get_parameter(path).ndim == 3), None)


class _ExpertInputs(TorchFunctionMode):
    """Rounds what fused experts multiply with their matrices, inside their forward pass.

    Their second input is computed between two products, where no hook of a module reaches it.
    """

    def __init__(self, coded: Callable[..., Coded]) -> None:
        super().__init__()
        self.coded, self.products = coded, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in EXPERT_PRODUCTS:
            self.products += 1
            # A batched product of matrix and column has its input behind the matrix.
            behind = name == "bmm" and args[1].shape[-1] == 1
            place, dim = (1, -2) if behind else (0, -1)
            rounded = straight_through(args[place], self.coded, dim=dim)
            args = (*args[:place], rounded, *args[place + 1 :])
        return func(*args, **(kwargs or {}))


EXPERT_PRODUCTS = ("linear", "bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback")
"""Functions by which transformers' fused experts multiply."""


class _StraightThrough(torch.autograd.Function):
    """The rounded value itself (x + (q - x) would differ from it in the last bit), with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(x: Float[Tensor, "*b d"], coded: Callable[..., Coded], *, dim: int = -1) -> Float[Tensor, "*b d"]:
    """x rounded to a grid, whose gradient is that of x.

        forward: q(x),   backward: dq/dx := 1

    No number is beyond the range of a grid whose scale is its own maximum, so nothing is clipped and the gradient is 1
    everywhere. Rounded in float32, returned in the type of `x`.

    Example:
        >>> x = torch.tensor([1.0, 0.3333, 0.1], requires_grad=True)
        >>> straight_through(x, int8).sum().backward()
        >>> x.grad
        tensor([1., 1., 1.])

    Reference: Bengio et al., arXiv:1308.3432; QaRL, arXiv:2604.07853; Jet-RL, arXiv:2601.14243.
    """
    with torch.no_grad():
        rounded = coded(x.detach().float(), dim=dim).value.to(x.dtype)
    return _StraightThrough.apply(x, rounded)  # type: ignore[no-any-return]


class Hooks:
    """The hooks that put a model on a grid."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def remove(self) -> None:
        """Take the model off the grid again."""
        while self.handles:
            self.handles.pop().remove()


def put_on_grid(model: nn.Module, name: str, *, weights: bool = True) -> Hooks:
    """Round a model's matrices, and their inputs where the grid says so, in every forward pass from now on.

    Parameters stay what they are, by name and by value: an optimizer moves them by steps far below the grid's, and each
    pass rounds them anew. Attributes of the modules stand for them during the pass.

    Args:
        weights: False where the parameters are rounded already, as in an engine.

    Returns: what takes the model off the grid.

    Inputs of fused experts are rounded at both of their products.

    Raises: `EngineError` if there is no such grid; in a pass, if fused experts multiply in a way not known here.
    """
    coded, hooks = grid(name), Hooks()
    of_module: dict[str, dict[str, int]] = {}
    dims_of = matrices(model) if weights or coded.activations is not None else {}
    for path, dim in dims_of.items():
        module_path, _, parameter = path.rpartition(".")
        of_module.setdefault(module_path, {})[parameter] = dim

    def enter(module: nn.Module, arguments: tuple[Any, ...], dims: dict[str, int]) -> tuple[Any, ...]:
        for parameter, dim in dims.items() if weights else ():
            # An attribute of the instance is what `module.weight` gives, before nn.Module looks among its parameters.
            weight = module.get_parameter(parameter)
            vars(module)[parameter] = straight_through(weight, coded.weights, dim=dim)
        if coded.activations is None:
            return arguments
        if module in fused:
            inside[module] = _ExpertInputs(coded.activations)
            inside[module].__enter__()
            return arguments
        return (straight_through(arguments[0], coded.activations), *arguments[1:])

    def leave(module: nn.Module, output: Any, dims: dict[str, int]) -> None:
        for parameter in dims:
            vars(module).pop(parameter, None)
        if (mode := inside.pop(module, None)) is not None:
            mode.__exit__(None, None, None)
            if output is not None and mode.products < len(dims):
                raise EngineError(
                    f"quantization = {name!r}: {type(module).__name__} multiplies by functions that are unknown here, "
                    f'so that its inner inputs were not rounded ({", ".join(EXPERT_PRODUCTS)} are); use "int8"'
                )

    inside: dict[nn.Module, _ExpertInputs] = {}
    fused: set[nn.Module] = set()
    for path, dims in of_module.items():
        module = model.get_submodule(path)
        if any(module.get_parameter(parameter).ndim == 3 for parameter in dims):
            fused.add(module)
        hooks.handles += [
            module.register_forward_pre_hook(lambda m, arguments, dims=dims: enter(m, arguments, dims)),
            module.register_forward_hook(lambda m, _, output, dims=dims: leave(m, output, dims), always_call=True),
        ]
    return hooks


@contextmanager
def on_grid(model: nn.Module, name: str | None) -> Iterator[None]:
    """The model on a grid meanwhile; as it is for None. See `put_on_grid`."""
    hooks = Hooks() if name is None else put_on_grid(model, name)
    try:
        yield
    finally:
        hooks.remove()


def instruction_set() -> str:
    """Instructions by which this processor multiplies small numbers, widest vectors first, such as "avx512+bf16+vnni".

    A kernel of int8 without VNNI adds pairs of products in 16 bits, which saturate: its results are others. What an
    engine on quantized weights draws is thus known only together with this name.
    """
    has = torch.cpu
    wide = "avx512" if has._is_avx512_supported() else "avx2" if has._is_avx2_supported() else "scalar"
    more = {
        "bf16": has._is_avx512_bf16_supported(),
        "vnni": has._is_vnni_supported(),
        "amx": has._is_amx_tile_supported(),
    }
    return "+".join([wide, *(part for part, there in more.items() if there)])


W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
"""`quantization_config` of a checkpoint on the grid "w8a8"."""


def rounded(weights: Iterable[tuple[str, Tensor]], linear: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Named weights as a W8A8 checkpoint has them: codes and scales of linear layers, all others as they are."""
    for name, weight in weights:
        if name not in linear:
            yield name, weight
            continue
        codes, scale = int8(weight.float())
        yield name, codes.to(torch.int8)
        yield f"{name}_scale", scale


@contextmanager
def loadable(path: str, linear: frozenset[str]) -> Iterator[str]:
    """A folder that vLLM opens: the checkpoint itself, or meanwhile one whose `linear` matrices are W8A8.

    Raises: `EngineError` if `path` is no folder with safetensors files, or one of them is damaged.
    """
    if not linear:
        yield path
        return
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise EngineError(
            f'quantization = "w8a8" rounds the weights of a checkpoint folder, and {path} has no safetensors files; '
            "give a folder written by save_pretrained"
        )
    with tempfile.TemporaryDirectory(prefix="offdrift-w8a8-") as folder:
        for each in Path(path).iterdir():
            if each.is_file() and each.name != "config.json" and ".safetensors" not in each.name:
                shutil.copy(each, folder)
        try:
            for each in files:
                check_file(each)
                with safe_open(each, "pt") as tensors:
                    named = ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
                    save_file(dict(rounded(named, linear)), Path(folder) / each.name, {"format": "pt"})
            config = read_json(Path(path) / "config.json")
            (Path(folder) / "config.json").write_text(json.dumps({**config, "quantization_config": W8A8}))
        except (SafetensorError, ValueError, TypeError, KeyError, OSError) as e:
            raise EngineError(f"the checkpoint {path} cannot be read: {str(e)[:300]}; copy or save it again") from e
        yield folder


def warn_of_saturation(instructions: str | None) -> None:
    """Say that int8 products are not exact on this processor, where they are not."""
    if instructions is not None and not {"vnni", "amx"} & set(instructions.split("+")):
        warnings.warn(
            f'quantization = "w8a8" on a processor with {instructions}: without VNNI, int8 products are added in 16 '
            "bits and saturate, so that a layer is off by several percent; the record says so (instructions)",
            stacklevel=3,
        )
