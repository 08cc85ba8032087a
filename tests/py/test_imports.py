"""Cost and effects of `import netbottleneck`, each time in a new process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import RANKS_LIMIT_S

LOOK = """
import sys
before = list(sys.meta_path), list(sys.path_hooks)
import threading
import netbottleneck
import netbottleneck.config
assert (list(sys.meta_path), list(sys.path_hooks)) == before
heavy = {"torch", "numpy", "rich", "psutil", "jinja2", "cloudpickle", "netbottleneck._core"} & set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1
"""


def python(source: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run source text in a new interpreter."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=RANKS_LIMIT_S,
        check=False,
    )


def test_import_alone_loads_nothing_and_prints_nothing() -> None:
    ended = python(LOOK)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_variables_that_do_not_enable_it_change_nothing() -> None:
    ended = python(LOOK, NETBOTTLENECK="0", NETBOTTLENECK_STREAMS="4")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "env",
    [
        {"NETBOTTLENECK": "1"},
        {"NETBOTTLENECK_TRANSPORT": "tcp"},
        {"NETBOTTLENECK_TRANSPORT": "stock,ofi"},
    ],
)
def test_an_enabling_variable_waits_for_torch_without_importing_it(env: dict[str, str]) -> None:
    source = """
import sys
import netbottleneck
assert "torch" not in sys.modules
assert "netbottleneck._core" not in sys.modules
"""
    ended = python(source, **env)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("first", ["netbottleneck", "torch"])
def test_ddp_is_patched_once_both_are_imported(first: str) -> None:
    pytest.importorskip("torch")
    second = {"netbottleneck": "torch", "torch": "netbottleneck"}[first]
    source = f"""
import {first}
import {second}
from torch.nn.parallel import DistributedDataParallel as wrapped
import torch
assert wrapped is torch.nn.parallel.distributed.DistributedDataParallel
assert "netbottleneck" in wrapped.__init__.__code__.co_filename
import inspect
assert "find_unused_parameters" in inspect.signature(wrapped).parameters
"""
    ended = python(source, NETBOTTLENECK="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_horovods_name_is_taken_only_on_request() -> None:
    absent = "import horovod"
    assert "ModuleNotFoundError" in python(f"import netbottleneck\n{absent}").stderr
    source = """
import netbottleneck
import horovod.torch as hvd
import horovod
assert hvd.DistributedOptimizer and hvd is horovod.torch
import netbottleneck.torch
assert netbottleneck.torch.init is hvd.init
from horovod.torch.mpi_ops import Average
try:
    import horovod.tensorflow
except ModuleNotFoundError as error:
    assert "horovod.torch only" in str(error)
else:
    raise AssertionError
"""
    pytest.importorskip("torch")
    ended = python(source, NETBOTTLENECK="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NETBOTTLENECK", "yes"),
        ("NETBOTTLENECK_TRANSPORT", "rdma"),
        ("NETBOTTLENECK_TRANSPORT", "stock,stock"),
        ("NETBOTTLENECK_STREAMS", "0"),
        ("NETBOTTLENECK_STREAMS", "65"),
        ("NETBOTTLENECK_STREAMS", "abc"),
        ("NETBOTTLENECK_PORTS", "5-3"),
        ("NETBOTTLENECK_TIMEOUT_S", "soon"),
        ("NETBOTTLENECK_SECRET", "short"),
    ],
)
def test_a_wrong_value_is_refused_at_once_with_name_and_value(name: str, value: str) -> None:
    env = {"NETBOTTLENECK": "1", name: value}
    ended = python("import netbottleneck", **env)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    shown = "(redacted)" if name.endswith("SECRET") else value
    assert last.startswith(f"ValueError: {name}={shown}: must be "), last


def test_a_misspelt_variable_is_warned_of() -> None:
    ended = python("import netbottleneck", NETBOTTLENECK="1", NETBOTTLENECK_TRANSPROT="tcp")
    assert ended.returncode == 0
    assert "did you mean NETBOTTLENECK_TRANSPORT?" in ended.stderr
