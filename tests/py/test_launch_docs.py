"""docs/reference/launchers.md matches the code, and its examples run as far as possible here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck.launch.topology import LAUNCHERS
from test_launchers import MEETS, clean, free_job

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "launchers.md").read_text(encoding="utf-8")
SCHEDULERS = (DOCS / "how-to" / "schedulers.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```(\w+)\n(.*?)^```$", SCHEDULERS, re.MULTILINE | re.DOTALL)
SCRIPTS = [text for language, text in EXAMPLES if language == "bash"]

# Stands in for srun on one machine: starts the tasks of a step, each with its number.
SRUN = """#!/bin/bash
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task SLURM_STEP_ID=0 "$@" &
    started+=($!)
done
for task in "${started[@]}"; do wait "$task" || failed=1; done
exit ${failed:-0}
"""


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_every_variable_of_a_launcher_is_on_the_page(launcher) -> None:  # type: ignore[no-untyped-def]
    assert [name for name in launcher.variables() if f"`{name}`" not in PAGE] == []


def test_there_is_an_example_for_each_scheduler() -> None:
    assert [language for language, _ in EXAMPLES] == ["bash", "bash", "yaml", "python"]


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_batch_script_is_one(text: str) -> None:
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=RANKS_LIMIT_S)


def test_the_example_for_slurm_starts_a_job_that_meets(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "train.py").write_text(MEETS)
    step = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": free_job(),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "NETBOTTLENECK_START_TIMEOUT_S": "100",
    }
    output = subprocess.run(
        ["bash", "-e"],
        input=SCRIPTS[0],
        text=True,
        cwd=tmp_path,
        env=clean(step),
        capture_output=True,
        timeout=RANKS_LIMIT_S,
        check=False,
    )
    assert output.returncode == 0, output.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 by srun at 127.0.0.1:" in output.stdout


@pytest.mark.parametrize("text", [text for language, text in EXAMPLES if language == "python"])
def test_python_on_the_page_compiles(text: str) -> None:
    compile(text, "schedulers.md", "exec")
