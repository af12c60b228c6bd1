"""Engine specifications, one line of text: `vllm:bfloat16,kv_cache_dtype=fp8`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from offdrift.errors import EngineError

Option = str | int | float | bool

KINDS = {"vllm": "bfloat16", "transformers": "float32", "openai": "auto"}
"""Engines there are, and the dtype that each has if none is named; "auto": what the server says."""

DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip


@dataclass(frozen=True)
class EngineSpec:
    """An engine and how it computes: kind, dtype, options.

    Example:
        >>> spec = EngineSpec.parse("vllm:bfloat16,kv_cache_dtype=fp8")
        >>> spec.options["kv_cache_dtype"], str(spec.with_(enable_prefix_caching=False))
        ('fp8', 'vllm:bfloat16,enable_prefix_caching=false,kv_cache_dtype=fp8')
    """

    kind: str
    dtype: str
    options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EngineError(
                f"no engine is called {self.kind!r}; write one of "
                + ", ".join(f'"{k}:{d}"' for k, d in KINDS.items()).replace("openai:auto", "openai:URL")
            )
        if self.dtype != KINDS[self.kind]:
            object.__setattr__(self, "dtype", dtype_of(self.dtype))
        object.__setattr__(self, "options", dict(sorted(self.options.items())))

    @staticmethod
    def parse(text: str) -> EngineSpec:
        """`KIND[:DTYPE][,OPTION=VALUE ...]` or `openai:URL[,OPTION=VALUE ...]`, the inverse of `str`.

        Values are true, false, whole numbers, numbers, or else words.

        Raises: `EngineError` naming what cannot be read.
        """
        head, *options = text.strip().split(",")
        kind, _, dtype = head.partition(":")
        named: dict[str, Option] = {}
        for each in options:
            name, equals, value = each.partition("=")
            if not (name.strip() and equals and value.strip()):
                raise EngineError(f"{each!r} in {text!r} is no option; write NAME=VALUE")
            named[name.strip()] = _value(value.strip())
        kind, dtype = kind.strip(), dtype.strip()
        if kind == "openai":
            named["url"], dtype = dtype, str(named.pop("dtype", ""))
        return EngineSpec(kind, dtype or KINDS.get(kind, "float32"), named)

    def with_(self, *, dtype: str | None = None, **options: Option) -> EngineSpec:
        """The same with another dtype, or with options added or replaced."""
        return replace(self, dtype=dtype or self.dtype, options={**self.options, **options})

    def __str__(self) -> str:
        options = dict(self.options)
        parts = [f"{self.kind}:{self.dtype}"]
        if self.kind == "openai":
            parts = [f"openai:{options.pop('url', '')}", f"dtype={self.dtype}"]
        for name, value in options.items():
            parts.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        return ",".join(parts)

    def __hash__(self) -> int:
        return hash(str(self))


class Pair(NamedTuple):
    """The engine that draws the tokens and the one that scores them."""

    rollout: EngineSpec
    train: EngineSpec


def dtype_of(word: Option) -> str:
    """A dtype by its full name. Raises: `EngineError` for an unknown one."""
    if word not in DTYPES:
        raise EngineError(f"no dtype {word!r}; choose one of {', '.join(sorted(set(DTYPES.values())))}")
    return DTYPES[str(word)]


def _value(word: str) -> Option:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
