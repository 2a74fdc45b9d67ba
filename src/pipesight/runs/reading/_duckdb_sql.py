"""DuckDB's SQL: from lines of JSON to the table of events, and from there to the columns of a Parquet dataset.

Queries on events are in `event_queries`, for all engines. A report needs only spans; for a dataset, every event is read
with all its fields.
"""

from __future__ import annotations

from pipesight.runs.reading.event_codes import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    EVALUATION,
    FORWARD,
    KINDS,
    OPTIMIZER,
    PHASES,
    PROGRAM,
    RECOMPUTE,
    WEIGHT,
)

__all__ = ["DATASET", "FACTS", "LONGEST", "PARQUET", "POINTS", "SCHEMA", "SETTLING", "SETTLING_ALL"]
__all__ += ["SOURCES", "WHOLE", "events"]

LONGEST = 2**20  # bytes of a line
_LONGEST_OF_MANY = 2**18  # of files that are read together: DuckDB keeps twice that for each

SOURCES = """
CREATE TEMP TABLE sources (path VARCHAR, number INTEGER, rank INTEGER, own BOOLEAN,
    shift BIGINT, drift DOUBLE, since BIGINT);
CREATE TEMP TABLE events (
    file INTEGER, rank INTEGER, pid BIGINT, tid BIGINT, category VARCHAR, name VARCHAR, "begin" BIGINT, "end" BIGINT,
    phase TINYINT, kind TINYINT, step BIGINT, minibatch BIGINT, partition INTEGER, microbatch INTEGER, layer VARCHAR,
    device VARCHAR, size BIGINT, peers VARCHAR, samples BIGINT, module VARCHAR);
CREATE TEMP TABLE points (rank INTEGER, category VARCHAR, name VARCHAR, "begin" BIGINT, "values" VARCHAR)
"""
WHOLE = """
ALTER TABLE events ADD COLUMN event VARCHAR;
ALTER TABLE events ADD COLUMN id BIGINT;
ALTER TABLE events ADD COLUMN parent_id BIGINT;
ALTER TABLE events ADD COLUMN depth INTEGER;
ALTER TABLE events ADD COLUMN arguments VARCHAR;
ALTER TABLE events ADD COLUMN other_fields VARCHAR
"""

# A line that is not JSON becomes a row of nulls, a value of another type a null. Metadata, counters and arrows have a
# name but no duration. Counters and instants have their values once more, as `point`, which is read as text: their
# names are not known, and reading `args` as text would double the time.
_EVENTS = """
SELECT source.number AS file, source.rank AS rank, coalesce(pid, -1) AS pid, coalesce(tid, -1) AS tid,
    coalesce(cat, '') AS category, coalesce(name, '') AS name,
    {begin} + source.shift + (({begin} - source.since) * source.drift)::BIGINT AS "begin",
    {end} + source.shift + (({end} - source.since) * source.drift)::BIGINT AS "end",
    {phase} AS phase, {kind} AS kind,
    coalesce(args.step, -1) AS step, coalesce(args.minibatch, args.step, -1) AS minibatch,
    {partition} AS partition, {microbatch} AS microbatch,
    coalesce(args.layer, point, '') AS layer, {device} AS device,
    coalesce(CASE WHEN cat = 'dftracer' THEN args.lost_events ELSE args.size END, -1) AS size,
    coalesce(args."group", '') AS peers,
    CASE WHEN args.samples BETWEEN 0 AND {most} THEN args.samples ELSE -1 END AS samples,
    coalesce(args.module, '') AS module {more}
FROM {lines} AS lines
JOIN sources AS source ON lines.filename = source.path
{where}
"""
_READING = """$paths, format = 'newline_delimited', compression = '{compression}', filename = true,
    ignore_errors = true, maximum_object_size = {longest}"""
_SPANS = """read_json({reading}, columns = {{
        name: 'VARCHAR', cat: 'VARCHAR', pid: 'BIGINT', tid: 'BIGINT', ts: '{time}', dur: '{time}', point: 'VARCHAR',
        args: 'STRUCT(step BIGINT, minibatch BIGINT, partition INTEGER, microbatch INTEGER, layer VARCHAR,
                      device VARCHAR, size BIGINT, lost_events BIGINT, "group" VARCHAR, samples BIGINT,
                      module VARCHAR, grad BOOLEAN)'}})"""
_EVERYTHING = """(SELECT unnest(json_transform(json, '{{
        "name": "VARCHAR", "cat": "VARCHAR", "pid": "BIGINT", "tid": "BIGINT", "ts": "{time}", "dur": "{time}",
        "ph": "VARCHAR", "id": "BIGINT", "args": {{"step": "BIGINT", "minibatch": "BIGINT", "partition": "INTEGER",
            "microbatch": "INTEGER", "layer": "VARCHAR", "device": "VARCHAR", "size": "BIGINT",
            "lost_events": "BIGINT", "group": "VARCHAR", "samples": "BIGINT", "module": "VARCHAR", "grad": "BOOLEAN",
            "p_idx": "BIGINT", "level": "INTEGER"}}}}')), json->>'point' AS point, json, filename
    FROM read_json_objects({reading}))"""
# Fields that no column holds unchanged are kept as JSON.
_MORE = """,
    CASE WHEN dur IS NOT NULL THEN CASE WHEN cat = 'dftracer' THEN 'frame' ELSE 'span' END ELSE CASE ph
        WHEN 'M' THEN 'metadata' WHEN 'C' THEN 'counter' WHEN 'i' THEN 'instant' WHEN 's' THEN 'arrow start'
        WHEN 'f' THEN 'arrow end' ELSE ph END END AS event,
    id, args.p_idx AS parent_id, args.level AS depth, (json->'args')::VARCHAR AS arguments,
    nullif(json_merge_patch(json, CASE WHEN {as_ours}
        THEN '{{"id":null,"name":null,"cat":null,"pid":null,"tid":null,"ts":null,"dur":null,"ph":null,"args":null}}'
        ELSE '{{"name":null,"cat":null,"args":null}}' END)::VARCHAR, '{{}}') AS other_fields"""
_AS_OURS = """id IS NOT NULL AND pid IS NOT NULL AND tid IS NOT NULL
    AND CASE WHEN dur IS NOT NULL THEN ph = 'X' ELSE ph IN ('M', 'C', 'i', 's', 'f') END
    AND CASE WHEN ph = 'M' THEN ts IS NULL ELSE {is_timed} END"""

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
_MOST_SAMPLES = 2**40  # of a mini-batch; likewise
_IS_SPAN = f"ts BETWEEN 0 AND {_LAST} AND dur BETWEEN 0 AND {_LAST}"
_IS_TIMED = f"ts BETWEEN 0 AND {_LAST} AND coalesce(dur, 0) BETWEEN 0 AND {_LAST}"
# Below -1 are rows that a report does not need: those about the file itself, and events that are not spans.
_FRAME, _END, _DAMAGED, _NO_SPAN, _POINT = -2, -3, -4, -5, -6
_KIND = f"""
CASE WHEN dur IS NULL AND name IS NOT NULL
        THEN CASE WHEN point IS NOT NULL AND source.own AND ({_IS_TIMED}) THEN {_POINT} ELSE {_NO_SPAN} END
    WHEN ({_IS_SPAN}) IS NOT TRUE THEN {_DAMAGED}
    WHEN cat = 'dftracer' THEN CASE name WHEN 'end' THEN {_END} ELSE {_FRAME} END
    WHEN NOT source.own OR name LIKE '%.block' THEN -1
    WHEN cat = 'compute' AND name = 'step' AND (tid = pid OR args.device IS NOT NULL) THEN {OPTIMIZER}
    WHEN tid <> pid THEN -1
    {{program}}
    WHEN cat = 'dataloader' OR cat = 'data' THEN {DATA}
    WHEN cat = 'checkpoint' THEN {CHECKPOINT}
    WHEN cat = 'comm' THEN {COMMUNICATION}
    {{foreign}}
END"""
_NOT_IN_PIPELINE = "args.partition IS NULL"
_OURS = {
    "begin": f"CASE WHEN {_IS_TIMED} THEN ts END",
    "end": f"CASE WHEN {_IS_SPAN} THEN ts + dur END",
    "time": "BIGINT",
    "phase": _PHASE,
    "kind": _KIND.format(
        program=f"""
    WHEN cat = 'compute' THEN CASE WHEN {_NOT_IN_PIPELINE} THEN
        CASE WHEN name = 'forward' AND args.grad = false THEN {EVALUATION} ELSE {PROGRAM} END ELSE -1 END""",
        foreign=f"ELSE CASE WHEN {_NOT_IN_PIPELINE} THEN {PROGRAM} ELSE -1 END",
    ),
    "partition": "coalesce(args.partition, -1)",
    "microbatch": "coalesce(args.microbatch, -1)",
    "device": "coalesce(args.device, '')",
}

# Since torch 2.9, schedules of torch.distributed.pipelining name their tasks PP:0F1: stage 0, forward, micro-batch 1.
# Of a backward in two parts, I is the gradient of the inputs and W that of the weights. ScheduleGPipe names them
# Forward 1 and Backward 1, in all versions; which partition that is depends on the rank. PyTorch's profiler has each on
# the host and on the GPU, at times with a fraction; what follows on each other must not overlap once they are whole.
_PP = r"'^PP:(\d{1,6})([FBIW])(\d{1,6})$'"
_GPIPE = r"'^(Forward|Backward) (\d{1,6})$'"
_IS_GPIPE = "cat LIKE '%user_annotation'"
_FOREIGN = {
    "begin": f"CASE WHEN {_IS_TIMED} THEN floor(ts)::BIGINT END",
    "end": f"CASE WHEN {_IS_SPAN} THEN floor(ts + dur)::BIGINT END",
    "time": "DOUBLE",
    "phase": f"""
CASE regexp_extract(coalesce(name, ''), {_PP}, 2)
    WHEN 'F' THEN {FORWARD} WHEN 'B' THEN {BACKWARD} WHEN 'I' THEN {BACKWARD} WHEN 'W' THEN {WEIGHT}
    ELSE CASE WHEN {_IS_GPIPE} THEN CASE regexp_extract(name, {_GPIPE}, 1)
        WHEN 'Forward' THEN {FORWARD} WHEN 'Backward' THEN {BACKWARD} ELSE ({_PHASE}) END ELSE ({_PHASE}) END
END""",
    "kind": _KIND.format(
        program="WHEN cat = 'compute' THEN -1",
        foreign=f"""
    WHEN name LIKE 'enumerate(DataLoader)%' THEN {DATA}
    WHEN name LIKE 'Optimizer.step#%' THEN {OPTIMIZER}
    WHEN name LIKE 'nccl:%' OR name LIKE 'gloo:%' OR name LIKE 'c10d::%' THEN {COMMUNICATION}
    WHEN cat = 'torchtitan' THEN CASE
        WHEN name IN ('fetching_batch', 'get_training_sample', 'post_dataloading_process',
            'wait_for_training_batch') THEN {DATA}
        WHEN name IN ('optim', 'optim_step') THEN {OPTIMIZER}
        WHEN name LIKE '%checkpoint%' THEN {CHECKPOINT}
        WHEN name = 'collect_dist_metrics' THEN {COMMUNICATION}
        ELSE {PROGRAM} END
    ELSE -1""",
    ),
    "partition": f"coalesce(args.partition, try_cast(regexp_extract(name, {_PP}, 1) AS INTEGER), -1)",
    "microbatch": f"""coalesce(args.microbatch, try_cast(regexp_extract(name, {_PP}, 3) AS INTEGER),
        CASE WHEN {_IS_GPIPE} THEN try_cast(regexp_extract(name, {_GPIPE}, 2) AS INTEGER) END, -1)""",
    "device": "coalesce(args.device, CASE WHEN cat LIKE 'gpu_%' OR cat = 'kernel' THEN 'gpu' ELSE '' END)",
}


def events(*, packed: bool, foreign: bool, together: bool = False, whole: bool = False) -> str:
    """Return the query that reads events from the files ``$paths``.

    They may be ``packed``, ``foreign``, of another tool, or several ``together``. ``whole`` reads every event with all
    its fields, not only spans.
    """
    columns = _FOREIGN if foreign else _OURS
    longest = _LONGEST_OF_MANY if together else LONGEST
    reading = _READING.format(compression="gzip" if packed else "none", longest=longest)
    as_ours = "false" if foreign else _AS_OURS.format(is_timed=_IS_TIMED)
    return _EVENTS.format(
        lines=(_EVERYTHING if whole else _SPANS).format(reading=reading, time=columns["time"]),
        more=_MORE.format(as_ours=as_ours) if whole else "",
        most=_MOST_SAMPLES,
        where="" if whole else "WHERE dur IS NOT NULL OR name IS NULL OR point IS NOT NULL",
        **columns,
    )


SCHEMA = 3
"""The version of the columns of a dataset; a dataset without a version has version 1."""


def _words(column: str, words: tuple[str, ...]) -> str:
    return f"CASE {column} " + " ".join(f"WHEN {code} THEN '{word}'" for code, word in enumerate(words)) + " END"


DATASET = f"""
SELECT rank AS process_rank, nullif(pid, -1) AS pid, nullif(tid, -1) AS tid, event, id, parent_id, depth,
    nullif(category, '') AS category, name, "begin" AS started, "end" AS ended, "end" - "begin" AS duration,
    {_words("phase", PHASES)} AS phase, {_words("kind", KINDS)} AS kind,
    nullif(step, -1) AS step, nullif(minibatch, -1) AS minibatch, nullif(partition, -1) AS partition_index,
    nullif(microbatch, -1) AS microbatch,
    CASE WHEN events.kind <> {_POINT} THEN nullif(layer, '') END AS layer, nullif(device, '') AS device,
    CASE WHEN category <> 'dftracer' THEN nullif(size, -1) END AS size_bytes, nullif(peers, '') AS peers,
    nullif(samples, -1) AS samples, nullif(module, '') AS module, arguments, other_fields
FROM events
"""
PARQUET = (
    "(FORMAT parquet, COMPRESSION zstd, PARTITION_BY (process_rank), WRITE_PARTITION_COLUMNS true, "
    f"FILENAME_PATTERN 'events-{{i}}', KV_METADATA {{pipesight_events: '{SCHEMA}'}})"
)

FACTS = f"""
SELECT file, count(*) FILTER (kind >= -1), count(*) FILTER (kind = {_DAMAGED}), bool_or(kind = {_END}),
    greatest(coalesce(max(size) FILTER (kind = {_END}), 0), 0)
FROM events GROUP BY file
"""
POINTS = f"""
INSERT INTO points SELECT rank, category, name, "begin", layer FROM events
WHERE kind = {_POINT} AND category IN ('counter', 'instant', 'memory')
"""
SETTLING = "DELETE FROM events WHERE kind < -1"
SETTLING_ALL = f"DELETE FROM events WHERE kind = {_DAMAGED}"
