"""``nvdlfw_inspect.api``, imported ``as debug_api``: one session per process, from `initialize` to `end_debug`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pipesight.stats.api
from nvdlfw_inspect.debug_manager import check_name, manager_of
from nvdlfw_inspect.logging import LoggersSink, MetricLogger, get_logger, print_rank_0, wrap_tensorboard_writer
from nvdlfw_inspect.registry import Registry
from pipesight.stats.api import (
    get_tensor_reduction_group,
    infer_and_assign_layer_names,
    initialize_training_step,
    log_tensor_stats,
    set_tensor_reduction_group,
    step,
)
from pipesight.stats.current_session import running, running_or_none
from pipesight.stats.message_log import with_prefix
from pipesight.stats.sinks import BaseLogger

__all__ = [
    "BaseLogger",
    "end_debug",
    "explain_features",
    "get_tensor_reduction_group",
    "infer_and_assign_layer_names",
    "initialize",
    "initialize_training_step",
    "list_features",
    "log_message",
    "log_tensor_stats",
    "set_tensor_reduction_group",
    "step",
]


def initialize(
    config_file: str | os.PathLike[str] | Mapping[str, Any] = "",
    feature_dirs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    statistics_logger: BaseLogger | Sequence[BaseLogger] | None = None,
    log_dir: str | os.PathLike[str] | None = ".",
    init_training_step: int = 0,
    tb_writer: Any = None,
    default_logging_enabled: bool = False,
    **kwargs: Any,
) -> None:
    """Start logging statistics in this process; see `pipesight.stats.initialize`.

    Loggers that `MetricLogger` already has are used too. Warnings on stderr begin with ``NVDLFW INSPECT``.
    """
    before = list(MetricLogger.enabled_loggers)
    sinks = kwargs.pop("sinks", ())
    loggers: Any = statistics_logger if isinstance(statistics_logger, list | tuple | set) else [statistics_logger]
    try:
        for logger in loggers:
            if logger is not None:
                MetricLogger.add_logger(logger)
        if tb_writer is not None:
            MetricLogger.add_logger(wrap_tensorboard_writer(tb_writer))
        to_file = default_logging_enabled or not MetricLogger.enabled_loggers
        with_prefix("NVDLFW INSPECT", pipesight.stats.api.initialize)(
            config_file,
            feature_dirs,
            log_dir=log_dir,
            init_training_step=init_training_step,
            default_logging_enabled=to_file,
            sinks=[LoggersSink(), *(sinks if isinstance(sinks, Iterable) else [sinks])],
            **kwargs,
        )
        manager_of(running())
        if to_file:
            MetricLogger.add_logger(get_logger())
    except BaseException:
        MetricLogger.enabled_loggers[:] = before
        raise


def log_message(
    msg: str, layer_name: str | None = None, level: int = logging.INFO, extra_cachable_args: object = None
) -> None:
    """Write a line to the message log, once for each message, layer and ``extra_cachable_args``."""
    if running().messages.is_first((msg, layer_name, repr(extra_cachable_args))):
        pipesight.stats.api.log_message(msg, layer_name, level)


def list_features() -> list[str]:
    """Print and return the names of the features that a configuration can use."""
    found = pipesight.stats.api.list_features()
    print_rank_0(found)
    return found


def explain_features(features: str | Iterable[str] | None = None) -> str:
    """Print and return the documentation of one feature, of several, or of all."""
    text = pipesight.stats.api.explain_features(features)
    print_rank_0(text)
    return text


def end_debug() -> None:
    """Log the remaining values and end the session. Does nothing without a session."""
    pipesight.stats.api.end_debug()


def __getattr__(name: str) -> Any:
    """Return ``DEBUG_MANAGER``, the API of a namespace, or a call that features of the base namespace serve.

    Example::

        debug_api.transformer_engine.fp8_gemm_enabled("decoder.1.qkv", gemm="fprop", iteration=0)
        debug_api.count_calls("fc1", tensor_name="activation")  # a feature of the user's, in the base namespace

    Raises:
        AttributeError: There is nothing of that name.
        RuntimeError: There is no session.
    """
    session = running_or_none()
    if name == "DEBUG_MANAGER":
        return None if session is None else manager_of(session)
    if session is None:
        check_name(name, Registry.data)
    return manager_of(running()).get_extension_api(name)
