"""``nvdlfw_inspect.debug_features.generic_feature_api``: settings by tensor, and namespaces without an API."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI, Settings
from pipesight.stats.config.steps import steps_of
from pipesight.stats.current_session import running

__all__ = ["GenericConfigAPIMapper", "GenericFrameworkAPI"]


class GenericConfigAPIMapper(BaseConfigAPIMapper):
    """Chooses settings by ``tensors`` or ``tensors_struct`` and the ``tensor_name`` of a call."""

    def parse_config_and_api(self, config: Mapping[str, Any], **kwargs: Any) -> tuple[bool, Settings | None]:
        """Return whether the settings are about the tensor of this call, and those that apply to it.

        Example::

            >>> settings = {"enabled": True, "tensors": ["activation"], "stats": ["max"]}
            >>> GenericConfigAPIMapper().parse_config_and_api(settings, tensor_parsing=True, tensor_name="activation")
            (True, {'stats': ['max'], 'tensor': 'activation'})

        Args:
            config: The settings of the feature.
            kwargs: The arguments of the call; nothing is chosen unless ``tensor_parsing`` is one, and true.
        """
        if not kwargs.get("tensor_parsing"):
            return False, None
        settings = {key: copy.deepcopy(value) for key, value in config.items() if key != "enabled"}
        chosen = self._process_tensor_config(settings, kwargs["tensor_name"])
        return chosen is not None, chosen


class GenericFrameworkAPI(BaseNamespaceAPI):
    """The API of a namespace that has none of its own: a call goes to every feature that is about its tensor."""

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        """Let several features serve a call."""
        return True

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        """Leave the arguments to the features."""

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        """Take what a feature returns."""

    def routing_condition(
        self, api_name: str, config: Settings, layer_name: str, feature_obj: Any, **kwargs: Any
    ) -> tuple[bool, Settings | None]:
        """Ask the feature; one that does not choose serves the tensors it is configured for, or else every call."""
        choose = getattr(feature_obj, "parse_config_and_api", None)
        if choose is None:
            if "tensor_name" not in kwargs or not {"tensors", "tensors_struct"} & config.keys():
                return True, config
            choose = GenericConfigAPIMapper().parse_config_and_api
        chosen: tuple[bool, Settings | None] = choose(config, tensor_parsing="tensor_name" in kwargs, **kwargs)
        return chosen

    def call_feature(self, call: Callable[..., Any], feat_config: Settings, layer_name: str, **kwargs: Any) -> Any:
        """Call one feature; ``log_tensor_stats`` at the steps of its settings alone."""
        if getattr(call, "__name__", "") != "log_tensor_stats":
            return call(feat_config, layer_name, **kwargs)
        given = kwargs.pop("iteration", None)
        iteration = running().step_count if given is None else given
        steps = steps_of(feat_config, inclusive=getattr(getattr(call, "__self__", None), "inclusive", False))
        return call(feat_config, layer_name, iteration=iteration, **kwargs) if steps.includes(iteration) else {}

    def handle_multi_feature_output(
        self, api_name: str, multi_feature_outputs: list[Any], features_to_invoke: Mapping[str, Settings], **kwargs: Any
    ) -> Any:
        """Join mappings, the later over the earlier; anything else must be the same."""
        joined = [{} if output is None else output for output in multi_feature_outputs]
        if all(isinstance(output, Mapping) for output in joined):
            return {key: value for output in joined for key, value in output.items()}
        return super().handle_multi_feature_output(api_name, multi_feature_outputs, features_to_invoke, **kwargs)
