"""A rollout engine that is a server: vLLM or SGLang, already running, over HTTP.

Every response is a request of its own with a seed of its own, so which token is drawn does not depend
on how many are asked for at once (SGLang keeps to seeds under --enable-deterministic-inference alone).
vLLM is tested for real; SGLang against the contract of its 0.5 releases.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.engines.generate import check_request, entries, prompts_of, request_seed, responses_of, rollouts_from
from offdrift.engines.routing import route_lengths
from offdrift.engines.server.client import (
    Mode,
    Served,
    Server,
    StatusError,
    check_model,
    faithful,
    identify,
    measured_mode,
    optional,
)
from offdrift.engines.server.dialects import (
    API,
    ENTRY,
    PATHS,
    Answer,
    Decoding,
    forced_request,
    left_open,
    read,
    read_forced,
    request,
    response_tokens,
    size_limit,
)
from offdrift.engines.server.forced import ForcedDecoding
from offdrift.engines.server.recorded import read_experts
from offdrift.engines.server.sglang_record import Recording
from offdrift.errors import EngineError
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import EvidenceKind, Rollouts, Routes
from offdrift.segments import cumulative

MOST_LAYERS = 256
"""Layers whose experts an answer may list, at most."""
NUMBER = 32
"""Bytes that one number may take on its way."""
PROBED = 20
"""Likeliest tokens from which the kind of log-probs is told: what vLLM gives unless told otherwise."""


class OpenAIEngine:
    """Rollouts from a running server.

    Args:
        url: of the server, `http://HOST:PORT/v1`.
        vocab_size: tokens of the model. vLLM without a tokenizer ends when it is given an id beyond.
        model: name of the model there; absent: the only one that is served.
        dtype: of weights and activations; "auto" takes what the server says.
        quantization: must be left out; the server says its own.
        api: "completions", "generate" or "sglang" (see `server.dialects`); absent: by the server.
        on_raw: what to do if the log-probs are not those of what is sampled: "refuse", or "record"
            them with this remark, for an audit.
        sync: whether `load_weights` may change the server's weights.
        sync_folder: where weights are put for the server to read; a temporary folder if absent.
        concurrency: requests under way at once.
        timeout: seconds for which the server may say nothing; it says nothing while it draws.
        retries: further tries of a request that the server was too busy for.
        insecure: whether `http://` may go to another machine.
        evidence_limit_mib: memory that recorded evidence may take, MiB.
        experts_per_token: k of the model's routers, which SGLang's answers leave out.
        head: makes the output head of the server's weights, in float32: with it, hidden states that SGLang returns are
            evidence of whole distributions.
        version: trainer version of the weights that the server holds, optimizer steps.

    Raises: `EngineError` if there is no server, no such model, or it computes in another dtype.

    Example:
        OpenAIEngine("http://127.0.0.1:8000/v1", vocab_size=151936).generate([[1, 2]], sampling, seed=0)
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        model: str | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        api: str | None = None,
        on_raw: str = "refuse",
        sync: bool = False,
        sync_folder: str | None = None,
        concurrency: int = 64,
        timeout: float | int = 600.0,
        retries: int = 3,
        insecure: bool = False,
        evidence_limit_mib: int = 1024,
        experts_per_token: int | None = None,
        head: Callable[[], Head] | None = None,
        name: str = "openai",
        version: int = 0,
    ) -> None:
        if vocab_size < 1 or concurrency < 1:
            raise EngineError(f"vocab_size = {vocab_size} and concurrency = {concurrency} must be 1 or more")
        if api is not None and api not in PATHS:
            raise EngineError(f"api = {api!r}; there are {', '.join(PATHS)}")
        if on_raw not in ("refuse", "record"):
            raise EngineError(f'on_raw = {on_raw!r}; say "refuse" or "record"')
        if quantization is not None:
            raise EngineError(f"quantization = {quantization!r}: a running server keeps its own; leave it out")
        self.name, self.version, self.vocab_size = name, version, vocab_size
        self.evidence_limit_mib = evidence_limit_mib
        self._server = Server(url, timeout=timeout, retries=retries, insecure=insecure)
        self.url = self._server.url
        self.served = identify(self._server, model)
        if dtype != "auto" and self.served.dtype not in (None, dtype):
            raise EngineError(
                f"{self.url} computes in {self.served.dtype}, not in {dtype}; a running server keeps "
                f'its dtype: say dtype = "{self.served.dtype}", or start it with --dtype {dtype}'
            )
        self.states_dtype = dtype != "auto" or self.served.dtype is not None
        # Half precision is what servers use that say nothing.
        self.dtype = self.served.dtype or ("bfloat16" if dtype == "auto" else dtype)
        usual = "sglang" if self.served.software == "sglang" else "completions"
        self._api: API = cast(API, api or usual)
        self._on_raw, self._sync, self._concurrency = on_raw, sync, concurrency
        self._mode: Mode | None = self.served.mode
        self._weights = Weights(self._server, self.served, folder=sync_folder, version=version)
        self._recording = Recording(self.served.offers, experts_per_token, head, self.dtype)
        self._decoding = ForcedDecoding(self._server, self.served, vocab_size)
        self._closed = False

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int, evidence: EvidenceKind = "sampled"
    ) -> Rollouts:
        """One response per prompt, in order; see `Engine.generate`.

        Raises: `EngineError` if the request makes no sense, the server refuses or cannot be used,
            its weights changed meanwhile, or its log-probs are not those of what it samples.
        """
        self._check(prompts, sampling, evidence)
        # Without temperature and filters raw log-probs are right, too.
        right = faithful("raw", sampling) or self._recording.masks(sampling)
        right = right or faithful(self.logprobs_mode(prompts[0]), sampling)
        if not right and self._on_raw == "refuse":
            raise EngineError(
                f"the log-probs of {self.url} are {self._mode or 'raw, it seems'}: not those of what is "
                f"sampled with temperature = {sampling.temperature}, top_k = {sampling.top_k}, top_p = "
                f"{sampling.top_p}, min_p = {sampling.min_p}; start vLLM with --logprobs-mode processed_logprobs "
                '(SGLang knows of no filters), sample without, or say on_raw = "record" to audit it as it is'
            )
        return self._drawn(prompts, sampling, seed, evidence, "processed" if right else "raw")

    def logprobs_mode(self, prompt: Sequence[int]) -> Mode:
        """Kind of log-probs that the server reports: as it declares, else measured with a prompt."""
        if self._mode is None:
            k = min(PROBED, self.vocab_size)
            self._mode = measured_mode(lambda s: self._drawn([prompt], s, 0, k, "raw"))
        return self._mode or "raw"  # unknown: nothing can be said here; the next prompt is asked again

    @property
    def weight_label(self) -> str | None:
        """The label that the server gives its weights; None if it does not say."""
        return self._weights.label

    def forced(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with the log-probs that the server gives their tokens when it reads them in place of drawing.

        They are those of temperature 1 without filters, computed from the weights alone: a server that is asked for
        them uses no keys and values from its cache (vLLM).

        Raises: `EngineError` if the server gives none, or none that can be read.
        """
        prompts, responses = prompts_of(rollouts), responses_of(rollouts)
        sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        api: API = "sglang" if self._api == "sglang" else "completions"

        def ask(i: int) -> Tensor:
            body = forced_request(api, self.served.model, sequences[i])
            limit = size_limit(sequences[i], Sampling(1), 1) + 2 * len(sequences[i]) * ENTRY
            answer = self._server.post(PATHS[api], body, limit=limit)
            check_model(answer, self.served)
            return read_forced(api, answer, sequences[i])[-len(responses[i]) :]

        # vLLM with adapters mixes up requests whose prompts it scores together, and may end by it
        # (https://github.com/vllm-project/vllm/issues/16668).
        together = 1 if self.served.adapters else None
        self._weights.check()
        logp = torch.cat(self._each(ask, len(sequences), together))
        self._weights.check()
        provenance = replace(rollouts.provenance, sampling=Sampling(rollouts.provenance.sampling.max_tokens))
        return rollouts.with_(logp_rollout=logp, evidence=None, provenance=provenance)

    def decoding(self, prompt: Sequence[int]) -> Decoding:
        """Say how this server decodes given tokens. Raises: `NotOfferedError` if it does not, and how to start one."""
        return self._decoding.way(prompt)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that `decoded` found in the prefix cache so far; None if the server does not say."""
        return self._decoding.cached_tokens

    def decoded(
        self,
        rollouts: Rollouts,
        *,
        evidence: EvidenceKind = "sampled",
        concurrency: int | None = None,
        salts: Sequence[str] | None = None,
    ) -> Rollouts:
        """The rollouts with the log-probs that the server gives their tokens when it decodes them, one after the other
        from its cache, as it decodes what it draws. They are those of temperature 1 without filters.

        Args:
            concurrency: requests under way at once; default: the engine's.
            salts: of each request, see `decoding_request`; default: new ones, and no prefix is taken from the cache.

        Raises: `NotOfferedError` if it decodes no given tokens; `EngineError` if it drew other ones.
        """
        prompts, responses = prompts_of(rollouts), responses_of(rollouts)
        sampling = Sampling(rollouts.provenance.sampling.max_tokens)
        self._check(prompts, sampling, evidence)
        self.decoding(prompts[0])
        width, salted = entries(evidence, self.vocab_size), salts or [uuid.uuid4().hex for _ in prompts]

        def ask(i: int) -> Answer:
            how: dict[str, Any] = {"evidence": evidence, "width": width, "salt": salted[i]}
            return self._decoding.decoded(prompts[i], responses[i], **how)

        return self._asked(ask, prompts, sampling, "processed", concurrency)

    def rendered(self, text: str, *, chat: bool) -> list[int] | None:
        """Token ids that the server makes of a text, or of a user's message in its chat template; None if it does not
        say (vLLM has `/tokenize`).

        Raises: `EngineError` if the answer cannot be read.
        """
        if self.served.software != "vllm":
            return None
        message = [{"role": "user", "content": text}]
        asked = {"messages": message, "add_generation_prompt": True} if chat else {"prompt": text}
        body = {"model": self.served.model, "add_special_tokens": False, **asked}
        answer = optional(lambda: self._server.post("/tokenize", body))
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if answer is not None and not (isinstance(tokens, list) and all(isinstance(t, int) for t in tokens)):
            raise EngineError(f"{self.url}/tokenize gives no token ids; this server's version is not supported")
        return tokens

    def answered(self, prompt: Sequence[int], *, tokens: int, seed: int, settings: bool) -> list[int]:
        """Token ids of one response.

        Args:
            tokens: longest response.
            settings: send every sampling setting, at what changes nothing (temperature 1, no filter, no end); False
                leaves all of them to the server.

        Raises: `EngineError` if the server does not answer with token ids.
        """
        api: API = "sglang" if self._api == "sglang" else "completions"
        asked = request(api, self.served.model, prompt, Sampling(tokens), evidence="sampled", seed=seed)
        answer = self._server.post(PATHS[api], asked if settings else left_open(asked))
        return response_tokens(api, answer, prompt)

    def ends(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[bool] | None:
        """Ask for each token whether a response that leaves its settings to the server ends there.

        It is allowed to draw nothing else, and twice. None if the server cannot be asked so (vLLM has
        `allowed_token_ids`).

        Raises: `EngineError` if the server does not answer with token ids.
        """

        def ask(i: int) -> list[int]:
            asked = request("completions", self.served.model, prompt, Sampling(2), evidence="sampled", seed=0)
            body = left_open(asked) | {"allowed_token_ids": [tokens[i]]}
            answer = optional(lambda: self._server.post(PATHS["completions"], body), (400, 422))
            return [] if answer is None else response_tokens("completions", answer, prompt)

        if self.served.software != "vllm" or not tokens:
            return None
        responses = self._each(ask, len(tokens))
        if any(set(response) != {token} for response, token in zip(responses, tokens, strict=True)):
            return None
        return [len(response) == 1 for response in responses]

    def asleep(self) -> bool:
        """Whether the server says that it sleeps, as beside a trainer on the same device."""
        answer = optional(lambda: self._server.get("/is_sleeping")) if self.served.software == "vllm" else None
        return isinstance(answer, dict) and answer.get("is_sleeping") is True

    def routes(self, rollouts: Rollouts) -> Routes:
        """Experts that the server sends these tokens to when it prefills them; see `engines.routing`.

        Raises: `EngineError` if the server does not say (`--enable-return-routed-experts`).
        """
        sglang = self.served.software == "sglang"
        if self.served.software != "vllm" and not (sglang and self._recording.routes):
            why = "it was not started with --enable-return-routed-experts" if sglang else "it is something else"
            raise EngineError(f"routed experts are read from vLLM and SGLang, and of {self.url} {why}")
        lengths = route_lengths(rollouts)
        pairs = zip(prompts_of(rollouts), responses_of(rollouts), strict=True)
        forced = [(prompt + response)[:-1] for prompt, response in pairs]
        one = Sampling(1)

        def ask(i: int) -> Tensor:
            if sglang:
                body = request("sglang", self.served.model, forced[i], one, evidence="sampled", seed=0)
                answer = self._server.post(PATHS["sglang"], body | {"return_routed_experts": True}, limit=2**28)
                facts = {"vocab_size": self.vocab_size, "recording": self._recording}
                response = read("sglang", answer, forced[i], one, "sampled", **facts)
                if response.draws.experts is None:
                    raise EngineError(f"{self.url} was asked for routed experts and gives none")
                return response.draws.experts
            body = request("completions", self.served.model, forced[i], one, evidence="sampled", seed=0)
            # A prefix that is cached may not be routed again.
            body["cache_salt"] = uuid.uuid4().hex
            answer = self._server.post(PATHS["completions"], body, limit=2**28)
            read("completions", answer, forced[i], one, "sampled", self.vocab_size)
            return read_experts(answer["choices"][0].get("routed_experts"), int(lengths[i]))

        return Routes(torch.cat(self._each(ask, len(forced))), cumulative(lengths))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Give the server the trainer's `named_parameters`; see `Engine`.

        vLLM on CPUs needs `--worker-extension-cls offdrift.engines.vllm.worker.Worker` to take all.

        Raises: `EngineError` unless the engine was made with `sync`, or if the server takes none.
        """
        if not self._sync:
            raise EngineError(
                f"{self.url} keeps its weights: this engine was not told that it may change them (sync = True)"
            )
        self._weights.load(weights, version=version)
        self.version = version

    def close(self) -> None:
        """End the connections; the server goes on. Idempotent."""
        self._closed = True
        self._server.close()

    def _drawn(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        evidence: EvidenceKind,
        logprobs: Literal["processed", "raw"],
    ) -> Rollouts:
        width = entries(evidence, self.vocab_size)
        # Raw log-probs are measured, or recorded, as they are: without a mask to renormalize them by.
        recording = self._recording if logprobs == "processed" else self._recording.without_masks()

        def ask(i: int) -> Answer:
            prompt, own_seed = prompts[i], request_seed(seed, i)
            facts: dict[str, Any] = {"evidence": evidence, "seed": own_seed, "vocab_size": self.vocab_size}
            body = request(self._api, self.served.model, prompt, sampling, **facts)
            limit = size_limit(prompt, sampling, width)
            if self._api == "sglang":
                body |= recording.asked(sampling, evidence)
                limit += self._record_bytes(len(prompt) + sampling.max_tokens, sampling, evidence)
            answer = self._server.post(PATHS[self._api], body, limit=limit)
            check_model(answer, self.served)
            try:
                return read(self._api, answer, prompt, sampling, evidence, self.vocab_size, recording=recording)
            except EngineError as error:
                raise EngineError(f"request {i} of {len(prompts)} to {self.url}: {error}") from error

        return self._asked(ask, prompts, sampling, logprobs)

    def _record_bytes(self, places: int, sampling: Sampling, evidence: EvidenceKind) -> int:
        """Bytes by which an honest answer grows with what it records."""
        width = self._recording.served_head().weight.shape[1] if evidence == "hidden" else 0
        experts = MOST_LAYERS * (self._recording.experts_per_token or 0) if self._recording.routes else 0
        mask_tokens = sampling.top_k if self._recording.masks(sampling) else 0
        return places * (6 * experts + 2 * NUMBER * mask_tokens + NUMBER * width)

    def _asked(
        self,
        ask: Callable[[int], Answer],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        logprobs: Literal["processed", "raw"],
        concurrency: int | None = None,
    ) -> Rollouts:
        """Answers to all prompts as one record, if the weights stayed the same."""
        self._weights.check()
        answers = self._each(ask, len(prompts), concurrency)
        self._weights.check(span.label for a in answers for span in a.spans)
        versions = [self._weights.versions(a, unsaid=self.version) for a in answers]
        provenance = Provenance(
            engine=self.name,
            engine_version=f"{self.served.software} {self.served.version}",
            model=self.served.root,
            dtype=self.dtype,
            quantization=self.served.quantization,
            sampling=sampling,
            logprobs=logprobs,
        )
        draws = [a.draws for a in answers]
        return rollouts_from(draws, prompts, version=torch.cat(versions), provenance=provenance)

    def _each(self, ask: Callable[[int], Any], count: int, concurrency: int | None = None) -> list[Any]:
        """Answers in order; the first failure, or Ctrl-C, stops what has not begun."""
        with ThreadPoolExecutor(min(concurrency or self._concurrency, count)) as threads:
            futures = [threads.submit(ask, i) for i in range(count)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
        failed = next((f for f in futures if not f.cancelled() and f.exception()), None)
        return [f.result() for f in ([failed] if failed else futures)]

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling, evidence: EvidenceKind) -> None:
        if self._closed:
            raise EngineError(f"engine {self.name!r} is closed; construct another one")
        if evidence == "hidden" and not (self._api == "sglang" and self._recording.states):
            raise EngineError(
                f"{self.url} gives no hidden states (SGLang does, started with --enable-return-hidden-states, to an "
                'engine that knows the output head); record evidence = "full", or 20'
            )
        check_request(
            prompts, sampling, evidence, vocab_size=self.vocab_size, state_bytes=0, limit_mib=self.evidence_limit_mib
        )
        longest, most = max(map(len, prompts)), self.served.max_model_len
        if most is not None and longest + sampling.max_tokens > most:
            raise EngineError(
                f"a prompt of {longest} tokens and sampling.max_tokens = {sampling.max_tokens} exceed "
                f"the {most} tokens that {self.url} serves; shorten either"
            )


# -- weights ---------------------------------------------------------------------------------------


OWN_METHOD = "offdrift_load"
"""Of `engines.vllm.worker.Worker`, which also does what vLLM's reload leaves out on CPUs."""

DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"


class Weights:
    """The weights that a server holds, by label.

    The trainer writes one safetensors file (into `folder`, on a disk that both see; a temporary one if absent);
    the server loads it in place and forgets what it cached. From then on the label says which weights drew a
    token: a server that was restarted, or that somebody else gave weights, has another. A response that was under
    way while weights were loaded has tokens of several labels, each of which is a version of the trainer.
    """

    def __init__(self, server: Server, served: Served, *, folder: str | None = None, version: int = 0) -> None:
        self._server, self._served, self._folder = server, served, folder
        self._run = uuid.uuid4().hex[:8]
        self.label = self.read()
        """What the weights are expected to be called; None if the server does not say."""
        self._version_of = {} if self.label is None else {self.label: version}
        """Trainer versions of the labels that the server held on our behalf."""

    def read(self) -> str | None:
        """Version of the weights as the server reports it now; None if it reports none."""
        path = {"vllm": "/weight_info", "sglang": "/get_model_info"}.get(self._served.software)
        info = optional(lambda: self._server.get(path)) if path else None
        version = info.get("weight_version") if isinstance(info, dict) else None
        return None if version is None else str(version)

    def check(self, labels: Iterable[str] = ()) -> None:
        """Raise `EngineError` if the server names other weights, or an answer some that are no trainer version.

        Args:
            labels: of all answers.
        """
        named = set(labels)
        if self.label is None:
            if len(named) > 1:
                raise EngineError(
                    f"{self._server.url} drew responses with weights {', '.join(sorted(x[:80] for x in named)[:8])} "
                    "and does not say which it holds now, so that tokens cannot be given a version; what was drawn "
                    "is dropped. Let nobody change the weights meanwhile"
                )
            return
        held = self.read()
        for label in [held] * (held != self.label) + sorted(named - set(self._version_of)):
            raise EngineError(
                f"{self._server.url} holds weights {str(label)[:80]!r}, expected {self.label!r}: "
                "it was restarted, or somebody else gave it weights while responses were drawn; "
                "what was drawn is dropped. Load weights again, and let one trainer own a server"
            )

    def versions(self, answer: Answer, *, unsaid: int) -> Integer[Tensor, " n"]:
        """The trainer version of the weights that drew each token; `unsaid` where the server does not say."""
        if not self._version_of or not answer.spans:
            return torch.full((len(answer.draws.tokens),), unsaid)
        spans = answer.spans
        versions = torch.tensor([self._version_of[span.label] for span in spans])
        return versions.repeat_interleave(torch.tensor([span.end - span.start for span in spans]))

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Give the server these weights. Raises: `EngineError` if it cannot take them."""
        named = {name: w.detach().cpu().contiguous() for name, w in weights}
        if not named:
            raise EngineError(
                "no weights were given; an iterator that was already used up? pass model.named_parameters() afresh"
            )
        label = f"offdrift-{self._run}-{version}-{uuid.uuid4().hex[:8]}"
        if self._folder is not None:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=self._folder))
        self.label = label  # whatever fails from here on leaves weights that must not be drawn from
        self._version_of[label] = version
        try:
            # Two names may share one tensor, which the format refuses.
            save_file({n: w.clone() for n, w in named.items()}, folder / "model.safetensors")
            folder.chmod(0o755)  # the server may run as somebody else
            self._load_from(str(folder), label)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _load_from(self, folder: str, label: str) -> None:
        if self._served.software == "sglang":
            body = {"model_path": folder, "weight_version": label, "flush_cache": True}
            self._succeed("update_weights_from_disk", body)
        elif self._served.software == "vllm":
            try:
                self._call(OWN_METHOD, [folder])
            except StatusError as error:
                if error.status == 404:
                    raise EngineError(
                        f"{self._server.url} takes no weights: it has no /collective_rpc; {DEV_MODE} (on "
                        "a trusted network alone: whoever reaches it can load any file)"
                    ) from error
                # The server has no such method: it was started without our extension.
                self._call("reload_weights", [], {"weights_path": folder})
            self._succeed("reset_prefix_cache")
            self._server.post("/update_weight_version", {"new_version": label})
        else:
            raise EngineError(
                f"{self._server.url} is neither vLLM nor SGLang, so its weights cannot be set; use "
                "it for `check` or for frozen rollouts"
            )

    def _call(self, method: str, args: list[str], kwargs: dict[str, str] | None = None) -> None:
        body = {"method": method, "args": args, "kwargs": kwargs or {}}
        self._server.post("/collective_rpc", body, again=False)

    def _succeed(self, what: str, body: Any = None) -> None:
        answer = self._server.post(f"/{what}", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(
                f"{what} did not succeed ({str(answer)[:200]}); are other requests running? let one "
                "trainer own a server"
            )
