"""Requests to an inference server and its answers, in the three APIs that return token ids.

- "completions": `/v1/completions` of vLLM, with its `return_token_ids`.
- "generate": `/inference/v1/generate` of vLLM (`--enable-scale-out`), which also says for every
  token which weights drew it.
- "sglang": `/generate` of SGLang, which from 0.5.23 on says so, too; before, it names the last weights alone.

Text that is tokenized again may become other tokens: a server that answers with text alone is refused.
Answers are untrusted, so every number in them is checked.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.engines.generate import Generation
from offdrift.engines.server.recorded import read_experts, read_mask
from offdrift.engines.server.sglang_record import Recording, on_mask, read_flat_experts, read_states, renormalized
from offdrift.engines.vllm.taps import IMPOSED
from offdrift.errors import EngineError
from offdrift.records.plausible import implausible
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import EvidenceKind, FullVocab, HiddenStates, TopK

API = Literal["completions", "generate", "sglang"]

PATHS = {"completions": "/v1/completions", "generate": "/inference/v1/generate", "sglang": "/generate"}

FLOOR = -9998.0
"""JSON has no infinity: servers write -9999 for the log-prob of what was cut off."""
ROUNDING = 1e-3
"""Nats above 0 that a log-prob may lie by rounding in half precision."""
ENTRY = 160
"""Bytes that one log-prob may take on its way."""


class Span(NamedTuple):
    """Consecutive tokens of a response that were drawn by the same weights."""

    label: str
    """What the server calls these weights."""
    start: int
    """First token, counted from 0."""
    end: int
    """One past the last token."""


@dataclass(frozen=True)
class Answer:
    """One response, and the weights that drew it."""

    draws: Generation
    spans: tuple[Span, ...]
    """Which weights drew which tokens, first to last without a gap; empty if the server does not say."""


def request(
    api: API,
    model: str,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    evidence: EvidenceKind,
    seed: int,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """The body of one request. Every parameter is sent: servers fill gaps from the model's folder.

    Args:
        vocab_size: asked of SGLang for evidence "full"; there -1 is none of the likeliest tokens, of vLLM it is all.
    """
    everything = -1 if api != "sglang" or vocab_size is None else vocab_size
    likeliest = evidence if isinstance(evidence, int) else everything if evidence == "full" else 0
    filters = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
    }
    if api == "sglang":
        filters |= {"top_k": sampling.top_k or -1, "max_new_tokens": sampling.max_tokens, "sampling_seed": seed}
        return {
            "input_ids": list(prompt),
            "sampling_params": filters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": likeliest,
        }
    filters |= {"top_k": sampling.top_k, "max_tokens": sampling.max_tokens, "seed": seed}
    if api == "completions":
        return filters | {
            "model": model,
            "prompt": list(prompt),
            "logprobs": likeliest,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
    # Here the sampled token counts among those asked for.
    logprobs = likeliest + 1 if likeliest > 0 else likeliest
    return {
        "model": model,
        "token_ids": list(prompt),
        "sampling_params": filters | {"logprobs": logprobs, "detokenize": False},
    }


def forced_request(api: API, model: str, tokens: Sequence[int]) -> dict[str, Any]:
    """The body of a request for the log-probs of given tokens, which the server reads as a prompt."""
    body = request(api, model, tokens, Sampling(1), evidence="sampled", seed=0)
    return body | ({"logprob_start_len": 0} if api == "sglang" else {"prompt_logprobs": 0})


Decoding = Literal["trace replay", "logits processor"]
"""Ways in which a vLLM server decodes given tokens: its own, and by a plugin (`engines.vllm.forced`)."""
DECODING: dict[Decoding, API] = {"trace replay": "generate", "logits processor": "completions"}
"""API that takes such a request."""


def decoding_request(
    way: Decoding,
    model: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    evidence: EvidenceKind,
    salt: str | None = None,
) -> dict[str, Any]:
    """The body of a request that decodes given tokens after a prompt, at temperature 1 without filters.

    Args:
        salt: prefixes are taken from the cache only of requests with the same one; None: of all.
    """
    body = request(DECODING[way], model, prompt, Sampling(len(tokens)), evidence=evidence, seed=0)
    if way == "trace replay":
        body["sampling_params"]["trace_decode_token_ids"] = list(tokens)
    else:
        body["vllm_xargs"] = {IMPOSED: list(tokens)}
        del body["seed"]  # nothing is drawn; on CPUs vLLM 0.32 ends at a seed whose prompt is read in parts
    return body if salt is None else body | {"cache_salt": salt}


OPEN = {
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop_token_ids", "ignore_eos"),
}
"""Settings that a server fills where a request leaves them open."""


def left_open(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request without its sampling settings: the server's own are taken; length and seed stay."""
    rest = {key: value for key, value in body.items() if key not in OPEN}
    inner = rest.get("sampling_params")
    return rest if inner is None else {**rest, "sampling_params": left_open(inner)}


def response_tokens(api: API, content: Any, prompt: Sequence[int]) -> list[int]:
    """Token ids of a response, whatever ended it. Raises: `EngineError` if the answer cannot be read."""
    tokens = _PARSERS[api](content, prompt).tokens
    if not all(_whole(token) for token in tokens):
        raise _odd("its token ids are not whole numbers")
    return tokens


def size_limit(prompt: Sequence[int], sampling: Sampling, entries: int) -> int:
    """Bytes that an honest answer stays under; `entries` log-probs are asked for per token."""
    return 2**20 + 16 * len(prompt) + sampling.max_tokens * (entries + 2) * ENTRY


def read(
    api: API,
    content: Any,
    prompt: Sequence[int],
    sampling: Sampling,
    evidence: EvidenceKind,
    vocab_size: int,
    recording: Recording | None = None,
) -> Answer:
    """One response from the server's answer.

    Args:
        recording: what SGLang was asked to record besides.

    Raises: `EngineError` naming the field that is missing, of another type or out of range; or if
        the response was cut, or ended by a token that ends nothing here.
    """
    try:
        parsed = _PARSERS[api](content, prompt)
        if recording is not None and recording.masks(sampling):
            parsed = _filtered(parsed)
        return _read(parsed, sampling, evidence, vocab_size, recording)
    except RecursionError:
        raise _odd("it is nested too deeply") from None


def read_forced(api: API, content: Any, tokens: Sequence[int]) -> Float[Tensor, " n"]:
    """Log-probs of given tokens from the second on, at temperature 1 without filters, from the server's answer.

    Raises: `EngineError` naming what is missing, of another type or about other tokens.
    """
    if api == "sglang":
        rows = [_pair(row) for row in _field(_field(_dict(content), "meta_info", dict), "input_token_logprobs", list)]
    else:
        listed = _field(_choice(content), "prompt_logprobs", list)
        rows = [(token, _dict(row).get(str(token))) for token, row in zip(tokens, listed, strict=False) if row]
        rows = [(token, entry and _dict(entry).get("logprob")) for token, entry in rows]
    # The first token follows nothing: vLLM lists nothing for it, SGLang nothing or a null.
    rows = rows[1:] if len(rows) == len(tokens) else rows
    if [token for token, _ in rows] != list(tokens[1:]):
        raise _odd(f"it lists log-probs of {len(rows)} given tokens, not of the {len(tokens) - 1} that were sent")
    return torch.tensor([_logp(x) for _, x in rows], dtype=torch.float32)


def _filtered(answer: _Parsed) -> _Parsed:
    """The answer with log-probs behind the filters, where SGLang's own are before them."""
    if not isinstance(answer.mask, list):
        raise _odd("it was asked for its sampling mask and gives none")
    logp = renormalized(answer.on_mask, answer.mask, answer.tokens)
    shift = [_logp(before) - _logp(behind) for before, behind in zip(answer.logp, logp, strict=True)]
    top = on_mask(answer.top, answer.mask, shift) if answer.top else answer.top
    return answer._replace(logp=logp, top=top)


def _read(
    answer: _Parsed, sampling: Sampling, evidence: EvidenceKind, vocab_size: int, recording: Recording | None = None
) -> Answer:
    for i, token in enumerate(answer.tokens):
        if not (_whole(token) and 0 <= token < vocab_size):
            raise _odd(f"token {i} is {_short(token)}; the vocabulary has {vocab_size} tokens")
    if len(answer.tokens) != len(answer.logp):
        raise _odd(f"{len(answer.tokens)} tokens have {len(answer.logp)} log-probs")
    _check_end(answer, sampling)
    logp = torch.tensor([_logp(x) for x in answer.logp], dtype=torch.float32)
    tokens, length = torch.tensor(answer.tokens, dtype=torch.int64), torch.tensor([len(answer.tokens)])
    recorded = _evidence(answer, evidence, vocab_size)
    if (found := implausible(recorded, tokens, logp)) is not None:
        raise _odd(
            f"response token {found[0]}: {found[1]}; these are not the log-probs of one distribution. Start the server "
            "with float32 log-probs (vLLM: --logprobs-mode processed_logprobs), leave out what changes them on the "
            'way, or ask for evidence = "sampled"'
        )
    support = read_mask(answer.mask, answer.tokens, vocab_size)
    positions = answer.prompt + len(answer.tokens) - 1  # the last token was not computed yet
    experts = None if answer.experts is None else read_experts(answer.experts, positions)
    if recording is not None and recording.routes and answer.flat_experts is not None:
        experts = read_flat_experts(answer.flat_experts, positions, recording.experts_per_token or 1)
    if recording is not None and evidence == "hidden":
        head = recording.served_head()
        states = read_states(answer.states, len(answer.tokens), head.weight.shape[1], head.weight.dtype)
        recorded = HiddenStates(states, head)
    return Answer(Generation(tokens, length, logp, recorded, support=support, experts=experts), answer.spans)


class _Parsed(NamedTuple):
    """Fields of a server's answer before validation."""

    tokens: list[Any]
    logp: list[Any]
    top: list[list[tuple[Any, Any]]]
    finish: Any
    reason: Any
    spans: tuple[Span, ...] = ()
    mask: Any = None
    """`sampling_mask`, as the server lists it."""
    experts: Any = None
    """`routed_experts`, as the server encodes it."""
    prompt: int = 0
    """Tokens of the prompt."""
    on_mask: Any = None
    """`output_token_sampling_logprobs` of SGLang."""
    flat_experts: Any = None
    """`routed_experts` of SGLang."""
    states: Any = None
    """`hidden_states` of SGLang."""


def _completions(content: Any, prompt: Sequence[int]) -> _Parsed:
    choice = _choice(content)
    logprobs = _field(choice, "logprobs", dict)
    tokens = _ids(choice)
    if _field(choice, "prompt_token_ids", list) != list(prompt):
        raise _odd("prompt_token_ids are not the prompt's: it was tokenized again")
    if _field(logprobs, "tokens", list) != [f"token_id:{t}" for t in tokens]:
        raise _odd("logprobs.tokens are not those of token_ids")
    rows = _field(logprobs, "top_logprobs", list)
    top = [[(_named(k), v) for k, v in _dict(row).items()] for row in rows]
    logp = _field(logprobs, "token_logprobs", list)
    finish, reason, experts = (choice.get(k) for k in ("finish_reason", "stop_reason", "routed_experts"))
    return _Parsed(tokens, logp, top, finish=finish, reason=reason, experts=experts, prompt=len(prompt))


def _generate(content: Any, prompt: Sequence[int]) -> _Parsed:
    choice = _choice(content)
    rows = [_dict(row) for row in _field(_field(choice, "logprobs", dict), "content", list)]
    tokens = _ids(choice)
    if [row.get("token_id") for row in rows] != tokens:
        raise _odd("logprobs.content is not about the tokens of token_ids")
    listed = [map(_dict, _field(row, "top_logprobs", list)) for row in rows]
    top = [[(e.get("token_id"), e.get("logprob")) for e in entries] for entries in listed]
    spans = _spans(choice.get("weight_versions"), len(tokens))
    logp = [row.get("logprob") for row in rows]
    finish, reason = choice.get("finish_reason"), choice.get("stop_reason")
    parsed = _Parsed(tokens, logp, top, finish=finish, reason=reason, spans=spans)
    mask, experts = choice.get("sampling_mask"), choice.get("routed_experts")
    return parsed._replace(mask=mask, experts=experts, prompt=len(prompt))


def _sglang(content: Any, prompt: Sequence[int]) -> _Parsed:
    content = _dict(content)
    meta = _field(content, "meta_info", dict)
    rows = [_pair(row) for row in _field(meta, "output_token_logprobs", list)]
    tokens = content.get("output_ids")
    tokens = [token for token, _ in rows] if tokens is None else tokens
    if tokens != [token for token, _ in rows]:
        raise _odd("output_token_logprobs are not those of output_ids")
    if meta.get("prompt_tokens") != len(prompt):
        raise _odd(f"prompt_tokens is {_short(meta.get('prompt_tokens'))} for a prompt of {len(prompt)} tokens")
    top = [[_pair(e) for e in _listed(row)] for row in _listed(meta.get("output_top_logprobs"))]
    finish = _field(meta, "finish_reason", dict)
    # From 0.5.23 on weights that changed meanwhile are said per token; `weight_version` is the last of them.
    spans, last = _spans(meta.get("weight_versions"), len(tokens)), meta.get("weight_version")
    if spans and last is not None and str(last) != spans[-1].label:
        raise _odd(f"weight_version is {_short(last)}, and weight_versions end with {_short(spans[-1].label)}")
    if not spans and last is not None:
        spans = (Span(str(last), 0, len(tokens)),)
    parsed = _Parsed(
        tokens, [x for _, x in rows], top, finish=finish.get("type"), reason=finish.get("matched"), spans=spans
    )
    mask, on_mask = (meta.get(f"output_token_sampling_{what}") for what in ("mask", "logprobs"))
    experts, states = meta.get("routed_experts"), meta.get("hidden_states")
    return parsed._replace(mask=mask, on_mask=on_mask, flat_experts=experts, states=states, prompt=len(prompt))


_PARSERS = {"completions": _completions, "generate": _generate, "sglang": _sglang}


def _spans(listed: Any, tokens: int) -> tuple[Span, ...]:
    """`weight_versions` of vLLM and SGLang: objects of version, start and end, over the tokens of the response."""
    spans, start = [], 0
    for i, row in enumerate(_listed(listed)):
        version, first, end = (_dict(row).get(name) for name in ("version", "start", "end"))
        if not (isinstance(version, str) or _whole(version)):
            raise _odd(f"weight_versions[{i}].version is {_short(version)}, not a label")
        if not (_whole(first) and _whole(end) and first == start < end <= tokens):
            raise _odd(
                f"weight_versions[{i}] is about tokens {_short(first)} to {_short(end)}; after {start} of "
                f"{tokens} tokens it must begin at {start} and end behind it"
            )
        spans.append(Span(str(version), first, end))
        start = end
    if spans and start != tokens:
        raise _odd(f"weight_versions are about {start} of {tokens} tokens")
    return tuple(spans)


def _evidence(answer: _Parsed, evidence: EvidenceKind, vocab_size: int) -> FullVocab | TopK | None:
    if evidence in ("sampled", "hidden"):
        return None
    k = vocab_size if evidence == "full" else int(evidence)
    if len(answer.top) != len(answer.tokens):
        raise _odd(f"{len(answer.tokens)} tokens have {len(answer.top)} lists of likeliest tokens")
    pairs = enumerate(zip(answer.top, answer.tokens, strict=True))
    rows = [_likeliest(i, listed, drawn, k, vocab_size) for i, (listed, drawn) in pairs]
    ids = torch.tensor([[t for t, _ in row] for row in rows], dtype=torch.int32)
    logp = torch.tensor([[x for _, x in row] for row in rows], dtype=torch.float32)
    if evidence != "full":
        return TopK(ids, logp)
    return FullVocab(torch.empty_like(logp).scatter_(1, ids.long(), logp))


def _likeliest(i: int, listed: list[tuple[Any, Any]], drawn: int, k: int, vocab_size: int) -> list[tuple[int, float]]:
    """The k likeliest tokens that are listed for response token `i`, with their log-probs, in order."""
    row: dict[int, float] = {}
    for token, x in listed:
        # vLLM names the drawn token before the likeliest, and again if it is one of them.
        if not (_whole(token) and 0 <= token < vocab_size):
            continue
        if token in row and row[token] != _logp(x):
            raise _odd(f"response token {i}: token {token} is listed with two log-probs")
        if token in row and token != drawn:
            raise _odd(f"response token {i}: token {token} is listed twice")
        row[token] = _logp(x)
    if len(row) < k:
        raise _odd(f"response token {i}: {len(row)} tokens of the vocabulary are listed where {k} were asked for")
    others = [x for token, x in row.items() if token != drawn]
    if k < vocab_size and any(x < y for x, y in pairwise(others)):
        raise _odd(f"response token {i}: its likeliest tokens are not in order")
    return sorted(row.items(), key=lambda entry: -entry[1])[:k]


def _check_end(answer: _Parsed, sampling: Sampling) -> None:
    n, finish = len(answer.tokens), answer.finish
    if not 0 < n <= sampling.max_tokens:
        raise _odd(f"the response has {n} tokens, 1 to {sampling.max_tokens} were asked for")
    if finish not in ("stop", "length"):
        raise EngineError(
            f"the server ended a response after {n} tokens with finish_reason = {_short(finish)}: "
            "it was paused, is shutting down, or takes new weights from somebody else; let it finish "
            "and draw again"
        )
    if any(t in sampling.stop_token_ids for t in answer.tokens[:-1]):
        raise _odd("the response goes on behind a stop token")
    if n < sampling.max_tokens and answer.tokens[-1] not in sampling.stop_token_ids:
        raise EngineError(
            f"the server ended a response after {n} of {sampling.max_tokens} tokens at token "
            f"{answer.tokens[-1]} (stop_reason = {_short(answer.reason)}), which is no stop token of "
            "this run; servers add those of the model's generation_config.json: start vLLM with "
            "--generation-config vllm, SGLang with --sampling-defaults openai, or add the token"
        )


def _choice(content: Any) -> dict[str, Any]:
    choices = _field(_dict(content), "choices", list)
    if len(choices) != 1:
        raise _odd(f"there are {len(choices)} choices, 1 was asked for")
    return _dict(choices[0])


def _ids(choice: dict[str, Any]) -> list[Any]:
    if not isinstance(choice.get("token_ids"), list):
        raise EngineError(
            "the server answers with text and no token_ids; text that is tokenized again may become "
            "other tokens: use vLLM 0.11 or later (return_token_ids), or SGLang"
        )
    return choice["token_ids"]


def _field(holder: dict[str, Any], name: str, kind: type) -> Any:
    value = holder.get(name)
    if not isinstance(value, kind):
        raise _odd(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _odd(f"there is {type(value).__name__} where an object belongs")
    return value


def _listed(value: Any) -> list[Any]:
    """A list, empty if absent."""
    if not isinstance(value, list | None):
        raise _odd(f"there is {type(value).__name__} where a list belongs")
    return value or []


def _pair(value: Any) -> tuple[Any, Any]:
    """SGLang's [log-prob, token, text] as token and log-prob."""
    if not isinstance(value, list) or len(value) < 2:
        raise _odd(f"a log-prob is {type(value).__name__}, not [log-prob, token, text]")
    return value[1], value[0]


def _named(name: str) -> int | None:
    digits = name.removeprefix("token_id:")
    return int(digits) if digits != name and digits.isdecimal() and len(digits) < 10 else None


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _logp(value: Any) -> float:
    # Whole numbers of JSON may be too large for a float, which comparing does not mind.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise _odd(f"a log-prob is {_short(value)}")
    if value > ROUNDING:
        raise EngineError(
            f"the server reports {_short(value)} as a log-prob; are these logits? start vLLM with "
            "--logprobs-mode processed_logprobs"
        )
    return -math.inf if value < FLOOR else min(float(value), 0.0)


def _short(value: Any) -> str:
    return _BRIEF.repr(value)[:80]


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 200


def _odd(problem: str) -> EngineError:
    return EngineError(f"the server's answer cannot be used: {problem}")
