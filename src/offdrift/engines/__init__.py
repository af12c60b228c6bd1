"""Rollout engines: sample tokens and record their log-probs. What each promises, whatever is behind it:

- `logp_rollout` is the log-prob under the distribution that was sampled: after temperature, top-k
  and top-p, at the engine's own precision. So is the evidence. Hidden states are recorded only
  without filters; together with their head they reproduce `logp_rollout`.
- The response ends with the stop token it sampled, if it sampled one; its length is what was
  drawn, never what a comparison with a pad id says. A pad id that was sampled is a token.
- The same weights, prompts, sampling and seed give the same tokens; the host's random state is
  neither read nor changed.
- After `load_weights` the engine samples from those weights, all of them.

`tests/engines/contract.py` runs this on every engine. A backend is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import EvidenceKind, Rollouts


@runtime_checkable
class Engine(Protocol):
    """A source of rollouts at a known policy version."""

    name: str
    vocab_size: int
    version: int
    """Trainer version (optimizer steps) of the weights this engine holds."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int, evidence: EvidenceKind = "sampled"
    ) -> Rollouts:
        """One response per prompt, in order; repeat a prompt to draw several.

        Raises `EngineError` if the engine cannot give the evidence asked for.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take these named weights (the trainer's `named_parameters`) and this version."""
        ...

    def close(self) -> None:
        """Free what the engine holds. Idempotent."""
        ...


@runtime_checkable
class HoldsWeights(Protocol):
    """An engine in this process that can show the tensors it computes with."""

    def held_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Each of them once, by the trainer's names, in the engine's own precision."""
        ...


@runtime_checkable
class Rescores(Protocol):
    """An engine that can be forced along tokens that were drawn before (teacher forcing).

    Only the outcome of each draw is imposed: prompts are prefilled and tokens go through the engine's
    cache, kernels, head, temperature and filters exactly as when it draws. So two engines that differ
    in one setting can be compared token by token.
    """

    def rescore(
        self, rollouts: Rollouts, *, evidence: EvidenceKind = "full", sampling: Sampling | None = None
    ) -> Rollouts:
        """These rollouts with this engine's log-probs, evidence, version and provenance.

        Args:
            sampling: at which the log-probs are taken; that of the rollouts, if absent.

        Raises: `EngineError` if a token is impossible under the filters of `sampling`.
        """
        ...


_HOME = {
    "transformers": ("hf", "TransformersEngine"),
    "vllm": ("vllm.engine", "VLLMEngine"),
    "openai": ("server.engine", "OpenAIEngine"),
}


def make_engine(kind: str, model_or_path: Any, **options: Any) -> Engine:
    """The rollout engine of this kind on a model or checkpoint.

    Args:
        kind: "transformers" takes a model or a checkpoint folder, "vllm" a checkpoint folder,
            "openai" the address of a running server.
        options: keyword arguments of `TransformersEngine`, `VLLMEngine` or `OpenAIEngine`.

    Raises: `EngineError` for an unknown kind, or one whose backend is not installed.
    """
    if kind not in _HOME:
        raise EngineError(f'no engine is called {kind!r}; there are "transformers", "vllm" and "openai"')
    if kind == "vllm" and not isinstance(model_or_path, str):
        raise EngineError(
            f"the vllm engine loads a checkpoint folder, got {type(model_or_path).__name__}; "
            "save the model with save_pretrained(folder) and give the folder"
        )
    module, name = _HOME[kind]
    try:
        engine = getattr(importlib.import_module(f"offdrift.engines.{module}"), name)
    except ImportError as error:
        raise EngineError(
            f"the {kind} engine cannot be imported ({error}); install it with `pip install offdrift[train]`"
        ) from error
    return engine(model_or_path, **options)
