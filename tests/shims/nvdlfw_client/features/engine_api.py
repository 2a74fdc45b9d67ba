"""The namespace ``engine`` and its API, with the calls, hooks and settings that Transformer Engine has."""

import copy

from engine_buffers import BUFFERS
from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
from nvdlfw_inspect.logging import custom_assert
from nvdlfw_inspect.registry import Registry

ARGUMENTS = {
    "fp8_gemm_enabled": ["gemm"],
    "modify_tensor_enabled": ["tensor_name", "gemm"],
    "modify_tensor": ["tensor_name", "gemm"],
    "inspect_tensor_enabled": ["tensor_name"],
    "inspect_tensor": ["tensor_name"],
    "inspect_tensor_postquantize_enabled": ["tensor_name"],
    "inspect_tensor_postquantize": ["tensor_name"],
}


class EngineConfigMapper(BaseConfigAPIMapper):
    """Chooses settings by tensor, and by GEMM where the call names one."""

    def parse_config_and_api(self, config, **kwargs):
        config = copy.deepcopy(config)
        if kwargs["gemm_parsing"]:
            chosen = self._by_gemm(config, kwargs)
        elif kwargs["tensor_parsing"]:
            chosen = self._process_tensor_config(config, kwargs["tensor_name"])
        else:
            chosen = config
        if not chosen:
            return False, None
        chosen.pop("enabled", None)
        return True, chosen

    def _by_gemm(self, config, kwargs):
        if "gemms_struct" in config:
            entries = [entry for entry in config.pop("gemms_struct") if entry["gemm"] == kwargs["gemm"]]
            if not entries or (
                kwargs["tensor_parsing"] and not self._process_tensor_config(entries[0], kwargs["tensor_name"])
            ):
                return None
            config.update(entries[0])
            return config
        if kwargs["gemm"] not in config.pop("gemms"):
            return None
        # The settings change in place: what is returned is only looked at for None.
        if kwargs["tensor_parsing"] and not self._process_tensor_config(config, kwargs["tensor_name"]):
            return None
        config["gemm"] = kwargs["gemm"]
        return config


class Defaults:
    """What is done where no feature is configured."""

    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return True, None

    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return False, None

    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return False, None

    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration, tp_group):
        return None

    def inspect_tensor_postquantize_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return False, None

    def inspect_tensor_postquantize(self, config, layer_name, tensor_name, tensor, iteration, tp_group, rowwise):
        return None


@Registry.register_namespace_api(namespace="engine")
class EngineAPI(BaseNamespaceAPI):
    """Routes the calls."""

    def __init__(self):
        BaseNamespaceAPI.__init__(self)
        self._default_api_impl = Defaults()
        self._cacheable_api_kwargs_map = {
            "modify_tensor": ["tensor_name", "gemm"],
            "modify_tensor_enabled": ["tensor_name"],
            "inspect_tensor": ["tensor_name"],
            "inspect_tensor_enabled": ["tensor_name", "iteration"],
        }

    def is_multiple_feature_invocation_allowed(self, api_name):
        return api_name in {"fp8_gemm_enabled", "inspect_tensor", "inspect_tensor_enabled"}

    def input_assertions_hook(self, api_name, **kwargs):
        for name in ARGUMENTS[api_name]:
            custom_assert(name in kwargs, f"{api_name} needs {name}")

    def routing_condition(self, api_name, config, layer_name, feature_obj, **kwargs):
        return feature_obj.parse_config_and_api(
            config,
            gemm_parsing="gemm" in ARGUMENTS[api_name],
            tensor_parsing="tensor_name" in ARGUMENTS[api_name],
            **kwargs,
        )

    def output_assertions_hook(self, api_name, ret, **kwargs):
        assert isinstance(ret, tuple) == api_name.endswith("_enabled")

    def handle_multi_feature_output(self, api_name, multi_feature_outputs, features_to_invoke, **kwargs):
        if api_name == "fp8_gemm_enabled":
            return all(on for on, _ in multi_feature_outputs), None
        if api_name == "inspect_tensor_enabled":
            return any(on for on, _ in multi_feature_outputs), None
        return super().handle_multi_feature_output(api_name, multi_feature_outputs, features_to_invoke, **kwargs)

    def step(self):
        BUFFERS.log()

    def end_debug(self):
        BUFFERS.ended += 1
