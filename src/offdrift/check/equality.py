"""Test that an engine repeats its results bit by bit, and find the first layer in which two engines differ.

`determinism` repeats what a check has drawn and scored: once more, and in smaller batches. `bisect` runs both engines
along one response, and compares the outputs of their modules in the order in which the training engine computes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.rescore import rescored
from offdrift.engines.score import score
from offdrift.engines.vllm.taps import runner_of
from offdrift.errors import NotOfferedError, OffdriftError
from offdrift.records.rollouts import Rollouts

ALONE = 8
"""Sequences that are scored alone, and the largest of the small batches that are drawn."""

INVARIANT = {
    "transformers": "batch_invariant=true",
    "vllm": "VLLM_BATCH_INVARIANT=1 in the environment, which vLLM has for GPUs alone",
    "vllm server": "a server started with VLLM_BATCH_INVARIANT=1, which vLLM has for GPUs alone",
    "sglang server": "a server started with --enable-deterministic-inference",
    "server": "whatever this server calls its deterministic or batch-invariant mode",
}
"""Setting that takes the batch out of an engine's numbers."""


def repeated(first: Rollouts, second: Rollouts) -> dict[str, float]:
    """Two repetitions of one draw: share of identical responses, and largest |log-ratio|.

    Log-probs are compared where both draws have the same tokens up to and including this one.
    """

    def padded(rollouts: Rollouts, values: Tensor, fill: float | int) -> Tensor:
        parts = list(values.split(rollouts.lengths.tolist()))
        return pad_sequence(parts, batch_first=True, padding_value=fill)

    a, b = padded(first, first.tokens, -1), padded(second, second.tokens, -2)
    x, y = padded(first, first.logp_rollout, 0.0), padded(second, second.logp_rollout, 0.0)
    width = min(a.shape[1], b.shape[1])
    same = (a[:, :width] == b[:, :width]).cumprod(1).bool()
    apart = (x[:, :width] - y[:, :width]).abs()[same]
    identical = same.sum(1) == first.lengths
    return {
        "sequences": float(len(identical)),
        "same_tokens_frac": float(identical.double().mean()),
        "compared_tokens": float(len(apart)),
        "abs_log_ratio_max": float(apart.max()) if len(apart) else torch.nan,
    }


def determinism(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> dict[str, Any]:
    """For both engines: "deterministic" or not, by which setting, and what was compared.

    The rollout engine draws its prompts again with the same seeds, all of them (`repeat`) and the first 1, 2 and
    `ALONE` (`batch`); the training engine scores again, all at once and each of `ALONE` sequences alone. An engine is
    deterministic if every token and every bit of every log-prob stays: in what was tried, which proves nothing of other
    batches.
    """
    drawn, engine = bench.rollouts(rollout), bench.engine(rollout)
    prompts, sampling, options = bench.prompts, bench.sampling, {"seed": bench.seed}
    again = repeated(drawn, engine.generate(prompts, sampling, **options))
    smaller, counts = [], [count for count in (1, 2, ALONE) if count < len(prompts)]
    for count in counts:
        part = engine.generate(prompts[:count], sampling, **options)
        smaller.append(repeated(drawn.select(torch.arange(count)), part))
    logp = bench.score(drawn, train).logp
    model = bench.train_model(train)
    some = drawn.select(torch.arange(min(ALONE, drawn.num_sequences)))
    alone = [rescored(model, some.select(torch.tensor([i]))).logp for i in range(some.num_sequences)]
    scores = {
        "repeat": {"abs_log_ratio_max": float((bench.score(drawn, train).logp - logp).abs().max())},
        "batch": {"abs_log_ratio_max": float((torch.cat(alone) - logp[: len(some.tokens)]).abs().max())},
    }
    return {
        "rollout": _concluded(rollout, {"repeat": again, "batch": _worst(smaller)}, [*counts, len(prompts)], engine),
        "train": _concluded(train, scores, [1, drawn.num_sequences]),
    }


def _worst(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The lowest share of identical responses and the largest difference of several comparisons."""
    if not parts:
        return {}
    return {
        "same_tokens_frac": min(part["same_tokens_frac"] for part in parts),
        "abs_log_ratio_max": max(part["abs_log_ratio_max"] for part in parts),
    }


def _concluded(
    spec: EngineSpec, compared: dict[str, dict[str, float]], sizes: Sequence[int], engine: Any = None
) -> dict[str, Any]:
    """One engine's row: yes or no, which setting, and a sentence."""
    changes = {
        what: numbers["abs_log_ratio_max"] != 0 or numbers.get("same_tokens_frac", 1.0) < 1
        for what, numbers in compared.items()
        if numbers
    }
    kind = spec.kind
    if kind == "openai":
        software = getattr(getattr(engine, "served", None), "software", "")
        kind = f"{software} server" if f"{software} server" in INVARIANT else "server"
    is_set = spec.options.get("batch_invariant") is True or (
        kind == "vllm" and os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    )
    yes = not any(changes.values())
    tried = f"in batches of {', '.join(map(str, dict.fromkeys(sizes)))}"
    worst = max((n["abs_log_ratio_max"] for n in compared.values() if n), default=torch.nan)
    if yes:
        setting = INVARIANT[kind].split(",")[0] if is_set else "as it is"
        words = f"yes, {setting}, {tried}"
    elif changes["repeat"]:
        setting = INVARIANT[kind]
        words = f"no: the same batch again changes numbers by up to {worst:.3g} nat; needs {setting}"
    else:
        setting = INVARIANT[kind]
        if kind == "transformers":
            setting = str(spec.with_(batch_invariant=True))
        words = f"no: repeats itself, but batches change numbers by up to {worst:.3g} nat; needs {setting}"
    return {"engine": str(spec), "deterministic": yes, "setting": setting, "text": words, **compared}


class Outputs:
    """Outputs of a model's modules, by name, in the order in which they were first computed; a part per call."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self.inputs: dict[str, list[Tensor]] = {}

    def last(self, name: str, count: int, *, inputs: bool = False) -> Float[Tensor, "n d"] | None:
        """A module's output, or input, at the last `count` places of it, float64; None where it has fewer."""
        parts = (self.inputs if inputs else self.parts).get(name)
        rows = torch.cat(parts) if parts else torch.empty(0, 0)
        return rows[-count:] if len(rows) >= count else None


@contextmanager
def outputs_of(model: nn.Module, row: int | None = None) -> Iterator[Outputs]:
    """Note what every module of a model puts out meanwhile.

    Args:
        row: of the batch, where there is one; None: all places of a call belong to one sequence, in their order.
    """
    listener = OutputListener(row)
    handles = [model.register_forward_pre_hook(listener.begin, with_kwargs=True)]
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(partial(listener.note, HEAD if is_head(module) else name)))
    try:
        yield listener.outputs
    finally:
        for handle in handles:
            handle.remove()


class OutputListener:
    """Hooks that note inputs and outputs of modules as numbers per place of a sequence."""

    def __init__(self, row: int | None) -> None:
        self.row, self.outputs = row, Outputs()
        self.rows, self.columns, self.dimensions = 1, 1, 2

    def begin(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Take the shape of a batch from its token ids."""
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if isinstance(ids, Tensor):
            # vLLM puts the tokens of all requests into one dimension.
            self.rows, self.columns = (1, len(ids)) if ids.ndim == 1 else ids.shape
            self.dimensions = ids.ndim

    def note(self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Add what a module has read and put out."""
        read = tuple(x for x in arguments if isinstance(x, Tensor))[:1]
        for parts, value in ((self.outputs.parts, output), (self.outputs.inputs, read)):
            if (x := self.places(_numbers_of(module, value))) is not None:
                parts.setdefault(name, []).append(x)

    def places(self, x: Tensor | None) -> Tensor | None:
        """Numbers per place of the sequence, [places, d]; None where a module has none."""
        if x is None:
            return None
        if self.row is None:
            x = x[0] if self.dimensions == 2 and x.ndim > 2 and len(x) == 1 else x
        else:  # [b, t, ...], or all places of all sequences in one dimension
            b, t = self.rows, self.columns
            if len(x) == b * t and x.shape[:2] != (b, t):
                x = x.reshape(b, t, *x.shape[1:])
            if x.ndim < 3 or len(x) != b:
                return None
            x = x[self.row]
        return x.reshape(len(x), -1).double().cpu()


def _numbers_of(module: nn.Module, value: Any) -> Tensor | None:
    """Output of a module as transformers' module of its name has it; None if it has no floating-point numbers."""
    value = value.logits if hasattr(value, "logits") else value
    tensors = [x for x in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(x, Tensor)]
    if not tensors or not tensors[0].is_floating_point():
        return None
    # Gemma's embedding scales its rows in transformers; vLLM's model does that behind it.
    x = tensors[0].detach() / getattr(module, "embed_scale", 1)
    if len(tensors) == 2 and type(module).__name__.endswith("DecoderLayer") and tensors[1].shape == x.shape:
        x = x.float() + tensors[1].float()  # vLLM adds the residual stream in the next layer
    return x


MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections that vLLM multiplies as one matrix, whose outputs stand side by side in this order."""


def split_merged(theirs: Outputs, ours: Outputs) -> None:
    """Add outputs of the trainer's projections to those of an engine that merges them, by the trainer's widths.

        qkv_proj(x) = [q_proj(x), k_proj(x), v_proj(x)]

    A merged projection with other widths than the trainer's (padded, or sharded over devices) is left as it is.
    """
    for name, parts in list(theirs.parts.items()):
        last = name.rpartition(".")[2]
        members = [name.removesuffix(last) + member for member in MERGED.get(last, ())]
        if not members or not all(member in ours.parts for member in members):
            continue
        widths = [ours.parts[member][0].shape[1] for member in members]
        if parts[0].shape[1] != sum(widths):
            continue
        for i, member in enumerate(members):
            theirs.parts[member] = [x.split(widths, dim=1)[i] for x in parts]
            theirs.inputs[member] = theirs.inputs.get(name, [])


HEAD = "lm_head"
"""Name of the output head in transformers."""


def is_head(module: nn.Module) -> bool:
    """Whether this is vLLM's logits processor where it does nothing but multiply by the output head, which is never
    called as a module there.

    One that also scales or caps its logits has no module beside it in transformers.
    """
    plain = getattr(module, "soft_cap", 0) is None and getattr(module, "scale", None) == 1
    return plain and type(module).__name__ == "LogitsProcessor"


@dataclass(frozen=True)
class PairedOutputs:
    """Outputs of both engines for one response, at every place that both computed."""

    ours: Outputs
    theirs: Outputs
    response: Rollouts
    widest: int
    """Most tokens of a response that the trainer scored beside it, with its context."""

    def both(self, name: str, *, inputs: bool = False) -> tuple[Tensor, Tensor] | None:
        """Numbers of trainer and rollout engine; None for a module that cannot be compared."""
        count = len(self.response.tokens)
        # Responses begin in one column: their predictions are the first of the last `widest + 1` columns, behind the
        # rest of the prompt, which a head does not read and a prefix cache leaves out.
        for before in (len(self.response.prompt_tokens) - 1, 0):
            x = self.ours.last(name, before + self.widest + 1, inputs=inputs)
            y = self.theirs.last(name, before + count, inputs=inputs)
            if x is not None and y is not None:
                x = x[: len(y)]
                break
        else:
            return None
        if len(self.ours.parts[name]) > 1 or x.shape[1] != y.shape[1]:
            return None
        # vLLM's act_fn also multiplies by the gate: of the same name, and another function of a wider input.
        read = (self.ours.inputs.get(name), self.theirs.inputs.get(name))
        widths = {parts[0].shape[1] for parts in read if parts}
        return None if len(widths) > 1 else (x, y)

    def difference(self, name: str) -> dict[str, float]:
        """Largest |difference|, and its norm over that of the trainer's output; empty if it cannot be compared."""
        if (pair := self.both(name)) is None:
            return {}
        difference, size = pair[0] - pair[1], float(pair[0].norm())
        relative = float(difference.norm()) / size if size else 0.0
        return {"abs_max": float(difference.abs().max()), "relative": relative}


@torch.no_grad()
def bisect(bench: Bench, rollout: EngineSpec, train: EngineSpec) -> dict[str, Any]:
    """The first module whose output differs between the engines, and by how much every module differs.

    The rollout engine follows one response as it draws, alone and from its cache; the training engine scores it whole,
    padded among others. Outputs are compared at every place of prompt and response that both compute, where both
    engines have a module of one name and as many numbers per token, in and out. A module that contains others comes
    after them, so that the first one is the smallest that shows the difference.

    Returns: `first` (None where nothing differs), whose `within` is the module around it where its input differs
        already: then something between modules does it, such as the attention itself. And `modules`, in order: name,
        largest |difference|, and the norm of the difference over the norm of the training engine's output.

    Raises: `NotOfferedError` for an engine that does not show its layers, or cannot follow tokens.
    """
    engine: Any = bench.engine(rollout)
    if rollout.kind == "openai" or not hasattr(engine, "rescore"):
        raise NotOfferedError("a server does not show its layers; bisect the same engine in this process")
    inner: nn.Module = runner_of(engine.llm, "model").model if rollout.kind == "vllm" else engine.model
    drawn = bench.rollouts(rollout, sampling=bench.sampling.unfiltered)
    longest = int(drawn.lengths.argmax())
    one = drawn.select(torch.tensor([longest]))
    others = [i for i in range(drawn.num_sequences) if i != longest][: ALONE - 1]
    together = drawn.select(torch.tensor([longest, *others])).with_(support=None)
    with outputs_of(inner) as theirs:
        engine.rescore(one, evidence="sampled")
    model = bench.train_model(train)
    with outputs_of(model, row=0) as ours:
        score(model, together, temperature=bench.sampling.temperature)
    split_merged(theirs, ours)
    pairs = PairedOutputs(ours, theirs, one, widest=int(together.lengths_with_context.max()))
    modules: list[dict[str, Any]] = [
        {"module": name, **sizes} for name in ours.parts if (sizes := pairs.difference(name))
    ]
    if not modules:
        raise NotOfferedError("the engines have no module of one name in common that can be compared")
    first = next((m for m in modules if m["abs_max"] != 0), None)
    if first is not None:
        read = pairs.both(first["module"], inputs=True)
        outer = first["module"].rpartition(".")[0]
        first = {**first, "within": outer if read is not None and not torch.equal(*read) else first["module"]}
    limit = rounding_limit(rollout.dtype, train.dtype)
    return {
        "rollout": str(rollout),
        "train": str(train),
        "tokens": len(one.tokens),
        "first": first,
        "rounding_limit": limit,
        "beyond_rounding": beyond_rounding(modules, limit, model),
        "modules": modules,
    }


def beyond_rounding(
    modules: Sequence[Mapping[str, Any]], limit: float | None, model: nn.Module
) -> dict[str, Any] | None:
    """The first module that differs by more than the limit; a tied head with the embedding that it is."""
    beyond = next((dict(m) for m in modules if limit is not None and m["relative"] > limit), None)
    if beyond is not None and beyond["module"] == HEAD and tied(model):
        beyond["tied_to"] = "model.embed_tokens"  # whose other rows differ, which these tokens do not read
    return beyond


def tied(model: nn.Module) -> bool:
    """Whether the output head of a model of transformers is its embedding."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "tie_word_embeddings", False) is True


def rounding_limit(*dtypes: str) -> float | None:
    """Relative difference of a module's output above which it is not rounding: another operand.

        100 eps of the coarser dtype: 1.2e-5 in float32 (measured between engines: below 1e-6), 0.1 in float16

    Returns: None where that tells nothing: bfloat16, whose eps is 0.0078, and a dtype that is not known.
    """
    known = [getattr(torch, dtype, None) for dtype in dtypes]
    if not all(isinstance(dtype, torch.dtype) for dtype in known):
        return None
    limit = 100 * max(torch.finfo(dtype).eps for dtype in known if dtype is not None)
    return limit if limit < 0.5 else None


def modules_agree(bisected: Mapping[str, Any]) -> bool:
    """Whether a bisection found no module that differs by more than rounding, the output head included, in a dtype
    where that tells something."""
    head = any(str(m["module"]).endswith("lm_head") for m in bisected.get("modules", ()))
    return head and bisected.get("rounding_limit") is not None and bisected.get("beyond_rounding") is None


def attempted(measure: Any, *arguments: Any) -> dict[str, Any]:
    """A measurement, or why it failed, so that an engine that raises, whatever it throws, costs nothing else."""
    try:
        return measure(*arguments)
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0][:500]
        return {"why": why if isinstance(error, OffdriftError) else f"{type(error).__name__}: {why}"}
