"""A rollout engine on Hugging Face transformers: any causal language model, any device.

It samples from its own copy of the model, in eval mode and at its own dtype, so the trainer may be in
train mode, in another dtype or several updates ahead. Reproducible for the same prompts in the same
order; see `hf_decode`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from offdrift.divergence.head import Head
from offdrift.engines import hf_fixed_order
from offdrift.engines.generate import BaseEngine, Generation, Request, pieces
from offdrift.engines.grids import fused_experts, grid, instruction_set, matrices, put_on_grid
from offdrift.engines.hf_cache import check_eviction, evicting
from offdrift.engines.hf_decode import DrawRecorder, decode, uniform_numbers
from offdrift.engines.hf_siblings import SiblingDrafter, SiblingIndex
from offdrift.engines.hf_speculative import NUMBERS, Drafter, ModelDrafter, speculate
from offdrift.engines.hf_stream import TransformersStream
from offdrift.engines.output_head import head_input, head_of, kept, recast
from offdrift.engines.routing import routers_of_mixture, routes_of, watched
from offdrift.errors import EngineError
from offdrift.records.provenance import Eviction, Provenance, Sampling
from offdrift.records.rollouts import EvidenceKind, Rollouts, Routes


class TransformersEngine(BaseEngine):
    """Rollouts from a copy of a transformers causal language model.

    Args:
        model_or_path: the model to copy (it is not changed), or a checkpoint folder.
        dtype: the copy's parameters and arithmetic.
        quantization: a grid (`engines.grids`) to which every matrix (linear layers and fused experts; not embeddings,
            head, router or norms) is rounded at each `load_weights`: "int8"; "w8a8" and "fp8_per_channel", which
            round their inputs, too; "nvfp4".
        batch_size: responses drawn at once.
        head_dtype: of the output head's arithmetic and logits, for instance "float32"; its weights
            are those of `dtype`. Absent: `dtype`.
        attn_implementation: transformers' name, for instance "eager"; absent: the model's own.
        as_in_training: leave the copy in train mode with gradient checkpointing on, as a trainer has
            it. Such a model draws from another distribution than it scores; for experiments.
        evidence_limit_mib: memory that recorded evidence may take, MiB.
        record_routes: also record the experts that every token was sent to (`Rollouts.routes`).
        teacher: a model over the same vocabulary whose logits are mixed in by the `alphas` that `generate` is given; it
            is copied at `dtype`, and keeps its weights.
        eviction: compress the KV cache, and record what it keeps (`Rollouts.retention`). Its policy "attention" needs
            the weights of attention, which "eager" attention alone gives.
        drafter: a smaller model over the same vocabulary that proposes tokens (speculative decoding); it is copied at
            `dtype`, and takes weights of its own (`load_drafter`). The law of what is drawn stays that of the engine's
            model; `Rollouts.speculation` says how each token came about. "siblings": no model, but what other responses
            to the same prompt have written so far (`engines.hf_siblings`).
        draft_tokens: proposals that one pass of the model judges, at most.
        batch_invariant: compute every sequence in one order, whatever is drawn with it; see `engines.hf_fixed_order`.
        version: trainer version of the given weights, optimizer steps.

    Raises: `EngineError` if the model cannot generate, has no routers to record, a cache that cannot be compressed, or
        layers that cannot be made batch-invariant; if teacher or drafter has another vocabulary, or cannot act beside
        the other options.

    Example:
        >>> from offdrift.records.provenance import Sampling
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=1)
        >>> engine = TransformersEngine(LlamaForCausalLM(config))
        >>> rollouts = engine.generate([[1, 2]], Sampling(max_tokens=3), seed=0, evidence="full")
        >>> rollouts.evidence.logp.shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        model_or_path: PreTrainedModel | str,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        quantization: str | None = None,
        batch_size: int = 64,
        head_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        attn_implementation: str | None = None,
        as_in_training: bool = False,
        evidence_limit_mib: int = 1024,
        record_routes: bool = False,
        teacher: PreTrainedModel | None = None,
        eviction: Eviction | None = None,
        drafter: PreTrainedModel | Literal["siblings"] | None = None,
        draft_tokens: int = 4,
        batch_invariant: bool = False,
        name: str = "transformers",
        version: int = 0,
    ) -> None:
        if isinstance(model_or_path, str):
            source = AutoModelForCausalLM.from_pretrained(model_or_path, dtype=torch.float32)
            model = source
        else:
            source, model = model_or_path, copy.deepcopy(model_or_path)
        if not hasattr(model, "generate"):
            raise EngineError(
                f"{type(model).__name__} has no generate(); give a transformers causal language "
                "model (unwrap it first: accelerator.unwrap_model)"
            )
        self.name, self.version, self.batch_size = name, version, batch_size
        self.dtype, self.quantization = dtype, quantization
        self.evidence_limit_mib, self.record_routes = evidence_limit_mib, record_routes
        self.eviction = eviction
        if record_routes:
            routers_of_mixture(model)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        width = getattr(model.get_output_embeddings(), "in_features", None)
        width = width or model.config.get_text_config().hidden_size
        self._state_bytes = width * getattr(torch, dtype).itemsize
        self._grid, self._rounded = None, {}
        if quantization is not None:
            self._grid, self._rounded = grid(quantization), matrices(model)
            put_on_grid(model, quantization, weights=False)
            on_cpu = next(model.parameters()).device.type == "cpu"
            self.instructions = instruction_set() if on_cpu else None
        self._head: Head | None = None
        weights = [(name, weight.detach()) for name, weight in source.named_parameters()]
        self._model: PreTrainedModel | None = model.eval()
        if getattr(model, "is_gradient_checkpointing", False):
            model.gradient_checkpointing_disable()
        if eviction is not None and eviction.policy == "attention":
            attn_implementation = "eager"
        recast(model, dtype, head_dtype=head_dtype, attn_implementation=attn_implementation)
        if batch_invariant:
            hf_fixed_order.check_invariance(hf_fixed_order.batch_invariant(model))
        # generate() fills whatever a request leaves open from here: top_k, penalties, stop tokens.
        model.generation_config = GenerationConfig()
        if eviction is not None:
            check_eviction(model, eviction)
        if as_in_training:
            model.gradient_checkpointing_enable()
            model.train()
        self._teacher = None
        if teacher is not None:
            self._teacher = self._copied(teacher, "teacher", "logits are mixed")
            self.teacher_name = teacher.config.name_or_path or type(teacher).__name__
        self._drafter, self.draft_tokens, self.drafter_version = None, draft_tokens, version
        self._siblings = drafter == "siblings"
        if drafter is not None:
            beside = {"teacher": teacher, "eviction": eviction, "record_routes": record_routes}
            if unfit := [name for name, option in beside.items() if option]:
                raise EngineError(f"{unfit[0]} does not act beside a drafter; leave one of the two out")
            if draft_tokens < 1:
                raise EngineError(f"draft_tokens = {draft_tokens}, must be at least 1; leave the drafter out for none")
            self._drafter = self._drafter_of(drafter)
        self.load_weights(weights, version=version)

    def _drafter_of(self, drafter: PreTrainedModel | str) -> PreTrainedModel | None:
        """The engine's copy of a drafter; None where siblings draft."""
        if not isinstance(drafter, str):
            return self._copied(drafter, "drafter", "proposals are judged")
        if drafter != "siblings":
            raise EngineError(f'drafter = {drafter!r}; give a model, or "siblings"')
        return None

    def _copied(self, other: PreTrainedModel, role: str, use: str) -> PreTrainedModel:
        """The engine's own copy of a model that decodes beside its own."""
        vocab_size = other.config.get_text_config().vocab_size
        if vocab_size != self.vocab_size:
            raise EngineError(
                f"the {role}'s vocabulary has {vocab_size} tokens, the model's {self.vocab_size}; {use} token by "
                f"token: give a {role} with the model's tokenizer"
            )
        copied = copy.deepcopy(other).eval()
        recast(copied, self.dtype)
        return copied

    def load_drafter(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take all of a drafter's `named_parameters`, cast.

        Args:
            version: of the weights whose rollouts the drafter has last learned from, optimizer steps.

        Raises: `EngineError` if there is no drafter, or these are not all of its weights.
        """
        parameters = {} if self._drafter is None else dict(self._drafter.named_parameters())
        new = dict(weights)
        if not parameters or parameters.keys() != new.keys():
            raise EngineError(
                f"engine {self.name!r} has {len(parameters)} weights of a drafter and was given {len(new)} of other "
                "names; construct it with drafter=MODEL, and give all named_parameters() of that model"
            )
        with torch.no_grad():
            for name, weight in new.items():
                parameters[name].copy_(weight)
        self.drafter_version = version

    @property
    def model(self) -> PreTrainedModel:
        """The engine's own copy. Raises `EngineError` once the engine is closed."""
        if self._model is None:
            raise EngineError(f"engine {self.name!r} is closed; construct another one")
        return self._model

    def routes(self, rollouts: Rollouts) -> Routes:
        """Experts that this copy chooses when it reads these tokens; see `engines.routing`."""
        return routes_of(self.model, rollouts)

    def open_stream(self, sampling: Sampling, *, evidence: EvidenceKind = "sampled") -> TransformersStream:
        """Responses in progress on this engine; see `engines.stream`.

        Raises: `EngineError` with a drafter.
        """
        if self._drafts:
            raise EngineError(
                f"engine {self.name!r} has a drafter, which proposes whole responses alone; construct one without "
                "it for streams"
            )
        return TransformersStream(self, sampling, evidence)

    def take_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take all of the trainer's `named_parameters`, cast and rounded; see `Engine`.

        Raises: `EngineError` if a weight is unknown, has another shape, or is missing.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        stale = {name for name, _ in self.model.named_parameters()}
        with torch.no_grad():
            for name, weight in weights:
                target = parameters.get(name)
                if target is None:
                    raise EngineError(
                        f"weight {name!r} is not one of this model's ({next(iter(parameters))!r}, ...); "
                        "give the trainer's named_parameters(), unwrapped"
                    )
                if target.shape != weight.shape:
                    raise EngineError(
                        f"weight {name!r} has shape {tuple(weight.shape)}, the engine's has "
                        f"{tuple(target.shape)}; the trainer holds another model"
                    )
                dim = self._rounded.get(name)
                if dim is not None and self._grid is not None:
                    weight = self._grid.weights(weight.float(), dim=dim).value
                target.copy_(weight)
                stale.discard(name)
        self._head = None  # batches that were drawn keep the old one
        if stale:
            raise EngineError(
                f"{len(stale)} weights of engine {self.name!r} were not given, the first is "
                f"{min(stale)}; give all of the trainer's named_parameters()"
            )
        self.version = version

    def held_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors of the engine's own copy, cast and rounded; see `engines.HoldsWeights`."""
        return self.model.named_parameters()

    def head(self) -> Head:
        """A copy of the output head, one for all batches of a version."""
        self._head = self._head or kept(head_of(self.model))
        return self._head

    def close(self) -> None:
        """Free the copy of the model. Idempotent."""
        if self.stream is not None:
            self.stream.close()
        self._model = self._teacher = self._drafter = None

    def _draws(self, request: Request) -> list[Generation]:
        level = logging.get_verbosity()
        if self.model.training:  # which is intended here, and which transformers warns of
            logging.set_verbosity_error()
        try:
            count = len(request.prompts)
            numbers = NUMBERS if self._drafts else 1
            uniforms = uniform_numbers(count, numbers * request.sampling.max_tokens, request.seed)
            siblings = SiblingIndex() if self._siblings else None
            return [self._draw(request.part(p), uniforms[p], siblings) for p in pieces(count, self.batch_size)]
        finally:
            logging.set_verbosity(level)

    @property
    def _drafts(self) -> bool:
        """Whether tokens are proposed, by a model or by siblings."""
        return self._siblings or self._drafter is not None

    def _draw(self, request: Request, uniforms: Tensor, siblings: SiblingIndex | None) -> Generation:
        hidden = request.evidence == "hidden"
        heads = head_input(self.model) if hidden else nullcontext()
        routes = watched(self.model) if self.record_routes else nullcontext()
        cache = evicting(self.model, self.eviction) if self.eviction is not None else nullcontext()
        with heads as consumed, routes as choices, cache as evictions:
            recorder = DrawRecorder(
                request.evidence,
                self.head() if hidden else None,
                consumed,
                filtered=request.sampling.filtered,
                choices=choices,
                evictions=evictions,
            )
            if not self._drafts or request.forced is not None:
                draws = decode(self.model, request, recorder, uniforms, self._teacher)
            else:
                numbers = uniforms.view(len(uniforms), -1, NUMBERS)
                drafter, recorder.drafter_version = self._source_of_proposals(request, siblings)
                draws = speculate(self.model, drafter, request, recorder, numbers, tokens=self.draft_tokens)
        return self.checked(draws, request.sampling) if hidden else draws

    def _source_of_proposals(self, request: Request, siblings: SiblingIndex | None) -> tuple[Drafter, int]:
        """Drafter for a part of a request, and the version of what it learned from."""
        if self._drafter is not None:
            return ModelDrafter(self._drafter, request.sampling, len(request.prompts)), self.drafter_version
        assert siblings is not None
        groups = [siblings.group_of(prompt) for prompt in request.prompts]
        return SiblingDrafter(siblings, groups, vocab_size=self.vocab_size, device=self.model.device), self.version

    def provenance(self, sampling: Sampling) -> Provenance:
        """Provenance of this engine's draws, for a record."""
        drafted = self.draft_tokens if self._drafts else 0
        return replace(super().provenance(sampling), eviction=self.eviction, draft_tokens=drafted)

    @property
    def _source(self) -> tuple[str, str]:
        name = self.model.config.name_or_path or type(self.model).__name__
        return transformers.__version__, name


def linear_layers(path: str) -> frozenset[str]:
    """Names of the matrices of linear layers, except the output head, in a checkpoint folder; nothing is loaded.

    Raises: `EngineError` if the model has fused experts, for which no engine here has a W8A8 kernel.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    if fused := fused_experts(model):
        raise EngineError(
            f'quantization = "w8a8": {fused} is a fused tensor of experts, for which vLLM has no W8A8 kernel here; use '
            "the transformers engine, or no quantization"
        )
    return frozenset(matrices(model))
