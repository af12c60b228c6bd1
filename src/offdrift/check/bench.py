"""Two engines on one set of weights: who draws the tokens, and who scores them again.

`Bench` holds the weights once, in float32, and makes of them whatever engine a measurement asks
for. Engines are dear (a vLLM start takes seconds and gigabytes), so at most one of each kind is
alive, and a draw that was made before is not made again.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from offdrift.check.rescore import Scored, rescored
from offdrift.engines import make_engine
from offdrift.engines.base import Engine
from offdrift.engines.output_head import compute_head_in
from offdrift.engines.spec import EngineSpec as EngineSpec
from offdrift.engines.spec import Option as Option
from offdrift.engines.spec import Pair as Pair
from offdrift.engines.spec import dtype_of
from offdrift.errors import EngineError
from offdrift.records.rollouts import EvidenceKind, FullVocab, HiddenStates, Rollouts, Sampling

TRAIN_OPTIONS = ("attn_implementation", "experts_implementation", "head_dtype")
"""Options of a training engine; those of a rollout engine are arguments of its constructor."""

FULL_ENTRIES = {"vllm": 2**22, "transformers": 2**24, "openai": 2**22}
"""Log-probs of whole vocabularies that are recorded as they are; beyond, hidden states stand for
them (of a server, the likeliest tokens). vLLM hands each log-prob over as a Python object, hence the
smaller number."""

LIKELIEST = 20
"""Log-probs per token that vLLM's server gives unless it was told to give more."""

KEPT_BYTES = 512 * 2**20
"""Draws kept to be used again, about."""


class Bench:
    """One set of weights, some prompts, and every engine that can be made of them.

    Args:
        model: a transformers causal language model in float32: the weights that both sides hold.
        tokenizer: its tokenizer; saved for engines that open a folder, never used to draw.
        prompts: token ids, one list per response wanted (repeat a prompt to draw several).
        sampling: how to draw, if a call does not say.
        seed: of every draw.
        name: what the model is called.
        folder: a checkpoint folder with these very weights; written to a temporary place if absent.
        save: writes a checkpoint into a folder; the model's and the tokenizer's own way if absent.
        device: where the training engine runs; where the model is, if absent.

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

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def folder(self) -> str:
        """A checkpoint folder that holds the weights."""
        if self._folder is None:
            self._written = tempfile.TemporaryDirectory(prefix="offdrift-check-")
            self._folder = self._written.name
            (self._save or self._saved_to)(self._folder)
        return self._folder

    def engine(self, spec: EngineSpec) -> Engine:
        """The rollout engine of this description; an older one of its kind is closed.

        Raises: `EngineError` if the engine is missing, or does not know an option.
        """
        held, engine = self._engines.get(spec.kind, (None, None))
        if held == spec and engine is not None:
            return engine
        self.close_engine(spec.kind)
        source: Any = self.folder if spec.kind == "vllm" else self.model
        options: dict[str, Any] = dict(spec.options)
        if spec.kind == "openai":  # an audit wants to see what is wrong, not to be spared it
            source = options.pop("url", "")
            options = {"vocab_size": self.vocab_size, "on_raw": "record", **options}
        try:
            made = make_engine(spec.kind, source, dtype=spec.dtype, **options)
        except TypeError as error:
            raise EngineError(f"{spec} cannot be made: {error}; leave that option out") from error
        self._engines[spec.kind] = (spec, made)
        return made

    def close_engine(self, kind: str) -> None:
        """Free the engine of this kind, for instance after its weights were changed."""
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
        """What the engine draws; a draw that was made before is given again.

        Args:
            sampling: the bench's, if absent.
            prompts: token ids; the bench's, if absent.
            evidence: absent chooses what makes divergences exact: the full vocabulary where it is
                small, else hidden states, else (a filter, or a head of unknown form) the full one.
            repeat: which repetition; draws of the same seed that differ in it alone are made anew.
            seed: the bench's, if absent.
        """
        sampling = sampling or self.sampling
        prompts = self.prompts if prompts is None else [list(p) for p in prompts]
        seed = self.seed if seed is None else seed
        key = (str(spec), sampling, tuple(map(tuple, prompts)), evidence, repeat, seed)
        if key not in self._draws:
            kinds = self._exact(spec, sampling, prompts) if evidence is None else (evidence,)
            self._keep(key, _drawn(self.engine(spec), prompts, sampling, kinds, seed))
        return self._draws[key]

    def train_model(self, spec: EngineSpec) -> nn.Module:
        """The training engine: the weights at this dtype, with this description's options.

        The model itself where nothing is asked of it; otherwise a copy, of which the last is kept.

        Raises: `EngineError` if the description is not of a transformers model.
        """
        if spec.kind != "transformers":
            raise EngineError(
                f"the training engine is {spec}, but tokens are scored by a transformers model; "
                f'write "transformers:{spec.dtype}"'
            )
        unknown = [name for name in spec.options if name not in TRAIN_OPTIONS]
        if unknown:
            raise EngineError(
                f"a training engine has no option {unknown[0]!r}; there are {', '.join(TRAIN_OPTIONS)}"
            )
        if spec.dtype == "float32" and not spec.options:
            return self.model
        if self._copy is None or self._copy[0] != spec:
            self._copy = None  # before the next one is made
            self._copy = (spec, _copied(self.model, spec))
        return self._copy[1]

    def score(self, rollouts: Rollouts, spec: EngineSpec, *, details: bool = False) -> Scored:
        """What the training engine says about drawn tokens, tempered as they were drawn.

        Args:
            details: also what `Scored` calls details; one more pass over the vocabulary.
        """
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

    def _saved_to(self, folder: str) -> None:
        self.model.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)

    def _exact(
        self, spec: EngineSpec, sampling: Sampling, prompts: Sequence[Sequence[int]]
    ) -> tuple[EvidenceKind, ...]:
        """What to record, by preference."""
        entries = len(prompts) * sampling.max_tokens * self.vocab_size
        filtered = sampling.top_k > 0 or sampling.top_p < 1
        if spec.kind == "openai":
            few = (min(LIKELIEST, self.vocab_size), "sampled")
            return ("full", *few) if entries <= FULL_ENTRIES["openai"] else few
        return ("full",) if filtered or entries <= FULL_ENTRIES[spec.kind] else ("hidden", "full")

    def _keep(self, key: tuple[object, ...], rollouts: Rollouts) -> None:
        self._draws[key] = rollouts
        while len(self._draws) > 1 and sum(map(_size, self._draws.values())) > KEPT_BYTES:
            oldest = [k for k in self._draws if k != key]
            # The first draw is the baseline, which every factor is held against.
            del self._draws[oldest[1] if len(oldest) > 1 else oldest[0]]


def _drawn(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    kinds: Sequence[EvidenceKind],
    seed: int,
) -> Rollouts:
    """The draw with the first kind of evidence that the engine can give."""
    for evidence in kinds[:-1]:
        try:
            return engine.generate(prompts, sampling, seed=seed, evidence=evidence)
        except EngineError:
            continue
    return engine.generate(prompts, sampling, seed=seed, evidence=kinds[-1])


def _copied(model: nn.Module, spec: EngineSpec) -> nn.Module:
    """A copy at another dtype, with other kernels, or with its output head at a dtype of its own."""
    made: Any = copy.deepcopy(model)
    if "attn_implementation" in spec.options:
        made.set_attn_implementation(spec.options["attn_implementation"])
    if "experts_implementation" in spec.options:
        made.set_experts_implementation(spec.options["experts_implementation"])
    for parameter in made.parameters():
        # Parameters only: rotary frequencies are buffers, which real engines keep in float32.
        parameter.requires_grad_(False).grad = None
        parameter.data = parameter.data.to(getattr(torch, spec.dtype))
    if "head_dtype" in spec.options:
        compute_head_in(made, getattr(torch, dtype_of(spec.options["head_dtype"])))
    return made.eval()


def _size(rollouts: Rollouts) -> int:
    held = rollouts.evidence
    if isinstance(held, FullVocab):
        return held.logp.nbytes
    return held.states.nbytes if isinstance(held, HiddenStates) else rollouts.tokens.nbytes


def checkpoint_of(model: nn.Module) -> str | None:
    """The folder that a model was loaded from, if it is one; None for built-in and hub models."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    return name if name and (Path(name) / "config.json").is_file() else None
