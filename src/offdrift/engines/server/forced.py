"""Forced decoding on a running server: given tokens, token by token from its cache, with the log-probs that it reports.

Two official ways lead there on vLLM: trace replay (`--enable-trace-replay --enable-scale-out`, with its second model
runner), and a plugin (`--logits-processors`, see `engines.vllm.forced`). Which one a server has is asked once, with two
short requests. SGLang has none that reports the model's log-probs: it can only read tokens (`OpenAIEngine.forced`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from offdrift.engines.server.client import Served, Server, StatusError, check_model
from offdrift.engines.server.dialects import (
    DECODING,
    PATHS,
    Answer,
    Decoding,
    decoding_request,
    read,
    size_limit,
)
from offdrift.errors import EngineError, NotOfferedError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import EvidenceKind

WITHOUT = (400, 403, 404, 405, 422, 501)
"""Statuses with which a server refuses what it does not offer."""
PROBE = 3
"""Tokens of a request that only asks if the server can."""
HOW = (
    "start vLLM with --logits-processors offdrift.engines.vllm.forced:Forced and without --logprobs-mode "
    "processed_logprobs, or, where its second model runner works, with --enable-trace-replay --enable-scale-out"
)


class ForcedDecoding:
    """One server's way of decoding given tokens."""

    def __init__(self, server: Server, served: Served, vocab_size: int) -> None:
        self._server, self._served, self._vocab_size = server, served, vocab_size
        self._way: Decoding | None = None
        self._lock = threading.Lock()
        self.cached_tokens: int | None = None
        """Tokens of prompts that were taken from the prefix cache so far; None if the server does not say."""

    def way(self, prompt: Sequence[int]) -> Decoding:
        """Say how the server decodes given tokens; asked once, behind this prompt.

        Raises: `NotOfferedError` if it does not, and how to start one that does.
        """
        if self._way is None and self._served.software == "vllm":
            self._way = next((way for way in DECODING if self._offers(way, prompt)), None)
        if self._way is None:
            raise NotOfferedError(f"{self._server.url} decodes no given tokens; {HOW}")
        return self._way

    def decoded(
        self, prompt: Sequence[int], tokens: Sequence[int], *, evidence: EvidenceKind, width: int, salt: str | None
    ) -> Answer:
        """One response along these tokens. Raises: `EngineError` if the server drew other ones."""
        answer = self._ask(self.way(prompt), prompt, tokens, evidence=evidence, width=width, salt=salt)
        if answer.draws.tokens.tolist() != list(tokens):
            raise EngineError(f"{self._server.url} was given {len(tokens)} tokens to decode and drew other ones")
        return answer

    def _offers(self, way: Decoding, prompt: Sequence[int]) -> bool:
        """Whether the server follows two different responses, and shows the model's log-probs of them."""
        logp: list[float] = []
        for token in (0, self._vocab_size - 1):
            answer = None
            with suppress(StatusError):
                answer = self._ask(way, prompt, [token] * PROBE, evidence="sampled", width=1, salt=None)
            if answer is None or answer.draws.tokens.tolist() != [token] * PROBE:
                return False
            logp += answer.draws.logp.tolist()
        # Log-probs after the plugin are those of a certain token: the server reports processed ones.
        return any(x != 0 for x in logp)

    def _ask(
        self,
        way: Decoding,
        prompt: Sequence[int],
        tokens: Sequence[int],
        *,
        evidence: EvidenceKind,
        width: int,
        salt: str | None,
    ) -> Answer:
        api, sampling = DECODING[way], Sampling(len(tokens))
        body = decoding_request(way, self._served.model, prompt, tokens, evidence=evidence, salt=salt)
        try:
            answer = self._server.post(PATHS[api], body, limit=size_limit(prompt, sampling, width))
        except StatusError as error:
            if error.status in WITHOUT:
                raise
            raise EngineError(str(error)) from error
        check_model(answer, self._served)
        self._count(answer)
        return read(api, answer, prompt, sampling, evidence, self._vocab_size)

    def _count(self, answer: Any) -> None:
        """Add the cached tokens that vLLM reports under `--enable-prompt-tokens-details`."""
        usage = answer.get("usage") if isinstance(answer, dict) else None
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(cached, int) and cached >= 0:
            with self._lock:
                self.cached_tokens = (self.cached_tokens or 0) + cached
