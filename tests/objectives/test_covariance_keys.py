"""The pseudo-random keys of tokens: by whole numbers, uniform, and the same wherever a token lies."""

import math
import struct

import torch

from offdrift.logprobs import LogProbs
from offdrift.objectives.covariance import token_keys
from offdrift.segments import Segments
from tests.objectives.checks import SPLITS, piece
from tests.oracles.fixtures import ragged


def mix(x: int) -> int:
    """The splitmix64 finalizer on Python's unbounded integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_keys_by_whole_numbers():
    lp = ragged(3)
    got, expected = token_keys(lp, seed=5).tolist(), []
    for row in lp.logp_rollout.split(lp.segments.lengths.tolist()):
        bits = [struct.unpack("<Q", struct.pack("<d", x))[0] for x in row.tolist()]
        own = [(b ^ (t + 1) * 0x9E3779B97F4A7C15 % 2**64) * 0xD1342543DE82EF95 % 2**64 for t, b in enumerate(bits)]  # fmt: skip
        whole = mix((sum(own) + 6 * 0x9E3779B97F4A7C15) % 2**64)
        expected += [(mix(k ^ whole) >> 11) / 2**53 for k in own]
    assert got == expected
    assert len(got) > 20


def test_keys_are_uniform_and_change_with_the_seed():
    n = 40000
    g = torch.Generator().manual_seed(0)
    logp = -torch.rand(n, generator=g, dtype=torch.float64).round(decimals=2)  # many alike
    lp = LogProbs.pack(logp, segments=Segments.from_lengths([8] * (n // 8)))
    first, second = token_keys(lp, seed=0), token_keys(lp, seed=1)
    for keys in (first, second):
        counts = torch.histc(keys, bins=20, min=0, max=1)
        assert ((counts - n / 20).square() / (n / 20)).sum() < 45  # chi^2(19) > 45 once in 1000
        assert len(keys.unique()) == n
    for pair in (torch.stack([first, second]), torch.stack([first[1:], first[:-1]])):
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(n)
    logp_of_chosen = logp[first < 0.1]
    assert abs(logp_of_chosen.mean() - logp.mean()) < 4 * logp.std() / math.sqrt(0.1 * n)


def test_equal_first_tokens_of_different_responses_have_different_keys():
    logp = torch.tensor([-0.5, -1.0, -0.5, -1.25, -0.5, -1.0])
    keys = token_keys(LogProbs.pack(logp, segments=Segments.from_lengths([2, 2, 2])))
    assert len(keys[[0, 2]].unique()) == 2
    assert keys[0] == keys[4]  # the same response twice


def test_keys_do_not_depend_on_the_split_or_on_padding():
    lp = ragged(1)
    keys = token_keys(lp)
    for split in SPLITS:
        for part, rows in (piece(lp, sequences) for sequences in split):
            assert torch.equal(token_keys(part), keys[rows])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    padded = torch.tensor([[-1.0, -2.0, math.nan], [math.nan, -1.0, -2.0]])
    keys = token_keys(LogProbs.pack(padded, mask=mask))
    assert torch.equal(keys[:2], keys[2:])
