"""Decorators that make parts of methods from functions of the user's: `statistic`, `weight`, `objective`, `advantage`.

A statistic and an advantage estimator get a name, which gates and methods give. A weight and an objective become a
frozen class of that name: its fields are the function's keyword arguments, beside `on` and `unit`, so that `override`,
recipes and the method table read and change them like those of the library's own parts.

Functions say by the names of their arguments what they want (`INPUTS`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import field, make_dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from offdrift.advantages import ADVANTAGES, Credit, Estimator
from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.correction.statistics import OF_PROBABILITY, OF_RATIO, SIGNED, statistics
from offdrift.correction.weight import Weighted
from offdrift.errors import MethodError, ShapeError, check_choice
from offdrift.logprobs import LogProbs
from offdrift.methods.load import reported
from offdrift.methods.table import METHODS
from offdrift.numerics import ratio as exp_of
from offdrift.objectives import TokenLoss
from offdrift.ratios import RatioName, Unit, log_ratio, per_unit, stopped_log_ratio


class Asked(NamedTuple):
    """Arguments of a call of a part."""

    part: Any
    logprobs: LogProbs
    advantages: Tensor | None
    batch_info: BatchInfo
    differentiated: bool

    @property
    def log_ratio(self) -> Tensor:
        """The log-ratio of each token's unit; with its gradient where that is wanted."""
        of = log_ratio if self.differentiated else stopped_log_ratio
        return per_unit(of(self.logprobs, on=self.part.on), self.logprobs.segments, unit=self.part.unit)

    def per_token(self, name: str) -> Tensor:
        """Advantages or a field of `BatchInfo`, a number for each token."""
        if name == "advantages":
            if self.advantages is None:
                raise MethodError(f"{type(self.part).__name__} reads advantages, and none were given")
            return self.advantages
        x = self.batch_info.required(name)
        return self.logprobs.segments.spread(x) if name == "rewards" else x


INPUTS: dict[str, tuple[Callable[[Asked], Any], str]] = {
    "ratio": (lambda x: exp_of(x.log_ratio), "exp(log_ratio), within e^-20 and e^20"),
    "log_ratio": (lambda x: x.log_ratio, "log-ratio of the token's unit, nats"),
    "advantages": (lambda x: x.per_token("advantages"), "advantage of the token"),
    "logp": (lambda x: x.logprobs.current, "log-prob under the current policy, nats"),
    "entropy": (lambda x: x.per_token("entropy"), "entropy of the old policy, nats"),
    "version_lag": (lambda x: x.per_token("version_lag"), "updates since the weights that drew the token"),
    "rewards": (lambda x: x.per_token("rewards"), "reward of the token's response"),
    "segments": (lambda x: x.logprobs.segments, "which tokens make up which response (`offdrift.Segments`)"),
}
"""Arguments that a weight or an objective may have, one number per token each, and what they are."""

_ORIGINS: dict[tuple[str, str], tuple[str, str]] = {}
"""File and qualified name of the function behind each registered name: what runs again replaces itself."""


def statistic(function: Callable[..., Tensor] | None = None, *, signed: bool = False) -> Any:
    """Give gates a statistic of your own, under the function's name.

    Args:
        function: of `log_ratio` (nats, one per token), or of `logp_first` (log-prob under the policy that is averaged
            over) and `log_ratio`. Returns a number per token; NaN and +inf are never inside a gate.
        signed: whether it says which way a token moved, as `ratio` does: `advantage="outward"` reads its sign.

    Raises: `MethodError` for a name that is taken, or other arguments.

    Example:
        >>> import offdrift as od
        >>> @od.statistic
        ... def root_error(log_ratio):
        ...     return log_ratio.abs().sqrt()
        >>> od.Gate(statistic="root_error", on="full", unit="seq_max", high=0.3).formula
        'keep if seq_max root_error(full) <= 0.3'
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name, arguments = function.__name__, tuple(inspect.signature(function).parameters)
        tables = {("log_ratio",): OF_RATIO, ("logp_first", "log_ratio"): OF_PROBABILITY}
        if arguments not in tables:
            raise MethodError(
                f"statistic {name!r} has the arguments {', '.join(arguments) or 'none'}; expected log_ratio, or "
                "logp_first and log_ratio"
            )
        _claim("statistic", function, statistics())
        for table in (OF_RATIO, OF_PROBABILITY):
            table.pop(name, None)
        tables[arguments][name] = function
        (SIGNED.add if signed else SIGNED.discard)(name)
        return function

    return register if function is None else register(function)


def advantage(function: Callable[[Credit], Tensor] | None = None, **about: Any) -> Any:
    """Give methods an advantage estimator of your own, under the function's name.

    Args:
        function: of a `Credit` (rewards, segments, groups; all float64). Returns an advantage per token.
        about: fields of `Estimator`: `needs`, `reads`, `siblings`, `stands_for`, `provided`, `baseline`.

    Raises: `MethodError` for a name that is taken, or an unknown field.

    Example:
        >>> import offdrift as od
        >>> @od.advantage(siblings=False)
        ... def reward_itself(credit):
        ...     return credit.segments.spread(credit.rewards)
        >>> od.advantages(torch.tensor([1.0, 0.0]), od.Segments.from_lengths([1, 2]), how="reward_itself")
        tensor([1., 0., 0.])
        >>> _ = ADVANTAGES.pop("reward_itself")  # an example leaves nothing behind
    """

    def register(function: Callable[[Credit], Tensor]) -> Callable[[Credit], Tensor]:
        _claim("advantage", function, tuple(ADVANTAGES))
        summary = about.pop("summary", (inspect.getdoc(function) or function.__name__).splitlines()[0])
        try:
            ADVANTAGES[function.__name__] = Estimator(function, summary, about.pop("reference", ""), **about)
        except TypeError as e:
            raise MethodError(f"advantage {function.__name__!r}: {e}") from e
        return function

    return register if function is None else register(function)


def weight(function: Callable[..., Tensor] | None = None, *, on: RatioName = "mismatch", unit: Unit = "token") -> Any:
    """Make a weight of your own: a number >= 0 for each token, without gradient, that multiplies its loss.

    Args:
        function: its arguments are among `INPUTS`, then settings by keyword, with defaults. Returns a number per token.
        on: the ratio that it corrects for; a method refuses two weights of one ratio.
        unit: what that ratio is taken over (`ratios.per_unit`).

    Returns: a class of parts; its objects have `on`, `unit` and the settings as fields.

    Raises: `MethodError` for a name that is taken, or an argument that is none of these.

    Example:
        >>> import offdrift as od
        >>> @od.weight(on="mismatch")
        ... def halfway(ratio, *, power: float = 0.5):
        ...     return ratio**power
        >>> halfway(power=0.25).formula
        'weight halfway(ratio(mismatch)), power=0.25'
    """

    def call(part: Any, logprobs: LogProbs, advantages: Tensor | None = None, batch_info: BatchInfo = NO_INFO) -> Any:
        with torch.no_grad():
            asked = Asked(part, logprobs, advantages, batch_info, differentiated=False)
            plain = exp_of(asked.log_ratio)
            w = _per_token(part, _called(part, asked), plain)
            return Weighted(w, w != plain)

    def register(function: Callable[..., Tensor]) -> type:
        return _part("weight", function, call, {"on": on, "unit": unit}, advantage="any")

    return register if function is None else register(function)


def objective(
    function: Callable[..., Any] | None = None,
    *,
    on: RatioName | None = "staleness",
    unit: Unit = "token",
    gradient: Literal["unit", "token", "score"] = "unit",
) -> Any:
    """Make an objective of your own: the loss of each token, to be minimized, through which the gradient flows.

    Args:
        function: its arguments are among `INPUTS`, then settings by keyword, with defaults. Returns a number per
            token, or a `TokenLoss`, which also says where a clip acted.
        on: the ratio that it contains; None for none. A method refuses a weight on the same ratio.
        unit: what that ratio is taken over.
        gradient: "unit" if the loss is differentiated as it stands; "score" or "token" if something in it is detached
            on purpose, so that its gradient is not its derivative.

    Returns: a class of parts; its objects have `on`, `unit` and the settings as fields.

    Raises: `MethodError` for a name that is taken, or an argument that is none of these.

    Example:
        >>> import offdrift as od
        >>> @od.objective(on="staleness")
        ... def damped(ratio, advantages, *, width: float = 1.0):
        ...     return -advantages * ratio / (1 + width * (ratio - 1) ** 2)
        >>> damped(width=2.0).formula
        'L = damped(ratio(staleness)), width=2.0'
    """
    check_choice("gradient", gradient, ("unit", "token", "score"))

    def call(part: Any, logprobs: LogProbs, advantages: Tensor | None = None, batch_info: BatchInfo = NO_INFO) -> Any:
        asked = Asked(part, logprobs, advantages, batch_info, differentiated=True)
        loss = _called(part, asked)
        if isinstance(loss, TokenLoss):
            return loss
        return TokenLoss(_per_token(part, loss, logprobs.current))

    def register(function: Callable[..., Any]) -> type:
        return _part("objective", function, call, {"on": on, "unit": unit}, gradient=gradient)

    return register if function is None else register(function)


def _called(part: Any, asked: Asked) -> Any:
    """The function's answer to what it asks for, under the part's settings."""
    inputs = {name: INPUTS[name][0](asked) for name in part.inputs}
    with reported(type(part).__name__):
        return part.function(**inputs, **{name: getattr(part, name) for name in part.settings})


def _per_token(part: Any, x: Any, like: Tensor) -> Tensor:
    """The answer, one number per token. Raises: `ShapeError`."""
    if not isinstance(x, Tensor) or x.shape != like.shape:
        what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ShapeError(f"{type(part).__name__} returned {what}; expected a number per token, {tuple(like.shape)}")
    return x.to(like.dtype)


def _part(
    kind: str, function: Callable[..., Any], call: Callable[..., Any], base: Mapping[str, Any], **fixed: Any
) -> type:
    """A frozen class of the function's name with its settings as fields."""
    parameters = inspect.signature(function).parameters
    inputs = tuple(name for name in parameters if name in INPUTS)
    settings = {name: p for name, p in parameters.items() if name not in INPUTS}
    if bad := [n for n, p in settings.items() if p.default is p.empty or n in base]:
        raise MethodError(
            f"{kind} {function.__name__!r} has the argument {bad[0]!r}; expected {', '.join(INPUTS)}, and settings by "
            "keyword, with defaults"
        )
    if function.__name__ in {type(x).__name__ for row in METHODS.values() for x in row.parts}:
        raise MethodError(f"{kind} {function.__name__!r}: the library has one of that name; choose another")
    types: dict[str, Any] = {"on": RatioName | None if kind == "objective" else RatioName, "unit": Unit}
    annotations = {n: function.__annotations__.get(n, Any) for n in settings}
    defaults = {**base, **{n: p.default for n, p in settings.items()}}
    rows = [(n, {**types, **annotations}[n], field(default=x)) for n, x in defaults.items()]
    needs = tuple(name for name in inputs if name in ("entropy", "version_lag", "rewards"))
    about = {"__doc__": function.__doc__, "__module__": function.__module__, "formula": property(_formula)}
    calls = {"__call__": call, "__post_init__": _check, "function": staticmethod(function)}
    names = {"inputs": inputs, "settings": tuple(settings), "needs": needs, "kind": kind, **fixed}
    namespace = {**about, **calls, **names}
    return make_dataclass(function.__name__, rows, namespace=namespace, frozen=True, kw_only=True)


def _check(part: Any) -> None:
    if part.on is not None or part.kind == "weight":
        check_choice("on", part.on, get_args(RatioName))
    check_choice("unit", part.unit, get_args(Unit))
    reads_ratio = {"ratio", "log_ratio"} & set(part.inputs)
    if part.on is None and reads_ratio:
        raise MethodError(
            f"{type(part).__name__} reads {reads_ratio.pop()}, and on=None says that it contains no ratio"
        )


def _formula(part: Any) -> str:
    """The part in one line: name, ratio, settings."""
    unit = "" if part.unit == "token" else f"{part.unit} "
    inside = f"{unit}ratio({part.on})" if part.on else "log pi"
    start = "weight " if part.kind == "weight" else "L = "
    values = [f"{name}={getattr(part, name)}" for name in part.settings]
    return ", ".join([f"{start}{type(part).__name__}({inside})", *values])


def _claim(kind: str, function: Callable[..., Any], taken: tuple[str, ...]) -> None:
    """Take a name for a function. Raises: `MethodError` if another function has it."""
    name, origin = function.__name__, (inspect.getfile(function), function.__qualname__)
    first = _ORIGINS.get((kind, name))
    if first is None and name in taken:
        raise MethodError(f"{kind} {name!r}: the library has one of that name; choose another")
    if first is not None and first != origin:
        raise MethodError(f"{kind} {name!r}: {first[0]} has defined one of that name; choose another")
    _ORIGINS[kind, name] = origin
