"""``nvdlfw_inspect.debug_features``, for pipesight."""
