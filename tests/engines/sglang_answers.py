"""What an SGLang server answers to the requests of the engine, recorded from a real one and played again.

    python -m tests.engines.sglang_answers http://127.0.0.1:30000

records `tests/data/sglang-0.5.23.json` of a server that holds `tiny("dense")` in float32, started with
`--enable-return-hidden-states`. `docs/check.md` says how SGLang starts on a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from offdrift.engines.output_head import head_of
from offdrift.engines.server.client import Server
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import Rollouts
from tests.engines.models import VOCAB, tiny

ANSWERS = Path(__file__).parent.parent / "data" / "sglang-0.5.23.json"
PROMPTS = [[5, 6, 7, 8], [9, 10]]
PLAIN = Sampling(4)
FILTERED = Sampling(4, temperature=0.7, top_k=5)
TOLD = (
    "version", "dtype", "quantization", "sampling_mask_max_tokens", "enable_return_routed_experts",
    "enable_return_hidden_states", "return_hidden_states_mode", "speculative_algorithm", "chunked_prefill_size",
    "disable_cuda_graph", "kv_cache_dtype", "tp_size", "ep_size", "ep_num_redundant_experts", "attention_backend",
    "enable_fp32_lm_head",
)  # fmt: skip
"""Entries of `/get_server_info` that are kept; it has hundreds."""


def session(url: str) -> dict[str, Rollouts]:
    """Draws of a dense model with each kind of evidence, and the plain ones read again."""
    engine = OpenAIEngine(url, vocab_size=VOCAB, concurrency=1, head=lambda: head_of(tiny("dense")))
    drawn = {str(kind): engine.generate(PROMPTS, PLAIN, seed=1, evidence=kind) for kind in ("full", 3, "hidden")}
    drawn["filtered"] = engine.generate(PROMPTS, FILTERED, seed=1, evidence="full")
    drawn["read"] = engine.forced(drawn["full"])
    engine.close()
    return drawn


def recorded(url: str) -> list[list[Any]]:
    """Every request of a session with its answer: verb and path, body, and what came back."""
    exchanges: list[list[Any]] = []
    ask = Server._request

    def noting(server: Server, verb: str, path: str, body: Any, *rest: Any) -> Any:
        answer = ask(server, verb, path, body, *rest)
        if path == "/get_server_info":
            answer = {name: answer[name] for name in TOLD}
        exchanges.append([f"{verb} {path}", body, answer])
        return answer

    Server._request = noting  # type: ignore[method-assign]
    try:
        session(url)
    finally:
        Server._request = ask  # type: ignore[method-assign]
    return exchanges


def main(url: str) -> None:
    """Record the session."""
    ANSWERS.write_text(json.dumps(recorded(url)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
