"""Where statistics go: files, TensorBoard, a user's logger, Weights & Biases, MLflow."""

from pipesight.stats.sinks.fanout import Sinks
from pipesight.stats.sinks.file import FileSink
from pipesight.stats.sinks.jsonl import JsonlSink
from pipesight.stats.sinks.logger import BaseLogger, LoggerSink
from pipesight.stats.sinks.mlflow import MlflowSink
from pipesight.stats.sinks.record import Record, Records, Sink
from pipesight.stats.sinks.tensorboard import ScalarWriter, TensorBoardSink
from pipesight.stats.sinks.wandb import WandbSink

__all__ = [
    "BaseLogger",
    "FileSink",
    "JsonlSink",
    "LoggerSink",
    "MlflowSink",
    "Record",
    "Records",
    "ScalarWriter",
    "Sink",
    "Sinks",
    "TensorBoardSink",
    "WandbSink",
]
