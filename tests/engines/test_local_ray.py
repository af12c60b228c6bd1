"""Ray that is started for a run can be reached from this machine only, and its workers get their share of it."""

import os
import signal
import subprocess
import sys

import pytest

from offdrift.engines.isolation import sigterm_kept

SCRIPT = """
import os, psutil, ray, signal
from offdrift.engines.isolation import start_local_ray
signal.signal(signal.SIGTERM, signal.default_int_handler)
start_local_ray(num_cpus=1)
print("handler kept", signal.getsignal(signal.SIGTERM) is signal.default_int_handler, flush=True)

@ray.remote
class Worker:
    def niceness(self):
        return os.nice(0)

print("niceness", os.nice(0), ray.get(Worker.remote().niceness.remote()), flush=True)
me = psutil.Process()
for process in [me, *me.children(recursive=True)]:
    for socket in process.net_connections("inet"):
        if socket.status == psutil.CONN_LISTEN:
            print(process.name(), socket.laddr.ip, flush=True)
ray.shutdown()
"""


def test_every_server_of_a_local_ray_listens_on_loopback_and_workers_are_as_nice_as_the_trainer():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    kept, (_, trainer, worker), *listening = [line.split() for line in done.stdout.splitlines()]
    assert kept == ["handler", "kept", "True"]  # a polite kill of a run ends like Ctrl-C
    assert worker == trainer
    assert {"raylet", "gcs_server"} <= {name for name, _ in listening}
    assert {ip.removeprefix("::ffff:") for _, ip in listening} == {"127.0.0.1"}


@pytest.fixture
def interrupts():
    """SIGTERM is Ctrl-C, as in every command."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def leave_at_once(number, _):
    """Ray's own handler."""
    sys.exit(number)


def test_a_polite_kill_that_comes_while_ray_starts_ends_like_ctrl_c(interrupts):
    def start_and_be_killed():
        with sigterm_kept():
            signal.signal(signal.SIGTERM, leave_at_once)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        start_and_be_killed()
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


@pytest.mark.parametrize("code", [0, 1])
def test_another_end_of_the_interpreter_stays_one(interrupts, code):
    with pytest.raises(SystemExit) as left, sigterm_kept():
        sys.exit(code)
    assert left.value.code == code
