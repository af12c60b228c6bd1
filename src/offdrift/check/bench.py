"""Engines by description, and `Bench`: one set of weights in float32, and the engines made of it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offdrift.check.rescore import Scored, rescored
from offdrift.engines import Engine, make_engine
from offdrift.engines.hf_fixed_order import batch_invariant, check_invariance
from offdrift.engines.output_head import head_of, recast
from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import EvidenceKind, FullVocab, HiddenStates, Rollouts

Option = str | int | float | bool

KINDS = {"vllm": "bfloat16", "transformers": "float32", "openai": "auto"}
"""Engines there are, and the dtype that each has if none is named; "auto": what the server says."""

SERVERS: dict[str, dict[str, str]] = {"openai": {}, "vllm-server": {}, "sglang": {"api": "sglang"}}
"""Words before a server's address, and the options that they stand for."""

DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip


@dataclass(frozen=True)
class EngineSpec:
    """An engine and how it computes, one line of text: `vllm:bfloat16,kv_cache_dtype=fp8`.

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
        """`KIND[:DTYPE][,OPTION=VALUE ...]` or `openai:URL[,OPTION=VALUE ...]`, the inverse of `str`; `vllm-server:URL`
        and `sglang:URL` are other words for a server.

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
        if kind in SERVERS and dtype.startswith("http"):
            kind, named = "openai", {**SERVERS[kind], **named}
        if kind == "openai":
            named["url"], dtype = dtype, str(named.pop("dtype", ""))
        return EngineSpec(kind, dtype or KINDS.get(kind, "float32"), named)

    def with_(self, *, dtype: str | None = None, **options: Option) -> EngineSpec:
        """Return the spec with another dtype, or with options added or replaced."""
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


TRAIN_OPTIONS = ("attn_implementation", "batch_invariant", "experts_implementation", "head_dtype")
"""Options of a training engine; a rollout engine's are the arguments of its constructor."""

FULL_ENTRIES = {"vllm": 2**22, "transformers": 2**24, "openai": 2**22}
"""Up to so many log-probs, whole vocabularies are recorded; beyond, hidden states (from a server, the
likeliest tokens). vLLM returns each log-prob as a Python object, hence its smaller number."""

LIKELIEST = 20
"""Log-probs per token that vLLM's server returns by default at most."""

KEPT_BYTES = 512 * 2**20
"""Memory of rollouts kept to be used again, about."""


class Bench(AbstractContextManager):
    """One set of weights, some prompts, and the engines made of the weights.

    Starting an engine takes seconds and gigabytes: at most one of each kind is alive, and rollouts are kept
    for reuse.

    Args:
        model: a transformers causal language model in float32: the weights of both engines.
        tokenizer: its tokenizer; saved for engines that open a folder, never used to draw.
        prompts: token ids, one list per response wanted (repeat a prompt to draw several).
        sampling, seed: defaults.
        folder: a checkpoint folder with exactly these weights; default: a temporary one, written when
            an engine needs it.
        save: writes a checkpoint into a folder; default: `save_pretrained` of model and tokenizer.
        device: where the training engine runs; default: where the model is.

    Example:
        with Bench(model, tokenizer, prompts, sampling=Sampling(max_tokens=64)) as bench:
            rollouts = bench.rollouts(EngineSpec.parse("vllm:bfloat16"))
            bench.score(rollouts, EngineSpec.parse("transformers:float32")).kl.mean()
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        seed: int = 0,
        name: str | None = None,
        folder: str | None = None,
        save: Callable[[str], object] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.model = model.eval() if device is None else model.eval().to(device)
        self.tokenizer = tokenizer
        self.prompts = [list(p) for p in prompts]
        self.sampling, self.seed = sampling, seed
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
        self.name = name or str(getattr(self.model.config, "name_or_path", "") or "model")
        self._folder, self._save = folder, save
        self._written: tempfile.TemporaryDirectory[str] | None = None
        self._engines: dict[str, tuple[EngineSpec, Engine]] = {}
        self._copy: tuple[EngineSpec, nn.Module] | None = None
        self._draws: dict[tuple[object, ...], Rollouts] = {}

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def folder(self) -> str:
        """A checkpoint folder that holds the weights."""
        if self._folder is None:
            self._written = tempfile.TemporaryDirectory(prefix="offdrift-check-")
            self._folder = self._written.name
            if self._save is not None:
                self._save(self._folder)
            else:
                self.model.save_pretrained(self._folder)  # type: ignore[operator]
                self.tokenizer.save_pretrained(self._folder)
        return self._folder

    def engine(self, spec: EngineSpec) -> Engine:
        """The rollout engine of this specification; an older one of its kind is closed.

        Raises: `EngineError` if the engine is missing, or does not know an option.
        """
        if spec.kind in self._engines and self._engines[spec.kind][0] == spec:
            return self._engines[spec.kind][1]
        self.close_engine(spec.kind)
        source: Any = self.folder if spec.kind == "vllm" else self.model
        options: dict[str, Any] = dict(spec.options)
        if spec.kind == "openai":  # wrong log-probs are to be measured, not refused
            source = options.pop("url", "")
            config: Any = self.model.config.get_text_config()  # type: ignore[union-attr,operator]
            experts = getattr(config, "num_experts_per_tok", None)
            model_facts = {"experts_per_token": experts, "head": lambda: head_of(self.model)}
            options = {"vocab_size": self.vocab_size, "on_raw": "record", **model_facts, **options}
        try:
            engine = make_engine(spec.kind, source, dtype=spec.dtype, **options)
        except TypeError as error:
            raise EngineError(f"{spec} cannot be made: {error}; leave that option out") from error
        self._engines[spec.kind] = (spec, engine)
        return engine

    def states_dtype(self, spec: EngineSpec) -> bool:
        """True if the engine says in which dtype it computes, or the user does."""
        return spec.dtype != "auto" or getattr(self.engine(spec), "states_dtype", True)

    def close_engine(self, kind: str) -> None:
        """Free the engine of this kind, if there is one."""
        if kind in self._engines:
            self._engines.pop(kind)[1].close()

    def rollouts(
        self,
        spec: EngineSpec,
        *,
        sampling: Sampling | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        evidence: EvidenceKind | None = None,
        repeat: int = 0,
        seed: int | None = None,
    ) -> Rollouts:
        """Sample from the engine, or return the rollouts that the same call sampled before.

        Args:
            sampling, prompts, seed: default to the bench's.
            evidence: default: what makes divergences exact (full vocabulary where it is small, else hidden states).
            repeat: another number samples again with the same seed.
        """
        sampling = sampling or self.sampling
        prompts = self.prompts if prompts is None else [list(p) for p in prompts]
        seed = self.seed if seed is None else seed
        key = (str(spec), sampling, tuple(map(tuple, prompts)), evidence, repeat, seed)
        if key not in self._draws:
            engine = self.engine(spec)
            kinds = (evidence,) if evidence is not None else self._exact(spec, sampling, prompts)
            for kind in kinds[:-1]:
                with suppress(EngineError):  # an engine that cannot record this evidence
                    drawn = engine.generate(prompts, sampling, seed=seed, evidence=kind)
                    break
            else:
                drawn = engine.generate(prompts, sampling, seed=seed, evidence=kinds[-1])
            self._draws[key] = drawn
            while len(self._draws) > 1 and sum(map(_size, self._draws.values())) > KEPT_BYTES:
                oldest = [k for k in self._draws if k != key]
                # The first rollouts are the baseline, which every factor is compared with.
                del self._draws[oldest[1] if len(oldest) > 1 else oldest[0]]
        return self._draws[key]

    def train_model(self, spec: EngineSpec) -> nn.Module:
        """The training engine: the weights at this dtype, with these options; the last copy is kept.

        Raises: `EngineError` if the specification is not of a transformers model.
        """
        if spec.kind != "transformers":
            raise EngineError(
                f"the training engine is {spec}, but tokens are scored by a transformers model; "
                f'write "transformers:{spec.dtype}"'
            )
        unknown = [name for name in spec.options if name not in TRAIN_OPTIONS]
        if unknown:
            raise EngineError(f"a training engine has no option {unknown[0]!r}; there are {', '.join(TRAIN_OPTIONS)}")
        if spec.dtype == "float32" and not spec.options:
            return self.model
        if self._copy is None or self._copy[0] != spec:
            self._copy = None  # before the next one is made
            options: dict[str, Any] = dict(spec.options)
            if "head_dtype" in options:
                options["head_dtype"] = dtype_of(options["head_dtype"])
            copied: Any = copy.deepcopy(self.model)
            invariant = options.pop("batch_invariant", False)
            recast(copied, spec.dtype, **options)
            if invariant:
                check_invariance(batch_invariant(copied))
            self._copy = (spec, copied.eval())
        return self._copy[1]

    def score(self, rollouts: Rollouts, spec: EngineSpec, *, details: bool = False) -> Scored:
        """Score sampled tokens with the training engine, at the temperature they were sampled at; see `rescored`."""
        return rescored(self.train_model(spec), rollouts, details=details)

    def close(self) -> None:
        """Free engines, copies and the temporary folder. Idempotent."""
        for kind in list(self._engines):
            self.close_engine(kind)
        self._copy = None
        self._draws.clear()
        if self._written is not None:
            self._written.cleanup()
            self._written = self._folder = None

    def _exact(
        self, spec: EngineSpec, sampling: Sampling, prompts: Sequence[Sequence[int]]
    ) -> tuple[EvidenceKind, ...]:
        """Kinds of evidence that make divergences exact, by preference."""
        entries = len(prompts) * sampling.max_tokens * self.vocab_size
        if spec.kind == "openai":
            few = (min(LIKELIEST, self.vocab_size), "sampled")
            exact = "full" if entries <= FULL_ENTRIES["openai"] else "hidden"
            return few if exact == "hidden" and sampling.filtered else (exact, *few)
        return ("full",) if sampling.filtered or entries <= FULL_ENTRIES[spec.kind] else ("hidden", "full")


def _size(rollouts: Rollouts) -> int:
    """Bytes of the recorded evidence."""
    evidence = rollouts.evidence
    if isinstance(evidence, FullVocab):
        return evidence.logp.nbytes
    return (evidence.states if isinstance(evidence, HiddenStates) else rollouts.tokens).nbytes


def checkpoint_of(model: nn.Module) -> str | None:
    """The local folder that a model was loaded from; None for built-in and hub models."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    return name if name and (Path(name) / "config.json").is_file() else None
