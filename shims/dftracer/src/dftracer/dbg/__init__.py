"""``dftracer.dbg``, the debug build, for pipesight: there is one build, and this is it."""

__all__: list[str] = []
