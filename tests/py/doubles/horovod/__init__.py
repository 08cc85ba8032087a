"""A double of Horovod for tests: the part of its Python layer that calls its C library."""

__version__ = "0.28.1"
