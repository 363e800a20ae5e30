"""Run a notebook from top to bottom in a kernel of this Python, away from the repository."""

import os
import shutil
import tempfile
from pathlib import Path

from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell


def execute(
    notebook: NotebookNode,
    folder: Path,
    timeout: float = 300,
    kernel: AsyncKernelManager | None = None,
    **environment: str,
) -> None:
    """Run every cell and leave the outputs in `notebook`. `timeout`: seconds a cell may take.

    The kernel's working directory is a copy of `folder`, where the notebook belongs; what it writes is thrown
    away. `environment` is added to the kernel's. Raises nbclient's CellExecutionError, CellTimeoutError or
    DeadKernelError.

    kernel  run in this one, which stays, with all names of the notebook before forgotten: it has imported torch
            already. It is started when it does not run yet.
    """
    with tempfile.TemporaryDirectory(prefix="lesson-") as box:
        copy = Path(box, folder.name)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.ipynb", "runs", ".*"))
        resources = {"metadata": {"path": str(copy)}}
        client = NotebookClient(notebook, km=kernel, timeout=timeout, kernel_name="python3", resources=resources)
        if kernel:
            # frozen: what is imported, of which %reset would look at every object, each time
            fresh = f"import os\nos.chdir({str(copy)!r})\n%reset -f\nimport gc\ngc.freeze()\ndel gc"
            notebook.cells.insert(0, new_code_cell(fresh))
        client.extra_arguments = ["--log-level=ERROR"]  # it warns that a local kernel is not encrypted
        client.execute(env={**os.environ, **environment})
