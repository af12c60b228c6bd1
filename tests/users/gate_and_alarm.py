"""An engineer who wants a gate before a run and an alarm during it, and who reads neither logs nor source code.

python gate_and_alarm.py    # in an empty folder, with offdrift[train] installed
"""

import http.server
import json
import os
import threading
from pathlib import Path
from typing import ClassVar

from shell import installed_package, offdrift

FEW = ("--model", "tiny-qwen3", "--quick", "--factors", "none", "--max-prompts", "2", "--max-tokens", "8", "-q")
FLOAT32 = "transformers:float32"


def gate_before_the_run() -> None:
    """Exit status 0 where engine and trainer agree, 3 where the limit is exceeded: what a CI job needs."""
    offdrift("check", *FEW, "--rollout", FLOAT32, "--max-kl", "0.005", "--out", "agrees")
    assert json.loads(Path("agrees/check.json").read_text("utf-8"))["passed"] is True
    assert Path("agrees/check.html").is_file()
    offdrift("check", *FEW, "--rollout", "transformers:bfloat16", "--max-kl", "1e-9", "--out", "differs", status=3)


def gate_on_a_log() -> None:
    """The same for a run that has ended."""
    offdrift("demo", "run")
    offdrift("audit", "run", "-q", "--fail-on", "act", status=3)
    offdrift("audit", "run", "-q", "--fail-on", "stop")


class Chat(http.server.BaseHTTPRequestHandler):
    """A chat's incoming webhook."""

    received: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


def alarm_during_the_run() -> None:
    """One message per finding, to a command and to a chat; a watch that is started again sends none of them twice."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    chat = f"http://127.0.0.1:{server.server_port}/hook"
    words = ("watch", "run", "--every", "0.1", "--until-idle", "0.5", "--page", "watch.html", "-q")
    words += (
        "--on",
        "act",
        'echo "$OFFDRIFT_LEVEL $OFFDRIFT_RULE" >> told',
        "--webhook",
        chat,
        "--webhook-from",
        "act",
    )
    offdrift(*words)
    offdrift(*words)
    server.shutdown()
    told = Path("told").read_text().splitlines()
    assert "act wrong_weights" in told, told
    assert len(told) == len({*told}) == len(Chat.received), (told, Chat.received)
    message = next(m for m in Chat.received if m["rule"] == "wrong_weights")
    assert all(message[key] for key in ("text", "what", "why", "fix", "link")), message
    assert message["what"] in Path("watch.html").read_text("utf-8")


if __name__ == "__main__":
    installed_package()
    os.environ["XDG_STATE_HOME"] = str(Path("state").resolve())
    gate_before_the_run()
    gate_on_a_log()
    alarm_during_the_run()
    print("gate closed, alarm sent")
