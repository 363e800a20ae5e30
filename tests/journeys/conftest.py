"""A JupyterLab of its own and a headless browser, for tests that do what a learner does."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest

ROOT = Path(__file__).parents[2]
_TAG = "RING_TO_DDP_BROWSER_TEST"  # in the environment of all that JupyterLab starts
_CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
_CHROMIUM += ["--disable-background-networking", "--disable-component-update"]


class Lab:
    """A running JupyterLab: `folder` is its root, `address` its URL, `token` its password."""

    def __init__(self, base: Path):
        self.folder, self.token = base / "course", secrets.token_hex(16)
        self.folder.mkdir()
        shutil.copytree(ROOT / "notebooks", self.folder / "notebooks")
        self.tag = secrets.token_hex(8)
        self._runtime = base / "runtime"
        self._log = (base / "lab.log").open("w")
        options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
        options += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.folder}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            cwd=self.folder, env=self._environment(base), stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.address = ""
        self.until(self._is_up, 60, "JupyterLab comes up")

    @staticmethod
    def until(true: Callable[[], object], seconds: float, what: str) -> None:
        """Wait for something; after `seconds` fail and say for what."""
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: not within {seconds:g} s")
            time.sleep(0.1)

    def _environment(self, base: Path) -> dict[str, str]:
        """Nothing of the person who runs the tests: no settings, no extensions, no news."""
        names = ["HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTERLAB_SETTINGS_DIR"]
        names += ["JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR"]
        own = {name: str(base / name.lower()) for name in names} | {"JUPYTER_RUNTIME_DIR": str(self._runtime)}
        for path in own.values():
            Path(path).mkdir()
        quiet = Path(own["JUPYTERLAB_SETTINGS_DIR"], "@jupyterlab", "apputils-extension")
        quiet.mkdir(parents=True)
        (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
        return {**os.environ, **own, _TAG: self.tag, "OMP_NUM_THREADS": "1"}

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"JupyterLab ended: {Path(self._log.name).read_text()[-2000:]}")
        for file in self._runtime.glob("jpserver-*.json"):
            try:
                self.address = json.loads(file.read_text())["url"].rstrip("/")
            except ValueError:
                continue  # half written
            return True
        return False

    def processes(self) -> list[psutil.Process]:
        """All living processes below this JupyterLab but itself, however they were started."""
        found = []
        for process in psutil.process_iter():
            try:
                living = process.status() != psutil.STATUS_ZOMBIE
                if living and process.environ().get(_TAG) == self.tag and process.pid != self.process.pid:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def beside_kernels(self) -> list[str]:
        """Command lines of what is neither JupyterLab nor a kernel: agents, torchrun, ranks."""
        lines = []
        for process in self.processes():
            try:
                line = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if "ipykernel_launcher" not in line:
                lines.append(f"{process.pid} {line}")
        return lines

    def end_kernels(self) -> None:
        """Shut all kernels down; what they had started must end, too."""
        for session in self._ask("GET", "sessions"):
            self._ask("DELETE", f"sessions/{session['id']}")
        self.until(lambda: not self.processes(), 20, "the kernels and all that they started end")

    def _ask(self, method: str, what: str):
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.address}/api/{what}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read() or "null")

    def write(self, name: str, *cells: str) -> Path:
        """A small notebook made for a test."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, self.folder / name)
        return self.folder / name

    def stop(self) -> list[str]:
        """End it as Ctrl-C does; what lives on is ended too, and returned."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = self.beside_kernels()
        for process in self.processes():
            process.kill()
        self._log.close()
        return left


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    """One JupyterLab for a file of tests; nothing may be left when it ends."""
    running = Lab(tmp_path_factory.mktemp("lab"))
    left = []
    try:
        yield running
    finally:
        left = running.stop()
    assert left == [], "processes outlived JupyterLab"


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium with one cache for all pages, or a skip that says how to get it."""
    from playwright.sync_api import sync_playwright

    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium here: install it (apt install chromium), or set CHROMIUM to its path")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=_CHROMIUM)
        yield chromium.new_context(viewport={"width": 1280, "height": 900})
        chromium.close()


@pytest.fixture(scope="module")
def page(lab, browser):
    """One window for all tests: JupyterLab takes long to load."""
    page = browser.new_page()
    page.set_default_timeout(30_000)
    page.goto(f"{lab.address}/lab?reset&token={lab.token}")
    page.wait_for_selector("#jp-MainMenu .lm-MenuBar-itemLabel")
    yield page
    page.close()


@pytest.fixture
def desk(lab, page, request):
    """A learner's moves in the browser window on the JupyterLab; its last sight is kept."""
    at_desk = Desk(lab, page)
    yield at_desk
    at_desk.shoot(f"last_{request.node.name}")
    page.unroute_all()
    at_desk.menu("File", "Close All Tabs")
    lab.end_kernels()


class Desk:
    """What a learner does with mouse and keys."""

    def __init__(self, lab: Lab, page):
        self.lab, self.page = lab, page

    def open(self, name: str, idle: bool = True) -> None:
        """Open a notebook and wait until its kernel is idle (unless there is none)."""
        self.menu("File", "Open from Path…")
        self.page.locator(".jp-Dialog input").fill(name)
        self.answer("Open Path", "Open")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
        if idle:
            self.wait_idle(60)

    def wait_idle(self, seconds: float) -> None:
        """By the status bar: the indicator in the toolbar says idle before there is a kernel, too."""
        self.see("#jp-main-statusbar", "Python 3 (ipykernel) | Idle", seconds)

    def see(self, place: str, text: str, seconds: float) -> None:
        """Wait until a text stands there. It looks twice a second: playwright's own waiting does in each frame."""
        there, deadline = self.page.locator(place).get_by_text(text), time.monotonic() + seconds
        while not there.count():
            assert time.monotonic() < deadline, f"{text!r} is not to be seen within {seconds:g} s"
            self.page.wait_for_timeout(500)

    def menu(self, name: str, item: str) -> None:
        """Choose from the menu bar; `item` is a label's beginning."""
        self.page.locator("#jp-MainMenu .lm-MenuBar-itemLabel", has_text=name).first.click()
        self.page.locator(".lm-Menu-itemLabel", has_text=item).first.click()

    def answer(self, question: str, button: str) -> None:
        """Answer a dialog, and see it go."""
        dialog = self.page.locator(".jp-Dialog", has_text=question)
        dialog.locator("button", has_text=button).click()
        dialog.wait_for(state="detached")

    def save(self, file: Path) -> nbformat.NotebookNode:
        """Save, and read back what is on the disk."""
        before = file.stat().st_mtime_ns
        self.menu("File", "Save Notebook")
        self.lab.until(lambda: file.stat().st_mtime_ns != before and _whole(file), 20, "the notebook is saved")
        return nbformat.read(file, as_version=4)

    def run_all(self, file: Path, seconds: float) -> list[nbformat.NotebookNode]:
        """Run all cells; give back the code cells as saved, all of them executed."""
        self.menu("Run", "Run All Cells")
        deadline = time.monotonic() + seconds
        while True:
            self.page.wait_for_timeout(1000)
            self.wait_idle(max(deadline - time.monotonic(), 0.1))
            cells = [cell for cell in self.save(file).cells if cell.cell_type == "code"]
            if all(cell.execution_count for cell in cells):
                return cells
            assert time.monotonic() < deadline, "cells did not run"

    def run_cell(self, number: int) -> None:
        """Run one code cell, counted from 0."""
        self.page.locator(".jp-CodeCell").nth(number).click()
        self.menu("Run", "Run Selected Cell")

    def shoot(self, name: str) -> None:
        """A screenshot for people; kept as an artefact, not in git."""
        folder = ROOT / "artifacts" / "browser"
        folder.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(folder / f"{name}.png"))


def _whole(file: Path) -> bool:
    """The notebook is not just being written: JupyterLab truncates the file first."""
    try:
        json.loads(file.read_text())
    except ValueError:
        return False
    return True
