"""A rollout engine on Hugging Face transformers: any causal language model, any device.

It keeps its own copy of the model, always in eval mode and without gradient checkpointing, at its
own dtype and, if asked, with every matrix on an int8 grid. So the trainer may be in train mode, in
another dtype or several updates ahead: what is sampled is what this copy says, and what is
recorded is the distribution of the sampler's own scores, after temperature, top-k and top-p.

Reproducible for the same prompts in the same order and the same `batch_size`; in another batch
the same seed draws other tokens, because the backend draws a whole batch from one random stream.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offdrift.divergence.head import Head
from offdrift.engines.draws import Draws, check_request, rollouts_from
from offdrift.engines.heads import HeadInput, check_states, head_input, head_of, kept
from offdrift.engines.int8 import int8_grid, matrices
from offdrift.errors import EngineError
from offdrift.rollouts.records import (
    Evidence,
    EvidenceKind,
    FullVocab,
    HiddenStates,
    Provenance,
    Rollouts,
    Sampling,
    TopK,
)

_PAD = 0  # fills rectangles only: what is real is said by lengths, so any id will do


class TransformersEngine:
    """Rollouts from a copy of a transformers causal language model.

    Args:
        model_or_path: the model to copy (it is not changed), or a checkpoint folder.
        dtype: the copy's parameters and arithmetic.
        quantization: "int8" rounds every matrix (linear layers and fused experts; not embeddings,
            head, router or norms) to an int8 grid per output channel, at each `load_weights`.
        batch_size: responses drawn at once.
        evidence_limit_mib: memory that recorded evidence may take, MiB.
        version: trainer version of the given weights, optimizer steps.

    Raises: `EngineError` if the model cannot generate.

    Example:
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
        quantization: Literal["int8"] | None = None,
        batch_size: int = 64,
        evidence_limit_mib: int = 1024,
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
        self.evidence_limit_mib = evidence_limit_mib
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._rounded = matrices(model) if quantization == "int8" else {}
        self._head: Head | None = None
        weights = [(name, weight.detach()) for name, weight in source.named_parameters()]
        self._model: PreTrainedModel | None = _frozen(model, getattr(torch, dtype))
        self.load_weights(weights, version=version)

    @property
    def model(self) -> PreTrainedModel:
        """The engine's own copy. Raises `EngineError` once the engine is closed."""
        if self._model is None:
            raise EngineError(f"engine {self.name!r} is closed; construct another one")
        return self._model

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seed: int,
        evidence: EvidenceKind = "sampled",
    ) -> Rollouts:
        """One response per prompt, in order; see `Engine.generate`.

        Raises: `EngineError` if the request makes no sense, its evidence outgrows the limit, or
            hidden states are asked of a model whose output head is of no known form.
        """
        check_request(
            prompts,
            sampling,
            evidence,
            vocab_size=self.vocab_size,
            state_bytes=self._state_bytes,
            limit_mib=self.evidence_limit_mib,
        )
        starts = range(0, len(prompts), self.batch_size)
        with torch.no_grad(), _own_random_stream(self.model.device, seed):
            draws = [
                self._draw(prompts[i : i + self.batch_size], sampling, evidence) for i in starts
            ]
        provenance = Provenance(
            engine=self.name,
            engine_version=transformers.__version__,
            model=self.model.config.name_or_path or type(self.model).__name__,
            dtype=self.dtype,
            quantization=self.quantization,
            sampling=sampling,
        )
        return rollouts_from(draws, prompts, version=self.version, provenance=provenance)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take all of the trainer's `named_parameters`, cast and rounded; see `Engine`.

        Raises: `EngineError` if a weight is unknown, has another shape, or is missing.
        """
        own = dict(self.model.named_parameters(remove_duplicate=False))
        stale = {name for name, _ in self.model.named_parameters()}
        with torch.no_grad():
            for name, weight in weights:
                target = own.get(name)
                if target is None or target.shape != weight.shape:
                    raise EngineError(_misfit(name, weight, target, own))
                dim = self._rounded.get(name)
                target.copy_(weight if dim is None else int8_grid(weight.float(), dim=dim))
                stale.discard(name)
        self._head = None  # batches that were drawn keep the old one
        if stale:
            raise EngineError(
                f"{len(stale)} weights of engine {self.name!r} were not given, the first is "
                f"{min(stale)}; give all of the trainer's named_parameters()"
            )
        self.version = version

    def close(self) -> None:
        """Free the copy of the model. Idempotent."""
        self._model = None

    def _draw(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, evidence: EvidenceKind
    ) -> Draws:
        if evidence == "hidden":
            return self._draw_with_states(prompts, sampling)
        return self._drawn(prompts, sampling, _Recorder(evidence))

    def _drawn(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, recorder: _Recorder
    ) -> Draws:
        ids, mask = _left_padded(prompts, self.model.device)
        output = self.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            generation_config=_generation_config(sampling),
            logits_processor=LogitsProcessorList([*_filters(sampling), recorder]),
        )
        return recorder.draws(output[:, ids.shape[1] :], sampling.stop_token_ids)

    def _draw_with_states(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Draws:
        if self._head is None:
            self._head = kept(head_of(self.model))
        with head_input(self.model) as seen:
            draws = self._drawn(prompts, sampling, _Recorder("hidden", self._head, seen))
        assert isinstance(draws.evidence, HiddenStates)
        check_states(
            draws.evidence,
            draws.tokens,
            draws.logp,
            temperature=sampling.temperature,
            engine=self.name,
        )
        return draws

    @property
    def _state_bytes(self) -> int:
        layer = self.model.get_output_embeddings()
        width = getattr(layer, "in_features", self.model.config.get_text_config().hidden_size)
        return width * getattr(torch, self.dtype).itemsize


class _Recorder(LogitsProcessor):
    """Records the scores that are sampled: the last processor, behind every filter.

    Which token was drawn is known one step later, so one block of `[batch, vocab]` waits; with
    full evidence all blocks are kept, with top-k evidence their k largest, with hidden evidence what
    the head consumed to make them.
    """

    def __init__(
        self, evidence: EvidenceKind, head: Head | None = None, seen: HeadInput | None = None
    ) -> None:
        self.evidence, self.head, self.seen = evidence, head, seen
        self.waiting: Tensor | None = None
        self.logp: list[Tensor] = []  # per step: log-prob of the token drawn, [batch]
        self.ids: list[Tensor] = []  # per step: ids of the k likeliest, [batch, k]
        self.rows: list[Tensor] = []  # per step: log-probs or states, [batch, vocab, k or hidden]

    def __call__(  # type: ignore[override]
        self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b v"]
    ) -> Float[Tensor, "b v"]:
        self._settle(input_ids[:, -1])
        self.waiting = block = scores.float().log_softmax(-1)
        if self.evidence == "full":
            self.rows.append(block)
        elif isinstance(self.evidence, int):
            top = block.topk(self.evidence, dim=-1)
            self.rows.append(top.values)
            self.ids.append(top.indices.int())
        elif self.seen is not None and self.seen.last is not None:
            # The last place of every prompt: a copy, where the forward pass kept all places.
            self.rows.append(self.seen.last[:, -1].clone())
        return scores

    def draws(self, tokens: Int[Tensor, "b t"], stop_token_ids: tuple[int, ...]) -> Draws:
        """What was drawn, packed, given the tokens that `generate` returned."""
        steps = tokens.shape[1]
        if len(self.logp) < steps:
            self._settle(tokens[:, -1])
        lengths = _response_lengths(tokens, stop_token_ids)
        drawn = torch.arange(steps, device=tokens.device) < lengths[:, None]  # [b, t]

        def packed(per_step: list[Tensor]) -> Tensor:
            # A backend that checks for stops late records steps it then undoes: keep the rest.
            return torch.stack(per_step[:steps], dim=1)[drawn].cpu()

        evidence: Evidence | None = None
        if self.ids:
            evidence = TopK(packed(self.ids), packed(self.rows))
        elif self.head is not None:
            evidence = HiddenStates(packed(self.rows), self.head)
        elif self.rows:
            evidence = FullVocab(packed(self.rows))
        return Draws(tokens[drawn].cpu(), lengths.cpu(), packed(self.logp), evidence)

    def _settle(self, drawn: Int[Tensor, " b"]) -> None:
        if self.waiting is not None:
            self.logp.append(self.waiting.gather(1, drawn[:, None]).squeeze(1))


def _frozen(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """In eval mode, at `dtype`, deaf to the settings that a trainer leaves behind."""
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
    for parameter in model.parameters():
        # Parameters only: rotary frequencies are buffers, which real engines keep in float32.
        parameter.requires_grad_(False).grad = None
        parameter.data = parameter.data.to(dtype)
    # generate() fills whatever a request leaves open from here: top_k, penalties, stop tokens.
    model.generation_config = GenerationConfig()
    return model.eval()


def _generation_config(sampling: Sampling) -> GenerationConfig:
    """Plain sampling; filters are given as processors, so that the recorder stands behind them."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=_PAD,
        use_cache=True,
    )


def _filters(sampling: Sampling) -> Iterator[LogitsProcessor]:
    if sampling.temperature != 1:
        yield TemperatureLogitsWarper(float(sampling.temperature))
    if sampling.top_k:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        yield TopPLogitsWarper(sampling.top_p)


def _left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Prompts flush right, and the mask of what is a prompt, by length."""
    width = max(map(len, prompts))
    ids = torch.tensor([[_PAD] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = torch.arange(width, device=device) >= width - lengths[:, None]
    return ids, mask.long()


def _response_lengths(tokens: Int[Tensor, "b t"], stops: tuple[int, ...]) -> Int[Tensor, " b"]:
    """Tokens up to and including the first stop token; all of them if there is none."""
    is_stop = torch.isin(tokens, torch.tensor(stops, dtype=tokens.dtype, device=tokens.device))
    first = is_stop.int().argmax(1) + 1
    return first.where(is_stop.any(1), tokens.shape[1])


@contextmanager
def _own_random_stream(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from `seed` on `device`; the host's random state is as before afterwards."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def _misfit(name: str, weight: Tensor, target: Tensor | None, own: Mapping[str, Tensor]) -> str:
    if target is None:
        return (
            f"weight {name!r} is not one of this model's ({next(iter(own))!r}, ...); "
            "give the trainer's named_parameters(), unwrapped"
        )
    return (
        f"weight {name!r} has shape {tuple(weight.shape)}, the engine's has "
        f"{tuple(target.shape)}; the trainer holds another model"
    )
