"""A certificate from a log: of one rollout policy and one judged policy, or a sentence why not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from offdrift.audit import certificate_evidence as proof
from offdrift.audit.certificate_evidence import Proof
from offdrift.audit.counterfactual import mixed
from offdrift.certificate import TrustRegion
from offdrift.certificate.batch import BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.records.batch import Logged
from offdrift.segments import Segments
from tests.audit.logs import close, logged, stored

B, GROUP = 240, 3


def log(steps: list[int] | None = None, versions: list[int] | None = None, **changes: Any) -> Logged:
    """Rollouts of a few tokens under slight drift; by default all of version 7, used at step 9."""
    found = logged([2 + i % 3 for i in range(B)], scales=(0.01, 0.02), group=GROUP)
    size = found.cu_seqlens.diff()
    return replace(
        found,
        step=torch.tensor(steps or [9] * B),
        rollout_version=torch.tensor(versions or [7] * B).repeat_interleave(size),
        version=torch.full((B,), 8),
        response_lengths=size,
        **changes,
    )


def direct(batch: Logged, policy: str = "old", ids: torch.Tensor | None = None) -> dict[str, Any]:
    """What the library's own parts certify about the batch's old (or current) policy."""
    logp = batch.logp_old if policy == "old" else batch.logp
    if ids is None:  # intervals take prompts in the order of their keys
        ids = torch.from_numpy(mixed(batch.group_ids.numpy().astype(np.uint64)).view(np.int64))
    segments = Segments.from_lengths(batch.cu_seqlens.diff(), group_ids=ids)
    exact = {f"{d}_rollout_current": Divergence.exact(d, batch.divergences[f"{d}_rollout_{policy}"]) for d in ("kl", "tv")}  # fmt: skip
    region = TrustRegion(horizon=int(batch.cu_seqlens.diff().max()), delta=0.05)
    lp = LogProbs.pack(batch.logp_rollout, logp, segments=segments)
    return certify(BatchEvidence.of(lp, batch.rewards, region=region, divergences=exact)).as_dict()


def compared(found: dict[str, Any], expected: dict[str, Any]) -> int:
    """Numbers and words that were compared; all but the verdict, which says more than `expected`'s."""
    assert found["verdict"].startswith(expected["verdict"])
    names = [k for k in expected if k != "verdict"]
    close({k: found[k] for k in names}, {k: expected[k] for k in names})
    return len(names)


def test_it_is_what_the_parts_certify_of_the_old_policy():
    found = Proof.of(log()).as_dict()
    assert found["why_not"] is None
    assert found["judged"] == "old"
    assert found["rollout_version"] == 7
    assert found["fresh"] is True
    assert found["prompts"] == B / GROUP
    assert found["grades"] == {"kl": "exact", "tv": "exact"}
    assert compared(found, direct(log())) == 32


def test_what_a_log_cannot_show_is_part_of_the_verdict():
    verdict = Proof.of(log()).as_dict()["verdict"]
    assert verdict.endswith("rewards lie in [0, 1]; no response can be longer than the longest logged, 4 tokens")
    masked = replace(log(), response_lengths=log().response_lengths + 1)
    assert "were not drawn by the policy" in Proof.of(masked).as_dict()["verdict"]
    some, rest = masked.select(torch.arange(30)), log().select(torch.arange(30, B))
    for merged in (Proof.of(some).merge(Proof.of(rest)), Proof.of(rest).merge(Proof.of(some))):
        assert "were not drawn by the policy" in merged.as_dict()["verdict"]
    signed = replace(log(), rewards=log().rewards - 0.5)
    assert "rewards lie in [-1, 1]" in Proof.of(signed).as_dict()["verdict"]


def test_only_the_newest_rollouts_at_the_first_step_that_used_them_count():
    """A third is older, a third the newest at step 9, a third the newest again, after an update."""
    kind = [i // GROUP % 3 for i in range(B)]
    whole = log([(8, 9, 10)[k] for k in kind], [(6, 7, 7)[k] for k in kind])
    first = whole.select((torch.tensor(kind) == 1).nonzero().squeeze(-1))
    found = Proof.of(whole).as_dict()
    assert found["sequences"] == first.num_sequences == 81
    assert compared(found, direct(first)) == 32
    assert "which rollouts of these weights were used first" in found["verdict"]
    assert "used first" not in Proof.of(first).as_dict()["verdict"]


def pieces(whole: Logged, cuts: list[int]) -> list[Proof]:
    parts = [whole.select(torch.arange(a, b)) for a, b in zip([0, *cuts], [*cuts, B])]
    return [stored(Proof.of(p)) for p in parts]


@pytest.mark.parametrize("limit", [2**21, 100], ids=["all", "a share of the prompts"])
def test_any_split_between_groups_gives_what_one_pass_gives(limit: int, monkeypatch):
    monkeypatch.setattr(proof, "TOKENS", limit)
    kind = [i // GROUP % 3 for i in range(B)]
    whole = log([(8, 9, 10)[k] for k in kind], [(7, 7, 6)[k] for k in kind])
    one = Proof.of(whole)
    a, b, c, d = pieces(whole, [30, 90, 180])
    for merged in (a.merge(b).merge(c).merge(d), a.merge(b.merge(c.merge(d))), d.merge(b).merge(a).merge(c)):
        expected = one.as_dict()
        assert expected["why_not"] is None
        assert compared(merged.as_dict(), expected) == len(expected) - 1
        assert merged.arrays["lengths"].sum() <= limit
        assert sorted(merged.arrays["keys"]) == sorted(one.arrays["keys"])


@pytest.mark.parametrize("texts", [False, True])
def test_a_prompt_that_is_cut_between_files_counts_once(texts: bool):
    """Ranks that share the answers to a prompt, each with a file of its own."""
    whole = log(prompts=tuple(f"prompt {i // GROUP}" for i in range(B)) if texts else None)
    ranks = [whole.select(torch.arange(r, B, GROUP)) for r in range(GROUP)]
    ranks = [replace(part, row=torch.arange(1, part.num_sequences + 1)) for part in ranks]
    one, two, three = (Proof.of(part) for part in ranks)
    found = one.merge(two).merge(three).as_dict()
    assert found["sequences"] == B
    assert found["prompts"] == B / GROUP
    assert found["gain_low"] == pytest.approx(Proof.of(whole).as_dict()["gain_low"], rel=1e-9)


@pytest.mark.parametrize("texts", [False, True])
def test_four_prompts_in_eight_files_are_four_draws(texts: bool):
    """Every file asks the same four; without texts they are known by their ids."""
    per_file = B // 8
    prompt = [i % 4 for i in range(B)]
    whole = log(group_ids=torch.tensor(prompt))
    if texts:
        whole = replace(whole, prompts=tuple(f"prompt {p}" for p in prompt), group_ids=torch.arange(B))
    files = [whole.select(torch.arange(i * per_file, (i + 1) * per_file)) for i in range(8)]
    found = Proof.over(files).as_dict(prompts="listed" if texts else None)
    assert found["why_not"] is None
    assert (found["sequences"], found["prompts"], found["estimates"]["gain"]["n"]) == (B, 4, 4)
    if texts:
        refused = Proof.over(files).as_dict()
        assert f"{B} groups of answers are to 4 distinct prompts" in refused["why_not"]
        drawn = Proof.over(files).as_dict(prompts="drawn")
        assert drawn["prompts"] == B
        assert "a prompt counts as often as it is drawn" in drawn["verdict"]


def test_prompts_of_one_cluster_are_one_draw(monkeypatch):
    clusters = tuple(f"document {i // (4 * GROUP)}" for i in range(B))
    whole = log(clusters=clusters)
    for proof_of in (Proof.of(whole), Proof.over([whole.select(torch.arange(r, B, 2)) for r in range(2)])):
        found = stored(proof_of).as_dict()
        assert found["why_not"] is None
        assert found["prompts"] == B / GROUP / 4
        assert "clusters of prompts" in found["averages_over"]
        assert "are of one cluster" in found["verdict"]
    some = whole.select(torch.arange(30))
    assert "some do not" in Proof.of(some).merge(Proof.of(log().select(torch.arange(30, B)))).as_dict()["why_not"]
    holes = log(clusters=("", *clusters[1:]))
    assert "have no cluster" in Proof.of(holes).as_dict()["why_not"]
    assert "leave out --prompts drawn" in Proof.of(whole).as_dict(prompts="drawn")["why_not"]
    monkeypatch.setattr(proof, "TOKENS", 300)  # of 720
    thinned = Proof.of(whole)
    assert set(np.unique(thinned.arrays["keys"], return_counts=True)[1].tolist()) == {4 * GROUP}, "whole clusters"


def test_several_audits_share_alpha_and_say_so():
    one, four = Proof.of(log()).as_dict(), Proof.of(log()).as_dict(of=4, look=2)
    assert (one["holds_for"], one["alpha"]) == ("one policy, one look", 0.05)
    assert four["alpha"] == pytest.approx(0.05 * 6 / np.pi**2 / 4 / 4)
    assert "this is look 2 at one of 4 policies" in four["verdict"]
    assert four["gain_low"] < one["gain_low"]


def test_too_many_tokens_leave_whole_prompts_by_chance(monkeypatch):
    monkeypatch.setattr(proof, "TOKENS", 300)
    found = Proof.of(log())  # 720 tokens
    _, sizes = np.unique(found.arrays["keys"], return_counts=True)
    assert set(sizes.tolist()) == {GROUP}
    assert 50 < found.arrays["lengths"].sum() <= 300
    assert found.level >= 2
    assert found.as_dict()["share_of_prompts"] == 0.5**found.level


def test_the_current_policy_is_judged_at_the_first_version_that_was_trained():
    whole = log()
    only = {k: x for k, x in whole.divergences.items() if "current" in k}
    version = torch.tensor([8 + (i // GROUP) % 2 for i in range(B)])
    given = replace(whole, divergences=only, version=version)
    first = given.select((version == 8).nonzero().squeeze(-1))
    found = Proof.of(given).as_dict()
    assert found["judged"] == "current"
    assert compared(found, direct(first, "current")) == 32
    # Evidence about the old policy is preferred, whichever comes first.
    for merged in (Proof.of(given).merge(Proof.of(whole)), Proof.of(whole).merge(Proof.of(given))):
        assert merged.as_dict()["judged"] == "old"


def test_prompts_are_told_apart_by_their_texts():
    texts = tuple(f"prompt {i % 7}" for i in range(B))  # \ud800: a broken half of a character
    texts = ("\ud800", *texts[1:])
    proof = Proof.of(replace(log(), prompts=texts, group_ids=None))
    assert "240 answers without group ids are to 8 distinct prompts" in proof.as_dict()["why_not"]
    assert "give the answers to each draw a group_id" in proof.as_dict(prompts="drawn")["why_not"]
    found = proof.as_dict(prompts="listed")
    ids = torch.tensor([99, *(i % 7 for i in range(1, B))])
    assert found["prompts"] == 8
    expected = direct(log(), ids=ids)
    assert found["estimates"].keys() == expected["estimates"].keys()
    assert found["estimates"]["acceptance"]["mean"] == pytest.approx(expected["estimates"]["acceptance"]["mean"])


SOME_UNSCORED = [0 if i == 5 else 2 + i % 3 for i in range(B)]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"divergences": {}}, "log exact divergences per token"),
    ({"logp_old": None, "logp": None}, "log exact divergences per token"),
    ({"rewards": None}, "log the reward"),
    ({"rewards": torch.full((B,), torch.nan)}, "log the reward of every response"),
    ({"rewards": torch.full((B,), 7.0)}, "rewards from 7 to 7"),
    ({"logp_rollout": None}, "logp_rollout"),
    ({"rollout_version": None}, "log the version of the weights that drew"),
    ({"group_ids": None}, "log the prompt or its id"),
    ({"unscored": {"logp_rollout/missing": torch.tensor([3] + [0] * (B - 1))}}, "3 tokens have no log-probs"),
    ({"logp_old": None, "version": None}, "already learned from these rollouts is unknown"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=[r for _, r in REFUSED])
def test_what_is_missing_is_named_and_nothing_is_certified(changes: dict, reason: str):
    found = Proof.of(replace(log(), **changes))
    told = found.as_dict()
    assert reason in told["why_not"]
    assert told["verdict"].startswith("no certificate: ")
    assert told["certified"] is False
    assert stored(found).as_dict() == told


def test_weights_that_changed_while_drawing_are_no_one_policy():
    whole = log()
    mixed = whole.rollout_version.clone()
    mixed[0] = 6
    assert "no one rollout policy" in Proof.of(replace(whole, rollout_version=mixed)).as_dict()["why_not"]
    # One such sequence spoils whatever it is merged with, in any order; another version does not mind.
    a, b = whole.select(torch.arange(30)), whole.select(torch.arange(30, B))
    spoiled = replace(a, rollout_version=mixed[: a.num_tokens])
    for merged in (Proof.of(spoiled).merge(Proof.of(b)), Proof.of(b).merge(Proof.of(spoiled))):
        assert "no one rollout policy" in merged.as_dict()["why_not"]
    newer = replace(b, rollout_version=b.rollout_version + 1)
    assert Proof.of(spoiled).merge(Proof.of(newer)).as_dict()["why_not"] is None


def test_a_response_without_log_probs_makes_the_rest_no_random_sample():
    found = logged(SOME_UNSCORED, scales=(0.01,), group=GROUP)
    found = replace(found, rollout_version=torch.full((found.num_tokens,), 7))
    assert "no random sample" in Proof.of(found).as_dict()["why_not"]


def test_nothing_is_no_evidence_and_gives_way_to_any():
    told = Proof().as_dict()
    assert told["why_not"] == proof.NOTHING
    empty = log().select(torch.tensor([], dtype=torch.int64))
    assert Proof.of(empty).as_dict() == told
    whole = Proof.of(log())
    for merged in (Proof().merge(whole), whole.merge(Proof.of(empty))):
        assert merged.as_dict() == whole.as_dict()
    why = Proof.of(replace(log(), rewards=None))
    assert Proof().merge(why).as_dict() == why.merge(Proof()).as_dict() == why.as_dict()


def test_sampled_estimates_under_other_names_back_nothing():
    """Only the four names of exact divergences count; k3 of the drawn tokens is none of them."""
    whole = log()
    sampled = {k.replace("kl", "k3"): x for k, x in whole.divergences.items() if "kl" in k}
    assert "a sampled estimate proves nothing" in Proof.of(replace(whole, divergences=sampled)).as_dict()["why_not"]
