"""What is read of runs that are damaged, cut off, mixed up or incomplete, and what is said about them."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight.runs.following.follower import check_place
from pipesight.runs.reading.run import NotARunError, open_run
from support.read import small, some_examples, texts
from support.synthetic import START, Made


# Runs that are not whole.
@pytest.mark.parametrize(("lost", "said"), [(0, []), (1, ["1 event was lost whi"]), (2345, ["2,345 events were lo"])])
def test_lost_events(lost, said, tmp_path):
    """Events that a file says could not be written are a note, of the file."""
    span = {"name": "step", "cat": "compute", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "ph": "X", "args": {"size": 9}}
    end = {**span, "name": "end", "cat": "dftracer", "args": {"num_events": 1, "lost_events": lost}}
    (tmp_path / "run.pfw").write_text(f"[\n{json.dumps(span)}\n{json.dumps(end)}\n]\n")
    with open_run(tmp_path) as run:
        assert [text[: len(start)] for text, start in zip(texts(run), said, strict=True)] == said


def test_missing_end(tmp_path):
    """A run whose process was killed is read, and told."""
    with open_run(small(tmp_path / "run").write(end=False)) as run:
        assert len(run.tasks()) == 20
        assert texts(run) == ["incomplete: its process was killed, or is still writing"]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_lines_that_are_no_events(packed, tmp_path):
    """Lines that are no events are left out and counted; of wrong types, what is right is taken."""
    event = {"name": "forward", "cat": "compute", "ph": "X", "pid": 1, "tid": 2, "ts": 5, "dur": 3}
    lines = [
        "[",
        json.dumps({**event, "args": {"step": "abc", "partition": 1, "microbatch": 0}}),
        json.dumps({**event, "args": 7}),
        json.dumps({**event, "pid": "main", "args": None}),
        json.dumps({**event, "ts": None}),  # 1
        json.dumps({**event, "dur": -3}),  # 2
        json.dumps({**event, "ts": 2**63 - 1, "dur": 2**62}),  # 3
        json.dumps({**event, "ts": 10**30}),  # 4
        "no",  # 5
        '{"ph":"X","name":"\xff',  # 6
        json.dumps({**event, "name": "x" * 40_000_000}),  # 7
        "\0\0\0",  # 8
        "[" * 100_000,  # 9
        json.dumps({"name": "thread_name", "ph": "M", "args": {"name": "x"}}),
        json.dumps({"name": "memory", "ph": "C", "ts": 1, "args": {"x": 1}}),
        "]",
    ]
    content = "\n".join(lines).encode("latin-1")
    path = tmp_path / "a.pfw"
    path.write_bytes(gzip.compress(content) if packed else content)
    with open_run(path) as run:
        assert (run.events, run.tasks().step.tolist()) == (3, [-1])
        assert texts(run) == ["skipped: 9 lines that are no events"]


@pytest.mark.parametrize("length", [2**20 - 200, 2**20 + 200, 2**21 - 100, 2**21 + 100, 2**22])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_lines_of_any_length(length, place, tmp_path):
    """A line that is too long to be read does not keep others from being read."""
    short = b'{"ph":"X","name":"short","ts":1,"dur":1}'
    long = b'{"ph":"X","name":"long","ts":1,"dur":1,"args":{"x":"%s"}}' % (b"y" * length)
    lines = {"first": [long, short, short], "middle": [short, long, short], "last": [short, short, long]}[place]
    (tmp_path / "a.pfw.gz").write_bytes(gzip.compress(b"\n".join([b"[", *lines, b"]"])))
    with open_run(tmp_path) as run:
        table = dict(zip(run.names().name.tolist(), run.names().count.tolist(), strict=True))
        assert table["short"] == 2
        assert ("long" in table) != ("skipped: 1 line that is no event" in texts(run))
        assert "long" in table or length > 2**20
    (tmp_path / "b.pfw").write_bytes(short)
    with open_run(tmp_path) as run:
        assert dict(zip(run.names().name.tolist(), run.names().count.tolist(), strict=True))["short"] == 3
        assert ("long" in run.names().name) == ("long" in table)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2**23])
def test_half_characters(size, tmp_path):
    """Text that is no Unicode, which Python escapes, costs no event, in a small file or a large one."""
    event = {"ph": "X", "ts": 1, "dur": 1}
    more = [{**event, "name": "x", "args": {"noise": os.urandom(size // 1000).hex()}} for _ in range(500)]
    layers = ["\ud800", "\udfff\ud83d\ude00", "\\ud800", "\u00e9"] * 2
    tasks = [
        {**event, "name": "forward.layer", "cat": "compute", "args": {"partition": 0, "step": 0, "layer": layer}}
        for layer in layers
    ]
    lines = ["[", *map(json.dumps, [*tasks, *more]), "]"]
    (tmp_path / "a.pfw.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    with open_run(tmp_path) as run:
        assert run.layer_times().layer.tolist() == sorted(["\ufffd", "\ufffd\U0001f600", "\\ud800", "\u00e9"])
        assert (run.events, run.notes) == (508, [])


def test_zeros_at_the_end(tmp_path):
    """Zeros behind the last member, or in the midst of it, as a crash of the machine leaves them, do no harm."""
    trace = small(tmp_path / "run").write() / "trace/rank-00000.pfw.gz"
    whole = trace.read_bytes()
    trace.write_bytes(whole + bytes(100_000))
    with open_run(tmp_path / "run") as run:
        assert (len(run.tasks()), run.notes) == (20, [])
    trace.write_bytes(whole[:-30] + bytes(100_000))
    with open_run(tmp_path / "run") as run:
        assert 0 < len(run.tasks()) <= 20
        assert texts(run) == ["incomplete: its process was killed, or is still writing"]


def test_run_json_that_is_damaged(tmp_path):
    """Without a description that can be read, the rest is."""
    path = small(tmp_path / "run").write()
    (path / "ranks").mkdir()
    (path / "ranks/rank-00001.json").write_text("[1]")
    for content in (b"", b"{", b"\xff", b"[" * 100_000):
        (path / "run.json").write_bytes(content)
        with open_run(path) as run:
            assert run.description == {}
            assert len(run.tasks()) == 20
            assert texts(run) == ["skipped: it is not JSON", "skipped: it is not a JSON object"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, []),
        ({"format_version": 0}, []),
        ({"format_version": 2}, ["format version 2, but pipesight", "knows versions up to 1", "upgrade pipesight"]),
        ({"format_version": "new"}, ["format version 'new'"]),
        ({"format": "other-run"}, ["not written by pipesight (format: 'other-run')"]),
    ],
)
@pytest.mark.parametrize("file", ["run.json", "ranks/rank-00001.json"])
def test_versions_of_the_format(tmp_path, file, facts, said):
    """A description of a newer format, or of another one, is read as far as it goes, with a warning."""
    path = small(tmp_path / "run").write()
    (path / "ranks").mkdir()
    (path / "ranks/rank-00001.json").write_text(json.dumps({"rank": 1, "host": "b"}))
    known = json.loads((path / file).read_bytes())
    (path / file).write_text(json.dumps(known | facts))
    with open_run(path) as run:
        assert len(run.tasks()) == 20
        found = [note.text for note in run.notes if note.path == path / file]
        assert len(found) == bool(said)
        assert all(words in found[0] for words in said)


def test_run_that_has_just_begun(tmp_path):
    """A run directory without any event is a run."""
    path = small(tmp_path / "run").write()
    shutil.rmtree(path / "trace")
    for step in range(2):
        with open_run(path) as run:
            assert (run.events, run.steps(), run.ranks(), len(run.tasks()), len(run.names())) == (0, [], [], 0, 0)
            assert run.description["format"] == "pipesight-run"
            assert texts(run) == [*["skipped: it is empty"] * step, "it contains no trace"]
        (path / "trace").mkdir(exist_ok=True)
        (path / "trace/rank-00000.pfw.gz").touch()


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, "no events in "),
        ({"notes.txt": b"x"}, "no events in "),
        ({"a.pfw.gz": b""}, r"\(a.pfw.gz: skipped: it is empty\)"),
        ({"a.pfw": b"[\n]\n"}, r"\(a.pfw: it contains no spans\)"),
        ({"a.pfw.gz": b"\x1f\x8bxx"}, r"\(a.pfw.gz: damaged: the checksum fails for 4 bytes; "),
        ({"a.json": b"{}}"}, r"\(a.json: skipped: it contains no events\)"),
        ({"a.json": b'{"traceEvents": []}', "b.json": b"nothing"}, r"\(.*; and 1 more\)"),
    ],
)
def test_nothing_to_report(files, error, tmp_path):
    """Where there is nothing to report, the error says what was looked at, and what to give."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(NotARunError, match=error) as caught:
        open_run(tmp_path)
    assert str(caught.value).endswith("; give a run directory, or a trace such as trace.pfw.gz")
    with pytest.raises(NotARunError, match=r"no such file or folder: '.*gone'"):
        open_run(tmp_path / "gone")
    with pytest.raises(NotARunError, match="neither a file nor a folder: '/dev/zero'"):
        open_run("/dev/zero")


def test_file_that_cannot_be_opened(tmp_path):
    """A link to nowhere among the traces does no harm."""
    path = small(tmp_path / "run").write()
    (path / "trace/rank-00001.pfw.gz").symlink_to("gone")
    (path / "trace/rank-00002.pfw.gz").mkdir()
    with open_run(path) as run:
        assert len(run.tasks()) == 20


# Runs that are mixed up.
def test_folder_of_runs(tmp_path):
    """A folder with runs in it is not read as one; the error names them."""
    for name in ("b", "a"):
        small(tmp_path / "runs" / name).write()
        with pytest.raises(NotARunError) as caught:
            open_run(tmp_path / "runs")
        assert str(tmp_path / "runs" / name) in str(caught.value)
    assert "has 2 runs in it" in str(caught.value)
    with pytest.raises(NotARunError, match="has 2 runs in it"):
        check_place(tmp_path / "runs")


def test_two_traced_folders(tmp_path):
    """Of traces of two runs in one folder, the newer are read, the others left out with all their ranks, and told."""
    for name, age, ranks in (("a", 2000, 1), ("b", 1000, 3)):
        made = small(tmp_path / name)
        for rank in range(1, ranks):
            made.span("a", "b", begin=0, dur=1, rank=rank)
        (made.write() / "run.json").unlink()
        for trace in (tmp_path / name / "trace").iterdir():
            os.utime(trace, (age, age))
    with open_run(tmp_path) as run:
        assert (len(run.tasks()), run.ranks()) == (20, [0])
        (note,) = run.notes
        assert note.path == tmp_path / "b/trace"
        assert note.text == (
            f"skipped: {str(tmp_path / 'a/trace')!r} has traces of the same ranks; give the folder that you mean"
        )


def test_two_files_of_a_rank(tmp_path):
    """Of two files of one rank, the newer is read, or that of the process that the run names."""
    trace = small(tmp_path / "run").write() / "trace"
    other = Made(tmp_path / "other")
    other.span("a", "b", begin=0, dur=1, rank=1)
    shutil.copy(other.write() / "trace/rank-00001.pfw.gz", trace / "old-rank-00000.pfw.gz")
    for pid, older, expected in ((4000, 1, 20), (4001, 1, 0), (None, 1, 20), (None, 10**10, 0)):
        (tmp_path / "run/run.json").write_text(json.dumps({"rank": 0, "pid": pid}))
        os.utime(trace / "old-rank-00000.pfw.gz", (older, older))
        with open_run(tmp_path / "run") as run:
            assert len(run.tasks()) == expected
            assert [text.partition(": ")[2].partition("'")[2] for text in texts(run)] == [
                f"{'' if expected else 'old-'}rank-00000.pfw.gz' is of rank 0 too; give the file that you mean"
            ]


def test_files_of_an_older_run(tmp_path):
    """Parts of another process, and ranks that the run has not, are those of an older run."""
    made = small(tmp_path / "run")
    trace = made.write() / "trace"
    old = Made(tmp_path / "old")
    for rank in (1, 5):
        old.span("a", "b", begin=0, dur=1, rank=rank)
    before = old.write() / "trace"
    shutil.copy(before / "rank-00001.pfw.gz", trace / "rank-00000.part2.pfw.gz")
    shutil.copy(before / "rank-00005.pfw.gz", trace / "rank-00005.pfw.gz")
    with open_run(tmp_path / "run") as run:
        assert (len(run.tasks()), run.events) == (20, len(made.events[0]))
        assert {note.path.name: note.text for note in run.notes} == {
            "rank-00000.part2.pfw.gz": "skipped: of process 4001, but the first part is of process 4000",
            "rank-00005.pfw.gz": "skipped: of another run; this one has ranks 0 to 0",
        }


def test_copies_in_other_formats(tmp_path):
    """A converted trace beside the trace is not read a second time."""
    path = small(tmp_path / "run").write() / "trace"
    events = gzip.decompress((path / "rank-00000.pfw.gz").read_bytes()).decode().splitlines()[1:-1]
    (path / "trace.json").write_text(f'{{"traceEvents":[{",".join(events)}]}}')
    (path / "other.json").write_text("{}")
    with open_run(path.parent) as run:
        assert len(run.tasks()) == 20
        assert [(note.path.name, note.text) for note in run.notes] == [
            ("trace.json", "skipped: taken for a copy of the .pfw files")
        ]


# Any damage.
def members(made: Made) -> tuple[bytes, list[bytes]]:
    """Return a trace as pipesight writes it, a few events a member, and its lines."""
    lines = [b"[\n", *(json.dumps(event).encode() + b"\n" for event in made.events[0]), b"]\n"]
    return b"".join(gzip.compress(b"".join(lines[at : at + 7])) for at in range(0, len(lines), 7)), lines


WHOLE, LINES = members(small(Path("unused")))
TRUTH = [
    (event["name"], event["ts"] - START, event["ts"] + event["dur"] - START, event["args"].get("layer", ""))
    for event in map(json.loads, LINES[1:-1])
]


def contents(path: Path) -> list[tuple[Any, ...]]:
    """Return all spans that can be read, if any."""
    try:
        run = open_run(path)
    except NotARunError:
        return []
    with run:
        str(run.notes)
        columns = run._events.fetch(run._events.frame.select("name", "begin", "end", "layer"))
        assert len(columns["name"]) == run.events
        found = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [(name, begin - START, end - START, layer) for name, begin, end, layer in found]


def is_part(some: list[tuple[Any, ...]], whole: list[tuple[Any, ...]]) -> bool:
    rest = list(whole)
    for item in some:
        if item not in rest:
            return False
        rest.remove(item)
    return True


@pytest.mark.slow
@some_examples
@given(cut=st.integers(0, len(WHOLE)), packed=st.booleans())
def test_cut_anywhere(cut, packed, tmp_path):
    """Of a file that ends anywhere, all events up to there are read and no others."""
    content = WHOLE if packed else b"".join(LINES)
    path = tmp_path / "a.pfw.gz"
    path.write_bytes(content[:cut])
    found = contents(path)
    assert is_part(found, TRUTH[: len(found)])
    if not packed and content[:cut].count(b"\n"):
        assert content[:cut].count(b"}\n") <= len(found)


@pytest.mark.slow
@some_examples
@given(place=st.integers(0, len(WHOLE) - 1), bit=st.integers(0, 7))
def test_any_bit_flipped(place, bit, tmp_path):
    """Of a file with one wrong bit, what fails its checksum is left out, and all the rest is there."""
    content = bytearray(WHOLE)
    content[place] ^= 1 << bit
    path = tmp_path / "a.pfw.gz"
    path.write_bytes(content)
    found = contents(path)
    assert is_part(found, TRUTH)
    assert len(found) >= len(TRUTH) - 14


@pytest.mark.slow
@some_examples
@given(
    content=st.binary(max_size=200), start=st.sampled_from([b"", b"[\n", b"\x1f\x8b\x08", b'{"traceEvents":[', b"{"])
)
def test_any_bytes(content, start, tmp_path):
    """Any bytes give tables, or the error that says that there is nothing."""
    for name in ("a.pfw.gz", "a.json", "a.jsonl"):
        (tmp_path / name).write_bytes(start + content)
        contents(tmp_path / name)


@pytest.mark.slow
@some_examples
@given(
    pieces=st.lists(st.sampled_from([*LINES[:3], b"\n", b"]", b",", b"{", b'"', b"\0", b"\xff", b"NaN"]), max_size=9)
)
def test_any_mixture_of_lines(pieces, tmp_path):
    """Lines that were torn apart give no event that was not there."""
    for name, content in (("a.pfw", b"".join(pieces)), ("a.pfw.gz", gzip.compress(b"".join(pieces)))):
        (tmp_path / name).write_bytes(content)
        assert set(contents(tmp_path / name)) <= set(TRUTH)
