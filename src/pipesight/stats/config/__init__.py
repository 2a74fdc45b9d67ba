"""A configuration: read, checked whole, and asked which layers, tensors, statistics and steps it selects."""

from pipesight.stats.config._check_feature import GEMM_KEYS, TENSOR_KEYS
from pipesight.stats.config.rules import StatisticRequest, TensorRule
from pipesight.stats.config.sections import Config, FeatureConfig, Section, load, selection_of
from pipesight.stats.config.steps import STEP_KEYS
from pipesight.stats.config_errors import ConfigError

__all__ = [
    "GEMM_KEYS",
    "STEP_KEYS",
    "TENSOR_KEYS",
    "Config",
    "ConfigError",
    "FeatureConfig",
    "Section",
    "StatisticRequest",
    "TensorRule",
    "load",
    "selection_of",
]
