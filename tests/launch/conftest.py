"""A real kernel, as JupyterLab starts one, and a count of the processes that descend from it."""

import os
import time
import uuid

import psutil
import pytest
from jupyter_client.manager import KernelManager

TAG = "COURSE_TEST_TAG"


class Kernel:
    """One ipykernel with everything that it starts carrying a tag in its environment."""

    def __init__(self, cwd) -> None:
        self.tag = uuid.uuid4().hex
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(cwd), env={**os.environ, TAG: self.tag})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def start(self, code: str) -> str:
        return self.client.execute(code)

    def finish(self, request: str, timeout: float = 90) -> dict:
        """{"text": what was printed, "error": traceback text or None} once the cell is done."""
        text, error = [], None
        deadline = time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text.append(content["text"])
            elif kind in ("execute_result", "display_data"):
                text.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                error = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return {"text": "".join(text), "error": error}

    def run(self, code: str, timeout: float = 90) -> dict:
        return self.finish(self.start(code), timeout)

    def wait_for_text(self, text: str, timeout: float = 60) -> None:
        """Until the running cell has printed `text`."""
        deadline = time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["msg_type"] == "stream" and text in message["content"]["text"]:
                return

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def processes(self) -> list[psutil.Process]:
        """All processes that carry the tag, the kernel itself left out."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(TAG) == self.tag and process.pid != self.pid:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    @property
    def pid(self) -> int | None:
        provisioner = self.manager.provisioner
        return provisioner.pid if provisioner else None

    def beside_agent(self) -> list[str]:
        """Command lines of processes that are neither the kernel nor its idle agent."""
        names = [" ".join(process.cmdline()) for process in self.processes()]
        agents = [name for name in names if "course_lib.launch.agent" in name]
        return [name for name in names if name not in agents[:1]]

    def none_left(self, seconds: float = 15, *, agent: bool = False) -> list[str]:
        """What is still there after at most `seconds`; `agent`: one idle agent is allowed."""
        deadline = time.monotonic() + seconds
        while True:
            left = self.beside_agent() if agent else [str(p) for p in self.processes()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        for process in self.processes():
            process.kill()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One kernel for the tests that leave it as it was; it ends as when a notebook is closed, and leaves nothing."""
    made = Kernel(tmp_path_factory.mktemp("a folder with spaces"))
    try:
        made.run("from course_lib import run")
        yield made
        made.manager.shutdown_kernel()
        assert made.none_left() == []
    finally:
        made.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A second one, for the tests that end it or its agent."""
    made = Kernel(tmp_path_factory.mktemp("other"))
    yield made
    made.close()
