"""``nvdlfw_inspect.base``: what the API of a namespace and the features of an extension derive from."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from nvdlfw_inspect.config_manager import ConfigManager
from pipesight.stats.config_errors import nearest

__all__ = ["BaseConfigAPIMapper", "BaseNamespaceAPI"]

MOST_REMEMBERED = 10_000

Settings = dict[str, Any]
Found = tuple[str, Callable[..., Any], Settings]


class BaseConfigAPIMapper(ABC):
    """What a feature derives from that chooses its settings by the arguments of a call."""

    @abstractmethod
    def parse_config_and_api(self, config: Mapping[str, Any], **kwargs: Any) -> tuple[bool, Settings | None]:
        """Return whether the settings are about this call, and those that apply to it."""

    def _process_tensor_config(self, cfg: Settings, api_tensor_name: str) -> Settings | None:
        """Turn settings into those for one tensor, in place, and return them; None if they are not about it.

        Raises:
            ValueError: They name no tensors at all.
        """
        if "tensors_struct" in cfg:
            own = next((entry for entry in cfg["tensors_struct"] if entry["tensor"] == api_tensor_name), None)
            if own is None:
                return None
            del cfg["tensors_struct"]
            cfg.update(copy.deepcopy(own))
            return cfg
        if "tensors" not in cfg:
            raise ValueError(
                f"a feature must say which tensors it is about (settings: {', '.join(cfg)}); "
                "add 'tensors: [activation]' or 'tensors_struct' to it"
            )
        names = [cfg["tensors"]] if isinstance(cfg["tensors"], str) else cfg["tensors"]
        if api_tensor_name not in names and "all" not in names:
            return None
        del cfg["tensors"]
        cfg["tensor"] = api_tensor_name
        return cfg


class BaseNamespaceAPI(ABC):
    """What the API of a namespace derives from.

    ``api.name_of_call("layer", key=value)`` calls the method of that name of every feature that is configured for the
    layer and that `routing_condition` lets pass, or else that of ``_default_api_impl``. The four abstract methods are
    for a derived class to write; it can replace the others.

    Example::

        @Registry.register_namespace_api(namespace="mine")
        class MineAPI(BaseNamespaceAPI):
            def __init__(self):
                super().__init__()
                self._default_api_impl = Defaults()
                self._cacheable_api_kwargs_map = {"scale": ["tensor_name"]}
            ...

    Attributes:
        name: The namespace.
        namespace_features: The feature objects, by name.
        api_to_features_map: The names of the features that serve a call, by the name of the call.
    """

    name: str

    def __init__(self) -> None:
        self.namespace_features: dict[str, Any] = {}
        self.api_to_features_map: Mapping[str, Sequence[str]] = {}
        self._default_api_impl: Any = None
        self._default_api_map: dict[str, Callable[..., Any]] | None = None
        # The calls whose features depend on nothing but the layer and these arguments, so that they are found once.
        self._cacheable_api_kwargs_map: Mapping[str, Sequence[str]] = {}
        self._api_cache: dict[Hashable, list[Found]] = {}

    # What a derived class must say.

    @abstractmethod
    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        """Return whether several features may serve one call."""

    @abstractmethod
    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        """Check the arguments of a call."""

    @abstractmethod
    def routing_condition(
        self, api_name: str, config: Settings, layer_name: str, feature_obj: Any, **kwargs: Any
    ) -> tuple[bool, Settings | None]:
        """Return whether a feature serves this call, and the settings to call it with."""

    @abstractmethod
    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        """Check what a feature returned."""

    # What it may say.

    def handle_multi_feature_output(
        self, api_name: str, multi_feature_outputs: list[Any], features_to_invoke: Mapping[str, Settings], **kwargs: Any
    ) -> Any:
        """Make one result of those of several features: by default they must be the same.

        Raises:
            ValueError: They differ.
        """
        first, *others = multi_feature_outputs
        if not all(_same(first, other) for other in others):
            raise ValueError(
                f"features that serve one call must return the same (call: {self.name}.{api_name}, features: "
                f"{', '.join(features_to_invoke)}, outputs: {multi_feature_outputs}); "
                "override handle_multi_feature_output to choose"
            )
        return first

    def call_feature(self, call: Callable[..., Any], feat_config: Settings, layer_name: str, **kwargs: Any) -> Any:
        """Call one feature."""
        return call(feat_config, layer_name, **kwargs)

    def step(self) -> None:  # noqa: B027 (most have nothing to do)
        """Is called at the end of each training step."""

    def end_debug(self) -> None:  # noqa: B027
        """Is called when the session ends."""

    # What the registry tells.

    def set_features(self, features: dict[str, Any]) -> None:
        """Set the feature objects."""
        self.namespace_features = features

    def set_api_map(self, api_map: Mapping[str, Sequence[str]]) -> None:
        """Set which features serve which call."""
        self.api_to_features_map = api_map

    def set_default_api_impl(self) -> None:
        """Find the calls that have a default."""
        names = [name for name in dir(self._default_api_impl) if not name.startswith("_")]
        methods = {name: getattr(self._default_api_impl, name) for name in names}
        self._default_api_map = {name: method for name, method in methods.items() if callable(method)}

    # Calls.

    def __getattr__(self, api_name: str) -> Callable[..., Any]:
        served, defaults = self.__dict__.get("api_to_features_map", {}), self.__dict__.get("_default_api_map") or {}
        if not served.get(api_name) and api_name not in defaults:
            calls = {*(call for call, features in served.items() if features), *defaults}
            rest = "" if api_name.startswith("_") else nearest(api_name, calls)
            raise AttributeError(f"no feature of this namespace serves the call {api_name!r}{rest}")
        return functools.partial(self.route_api, api_name=api_name)

    def route_api(self, layer_name: str, api_name: str, **kwargs: Any) -> Any:
        """Serve a call for a layer.

        Raises:
            ValueError: Several features would serve it, and only one may.
        """
        self.input_assertions_hook(api_name, **kwargs)
        found = self._features_of_call(layer_name, api_name, kwargs)
        if not found:
            default = (self._default_api_map or {}).get(api_name)
            return {} if default is None else default({}, layer_name, **kwargs)
        outputs = [self.call_feature(call, config, layer_name, **kwargs) for _, call, config in found]
        for output in outputs:
            self.output_assertions_hook(api_name, output, **kwargs)
        if len(outputs) == 1:
            return outputs[0]
        features = {feature: config for feature, _, config in found}
        return self.handle_multi_feature_output(api_name, outputs, features, **kwargs)

    def _features_of_call(self, layer_name: str, api_name: str, kwargs: Mapping[str, Any]) -> list[Found]:
        arguments = self._cacheable_api_kwargs_map.get(api_name)
        if arguments is None:
            return self._find(layer_name, api_name, kwargs)
        # Names such as gemm and tensor_name tell calls apart even where the API does not list them.
        told_apart = ((k, repr(v)) for k, v in kwargs.items() if isinstance(v, str) or k in arguments)
        key = (layer_name, api_name, *sorted(told_apart))
        if key not in self._api_cache:
            if len(self._api_cache) >= MOST_REMEMBERED:  # the iteration is an argument of some calls
                self._api_cache.clear()
            self._api_cache[key] = self._find(layer_name, api_name, kwargs)
        return self._api_cache[key]

    def _find(self, layer_name: str, api_name: str, kwargs: Mapping[str, Any]) -> list[Found]:
        section = ConfigManager.get_config_for_layer(layer_name)
        found: list[Found] = []
        for feature, config in section.get(self.name, {}).items():
            if not config.get("enabled", False) or feature not in self.api_to_features_map.get(api_name, ()):
                continue
            serves, settings = self.routing_condition(
                api_name, config, layer_name, self.namespace_features[feature], **kwargs
            )
            if serves:
                call = getattr(self.namespace_features[feature], api_name)
                found.append((feature, call, settings or config))
        if len(found) > 1 and not self.is_multiple_feature_invocation_allowed(api_name):
            raise ValueError(
                f"only one feature may serve this call (call: {self.name}.{api_name}, layer: {layer_name}, features: "
                f"{', '.join(feature for feature, _, _ in found)}); disable all others for this layer"
            )
        return found


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    import torch  # features are read without it

    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)
