"""Benches of tiny models, as the tests of a check use them."""

from offdrift.check.bench import Bench, EngineSpec, Pair
from offdrift.check.factors import FACTORS
from offdrift.check.factors.base import Outcome
from offdrift.check.measure import measure
from offdrift.models import tiny_tokenizer
from offdrift.records.provenance import Sampling
from tests.engines.models import tiny

FLOAT32 = EngineSpec("transformers", "float32")
BFLOAT16 = EngineSpec("transformers", "bfloat16")
ROUNDED, NULL = Pair(BFLOAT16, FLOAT32), Pair(FLOAT32, FLOAT32)
FACTOR = {f.name: f for f in FACTORS}


def prompts_of(count: int) -> list[list[int]]:
    """Ragged prompts of one to three tokens."""
    return [[4 + i, 13, 5 + i % 7][: 1 + i % 3] for i in range(count)]


def bench_of(kind: str = "dense", *, count: int = 12, made: type[Bench] = Bench, **options) -> Bench:
    """A bench of a tiny model that draws 12 tokens after each prompt, unless told otherwise."""
    options = {"sampling": Sampling(max_tokens=12), "name": "tiny", **options}
    return made(tiny(kind), tiny_tokenizer(), prompts_of(count), **options)


def run(name: str, bench: Bench, pair: Pair) -> Outcome:
    """The row of one factor."""
    baseline = measure(bench, bench.rollouts(pair.rollout), pair.train)
    return FACTOR[name].run(bench, pair, baseline)
