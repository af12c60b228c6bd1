"""Ray that is started for a run can be reached from this machine only."""

import subprocess
import sys

SCRIPT = """
import psutil, ray
from offdrift.engines.isolation import start_local_ray
start_local_ray(num_cpus=1)

@ray.remote
class Worker:
    def answer(self):
        return 42

assert ray.get(Worker.remote().answer.remote()) == 42
me = psutil.Process()
for process in [me, *me.children(recursive=True)]:
    for socket in process.net_connections("inet"):
        if socket.status == psutil.CONN_LISTEN:
            print(process.name(), socket.laddr.ip, flush=True)
ray.shutdown()
"""


def test_every_server_of_a_local_ray_listens_on_loopback():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    listening = [line.split() for line in done.stdout.splitlines()]
    assert {"raylet", "gcs_server"} <= {name for name, _ in listening}
    assert {ip.removeprefix("::ffff:") for _, ip in listening} == {"127.0.0.1"}
