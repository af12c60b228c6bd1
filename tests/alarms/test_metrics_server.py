"""The server for Prometheus: one path, on loopback unless told otherwise."""

import socket
import urllib.error
import urllib.request

import pytest

from offdrift.alarms.metrics_server import MetricsServer, listening_address
from offdrift.errors import BadValueError


@pytest.fixture
def server():
    server = MetricsServer(("127.0.0.1", 0), lambda: "x 1\n")
    yield server
    server.close()


def test_metrics_are_at_one_path(server):
    with urllib.request.urlopen(server.url, timeout=5) as answer:
        assert answer.read() == b"x 1\n"
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    with urllib.request.urlopen(f"{server.url}?x=1", timeout=5) as answer:
        assert answer.read() == b"x 1\n"
    for path in ("/", "/metrics/..", "/etc/passwd"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url.removesuffix("/metrics") + path, timeout=5)
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(server.url, data=b"x", timeout=5)


def test_a_client_that_says_nothing_keeps_nobody_waiting(server):
    host, port = server.url.removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as half:
        half.sendall(b"GET /met")
        with urllib.request.urlopen(server.url, timeout=5) as answer:
            assert answer.read() == b"x 1\n"
        silent.close()


def test_a_port_that_is_taken_is_named_with_the_way_out(server):
    port = int(server.url.split(":")[2].split("/")[0])
    with pytest.raises(BadValueError, match=rf"127\.0\.0\.1:{port} .*choose another port"):
        MetricsServer(("127.0.0.1", port), lambda: "")


def test_a_server_that_is_closed_frees_its_port():
    first = MetricsServer(("127.0.0.1", 0), lambda: "")
    port = int(first.url.split(":")[2].split("/")[0])
    first.close()
    MetricsServer(("127.0.0.1", port), lambda: "").close()


def test_it_listens_on_loopback_unless_an_address_is_given():
    assert listening_address("9464")[0] == "127.0.0.1"
    assert listening_address(":9464")[0] == "127.0.0.1"
    assert listening_address("0.0.0.0:9464") == ("0.0.0.0", 9464)


@pytest.mark.parametrize("words", ["", "x", "127.0.0.1", "127.0.0.1:", "1:65536", "h:-1", "::1:9464", "h:٣", "h:1:2"])
def test_what_is_no_address_is_refused(words):
    with pytest.raises(BadValueError, match="--prometheus"):
        listening_address(words)
