"""A double of Horovod, for tests: as much of its Python layer as matters to what stands before its C library."""

__version__ = "0.28.1"
