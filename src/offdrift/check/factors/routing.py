"""Routing of mixture-of-experts models: how often engines disagree, and what that costs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offdrift.check.bench import Bench
from offdrift.check.factors.base import Factor, Found, NotOffered, Setting
from offdrift.check.factors.compare import ENTRIES, few, joined
from offdrift.check.measure import measured
from offdrift.check.rescore import Scored
from offdrift.engines.routing import (
    Routed,
    flip_rate,
    flips,
    num_experts,
    replayed,
    route_lengths,
    routers,
    routes_of,
)
from offdrift.engines.score import divergences, score
from offdrift.engines.spec import EngineSpec
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments


def _offered(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> str | None:
    return None if routers(bench.model) else "needs a mixture of experts"


def _routing(setting: Setting) -> Found:
    bench = setting.bench
    drawn = few(setting.drawn, entries=2 * ENTRIES, v=bench.vocab_size)
    engine = setting.engine
    if not isinstance(engine, Routed):
        raise NotOffered(f"the {setting.rollout.kind} engine does not say its routing")
    theirs = engine.routes(drawn)
    model = bench.train_model(setting.train)
    ours = routes_of(model, drawn)
    flipped = flips(theirs, ours).double()
    rates = flip_rate(theirs, ours, experts=num_experts(model))
    own, same = scored_with(model, drawn, None), scored_with(model, drawn, theirs)
    assert own.kl is not None
    assert same.kl is not None
    without, replay = measured(drawn, own), measured(drawn, same)
    gate = predicting(drawn, flipped.amax(1) > 0)
    return Found(
        "the trainer sends every token to the rollout engine's experts instead of its own",
        replay,
        without.kl_mean,
        why=f"{float(flipped.amax(1).mean()):.2%} of tokens change experts in some layer",
        detail={
            "delta_router": float(rates.double().mean()),
            "experts": num_experts(model),
            "flip_frac_per_layer": [float(x) for x in flipped.mean(0)],
            "flip_frac": float(flipped.mean()),
            "flipped_tokens_frac": float(flipped.amax(1).mean()),
            "positions": len(flipped),
            "kl_mean_without_replay": without.kl_mean,
            "kl_max_without_replay": without.kl_max,
            "kl_mean_with_replay": replay.kl_mean,
            "kl_max_with_replay": replay.kl_max,
            "kl_mean_at_flips": float(own.kl[gate].mean()) if bool(gate.any()) else None,
            "kl_mean_elsewhere": float(own.kl[~gate].mean()) if bool((~gate).any()) else None,
        },
    )


def predicting(rollouts: Rollouts, at: Tensor) -> Tensor:
    """Of every response token, what holds at the position that predicts it."""
    cuts = Segments(
        torch.cat([torch.zeros(1, dtype=torch.int64), route_lengths(rollouts).cumsum(0)])
    )
    first = rollouts.prompt_cu_seqlens.diff() - 1
    segments = Segments(rollouts.cu_seqlens)
    return at[cuts.cu_seqlens[:-1][segments.seq_ids] + first[segments.seq_ids] + segments.position]


@torch.no_grad()
def scored_with(model: nn.Module, rollouts: Rollouts, routes: Tensor | None) -> Scored:
    """Scores of a model, sequence by sequence, with these experts or its own."""
    cuts = Segments(
        torch.cat([torch.zeros(1, dtype=torch.int64), route_lengths(rollouts).cumsum(0)])
    )
    parts = []
    for i in range(rollouts.num_sequences):
        one = torch.tensor([i])
        part = rollouts.select(one)
        temperature = part.provenance.sampling.temperature
        if routes is None:
            said = score(model, part, temperature=temperature)
        else:
            with replayed(model, part, routes[cuts.rows(one)]):
                said = score(model, part, temperature=temperature)
        found = divergences(part, said.logits)
        kl, tv = found["kl_rollout_current"].lo, found["tv_rollout_current"].lo
        parts.append(Scored(said.logp.cpu(), said.entropy.cpu(), kl=kl.cpu(), tv=tv.cpu()))
    return joined(parts)


ROUTING = Factor(
    "routing",
    "A router picks experts by rank: a last-bit difference sends a token somewhere else.",
    "routing",
    _offered,
    _routing,
)
