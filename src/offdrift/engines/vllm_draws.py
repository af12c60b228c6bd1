"""What a vLLM that was started is asked to do: draw, follow tokens that were drawn, say its routing.

Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Int
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.engines.draws import (
    Draws,
    check_request,
    prompts_of,
    redrawn,
    responses_of,
    rollouts_from,
)
from offdrift.engines.heads import check_states
from offdrift.engines.host import host_kept
from offdrift.engines.routing import route_lengths
from offdrift.engines.vllm_inside import IMPOSED, imposed, routes_tap
from offdrift.engines.vllm_requests import read, sampling_params, width
from offdrift.engines.vllm_states import state_tap
from offdrift.errors import EngineError
from offdrift.rollouts.records import (
    EvidenceKind,
    HiddenStates,
    Provenance,
    Rollouts,
    Sampling,
)

MAX_TEMPERATURE = 2.0
"""vLLM refuses higher ones."""

BYTES_PER_ENTRY = 128
"""Of a log-prob on its way through vLLM's lists: id, value, rank, pointers."""


class VLLMDraws:
    """The requests of a `VLLMEngine`, which starts vLLM and gives it weights."""

    name: str
    version: int
    path: str
    engine_version: str
    dtype: str
    quantization: str | None
    vocab_size: int
    max_model_len: int
    evidence_limit_mib: int
    cached_tokens: int = 0
    """Prompt tokens, so far, whose keys and values were taken from the prefix cache."""
    _llm: Any = None
    _params: Callable[..., Any]  # vllm.SamplingParams
    _compiled: bool
    _chunk: int | None  # tokens of a step, where prompts in chunks cannot be drawn from
    _state_bytes: int
    _head: Head | None = None  # one for all batches of a version

    @property
    def llm(self) -> Any:
        """The `vllm.LLM` behind it. Raises `EngineError` once the engine is closed."""
        if self._llm is None:
            raise EngineError(f"engine {self.name!r} is closed; construct another one")
        return self._llm

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seed: int,
        evidence: EvidenceKind = "sampled",
    ) -> Rollouts:
        """One response per prompt, in order; see `Engine.generate`.

        Raises: `EngineError` if the request makes no sense, does not fit the model's length, or
            its evidence outgrows the limit; or if hidden states are asked of a model or a vLLM that
            does not show them.
        """
        self._check(prompts, sampling, evidence)
        if self._chunk is not None and sum(map(len, prompts)) + len(prompts) > self._chunk:
            raise EngineError(
                f"prompts of {sum(map(len, prompts))} tokens exceed max_num_batched_tokens = "
                f"{self._chunk}, and vLLM cannot draw from seeds beside a prompt in chunks on CPUs; "
                "leave max_num_batched_tokens out, or draw fewer at once"
            )
        params = sampling_params(self._params, sampling, evidence, seed, range(len(prompts)))
        draws = self._drawn(prompts, params, sampling, evidence)
        provenance = self._provenance(sampling)
        return rollouts_from(draws, prompts, version=self.version, provenance=provenance)

    def rescore(
        self,
        rollouts: Rollouts,
        *,
        evidence: EvidenceKind = "full",
        sampling: Sampling | None = None,
    ) -> Rollouts:
        """The same tokens as this engine would have recorded them; see `Rescores`.

        Raises: `EngineError` as `generate` does, or if this vLLM cannot be made to follow tokens.
        """
        sampling = sampling or rollouts.provenance.sampling
        prompts, params, sampling = self._led(rollouts, sampling, evidence)
        with imposed(self.llm):
            draws = self._drawn(prompts, params, sampling, evidence)
        return redrawn(rollouts, draws, version=self.version, provenance=self._provenance(sampling))

    def routes(self, rollouts: Rollouts) -> Int[Tensor, "p layers k"]:
        """Experts that every token was sent to on its way; see `engines.routing`.

        Raises: `EngineError` for a dense model, or a vLLM that does not show its routing.
        """
        prompts, params, _ = self._led(rollouts, Sampling(max_tokens=1), "sampled")
        for each in params:
            each.skip_reading_prefix_cache = True  # a cached position is not routed again
        requests = [{"prompt_token_ids": p} for p in prompts]
        with host_kept(compiling=self._compiled), imposed(self.llm), routes_tap(self.llm) as tap:
            answers = self.llm.generate(requests, params, use_tqdm=False)
        return tap.routes([a.request_id for a in answers], route_lengths(rollouts).tolist())

    def drop_prefixes(self) -> None:
        """Forget the cached keys and values of all prompts."""
        self.llm.reset_prefix_cache()

    def _led(
        self, rollouts: Rollouts, sampling: Sampling, evidence: EvidenceKind
    ) -> tuple[list[list[int]], list[Any], Sampling]:
        """Prompts, and parameters of requests that follow the responses."""
        prompts, responses = prompts_of(rollouts), responses_of(rollouts)
        sampling = replace(sampling, max_tokens=max(map(len, responses)))
        self._check(prompts, sampling, evidence)
        params = sampling_params(self._params, sampling, evidence, 0, range(len(prompts)))
        for each, response in zip(params, responses, strict=True):
            each.max_tokens, each.stop_token_ids, each.seed = len(response), [], None
            each.extra_args = {IMPOSED: response}
        return prompts, params, sampling

    def _drawn(
        self,
        prompts: Sequence[Sequence[int]],
        params: list[Any],
        sampling: Sampling,
        evidence: EvidenceKind,
    ) -> list[Draws]:
        size = self._requests_at_once(sampling, evidence)
        pieces = [slice(i, i + size) for i in range(0, len(prompts), size)]
        with host_kept(compiling=self._compiled):
            return [self._draw(prompts[p], params[p], sampling, evidence) for p in pieces]

    def _draw(
        self,
        prompts: Sequence[Sequence[int]],
        params: list[Any],
        sampling: Sampling,
        evidence: EvidenceKind,
    ) -> Draws:
        requests = [{"prompt_token_ids": list(p)} for p in prompts]
        if evidence == "hidden":
            return self._draw_with_states(requests, params, sampling)
        answers = self.llm.generate(requests, params, use_tqdm=False)
        self.cached_tokens += sum(a.num_cached_tokens or 0 for a in answers)
        return read([a.outputs[0] for a in answers], evidence, self.vocab_size)

    def _draw_with_states(
        self, requests: list[dict[str, Any]], params: list[Any], sampling: Sampling
    ) -> Draws:
        with state_tap(self.llm) as tap:
            answers = self.llm.generate(requests, params, use_tqdm=False)
        self.cached_tokens += sum(a.num_cached_tokens or 0 for a in answers)
        draws = read([a.outputs[0] for a in answers], "hidden", self.vocab_size)
        self._head = self._head or tap.head
        assert self._head is not None
        states = tap.states([a.request_id for a in answers], draws.lengths.tolist())
        found = HiddenStates(states, self._head)
        check_states(
            found, draws.tokens, draws.logp, temperature=sampling.temperature, engine=self.name
        )
        return replace(draws, evidence=found)

    def _provenance(self, sampling: Sampling) -> Provenance:
        return Provenance(
            engine=self.name,
            engine_version=self.engine_version,
            model=self.path,
            dtype=self.dtype,
            quantization=self.quantization,
            sampling=sampling,
        )

    def _check(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, evidence: EvidenceKind
    ) -> None:
        check_request(
            prompts,
            sampling,
            evidence,
            vocab_size=self.vocab_size,
            state_bytes=self._state_bytes,
            limit_mib=self.evidence_limit_mib,
        )
        longest = max(map(len, prompts))
        if longest + sampling.max_tokens > self.max_model_len:
            raise EngineError(
                f"a prompt of {longest} tokens and sampling.max_tokens = {sampling.max_tokens} "
                f"exceed max_model_len = {self.max_model_len}, where vLLM would cut responses "
                "in silence; shorten either, or construct the engine with a larger max_model_len"
            )
        if sampling.temperature > MAX_TEMPERATURE:
            raise EngineError(
                f"sampling.temperature = {sampling.temperature}, vLLM samples up to "
                f"{MAX_TEMPERATURE}; use the transformers engine for hotter policies"
            )

    def _requests_at_once(self, sampling: Sampling, evidence: EvidenceKind) -> int:
        per_request = sampling.max_tokens * width(evidence, self.vocab_size) * BYTES_PER_ENTRY
        return max(1, self.evidence_limit_mib * 2**20 // per_request)
