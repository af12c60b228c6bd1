"""Which software, model and kind of log-probs a server has: as reported, or else measured.

vLLM reports raw log-probs by default; SGLang's are after the temperature, but not after top-k and
top-p. Either is right for plain sampling and wrong for any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from offdrift.engines.server.client import Server, StatusError
from offdrift.errors import EngineError
from offdrift.records.rollouts import Rollouts, Sampling, TopK

Mode = Literal["processed", "tempered", "raw"]
"""Log-probs after temperature and filters, after temperature alone, or after neither."""

TOLERANCE = 0.05
"""Nats per nat by which half precision may move the ratio of two differences of log-probs."""


@dataclass(frozen=True)
class Served:
    """A server and the model that it serves. None: it does not say."""

    software: Literal["vllm", "sglang", "unknown"]
    version: str
    model: str
    """Name in requests."""
    root: str
    """Where its weights came from."""
    max_model_len: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    mode: Mode | None = None
    aliases: tuple[str, ...] = ()
    """Names under which it serves these weights; answers bear one of them."""


def identify(server: Server, model: str | None) -> Served:
    """Ask a server what it is.

    Args:
        model: name of the model; absent: the only one that is served.

    Raises: `EngineError` if there is no server, it serves no such model, or it reports logits.
    """
    cards = server.get("/v1/models")
    cards = cards.get("data") if isinstance(cards, dict) else None
    cards = cards if isinstance(cards, list) else []
    cards = [c for c in cards if isinstance(c, dict) and isinstance(c.get("id"), str)]
    names = [c["id"] for c in cards]
    if model is None and len(names) != 1:
        raise EngineError(f"{server.url} serves {_listed(names)}; say which one with model = NAME")
    if model is not None and model not in names:
        raise EngineError(f"{server.url} serves {_listed(names)} and no model {model!r}")
    card = cards[names.index(model) if model is not None else 0]
    length = card.get("max_model_len")
    length = length if isinstance(length, int) and length > 0 else None
    base = (card["id"], str(card.get("root") or card["id"]), length)
    ask = {"vllm": _vllm, "sglang": _sglang}.get(str(card.get("owned_by")))
    served = Served("unknown", "unknown", *base) if ask is None else ask(server, *base)
    roots = [str(c.get("root") or c["id"]) for c in cards]
    aliases = tuple(n for n, root in zip(names, roots, strict=True) if root == served.root)
    return replace(served, aliases=aliases)


def faithful(mode: Mode, sampling: Sampling) -> bool:
    """Whether log-probs of this mode are those of the distribution that is sampled.

    Example:
        >>> faithful("tempered", Sampling(8, temperature=0.7)), faithful("raw", Sampling(8, top_p=0.9))
        (True, False)
    """
    unfiltered = sampling.top_k == 0 and sampling.top_p == 1
    plain = unfiltered and sampling.temperature == 1
    return mode == "processed" or plain or (mode == "tempered" and unfiltered)


def measured_mode(draw: Callable[[Sampling], Rollouts]) -> Mode | None:
    """Which log-probs a server reports, from three tokens drawn after one prompt.

    At half the temperature, differences of tempered log-probs are twice as large and raw ones are
    as they were. With top_k = 1 the token has probability one, unless filters are ignored.

    Args:
        draw: one token after one fixed prompt, with top-k evidence.

    Returns: None if the distribution is too flat to tell.

    Raises: `EngineError` if neither is the case.
    """

    def row(temperature: float) -> dict[int, float]:
        drawn = draw(Sampling(1, temperature=temperature))
        assert isinstance(drawn.evidence, TopK)
        entries = zip(drawn.evidence.ids[0].tolist(), drawn.evidence.logp[0].tolist(), strict=True)
        return {token: x for token, x in entries if x > -torch.inf}

    plain, cold = row(1.0), row(0.5)
    shared = sorted(plain.keys() & cold.keys())
    a, b = (torch.tensor([row[t] for t in shared]).double() for row in (plain, cold))
    a, b = a - a.max(), b - b.max()
    if len(shared) < 2 or float(a.abs().max()) < 0.01:
        return None
    ratio = float((a * b).sum() / a.square().sum())
    if abs(ratio - 1) < TOLERANCE:
        return "raw"
    if abs(ratio - 2) > 2 * TOLERANCE:
        raise EngineError(
            f"halving the temperature multiplies differences of log-probs by {ratio:.3g}; those of "
            "what is sampled double, raw ones stay: the server reports something else"
        )
    lone = draw(Sampling(1, top_k=1))
    return "processed" if float(lone.logp_rollout[0]) > -1e-3 else "tempered"


def _vllm(server: Server, model: str, root: str, length: int | None) -> Served:
    answer = optional(lambda: server.get("/version"))
    version = str(answer.get("version"))[:40] if isinstance(answer, dict) else "unknown"
    info = optional(lambda: server.get("/server_info?config_format=json"))
    config = _at(info, "vllm_config", "model_config")
    cache = _at(info, "vllm_config", "cache_config").get("cache_dtype")
    mode = config.get("logprobs_mode")
    if isinstance(mode, str) and mode.endswith("_logits"):
        raise EngineError(
            f"{server.url} reports {mode} as log-probs; start vLLM with --logprobs-mode processed_logprobs"
        )
    parts = [config.get("quantization"), f"kv_{cache}" if cache not in (None, "auto") else None]
    return Served(
        "vllm",
        version,
        model,
        root,
        length,
        dtype=_dtype(config.get("dtype")),
        quantization="+".join(str(p) for p in parts if p) or None,
        mode={"processed_logprobs": "processed", "raw_logprobs": "raw"}.get(str(mode)),  # type: ignore[arg-type]
    )


def _sglang(server: Server, model: str, root: str, length: int | None) -> Served:
    info = optional(lambda: server.get("/get_server_info"))
    info = info if isinstance(info, dict) else {}
    quantization = info.get("quantization")
    return Served(
        "sglang",
        str(info.get("version", "unknown"))[:40],
        model,
        root,
        length,
        dtype=_dtype(info.get("dtype")),
        quantization=None if quantization is None else str(quantization)[:80],
    )


def check_model(answer: Any, served: Served) -> None:
    """Raise `EngineError` if an answer says that another model gave it, as behind a gateway."""
    named = answer.get("model") if isinstance(answer, dict) else None
    if named is not None and named not in served.aliases:
        raise EngineError(
            f"{str(named)[:120]!r} answered in place of {served.model!r}; is this a gateway that "
            "chooses models? give the address of the server itself"
        )


def optional(ask: Callable[[], Any]) -> Any:
    """The answer, or None from a server that does not offer the question."""
    try:
        return ask()
    except StatusError as error:
        if error.status in (401, 403, 404, 405, 501):
            return None
        raise


def _at(info: Any, *names: str) -> dict[str, Any]:
    for name in names:
        info = info.get(name) if isinstance(info, dict) else None
    return info if isinstance(info, dict) else {}


def _dtype(reported: Any) -> str | None:
    name = str(reported).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else None


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name[:120]) for name in names[:8]) or "no model"
