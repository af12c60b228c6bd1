"""A certificate on a screen: every number and every word of it, at any width."""

import re
from dataclasses import replace

import pytest
import torch

from offdrift.certificate import Certificate, TrustRegion
from offdrift.certificate.batch import BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.certificate.samples import SHARES
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.prove.certify import NAMES, NOT_FRESH, certificate_view, number
from offdrift.segments import Segments
from tests.show.screens import flat, printed

REGION = TrustRegion(horizon=4, delta=0.02, eps=0.08, tau=0.4)
CAP = "|log mu - log pi| <= 0.5 nats outside the top 8, which is a long thing to assume"
WIDTHS = (80, 120)


def proof(
    kind: str = "exact", *, sequences: int = 600, kl: float = 0.013, refuted: bool = False,
    rewarded: bool = True, **options,
) -> Certificate:  # fmt: skip
    """A policy that does what is rewarded more often, on evidence of one kind."""
    g = torch.Generator().manual_seed(0)
    n = 2 * sequences
    good = torch.arange(sequences) % 2 == 0
    log_w = torch.where(good, 0.15, -0.18).repeat_interleave(2)
    rollout = torch.full((n,), -2.0)
    segments = Segments.from_lengths([2] * sequences)
    lo = kl * torch.rand(n, generator=g)
    hi = 1.3 * lo
    contradicted = torch.full((n,), refuted)
    made = {
        "exact": lambda name, x: Divergence.exact(name, x[0]),
        "interval": lambda name, x: Divergence.interval(name, *x),
        "capped": lambda name, x: Divergence.capped(name, *x, assumes=CAP, refuted=contradicted),
        "sampled": lambda name, x: Divergence.sampled(name, x[0]),
    }[kind]
    ends = {"kl_rollout_current": (lo, hi), "tv_rollout_current": (4 * lo, 4 * hi)}
    evidence = BatchEvidence.of(
        LogProbs.pack(rollout, rollout + log_w, segments=segments),
        good.float() if rewarded else None,
        region=REGION,
        divergences={name: made(name, x) for name, x in ends.items()},
        keep=torch.arange(n) % 50 != 7,
    )
    return certify(evidence, **options)


CASES = {
    "certified": proof(),
    "paper": proof(constants="paper"),
    "interval": proof("interval", sequences=30),
    "capped": proof("capped"),
    "refuted": proof("capped", refuted=True),
    "falsified": proof(kl=0.4),
    "sampled": proof("sampled"),
    "stale": proof(fresh=False),
    "wide": proof(reward_range=(-1234.5, 98765.4), alpha=1e-7),
    "silent": proof(rewarded=False),
}


def shown(p: Certificate, width: int) -> str:
    text = printed(certificate_view(p, width=width), width)
    assert max(map(len, text.splitlines())) <= width
    return text


def row_of(text: str, *cells: str) -> bool:
    """Whether a line holds the cells side by side, whatever else is around them."""
    return re.search(r"\s{2,}".join(map(re.escape, cells)) + r"(\s|$)", text, re.M) is not None


def test_the_cases_are_what_their_names_say():
    assert CASES["certified"].certified
    assert CASES["certified"].precondition == "not falsified"
    assert CASES["falsified"].precondition == "falsified"
    assert CASES["sampled"].precondition == "unknown"
    assert CASES["capped"].assumes == {CAP}
    assert CASES["refuted"].refuted == 600
    assert not CASES["stale"].certified
    assert CASES["silent"].guarantees == ()
    assert len(CASES["certified"].guarantees) == 3
    assert set(NAMES) == set(SHARES) - {"unseen"} == set(CASES["certified"].estimates)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_the_verdict_and_every_word_is_there(case: str, width: int):
    p = CASES[case]
    text = shown(p, width)
    assert "…" not in text
    assert p.verdict in flat(text)
    assert f"{p.sequences:,} sequences of {p.prompts:,} prompts" in flat(text)
    assert f"probability of error {p.alpha:g} (one policy, one look), {p.constants} constants" in flat(text)
    for limit in ("T = 4", "KL <= 0.02 nat", "TV <= 0.08", "|log ratio| <= 0.4"):
        assert limit in flat(text), limit
    words = flat(text).split()
    for name in p.estimates:
        assert all(word in words for word in NAMES[name].split()), name
    for g in p.guarantees:
        assert g.name in words
        assert all(w in words for condition in g.provided for w in condition.split())
    assert ("◂" in text) == bool(p.guarantees)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", ["certified", "paper", "interval", "capped", "stale", "wide"])
def test_every_number_is_there(case: str, width: int):
    p, text = CASES[case], shown(CASES[case], width)
    assert len(p.estimates) == 11
    for name, e in p.estimates.items():
        cells = [number(e.mean), number(e.low), number(e.high)]
        assert row_of(text, *cells), name
        if normal := p.asymptotic.get(name):
            ends = f"{number(normal.low)} to {number(normal.high)}"
            assert all(x in text.split() for x in ends.split()), name
            assert width < 120 or row_of(text, *cells, ends)
    assert p.asymptotic
    for g in p.guarantees:
        start = p.estimates[g.surrogate].low
        assert row_of(text, *map(number, (start, g.error, g.price, p.gain_of(g)))), g.name
    for (low, high), name in ((p.delta_seen, "kl"), (p.eps_seen, "tv")):
        ends = number(high) if low == high else f"{number(low)} to {number(high)}"
        assert row_of(text, p.premises[name], ends)
    assert p.unseen is not None
    assert row_of(text, "at most", f"{number(100 * p.unseen)}%")


def test_shares_that_round_to_nothing_are_still_numbers():
    """At a billion to one the confidence is not 100 %, and few are not none."""
    assert "probability of error 1e-09" in flat(shown(proof(alpha=1e-9), 80))
    rare = replace(CASES["certified"], unseen=3.21e-6)
    assert "0.000321%" in shown(rare, 80)


@pytest.mark.parametrize("width", WIDTHS)
def test_samples_show_dashes_where_exact_evidence_shows_numbers(width: int):
    text = shown(CASES["sampled"], width)
    assert row_of(text, "unknown", "–", "sampled")
    assert "at most" not in text.partition("premises of")[2].partition("expectations")[0]
    dashes = [line for line in text.splitlines() if row_of(line, "–", "–", "–")]
    assert [line.split()[0] for line in dashes] == ["KL", "adaptive", "KL", "adaptive", "L'_masked"]
    # what is shown without evidence would be the region's own limits: 2 tokens of KL <= 0.02
    assert CASES["sampled"].estimates["kl_seq"].mean == pytest.approx(0.04)
    assert not row_of(text, "0.04")


@pytest.mark.parametrize(("case", "absent"), [("falsified", 2), ("refuted", 5), ("certified", 0)])
def test_means_that_rest_on_a_fallen_premise_are_dashes(case: str, absent: int):
    lines = shown(CASES[case], 120).splitlines()
    assert sum(row_of(line, "–", "–", "–") for line in lines) == absent


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_taken_for_granted_is_said(width: int):
    assert f"assumed: {CAP}" in flat(shown(CASES["capped"], width))
    assert f"{CAP}; 600 sequences contradict it" in flat(shown(CASES["refuted"], width))
    assert "assumed:" not in shown(CASES["certified"], width)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_policy_that_learned_from_the_rollouts_is_called_so(width: int):
    words = NOT_FRESH
    assert words in flat(shown(CASES["stale"], width))
    assert words in flat(shown(proof(rewarded=False, fresh=False), width))
    assert words not in flat(shown(CASES["certified"], width))


def test_only_a_certificate_is_green():
    green = "32m"
    assert printed(certificate_view(CASES["certified"]), 120, color=True).count(green) > 0
    assert CASES["stale"].gain_of(CASES["stale"].guarantees[0]) > 0, "as if it were certified"
    assert green not in printed(certificate_view(CASES["stale"]), 120, color=True)


def test_words_from_elsewhere_are_text():
    """Assumptions, names of quantities and conditions: brackets and colons are what they are."""
    hostile = "[bold red]x[/bold red] :smile: [/] [link=x]"
    p = CASES["capped"]
    g = replace(p.guarantees[0], provided=(hostile,))
    estimates = {**p.estimates, hostile: p.estimates["acceptance"]}
    p = replace(p, assumes=frozenset({hostile}), guarantees=(g, *p.guarantees[1:]), estimates=estimates)
    words = flat(shown(p, 120)).split()
    for word in hostile.split():
        assert words.count(word) >= 3, word


def test_json_says_nothing_where_nothing_stands():
    """Where the premise fell, sums that the region limits are its limits and no upper ends."""
    fell, stands = (CASES[name].as_dict()["estimates"] for name in ("falsified", "certified"))
    assert fell["kl_seq"] is None
    assert fell["shift"] is None
    assert fell["gain"] is not None
    assert all(e is not None for e in stands.values())
