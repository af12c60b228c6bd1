"""Weights into a running server, through a folder that it can read, and the label they get there.

The trainer writes one safetensors file; the server is asked to load it in place and to forget what it
cached; the label says from then on which weights drew a token. A server that was restarted, or that
somebody else gave weights, has another label.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from offdrift.engines.server.capabilities import Served, optional
from offdrift.engines.server.client import Server, StatusError
from offdrift.errors import EngineError

OWN_METHOD = "offdrift_load"
"""Of `openai_worker.Worker`: what vLLM's reload leaves out on CPUs is made up for."""

DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"


class Weights:
    """The weights that a server holds, by label.

    Args:
        folder: where weight files are put for the server to read, on a disk that both see; absent: a
            temporary one, for a server on this machine.
    """

    def __init__(self, server: Server, served: Served, *, folder: str | None = None) -> None:
        self._server, self._served, self._folder = server, served, folder
        self._run = uuid.uuid4().hex[:8]
        self.label = self.read()
        """What the weights are expected to be called; None if the server does not say."""

    def read(self) -> str | None:
        """What the server calls its weights now."""
        path = {"vllm": "/weight_info", "sglang": "/get_model_info"}.get(self._served.software)
        said = optional(lambda: self._server.get(path)) if path else None
        version = said.get("weight_version") if isinstance(said, dict) else None
        return None if version is None else str(version)

    def check(self, seen: Iterable[str] = ()) -> None:
        """Raise `EngineError` if the server, or an answer of it, names other weights."""
        for label in {self.read(), *seen} if self.label is not None else ():
            if label != self.label:
                raise EngineError(
                    f"{self._server.url} holds weights {str(label)[:80]!r}, expected {self.label!r}: "
                    "it was restarted, or somebody else gave it weights while responses were drawn; "
                    "what was drawn is dropped. Load weights again, and let one trainer own a server"
                )

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Give the server these weights. Raises: `EngineError` if it cannot take them."""
        named = {name: w.detach().cpu().contiguous() for name, w in weights}
        if not named:
            raise EngineError(
                "no weights were given; an iterator that was already used up? pass "
                "model.named_parameters() afresh"
            )
        label = f"offdrift-{self._run}-{version}-{uuid.uuid4().hex[:8]}"
        if self._folder is not None:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=self._folder))
        self.label = label  # whatever fails from here on leaves weights that must not be drawn from
        try:
            # Two names may share one tensor, which the format refuses.
            save_file({n: w.clone() for n, w in named.items()}, folder / "model.safetensors")
            folder.chmod(0o755)  # the server may run as somebody else
            self._take(str(folder), label)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _take(self, folder: str, label: str) -> None:
        if self._served.software == "sglang":
            said = self._server.post("/update_weights_from_disk", {"model_path": folder, "weight_version": label, "flush_cache": True})  # fmt: skip
            _succeeded(said, "update_weights_from_disk")
        elif self._served.software == "vllm":
            self._into_vllm(folder)
            self._server.post("/update_weight_version", {"new_version": label})
        else:
            raise EngineError(
                f"{self._server.url} is neither vLLM nor SGLang, so its weights cannot be set; use "
                "it for `check` or for frozen rollouts"
            )

    def _into_vllm(self, folder: str) -> None:
        try:
            self._call(OWN_METHOD, [folder])
        except StatusError as error:
            if error.status == 404:
                raise EngineError(
                    f"{self._server.url} takes no weights: it has no /collective_rpc; {DEV_MODE} (on a "
                    "trusted network alone: whoever reaches it can load any file)"
                ) from error
            # The server has no such method: it was started without our extension.
            self._call("reload_weights", [], {"weights_path": folder})
        _succeeded(self._server.post("/reset_prefix_cache"), "reset_prefix_cache")

    def _call(self, method: str, args: list[str], kwargs: dict[str, str] | None = None) -> None:
        body = {"method": method, "args": args, "kwargs": kwargs or {}}
        self._server.post("/collective_rpc", body, again=False)


def _succeeded(said: Any, what: str) -> None:
    if not isinstance(said, dict) or said.get("success") is not True:
        raise EngineError(
            f"{what} did not succeed ({str(said)[:200]}); are other requests running? let one trainer "
            "own a server"
        )
