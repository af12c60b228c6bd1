"""Responses in progress on vLLM in this process. Nothing here imports vLLM.

Requests go straight to the scheduler, so that nothing runs between two steps and weights can change there. A
response that is to be read again is aborted and added anew with its tokens so far behind its prompt, as if it came from
another engine. It then needs another seed: vLLM's random stream of a request starts afresh, and would repeat itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from offdrift.engines.generate import Generation, Request, request_seed
from offdrift.engines.isolation import preserve_host_state
from offdrift.engines.stream import Response, Stream
from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import EvidenceKind


class VLLMStream(Stream):
    """See `engines.stream`. A step is one of vLLM's; it may give a response no token, where many wait for room.

    Raises: `EngineError` if the engine cuts prompts into chunks, beside which it cannot draw from seeds on CPUs, or
        prepares the next step while weights may change.
    """

    def __init__(self, engine: Any, sampling: Sampling, evidence: EvidenceKind) -> None:
        if engine.chunk is not None:
            raise EngineError(
                f"max_num_batched_tokens = {engine.chunk}, and vLLM cannot draw from seeds beside a prompt in chunks "
                "on CPUs; leave max_num_batched_tokens out to open a stream"
            )
        if engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling:
            raise EngineError(
                f"engine {engine.name!r} schedules asynchronously, so that a token may be drawn before a weight update "
                "and delivered after it; construct it with async_scheduling=False to open a stream"
            )
        super().__init__(engine, sampling, evidence)
        self._vllm = engine  # a VLLMEngine, whose module imports this one
        self._number = itertools.count()
        self._names: dict[str, str] = {}  # of the request, by key of the response

    def _start(self, responses: Sequence[Response]) -> None:
        engine = self._vllm
        for response in responses:
            job, count = response.job, len(response.tokens)
            text = [*job.prompt, *response.tokens]
            room = replace(self.sampling, max_tokens=self.sampling.max_tokens - count)
            (params,) = engine.params_of(Request([text], room, self.evidence))
            params.seed = request_seed(job.seed, count)
            params.output_kind = type(params.output_kind).DELTA
            name = f"stream-{next(self._number)}"
            with preserve_host_state(compiling=engine.compiled):
                engine.llm.llm_engine.add_request(name, engine.inputs([text])[0], params)
            self._names[job.key] = name

    def _forget(self, responses: Sequence[Response]) -> None:
        names = [name for r in responses if (name := self._names.pop(r.job.key, None)) is not None]
        if names:
            self._vllm.llm.llm_engine.abort_request(names)

    def _advance(self, steps: int) -> list[tuple[list[Response], Generation]]:
        engine, core = self._vllm, self._vllm.llm.llm_engine
        of_name = {name: self._responses[key] for key, name in self._names.items()}
        outputs: dict[str, SimpleNamespace] = {}  # tokens and flat log-probs of all steps, by request
        with preserve_host_state(compiling=engine.compiled), engine.taps(self.evidence, self.sampling) as taps:
            for _ in range(steps):
                for answer in core.step():
                    output, name = answer.outputs[0], answer.request_id
                    if not output.token_ids:
                        continue
                    for token in output.token_ids:
                        of_name[name].take(token, self.sampling)
                    response_output = outputs.setdefault(
                        name, SimpleNamespace(token_ids=[], logprobs=SimpleNamespace())
                    )
                    response_output.token_ids += output.token_ids
                    for part in ("logprobs", "token_ids"):
                        setattr(
                            response_output.logprobs,
                            part,
                            getattr(response_output.logprobs, part, []) + getattr(output.logprobs, part),
                        )
                    self._check_end(answer, of_name[name])
                if not core.has_unfinished_requests():
                    break
        if not outputs:
            return []
        draws = engine.draws_of(list(outputs), list(outputs.values()), self.evidence, taps, self.sampling)
        return [([of_name[name] for name in outputs], draws)]

    def _check_end(self, answer: Any, response: Response) -> None:
        """Note that vLLM is done with a response, and let go of the log-probs it keeps of one that goes on."""
        if answer.finished != (response.finish is not None):
            raise EngineError(
                f"vLLM and the stream disagree whether response {response.job.key!r} has ended at "
                f"{len(response.tokens)} tokens; this vLLM version is not supported"
            )
        processor = self._vllm.llm.llm_engine.output_processor
        if answer.finished:
            del self._names[response.job.key]
            self._vllm.cached_tokens += answer.num_cached_tokens or 0
        else:
            (name,) = processor.external_req_ids[answer.request_id]
            processor.request_states[name].logprobs_processor.logprobs = type(answer.outputs[0].logprobs)()
