"""Causes of drift between two engines, each with the experiment that isolates it."""

from __future__ import annotations

from offdrift.check.factors import rollout, routing, sampling, sync, train
from offdrift.check.factors.base import Factor as Factor
from offdrift.check.factors.base import Row as Row

FACTORS: tuple[Factor, ...] = (
    # With the rollout engine as it is ...
    rollout.REPEATS,
    rollout.BATCH,
    rollout.PREFIX_CACHE,
    sampling.TEMPERATURE,
    sampling.TOP_P,
    sampling.RAW,
    sampling.OFF_BY_ONE,
    sampling.TOKENIZATION,
    train.PAD,
    routing.ROUTING,
    sync.SYNC,
    # ... with the training engine alone ...
    train.DTYPE,
    train.HEAD,
    train.ATTENTION,
    train.BATCH,
    train.CHECKPOINTING,
    # ... with another rollout engine for each: seconds, or a minute where it compiles.
    rollout.CHUNKED,
    rollout.DTYPE,
    rollout.HEAD,
    rollout.KV_CACHE,
    rollout.ATTENTION,
    rollout.COMPILED,
)
"""Every factor, in an order that starts each engine once."""
