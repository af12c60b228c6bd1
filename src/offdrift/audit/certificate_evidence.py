"""Evidence in a log for a certificate of the policy that was about to be trained on its newest rollouts.

A certificate compares two policies by independent draws: the newest weights that drew rollouts, and the training policy
at the first step that used them, before it learned from any of them (`fresh`). That is the old policy where its exact
divergences were logged, else the first current one whose version was. Rollouts of several weights are several samples
and are never pooled, and a sampled estimate backs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, UInt64

from offdrift.audit.counterfactual import mixed
from offdrift.divergence.evidence import Divergence
from offdrift.errors import OffdriftError, RecordError
from offdrift.judge import load_rules
from offdrift.logprobs import LogProbs
from offdrift.records.batch import Logged
from offdrift.records.schema import PADDING
from offdrift.segments import Segments
from offdrift.texts import text_id

if TYPE_CHECKING:
    from offdrift.certificate.prompts import PromptDesign

KL, TV = "kl_rollout_current", "tv_rollout_current"
"""Names of the divergences that a certificate reads."""
TOKENS = 2**21
"""Tokens that are kept as evidence. Of more, those of a random share of the prompts."""

NOTHING = "the log holds no rollouts that could be evidence"
SELECTED = (
    "prompts or group sizes were chosen by the rewards of the responses, or by how long they took, as in an "
    "asynchronous run that takes first what has finished first (selected), so they are no independent sample; judge a "
    "policy by rollouts that nothing was left out of"
)
INCOMPLETE = (
    "some responses lack log-probs, rewards or versions that others have, so the rest is no random sample; "
    "log them for every response"
)
COLUMNS = {"logp_rollout": np.float64, "logp": np.float64, KL: np.float64, TV: np.float64}
PER_SEQUENCE = {"keys": np.uint64, "draws": np.uint64, "lengths": np.int64, "rewards": np.float64}
RANGES = ((0.0, 1.0), (-1.0, 1.0))
"""Ranges of rewards that are recognized."""


@dataclass(frozen=True, eq=False)
class Proof:
    """Mergeable evidence about one policy; make it with `Proof.of`."""

    order: tuple[int, int, int] = (-1, 0, 0)
    """What is better evidence: newer rollouts; about the old policy; at an earlier step."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """`PER_SEQUENCE` for each sequence, and `COLUMNS` (TV if logged) for each token."""
    level: int = 0
    """Prompts whose key is divisible by 2^level are kept."""
    clustered: bool = False
    """Whether a draw is a cluster of prompts: `keys` and `draws` number those."""
    grouped: bool = True
    """Whether draws of one prompt are told apart, or prompts are known by their group ids alone."""
    reused: bool = False
    """Whether other rollouts of the same weights were used at other steps."""
    masked: bool = False
    """Whether some responses have tokens that are not trained on."""
    why_not: str = NOTHING

    @staticmethod
    @torch.no_grad()
    def of(batch: Logged) -> Proof:
        """The evidence in a batch, or why there is none.

        Prompts are known by their texts; without, by their group ids, whatever file holds them: ranks that number their
        own prompts from 0 then share ids, which costs independent draws and never counts one prompt twice.
        """
        why_not = _missing(batch)
        if why_not:
            return Proof(why_not=why_not)
        assert batch.rollout_version is not None
        old, segments = _judges_old(batch), batch.segments
        versions, scored = batch.rollout_version.double(), segments.lengths > 0
        newest = int(versions.max())
        lowest, highest = segments.min(versions, empty=-1.0), segments.max(versions, empty=-1.0)
        clock = batch.step if old else batch.version
        assert clock is not None
        touched = (highest == newest) & scored
        first = int(clock[touched].min())
        chosen = touched & (clock == first)
        if bool((chosen & (lowest < newest)).any()):
            why_not = (
                "responses of the newest rollouts were drawn while the weights were updated, so there is no one "
                "rollout policy; draw a step's rollouts without updating the weights in between"
            )
        elif bool((~scored & (clock == first)).any()):
            why_not = "some responses have no log-probs at all, so the rest is no random sample; log every response"
        elif unscored := sum(int(n.sum()) for name, n in batch.unscored.items() if name != PADDING):
            why_not = f"{unscored} tokens have no log-probs; log them for every token"
        sequences = batch.select(chosen.nonzero().squeeze(-1))
        judged, lengths = "old" if old else "current", sequences.cu_seqlens.diff()
        columns = {
            "logp_rollout": sequences.logp_rollout,
            "logp": sequences.logp_old if old else sequences.logp,
            TV: sequences.divergences.get(f"tv_rollout_{judged}"),
            KL: sequences.divergences[f"kl_rollout_{judged}"],
            "rewards": sequences.rewards,
            "lengths": lengths,
        }
        arrays = {k: x.numpy().astype((COLUMNS | PER_SEQUENCE)[k]) for k, x in columns.items() if x is not None}
        clustered = batch.clusters is not None and any(batch.clusters)
        keys = _clusters(batch) if clustered else _keys(batch)
        draws = keys if clustered else _draws(batch, keys)
        arrays["keys"], arrays["draws"] = keys[chosen.numpy()], draws[chosen.numpy()]
        if clustered and not all(batch.clusters or ()):
            why_not = "some prompts have no cluster, so that what they share with others is unknown; name all (cluster)"
        return Proof(
            order=(newest, int(old), -first),
            arrays=arrays,
            clustered=clustered,
            grouped=batch.group_ids is not None,
            reused=bool((touched & (clock != first)).any()),
            masked=bool((sequences.response_lengths != lengths).any()),
            why_not=why_not,
        )._thinned(0)

    @staticmethod
    def over(batches: Sequence[Logged]) -> Proof:
        """The evidence in batches of one reading, which may hold different fields."""
        proofs = [Proof.of(batch) for batch in batches]
        merged = functools.reduce(Proof.merge, proofs)
        if merged.arrays and not merged.why_not and any(p.why_not for p in proofs):
            return replace(merged, why_not=INCOMPLETE)
        return merged

    def merge(self, other: Proof) -> Proof:
        """The better evidence, or both if they are about the same two policies."""
        if self.order != other.order:
            better, worse = (self, other) if self.order > other.order else (other, self)
            return replace(better, reused=better.reused or better.order[0] == worse.order[0] >= 0)
        if not self.arrays or not other.arrays:
            return other if other.arrays or self.why_not == NOTHING else self
        if self.clustered != other.clustered:
            return replace(self, why_not="some files name clusters of prompts (cluster) and some do not; name all")
        shared = [name for name in self.arrays if name in other.arrays]
        both = {k: np.concatenate([self.arrays[k], other.arrays[k]]) for k in shared}
        return Proof(
            self.order,
            both,
            0,
            clustered=self.clustered,
            grouped=self.grouped and other.grouped,
            reused=self.reused or other.reused,
            masked=self.masked or other.masked,
            why_not=self.why_not or other.why_not,
        )._thinned(max(self.level, other.level))

    def as_dict(
        self,
        *,
        of: int = 1,
        look: int | None = None,
        prompts: PromptDesign | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """The certificate, ready for JSON; or `why_not`.

        Args:
            of, look: policies that are audited by the same rollouts, and the number of this look at the run, which
                share the probability of error: see `Looks`.
            prompts: the design of prompts that come more than once; None refuses them, with both readings.
            limits: thresholds by name (`Rules.limits`), if not the built-in ones: `trust_region` is the KL(rollout ||
                judged) that is certified (nats), `certificate_error` the largest probability that any is wrong.
        """
        limits = load_rules().limits if limits is None else limits
        if self.why_not:
            return _none(self.why_not)
        if refused := self.refuses(prompts):
            return _none(refused)
        prompts = self._design(prompts)
        from offdrift.certificate import Looks, TrustRegion  # few logs hold evidence
        from offdrift.certificate.batch import BatchEvidence
        from offdrift.certificate.certify import certify

        rewards, longest = self.arrays["rewards"], int(self.arrays["lengths"].max())
        fits = [r for r in RANGES if r[0] <= rewards.min() and rewards.max() <= r[1]]
        if not fits:
            return _none(f"rewards from {rewards.min():g} to {rewards.max():g} are outside [-1, 1]; rescale them")
        tensors = {k: torch.from_numpy(x) for k, x in self.arrays.items() if k not in ("keys", "draws")}
        ids = torch.from_numpy(self.arrays["draws" if prompts == "drawn" else "keys"].view(np.int64))
        try:
            region = TrustRegion(horizon=longest, delta=limits["trust_region"])
            segments = Segments.from_lengths(tensors["lengths"], group_ids=ids)
            logprobs = LogProbs.pack(tensors["logp_rollout"], tensors["logp"], segments=segments)
            exact = {k: Divergence.exact(k, tensors[k]) for k in (KL, TV) if k in tensors}
            evidence = BatchEvidence.of(logprobs, tensors["rewards"], region=region, divergences=exact)
            looks = Looks(at=look, of=of)
            proof = certify(
                evidence,
                reward_range=fits[0],
                alpha=limits["certificate_error"],
                looks=looks,
                fresh=True,
                prompts=prompts,
            )
        except OffdriftError as e:
            return _none(str(e))
        certificate = proof.as_dict()
        provided = [
            f"rewards lie in [{fits[0][0]:g}, {fits[0][1]:g}]",
            f"no response can be longer than the longest logged, {longest} tokens",
            *self.takes_for_granted(prompts),
        ]
        return certificate | {
            "verdict": "; ".join([certificate["verdict"], *provided]),
            "why_not": None,
            "judged": "old" if self.order[1] else "current",
            "rollout_version": self.order[0],
            "share_of_prompts": 0.5**self.level,
            "provided": provided,
        }

    def refuses(self, prompts: PromptDesign | None) -> str:
        """Why these prompts cannot be judged by a design; "" if they can."""
        if self.clustered and prompts in ("listed", "drawn"):
            return f"the log names clusters of prompts, each one draw; leave out --prompts {prompts}"
        distinct, draws = (len(np.unique(self.arrays[name])) for name in ("keys", "draws"))
        try:
            self._design(prompts)
        except RecordError as e:
            return str(e)
        if draws > distinct and prompts is None:
            from offdrift.certificate.prompts import two_readings

            return two_readings(draws, distinct, command="offdrift audit --prompts")
        if prompts == "drawn" and self.level:
            return (
                "of so many tokens a share of the prompts is kept, and draws of prompts that are left out cannot be "
                "counted; audit fewer steps, or --prompts listed"
            )
        return ""

    def _design(self, prompts: PromptDesign | None) -> PromptDesign | None:
        """The design that holds. Raises: as `design_without_groups`."""
        if self.clustered or self.grouped:
            return "clustered" if self.clustered else prompts
        from offdrift.certificate.prompts import design_without_groups

        return design_without_groups(self.arrays["keys"], prompts, command="offdrift audit --prompts")

    def takes_for_granted(self, prompts: PromptDesign | None) -> list[str]:
        """List what the log cannot show and a certificate takes for granted, besides `ALWAYS`, rewards and lengths."""
        told = {
            "which rollouts of these weights were used first did not depend on what was drawn, as on their length": (
                self.reused
            ),
            "draws of one prompt have group ids of their own, in all files of the step": prompts == "drawn",
            "answers to one prompt are of one cluster": self.clustered,
            "tokens that are not trained on were not drawn by the policy": self.masked,
        }
        return [words for words, applies in told.items() if applies]

    def _thinned(self, level: int) -> Proof:
        """Keep only prompts of this sampling level, and raise the level until few enough tokens are left."""
        keys, lengths = self.arrays["keys"], self.arrays["lengths"]
        rows = _divisible(keys, level)
        while lengths[rows].sum() > TOKENS and _divisible(keys, level + 1).any():
            level += 1
            rows = _divisible(keys, level)
        if rows.all():
            return replace(self, level=level)
        tokens = np.repeat(rows, lengths)
        arrays = {k: x[tokens if k in COLUMNS else rows] for k, x in self.arrays.items()}
        return replace(self, arrays=arrays, level=level)


def _judges_old(batch: Logged) -> bool:
    return batch.logp_old is not None and "kl_rollout_old" in batch.divergences


def _missing(batch: Logged) -> str:
    """Say which evidence for a certificate the batch lacks; "" if it has all of it."""
    current = batch.logp is not None and KL in batch.divergences
    if not (_judges_old(batch) or current):
        return (
            "log exact divergences per token (kl_rollout_old and tv_rollout_old with logp_old, or kl_rollout_current "
            "with logp), from full logits or hidden states; a sampled estimate proves nothing"
        )
    if not batch.num_tokens:
        return NOTHING
    if batch.selected is not None and bool((batch.selected != 0).any()):
        return SELECTED
    wanted = {
        "logp_rollout": "the rollout engine's log-probs (logp_rollout)",
        "rewards": "the reward of each response (reward)",
        "rollout_version": "the version of the weights that drew each response (rollout_version): a certificate "
        "compares two policies",
    }
    if not _judges_old(batch):
        wanted["version"] = (
            "the version of the trained weights (version): without it, whether the policy has already learned from "
            "these rollouts is unknown"
        )
    for name, words in wanted.items():
        if getattr(batch, name) is None:
            return f"log {words}"
    if batch.group_ids is None and batch.prompts is None:
        return "log the prompt or its id (group_id): responses to one prompt are no independent draws"
    assert batch.rewards is not None
    if not bool(batch.rewards.isfinite().all()):
        return "log the reward of every response; some are missing or not finite"
    return ""


def _keys(batch: Logged) -> UInt64[np.ndarray, " b"]:
    """A number for the prompt of each sequence, the same in all files of the step."""
    if batch.prompts is None:
        assert batch.group_ids is not None
        return mixed(batch.group_ids.numpy().astype(np.uint64))
    ids = [text_id(p.encode(errors="surrogatepass")) for p in batch.prompts]
    return np.array(ids, dtype=np.int64).view(np.uint64)


def _clusters(batch: Logged) -> UInt64[np.ndarray, " b"]:
    """A number for the cluster of each sequence's prompt, the same in all files."""
    return np.array([text_id(name) for name in batch.clusters or ()], dtype=np.int64).view(np.uint64)


def _draws(batch: Logged, keys: UInt64[np.ndarray, " b"]) -> UInt64[np.ndarray, " b"]:
    """A number for the draw that each sequence answers: its prompt and group, where a log has both."""
    if batch.prompts is None or batch.group_ids is None:
        return keys
    return mixed(keys ^ mixed(batch.group_ids.numpy().astype(np.uint64)))


def _divisible(keys: UInt64[np.ndarray, " b"], level: int) -> Bool[np.ndarray, " b"]:
    return keys & np.uint64(2**level - 1) == 0


def _none(why_not: str) -> dict[str, Any]:
    return {"verdict": f"no certificate: {why_not}", "why_not": why_not, "certified": False}
