"""Where the ranks of a cell run: on this machine's loopback, or on hosts of a lab, with links between them."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warm import READ_EARLY, Warm

from matrix import holdings
from matrix.job import ROOT, Absent, Process, popen
from netbottleneck.lab import Lab, LabError

SITE = ROOT / "tests" / "py" / "site"
NEW_USER, NEW_NET = 0x10000000, 0x40000000
MODULES = ("matrix.private", "numpy", "cloudpickle", "psutil")
NETWORKS: dict[str, dict[str, str]] = {
    "tcp": {"NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_SHM": "0"},
    "ofi": {"NETBOTTLENECK_TRANSPORT": "ofi", "NETBOTTLENECK_SHM": "0"},
    "shm": {"NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_SHM": "1"},
}
START_S = 60.0
LINK = "400mbit"  # slow enough that bytes are always on their way
SWITCH_S = 10.0


class Machine:
    """The process that forks the ranks of all cells, and a folder. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("NETBOTTLENECK", "HOROVOD", *READ_EARLY))
        }
        paths = [SITE, ROOT / "tests" / "faults", ROOT / "python"]
        self.environ = {
            **kept,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "FAULTS_FOLDER": str(folder),
            "TMPDIR": "/tmp",
        }
        self.private = ""

    def __enter__(self) -> Machine:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.server = Warm(self.environ, MODULES)
        answer_file, until = self.folder / "PRIVATE", time.monotonic() + START_S
        while not (answer_file.exists() and answer_file.read_text(encoding="utf-8")):
            if time.monotonic() > until:
                self.server.close()
                raise RuntimeError("the process that forks ranks did not start")
            time.sleep(0.01)
        self.private = answer_file.read_text(encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def own_files(self) -> bool:
        """True if ranks have a /tmp and a /dev/shm of their own."""
        return self.private == "yes"

    def root(self) -> Path:
        """Return the root of the file systems that ranks see."""
        return Path(f"/proc/{self.server.pid}/root")

    def new_folder(self) -> Path:
        """Make a folder for one job."""
        folder = self.folder / f"job{next(self._numbers)}"
        folder.mkdir()
        return folder

    def compiled(self, source: str, *arguments: str) -> Path:
        """Compile a C file beside this one, and return the result's path. Raises Absent if that fails."""
        path, made = Path(__file__).with_name(source), self.folder / f"{source}.made"
        if not made.exists():
            command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(made), str(path), *arguments]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
            except FileNotFoundError:
                raise Absent("no C compiler") from None
            if done.returncode:
                raise Absent(f"{source} cannot be built: {done.stderr.strip().splitlines()[0]}")
        return made


class Loopback:
    """All ranks on this machine, on its loopback interface."""

    address = "127.0.0.1"

    def __init__(self, machine: Machine, network: str) -> None:
        self.machine = machine
        self.environ: Mapping[str, str] = {**machine.environ, **NETWORKS[network], "NETBOTTLENECK_IFNAME": "=lo"}

    def new_folder(self) -> Path:
        return self.machine.new_folder()

    def values(self, rank: int) -> dict[str, str]:
        """Return the variables of one rank."""
        del rank
        return {}

    def spaces(self) -> list[int | str]:
        """Return a process in each network namespace that ranks run in."""
        return ["self"]

    def files(self) -> list[str]:
        """Return what is left in the ranks' /tmp and /dev/shm."""
        if not self.machine.own_files:
            return []
        root = self.machine.root()
        return [line.replace(str(root), "") for name in ("tmp", "dev/shm") for line in holdings.files(root / name)]

    def start(self, rank: int, arguments: list[str], environ: Mapping[str, str], folder: Path) -> Process:
        """Start a rank: forked, unless its environment needs a new process."""
        del rank
        name = environ["FAULTS_RANK"]
        if not self.machine.server.suits(environ):
            return popen(arguments, environ, folder, name)
        out, err = folder / f"{name}.out", folder / f"{name}.err"
        out.touch()
        err.touch()
        return self.machine.server.start(arguments, environ, folder, out, err)


class Linked(Loopback):
    """Hosts in network namespaces, joined by capped links; interface 0 is where ranks meet."""

    def __init__(self, machine: Machine, network: str, lab: Lab) -> None:
        super().__init__(machine, network)
        self.lab = lab
        self.address = lab.address(0)
        self.environ = {**self.environ, "NETBOTTLENECK_IFNAME": f"={lab.interface}"}

    @classmethod
    def made(cls, machine: Machine, network: str, size: int, links: int) -> Linked:
        """Return an open lab: a host for each rank or, where ranks share memory, for two. Raises Absent."""
        together = 2 if network == "shm" else 1
        if size // together < 2:
            raise Absent("ranks that share memory are on one host: there is no link")
        lab = Lab(size // together, "+".join([LINK] * links), together, ways=("root", "user"))
        try:
            lab.__enter__()
        except LabError as error:
            raise Absent(f"no network namespaces on this machine: {error}") from None
        return cls(machine, network, lab)

    def close(self) -> None:
        self.lab.close()

    def values(self, rank: int) -> dict[str, str]:
        host = self.lab.host(rank)
        pid = self.holder(host)
        spaces = [f"{NEW_NET}:/proc/{pid}/ns/net"]
        if self.lab.way == "user":
            spaces.insert(0, f"{NEW_USER}:/proc/{pid}/ns/user")
        return {"FAULTS_SPACES": ",".join(spaces), "NETBOTTLENECK_HOST_ID": f"host{host}"}

    def spaces(self) -> list[int | str]:
        return [self.holder(host) for host in range(self.lab.hosts)]

    def holder(self, host: int) -> int:
        """Return the process that holds a host's namespace."""
        return self.lab._host_namespaces[host].holder.pid

    def link(self, host: int, up: bool, link: int = 0) -> float:
        """Set a host's interface up or down; return the time."""
        self.lab.set_link(host, up, link)
        return time.monotonic()

    def blackhole(self, victim: int) -> float:
        """Lose all packets to and from a host: each side sends them to an address that no interface has.

        Interfaces and their carriers stay up. Returns the time.
        """
        spaces: Any = self.lab._namespaces
        commands = []
        for host in range(self.lab.hosts):
            others = [victim] if host != victim else [other for other in range(self.lab.hosts) if other != victim]
            lines = [
                f"neigh replace {self.lab.address(other)} lladdr 02:00:00:00:00:ff dev nb0 nud permanent\n"
                for other in others
            ]
            commands.append((self.lab._host_namespaces[host], "".join(lines)))
        spaces.batch("ip", commands)
        return time.monotonic()
