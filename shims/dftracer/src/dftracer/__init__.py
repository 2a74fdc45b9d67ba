"""The import names of DFTracer, for pipesight. ``dftracer.utils`` and ``dftracer.analyzer`` may be installed beside."""

from pkgutil import extend_path

from pipesight._shim_conflicts import refuse_beside

__all__ = ["__version__"]

refuse_beside(__file__, "pipesight-dftracer", "dftracer", "pydftracer")
__path__ = extend_path(__path__, __name__)
__version__ = "2.2.0+pipesight"
