"""A rollout engine on vLLM, in this process. The only file that imports vllm.

Log-probs come through vLLM's public interface, as processed log-probs: those of the distribution
after temperature, top-k and top-p. What vLLM does to its host is undone (random state, a replaced
`torch.set_num_threads`), and what it forgets in a weight synchronisation on CPUs is repaired
(`load_weights`); `offdrift.engines.sync` checks that nothing else was forgotten.

Every request has its own random stream, so which token is drawn does not depend on what else is in
the batch, up to the arithmetic of the kernels, which may.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.engines.draws import Draws, check_request, rollouts_from
from offdrift.engines.heads import check_states
from offdrift.engines.host import host_kept
from offdrift.engines.vllm_states import state_tap
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

MAX_TEMPERATURE = 2.0
"""vLLM refuses higher ones."""

_BYTES_PER_ENTRY = 128  # of a log-prob on its way through vLLM's lists: id, value, rank, pointers

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


_live: weakref.WeakSet[VLLMEngine] = weakref.WeakSet()


class VLLMEngine:
    """Rollouts from vLLM, in this process and without compilation.

    Args:
        path: checkpoint folder.
        dtype: of weights and activations; "auto" leaves the choice to vLLM.
        quantization: vLLM's name, for instance "fp8_per_channel".
        kv_cache_dtype: "auto" is `dtype`; "fp8" makes the cache a source of mismatch.
        max_model_len: longest prompt and response together, tokens; absent: what the model allows.
        max_num_seqs: responses drawn at once.
        evidence_limit_mib: memory that recorded evidence may take, MiB; also, about, what vLLM's
            own lists of log-probs may take at any one time.
        version: trainer version of the weights at `path`, optimizer steps.

    Raises: `EngineError` if vLLM is missing, cannot load the model so, or cannot say the
        log-probs of the distribution that it samples.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "bfloat16",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        evidence_limit_mib: int = 1024,
        name: str = "vllm",
        version: int = 0,
    ) -> None:
        self.name, self.version, self.path = name, version, str(path)
        self.evidence_limit_mib = evidence_limit_mib
        self.quantization = _quantization_label(quantization, kv_cache_dtype)
        # vLLM starts a process group of one where there is none; the last engine in it ends it.
        started = torch.distributed.is_initialized()
        self._owns_world = not started or any(e._owns_world for e in _live)
        vllm = _import_vllm()
        self.engine_version: str = vllm.__version__
        with host_kept():
            self._llm: Any = _build(
                vllm,
                self.path,
                dtype=dtype,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
            )
        config = self._llm.llm_engine.vllm_config.model_config
        self.dtype = str(config.dtype).removeprefix("torch.")
        self.vocab_size: int = config.get_vocab_size()
        self.max_model_len: int = config.max_model_len
        self._state_bytes: int = config.get_hidden_size() * config.dtype.itemsize
        self._head: Head | None = None
        _live.add(self)

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
        check_request(
            prompts,
            sampling,
            evidence,
            vocab_size=self.vocab_size,
            state_bytes=self._state_bytes,
            limit_mib=self.evidence_limit_mib,
        )
        self._check_fits(prompts, sampling)
        size = self._requests_at_once(sampling, evidence)
        with host_kept():
            draws = [
                self._draw(prompts[i : i + size], sampling, evidence, seed=seed, first=i)
                for i in range(0, len(prompts), size)
            ]
        provenance = Provenance(
            engine=self.name,
            engine_version=self.engine_version,
            model=self.path,
            dtype=self.dtype,
            quantization=self.quantization,
            sampling=sampling,
        )
        return rollouts_from(draws, prompts, version=self.version, provenance=provenance)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take the trainer's `named_parameters`, all of them; see `Engine`.

        vLLM's own reload leaves a tied output head and mixture-of-experts layers wrong on CPUs;
        they are repacked here, and cached prefixes of the old weights are dropped.

        Raises: `EngineError` if no weight was given.
        """
        count = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal count
            for name, weight in weights:
                count += 1
                yield name, weight.detach()

        with host_kept():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": counted()})
            if not count:
                raise EngineError(
                    f"no weights were given to engine {self.name!r}; an iterator that was already "
                    "used up? pass model.named_parameters() afresh"
                )
            _repack(self.llm)
            self.llm.reset_prefix_cache()
        self._head = None  # batches that were drawn keep the old one
        self.version = version

    def close(self) -> None:
        """Shut vLLM down and free its weights and cache. Idempotent."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        _live.discard(self)
        with _world_kept(keep=bool(_live) or not self._owns_world):
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Left to itself, vLLM's own finalizer would also end the process groups of others. (When the
        # process ends, modules may already be gone: hence the argument.)
        if not is_finalizing() and getattr(self, "_llm", None) is not None:
            self.close()

    def _draw(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        evidence: EvidenceKind,
        *,
        seed: int,
        first: int,
    ) -> Draws:
        params = _sampling_params(sampling, evidence, seed, range(first, first + len(prompts)))
        requests = [{"prompt_token_ids": list(p)} for p in prompts]
        if evidence == "hidden":
            return self._draw_with_states(requests, params, sampling)
        outputs = [r.outputs[0] for r in self.llm.generate(requests, params, use_tqdm=False)]
        return _read(outputs, evidence, self.vocab_size)

    def _draw_with_states(
        self, requests: list[dict[str, Any]], params: list[Any], sampling: Sampling
    ) -> Draws:
        with state_tap(self.llm) as tap:
            answers = self.llm.generate(requests, params, use_tqdm=False)
        draws = _read([a.outputs[0] for a in answers], "hidden", self.vocab_size)
        # One head for all batches of a version.
        self._head = self._head or tap.head
        assert self._head is not None
        states = tap.states([a.request_id for a in answers], draws.lengths.tolist())
        found = HiddenStates(states, self._head)
        check_states(
            found, draws.tokens, draws.logp, temperature=sampling.temperature, engine=self.name
        )
        return replace(draws, evidence=found)

    def _check_fits(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
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
        per_request = sampling.max_tokens * _width(evidence, self.vocab_size) * _BYTES_PER_ENTRY
        return max(1, self.evidence_limit_mib * 2**20 // per_request)


def request_seed(seed: int, index: int) -> int:
    """A 63-bit seed of one request; pairs that differ give unrelated streams."""
    mixed = np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint64)[0]
    return int(mixed >> np.uint64(1))


def _sampling_params(
    sampling: Sampling, evidence: EvidenceKind, seed: int, indices: Iterable[int]
) -> list[Any]:
    from vllm import SamplingParams

    likeliest = -1 if evidence == "full" else _width(evidence, 0) - 1
    return [
        SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            seed=request_seed(seed, index),
            logprobs=likeliest,
            flat_logprobs=True,
            detokenize=False,
        )
        for index in indices
    ]


def _read(outputs: list[Any], evidence: EvidenceKind, vocab_size: int) -> Draws:
    """vLLM's flat lists as tensors: per token the sampled entry, then the likeliest in order."""
    lengths = torch.tensor([len(o.token_ids) for o in outputs])
    tokens = torch.tensor([t for o in outputs for t in o.token_ids])
    width = _width(evidence, vocab_size)
    logp = _concatenated([o.logprobs.logprobs for o in outputs], torch.float32).view(-1, width)
    ids = _concatenated([o.logprobs.token_ids for o in outputs], torch.int32).view(-1, width)
    if not torch.equal(ids[:, 0].long(), tokens):
        raise EngineError(
            "vLLM's log-probs do not start with those of the sampled tokens; "
            "this vLLM version is not supported"
        )
    found: Evidence | None = None
    if evidence == "full":
        rows = torch.empty(len(tokens), vocab_size)
        found = FullVocab(rows.scatter_(1, ids[:, 1:].long(), logp[:, 1:]))
    elif isinstance(evidence, int):
        found = TopK(ids[:, 1:].clone(), logp[:, 1:].clone())
    return Draws(tokens, lengths, logp[:, 0].clone(), found)


def _width(evidence: EvidenceKind, vocab_size: int) -> int:
    """Entries per token: the sampled one, then the likeliest that were asked for."""
    if isinstance(evidence, int):
        return 1 + evidence
    return 1 + vocab_size if evidence == "full" else 1


def _concatenated(lists: list[list[Any]], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.tensor(values, dtype=dtype) for values in lists])


def _repack(llm: Any) -> None:
    """Redo what vLLM's CPU kernels derive from weights and its reload does not.

    A tied output head multiplies with a packed copy, and expert kernels expect packed weights;
    the reload writes the one into the original only and the other unpacked.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    worker = llm.llm_engine.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    with torch.no_grad(), set_current_vllm_config(runner.vllm_config):
        for module in runner.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(module, "w13_weight"):
                kernel.fused_experts.process_weights_after_loading(module)


def _import_vllm() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with host_kept():
            import vllm
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported ({error}); install it with `make install-vllm`, "
            'or use the "transformers" engine'
        ) from error
    return vllm


def _build(vllm: Any, path: str, **options: Any) -> Any:
    """A `vllm.LLM` that reports processed log-probs, or an error that says why there is none."""
    try:
        with _own_groups():
            llm = vllm.LLM(
                path,
                enforce_eager=True,
                skip_tokenizer_init=True,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                max_logprobs=-1,
                seed=0,
                use_tqdm_on_load=False,
                **options,
            )
    except Exception as error:
        raise EngineError(
            f"vLLM {vllm.__version__} cannot load {path} with {options}: {error}; "
            "try another dtype or quantization"
        ) from error
    mode = llm.llm_engine.vllm_config.model_config.logprobs_mode
    if mode != "processed_logprobs":
        with _world_kept(keep=True):
            llm.llm_engine.engine_core.shutdown()
        raise EngineError(
            f"vLLM reports {mode}, not the log-probs of the distribution that it samples; "
            "install the pinned version with `make install-vllm`"
        )
    return llm


def _quantization_label(quantization: str | None, kv_cache_dtype: str) -> str | None:
    parts = [quantization, None if kv_cache_dtype == "auto" else f"kv_{kv_cache_dtype}"]
    return "+".join(p for p in parts if p) or None


@contextmanager
def _own_groups() -> Iterator[None]:
    """Let a new engine make its own groups; if it fails, earlier engines find theirs again.

    Those of an earlier engine lack what a mixture-of-experts model needs.
    """
    from vllm.distributed import parallel_state

    kinds = parallel_state.GroupCoordinator
    groups = {
        name: group
        for name, group in vars(parallel_state).items()
        if isinstance(group, kinds) and name != "_WORLD"
    }
    for name in groups:
        setattr(parallel_state, name, None)
    try:
        yield
    except BaseException:
        for name, group in groups.items():
            setattr(parallel_state, name, group)
        raise


@contextmanager
def _world_kept(*, keep: bool) -> Iterator[None]:
    """Shut an engine down without ending the process groups that others still use."""
    from vllm.v1.engine import core

    name = "cleanup_dist_env_and_memory"
    clean_up = getattr(core, name)
    if keep:
        setattr(core, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(core, name, clean_up)
