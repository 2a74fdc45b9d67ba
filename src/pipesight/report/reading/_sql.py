"""From lines of JSON to the columns of events, as DuckDB does it.

Only reading is SQL: it is DuckDB's own. What is asked of events afterwards is in `queries`, for every engine.
"""

from __future__ import annotations

from pipesight.report.reading._codes import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    WEIGHT,
)

__all__ = ["ADOPTION", "COLUMNS", "FACTS", "HIVE", "LONGEST", "PARQUET", "SETTLING", "SOURCES", "events"]

LONGEST = 2**20  # bytes of a line
_LONGEST_OF_MANY = 2**18  # of files that are read together: DuckDB keeps twice that for each

SOURCES = """
CREATE TEMP TABLE sources (path VARCHAR, number INTEGER, rank INTEGER, own BOOLEAN,
    shift BIGINT, drift DOUBLE, since BIGINT);
CREATE TEMP TABLE events (
    file INTEGER, rank INTEGER, pid BIGINT, tid BIGINT, category VARCHAR, name VARCHAR, "begin" BIGINT, "end" BIGINT,
    phase TINYINT, kind TINYINT, step BIGINT, minibatch BIGINT, partition INTEGER, microbatch INTEGER, layer VARCHAR,
    device VARCHAR, size BIGINT, peers VARCHAR)
"""

# A line that is no JSON is a row of nulls, and so is a value of another type. Metadata, counters and arrows have a name
# but no duration.
_EVENTS = """
SELECT source.number AS file, source.rank AS rank, coalesce(pid, -1) AS pid, coalesce(tid, -1) AS tid,
    coalesce(cat, '') AS category, coalesce(name, '') AS name,
    {begin} + source.shift + (({begin} - source.since) * source.drift)::BIGINT AS "begin",
    {end} + source.shift + (({end} - source.since) * source.drift)::BIGINT AS "end",
    {phase} AS phase, {kind} AS kind,
    coalesce(args.step, -1) AS step, coalesce(args.minibatch, args.step, -1) AS minibatch,
    {partition} AS partition, {microbatch} AS microbatch,
    coalesce(args.layer, '') AS layer, {device} AS device,
    coalesce(CASE WHEN cat = 'dftracer' THEN args.lost_events ELSE args.size END, -1) AS size,
    coalesce(args."group", '') AS peers
FROM read_json($paths, format = 'newline_delimited', compression = '{compression}', filename = true,
    ignore_errors = true, maximum_object_size = {longest}, columns = {{
        name: 'VARCHAR', cat: 'VARCHAR', pid: 'BIGINT', tid: 'BIGINT', ts: '{time}', dur: '{time}',
        args: 'STRUCT(step BIGINT, minibatch BIGINT, partition INTEGER, microbatch INTEGER, layer VARCHAR,
                      device VARCHAR, size BIGINT, lost_events BIGINT, "group" VARCHAR)'}}) AS lines
JOIN sources AS source ON lines.filename = source.path
WHERE dur IS NOT NULL OR name IS NULL
"""

_PHASE = f"""
CASE WHEN cat <> 'compute' OR args.partition IS NULL OR args.partition < 0 THEN -1
    WHEN args.layer IS NULL THEN CASE name
        WHEN 'forward' THEN {FORWARD} WHEN 'forward.recompute' THEN {RECOMPUTE} WHEN 'backward' THEN {BACKWARD}
        WHEN 'backward.weight' THEN {WEIGHT} ELSE -1 END
    ELSE CASE name
        WHEN 'forward.layer' THEN {FORWARD} WHEN 'forward.recompute.layer' THEN {RECOMPUTE}
        WHEN 'backward.layer' THEN {BACKWARD} WHEN 'backward.weight.layer' THEN {WEIGHT} ELSE -1 END
END"""
_LAST = 2**61  # microseconds; beyond, sums might not fit
_IS_SPAN = f"ts BETWEEN 0 AND {_LAST} AND dur BETWEEN 0 AND {_LAST}"
# Below -1 are rows that tell of the file, and are taken out when it has been read.
_FRAME, _END, _DAMAGED = -2, -3, -4
_KIND = f"""
CASE WHEN ({_IS_SPAN}) IS NOT TRUE THEN {_DAMAGED}
    WHEN cat = 'dftracer' THEN CASE name WHEN 'end' THEN {_END} ELSE {_FRAME} END
    WHEN NOT source.own OR name LIKE '%.block' THEN -1
    WHEN cat = 'compute' AND name = 'step' AND (tid = pid OR args.device IS NOT NULL) THEN {OPTIMIZER}
    WHEN tid <> pid OR cat = 'compute' THEN -1
    WHEN cat = 'dataloader' OR cat = 'data' THEN {DATA}
    WHEN cat = 'checkpoint' THEN {CHECKPOINT}
    WHEN cat = 'comm' THEN {COMMUNICATION}
    {{foreign}} ELSE -1
END"""
_OURS = {
    "begin": f"CASE WHEN {_IS_SPAN} THEN ts END",
    "end": f"CASE WHEN {_IS_SPAN} THEN ts + dur END",
    "time": "BIGINT",
    "phase": _PHASE,
    "kind": _KIND.format(foreign=""),
    "partition": "coalesce(args.partition, -1)",
    "microbatch": "coalesce(args.microbatch, -1)",
    "device": "coalesce(args.device, '')",
}

# torch.distributed.pipelining names its tasks PP:0F1: stage 0, forward, micro-batch 1. Of a backward in two parts, I is
# the gradient of the inputs and W that of the weights. PyTorch's profiler has each on the host and on the GPU, at times
# with a fraction; what follows on each other must not overlap once they are whole.
_PP = r"'^PP:(\d{1,6})([FBIW])(\d{1,6})$'"
_FOREIGN = {
    "begin": f"CASE WHEN {_IS_SPAN} THEN floor(ts)::BIGINT END",
    "end": f"CASE WHEN {_IS_SPAN} THEN floor(ts + dur)::BIGINT END",
    "time": "DOUBLE",
    "phase": f"""
CASE regexp_extract(coalesce(name, ''), {_PP}, 2)
    WHEN 'F' THEN {FORWARD} WHEN 'B' THEN {BACKWARD} WHEN 'I' THEN {BACKWARD} WHEN 'W' THEN {WEIGHT} ELSE ({_PHASE})
END""",
    "kind": _KIND.format(
        foreign=f"""
    WHEN name LIKE 'enumerate(DataLoader)%' THEN {DATA}
    WHEN name LIKE 'Optimizer.step#%' THEN {OPTIMIZER}
    WHEN name LIKE 'nccl:%' OR name LIKE 'gloo:%' OR name LIKE 'c10d::%' THEN {COMMUNICATION}
    WHEN cat = 'torchtitan' THEN CASE
        WHEN name IN ('fetching_batch', 'get_training_sample', 'post_dataloading_process') THEN {DATA}
        WHEN name = 'optim' THEN {OPTIMIZER}
        WHEN name LIKE '%checkpoint%' THEN {CHECKPOINT}
        WHEN name = 'collect_dist_metrics' THEN {COMMUNICATION}
        ELSE -1 END"""
    ),
    "partition": f"coalesce(args.partition, try_cast(regexp_extract(name, {_PP}, 1) AS INTEGER), -1)",
    "microbatch": f"coalesce(args.microbatch, try_cast(regexp_extract(name, {_PP}, 3) AS INTEGER), -1)",
    "device": "coalesce(args.device, CASE WHEN cat LIKE 'gpu_%' OR cat = 'kernel' THEN 'gpu' ELSE '' END)",
}


def events(*, packed: bool, foreign: bool, together: bool = False) -> str:
    """Return the query that makes events of the file ``$paths``, or of those, if there are several together."""
    return _EVENTS.format(
        compression="gzip" if packed else "none",
        longest=_LONGEST_OF_MANY if together else LONGEST,
        **(_FOREIGN if foreign else _OURS),
    )


COLUMNS = """
rank, pid, tid, category, name, "begin", "end", phase, kind, step, minibatch, partition, microbatch, layer, device,
size, peers
"""
PARQUET = "(FORMAT parquet, COMPRESSION zstd, PARTITION_BY (rank), FILENAME_PATTERN 'events-{i}')"
HIVE = "hive_partitioning = true, hive_types = {rank: INTEGER}"

FACTS = f"""
SELECT file, count(*) FILTER (kind >= -1), count(*) FILTER (kind = {_DAMAGED}), bool_or(kind = {_END}),
    greatest(coalesce(max(size) FILTER (kind = {_END}), 0), 0)
FROM events GROUP BY file
"""
SETTLING = "DELETE FROM events WHERE kind < -1"

_OTHERS_TASKS = "phase >= 0 AND minibatch < 0 AND list_contains($files, file)"
ADOPTION = (
    # The profiler says which step it is; a schedule runs once in it.
    f"""
UPDATE events SET step = profiled.number, minibatch = profiled.number FROM (
    SELECT file AS of_file, device <> '' AS on_device, "begin" AS first, "end" AS last,
        try_cast(regexp_extract(name, '^ProfilerStep#(\\d{{1,18}})$', 1) AS BIGINT) AS number
    FROM events WHERE list_contains($files, file) AND name LIKE 'ProfilerStep#%') AS profiled
WHERE {_OTHERS_TASKS} AND number IS NOT NULL AND file = of_file AND (device <> '') = on_device
    AND "begin" >= first AND "begin" < last
""",
    # Otherwise each task comes once in a mini-batch.
    f"""
UPDATE events SET step = number, minibatch = number FROM (
    SELECT rowid AS id, row_number() OVER (PARTITION BY file, pid, device <> '', partition, phase, microbatch
        ORDER BY "begin") - 1 AS number
    FROM events WHERE {_OTHERS_TASKS}) AS numbered
WHERE events.rowid = id
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
