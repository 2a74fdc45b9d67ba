"""``dftracer.dftracer``, DFTracer's module in C++, for pipesight: events by hand, of the one trace of the process."""

import os

from pipesight.trace.dftracer import dftracer

__all__ = [
    "enter_event",
    "exit_event",
    "finalize",
    "get_time",
    "initialize",
    "log_event",
    "log_metadata_event",
    "set_app_metadata_int",
    "set_app_metadata_string",
]

_log = dftracer.get_instance()

enter_event = _log.enter_event
exit_event = _log.exit_event
finalize = _log.finalize
get_time = _log.get_time
log_event = _log.log_event
log_metadata_event = _log.log_metadata_event
set_app_metadata_int = _log.set_app_metadata_int
set_app_metadata_string = _log.set_app_metadata_string


def initialize(
    log_file: str | os.PathLike[str] | None = None, data_dirs: str | None = None, process_id: int = -1
) -> None:
    """Begin to trace into ``log_file``, as `dftracer.logger.dftracer.initialize_log` does."""
    dftracer.initialize_log(log_file, data_dirs, process_id)
