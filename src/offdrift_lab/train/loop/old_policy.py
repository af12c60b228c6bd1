"""The old policy: the policy whose log-probs a method reads as `logp_old`.

    log w = (log pi_old - log mu) + (log pi - log pi_old)      full = mismatch + staleness

The two terms are mismatch and staleness only if pi_old is the training engine *at the weights that drew the token*.
That is `Snapshots`, the default; the others cost less, or approximate it:

    sampling       exact        snapshots of weights by version, while a rollout still refers to them
    second_model   exact, or    a second model that takes new weights when the engine does; stale for
                   stale        batches that waited in a queue meanwhile
    batch_start    exact, or    the trainer as it is when the batch arrives: stale wherever the engine
                   stale        lags, and then `mismatch` contains staleness
    ewma           approximated an exponential average of the trainer's weights (PPO-EWMA)
    interpolated   approximated no forward pass: between rollout and current policy (A-3PO), see `anchor`
    rollout        missing      no forward pass: pi_old := mu (bypass), see `anchor`

Costs are measured in docs/old-policy.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offdrift.divergence.evidence import Divergence
from offdrift.engines.routing import routed
from offdrift.engines.score import chunks, divergences, score
from offdrift.errors import CheckpointError, EvidenceError, RecordError
from offdrift.objectives.ewma import ewma_update
from offdrift.records.atomic import write_atomically
from offdrift.records.rollouts import Rollouts, Routes
from offdrift.records.schema import OLD_STATUS
from offdrift.segments import Segments
from offdrift.texts import check_file
from offdrift_lab.train.loop.sharded import anywhere, in_step, is_sharded, local_weights
from offdrift_lab.train.settings import recipe

Weights = Mapping[str, Tensor]
FOLDER = "old_policy"
"""Folder of the old policy's weights in a checkpoint."""


@dataclass(frozen=True)
class PolicyScores:
    """Scores of `n` response tokens under one policy; no gradient."""

    logp: Float[Tensor, " n"]
    entropy: Float[Tensor, " n"]
    sum_pi_squared: Float[Tensor, " n"]
    divergences: dict[str, Divergence] = field(default_factory=dict)
    """Of this policy from the rollout policy, `..._rollout_old`."""
    version: Int[Tensor, " n"] | None = None
    """Updates that the weights had seen which scored each token; None for averaged weights."""
    routes: Routes | None = None
    """Experts of the pass, of the batch's sequences in their order, where they were noted; `select` leaves them out."""

    def map(self, function: Callable[[Tensor], Tensor]) -> PolicyScores:
        """Scores of other tokens: `function` applied to every tensor."""
        divergences = {name: d.map(function) for name, d in self.divergences.items()}
        logp, entropy, squares = map(function, (self.logp, self.entropy, self.sum_pi_squared))
        version = None if self.version is None else function(self.version)
        return PolicyScores(logp, entropy, squares, divergences, version)

    def select(self, rows: Tensor) -> PolicyScores:
        """Scores of some of the tokens."""
        return self.map(lambda x: x[rows])

    def status(self, rollout_version: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Index into `OLD_STATUS` of each token, as an old policy of rollouts of these versions."""
        if self.version is None:
            return torch.full_like(rollout_version, OLD_STATUS.index("approximated"))
        stale = self.version != rollout_version
        return stale.long() * OLD_STATUS.index("stale")

    @staticmethod
    def joined(parts: Sequence[tuple[Tensor, PolicyScores]], n: int) -> PolicyScores:
        """Scores of `n` tokens, on the host, from parts with the rows that each of them is about."""
        rows, first = torch.cat([r for r, _ in parts]), parts[0][1]

        def placed(name: str) -> Tensor:
            column = torch.cat([getattr(part, name) for _, part in parts]).cpu()
            return column.new_empty(n).index_copy_(0, rows, column)

        divergences = {
            name: Divergence.joined([(r, part.divergences[name]) for r, part in parts], n).map(lambda x: x.cpu())
            for name in first.divergences
        }
        version = None if first.version is None else placed("version")
        return PolicyScores(placed("logp"), placed("entropy"), placed("sum_pi_squared"), divergences, version)


@torch.no_grad()
def score_batch(
    model: nn.Module,
    rollouts: Rollouts,
    *,
    token_budget: int,
    exact: bool = False,
    tail_log_ratio_cap: float | None = None,
    half: torch.dtype | None = None,
    replays: bool = False,
    note_routes: bool = False,
    note_gates: bool = False,
) -> PolicyScores:
    """Score a batch with the weights that the model has now. Gradient: none.

    Args:
        token_budget: padded tokens per forward pass.
        exact: also compute divergences from the recorded evidence.
        tail_log_ratio_cap: what top-k evidence may assume of its tail, nats; see `divergences`.
        half: precision of the forward passes, see `engines.score.score`.
        replays: send tokens to the experts of `rollouts.routes`.
        note_routes, note_gates: note the experts that the model chooses; and their weights, too.
    """
    temperature = rollouts.provenance.sampling.temperature
    parts, noted, order = [], [], []
    model.eval()
    for sequences, counts in in_step(model, chunks(rollouts, token_budget=token_budget)):
        piece = rollouts.select(sequences)
        with routed(model, piece, replays=replays, watch=note_routes) as choices:
            scored = score(model, piece, temperature=temperature, half=half)
        if not counts:
            continue
        evidence = divergences(piece, scored.logits, tail_log_ratio_cap=tail_log_ratio_cap) if exact else {}
        logp, entropy, squares = (x.float().cpu() for x in (scored.logp, scored.entropy, scored.sum_pi_squared))
        scores = PolicyScores(logp, entropy, squares, named_as_old(evidence))
        parts.append((rollouts.segments.rows(sequences), scores))
        if choices is not None and note_routes:
            noted.append(choices.routes(piece, gates=note_gates))
            order.append(sequences)
    scores = PolicyScores.joined(parts, len(rollouts.tokens))
    return replace(scores, routes=Routes.joined(noted).select(torch.cat(order).argsort())) if noted else scores


EXACT_NORMS_BELOW = 200_000_000
"""Parameters up to which a run takes `gradient_norms`: they cost a backward pass per response."""


def gradient_norms(model: nn.Module, rollouts: Rollouts, *, replays: bool = False) -> Float[Tensor, " b"]:
    """Squared norm of each response's score gradient, with the weights that the model has now:

        |g_i|^2 = |grad_theta sum_t log pi(y_t | x, y_<t)|^2   over all parameters that train

    One forward and one backward pass per response, each by itself: as many as responses, and the memory of one
    gradient. (`torch.func.vmap` cannot pass through the masks of transformers' attention.)

    Returns: on the host, at the sampling temperature. Gradient: none.

    Reference: VCPO, arXiv:2602.17616.
    """
    temperature = rollouts.provenance.sampling.temperature
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.eval()
    norms = []
    for i in range(rollouts.num_sequences):
        piece = rollouts.select(torch.tensor([i]))
        with routed(model, piece, replays=replays), ExitStack() as backward_scope:
            logp = score(model, piece, temperature=temperature, backward_scope=backward_scope).logp
            gradients = torch.autograd.grad(logp.sum(), parameters, allow_unused=True)  # unused: experts not routed to
        norms.append(torch.nn.utils.get_total_norm([g for g in gradients if g is not None]).square())
    return torch.stack(norms).cpu()


def named_as_old(from_rollout: Mapping[str, Divergence]) -> dict[str, Divergence]:
    """Divergences `..._rollout_current`, named `..._rollout_old`: the scoring policy is the old one."""
    renamed = (replace(d, name=d.name.replace("current", "old")) for d in from_rollout.values())
    return {d.name: d for d in renamed}


@contextmanager
def weights_replaced(accelerator: Accelerator, model: nn.Module, weights: Weights) -> Iterator[nn.Module]:
    """Put other weights that train into the model for a while; its own come back bit for bit, also on errors.

    Args:
        weights: by name, as `local_weights` gives them: of a sharded model, this process's parts.

    Memory: one more copy of those weights on the model's device, if they are not there already; of a sharded model, of
    this process's parts.
    """
    inner = accelerator.unwrap_model(model)
    if is_sharded(inner):  # passes gather what is in the parts' own memory
        parts = local_weights(inner)
        copies = {name: part.clone() for name, part in parts.items()}
        try:
            for name, part in parts.items():
                part.copy_(weights[name])
            yield model
        finally:
            local_weights(inner)  # nothing that was gathered outlives the parts that it was gathered from
            for name, part in parts.items():
                part.copy_(copies[name])
        return
    parameters = {name: (p, p.data) for name, p in inner.named_parameters() if p.requires_grad}
    try:
        for name, (p, data) in parameters.items():
            p.data = weights[name].to(data.device)
        yield model
    finally:
        for p, data in parameters.values():
            p.data = data


def kept(weight: Tensor, *, offload: bool) -> Tensor:
    """A copy of a weight that rests on the weight's own device, or with `offload` in host memory."""
    return weight.to("cpu" if offload else weight.device, copy=True)


class OldPolicy:
    """Scores batches as the old policy, and keeps the weights that it needs for that.

    The hooks do nothing unless a subclass says otherwise.
    """

    by_version = False
    """Whether tokens of different versions have different old policies."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.accelerator = accelerator
        self.folder = folder
        self.parts = accelerator.distributed_type == DistributedType.FSDP
        """Whether every process keeps its own part of the weights, in files of its own."""

    def write(self, weights: Weights, file: Path) -> None:
        """Write weights, in every process that holds some of them."""
        if self.parts or self.accelerator.is_main_process:
            write_weights(weights, file)

    def _file(self, folder: Path, name: str) -> Path:
        part = f"-rank{self.accelerator.process_index}" if self.parts else ""
        return folder / f"{name}{part}.safetensors"

    def policy(self, drawn_at: int, model: nn.Module, version: int) -> AbstractContextManager[nn.Module]:
        """The old policy of tokens that weights of version `drawn_at` drew.

        Args:
            model: the trainer's, at `version`; it may be lent other weights meanwhile.
        """
        raise NotImplementedError

    def scored_at(self, drawn_at: int, version: int) -> int | None:
        """Version of that policy's weights; None if it is no single version."""
        raise NotImplementedError

    def published(self, model: nn.Module, version: int) -> None:
        """The engine has taken the trainer's weights, which are of `version`."""

    def retain(self, versions: Iterable[int], model: nn.Module, version: int) -> None:
        """Before the trainer moves on from `version`: rollouts will still refer to `versions`."""

    def stepped(self, model: nn.Module) -> None:
        """An optimizer step was taken."""

    def save(self, folder: Path) -> None:
        """Store in a checkpoint what cannot be recomputed. Called in every process."""

    def load(self, folder: Path, versions: Iterable[int]) -> None:
        """Take back what `save` stored; queued rollouts refer to `versions`.

        Raises: `CheckpointError` if weights that they refer to are not there.
        """

    def score(self, model: nn.Module, rollouts: Rollouts, version: int, **options: Any) -> PolicyScores:
        """Score a batch, each token under the old policy of its own version. Gradient: none.

        Args:
            model: the trainer's, at `version`.
            options: of `score_batch`.
        """
        parts, noted, order = [], [], []
        for drawn_at, part, rows, part_rows in self._by_version(model, rollouts):
            with self.policy(drawn_at, model, version) as scorer:
                scores = score_batch(scorer, part, **options)
            if scores.routes is not None:
                noted.append(scores.routes)
                order.append(rollouts.segments.seq_ids[rows].unique())
            scored_at = self.scored_at(drawn_at, version)
            if scored_at is not None:
                scores = replace(scores, version=torch.full((len(scores.logp),), scored_at))
            parts.append((rows, scores.select(part_rows)))
        scores = PolicyScores.joined(parts, len(rollouts.tokens))
        return replace(scores, routes=Routes.joined(noted).select(torch.cat(order).argsort())) if noted else scores

    @torch.no_grad()
    def logits(
        self,
        model: nn.Module,
        rollouts: Rollouts,
        version: int,
        *,
        half: torch.dtype | None = None,
        replays: bool = False,
    ) -> Float[Tensor, "n v"]:
        """The old policy's tempered logits, for divergences of whole distributions. Gradient: none.

        Memory: all logits of the rollouts that are given: one piece of a step at a time.
        """
        temperature, parts = rollouts.provenance.sampling.temperature, []
        for drawn_at, part, rows, part_rows in self._by_version(model, rollouts):
            with self.policy(drawn_at, model, version) as scorer:
                was_training = scorer.training
                scorer.eval()
                with routed(scorer, part, replays=replays):
                    logits = score(scorer, part, temperature=temperature, half=half).logits
                parts.append((rows, logits[part_rows]))
                scorer.train(was_training)
        logits = torch.cat([x for _, x in parts])
        rows = torch.cat([r for r, _ in parts]).to(logits.device)
        return torch.empty_like(logits).index_copy_(0, rows, logits)

    def _by_version(self, model: nn.Module, rollouts: Rollouts) -> Iterator[tuple[int, Rollouts, Tensor, Tensor]]:
        """Split rollouts by the version of the weights that drew each token.

        Yields: the version, the sequences that have a token of it, the rows of those tokens in the
            batch, and their rows within those sequences. Where the model is sharded, every process yields the
            versions of all of them: the first sequence, and no rows of it, for one that it has no token of.
        """
        versions = rollouts.rollout_version
        present = sorted(anywhere(self.accelerator.unwrap_model(model), versions.unique().tolist()))
        if not self.by_version or len(present) == 1:
            every = torch.arange(len(versions))
            yield present[0], rollouts, every, every
            return
        segments = Segments(rollouts.cu_seqlens)
        for v in present:
            sequences = (segments.sum((versions == v).double()) > 0).nonzero().squeeze(-1)
            sequences = sequences if len(sequences) else torch.tensor([0])
            rows = segments.rows(sequences)
            part_rows = (versions[rows] == v).nonzero().squeeze(-1)
            yield v, rollouts.select(sequences), rows[part_rows], part_rows


class BatchStart(OldPolicy):
    """The trainer as it is when the batch arrives; without extra memory."""

    def policy(self, drawn_at: int, model: nn.Module, version: int) -> AbstractContextManager[nn.Module]:
        return nullcontext(model)

    def scored_at(self, drawn_at: int, version: int) -> int:
        return version


class Snapshots(OldPolicy):
    """The training engine at the weights that drew each token, from weights kept by version.

    The trainer's own weights are copied only when it moves on while rollouts of that version are still to be trained
    on. A response that spans several versions is scored under each, and each token keeps its own score.

    Memory: one copy of the weights per version in flight, in host memory or on disk.
    """

    by_version = True

    def __init__(self, accelerator: Accelerator, folder: Path, *, on_disk: bool = False) -> None:
        super().__init__(accelerator, folder)
        self.on_disk = on_disk
        self.kept: dict[int, Weights | Path] = {}

    def policy(self, drawn_at: int, model: nn.Module, version: int) -> AbstractContextManager[nn.Module]:
        if drawn_at == version:
            return nullcontext(model)
        if drawn_at not in self.kept:
            raise EvidenceError(
                f"rollouts of version {drawn_at} need the training engine's log-probs at those weights, "
                f"and they are not kept (kept: {sorted(self.kept) or 'none'}); choose another "
                "old_policy.from, or start the run over"
            )
        return weights_replaced(self.accelerator, model, self._weights(drawn_at))

    def scored_at(self, drawn_at: int, version: int) -> int:
        return drawn_at

    def retain(self, versions: Iterable[int], model: nn.Module, version: int) -> None:
        inner = self.accelerator.unwrap_model(model)
        retained = anywhere(inner, versions)
        for old in self.kept.keys() - retained:
            snapshot = self.kept.pop(old)
            if isinstance(snapshot, Path) and (self.parts or self.accelerator.is_main_process):
                snapshot.unlink(missing_ok=True)
        if version in retained and version not in self.kept:
            self._keep(version, local_weights(inner, trained=True))

    def save(self, folder: Path) -> None:
        for v in self.kept:
            self.write(self._weights(v), self._file(folder / FOLDER, f"version-{v:08d}"))

    def load(self, folder: Path, versions: Iterable[int]) -> None:
        for v in sorted(set(versions)):
            self._keep(v, read_weights(self._file(folder / FOLDER, f"version-{v:08d}")))

    def _keep(self, version: int, weights: Weights) -> None:
        if not self.on_disk:
            self.kept[version] = {n: w.to("cpu", copy=True) for n, w in weights.items()}
            return
        file = self._file(self.folder, f"version-{version:08d}")
        self.write(weights, file)
        self.accelerator.wait_for_everyone()
        self.kept[version] = file

    def _weights(self, version: int) -> Weights:
        snapshot = self.kept[version]
        return read_weights(snapshot) if isinstance(snapshot, Path) else snapshot


class SecondModel(OldPolicy):
    """A copy of the weights that follows the trainer's whenever the engine takes new ones.

    Exact for what the engine draws now. A batch that waited in a queue while the engine moved on is scored with newer
    weights, and marked `stale`.

    Memory: one copy of the weights, where they are `kept`.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, *, offload: bool = False) -> None:
        super().__init__(accelerator, folder)
        self.offload = offload
        self.weights: dict[str, Tensor] = {}
        self.version = 0

    def policy(self, drawn_at: int, model: nn.Module, version: int) -> AbstractContextManager[nn.Module]:
        assert self.weights, "weights were never published"
        return weights_replaced(self.accelerator, model, self.weights)

    def scored_at(self, drawn_at: int, version: int) -> int:
        return self.version

    def published(self, model: nn.Module, version: int) -> None:
        current = local_weights(self.accelerator.unwrap_model(model), trained=True)
        self.weights = {n: kept(w, offload=self.offload) for n, w in current.items()}
        self.version = version


class Averaged(OldPolicy):
    """An exponential average of the trainer's weights, moved after every update (PPO-EWMA).

        W' = decay W + 1,    mean' = (decay W mean + theta) / W'

    Memory: one copy of the weights, where they are `kept`.

    Reference: Hilton et al., arXiv:2110.00641.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, *, decay: float, offload: bool = False) -> None:
        super().__init__(accelerator, folder)
        self.decay, self.offload, self.weight = decay, offload, 1.0
        self.mean: dict[str, Tensor] = {}

    def policy(self, drawn_at: int, model: nn.Module, version: int) -> AbstractContextManager[nn.Module]:
        return weights_replaced(self.accelerator, model, self.mean)

    def scored_at(self, drawn_at: int, version: int) -> None:
        return None

    def published(self, model: nn.Module, version: int) -> None:
        if not self.mean:  # the average begins where training does
            current = local_weights(self.accelerator.unwrap_model(model), trained=True)
            self.mean = {n: kept(w, offload=self.offload) for n, w in current.items()}

    def stepped(self, model: nn.Module) -> None:
        total = self.weight
        for name, new in local_weights(self.accelerator.unwrap_model(model), trained=True).items():
            mean, total = ewma_update(self.mean[name].to(new.device), new, weight=self.weight, decay=self.decay)
            self.mean[name] = mean.cpu() if self.offload else mean
        self.weight = total

    def save(self, folder: Path) -> None:
        total = torch.tensor(self.weight, dtype=torch.float64)
        self.write({**self.mean, "/weight": total}, self._file(folder / FOLDER, "mean"))

    def load(self, folder: Path, versions: Iterable[int]) -> None:
        self.mean = dict(read_weights(self._file(folder / FOLDER, "mean")))
        self.weight = float(self.mean.pop("/weight"))


def make_old_policy(settings: recipe.OldPolicySettings, accelerator: Accelerator, folder: Path) -> OldPolicy:
    """The old policy of a recipe's `[old_policy]`; for anchors (`rollout`, `interpolated`) the trainer's own scores."""
    if settings.source == "sampling":
        return Snapshots(accelerator, folder, on_disk=settings.snapshots == "disk")
    if settings.source == "second_model":
        return SecondModel(accelerator, folder, offload=settings.offload)
    if settings.source == "ewma":
        return Averaged(accelerator, folder, decay=settings.decay, offload=settings.offload)
    return BatchStart(accelerator, folder)


def write_weights(weights: Weights, file: Path) -> None:
    """Write weights, whole or not at all. Raises: `RecordError` if they cannot be written."""
    flat = {n: w.detach().cpu().contiguous() for n, w in weights.items()}
    try:
        write_atomically(file, lambda tmp: save_file(flat, tmp))
    except SafetensorError as e:  # wraps a full disk
        raise RecordError(f"cannot write {file}: {e}; free disk space, or set old_policy.snapshots") from e


def read_weights(file: Path) -> Weights:
    """Read weights back. Raises: `CheckpointError` naming the file."""
    try:
        check_file(file)
        return load_file(file)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(
            f"weights of an earlier version cannot be read from {file} ({e}); rollouts refer to them: "
            "resume from another checkpoint, or start the arm over"
        ) from e
