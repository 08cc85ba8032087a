"""`horovod` in a process that multiprocessing started: it inherits sys.path but not the parent's import finder."""

from netbottleneck.hooks import imports

imports.stand_in()

__version__ = imports.HOROVOD_VERSION
__path__ = []  # the finder loads the submodules
