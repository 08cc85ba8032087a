"""Data that a package carries: handwritten digits, 1,797 images of 8 x 8, from scikit-learn's wheel."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FILE = Path("datasets", "data", "digits.csv.gz")


@dataclass(frozen=True)
class Digits:
    """Images are float32 (N, 1, 8, 8) from 0 to 1, labels int64 (N,) from 0 to 9; a fifth is held out."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def digits(seed: int = 0) -> Digits:
    """Return the digits, shuffled by `seed` and split: 1,438 to train on and 359 held out.

    Raises ImportError naming scikit-learn where it is not installed. scikit-learn itself is not imported."""
    table = _table()
    order = np.random.default_rng(seed).permutation(len(table))
    images = (table[order, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = table[order, 64].astype(np.int64)
    held = len(table) // 5
    return Digits(images[held:], labels[held:], images[:held], labels[:held])


def _table() -> NDArray[np.float64]:
    package: Any = importlib.util.find_spec("sklearn")
    for folder in package.submodule_search_locations if package is not None else ():
        path = Path(folder, _FILE)
        if path.exists():
            return np.loadtxt(path, delimiter=",")
    raise ImportError(
        "the digits come with scikit-learn, which is not installed here or lacks them: "
        "pip install 'netbottleneck[study]' or pip install scikit-learn",
        name="sklearn",
    )
