"""What drew a response travels with the log: written, read, counted, judged and shown."""

import json
import sys
from dataclasses import fields, replace

import pytest

from offdrift.audit.conclude import conclude, informed
from offdrift.audit.facets import Facets
from offdrift.audit.partial import Job
from offdrift.audit.stream import audit
from offdrift.audit.view import drawn_by
from offdrift.errors import BadValueError
from offdrift.judge import Context
from offdrift.records.provenance import REPLAYABLE, Eviction, Provenance, Sampling
from offdrift.records.readers import detect, pieces
from offdrift.records.recorder import write_log
from tests.audit.logs import make_log

FULL = Provenance("vllm", "0.32.0", "tiny", "bfloat16", "fp8_per_channel", Sampling(64, top_p=0.95))
PLAIN = Provenance("transformers", "5.16.1", "tiny", "float32", None, Sampling(64))
EVERYTHING = Provenance(
    'a "quoted" name\n',
    "",
    "<b>",
    "é",
    None,
    Sampling(3, 0.1, 5, 0.2, 0.3, (1, 2)),
    "raw",
    True,
    "keep",
    teacher="a teacher",
    draft_tokens=4,
    instructions="avx2",
    eviction=Eviction("window", 8, 2),
    recorded=REPLAYABLE,
    replayed=("routes",),
)


@pytest.mark.parametrize("provenance", [FULL, PLAIN, EVERYTHING])
def test_a_text_gives_the_provenance_back(provenance):
    for f in fields(Provenance):
        assert f.name == "sampling" or getattr(EVERYTHING, f.name) != f.default
    assert Provenance.from_text(provenance.as_text()) == provenance


def test_a_text_as_it_was_written_is_read_without_pydantic(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert Provenance.from_text(EVERYTHING.as_text()) == EVERYTHING
    with pytest.raises(ImportError):
        Provenance.from_text(json.dumps(json.loads(FULL.as_text()) | {"engine": 3}))


def test_an_earlier_version_knew_fewer_fields():
    stated = json.loads(FULL.as_text())
    assert Provenance.from_text(json.dumps({k: x for k, x in stated.items() if k not in ("recorded", "cache")})) == FULL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": 3}, "engine: Input should be a valid string"),
        ({"selected": 0}, "selected: Input should be a valid boolean"),
        ({"logprobs": "cooked"}, "logprobs: Input should be 'processed' or 'raw'"),
        ({"sampling": {"max_tokens": 3, "best_of": 2}}, "sampling.best_of: "),
        ({"driver": "x"}, "driver: "),
        ({"recorded": ["moods"]}, "recorded names 'moods'; choose from support, routes, retention"),
    ],
)
def test_what_is_no_provenance_is_refused_by_field(change, message):
    with pytest.raises(BadValueError, match=message.replace(".", r"\.")):
        Provenance.from_text(json.dumps(json.loads(FULL.as_text()) | change))


@pytest.mark.parametrize("text", ["", "vllm", "[]", "null", "[" * 100_000, "{", '{"engine": "vllm"}'])
def test_a_text_that_is_none_is_refused(text):
    with pytest.raises(BadValueError, match="provenance"):
        Provenance.from_text(text)


def audit_log(path):
    job = Job(detect([str(path)]))
    return conclude(audit(job, pieces(job.found), folder=path.parent / "audit"), job)


def two_engines(first=None, second=None):
    """A log whose even responses were drawn by one engine, the odd ones by another."""
    first, second = first or PLAIN.as_text(), second or FULL.as_text()
    log = make_log(3, lengths=[5, 9, 30, 12, 70, 8])
    return replace(log, drawn_by=(first, second) * 3)


def test_each_engine_has_the_sums_of_its_sequences_however_parts_are_merged():
    log = two_engines()
    rows = {row["label"]: row for row in Facets.of(log)[0].rows()["drawn_by"]}
    assert {label: row["tokens"] for label, row in rows.items()} == {
        "transformers 5.16.1, float32": 105,
        "vllm 0.32.0, bfloat16, fp8_per_channel, top-p 0.95": 29,
    }
    assert rows["transformers 5.16.1, float32"]["provenance"]["sampling"]["max_tokens"] == 64
    alone = Facets.of(log.cut(0, 1))[0].merge(Facets.of(log.cut(1, 6))[0]).rows()["drawn_by"]
    for row in alone:
        assert row["full/k3"] == pytest.approx(rows[row["label"]]["full/k3"])


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_an_audit_reads_and_shows_what_drew(tmp_path, suffix):
    log = two_engines(second="an engine in <b>words</b>")
    path = tmp_path / f"log{suffix}"
    if suffix == ".parquet":
        write_log(log, path)
    else:
        lines = []
        for i in range(log.num_sequences):
            tokens = slice(*log.cu_seqlens[i : i + 2].tolist())
            row = {"step": int(log.step[i]), "provenance": log.drawn_by[i]}
            if i % 2 == 0:
                row["provenance"] = json.loads(log.drawn_by[i])  # an object does as well
            row |= {name: getattr(log, name)[tokens].tolist() for name in ("logp_rollout", "logp_old", "logp")}
            lines.append(json.dumps(row))
        path.write_text("\n".join(lines))
    content = audit_log(path)
    assert "drawn_by" in content["has"]
    assert sorted(drawn_by(content)) == ["an engine in <b>words</b> (50%)", "transformers 5.16.1, float32 (50%)"]
    rows = {row["label"]: row["provenance"] for row in content["facets"]["drawn_by"]}
    assert rows["an engine in <b>words</b>"] is None
    assert rows["transformers 5.16.1, float32"]["dtype"] == "float32"


def test_the_log_informs_the_diagnosis_where_the_context_does_not_know():
    def rows(*drawn):
        return Facets.of(replace(two_engines(), drawn_by=tuple(p.as_text() for p in drawn) * (6 // len(drawn))))[
            0
        ].rows()["drawn_by"]

    hot = replace(PLAIN, sampling=Sampling(64, temperature=0.7))
    kept = replace(FULL, recorded=("support",), replayed=("support",))
    assert informed(Context(), rows(PLAIN)) == Context(
        temperature=1.0, filtered=False, raw_stated=False, quantized=False
    )
    assert informed(Context(), rows(PLAIN, hot)) == Context(filtered=False, raw_stated=False, quantized=False)
    assert informed(Context(), rows(PLAIN, FULL)).filtered is True
    assert informed(Context(), rows(hot)).temperature == 0.7
    assert informed(Context(temperature=0.5), rows(hot)).temperature == 0.5
    assert informed(Context(), rows(FULL)).filter_replayed is False
    assert informed(Context(), rows(kept)).filter_replayed is True
    assert informed(Context(), rows(kept, FULL)).filter_replayed is False
    assert informed(Context(), rows(replace(hot, logprobs="raw"))).raw_stated is True
    assert informed(Context(), rows(replace(PLAIN, logprobs="raw"))).raw_stated is False  # nothing to be before of
    short = replace(PLAIN, eviction=Eviction("window", 8, 2))
    seen = replace(short, recorded=("retention",), replayed=("retention",))
    assert informed(Context(), rows(short)).cache_replayed is False
    assert informed(Context(), rows(seen)).cache_replayed is True
    assert informed(Context(), rows(PLAIN)).cache_replayed is None
    assert informed(Context(), []) == Context()


def test_filters_and_raw_log_probs_that_a_log_admits_are_findings(tmp_path):
    raw = replace(FULL, logprobs="raw").as_text()
    write_log(two_engines(raw, raw), tmp_path / "raw.parquet")
    rules = {finding["rule"] for finding in audit_log(tmp_path / "raw.parquet")["findings"]}
    assert {"raw_stated", "filter_not_replayed"} <= rules
    write_log(two_engines(PLAIN.as_text(), PLAIN.as_text()), tmp_path / "plain.parquet")
    rules = {finding["rule"] for finding in audit_log(tmp_path / "plain.parquet")["findings"]}
    assert not {"raw_stated", "filter_not_replayed"} & rules
