"""What a server records of a draw besides its log-probs: the sampling mask, and the experts of every token.

vLLM says both in the answer to the request that draws: the mask under `--return-sampling-mask`, in
`/inference/v1/generate`, and experts under `--enable-return-routed-experts`. They are those of the decoding itself;
experts that are asked for afterwards (`OpenAIEngine.routes`) are those of a prefill.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from offdrift.errors import EngineError
from offdrift.records.rollouts import Support
from offdrift.segments import cumulative


def read_mask(listed: Any, tokens: Sequence[int], vocab_size: int) -> Support | None:
    """The sampling mask from `sampling_mask`, a list of token ids per response token; None if the server says none.

    Raises: `EngineError` if it is about other tokens, leaves a drawn one out, or names one beyond the vocabulary.
    """
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) != len(tokens):
        raise EngineError(f"sampling_mask has {_count(listed)} entries for {len(tokens)} response tokens")
    rows = []
    for i, (row, token) in enumerate(zip(listed, tokens, strict=True)):
        if not isinstance(row, list) or not all(type(t) is int and 0 <= t < vocab_size for t in row):
            raise EngineError(f"sampling_mask[{i}] is not a list of tokens of the vocabulary ({vocab_size})")
        if token not in row or len(set(row)) < len(row):
            raise EngineError(f"sampling_mask[{i}] leaves out the token that was drawn, {token}, or names one twice")
        rows.append(torch.tensor(sorted(row), dtype=torch.int32))
    return Support(torch.cat(rows), cumulative(torch.tensor([len(row) for row in rows])))


def _count(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "no list of"


def read_experts(encoded: Any, positions: int) -> Integer[Tensor, "p layers k"]:
    """Experts of so many positions from vLLM's `routed_experts`, a numpy array in base64; int64.

    Raises: `EngineError` if there are none, or none that can be read.
    """
    if not isinstance(encoded, str):
        raise EngineError(
            "the server does not say its routing; start vLLM with --enable-return-routed-experts (a "
            "dense model has none)"
        )
    try:
        content = base64.b64decode(encoded, validate=True)
        # Not `np.load`, which also opens archives, and reads a header that claims petabytes.
        stream = io.BytesIO(content)
        major, _ = np.lib.format.read_magic(stream)
        header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[major]
        shape, _, kind = header(stream)
        if math.prod(shape) * kind.itemsize > len(content):
            raise ValueError(f"it claims shape {shape} in {len(content)} bytes")
        routes = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise EngineError(f"routed_experts cannot be read: {str(error)[:200]}") from error
    if routes.ndim != 3 or len(routes) != positions or 0 in routes.shape or routes.dtype.kind not in "iu":
        raise EngineError(
            f"routed_experts has shape {routes.shape} and dtype {routes.dtype}; {positions} positions "
            "of whole numbers by layer and choice were expected"
        )
    return torch.from_numpy(routes.astype(np.int64))
