"""The import names of nvdlfw_inspect, for pipesight."""

from pipesight._shim_conflicts import refuse_beside

__all__ = ["__version__"]

refuse_beside(__file__, "pipesight-nvdlfw-inspect", "nvdlfw-inspect")
__version__ = "0.2.2+pipesight"
