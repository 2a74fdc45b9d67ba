"""Features of the namespace ``engine``: they change tensors, choose a precision, and log statistics."""

import nvdlfw_inspect.api as debug_api
from engine_api import EngineConfigMapper
from engine_buffers import BUFFERS
from nvdlfw_inspect.debug_features.log_tensor_stats import LogTensorStats as BaseLogTensorStats
from nvdlfw_inspect.registry import Registry, api_method
from nvdlfw_inspect.utils import append_parent_docstring


@Registry.register_feature(namespace="engine")
@append_parent_docstring(parent=EngineConfigMapper)
class Scale(EngineConfigMapper):
    """Multiply chosen tensors of chosen GEMMs."""

    @api_method
    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return False, None

    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return True, iteration + 1

    @api_method
    def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, iteration, default_quantizer=None, out=None):
        for key in config:
            if key not in ("gemm", "tensor", "factor"):
                raise ValueError(f"unexpected key in config: {key}")
        debug_api.log_message(f"scale: {gemm}, {tensor_name}", layer_name, extra_cachable_args=(gemm, tensor_name))
        return config["factor"] * tensor


@Registry.register_feature(namespace="engine")
class DisableGEMM(EngineConfigMapper):
    """Compute chosen GEMMs in high precision."""

    @api_method
    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        assert list(config) == ["gemm"], config
        return False, iteration + 1


@Registry.register_feature(namespace="engine")
class LogTensorStats(BaseLogTensorStats):
    """Log the sum of chosen tensors."""

    def _get_supported_stats_list(self):
        return BaseLogTensorStats._get_supported_stats_list(None) | {"sum"}

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return iteration % config.get("freq", 1) == 0, None

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration, tp_group):
        assert set(config["stats"]) <= self._get_supported_stats_list()
        BUFFERS.feed(layer_name, tensor_name, tensor, iteration)
        debug_api.log_message(f"inspect: {tensor_name}", layer_name, extra_cachable_args=(tensor_name))
