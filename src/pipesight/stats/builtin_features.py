"""The built-in features: statistics of tensors, and of their cast to float8."""

from __future__ import annotations

from pipesight.stats.config import GEMM_KEYS, STEP_KEYS, TENSOR_KEYS
from pipesight.stats.extensions.measuring_feature import MeasuringFeature
from pipesight.stats.moments.fp8 import FP8_STATISTICS
from pipesight.stats.moments.statistic_formulas import STATISTICS
from pipesight.stats.registry import register_feature

__all__ = ["LogFp8TensorStats", "LogTensorStats", "TransformerEngineLogTensorStats"]

TRANSFORMER_ENGINE = "transformer_engine"


KEYS = TENSOR_KEYS | GEMM_KEYS | STEP_KEYS | {"stats", "on_nonfinite"}


@register_feature()
class LogTensorStats(MeasuringFeature):
    """Log statistics of the selected tensors, each read once.

    stats: min, max, mean, std, l1_norm, l2_norm, rms, amax, cur_amax, dynamic_range, zeros%, nans, infs, numel,
    kurtosis, max_blockwise_dynamic_range. ::

        LogTensorStats:
          enabled: true
          tensors: [activation, gradient]
          stats: [min, max, mean, std, l1_norm, l2_norm]
          freq: 10
          on_nonfinite: warn
    """

    keys = KEYS
    statistics = frozenset(STATISTICS) | {"max_blockwise_dynamic_range"}


@register_feature(TRANSFORMER_ENGINE, "LogTensorStats", stand_in=True)
class TransformerEngineLogTensorStats(LogTensorStats):
    """Log the statistics of ``LogTensorStats``; here the end of a range in ``start_end_list`` belongs to it."""


@register_feature(TRANSFORMER_ENGINE, stand_in=True)
class LogFp8TensorStats(MeasuringFeature):
    """Log what a cast to float8 would do to the selected tensors; Transformer Engine is not needed.

    stats: underflows%, overflows%, underflows, overflows, mse, scale_inv_min, scale_inv_max, each with a recipe in
    front if need be (fp8_current_scaling_, fp8_block_scaling_, mxfp8_) and _e5m2 behind for that format. ::

        transformer_engine:
          LogFp8TensorStats:
            enabled: true
            tensors: [activation, gradient]
            stats: [underflows%, mxfp8_mse]
    """

    keys = KEYS
    statistics = frozenset(FP8_STATISTICS)
