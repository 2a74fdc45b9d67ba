"""The API: one session per process, from `initialize` to `end_debug`.

Example::

    import pipesight.stats as debug_api

    debug_api.initialize("stats.yaml", log_dir="run")
    for batch in loader:
        ...
        debug_api.log_tensor_stats("fc1", tensor=x, tensor_name="activation")
        debug_api.step()
    debug_api.end_debug()
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipesight.stats.builtin_features  # noqa: F401 (registers them)
from pipesight.stats import current_session
from pipesight.stats.config import Config, load
from pipesight.stats.config_errors import nearest
from pipesight.stats.current_session import running, running_or_none
from pipesight.stats.layer_names import named_layers
from pipesight.stats.log_settings import LogSettings, process_rank
from pipesight.stats.message_log import MessageLog
from pipesight.stats.registry import Registry, default_registry
from pipesight.stats.sinks import BaseLogger, FileSink, JsonlSink, LoggerSink, Record, Sink, Sinks, TensorBoardSink
from pipesight.stats.stats_session import StatsSession

__all__ = [
    "CheckedConfig",
    "check_config",
    "end_debug",
    "explain_features",
    "get_tensor_reduction_group",
    "infer_and_assign_layer_names",
    "initialize",
    "initialize_training_step",
    "list_features",
    "log_message",
    "log_scalar",
    "log_tensor_stats",
    "open_session",
    "refuse_unknown",
    "set_tensor_reduction_group",
    "step",
]

_is_compiling = torch.compiler.is_compiling


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
    """Start logging statistics in this process; `end_debug` ends it.

    Args:
        config_file: The path of a YAML file, or a dict; ``""`` enables no feature.
        feature_dirs: Folders with features of your own.
        statistics_logger: A `BaseLogger`, or several, that gets every value.
        log_dir: Folder for the log files.
        init_training_step: The number of the first step, for example after loading a checkpoint.
        tb_writer: A TensorBoard ``SummaryWriter``, which gets every value.
        default_logging_enabled: Write the log file even if a logger or a writer is given.
        **kwargs: ``sinks``, more `Sink` objects such as `WandbSink`; ``reduction_timeout``, how many seconds to wait
            for other ranks (300 by default); ``extensions``, accepted for compatibility and ignored.

    Raises:
        ConfigError: The configuration has mistakes; the error lists them all.
        RuntimeError: A session is already open.
        TypeError: An argument is unknown.
    """
    if current_session.of_process is not None:
        raise RuntimeError("statistics are already initialized; call end_debug() first")
    refuse_unknown("initialize", kwargs, more=["config_file"])
    current_session.of_process = open_session(
        config_file,
        feature_dirs,
        statistics_logger,
        log_dir=log_dir,
        init_training_step=init_training_step,
        tb_writer=tb_writer,
        default_logging_enabled=default_logging_enabled,
        **kwargs,
    )


@dataclass(frozen=True, slots=True)
class CheckedConfig:
    """A configuration without mistakes, and the features that it was checked against."""

    config: Config
    registry: Registry


def check_config(config: str | os.PathLike[str] | Mapping[str, Any], feature_dirs: Any = None) -> CheckedConfig:
    """Read a configuration and the features of ``feature_dirs``; write nothing.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It has mistakes; the error lists them all.
    """
    registry = default_registry().copy()
    registry.load_entry_points()
    registry.load_feature_dirs(feature_dirs)
    return CheckedConfig(load(os.fspath(config) if isinstance(config, os.PathLike) else config, registry), registry)


def open_session(
    config: str | os.PathLike[str] | Mapping[str, Any] | CheckedConfig,
    feature_dirs: Any = None,
    statistics_logger: BaseLogger | Sequence[BaseLogger] | None = None,
    log_dir: str | os.PathLike[str] | None = ".",
    init_training_step: int = 0,
    tb_writer: Any = None,
    default_logging_enabled: bool = False,
    *,
    sinks: Iterable[Sink] = (),
    reduction_timeout: float = 300.0,
    extensions: object = None,
    log: Callable[[int, str], None] | None = None,
) -> StatsSession:
    """Return a new session; see `initialize` for the arguments. If it fails, nothing is left behind.

    Given ``log``, messages go there with their levels instead of into a file.
    """
    if not isinstance(init_training_step, int) or isinstance(init_training_step, bool) or init_training_step < 0:
        raise ValueError(
            f"init_training_step must be an integer of 0 or more (init_training_step: {init_training_step!r})"
        )
    if isinstance(reduction_timeout, bool) or not 0 < reduction_timeout < float("inf"):
        raise ValueError(
            f"reduction_timeout must be a positive number of seconds (reduction_timeout: {reduction_timeout!r})"
        )
    checked = config if isinstance(config, CheckedConfig) else check_config(config, feature_dirs)
    folder = Path("." if log_dir is None else log_dir)
    settings, rank = LogSettings.from_environment(), process_rank()
    loggers: Any = statistics_logger if isinstance(statistics_logger, list | tuple | set) else [statistics_logger]
    given: list[Sink] = [LoggerSink(logger) for logger in loggers if logger is not None]
    if tb_writer is not None:
        given.append(TensorBoardSink(tb_writer))
    given += _checked(sinks)
    if not given or default_logging_enabled:
        given.append(FileSink(folder, rank=rank, settings=settings))
    given.append(JsonlSink(folder, rank=rank, overwrite=settings.overwrite))
    messages = MessageLog(folder, rank=rank, settings=settings, log=log)
    if checked.config.sections:
        _begin_files(given)
    return StatsSession(
        checked.config,
        checked.registry,
        Sinks(given, warn=messages.warning),
        messages,
        folder=folder / "stats" / "nonfinite",
        rank=rank,
        step=init_training_step,
        timeout=reduction_timeout,
    )


def refuse_unknown(function: str, names: Iterable[str], *, more: Iterable[str]) -> None:
    """Raise ``TypeError`` for arguments that are neither settings of a session nor in ``more``."""
    known = (inspect.signature(open_session).parameters.keys() - {"config"}) | {*more}
    hints = [f"{name!r}{nearest(name, known)}" for name in names if name not in known]
    if hints:
        raise TypeError(f"{function}() takes no argument {', nor '.join(hints)}")


def _begin_files(sinks: Iterable[Sink]) -> None:
    """Make the files of values, so that those of an earlier run are not taken for this one's."""
    for sink in sinks:
        if isinstance(sink, FileSink | JsonlSink):
            with contextlib.suppress(OSError):  # there will be a warning when there is something to write
                sink.open()


def _checked(sinks: Iterable[Sink] | Sink) -> list[Sink]:
    found = list(sinks) if isinstance(sinks, Iterable) else [sinks]
    for sink in found:
        if isinstance(sink, type) or not callable(getattr(sink, "write", None)) or not callable(sink.close):
            raise TypeError(f"a sink must have write(records) and close() (sinks: {sink!r}); see pipesight.stats.Sink")
    return found


def log_tensor_stats(
    layer_name: str,
    tensor: Tensor,
    tensor_name: str,
    iteration: int | None = None,
    skip_reduction: bool = False,
    reduction_group: dist.ProcessGroup | None = None,
    gemm: str | None = None,
) -> Mapping[str, Any]:
    """Measure a tensor if the configuration selects it in this step; `step` logs the values.

    Several calls for one tensor in one iteration are merged into one value. The tensor is neither modified nor kept.

    Args:
        layer_name: The layer's name, which the configuration selects by.
        tensor: The tensor to measure.
        tensor_name: What it is, such as ``"activation"``.
        iteration: The iteration; by default the session's step counter, which `step` increments.
        skip_reduction: Log the values of this rank, without merging over ranks.
        reduction_group: Merge over these ranks instead of those of `set_tensor_reduction_group`.
        gemm: The matrix product it is an operand of, for ``gemms_struct``.

    Returns:
        The statistics of this tensor on this rank by name, computed on access; empty if the tensor is not selected.

    Raises:
        RuntimeError: No session is open.
        ConfigError: Two sections select the layer.
        NonfiniteError: The tensor has NaN or Inf, and the configuration says ``on_nonfinite: raise``.
    """
    if _is_compiling():
        return _log_uncompiled(layer_name, tensor, tensor_name, iteration, skip_reduction, reduction_group, gemm)
    return running().log_tensor_stats(layer_name, tensor, tensor_name, iteration, skip_reduction, reduction_group, gemm)


def _log(*args: Any) -> Mapping[str, Any]:
    return running().log_tensor_stats(*args)


_log_uncompiled: Callable[..., Mapping[str, Any]] = torch.compiler.disable(_log)


def log_scalar(name: str, value: Tensor | float, iteration: int) -> None:
    """Log a value of your own, such as one that a feature computed, at once and on this rank."""
    plain = float(value.detach() if isinstance(value, Tensor) else value)
    running().sinks.write([Record.named(name, plain, operator.index(iteration))])


def step() -> None:
    """End a training step: merge over ranks and log what was measured in it. Does nothing without a session."""
    session = running_or_none()
    if session is not None:
        session.step()


def initialize_training_step(train_step: int) -> None:
    """Set the step counter, for example after loading a checkpoint."""
    running().count_from(operator.index(train_step))


def set_tensor_reduction_group(group: dist.ProcessGroup | None, layer_name: str | None = None) -> None:
    """Merge the statistics of one layer, or of all, over the ranks of a group; ``None`` for all ranks.

    This applies to the statistics of `pipesight.observe`, too. By default, those of a `DistributedPipeline` are merged
    over its data-parallel group.
    """
    sessions = [session for session in (running_or_none(), current_session.of_run) if session is not None]
    for session in sessions or [running()]:
        session.merging.set_group(group, layer_name)


def get_tensor_reduction_group() -> dist.ProcessGroup | None:
    """Return the group set by `set_tensor_reduction_group`; ``None`` for all ranks."""
    return running().merging.group


def log_message(message: str, layer_name: str | None = None, level: int = logging.INFO, **_: Any) -> None:
    """Write a line to the message log, after ``LAYER=layer_name: `` if it is about a layer."""
    running().messages.log_message(message if layer_name is None else f"LAYER={layer_name}: {message}", level)


def list_features() -> list[str]:
    """Return the names of the features that a configuration can use."""
    return _registry().list_features()


def explain_features(features: str | Iterable[str] | None = None) -> str:
    """Return the documentation of one feature, of several, or of all."""
    return _registry().explain_features("all" if features is None else features)


def _registry() -> Registry:
    session = running_or_none()
    return default_registry() if session is None else session.registry


def infer_and_assign_layer_names(model: nn.Module | Iterable[nn.Module]) -> None:
    """Set the attribute ``name`` of a model, or several, and of its layers: ``model``, ``model.fc1`` and so on.

    In an ``nn.ModuleList``, the number of a layer is its ``layer_number``, if it has one.
    """
    for one in [model] if isinstance(model, nn.Module) else model:
        one.name = "model"  # type: ignore[assignment]
        for name, layer in named_layers(one, numbered=True):
            layer.name = f"model.{name}"  # type: ignore[assignment]


def end_debug() -> None:
    """Log the remaining values and end the session. Does nothing without a session."""
    session, current_session.of_process = current_session.of_process, None
    if session is not None:
        session.close()
