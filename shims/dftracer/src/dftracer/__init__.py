"""The import names of DFTracer, for pipesight."""

__all__ = ["__version__"]

__version__ = "2.2.0+pipesight"
