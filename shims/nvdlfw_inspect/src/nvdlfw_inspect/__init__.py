"""The import names of nvdlfw_inspect, for pipesight."""

__all__ = ["__version__"]

__version__ = "0.2.2+pipesight"
