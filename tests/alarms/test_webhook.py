"""A webhook posts JSON to the address that was given and nowhere else, and gives up in time."""

import threading
import time

import pytest

from offdrift.alarms.alarm import Alarm
from offdrift.alarms.place import Delivery
from offdrift.alarms.webhook import Webhook
from offdrift.errors import BadValueError
from tests.alarms.receivers import FINDING, Received, answer, in_turn, receiver, trickle

ALARM = Alarm("/runs/a", "none", FINDING, "file:///runs/a")
SECRET = "/services/T000/SECRET?token=hunter2"


def send(received: Received, *, path: str = SECRET, stop: threading.Event | None = None, **options) -> Delivery:
    options = {"waits": (0.05, 0.1), "timeout": 5} | options
    return Webhook(received.url + path, **options).send(ALARM, stop or threading.Event())


def test_a_finding_is_posted_once_as_json():
    with receiver(answer(200)) as received:
        assert send(received) == Delivery()
    ((_, path, headers, body),) = received.posts
    assert path == SECRET
    assert headers["Content-Type"] == "application/json"
    assert headers["Idempotency-Key"] == body["id"] == ALARM.id
    assert body == ALARM.as_dict()
    assert {"text", "what", "why", "fix", "link"} <= body.keys()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_that_is_busy_is_tried_again_later_and_later(status):
    with receiver(in_turn(answer(status), answer(status), answer(200))) as received:
        assert send(received) == Delivery()
    first, second, third = (at for at, *_ in received.posts)
    assert second - first >= 0.05
    assert third - second >= 0.1
    assert len({headers["Idempotency-Key"] for _, _, headers, _ in received.posts}) == 1


def test_a_server_may_ask_for_a_longer_wait():
    with receiver(in_turn(answer(429, Retry_After="1"), answer(200))) as received:
        assert send(received) == Delivery()
    assert received.posts[1][0] - received.posts[0][0] >= 1


@pytest.mark.parametrize("when", ["soon", "-1", "1e9", "٣"])
def test_a_retry_after_that_is_no_number_is_ignored(when):
    with receiver(in_turn(answer(429, Retry_After=when.encode().decode("latin-1")), answer(200))) as received:
        begun = time.monotonic()
        assert send(received) == Delivery()
    assert time.monotonic() - begun < 3


def test_a_refusal_is_not_tried_again_and_its_words_are_quoted_without_the_secret():
    with receiver(answer(403, f"invalid_token for {SECRET}\x1b[31m".encode())) as received:
        problem = send(received).problem
    assert len(received.posts) == 1
    assert problem == "it answered 403: invalid_token for /...\\u001b[31m"


def test_an_address_that_fails_for_good_is_given_up():
    with receiver(answer(503, b"down")) as received:
        assert send(received).problem == "it answered 503: down"
    assert len(received.posts) == 3


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status):
    with receiver(answer(200)) as other, receiver(answer(status, Location=f"{other.url}/stolen")) as received:
        problem = send(received).problem
    assert problem.startswith(f"it answered {status}, a redirect")
    assert (len(received.posts), other.posts) == (1, [])


def test_nobody_there_is_a_problem_without_the_secret():
    with receiver(answer(200)) as received:
        pass
    problem = send(received).problem
    assert "reached" in problem
    assert "hunter2" not in problem


def test_an_answer_that_trickles_without_end_is_given_up_in_time():
    with receiver(trickle) as received:
        begun = time.monotonic()
        problem = send(received, timeout=0.5, waits=(0.05,)).problem
        assert time.monotonic() - begun < 5
    assert "0.5 s" in problem
    assert len(received.posts) == 2


def test_the_end_of_the_watch_ends_the_waiting():
    stop, begun = threading.Event(), time.monotonic()
    threading.Timer(0.2, stop.set).start()
    with receiver(answer(503)) as received:
        assert send(received, stop=stop, waits=(30,)).problem == "it answered 503: ok"
    assert time.monotonic() - begun < 10


def test_proxies_are_not_asked_for_this_machine(monkeypatch):
    with receiver(answer(200)) as proxy, receiver(answer(200)) as received:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert send(received) == Delivery()
    assert (len(received.posts), proxy.posts) == (1, [])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hooks.slack.com/services/x", "none"),
        ("ftp://host/SECRET", "none"),
        ("https:///SECRET", "none"),
        ("https://[::1/SECRET", "none"),
        ("https://host:port/SECRET", "none"),
        ("https://host/SEC RET\n", "none"),
        ("https://me:SECRET@host/x", "user or password"),
        ("http://chat.example/SECRET", "--insecure"),
        ("http://localhost.evil.example/SECRET", "--insecure"),
    ],
)
def test_an_address_that_will_not_do_is_refused_without_being_quoted(url, words):
    with pytest.raises(BadValueError, match=words) as error:
        Webhook(url)
    assert "SECRET" not in str(error.value)


def test_insecure_allows_http_to_another_machine_and_names_hide_the_path():
    hook = Webhook("http://chat.example:8065/hooks/SECRET", insecure=True)
    assert hook.name == "--webhook http://chat.example"
    assert Webhook("https://hooks.slack.com/services/SECRET").name == "--webhook https://hooks.slack.com"
