"""Clocks of ranks: how they are compared, and how a run with different clocks is read."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesight.cli import main
from pipesight.recording import rank_clocks
from pipesight.recording.clock_correction import UNKNOWN_DRIFT, Measurement, correction_from, measure
from pipesight.recording.clock_server import ClockServer
from pipesight.runs.reading.run import open_run
from support.synthetic import START, Made

SECOND = 10**9


class Clocks:
    """A rank whose clock is off by some, and drifts, and rank 0, which answers late now and then."""

    def __init__(self, ahead: int, drift: float, seed: int) -> None:
        self._ahead, self._drift = ahead, Fraction(drift)
        self._random = random.Random(seed)
        self.true = 1_700_000_000 * SECOND  # as rank 0's clock has it
        self.start = self.true

    def at(self, moment: int) -> int:
        """Return what the rank's clock says at a moment."""
        return moment - self._ahead + round((moment - self.start) * self._drift)

    def mine(self) -> int:
        return self.at(self.true)

    def ask(self) -> int:
        """Answer after a while that is as long on both ways only by chance."""
        self.true += self._way()
        answer = self.true
        self.true += self._way()
        return answer

    def _way(self) -> int:
        return self._random.randrange(20_000, 60_000) + self._random.choice([0, 0, 0, 5_000_000])


@given(
    ahead=st.integers(-3600 * SECOND, 3600 * SECOND),
    drift=st.floats(-1e-3, 1e-3),
    seconds=st.integers(1, 100_000),
    seed=st.integers(0, 100),
)
def test_offset_and_drift(ahead, drift, seconds, seed):
    """With a measurement at either end, all times in between come out right to within the error that is stated."""
    clocks = Clocks(ahead, drift, seed)
    begin = clocks.true
    measurements = [measure(clocks.ask, clocks.mine)]
    clocks.true += seconds * SECOND
    measurements.append(measure(clocks.ask, clocks.mine))
    end = clocks.true
    found = correction_from(measurements, begin=clocks.at(begin), end=clocks.at(end))
    assert 0 < found.error < 200_000  # half of the fastest answer, and what it may mean for the ends
    for k in range(11):
        moment = begin + (end - begin) * k // 10
        assert abs(found.apply(clocks.at(moment)) - moment) <= found.error


def test_one_measurement():
    """A rank that was measured once may have drifted as clocks do, and the error says so."""
    clocks = Clocks(5 * SECOND, UNKNOWN_DRIFT / 2, seed=0)
    first = measure(clocks.ask, clocks.mine)
    clocks.true += 100 * SECOND
    found = correction_from([first], begin=clocks.at(clocks.start), end=clocks.mine())
    assert found.drift == 0
    assert abs(found.apply(clocks.mine()) - clocks.true) <= found.error < 11_000_000


def test_the_fastest_answers_count():
    """Of many measurements, the best of each half are taken: one that took long does no harm."""
    measurements = [Measurement(at * SECOND, 7 * SECOND, 50_000) for at in range(10)]
    measurements[0] = Measurement(0, 9 * SECOND, 2 * SECOND)
    measurements[-1] = Measurement(9 * SECOND, 6 * SECOND, SECOND)
    found = correction_from(measurements, begin=SECOND, end=9 * SECOND)
    assert found.apply(0) == 7 * SECOND
    assert found.drift == 0
    assert 50_000 <= found.error < 500_000


def test_uneven_drift():
    """A clock that was set in between is off by more than its measurements; the error says so."""
    jump = 3_000_000
    measurements = [Measurement(at * SECOND, jump if at > 4 else 0, 50_000) for at in range(21)]
    found = correction_from(measurements, begin=0, end=20 * SECOND)
    for at in range(21):
        true = at * SECOND + (jump if at > 4 else 0)
        assert abs(found.apply(at * SECOND) - true) <= found.error
    assert found.error < jump


def test_no_round():
    """A measurement needs a round."""
    with pytest.raises(ValueError, match=r"rounds must be a positive integer \(rounds: 0\)"):
        measure(lambda: 0, lambda: 0, rounds=0)


def test_drift_of_a_rank(tmp_path):
    """A rank's times are shifted by its offset, and by its drift from where that was measured."""
    made = Made(tmp_path / "run", clock={"offset_ns": 5, "error_ns": 100_000})
    for rank in range(2):
        for begin in (0, 1_000_000, 4_000_000):
            made.span("comm", "send", begin=begin, dur=1000, rank=rank)
    (made.write() / "ranks").mkdir()
    clock = {"offset_correction_ns": 2_000_000, "drift": 1e-3, "drift_since_ns": (START + 1_000_000) * 1000}
    (tmp_path / "run/ranks/rank-00001.json").write_text(json.dumps({"rank": 1, "pid": 4001, "clock": clock}))
    with open_run(tmp_path / "run") as run:
        spans = run.spans()
        begins, ends = spans.begin - START, spans.end - START
        assert begins[spans.rank == 0].tolist() == [0, 1_000_000, 4_000_000]
        assert begins[spans.rank == 1].tolist() == [1_000, 1_002_000, 4_005_000]
        assert ends[spans.rank == 1].tolist() == [2_001, 1_003_001, 4_006_001]


def test_converted_on_one_clock(tmp_path):
    """A file of all ranks, for viewers, has the times of one clock; nothing else that looks like a time changes."""
    made = Made(tmp_path / "run")
    for rank in range(2):
        made.span("comm", "send", begin=1_000_000, dur=1000, rank=rank, ts=7)
    (made.write() / "ranks").mkdir()
    clock = {"offset_correction_ns": 2_000_000, "drift": 1e-3, "drift_since_ns": START * 1000}
    (tmp_path / "run/ranks/rank-00001.json").write_text(json.dumps({"rank": 1, "pid": 4001, "clock": clock}))
    assert main(["convert", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    sends = [event for event in found if event["name"] == "send"]
    assert [event["ts"] - START for event in sends] == [1_000_000, 1_003_000]
    assert [(event["dur"], event["args"]["ts"]) for event in sends] == [(1000, 7)] * 2


@pytest.mark.parametrize("clock", [{"drift": "fast"}, {"drift": 1e-3}, {"drift": 2.0, "drift_since_ns": 0}, {}])
def test_a_clock_that_makes_no_sense(clock, tmp_path):
    """A drift that is none is not applied; the offset is."""
    made = Made(tmp_path / "run")
    made.span("comm", "send", begin=0, dur=1, rank=1)
    (made.write() / "ranks").mkdir(exist_ok=True)
    facts = {"rank": 1, "pid": 4001, "clock": {"offset_correction_ns": 3_000_000, **clock}}
    (tmp_path / "run/ranks/rank-00001.json").write_text(json.dumps(facts))
    with open_run(tmp_path / "run") as run:
        assert (run.spans().begin - START).tolist() == [3000]


@pytest.mark.slow
def test_many_ranks_at_once():
    """512 ranks that ask at the same moment are all answered, though others say nothing, or nonsense."""
    server = ClockServer(time.time_ns)
    rude = [socket.create_connection(("localhost", server.port)) for _ in range(3)]
    rude[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    rude[2].sendall(b"?" * 10_000)
    address, ranks = ("localhost", server.port), 512
    together = threading.Barrier(ranks)
    failed = []

    def ask(rank):
        together.wait()
        try:
            with rank_clocks._connected(address) as (asked, tell):
                found = measure(asked, time.time_ns, rounds=3)
                tell({"rank": rank, "last": True, "clock": {"error_ns": found.error}})
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(1, ranks + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = server.known()
    server.stop(patience=0)
    for connection in rude:
        connection.close()
    assert not failed
    assert sorted(map(int, known)) == list(range(1, ranks + 1))


def test_a_clock_that_cannot_be_reached_at_first(monkeypatch):
    """A rank tries again when the first connections fail."""
    server = ClockServer(time.time_ns)
    connect, left = socket.create_connection, [3]

    def refused_at_first(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise ConnectionResetError("no")
        return connect(*args, **kwargs)

    monkeypatch.setattr(socket, "create_connection", refused_at_first)
    clocks = rank_clocks.RankClocks(1, 2, 0, time.time_ns)
    clocks._address = ("localhost", server.port)
    clocks._measure(last=True)
    assert clocks.as_json()["error_ns"] is not None
    assert list(server.known()) == ["1"]
    server.stop(patience=0)
