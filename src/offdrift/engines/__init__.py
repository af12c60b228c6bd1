"""Rollout engines: sample tokens and record their log-probs.

`make_engine` imports a backend only when it is asked for; nothing here needs transformers or vLLM.
"""

from __future__ import annotations

from typing import Any

from offdrift.engines.base import Engine as Engine
from offdrift.errors import EngineError


def make_engine(kind: str, model_or_path: Any, **options: Any) -> Engine:
    """The rollout engine of this kind on a model or checkpoint.

    Args:
        kind: "transformers" takes a model or a checkpoint folder, "vllm" a checkpoint folder,
            "openai" the address of a running server.
        options: keyword arguments of `TransformersEngine`, `VLLMEngine` or `OpenAIEngine`.

    Raises: `EngineError` for an unknown kind, or one whose backend is not installed.
    """
    if kind == "vllm":
        from offdrift.engines.vllm.engine import VLLMEngine

        if not isinstance(model_or_path, str):
            raise EngineError(
                f"the vllm engine loads a checkpoint folder, got {type(model_or_path).__name__}; "
                "save the model with save_pretrained(folder) and give the folder"
            )
        return VLLMEngine(model_or_path, **options)
    if kind not in ("transformers", "openai"):
        raise EngineError(f'no engine is called {kind!r}; there are "transformers", "vllm" and "openai"')
    try:
        if kind == "transformers":
            from offdrift.engines.hf import TransformersEngine as Chosen
        else:
            from offdrift.engines.server.engine import OpenAIEngine as Chosen
    except ImportError as error:
        raise EngineError(
            f"the {kind} engine cannot be imported ({error}); install it with `pip install offdrift[train]`"
        ) from error
    return Chosen(model_or_path, **options)
