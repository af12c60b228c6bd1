"""What arrived where is remembered, by digests alone."""

from offdrift.alarms.sent import SentAlarms, sent_file


def test_what_was_sent_is_known_to_the_next_watch(tmp_path):
    file = tmp_path / "deep" / "sent.txt"
    first = SentAlarms(file)
    assert not first.has("command x", "a1")
    first.add("command x", "a1")
    assert first.has("command x", "a1")
    again = SentAlarms(file)
    assert [again.has(place, name) for place, name in (("command x", "a1"), ("command y", "a1"), ("command x", "a2"))] == [True, False, False]  # fmt: skip
    assert (first.problem, again.problem) == ("", "")


def test_two_watches_share_a_file_and_no_secret_stands_in_it(tmp_path):
    file = tmp_path / "sent.txt"
    one, two = SentAlarms(file), SentAlarms(file)
    one.add("webhook https://host/SECRET", "a1")
    two.add("webhook https://host/SECRET", "a2")
    both = SentAlarms(file)
    assert both.has("webhook https://host/SECRET", "a1")
    assert both.has("webhook https://host/SECRET", "a2")
    assert "SECRET" not in file.read_text()


def test_a_folder_that_cannot_be_written_is_a_problem_and_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    sent = SentAlarms(tmp_path / "file" / "sent.txt")
    sent.add("command x", "a1")
    assert sent.has("command x", "a1"), "within this watch"
    assert "sent.txt" in sent.problem


def test_a_file_that_is_a_folder_is_a_problem_and_no_error(tmp_path):
    sent = SentAlarms(tmp_path)
    assert "cannot be read" in sent.problem
    assert not sent.has("command x", "a1")


def test_a_run_has_a_file_of_its_own_in_the_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    file = sent_file(tmp_path / "run")
    assert file.parent == tmp_path / "state" / "offdrift" / "alarms"
    assert sent_file(type(tmp_path)("run")) == file
    assert sent_file(tmp_path / "run2") != file
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert sent_file(tmp_path / "run").is_relative_to(tmp_path / "home" / ".local" / "state")
