"""The rollout workers of a run: Ray actors, made, replaced and ended by the driver.

Ray is started inside the run, on loopback, unless RAY_ADDRESS names a cluster. Actors are never restarted by Ray
itself: one that came back would have the checkpoint's weights and no record of what it was drawing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch import Tensor

from offdrift.engines.cluster import join, room
from offdrift.engines.isolation import start_local_ray
from offdrift.errors import EngineError, RecordError
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import EvidenceKind, Rollouts, concatenate
from offdrift_lab.train.pipeline.worker import EngineSpec, RolloutWorker, Started, packed
from offdrift_lab.train.settings.sections import PipelineSettings

MIB = 2**20
STORE_MIB = 200
"""Smallest object store of an embedded Ray, MiB: weights of three versions have room beside it."""


class Workers:
    """Actors by name. A replacement has a name of its own.

    Args:
        weights_mib: size of the model's weights.
        log: a file that gets a line for every worker that has started: its name, process, node and when. Absent: none.

    Raises: `EngineError` if no cluster answers, no node of it has room for a worker, or a worker does not start.
    """

    def __init__(
        self, settings: PipelineSettings, spec: EngineSpec, *, weights_mib: float, log: Path | None = None
    ) -> None:
        self.settings, self.spec, self.log = settings, spec, log
        self.actors: dict[str, Any] = {}
        self.provenance: Provenance | None = None
        self._made = 0
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            start_ray(settings, weights_mib)
        self._room()
        remote: Any = ray.remote
        taken = {"num_cpus": settings.cpus, "num_gpus": settings.gpus, "resources": settings.resources}
        self._class = remote(**taken, max_restarts=0)(RolloutWorker)

    def start(self) -> None:
        """Make the workers that are missing or, while they were idle, have died, and wait for all of them."""
        asked = {name: actor.ready.remote() for name, actor in self.actors.items()}
        for name, reference in asked.items():
            try:
                ray.get(reference, timeout=self.settings.hang_seconds)
            except RayError:
                self.end(name)
        ready = {name: self.actors[name].ready.remote() for name in self.make()}
        for name, reference in ready.items():
            try:
                self.started(name, ray.get(reference, timeout=self.settings.start_seconds))
            except RayActorError as error:
                raise EngineError(f"rollout worker {name} did not start: {reason(error)}") from error
            except GetTimeoutError as error:
                raise EngineError(
                    f"rollout worker {name} did not start within pipeline.start_seconds = "
                    f"{self.settings.start_seconds:g}; allow more if it takes so long to load. Otherwise what it takes "
                    f"of a node is in use: pipeline.workers = {self.settings.workers}, and the cluster has room for "
                    f"{self._room()} while nothing else runs there"
                ) from error

    def started(self, name: str, worker: Started) -> None:
        """Take note of a worker that has started. Raises: `RecordError` if the log cannot be written."""
        self.provenance = worker.provenance
        if self.log is None:
            return
        row = {
            "worker": name,
            "pid": worker.pid,
            **worker.node._asdict(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        try:
            with self.log.open("a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
        except OSError as e:
            raise RecordError(f"cannot write {self.log}: {e.strerror or e}; free disk space, then --resume") from e

    def _room(self) -> int:
        """Workers that fit into the cluster. Raises: `EngineError` if none does."""
        s = self.settings
        amounts = {"CPU": s.cpus, "GPU": s.gpus, **s.resources}
        more = f", resources = {json.dumps(s.resources)}" if s.resources else ""
        what = f"a rollout worker of [pipeline] cpus = {s.cpus:g}, gpus = {s.gpus:g}{more}"
        return room(ray, amounts, what=what, way_out="lower them")

    def make(self) -> list[str]:
        """Begin to make the workers that are missing; their names."""
        names = []
        for _ in range(self.settings.workers - len(self.actors)):
            name = f"worker-{self._made}"
            self._made += 1
            self.actors[name] = self._class.remote(self.spec, self.settings.threads)
            names.append(name)
        return names

    def end(self, name: str) -> None:
        """Kill a worker, whatever it is doing."""
        actor = self.actors.pop(name, None)
        if actor is not None:
            ray.kill(actor)

    def close(self) -> None:
        """End all workers, and Ray if it was started for them. Idempotent."""
        for name in list(self.actors):
            self.end(name)
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()


class RemoteEngine:
    """All idle workers as one engine, for checks of weight synchronization: prompts are spread over them."""

    def __init__(self, workers: Workers, *, vocab_size: int) -> None:
        self.workers, self.vocab_size = workers, vocab_size
        self.name, self.version = workers.spec.kind, 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int, evidence: EvidenceKind = "sampled"
    ) -> Rollouts:
        """See `engines.Engine`; group ids are the prompts' places."""
        actors = list(self.workers.actors.values())
        size = -(-len(prompts) // len(actors))
        asked = [[list(p) for p in prompts[i : i + size]] for i in range(0, len(prompts), size)]
        parts = [actor.generate.remote(own, sampling, seed, evidence) for actor, own in zip(actors, asked)]
        return concatenate(ray.get(parts))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `engines.Engine`."""
        self.workers.start()
        reference = ray.put(packed(weights))
        ray.get([actor.load_weights.remote(reference, version) for actor in self.workers.actors.values()])
        self.version = version

    def close(self) -> None:
        """See `engines.Engine`."""
        self.workers.close()


def reason(error: Exception) -> str:
    """Why a worker is gone, in a line: the last of a traceback that Ray passes on, else the first of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "creation task" in lines[0] else lines[0]


def start_ray(settings: PipelineSettings, weights_mib: float) -> None:
    """Start Ray in this process, or join the cluster of RAY_ADDRESS. Raises: `EngineError` if none answers there."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address := os.environ.get("RAY_ADDRESS"):
        join(address, f"RAY_ADDRESS={address}", "unset RAY_ADDRESS: Ray is then started for the run")
        return
    start_local_ray(
        num_cpus=max(1, round(settings.cpus * settings.workers + 0.5)),
        resources={name: amount * settings.workers for name, amount in settings.resources.items()},
        object_store_memory=int(max(STORE_MIB, 4 * weights_mib) * MIB),
    )
