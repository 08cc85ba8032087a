"""How a framework is found, without a word of it in the imports of this package."""

import importlib
import sys
from types import ModuleType


def framework(user: str, *modules: str) -> ModuleType:
    """Return the first of these modules that the program has loaded, else the first that is installed.

    Raises ImportError naming the packages, for `user`, where none is.
    """
    for name in sorted(modules, key=lambda name: name.partition(".")[0] not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            package = name.partition(".")[0]
            if error.name is None or error.name.partition(".")[0] != package:
                raise
    packages = " or ".join(dict.fromkeys(name.partition(".")[0].replace("_", "-") for name in modules))
    raise ImportError(f"netbottleneck.callbacks.{user} needs {packages}, which is not installed: pip install it")
