"""Horovod's name in a process that multiprocessing started: it has its parent's sys.path, but no finder."""

from netbottleneck.hooks import imports

imports.stand_in()

__version__ = imports.HOROVOD_VERSION
__path__ = []  # what is below comes from the finder
