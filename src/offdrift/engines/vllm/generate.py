"""What a vLLM that was started is asked to do: draw, follow tokens that were drawn, say its routing.

Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from jaxtyping import Int
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.engines.generate import Drawing, Draws, Tokens, pieces, prompts_of, responses_of
from offdrift.engines.isolation import host_kept
from offdrift.engines.routing import route_lengths
from offdrift.engines.vllm.taps import IMPOSED, imposed, routes_tap, state_tap
from offdrift.engines.vllm.wire import read, sampling_params, width
from offdrift.errors import EngineError
from offdrift.records.rollouts import EvidenceKind, HiddenStates, Rollouts, Sampling

MAX_TEMPERATURE = 2.0
"""vLLM refuses higher ones."""

BYTES_PER_ENTRY = 128
"""Of a log-prob on its way through vLLM's lists: id, value, rank, pointers."""


class VLLMDraws(Drawing):
    """The requests of a `VLLMEngine`, which starts vLLM and gives it weights."""

    path: str
    engine_version: str
    max_model_len: int
    cached_tokens: int = 0
    """Prompt tokens, so far, whose keys and values were taken from the prefix cache."""
    _llm: Any = None
    _params: Callable[..., Any]  # vllm.SamplingParams
    _compiled: bool
    _chunk: int | None  # tokens of a step, where prompts in chunks cannot be drawn from
    _head: Head | None = None  # one for all batches of a version

    @property
    def llm(self) -> Any:
        """The `vllm.LLM` behind it. Raises `EngineError` once the engine is closed."""
        if self._llm is None:
            raise EngineError(f"engine {self.name!r} is closed; construct another one")
        return self._llm

    def routes(self, rollouts: Rollouts) -> Int[Tensor, "p layers k"]:
        """Experts that every token was sent to on its way; see `engines.routing`.

        Raises: `EngineError` for a dense model, or a vLLM that does not show its routing.
        """
        prompts, given = prompts_of(rollouts), responses_of(rollouts)
        sampling = Sampling(max_tokens=max(map(len, given)))
        self._check(prompts, sampling, "sampled")
        params = self._requested(prompts, sampling, "sampled", 0, given)
        for each in params:
            each.skip_reading_prefix_cache = True  # a cached position is not routed again
        requests = [{"prompt_token_ids": p} for p in prompts]
        with host_kept(compiling=self._compiled), imposed(self.llm), routes_tap(self.llm) as tap:
            answers = self.llm.generate(requests, params, use_tqdm=False)
        return tap.routes([a.request_id for a in answers], route_lengths(rollouts).tolist())

    def drop_prefixes(self) -> None:
        """Forget the cached keys and values of all prompts."""
        self.llm.reset_prefix_cache()

    def _draws(
        self,
        prompts: Tokens,
        sampling: Sampling,
        evidence: EvidenceKind,
        *,
        seed: int,
        given: Tokens | None = None,
    ) -> list[Draws]:
        if given is None:
            self._check_chunk(prompts)
        params = self._requested(prompts, sampling, evidence, seed, given)
        parts = pieces(len(prompts), self._requests_at_once(sampling, evidence))
        led = nullcontext() if given is None else imposed(self.llm)
        with led, host_kept(compiling=self._compiled):
            return [self._draw(prompts[p], params[p], sampling, evidence) for p in parts]

    def _requested(
        self,
        prompts: Tokens,
        sampling: Sampling,
        evidence: EvidenceKind,
        seed: int,
        given: Tokens | None,
    ) -> list[Any]:
        """Parameters of requests that draw, or that follow the responses that are given."""
        params = sampling_params(self._params, sampling, evidence, seed, range(len(prompts)))
        for each, response in zip(params, given or ()):
            each.max_tokens, each.stop_token_ids, each.seed = len(response), [], None
            each.extra_args = {IMPOSED: response}
        return params

    def _draw(
        self,
        prompts: Tokens,
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
        return self._checked(replace(draws, evidence=HiddenStates(states, self._head)), sampling)

    @property
    def _source(self) -> tuple[str, str]:
        return self.engine_version, self.path

    def _check(self, prompts: Tokens, sampling: Sampling, evidence: EvidenceKind) -> None:
        super()._check(prompts, sampling, evidence)
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

    def _check_chunk(self, prompts: Tokens) -> None:
        if self._chunk is not None and sum(map(len, prompts)) + len(prompts) > self._chunk:
            raise EngineError(
                f"prompts of {sum(map(len, prompts))} tokens exceed max_num_batched_tokens = "
                f"{self._chunk}, and vLLM cannot draw from seeds beside a prompt in chunks on CPUs; "
                "leave max_num_batched_tokens out, or draw fewer at once"
            )

    def _requests_at_once(self, sampling: Sampling, evidence: EvidenceKind) -> int:
        per_request = sampling.max_tokens * width(evidence, self.vocab_size) * BYTES_PER_ENTRY
        return max(1, self.evidence_limit_mib * 2**20 // per_request)
