"""A configuration: read, checked whole, and asked which layers, tensors, statistics and steps it selects."""

from pipesight.stats.config.sections import (
    GEMM_KEYS,
    STEP_KEYS,
    TENSOR_KEYS,
    Config,
    ConfigError,
    FeatureConfig,
    Section,
    StatisticRequest,
    TensorRule,
    load,
    selection_of,
)

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
