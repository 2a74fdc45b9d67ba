"""DuckDB's SQL that makes tasks of a pipeline of what PyTorch's profiler recorded, once its events are in the table.

A task of the profiler is an annotation around everything a schedule does for it. On a CPU, that begins with a wait::

    PP:1RECV_F2  |-|
      gloo:recv   |-------------------|           from posting to arrival
    PP:1F2         |------------------------|     waits for it, then computes
    the task                          |-----|

Annotations of GPipe are named `Forward 2`, and the task in them ends where its output is sent.
On a GPU, each stream has an annotation of its own, around its kernels: that of the stream that computes is the task.
"""

from __future__ import annotations

from pipesight.runs.reading.event_codes import BACKWARD, COMMUNICATING_KERNEL, FORWARD

__all__ = ["ADOPTION", "DROPPING_UNPLACED", "MADE", "PLACES", "UNPLACED", "UNSPLIT"]

_OF_FILES = "list_contains($files, file)"
_GPIPE = r"'^(Forward|Backward) \d{1,6}$'"
_OVERLAP = r"'^PP:\((\d{1,6})F(\d{1,6});(\d{1,6})[BI](\d{1,6})\)OVERLAP_F_B$'"
_RECV = r"'^PP:(\d{1,6})RECV_([FB])(\d{1,6})$'"
_IS_UNPLACED = f"phase >= 0 AND partition < 0 AND regexp_matches(name, {_GPIPE}) AND {_OF_FILES}"
_OTHERS_TASKS = f"phase >= 0 AND minibatch < 0 AND {_OF_FILES}"

PLACES = """
CREATE OR REPLACE TEMP TABLE places (file INTEGER, place INTEGER);
INSERT INTO places SELECT unnest($files), unnest($places)
"""
UNPLACED = f"SELECT DISTINCT file FROM events WHERE {_IS_UNPLACED}"
"""Files with tasks whose partition nothing tells, after `ADOPTION`."""
DROPPING_UNPLACED = f"UPDATE events SET phase = -1 WHERE {_IS_UNPLACED}"
UNSPLIT = f"""
SELECT file, count(*) FROM events WHERE {_OF_FILES} AND phase = {FORWARD} AND "end" = "begin"
    AND regexp_matches(name, {_OVERLAP}) GROUP BY file
"""
"""Files with a forward and a backward in one annotation that nothing tells apart, after `ADOPTION`, and how many."""

MADE = "UPDATE events SET event = 'span' WHERE event IS NULL AND phase >= 0"
"""For a dataset, after `ADOPTION`: tasks that no event of their own stands for are spans, too."""

_ALL = (
    "file, rank, pid, tid, category, name, {begin}, {end}, {phase}, kind, step, minibatch, "
    "{partition}, {microbatch}, layer, device, size, peers, samples"
)


def _part(begin: str, end: str, phase: int, partition: int, microbatch: int) -> str:
    """Return the query for one of the two tasks of an overlapped pair."""
    columns = _ALL.format(
        begin=begin,
        end=end,
        phase=phase,
        partition=f"regexp_extract(name, {_OVERLAP}, {partition})::INTEGER",
        microbatch=f"regexp_extract(name, {_OVERLAP}, {microbatch})::INTEGER",
    )
    return f"SELECT {columns} FROM pairs"


_COLUMNS = _ALL.format(begin='"begin"', end='"end"', phase="phase", partition="partition", microbatch="microbatch")

ADOPTION = (
    # A rank of a pipeline with one partition a rank has the partition of its place.
    f"""
UPDATE events SET partition = place FROM places
WHERE events.file = places.file AND place >= 0 AND {_IS_UNPLACED.replace("file)", "events.file)")}
""",
    # A forward and a backward in one annotation: the backward begins with autograd's first operator, the forward ends
    # with the last operator before that.
    f"""
INSERT INTO events ({_COLUMNS})
WITH annotated AS (SELECT rowid AS pair, * FROM events WHERE {_OF_FILES} AND regexp_matches(name, {_OVERLAP})),
operators AS (
    SELECT pair, operator."begin" AS started, operator."end" AS ended,
        operator.name LIKE 'autograd::engine::evaluate_function%' AS of_autograd
    FROM annotated JOIN events AS operator ON operator.file = annotated.file AND operator.pid = annotated.pid
        AND operator."begin" >= annotated."begin" AND operator."begin" < annotated."end"
    WHERE annotated.device = '' AND operator.category = 'cpu_op' AND operator.name NOT LIKE 'c10d::%'),
splits AS (SELECT pair, min(started) FILTER (of_autograd) AS split FROM operators GROUP BY pair),
ends AS (
    SELECT pair, any_value(split) AS split, max(least(ended, split)) FILTER (started < split) AS forward_end
    FROM operators JOIN splits USING (pair) GROUP BY pair),
pairs AS (
    SELECT annotated.*, coalesce(split, "begin") AS split, coalesce(forward_end, split, "begin") AS forward_end
    FROM annotated LEFT JOIN ends USING (pair))
{_part('"begin"', "forward_end", FORWARD, 1, 2)}
UNION ALL
{_part("split", '"end"', BACKWARD, 3, 4)}
""",
    # What a task waits for: what was posted for it before, or in it.
    f"""
UPDATE events SET "begin" = least(greatest("begin", arrival), "end") FROM (
    WITH receipts AS (
        SELECT file AS of_file, pid AS of_pid, tid AS of_tid, "begin" AS posted, "end" AS arrived
        FROM events WHERE {_OF_FILES} AND name = 'gloo:recv'),
    announced AS (
        SELECT of_file, of_pid, posted, arrived,
            regexp_extract(name, {_RECV}, 1)::INTEGER AS of_partition,
            regexp_extract(name, {_RECV}, 3)::INTEGER AS of_microbatch,
            CASE regexp_extract(name, {_RECV}, 2) WHEN 'F' THEN {FORWARD} ELSE {BACKWARD} END AS of_phase
        FROM events JOIN receipts ON file = of_file AND pid = of_pid AND tid = of_tid
            AND posted >= "begin" AND posted <= "end"
        WHERE {_OF_FILES} AND regexp_matches(name, {_RECV})),
    tasks AS (SELECT rowid AS task, * FROM events WHERE {_OF_FILES} AND phase >= 0 AND layer = '' AND device = ''),
    next AS (
        SELECT arrived, (SELECT arg_min(task, "begin") FROM tasks WHERE file = of_file AND pid = of_pid
            AND partition = of_partition AND microbatch = of_microbatch AND phase = of_phase
            AND "end" >= posted) AS task
        FROM announced
        UNION ALL
        SELECT arrived, task FROM tasks JOIN receipts ON file = of_file AND pid = of_pid AND tid = of_tid
            AND posted >= "begin" AND posted < "end"
        WHERE regexp_matches(name, {_GPIPE}))
    SELECT task AS of_task, max(arrived) AS arrival FROM next WHERE task IS NOT NULL GROUP BY task
) AS waits
WHERE events.rowid = of_task
""",
    # GPipe posts what a task sends inside of its annotation.
    f"""
UPDATE events SET "end" = greatest("begin", least("end", sent)) FROM (
    SELECT task.rowid AS of_task, min(posting."begin") AS sent
    FROM events AS task JOIN events AS posting ON posting.file = task.file AND posting.pid = task.pid
        AND posting.tid = task.tid AND posting."begin" > task."begin" AND posting."begin" < task."end"
    WHERE list_contains($files, task.file) AND task.phase >= 0 AND task.device = ''
        AND regexp_matches(task.name, {_GPIPE}) AND posting.name IN ('c10d::send', 'gloo:send')
    GROUP BY task.rowid
) AS postings
WHERE events.rowid = of_task
""",
    # Of a process's streams, the one with the most kernels that are no communication computes.
    f"""
UPDATE events SET phase = -1 FROM (
    SELECT of_file, of_pid, arg_max(of_tid, spent) AS computing FROM (
        SELECT file AS of_file, pid AS of_pid, tid AS of_tid, sum("end" - "begin") AS spent
        FROM events WHERE {_OF_FILES} AND category = 'kernel'
            AND NOT regexp_matches(name, '{COMMUNICATING_KERNEL}') GROUP BY ALL) AS streams
    GROUP BY ALL) AS busiest
WHERE phase >= 0 AND category = 'gpu_user_annotation' AND file = of_file AND pid = of_pid AND tid <> computing
    AND {_OF_FILES}
""",
    # The profiler gives the number of the step; a schedule runs once in it.
    f"""
UPDATE events SET step = profiled.number, minibatch = profiled.number FROM (
    SELECT file AS of_file, pid AS of_pid, device <> '' AS on_device, "begin" AS first, "end" AS last,
        try_cast(regexp_extract(name, '^ProfilerStep#(\\d{{1,18}})$', 1) AS BIGINT) AS number
    FROM events WHERE list_contains($files, file) AND name LIKE 'ProfilerStep#%') AS profiled
WHERE {_OTHERS_TASKS} AND number IS NOT NULL AND file = of_file AND pid = of_pid AND (device <> '') = on_device
    AND "begin" >= first AND "begin" < last
""",
    # Otherwise, each task occurs once in a mini-batch.
    f"""
UPDATE events SET step = number, minibatch = number FROM (
    SELECT rowid AS task, row_number() OVER (PARTITION BY file, pid, device <> '', partition, phase, microbatch
        ORDER BY "begin") - 1 AS number
    FROM events WHERE {_OTHERS_TASKS}) AS numbered
WHERE events.rowid = task
""",
    # A file of several processes, as `pipesight convert` makes them: each is a rank.
    """
UPDATE events SET rank = number FROM (
    SELECT file AS of_file, pid AS of_pid, dense_rank() OVER (PARTITION BY file ORDER BY pid) - 1 AS number,
        count(*) OVER (PARTITION BY file) AS together
    FROM (SELECT DISTINCT file, pid FROM events WHERE phase >= 0 AND device = '' AND list_contains($files, file))
) AS processes
WHERE together > 1 AND file = of_file AND pid = of_pid
""",
)
