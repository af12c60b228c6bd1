"""What the samples in tests/data/logs hold, and reading logs to the end."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from offdrift.records import Provenance, Rollouts, Sampling
from offdrift.records.batch import Logged
from offdrift.records.readers import BadRow, Detected, detect, pieces, read
from offdrift.records.schema import FIELDS

LOGS = Path(__file__).parents[1] / "data" / "logs"

# Three sequences, the first two of one prompt; token 1 of the last came from a tool.
PROMPTS = [[5, 6], [5, 6], [7, 8, 9]]
RESPONSES = [[10, 11, 12], [13], [14, 15, 16, 17]]
MASK = [[1, 1, 1], [1], [1, 0, 1, 1]]
ADVANTAGES = [1.0, -0.5, 0.25]
REWARDS = [1.0, 0.0, 0.5]
TEXTS = ("<x>", "nope", "héllo </script>")
STEP = 7


def rollout_logp(s: int, t: int) -> float:
    """Exact in every float type; the trainer's differ by 1/16 nat per place."""
    return -(s + 1) * 0.5 - t * 0.125


def trainer_logp(s: int, t: int) -> float:
    return rollout_logp(s, t) - 0.0625 * (t + 1)


def places(*, masked: bool = True, without: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """(sequence, place) of every token that should be left, in order."""
    return [
        (s, t)
        for s, response in enumerate(RESPONSES)
        for t in range(len(response))
        if (MASK[s][t] or not masked) and (s, t) not in without
    ]


def read_all(
    *paths: str | Path, piece_bytes: int = 64 << 20, columns: Mapping[str, str] | None = None
) -> tuple[Detected, list[Logged], list[BadRow]]:
    """Everything that paths hold."""
    found = detect([str(p) for p in paths], columns=columns or {})
    reads = [read(p, found) for p in pieces(found, piece_bytes=piece_bytes)]
    batches = [b for r in reads for b in r.batches]
    return found, batches, [b for r in reads for b in r.bad]


def one(*paths: str | Path, columns: Mapping[str, str] | None = None) -> Logged:
    """The only batch of a log without a bad row."""
    _, batches, bad = read_all(*paths, columns=columns)
    assert not bad
    assert len(batches) == 1
    return batches[0]


def unscored(batch: Logged) -> dict[str, int]:
    """Tokens that a policy does not score, by "FIELD/CAUSE"."""
    return {name: int(n.sum()) for name, n in batch.unscored.items()}


def flat(batches: Sequence[Logged]) -> dict[str, object]:
    """Batches as one, whatever the cuts: lists and numbers by name."""
    found: dict[str, object] = {"lengths": [n for b in batches for n in b.cu_seqlens.diff().tolist()]}
    for name in (*(f.name for f in FIELDS if f.name not in ("position", "trainable")), "in_response"):
        parts = [getattr(b, name) for b in batches]
        if any(p is not None for p in parts):
            found[name] = [x for p in parts for x in (p if isinstance(p, tuple) else p.tolist())]
    for kind in {k for b in batches for k in b.divergences}:
        found[kind] = [x for b in batches for x in b.divergences[kind].tolist()]
    return found


def same_groups(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two numberings part sequences the same way."""
    assert a is not None
    assert b is not None
    return torch.equal(a[:, None] == a, b[:, None] == b)


def ragged(sequences: int, seed: int = 0, longest: int = 40) -> Logged:
    """Random sequences with every field; some are empty."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (sequences,), generator=g)
    n = int(lengths.sum())

    def logp() -> Tensor:
        return -torch.rand(n, generator=g) * 4 - 1e-3

    return Logged(
        cu_seqlens=torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]),
        step=torch.arange(sequences) // 4,
        row=torch.arange(1, sequences + 1),
        response_lengths=lengths,
        logp_rollout=logp(),
        logp_old=logp(),
        logp=logp(),
        logp_ref=logp(),
        advantages=torch.randn(n, generator=g),
        rewards=torch.rand(sequences, generator=g),
        group_ids=torch.arange(sequences) // 2,
        rollout_version=torch.randint(0, 5, (n,), generator=g),
        version=torch.full((sequences,), 6),
        entropy=torch.rand(n, generator=g),
        divergences={"kl_rollout_current": torch.rand(n, generator=g)},
        tokens=torch.randint(0, 50000, (n,), generator=g),
        truncated=torch.arange(sequences) % 2,
        workers=tuple(f"worker-{i % 3}" for i in range(sequences)),
        queue_seconds=torch.rand(sequences, generator=g),
        generation_seconds=torch.rand(sequences, generator=g) * 9,
        drawn_by=tuple(f"engine {i % 2}" for i in range(sequences)),
        mix_alpha=torch.rand(sequences, generator=g),
        prompts=tuple(f"prompt {i // 2}" for i in range(sequences)),
        completions=tuple(f"completion {i} é <b>" for i in range(sequences)),
    )


def at(step: int, sequences: int = 3) -> Logged:
    """A batch of its own for every step."""
    return replace(ragged(sequences, seed=step), step=torch.full((sequences,), step))


def rollouts() -> Rollouts:
    """The three sequences as this library's engines record them."""
    flat = [(s, t) for s, r in enumerate(RESPONSES) for t in range(len(r))]
    return Rollouts(
        tokens=torch.tensor([RESPONSES[s][t] for s, t in flat]),
        logp_rollout=torch.tensor([rollout_logp(s, t) for s, t in flat]),
        cu_seqlens=torch.tensor([0, 3, 4, 8]),
        rollout_version=torch.full((8,), 5),
        prompt_tokens=torch.tensor([t for p in PROMPTS for t in p]),
        prompt_cu_seqlens=torch.tensor([0, 2, 4, 7]),
        group_ids=torch.tensor([3, 3, 9]),
        finish=("stop", "stop", "length"),
        provenance=Provenance("t", "1", "tiny", "float32", None, Sampling(max_tokens=4)),
        rewards=torch.tensor(REWARDS),
        prompts=("q", "q", "r"),
        completions=TEXTS,
    )
