"""Builds netbottleneck._core (a C extension for all CPythons from 3.11 on), the lab's preload shim, NCCL's plugins."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402

SHIM_SOURCE = ROOT / "csrc" / "lab" / "flowcap.c"
SHIM_NAME = "libnbflowcap.so"
COMPILER = cbuild.c_compiler(sysconfig.get_config_var("CC") or "gcc")
PLUGINS = [ROOT / "build" / "core" / name for name in cbuild.PLUGINS]


def our_own_build() -> bool:
    """Return True if warnings are errors: in our builds, not in a user's."""
    return os.environ.get("NETBOTTLENECK_WERROR") == "1"


def python_include_flags() -> list[str]:
    """Return flags that mark Python's headers as system headers, so that only our code causes warnings."""
    return [f"-isystem{path}" for path in {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}]


class BuildCore(build_ext):
    """Compiles changed files on all cores, and links as setuptools does."""

    def build_extension(self, ext: Extension) -> None:
        """Build one extension. Its sources are hidden from the base class, which would compile them one by one."""
        flags = [*cbuild.base_flags(), *python_include_flags(), *ext.extra_compile_args]
        flags += [f"-D{name}={value}" for name, value in ext.define_macros]
        if our_own_build():
            flags += cbuild.WARNINGS
        folder = ROOT / "build" / "core" / f"{sys.platform}-{platform.machine()}-{sys.implementation.cache_tag}"
        compiler = [*self.compiler.compiler_so, *flags]
        try:
            made = [ROOT / source for source in ext.sources] + [cbuild.cuda_image()]
            objects = cbuild.compile_all(made, folder, compiler)
            if sys.platform.startswith("linux"):
                for plugin in PLUGINS:
                    self._build_plugin(plugin, cbuild.compile_all(cbuild.plugin_sources(plugin.name), folder, compiler))
        except RuntimeError as error:
            raise SystemExit(str(error)) from error
        sources, ext.sources = ext.sources, []
        ext.extra_objects = ext.depends = [str(path) for path in objects]
        try:
            super().build_extension(ext)
        finally:
            ext.sources = sources
        if cbuild.libfabric_include() is None:
            print(cbuild.OFI_LEFT_OUT, flush=True)
        if cbuild.nvcc() is None:
            print(cbuild.CUDA_LEFT_OUT, flush=True)

    def run(self) -> None:
        """Build the extension and the plugins, then the shim in the lab's folder."""
        super().run()
        if sys.platform.startswith("linux") and SHIM_SOURCE.is_file():
            self._build_shim()
        if sys.platform.startswith("linux"):
            for plugin in PLUGINS:
                self._place(plugin, self._package() / plugin.name)

    def _build_shim(self) -> None:
        made = ROOT / "build" / "core" / SHIM_NAME
        made.parent.mkdir(parents=True, exist_ok=True)
        compiler = [*COMPILER, "-O2", "-fPIC", "-shared", "-D_GNU_SOURCE", "-std=gnu11"]
        warnings = cbuild.WARNINGS if our_own_build() else []
        try:
            cbuild.run_compiler(
                [*compiler, *warnings, f"-I{cbuild.CSRC}", str(SHIM_SOURCE), "-o", str(made), *cbuild.LIBRARIES]
            )
        except RuntimeError as error:
            raise SystemExit(str(error)) from error
        self._place(made, self._shim_target())

    def _build_plugin(self, plugin: Path, objects: list[Path]) -> None:
        """Link a library that NCCL loads, from objects that are mostly _core's. Raises RuntimeError."""
        plugin.parent.mkdir(parents=True, exist_ok=True)
        linker = [*COMPILER, *cbuild.plugin_link(plugin.name)]
        cbuild.run_compiler([*linker, *map(str, objects), "-o", str(plugin), *cbuild.LIBRARIES])

    @staticmethod
    def _place(made: Path, target: Path) -> None:
        """Copy a library to its place. Replaces the old file, which a running job may have mapped."""
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_suffix(".new")
        shutil.copy2(made, beside)
        beside.replace(target)

    def _package(self) -> Path:
        return (ROOT / "python" if self.inplace else Path(self.build_lib)) / "netbottleneck"

    def _shim_target(self) -> Path:
        return self._package() / "lab" / SHIM_NAME

    def get_outputs(self) -> list[str]:
        """Return the installed files: the extension, the shim and the plugins."""
        outputs = super().get_outputs()
        made = [self._shim_target()] if SHIM_SOURCE.is_file() else []
        made += [self._package() / plugin.name for plugin in PLUGINS] if sys.platform.startswith("linux") else []
        return [*outputs, *map(str, made)]


class WheelWithEverything(bdist_wheel):
    """Builds wheels, which always contain the libfabric transport, because other machines use them."""

    def run(self) -> None:
        """Build a wheel. Fails without libfabric's headers, unless NETBOTTLENECK_ALLOW_NO_OFI=1."""
        if cbuild.libfabric_include() is None and os.environ.get("NETBOTTLENECK_ALLOW_NO_OFI") != "1":
            raise SystemExit(
                "a wheel without libfabric's transport: install libfabric-dev, or name a folder that holds"
                " rdma/fabric.h in NETBOTTLENECK_LIBFABRIC_INCLUDE, or set NETBOTTLENECK_ALLOW_NO_OFI=1 to go without"
            )
        # The folder may contain files of an earlier build that the tree no longer has; a wheel would include them.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


core = Extension(
    "netbottleneck._core",
    sources=[path.relative_to(ROOT).as_posix() for path in cbuild.core_sources()],
    define_macros=[("Py_LIMITED_API", cbuild.LIMITED_API)],
    extra_compile_args=["-O3"],
    extra_link_args=cbuild.LIBRARIES,
    py_limited_api=True,
)

setup(
    ext_modules=[core],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": WheelWithEverything},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
