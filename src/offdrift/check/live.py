"""The live synchronization check: does a running server hold the weights of this checkpoint?

The server draws tokens at temperature 1, and greedy ones, which it is then made to read again. transformers reads the
same tokens with the checkpoint's weights. The difference D is held against the one D' that the server's precision makes
in transformers itself (`check.precision`); earlier checkpoints are told apart by the server's position between two of
them (`check.tokens`), and a part of the weights that stayed behind by what explains it (`check.live_parts`).

Three results: the server holds the checkpoint, it does not, or it cannot be told and what to measure is said.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from offdrift.check.bench import DTYPES, SERVERS, Bench, EngineSpec
from offdrift.check.check import Prompt, encoded
from offdrift.check.checkpoint_folder import checkpoint_folder, step_of
from offdrift.check.ends import ends_of
from offdrift.check.factors.base import few
from offdrift.check.live_parts import StalePart, part_of_other
from offdrift.check.precision import SEQUENCES, Explained, compared, multiple_of, not_compared
from offdrift.check.tokens import Position, TokensRead, misfit, position, prompts_of_tokens, read_by
from offdrift.engines import make_engine
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.engines.sync_units import Units
from offdrift.errors import BadValueError, EngineError
from offdrift.judge import Rules, load_rules
from offdrift.models import load_model
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import Rollouts

HERE = Position(math.nan, math.nan)
"""Of the checkpoint itself."""
AGAIN = 4
"""Sequences that are read once more at the end."""

Watch = Callable[[str, int, int], object]


def server_spec(text: str) -> EngineSpec:
    """`openai:URL`, `vllm-server:URL` or `sglang:URL`, with options behind commas.

    Raises: `EngineError` for anything that is not a server's address.

    Example:
        >>> str(server_spec("sglang:http://127.0.0.1:30000"))
        'openai:http://127.0.0.1:30000,dtype=auto,api=sglang'
    """
    kind, colon, rest = text.strip().partition(":")
    if kind not in SERVERS or not (colon and rest):
        raise EngineError(
            f"--rollout {text!r} is not a running server, which --checkpoint is compared with; write one of "
            + ", ".join(f"{name}:URL" for name in SERVERS)
        )
    return EngineSpec.parse(f"openai:{rest}").with_(**SERVERS[kind])


def named_alone(checkpoint: Path | None, besides: Sequence[str]) -> Path:
    """The folder to compare a server with.

    Args:
        besides: options of a check of two engines that were set, too.

    Raises: `BadValueError` without a folder, or with such an option.
    """
    if checkpoint is None:
        raise BadValueError("--earlier goes with --checkpoint FOLDER, of the step that the server should hold")
    if besides:
        raise BadValueError(
            "--checkpoint compares a running server with one folder, on draws at temperature 1; only a check of two "
            f"engines takes {', '.join(besides)}: leave that out, or leave out --checkpoint"
        )
    return checkpoint


@dataclass(frozen=True)
class Heard:
    """Tokens with the server's log-probs."""

    drawn: Rollouts
    """Drawn at temperature 1."""
    greedy: Rollouts
    """The likeliest tokens, with log-probs that say nothing."""
    read: Rollouts | None
    """The greedy tokens, as the server reads them."""
    why: str
    """Why it read none."""
    label: str | None
    """What the server calls its weights."""

    @property
    def batches(self) -> tuple[Rollouts, ...]:
        """Those with log-probs at temperature 1."""
        return (self.drawn,) if self.read is None else (self.drawn, self.read)

    @property
    def served(self) -> Float[Tensor, " n"]:
        """log mu of all of them."""
        return torch.cat([b.logp_rollout for b in self.batches])

    @property
    def groups(self) -> Int[Tensor, " n"]:
        """The prompt of each of their tokens."""
        return prompts_of_tokens(self.batches)


@dataclass(frozen=True)
class CheckpointFit:
    """A checkpoint that the server may hold."""

    folder: str
    step: int | None
    misfit: float
    """Mean of (log pi - log mu)^2 / 2, nat per token."""
    fits: bool | None = None
    """Whether precision explains the difference; None if that is not known."""
    position: Position = HERE
    """Of the server between the checkpoint to check (0) and this one (1)."""
    same: bool = False
    """Whether its weights are those of the checkpoint to check, as the server stores them."""

    def as_dict(self) -> dict[str, Any]:
        """Entry of `check.json`."""
        names = ("folder", "step", "misfit", "fits", "same")
        place = {"position": self.position.place, "position_se": self.position.error}
        return {name: getattr(self, name) for name in names} | place


@dataclass(frozen=True)
class Measurements:
    """Measurements: of the checkpoint, of the earlier ones, and of parts of both."""

    checkpoint: CheckpointFit
    earlier: tuple[CheckpointFit, ...]
    precision: tuple[Explained, ...]
    """Of the drawn tokens, and of those that the server read."""
    reading: TokensRead
    """Every token as the checkpoint reads it."""
    greedy: float
    """Share of the server's greedy tokens that are the checkpoint's likeliest."""
    part: StalePart | None = None
    part_base: CheckpointFit | None = None
    """The checkpoint that the rest of the weights is of."""
    moved: bool = False
    """Whether the server read tokens otherwise at the end than at the beginning."""
    limits: Mapping[str, float] = field(default_factory=lambda: load_rules().limits)
    """Thresholds by name (`Rules.limits`)."""

    @property
    def others(self) -> list[CheckpointFit]:
        """Earlier checkpoints with other weights, the one that fits best first."""
        return sorted((c for c in self.earlier if not c.same), key=lambda c: c.misfit)

    @property
    def few_differ(self) -> bool:
        """Whether precision does not explain the mean, by so few tokens that it may be a matter of chance."""
        return self.checkpoint.fits is True and any(p.ratio > p.multiple for p in self.precision)

    @property
    def settled(self) -> bool:
        """Whether the server holds one of the checkpoints, or there is no other to take parts from."""
        if not self.others:
            return True
        if self.checkpoint.fits is False:
            return any(c.fits for c in self.others)
        place = self.others[0].position
        near, z = self.limits["sync_near"], self.limits["sync_z"]
        return not self.few_differ and not (place.above(near, z) and place.below(1 - near, z))


class LiveCheck:
    """A server and the checkpoint that it should hold, as far as they were compared.

    Args:
        rollout: of `server_spec`.
        checkpoint: the folder of the step that the server should hold.
        earlier: folders of steps before it, the newest first.
        prompts: texts or conversations.
        max_tokens: of each response.
        device: where transformers reads; default: the CPU.
        rules: by which the result is judged; default: the built-in ones.
        watch: called before each stage.
    """

    def __init__(
        self,
        rollout: EngineSpec,
        checkpoint: Path,
        *,
        earlier: Sequence[Path] = (),
        prompts: Sequence[Prompt],
        chat: bool = True,
        max_tokens: int = 64,
        seed: int = 0,
        device: str | None = None,
        rules: Rules | None = None,
        watch: Watch = lambda stage, done, total: None,
    ) -> None:
        self.rules = rules or load_rules()
        self.limits = self.rules.limits
        self.rollout, self.seed, self.device, self.watch = rollout, seed, device, watch
        self.folders = [checkpoint_folder(folder) for folder in (checkpoint, *earlier)]
        self.texts, self.chat, self.max_tokens = prompts, chat, max_tokens
        self.stages, self.done = 5 + len(earlier), 0
        self.started = time.monotonic()

    def run(self) -> tuple[Heard, Measurements]:
        """Ask the server and compare.

        Raises: `EngineError` if the server cannot be asked; `RecipeError` if a folder cannot be loaded.
        """
        self._tell("loading the checkpoint")
        model, tokenizer = self._loaded(self.folders[0])
        prompts = encoded(self.texts, tokenizer, vocab_size=model.config.get_text_config().vocab_size, chat=self.chat)
        with Bench(model, tokenizer, prompts, sampling=Sampling(self.max_tokens), seed=self.seed) as bench:
            server: Any = bench.engine(self.rollout)
            heard = self._heard(server, prompts, ends_of(model, tokenizer))
            dtype = DTYPES.get(server.dtype)
            measured = self.compared(model, heard, dtype)
            self._tell("asking the server once more")
            return heard, replace(measured, moved=_moved(server, heard, measured.precision))

    def _loaded(self, folder: Path) -> tuple[Any, Any]:
        model, tokenizer = load_model(str(folder), seed=0)
        return nn.Module.to(model, self.device or "cpu"), tokenizer

    def _tell(self, stage: str) -> None:
        self.watch(stage, self.done, self.stages)
        self.done += 1

    def _heard(self, server: OpenAIEngine, prompts: Sequence[Sequence[int]], stop: tuple[int, ...]) -> Heard:
        """Draw tokens, greedy ones too, and let the server read those again."""
        self._tell("drawing from the server")
        if server.asleep():
            raise EngineError(
                f"{server.url} sleeps, as beside a trainer on the same device; check while responses are drawn, or "
                "wake it: POST /wake_up"
            )
        longest, most = max(map(len, prompts)), server.served.max_model_len
        # A token is added behind what is read.
        length = self.max_tokens if most is None else max(1, min(self.max_tokens, most - longest - 1))
        plain = Sampling(length, stop_token_ids=stop)
        sampled = server.generate(prompts, plain, seed=self.seed)
        greedy = server.generate(prompts, replace(plain, top_k=1), seed=self.seed)
        read, why = None, ""
        try:
            read = server.forced(greedy)
        except EngineError as error:
            why = str(error)
        return Heard(sampled, greedy, read, why, server.weight_label)

    def compared(self, model: nn.Module, heard: Heard, dtype: str | None) -> Measurements:
        """The checkpoint and every earlier one against the server, and a part if the weights are mixed.

        Args:
            model: the checkpoint's in float32; its weights are rounded to the server's dtype.
            dtype: the server's; None if it is not known.
        """
        half = None if dtype in (None, "float32") else getattr(torch, dtype)
        why = not_compared(heard.drawn, dtype)
        self._tell("what precision explains")
        rounded(model, half)  # as the server stores them
        here = read_by(model, heard.batches)
        noise = [] if why else [_noise(model, batch, here, at, dtype) for batch, at in _places(heard)]
        precision = (
            tuple(
                _explained(here.logp[at], batch, n, dtype, self.limits)
                for (batch, at), n in zip(_places(heard), noise, strict=True)
            )
            if not why
            else (Explained(heard.drawn.provenance.dtype, why, limits=self.limits),)
        )
        folder = self.folders[0]
        fits = None if why else not any(p.exceeded for p in precision)
        checkpoint = CheckpointFit(str(folder), step_of(folder), misfit(here.logp, heard.served), fits)
        earlier = tuple(
            self._earlier(folder, here, heard, noise, half=half, dtype=dtype) for folder in self.folders[1:]
        )
        greedy = float((read_by(model, [heard.greedy]).likeliest == heard.greedy.tokens).double().mean())
        measured = Measurements(checkpoint, earlier, precision, here, greedy, limits=self.limits)
        return self._with_part(model, measured, heard, half)

    def _earlier(
        self,
        folder: Path,
        here: TokensRead,
        heard: Heard,
        noise: Sequence[Tensor],
        half: torch.dtype | None,
        dtype: str | None,
    ) -> CheckpointFit:
        """An earlier checkpoint against the server."""
        self._tell(f"reading with {folder.name}")
        model, _ = self._loaded(folder)
        rounded(model, half)
        logp = read_by(model, heard.batches).logp
        fits = None
        if noise:
            pairs = zip(_places(heard), noise, strict=True)
            fits = not any(_explained(logp[at], batch, n, dtype, self.limits).exceeded for (batch, at), n in pairs)
        place = position(here, logp, heard.served, heard.groups)
        same = math.isnan(place.place)
        return CheckpointFit(
            str(folder), step_of(folder), misfit(logp, heard.served), fits=fits, position=place, same=same
        )

    def _with_part(
        self, model: nn.Module, measured: Measurements, heard: Heard, half: torch.dtype | None
    ) -> Measurements:
        """Look for a part that stayed behind where the server holds neither the checkpoint nor an earlier one."""
        if measured.settled:
            return measured
        nearest = measured.others[0]
        self._tell("which part stayed behind")
        other, _ = self._loaded(Path(nearest.folder))
        rounded(other, half)
        tried = []
        for base, near, far in ((measured.checkpoint, model, other), (nearest, other, model)):
            weights = [w.detach() for w in Units.of(far).weights]
            part = part_of_other(near, weights, heard.batches, heard.served, left=self.limits["sync_explained"])
            tried += [(part, base)] if part is not None else []
        part, base = min(tried, key=lambda row: row[0].left, default=(None, None))
        return replace(measured, part=part, part_base=base)


@torch.no_grad()
def rounded(model: nn.Module, half: torch.dtype | None) -> None:
    """Round the weights to bfloat16 or float16 in place; computing stays in float32."""
    for weight in model.parameters() if half is not None else ():
        if weight.is_floating_point():
            weight.copy_(weight.to(half))


def _places(heard: Heard) -> list[tuple[Rollouts, slice]]:
    """Every batch, and where its first sequences lie in what is read of all batches."""
    places, start = [], 0
    for batch in heard.batches:
        first = few(batch, sequences=SEQUENCES, v=1)
        places.append((first, slice(start, start + len(first.tokens))))
        start += len(batch.tokens)
    return places


def _noise(model: nn.Module, batch: Rollouts, here: TokensRead, at: slice, dtype: str | None) -> Float[Tensor, " n"]:
    """D' of each token: transformers at the server's dtype against itself in float32, nat."""
    engine: Any = make_engine("transformers", model, dtype=dtype)
    try:
        again = engine.rescore(batch, evidence="sampled")
    finally:
        engine.close()
    return (again.logp_rollout - here.logp[at]).double().square() / 2


def _explained(
    logp: Float[Tensor, " n"], batch: Rollouts, noise: Tensor, dtype: str | None, limits: Mapping[str, float]
) -> Explained:
    """D of a checkpoint beside D'."""
    assert dtype is not None
    here = (logp - batch.logp_rollout).double().square() / 2
    multiple = multiple_of(dtype, limits)
    return compared(here, noise, batch.segments, dtype=dtype, multiple=multiple, exact=False, limits=limits)


def _moved(server: OpenAIEngine, heard: Heard, precision: Sequence[Explained]) -> bool:
    """Whether the server reads tokens otherwise than it did at the beginning, by more than precision."""
    if heard.read is None or len(precision) < 2:
        return False
    first = heard.read.select(torch.arange(min(AGAIN, heard.read.num_sequences)))
    with suppress(EngineError):
        again = server.forced(first)
        return misfit(again.logp_rollout, first.logp_rollout) > precision[1].multiple * precision[1].explained
    return True  # it read them a moment ago: restarted, or given other weights
