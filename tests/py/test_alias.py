"""`import horovod.torch` without Horovod: this package under that name, each time in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S, Ranks

pytest.importorskip("torch")

from netbottleneck.hooks import imports


def python(source: str, *arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run source text, or a command line, in a new interpreter."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
    command = [sys.executable, "-m", "netbottleneck", *arguments] if arguments else [sys.executable, "-c", source]
    return subprocess.run(
        command, env={**clean, **env}, capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=False, cwd=cwd
    )


def passes(source: str, **env: str) -> None:
    ended = python(source, NETBOTTLENECK="1", **env)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_modules_are_the_same_objects_under_both_names() -> None:
    passes("""
import netbottleneck
import horovod.torch as hvd
import horovod.torch.mpi_ops as under_horovod
import netbottleneck.torch.mpi_ops as under_netbottleneck
import horovod
assert under_horovod is under_netbottleneck and hvd is horovod.torch is netbottleneck.torch
for module, name in ((hvd, "netbottleneck.torch"), (under_horovod, "netbottleneck.torch.mpi_ops")):
    assert module.__name__ == module.__spec__.name == name, module.__spec__
assert not hasattr(under_horovod, "__path__")
assert horovod.__version__
from horovod.common.exceptions import HorovodInternalError
assert HorovodInternalError is hvd.HorovodInternalError is netbottleneck.HorovodInternalError
""")


def test_every_module_below_horovod_torch_is_the_same_under_both_names() -> None:
    passes("""
import importlib, pkgutil, sys
import netbottleneck
import horovod.torch as hvd
names = [one.name.removeprefix("netbottleneck.") for one in pkgutil.walk_packages(hvd.__path__, "netbottleneck.torch.")]
assert {"torch.optimizer", "torch.elastic.sampler", "torch.sync_batch_norm"} <= set(names)
for name in names:
    ours = importlib.import_module(f"horovod.{name}")
    assert ours is importlib.import_module(f"netbottleneck.{name}"), name
files = [module.__file__ for module in set(sys.modules.values()) if getattr(module, "__file__", None)]
below = [file for file in files if file.startswith(hvd.__path__[0])]
assert len(below) == len(set(below)) == len(names) + 1
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
assert ElasticSampler is hvd.elastic.ElasticSampler and TorchState is hvd.elastic.TorchState
""")


def test_scripts_can_import_from_horovod_common() -> None:
    passes(
        """
import netbottleneck
import horovod.torch as hvd
from horovod.common.basics import HorovodBasics
from horovod.common.elastic import ObjectState, State, notification_manager, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.common.util import gloo_built, mpi_built, num_rank_is_power_2, split_list
assert issubclass(hvd.elastic.TorchState, ObjectState) and issubclass(ObjectState, State)
assert HostsUpdatedInterrupt is hvd.HostsUpdatedInterrupt
assert (ProcessSet, global_process_set) == (hvd.ProcessSet, hvd.global_process_set)
assert (add_process_set, remove_process_set) == (hvd.add_process_set, hvd.remove_process_set)
assert (gloo_built, mpi_built) == (hvd.gloo_built, hvd.mpi_built)
basics = HorovodBasics("a path", "mpi_lib_v2")
basics.init()
assert (basics.rank(), basics.size(), basics.is_initialized(), basics.mpi_built()) == (0, 1, True, True)
assert hvd.is_initialized()
basics.shutdown()
calls = []
class Mine(State):
    def sync(self): calls.append("sync")
    def restore(self): calls.append("restore")
def once(state):
    if len(calls) < 2:
        raise HorovodInternalError("alone")
    return "done"
mine = Mine(lambda value: value, lambda: 0)
assert run_fn(once, lambda: calls.append("reset"))(mine) == "done"
assert calls == ["sync", "restore", "reset", "sync"]
""",
        NETBOTTLENECK_LOG_LEVEL="error",
    )


@pytest.mark.parametrize("first", ["horovod.torch.mpi_ops", "netbottleneck.torch.mpi_ops"])
def test_the_order_of_imports_does_not_matter(first: str) -> None:
    second = {"horovod.torch.mpi_ops": "netbottleneck.torch.mpi_ops"}.get(first, "horovod.torch.mpi_ops")
    passes(f"""
import sys
import netbottleneck
import {first}
import {second}
assert sys.modules["{first}"] is sys.modules["{second}"]
files = [getattr(module, "__file__", None) for module in set(sys.modules.values())]
assert sum(str(file).endswith("torch/mpi_ops.py") for file in files) == 1
""")


def test_pickles_load_under_either_name() -> None:
    passes("""
import pickle
import netbottleneck
from horovod.torch import Compression
from horovod.torch.compression import Compression as same
from horovod.common.exceptions import HorovodInternalError
import netbottleneck.torch
assert Compression is same
assert pickle.loads(pickle.dumps(Compression)) is netbottleneck.torch.Compression
again = pickle.loads(pickle.dumps(HorovodInternalError("x")))
assert isinstance(again, HorovodInternalError) and isinstance(again, netbottleneck.HorovodInternalError)
# As a file written with Horovod itself names it.
assert pickle.loads(b"chorovod.torch.compression\\nCompression\\n.") is Compression
""")


def test_a_module_is_reloaded_as_itself() -> None:
    passes("""
import importlib
import netbottleneck
import horovod.common.util as util
assert importlib.reload(util) is util
""")


@pytest.mark.parametrize(
    "name",
    [
        "horovod.tensorflow",
        "horovod.tensorflow.keras",
        "horovod.keras",
        "horovod.mxnet",
        "horovod.spark",
        "horovod.ray",
        "horovod.runner",
    ],
)
def test_a_missing_module_error_names_the_supported_modules(name: str) -> None:
    ended = python(f"import netbottleneck\nimport {name}\n", NETBOTTLENECK="1")
    last = ended.stderr.strip().splitlines()[-1]
    shown = "horovod.tensorflow" if name.startswith("horovod.tensorflow") else name
    assert last.startswith(f"ModuleNotFoundError: {shown}: netbottleneck stands in for horovod.torch only"), last
    assert ended.stderr.count("Error: ") == 1


def test_a_script_may_ask_for_a_module_that_has_no_counterpart() -> None:
    passes("""
import importlib.util
import netbottleneck
assert importlib.util.find_spec("horovod.torch") is not None
assert importlib.util.find_spec("horovod.tensorflow") is None
try:
    from horovod import tensorflow
except ModuleNotFoundError as error:
    assert error.name == "horovod", error.name
    assert "netbottleneck stands in for horovod.torch only" in str(error)
else:
    raise AssertionError
""")


def test_a_module_that_horovod_does_not_have_either_is_not_found() -> None:
    ended = python("import netbottleneck\nimport horovod.torch.nothing\n", NETBOTTLENECK="1")
    assert ended.stderr.strip().splitlines()[-1] == "ModuleNotFoundError: No module named 'horovod.torch.nothing'"


def installed(folder: Path) -> Path:
    """Write a package named horovod."""
    package = folder / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("real = True\n")
    (package / "__init__.py").write_text("")
    return folder


def test_an_installed_horovod_stays(tmp_path: Path) -> None:
    source = """
import sys
import netbottleneck
import horovod.torch
assert horovod.real
assert "netbottleneck.torch" not in sys.modules
"""
    passes(source, PYTHONPATH=str(installed(tmp_path)))


def test_a_horovod_that_a_script_puts_on_the_path_stays(tmp_path: Path) -> None:
    passes(f"""
import sys
import netbottleneck
sys.path.append({str(installed(tmp_path))!r})
import horovod
assert horovod.real
""")


def test_a_folder_named_horovod_is_not_a_horovod(tmp_path: Path) -> None:
    (tmp_path / "horovod" / "examples").mkdir(parents=True)
    passes(
        "import netbottleneck\nimport horovod.torch as hvd\nassert hvd.DistributedOptimizer\n", PYTHONPATH=str(tmp_path)
    )


def test_without_a_request_the_name_is_free() -> None:
    ended = python("import netbottleneck\nimport horovod.torch\n")
    assert "ModuleNotFoundError: No module named 'horovod'" in ended.stderr


def test_the_finder_is_installed_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint([type(f).__name__ for f in sys.meta_path].count('_Horovod'))\n")
    for env in ({}, {"NETBOTTLENECK": "1"}):
        assert python("", "run", str(script), **env).stdout == "1\n"


CHILDREN = """
import multiprocessing
import sys

import horovod
from horovod.common.util import env
from horovod.common.exceptions import HorovodInternalError

def work(queue):
    import netbottleneck
    queue.put((horovod.__version__, HorovodInternalError is netbottleneck.HorovodInternalError, env.__module__))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    child.join()
    print(child.exitcode, queue.get() if child.exitcode == 0 else None)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_processes_can_import_horovod_too(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHILDREN)
    ended = python("", "run", str(script), method)
    assert ended.stdout == "0 ('0.28.1', True, 'netbottleneck.runtime.horovod_common')\n", ended.stderr


TRAIN = """
import sys
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce_async_, synchronize

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(3, 4) * hvd.rank()).sum().backward()
    optimizer.step()
total = torch.ones(2)
synchronize(allreduce_async_(total, op=hvd.Sum, name="total"))
assert total.tolist() == [hvd.size()] * 2
weights = hvd.allgather(model.weight.detach().reshape(1, -1))
assert torch.equal(weights[0], weights[1])
assert "horovod" in sys.modules and sys.argv[1:] == ["--epochs", "1"]
print("trained", hvd.rank())
hvd.shutdown()
"""


def test_a_horovod_script_runs_unchanged(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    args = ["run", str(tmp_path / "train.py"), "--epochs", "1"]
    extra = {"NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    for result in ranks(2, "netbottleneck", extra, args=args):
        assert f"trained {result.rank}" in result.stdout.splitlines()


TWO_PATHS = """
try:
    import horovod.torch as hvd
except ImportError:
    hvd = None
if hvd is None:
    print("without Horovod")
else:
    for _ in range(2):
        hvd.init()
        hvd.shutdown()
    print("Horovod's")
"""


def test_a_script_with_a_path_without_horovod_learns_which_one_it_takes(warm_ranks: Ranks) -> None:
    first, second = warm_ranks(2, "import netbottleneck\n" + TWO_PATHS, {"NETBOTTLENECK": "1"})
    assert first.stdout.splitlines() == second.stdout.splitlines() == ["Horovod's"]
    assert first.stderr.count("horovod is not installed: netbottleneck stands in for it") == 1
    assert "stands in" not in second.stderr


def test_a_script_can_keep_its_path_without_horovod(tmp_path: Path) -> None:
    _, _, remedy = imports.STANDS_IN.partition("put `")
    script = tmp_path / "train.py"
    script.write_text(remedy.partition("`")[0] + TWO_PATHS)
    assert python("", "run", str(script)).stdout == "without Horovod\n"


# Horovod's public names, module by module.
NAMES = {
    "horovod.torch": """
        Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum
        SyncBatchNorm add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async
        allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_
        broadcast_object broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built
        ddl_built elastic global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async
        grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
        grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
        mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built
        shutdown size sparse_allreduce_async start_timeline stop_timeline synchronize
    """,
    "horovod.torch.mpi_ops": """
        Adasum Average Compression HorovodInternalError Max Min ProcessSet Product Sum add_process_set allgather
        allreduce allreduce_async_ alltoall barrier broadcast_ cross_rank global_process_set init is_homogeneous join
        local_rank poll rank reducescatter remove_process_set shutdown size sparse_allreduce_async synchronize
    """,
    "horovod.torch.compression": "Compression Compressor FP16Compressor NoneCompressor",
    "horovod.torch.functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.elastic": "ElasticSampler TorchState init run run_fn shutdown",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": """
        ElasticSampler ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler TorchState
        broadcast_object broadcast_optimizer_state broadcast_parameters get_handler_registry set_handler_registry
    """,
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.elastic": """
        HorovodInternalError HostUpdateResult HostsUpdatedInterrupt ObjectState State WorkerNotificationManager
        notification_manager run_fn
    """,
    "horovod.common.exceptions": """
        HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt get_version_mismatch_message
    """,
    "horovod.common.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "horovod.common.util": """
        HorovodVersionMismatchError ccl_built check_extension ddl_built env extension_available
        get_version_mismatch_message gloo_built gpu_available is_iterable mpi_built nccl_built num_rank_is_power_2
        split_list
    """,
}
MEMBERS = {
    "horovod.torch.ProcessSet": "included rank size",
    "horovod.torch.Compression": "fp16 none",
    "horovod.torch.elastic.ElasticSampler": "load_state_dict record_batch reset set_epoch state_dict",
    "horovod.torch.elastic.TorchState": """
        check_host_updates commit on_hosts_updated on_reset register_reset_callbacks reset restore save sync
    """,
    "horovod.common.basics.HorovodBasics": """
        ccl_built cross_rank cross_size cuda_built ddl_built gloo_built gloo_enabled init is_homogeneous is_initialized
        local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank rocm_built shutdown size
        start_timeline stop_timeline
    """,
    "horovod.common.elastic.notification_manager": "init register_listener remove_listener",
}


def test_all_of_horovods_public_names_exist() -> None:
    passes(f"""
import importlib
import netbottleneck
missing = []
for name, wanted in {NAMES!r}.items():
    module = importlib.import_module(name)
    missing += [f"{{name}}.{{each}}" for each in wanted.split() if not hasattr(module, each)]
for name, wanted in {MEMBERS!r}.items():
    holder, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(holder), last)
    missing += [f"{{name}}.{{each}}" for each in wanted.split() if not hasattr(value, each)]
assert not missing, missing
""")


def test_registered_listeners_receive_host_changes_until_they_are_removed() -> None:
    passes("""
import netbottleneck
from horovod.common.elastic import HostUpdateResult, notification_manager
from netbottleneck.torch.elastic.launcher import notices

class Listener:
    def __init__(self):
        self.notices = []
    def on_hosts_updated(self, timestamp, result):
        self.notices.append((timestamp, result))

first, second = Listener(), Listener()
notification_manager.init()
for listener in (first, first, second):
    notification_manager.register_listener(listener)
notices._notify(1.0, HostUpdateResult.added)
notification_manager.remove_listener(first)
notices._notify(2.0, HostUpdateResult.removed)
notification_manager.remove_listener(second)
notices._notify(3.0, HostUpdateResult.added)
assert first.notices == [(1.0, HostUpdateResult.added)]
assert second.notices == [(1.0, HostUpdateResult.added), (2.0, HostUpdateResult.removed)]
""")
