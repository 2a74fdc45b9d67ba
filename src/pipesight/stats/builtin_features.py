"""The built-in features: statistics of tensors and of their casts to float8 and float4, and copies of tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipesight.stats.config import GEMM_KEYS, STEP_KEYS, TENSOR_KEYS, StatisticRequest
from pipesight.stats.config.steps import is_integer
from pipesight.stats.config_errors import shown
from pipesight.stats.current_session import running
from pipesight.stats.log_settings import process_rank
from pipesight.stats.measuring_feature import MeasuringFeature
from pipesight.stats.moments.cast_statistics import CAST_STATISTICS, NVFP4
from pipesight.stats.moments.statistic_formulas import STATISTICS
from pipesight.stats.registry import api_method, register_feature

if TYPE_CHECKING:  # reading a configuration needs no torch
    from torch import Tensor

    from pipesight.stats.tensor_dumps import TensorDumps

__all__ = [
    "DumpTensors",
    "LogFp8TensorStats",
    "LogNvfp4TensorStats",
    "LogTensorStats",
    "TransformerEngineLogTensorStats",
]

TRANSFORMER_ENGINE = "transformer_engine"
BLOCKWISE = "max_blockwise_dynamic_range"
MAX_BYTES = 10_000_000_000  # that a rank dumps

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
    statistics = frozenset(STATISTICS) | {BLOCKWISE}


@register_feature(TRANSFORMER_ENGINE, "LogTensorStats", stand_in=True)
class TransformerEngineLogTensorStats(LogTensorStats):
    """Log the statistics of ``LogTensorStats``; here the end of a range in ``start_end_list`` belongs to it.

    max_blockwise_dynamic_range of activations and weights is the greater one of their blocks along the last dimension
    and of those along all others, since training casts them both ways.
    """

    inclusive = True

    def requests(self, stats: tuple[StatisticRequest, ...], tensor_name: str) -> tuple[StatisticRequest, ...]:
        """Return the statistics, with blocks both ways for some tensors."""
        if tensor_name not in ("activation", "weight"):
            return stats
        return tuple(_both_ways(request) if request.name == BLOCKWISE else request for request in stats)


def _both_ways(request: StatisticRequest) -> StatisticRequest:
    options = {"block_size": 32, "dims": 1, **dict(request.options), "max_over_orientations": True}
    return StatisticRequest(request.name, tuple(options.items()))


@register_feature(TRANSFORMER_ENGINE, stand_in=True)
class LogFp8TensorStats(MeasuringFeature):
    """Log what a cast to float8 would do to the selected tensors; Transformer Engine is not needed.

    stats: underflows%, overflows%, underflows, overflows, mse, scale_inv_min, scale_inv_max, each with a recipe in
    front if need be (fp8_current_scaling_, fp8_delayed_scaling_, fp8_block_scaling_, mxfp8_); behind, _columnwise for
    blocks along the other dimensions, then _e5m2 for that format. ::

        transformer_engine:
          LogFp8TensorStats:
            enabled: true
            tensors: [activation, gradient]
            stats: [underflows%, mxfp8_mse, mxfp8_scale_inv_min_columnwise]
    """

    inclusive = True
    keys = KEYS
    statistics = frozenset(name for name, statistic in CAST_STATISTICS.items() if statistic.recipe != NVFP4)


@register_feature(TRANSFORMER_ENGINE, stand_in=True)
class LogNvfp4TensorStats(MeasuringFeature):
    """Log what a cast to NVFP4 would do to the selected tensors; Transformer Engine is not needed.

    stats: underflows%, overflows%, underflows, overflows, mse, scale_inv_min, scale_inv_max, each with _columnwise
    behind for blocks along the other dimensions. They are logged as nvfp4_underflows% and so on. ::

        transformer_engine:
          LogNvfp4TensorStats:
            enabled: true
            tensors: [activation, gradient]
            stats: [underflows%, mse]
    """

    inclusive = True
    keys = KEYS
    statistics = frozenset(
        name.removeprefix(f"{NVFP4}_") for name, statistic in CAST_STATISTICS.items() if statistic.recipe == NVFP4
    )

    def requests(self, stats: tuple[StatisticRequest, ...], tensor_name: str) -> tuple[StatisticRequest, ...]:
        """Return the statistics of the recipe."""
        return tuple(StatisticRequest(f"{NVFP4}_{request.name}", request.options) for request in stats)


@register_feature(TRANSFORMER_ENGINE, stand_in=True)
class DumpTensors:
    """Write the selected tensors to files, for torch.load: tensor_dumps/rank_0/iter_000100/fc1_activation.pt.

    A file holds a dict with the tensor under "high_precision", and where it is from. The files of a rank take max_bytes
    at most, 10 GB by default; then a warning says so, and no more are written. Transformer Engine itself writes
    quantized tensors, too; here there are none. ::

        transformer_engine:
          DumpTensors:
            enabled: true
            tensors: [activation, gradient]
            high_precision_tensor: true
            freq: 1000
            max_bytes: 1_000_000_000
    """

    inclusive = True
    keys = TENSOR_KEYS | GEMM_KEYS | STEP_KEYS | {"high_precision_tensor", "quantized_tensor", "max_bytes"}

    def __init__(self) -> None:
        self._dumps: TensorDumps | None = None
        self._warned = False
        self._lock = threading.Lock()

    @staticmethod
    def setting_mistakes(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with settings: the key, and the rule it breaks."""
        for key in ("high_precision_tensor", "quantized_tensor"):
            if not isinstance(settings.get(key, True), bool):
                yield key, f"must be true or false ({key}: {shown(settings[key])})"
        most = settings.get("max_bytes", MAX_BYTES)
        if not is_integer(most) or most < 0:
            yield "max_bytes", f"must be an integer of 0 or more (max_bytes: {shown(most)})"

    @api_method
    def log_tensor_stats(
        self, config: Mapping[str, Any], layer_name: str, *, tensor: Tensor, tensor_name: str, iteration: int, **_: Any
    ) -> None:
        """Write a tensor to a file."""
        session = running()
        with self._lock:
            if self._dumps is None:
                from pipesight.stats.tensor_dumps import TensorDumps

                self._dumps = TensorDumps(session.messages.root_log_dir, process_rank(), session.messages.warning)
            if config.get("quantized_tensor") and not self._warned:
                self._warned = True
                session.messages.warning(
                    "DumpTensors writes no quantized tensors: there are none without Transformer Engine's own layers"
                )
        if config.get("high_precision_tensor", True):
            most = config.get("max_bytes", MAX_BYTES)
            self._dumps.save(layer_name, tensor_name, iteration, tensor, max_bytes=most)
