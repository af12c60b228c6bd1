"""`Provenance`: what drew a batch of rollouts, typed, with its text for logs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from offdrift.errors import BadValueError

STRICT = {"extra": "forbid"}
"""Fields that a record does not have are an error where it is read from text."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. The defaults sample the model's own distribution, unfiltered."""

    __pydantic_config__ = STRICT

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this mass; 1 keeps all."""
    min_p: float = 0.0
    """Keep the tokens with at least this share of the likeliest one's probability; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the sequence; the token itself is part of the response."""

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def unfiltered(self) -> Sampling:
        """Return these parameters without top-k, top-p and min-p."""
        return replace(self, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True)
class Eviction:
    """Rule by which a compressed KV cache of the rollout engine drops keys, in each layer and key-value head
    separately.

    Prompts are read whole and then cut to the budget; from there on, every token that is read takes the place of one.
    """

    __pydantic_config__ = STRICT

    policy: Literal["window", "attention"]
    """"window": the oldest key goes. "attention": the one that has received the least attention, summed over all
    tokens that were read and the head's group of queries."""
    budget: int
    """Keys kept, that of the token being read among them."""
    protected: int
    """Keys that never go. "window": the first ones of the sequence (attention sinks). "attention": the latest ones."""

    def __str__(self) -> str:
        return f"cache of {self.budget} keys by {self.policy}"


@dataclass(frozen=True)
class Provenance:
    """Origin of a batch of rollouts: engine, model, precision and sampling, as needed to tell how off-policy it is."""

    __pydantic_config__ = STRICT

    engine: str
    engine_version: str
    model: str
    dtype: str
    quantization: str | None
    sampling: Sampling
    logprobs: Literal["processed", "raw"] = "processed"
    """"processed": log-probs of the tempered, filtered distribution the token was drawn from."""
    selected: bool = False
    """Whether prompts or group sizes were chosen by rewards, or by how long responses took, as in an asynchronous run
    that takes first what has finished first: the batch is then no independent sample of either."""
    cache: Literal["recompute", "keep"] | None = None
    """What became of the keys and values of responses in progress when weights changed; None: weights did not.

    "recompute": computed anew, so that every token is drawn by the weights of its version. "keep": kept, so that
    tokens behind a change are drawn by a policy that no version has.
    """
    instructions: str | None = None
    """What the processor multiplies small numbers with, such as "avx512+vnni", where quantized weights drew the tokens:
    the results of its kernels depend on it. None: full weights, or another device."""
    eviction: Eviction | None = None
    """How the engine's cache forgets keys; None: it keeps all."""
    teacher: str | None = None
    """Name of the model whose logits were mixed into those of the policy, by the shares `Rollouts.mix_alpha`."""
    draft_tokens: int = 0
    """Tokens that a drafter proposed to one pass of the engine, at most (speculative decoding); 0: no drafter. The law
    of what is drawn is that of the engine's model all the same."""
    recorded: tuple[str, ...] = ()
    """Of `REPLAYABLE`, what was recorded with the tokens, so that a trainer can do the same again."""
    replayed: tuple[str, ...] = ()
    """Of these, what all of the trainer's policies did again. Logs say so; rollouts on their own do not."""

    def __post_init__(self) -> None:
        for name in ("recorded", "replayed"):
            if unknown := [x for x in getattr(self, name) if x not in REPLAYABLE]:
                raise BadValueError(f"provenance: {name} names {unknown[0]!r}; choose from {', '.join(REPLAYABLE)}")

    def __str__(self) -> str:
        """In one line, without what is as usual.

        Example:
            >>> str(Provenance("vllm", "0.32.0", "tiny", "bfloat16", "fp8", Sampling(64, top_p=0.95)))
            'vllm 0.32.0, bfloat16, fp8, top-p 0.95'
        """
        s = self.sampling
        parts = {
            f"{self.engine} {self.engine_version}".strip(): True,
            self.dtype: True,
            f"{self.quantization}" + f" ({self.instructions})" * bool(self.instructions): self.quantization is not None,
            f"temperature {s.temperature:g}": s.temperature != 1,
            f"top-k {s.top_k}": s.top_k > 0,
            f"top-p {s.top_p:g}": s.top_p < 1,
            f"min-p {s.min_p:g}": s.min_p > 0,
            "raw log-probs": self.logprobs == "raw",
            "chosen by results": self.selected,
            f"cache {self.cache}": self.cache is not None,
            f"mixed with {self.teacher}": self.teacher is not None,
            f"{self.eviction}": self.eviction is not None,
            f"drafts of {self.draft_tokens}": self.draft_tokens > 0,
            f"replayed {' and '.join(self.replayed)}": bool(self.replayed),
        }
        return ", ".join(text for text, shown in parts.items() if shown)

    def as_text(self) -> str:
        """As a JSON object: the same text for the same provenance."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Provenance:
        """Parse the JSON that `as_text` wrote, in this version or an earlier one with fewer fields.

        Raises: `BadValueError` naming the field, if the text is no JSON object of these fields and types.
        """
        try:
            if "\\ud" not in text.lower():  # half of a surrogate pair, which pydantic refuses
                return as_written(Provenance, json.loads(text))
        except (ValueError, TypeError, OverflowError, RecursionError):
            pass  # which field it is, and what is wrong with it, is said below
        from pydantic import TypeAdapter, ValidationError  # takes as long to import as a small log to read

        try:
            return TypeAdapter(Provenance).validate_json(text, strict=True)
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "provenance"
            raise BadValueError(f"provenance: {field}: {first['msg']} (is {first['input']!r:.80})") from e


REPLAYABLE = ("support", "routes", "retention")
"""What a trainer can do again as the engine did it: filters (`Rollouts.support`), the choice of experts, and which keys
its cache kept."""


def as_written(kind: Any, value: Any) -> Any:
    """Make a value of a record's type of plain JSON, of exactly that type: the strict mode of pydantic, without it.

    Raises: `TypeError`, `ValueError` or `OverflowError` if it is of another.
    """
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.80} is not an object")
        types = _types(kind)
        values = {name: as_written(types[name], x) for name, x in value.items() if _one_of(name, types)}
        return kind(**values)  # type: ignore[operator]
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return next(x for x in options if _one_of(value, options) and x == value)
    if get_origin(kind) in (Union, UnionType):
        return None if value is None else as_written(next(x for x in options if x is not NoneType), value)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(as_written(options[0], x) for x in value)
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind}")
    return value


_types = cache(get_type_hints)


def _one_of(value: Any, options: Any) -> bool:
    """Whether it is one of the options. Raises: `ValueError` if not."""
    if value not in options:
        raise ValueError(f"{value!r} is not one of {list(options)}")
    return True
