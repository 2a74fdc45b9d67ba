"""Select the settings of a feature that apply to one call, by the tensor that the call is about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from pipesight.stats.extensions.namespace_api import BaseNamespaceAPI, Settings

__all__ = ["BaseConfigAPIMapper", "GenericConfigAPIMapper", "GenericFrameworkAPI"]


class BaseConfigAPIMapper(ABC):
    """What a feature derives from that chooses its settings by the arguments of a call."""

    @abstractmethod
    def parse_config_and_api(self, config: Mapping[str, Any], **kwargs: Any) -> tuple[bool, Settings | None]:
        """Return whether the settings are about this call, and those that apply to it."""

    def _process_tensor_config(self, cfg: Mapping[str, Any], api_tensor_name: str) -> Settings | None:
        """Return the settings for one tensor, or None if they are not about it.

        Raises:
            ValueError: They name no tensors at all.
        """
        rest = {key: value for key, value in cfg.items() if key not in ("tensors", "tensors_struct")}
        if "tensors_struct" in cfg:
            for own in cfg["tensors_struct"]:
                if own["tensor"] == api_tensor_name:
                    return {**rest, **own}
            return None
        if "tensors" not in cfg:
            raise ValueError(
                f"a feature must say which tensors it is about (settings: {', '.join(cfg)}); "
                "add 'tensors: [activation]' or 'tensors_struct' to it"
            )
        names = cfg["tensors"]
        names = [names] if isinstance(names, str) else names
        return {**rest, "tensor": api_tensor_name} if api_tensor_name in names or "all" in names else None


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
        settings = {key: value for key, value in config.items() if key != "enabled"}
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

    def handle_multi_feature_output(
        self, api_name: str, multi_feature_outputs: list[Any], features_to_invoke: Mapping[str, Settings], **kwargs: Any
    ) -> Any:
        """Join mappings, the later over the earlier; anything else must be the same."""
        if all(isinstance(output, Mapping) for output in multi_feature_outputs):
            return {key: value for output in multi_feature_outputs for key, value in output.items()}
        return super().handle_multi_feature_output(api_name, multi_feature_outputs, features_to_invoke, **kwargs)
