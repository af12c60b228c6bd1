"""A rollout engine on vLLM, in this process. The only file that imports vllm.

Log-probs come through vLLM's public interface, as processed log-probs. What vLLM does to its host is
undone (`preserve_host_state`), and what it forgets in a weight synchronisation on CPUs is repaired
(`load_weights`). Every request has its own random stream, so which token is drawn does not depend on
what else is in the batch, up to the arithmetic of the kernels. Several engines can live in one process.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.engines.generate import (
    BaseEngine,
    Generation,
    Request,
    Tokens,
    entries,
    pieces,
    prompts_of,
    request_seed,
    responses_of,
)
from offdrift.engines.grids import instruction_set, loadable, rounded, warn_of_saturation
from offdrift.engines.isolation import preserve_host_state
from offdrift.engines.routing import route_lengths
from offdrift.engines.vllm.stream import VLLMStream
from offdrift.engines.vllm.taps import (
    IMPOSED,
    StateTap,
    SupportTap,
    cache_scales,
    imposed,
    routes_tap,
    runner_of,
    state_tap,
    support_tap,
)
from offdrift.errors import EngineError, NotOfferedError
from offdrift.records.plausible import implausible
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import (
    Evidence,
    EvidenceKind,
    FullVocab,
    HiddenStates,
    Rollouts,
    Routes,
    TopK,
    cumulative,
)

MAX_TEMPERATURE = 2.0
"""vLLM refuses higher ones."""

BYTES_PER_ENTRY = 128
"""Of a log-prob on its way through vLLM's lists: id, value, rank, pointers."""

CALIBRATED_ON = 64
"""Prompts at most that scales of an FP8 cache are measured on."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Taps(NamedTuple):
    """Recorders attached to vLLM: hidden states, and the tokens that the sampler could draw."""

    states: StateTap | None
    support: SupportTap | None


_live: weakref.WeakSet[VLLMEngine] = weakref.WeakSet()


class VLLMEngine(BaseEngine):
    """Rollouts from vLLM, in this process and, unless asked otherwise, without compilation.

    Args:
        path: checkpoint folder.
        dtype: of weights and activations; "auto" leaves the choice to vLLM.
        quantization: vLLM's name, for instance "fp8_per_channel"; or "w8a8", int8 weights per output channel and int8
            activations per token, for which a checkpoint of full weights is rounded at the start and at every
            `load_weights`.
        kv_cache_dtype: "auto" is `dtype`; "fp8" makes the cache a source of mismatch (on CPUs only
            those with AVX-512 or AMX offer it). Its scales are measured anew after every `load_weights`.
        kv_cache_mib: memory of that cache on a CPU, MiB, unless $VLLM_CPU_KVCACHE_SPACE says otherwise.
        max_model_len: longest prompt and response together, tokens; absent: what the model allows.
        max_num_seqs: responses drawn at once.
        enforce_eager: False compiles the model: a slower start, other kernels.
        enable_prefix_caching: keep keys and values of prompts between requests; absent: vLLM's choice.
        max_num_batched_tokens: tokens of one step; longer prompts are prefilled in chunks. Absent:
            vLLM's choice, and no chunks on CPUs, where vLLM cannot draw from seeds beside them
            (`rescore`, which draws nothing, can).
        async_scheduling: prepare a step while the one before runs, which streams cannot have; absent: vLLM's choice
            (on CPUs, never).
        head_dtype: of the output head's arithmetic, for instance "float32"; absent: `dtype`.
        attention_backend: vLLM's name, for instance "FLASH_ATTN"; on CPUs there is one alone.
        evidence_limit_mib: memory that recorded evidence may take, MiB; also, about, what vLLM's
            own lists of log-probs may take at any one time.
        record_routes: also record the experts that every token was sent to (`Rollouts.routes`). Prompts are then
            computed every time, since the prefix cache says nothing of their experts.
        version: trainer version of the weights at `path`, optimizer steps.

    Raises: `EngineError` if vLLM is missing, cannot load the model so, or cannot say the
        log-probs of the distribution that it samples; `NotOfferedError`, which is one, if vLLM has
        no kernel for the options on this machine.
    """

    cached_tokens: int = 0
    """Prompt tokens, so far, whose keys and values were taken from the prefix cache."""
    _llm: Any = None
    _loads = 0  # of weights, so far
    _head: Head | None = None  # one for all batches of a version

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "bfloat16",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_mib: int = 1024,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        enforce_eager: bool = True,
        enable_prefix_caching: bool | None = None,
        max_num_batched_tokens: int | None = None,
        async_scheduling: bool | None = None,
        head_dtype: str | None = None,
        attention_backend: str | None = None,
        evidence_limit_mib: int = 1024,
        record_routes: bool = False,
        name: str = "vllm",
        version: int = 0,
    ) -> None:
        self.name, self.version, self.path = name, version, str(path)
        self.evidence_limit_mib, self.record_routes = evidence_limit_mib, record_routes
        self.quantization = quantization_label(quantization, kv_cache_dtype)
        self._linear: frozenset[str] = frozenset()  # matrices that are rounded here, before vLLM takes them
        self._recalibrates = kv_cache_dtype.startswith("fp8")
        self._calibrated = False
        self.compiled = not enforce_eager
        # vLLM starts a process group of one where there is none; the last engine in it ends it.
        started = torch.distributed.is_initialized()
        self._owns_world = not started or any(e._owns_world for e in _live)
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        try:
            with preserve_host_state():
                import vllm
        except ImportError as error:
            raise EngineError(
                f"vLLM cannot be imported ({error}); pip install vllm (from a checkout: `make install-vllm`), "
                'or use the "transformers" engine'
            ) from error
        self.engine_version = vllm.__version__
        self._params = vllm.SamplingParams
        self.chunk = max_num_batched_tokens if is_cpu() else None
        if self.quantization is not None and is_cpu():
            self.instructions = instruction_set()
        if quantization == "w8a8":
            from offdrift.engines.hf import linear_layers

            self._linear = linear_layers(self.path)
            warn_of_saturation(self.instructions)
        with (
            preserve_host_state(compiling=self.compiled),
            onednn_int8(quantized=bool(self._linear)),
            loadable(self.path, self._linear) as folder,
        ):
            self._llm = build(
                vllm,
                *_modules(),
                folder,
                dtype=dtype,
                quantization=None if self._linear else quantization,
                kv_cache_dtype=kv_cache_dtype,
                kv_cache_memory_bytes=kv_cache_mib * 2**20 if is_cpu() else None,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                enforce_eager=enforce_eager,
                enable_prefix_caching=enable_prefix_caching,
                max_num_batched_tokens=max_num_batched_tokens,
                async_scheduling=async_scheduling,
                hf_overrides=head_dtype and {"head_dtype": head_dtype},
                attention_config=attention_backend and {"backend": attention_backend},
                # A seeded request whose prompt is incomplete ends the engine on CPUs.
                enable_chunked_prefill=False if is_cpu() and self.chunk is None else None,
            )
        config = self._llm.llm_engine.vllm_config.model_config
        self.dtype = str(config.dtype).removeprefix("torch.")
        self.vocab_size = config.get_vocab_size()
        self.max_model_len = config.max_model_len
        self._state_bytes = config.get_hidden_size() * config.dtype.itemsize
        _live.add(self)

    @property
    def llm(self) -> Any:
        """The `vllm.LLM` behind it. Raises `EngineError` once the engine is closed."""
        if self._llm is None:
            raise EngineError(f"engine {self.name!r} is closed; construct another one")
        return self._llm

    def routes(self, rollouts: Rollouts) -> Routes:
        """Experts that every token was sent to on its way; see `engines.routing`.

        Raises: `EngineError` for a dense model, or a vLLM that does not show its routing.
        """
        self.need_idle("routes")
        forced = responses_of(rollouts)
        sampling = Sampling(max_tokens=max(map(len, forced)))
        prompts = prompts_of(rollouts)
        request = Request(prompts, sampling, "sampled", forced=forced)
        self.check(request)
        lengths = route_lengths(rollouts)
        with preserve_host_state(compiling=self.compiled), imposed(self.llm), routes_tap(self.llm) as tap:
            answers = self.llm.generate(self.inputs(prompts), self.params_of(request, uncached=True), use_tqdm=False)
        return Routes(tap.routes([a.request_id for a in answers], lengths), cumulative(lengths))

    def drop_prefixes(self) -> None:
        """Forget the cached keys and values of all prompts.

        Raises: `EngineError` while responses are in progress, whose prompts vLLM would keep in silence.
        """
        self.need_idle("drop_prefixes")
        self.llm.reset_prefix_cache()

    def open_stream(self, sampling: Sampling, *, evidence: EvidenceKind = "sampled") -> VLLMStream:
        """Responses in progress on this engine; see `engines.stream`."""
        return VLLMStream(self, sampling, evidence)

    def take_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take the trainer's `named_parameters`, all of them; see `Engine`.

        vLLM's own reload leaves a tied output head and mixture-of-experts layers wrong on CPUs;
        they are repacked here. Cached prefixes of the old weights are dropped, or, while responses are in
        progress and vLLM refuses that, left to requests of another salt (`inputs`).

        Raises: `EngineError` if no weight was given.
        """
        named = ((name, weight.detach()) for name, weight in weights)
        first = next(named, None)
        if first is None:
            raise EngineError(
                f"no weights were given to engine {self.name!r}; an iterator that was already "
                "used up? pass model.named_parameters() afresh"
            )
        weights = itertools.chain([first], named)
        with preserve_host_state():
            if self._linear:
                weights = rounded(weights, self._linear)
            quantized = bool(self._linear)
            with onednn_int8(quantized=quantized), reloadable(getattr(torch, self.dtype), quantized=quantized):
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            repacked(self.llm)
            self.llm.reset_prefix_cache()
        self._loads += 1
        self._calibrated = False
        self._head = None  # batches that were drawn keep the old one
        self.version = version

    def close(self) -> None:
        """Shut vLLM down and free its weights and cache. Idempotent."""
        if self._llm is None:
            return
        if self.stream is not None:
            self.stream.close()
        llm, self._llm = self._llm, None
        _live.discard(self)
        shut_down(llm, _modules()[1], keep=bool(_live) or not self._owns_world)
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Left to itself, vLLM's own finalizer would also end the process groups of others. (When the
        # process ends, modules may already be gone: hence the argument.)
        if not is_finalizing() and getattr(self, "_llm", None) is not None:
            self.close()

    def _draws(self, request: Request) -> list[Generation]:
        self.need_idle("generate" if request.forced is None else "rescore")
        count, width = sum(map(len, request.prompts)), entries(request.evidence, self.vocab_size)
        if request.forced is None and self.chunk is not None and count + len(request.prompts) > self.chunk:
            raise EngineError(
                f"prompts of {count} tokens exceed max_num_batched_tokens = {self.chunk}, and vLLM "
                "cannot draw from seeds beside a prompt in chunks on CPUs; leave "
                "max_num_batched_tokens out, or draw fewer at once"
            )
        if self._recalibrates and not self._calibrated:
            self.calibrate(request.prompts[:CALIBRATED_ON])
        per_request = request.sampling.max_tokens * width * BYTES_PER_ENTRY
        at_once = max(1, self.evidence_limit_mib * 2**20 // per_request)
        params = self.params_of(request, uncached=self.record_routes)
        forcing = nullcontext() if request.forced is None else imposed(self.llm)
        with forcing, preserve_host_state(compiling=self.compiled):
            return [self._draw(request.part(p), params[p]) for p in pieces(len(request.prompts), at_once)]

    def calibrate(self, prompts: Tokens) -> None:
        """Give the FP8 cache scales that suit the keys and values of these prompts under the present weights.

        Called by the first `generate` or `rescore` after new weights; in a stream the scales stay as they are.
        """
        probe = Request(prompts, Sampling(max_tokens=1), "sampled")
        with preserve_host_state(compiling=self.compiled), cache_scales(self.llm):
            self.llm.generate(self.inputs(prompts), self.params_of(probe, uncached=True), use_tqdm=False)
        self.llm.reset_prefix_cache()
        self._calibrated = True

    def inputs(self, prompts: Tokens) -> list[dict[str, Any]]:
        """Prompts as vLLM takes them, salted so that none reads keys and values of other weights than the present."""
        return [{"prompt_token_ids": list(p), "cache_salt": f"weights-{self._loads}"} for p in prompts]

    def params_of(self, request: Request, *, uncached: bool = False) -> list[Any]:
        """`vllm.SamplingParams` of requests that draw, or that follow forced responses.

        Args:
            uncached: compute all of the prompt; what comes from the prefix cache is not routed again.
        """
        params = sampling_params(self._params, request)
        for each in params if uncached else ():
            each.skip_reading_prefix_cache = True
        for each, response in zip(params, request.forced or ()):
            each.max_tokens, each.stop_token_ids, each.seed = len(response), [], None
            each.extra_args = {IMPOSED: response}
        return params

    def _draw(self, request: Request, params: list[Any]) -> Generation:
        routing = routes_tap(self.llm) if self.record_routes else nullcontext()
        with self.taps(request.evidence, request.sampling) as taps, routing as routed:
            answers = self.llm.generate(self.inputs(request.prompts), params, use_tqdm=False)
        self.cached_tokens += sum(a.num_cached_tokens or 0 for a in answers)
        names, outputs = [a.request_id for a in answers], [a.outputs[0] for a in answers]
        draws = self.draws_of(names, outputs, request.evidence, taps, request.sampling)
        if routed is None:
            return draws
        lengths = torch.tensor(list(map(len, request.prompts))) + draws.lengths - 1
        return replace(draws, experts=routed.routes(names, lengths))

    @contextmanager
    def taps(self, evidence: EvidenceKind, sampling: Sampling) -> Iterator[Taps]:
        """Meanwhile note hidden states, if they are the evidence, and what filters leave over, if there are any."""
        states = state_tap(self.llm, self._head) if evidence == "hidden" else nullcontext()
        support = support_tap(self.llm) if sampling.filtered else nullcontext()
        with states as of_states, support as of_support:
            yield Taps(of_states, of_support)

    def draws_of(
        self,
        requests: Sequence[str],
        outputs: Sequence[Any],
        kind: EvidenceKind,
        taps: Taps,
        sampling: Sampling,
    ) -> Generation:
        """Convert vLLM's outputs for these requests, together with what the taps recorded."""
        draws = read(outputs, kind, self.vocab_size)
        lengths = draws.lengths.tolist()
        if taps.support is not None:
            draws = replace(draws, support=taps.support.support(requests, lengths))
        if taps.states is None:
            return draws
        self._head = self._head or taps.states.head
        assert self._head is not None
        states = taps.states.states(requests, lengths)
        return self.checked(replace(draws, evidence=HiddenStates(states, self._head)), sampling)

    @property
    def _source(self) -> tuple[str, str]:
        return self.engine_version, self.path

    def check(self, request: Request) -> None:
        """Refuse also what vLLM would cut or not draw; see `check_request`."""
        super().check(request)
        longest, sampling = max(map(len, request.prompts)), request.sampling
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


def sampling_params(kind: Callable[..., Any], request: Request) -> list[Any]:
    """One `vllm.SamplingParams` (`kind`) for each prompt."""
    sampling = request.sampling
    return [
        kind(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            seed=request_seed(request.seed, index),
            logprobs=-1 if request.evidence == "full" else entries(request.evidence, 0) - 1,
            flat_logprobs=True,
            detokenize=False,
        )
        for index in range(len(request.prompts))
    ]


def read(outputs: Sequence[Any], evidence: EvidenceKind, vocab_size: int) -> Generation:
    """vLLM's flat lists as tensors: per token the sampled entry, then the likeliest in order."""
    lengths = torch.tensor([len(o.token_ids) for o in outputs])
    tokens = torch.tensor([t for o in outputs for t in o.token_ids])
    width = entries(evidence, vocab_size)
    logp = torch.cat([torch.tensor(o.logprobs.logprobs, dtype=torch.float32) for o in outputs]).view(-1, width)
    ids = torch.cat([torch.tensor(o.logprobs.token_ids, dtype=torch.int32) for o in outputs]).view(-1, width)
    if not torch.equal(ids[:, 0].long(), tokens):
        raise EngineError(
            "vLLM's log-probs do not start with those of the sampled tokens; this vLLM version is not supported"
        )
    likeliest: Evidence | None = None
    if evidence == "full":
        rows = torch.full((len(tokens), vocab_size), float("nan"))  # a token that is not listed shows
        likeliest = FullVocab(rows.scatter_(1, ids[:, 1:].long(), logp[:, 1:]))
    elif isinstance(evidence, int):
        likeliest = TopK(ids[:, 1:].clone(), logp[:, 1:].clone())
    if (found := implausible(likeliest, tokens, logp[:, 0])) is not None:
        i = int(torch.searchsorted(lengths.cumsum(0), found[0], right=True))
        raise EngineError(
            f"prompt {i}, response token {found[0] - int(lengths[:i].sum())}: {found[1]}; vLLM's log-probs are not "
            'those of one distribution. Leave out plugins that change them, or record evidence = "sampled"'
        )
    return Generation(tokens, lengths, logp[:, 0].clone(), likeliest)


def build(vllm: Any, parallel_state: ModuleType, core: ModuleType, path: str, **options: Any) -> Any:
    """A `vllm.LLM` that reports processed log-probs, or an error that says why there is none.

    Args:
        parallel_state, core: `vllm.distributed.parallel_state` and `vllm.v1.engine.core`.
        options: of `vllm.LLM`; None leaves the choice to it.

    Raises: `EngineError` if the model cannot be loaded so, or other log-probs are reported;
        `NotOfferedError`, which is one, if vLLM has no kernel for it on this machine.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    try:
        with own_groups(parallel_state):
            llm = vllm.LLM(
                path,
                skip_tokenizer_init=True,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                max_logprobs=-1,
                seed=0,
                use_tqdm_on_load=False,
                **chosen,
            )
    except Exception as error:
        why = reason(error).rstrip(".")
        if isinstance(error, NotImplementedError):
            raise NotOfferedError(
                f"not offered on this machine: {why} (vLLM {vllm.__version__} with {chosen}); "
                "try another dtype or quantization"
            ) from error
        raise EngineError(
            f"vLLM {vllm.__version__} cannot load {path} with {chosen}: {why}; try another dtype or quantization"
        ) from error
    mode = llm.llm_engine.vllm_config.model_config.logprobs_mode
    if mode != "processed_logprobs":
        shut_down(llm, core, keep=True)
        raise EngineError(
            f"vLLM reports {mode}, not the log-probs of the distribution that it samples; "
            "install the pinned version with `make install-vllm`"
        )
    return llm


def reason(error: Exception) -> str:
    """Return an error's message in one line: of a validation error the sentence alone, without input and address.

    Example:
        >>> reason(ValueError("1 validation error\\n  Value error, No float32. [type=value_error]\\n see"))
        'No float32.'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    messages = [line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")]
    return messages[0].partition(" [type=")[0] if messages else " ".join(lines)


def shut_down(llm: Any, core: ModuleType, *, keep: bool) -> None:
    """End an engine; `keep` the process groups that others still use. `core` is `vllm.v1.engine.core`."""
    name = "cleanup_dist_env_and_memory"
    clean_up = getattr(core, name)
    if keep:
        setattr(core, name, lambda *_, **__: None)
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        setattr(core, name, clean_up)


def quantization_label(quantization: str | None, kv_cache_dtype: str) -> str | None:
    """Label of weight and cache quantization for the record, such as "fp8_per_channel+kv_fp8"."""
    parts = [quantization, None if kv_cache_dtype == "auto" else f"kv_{kv_cache_dtype}"]
    return "+".join(p for p in parts if p) or None


@contextmanager
def reloadable(dtype: torch.dtype, *, quantized: bool) -> Iterator[None]:
    """Meanwhile, vLLM's reload of W8A8 weights is right on CPUs.

    Its kernel keeps a pointer to scales which the reload frees, and is made for torch's default type, which is the
    model's while a model is loaded and float32 while weights are reloaded.
    """
    if not quantized:
        yield
        return
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

    Kernel: Any = CPUInt8ScaledMMLinearKernel
    inner, default = Kernel.process_weights_for_onednn, torch.get_default_dtype()

    def keeping_scales(kernel: Any, layer: Any) -> None:
        inner(kernel, layer)
        kernel.offdrift_scales = getattr(layer, kernel.layer_param_names[1])

    Kernel.process_weights_for_onednn = keeping_scales
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        Kernel.process_weights_for_onednn = inner


@contextmanager
def onednn_int8(*, quantized: bool) -> Iterator[None]:
    """Meanwhile, vLLM gives W8A8 weights to oneDNN on every processor.

    Where there is AMX it takes a kernel that refuses activations in float32, which is noticed at the first request.
    """
    if not quantized:
        yield
        return
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    kernels: Any = cpu  # the name is imported there, not exported
    inner = kernels.check_cpu_sgl_kernel
    kernels.check_cpu_sgl_kernel = lambda n, k, dtype: False
    try:
        yield
    finally:
        kernels.check_cpu_sgl_kernel = inner


@contextmanager
def own_groups(parallel_state: ModuleType) -> Iterator[None]:
    """Let a new engine make its own groups; if it fails, earlier engines find theirs again.

    Those of an earlier engine lack what a mixture-of-experts model needs.
    """
    kinds = parallel_state.GroupCoordinator
    groups = {
        name: group for name, group in vars(parallel_state).items() if isinstance(group, kinds) and name != "_WORLD"
    }
    for name in groups:
        setattr(parallel_state, name, None)
    try:
        yield
    except BaseException:
        for name, group in groups.items():
            setattr(parallel_state, name, group)
        raise


def repacked(llm: Any) -> None:
    """`repack` of the model inside an in-process `vllm.LLM`."""
    repack(runner_of(llm))


def repack(runner: Any) -> None:
    """Redo what vLLM's CPU kernels derive from weights and its reload does not (`runner`: a worker's `model_runner`).

    A tied output head multiplies with a packed copy, and expert kernels expect packed weights;
    the reload writes the one into the original only and the other unpacked.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    with torch.no_grad(), set_current_vllm_config(runner.vllm_config):
        for module in runner.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            weight = getattr(module, "w13_weight", None)
            # Integers were packed by the reload, which rounds them anew.
            if kernel is not None and isinstance(weight, Tensor) and weight.is_floating_point():
                kernel.fused_experts.process_weights_after_loading(module)


def _modules() -> tuple[Any, Any]:
    """Import vLLM's modules for process groups and for the engine core."""
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    return parallel_state, core


def is_cpu() -> bool:
    """Whether vLLM computes on CPUs here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def request_processor() -> type:
    """The class of vLLM that plugins for the logits of single requests derive from."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    return AdapterLogitsProcessor
