"""Start and end vLLM engines that live in one process, one after another or side by side.

Nothing here imports vLLM; its modules are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from offdrift.errors import EngineError, NotOfferedError


def build(
    vllm: Any, parallel_state: ModuleType, core: ModuleType, path: str, **options: Any
) -> Any:
    """A `vllm.LLM` that reports processed log-probs, or an error that says why there is none.

    Args:
        parallel_state: `vllm.distributed.parallel_state`.
        core: `vllm.v1.engine.core`.
        options: of `vllm.LLM`; None leaves the choice to it.

    Raises: `EngineError` if the model cannot be loaded so, or other log-probs are reported;
        `NotOfferedError`, which is one, if vLLM has no kernel for it on this machine.
    """
    given = {name: value for name, value in options.items() if value is not None}
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
                **given,
            )
    except Exception as error:
        why = str(error).rstrip(".")
        if isinstance(error, NotImplementedError):
            raise NotOfferedError(
                f"not offered on this machine: {why} (vLLM {vllm.__version__} with {given}); "
                "try another dtype or quantization"
            ) from error
        raise EngineError(
            f"vLLM {vllm.__version__} cannot load {path} with {given}: {why}; "
            "try another dtype or quantization"
        ) from error
    mode = llm.llm_engine.vllm_config.model_config.logprobs_mode
    if mode != "processed_logprobs":
        shut_down(llm, core, keep=True)
        raise EngineError(
            f"vLLM reports {mode}, not the log-probs of the distribution that it samples; "
            "install the pinned version with `make install-vllm`"
        )
    return llm


def shut_down(llm: Any, core: ModuleType, *, keep: bool) -> None:
    """End an engine; `keep` the process groups that others still use."""
    with world_kept(core, keep=keep):
        llm.llm_engine.engine_core.shutdown()


def quantization_label(quantization: str | None, kv_cache_dtype: str) -> str | None:
    """What a record says of both.

    Example:
        >>> quantization_label("fp8_per_channel", "fp8"), quantization_label(None, "auto")
        ('fp8_per_channel+kv_fp8', None)
    """
    parts = [quantization, None if kv_cache_dtype == "auto" else f"kv_{kv_cache_dtype}"]
    return "+".join(p for p in parts if p) or None


@contextmanager
def own_groups(parallel_state: ModuleType) -> Iterator[None]:
    """Let a new engine make its own groups; if it fails, earlier engines find theirs again.

    Those of an earlier engine lack what a mixture-of-experts model needs.

    Args:
        parallel_state: `vllm.distributed.parallel_state`.
    """
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
def world_kept(core: ModuleType, *, keep: bool) -> Iterator[None]:
    """Shut an engine down without ending the process groups that others still use.

    Args:
        core: `vllm.v1.engine.core`.
        keep: whether others do.
    """
    name = "cleanup_dist_env_and_memory"
    clean_up = getattr(core, name)
    if keep:
        setattr(core, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(core, name, clean_up)
