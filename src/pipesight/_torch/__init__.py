"""Everything that pipesight uses of torch's private interface: the only place to look when a new torch breaks it.

Each module wraps one area of torch. A private name gets a public one here, with what it does and, where it is not as
old as the oldest torch supported (2.6), since when. No other module names it; ``tests/test_torch_names.py`` checks.

Not wrapped, because they have not changed since torch 1.0 and are read in hot loops: ``Tensor._version`` and
``Module._modules``, ``_parameters`` and ``_buffers``. A subclass of a torch class names the methods it overrides.
"""

__all__: list[str] = []
