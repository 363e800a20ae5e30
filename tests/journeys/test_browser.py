"""The course in a real browser: lesson 00, a picture that moves, and runs that are stopped half-way."""

import json
import re

import psutil
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
LESSON = "00_start_here.ipynb"

LINGER = """\
import os, pathlib, time
import torch.distributed as dist
from course_lib import run

def linger():
    pathlib.Path(f"rank{dist.get_rank()}.pid").write_text(str(os.getpid()))
    time.sleep(100)

run(linger, ranks=2, timeout=90)"""

AFTERWARDS = "run(lambda: dist.get_rank() * 10, ranks=2).results"

BUTTON = """\
import json
from course_lib import show

options = {"optim.epochs": 400, "run.save_every": 10, "run.keep": 1}
panel = show.kill_button("digits", ranks=2, dir="hurt", restarts=1, **options)
panel"""


def errors(cells):
    """Error outputs, but for cells that are there to fail."""
    wanted = [cell for cell in cells if "raises-exception" not in cell.metadata.get("tags", [])]
    return [output for cell in wanted for output in cell.outputs if output.output_type == "error"]


def test_lesson_00_runs_from_top_to_bottom_and_its_stepper_moves_without_a_kernel(lab, desk, root):
    if not (root / "notebooks" / LESSON).exists():
        pytest.skip(f"notebooks/{LESSON} is not there: call make notebooks")
    file = lab.folder / "notebooks" / LESSON
    desk.open(f"notebooks/{LESSON}")
    desk.shoot("lesson_00_opened")
    cells = desk.run_all(file, 240)
    desk.shoot("lesson_00_end")
    assert errors(cells) == []
    assert any(cell.outputs for cell in cells)
    moves_with_arrow_keys(desk, "stepper")

    desk.save(file)
    desk.menu("File", "Close and Shut Down Notebook")
    desk.answer("shut down", "Ok")
    lab.until(lambda: not lab.processes(), 20, "the kernel ends")
    desk.page.route("**/api/sessions*", lambda route: _refuse_to_start(route))
    desk.open(f"notebooks/{LESSON}", idle=False)
    desk.answer("no kernels today", "Ok")
    desk.answer("Select kernel for", "No Kernel")
    moves_with_arrow_keys(desk, "stepper_without_kernel")
    assert lab.processes() == []


def _refuse_to_start(route):
    """No kernel can start: what moves now moves by itself."""
    if route.request.method == "POST":
        route.fulfill(status=503, body='{"message": "no kernels today"}')
    else:
        route.continue_()


def moves_with_arrow_keys(desk, name):
    """Four messages, one from each rank to the next."""
    page = desk.page
    slider, place, caption = (page.locator(f".rtd-stepper {tag}") for tag in ("input", "output", "p.caption"))
    slider.scroll_into_view_if_needed()
    assert page.locator(".rtd-stepper img").count() == 0
    desk.shoot(f"{name}_0")
    assert place.inner_text() == "0 / 4"
    slider.focus()
    said = [caption.inner_text()]
    for step in range(1, 5):
        page.keyboard.press("ArrowRight")
        assert place.inner_text() == f"{step} / 4"
        assert page.locator(".rtd-stepper svg .now").count() >= 3
        said.append(caption.inner_text())
        if step == 1:
            desk.shoot(f"{name}_1")
    sent = [re.search(r"rank (\d) .*rank (\d)", text).groups() for text in said[1:]]
    assert sorted(sent) == [(str(rank), str((rank + 1) % 4)) for rank in range(4)]
    page.keyboard.press("ArrowRight")  # at the end it stays
    page.keyboard.press("ArrowLeft")
    assert place.inner_text() == "3 / 4"
    assert caption.inner_text() == said[3]
    page.locator(".rtd-stepper button").first.click()
    assert place.inner_text() == "2 / 4"


def test_runs_are_killed_and_stopped_by_hand_and_leave_nothing(lab, desk):
    """A rank by the button, a run by an interrupt, one more by a restart of the kernel."""
    state = "print(*panel.kills, json.load(open('hurt/status.json')))"
    file = lab.write("stops.ipynb", BUTTON, "panel.wait()", state, LINGER, AFTERWARDS)
    desk.open("stops.ipynb")
    a_button_kills_a_rank_and_the_run_goes_on_until_it_is_stopped(lab, desk)
    ranks = begin_lingering(lab, desk)
    desk.menu("Kernel", "Interrupt Kernel")
    lab.until(lambda: not any(rank.is_running() for rank in ranks), 20, "the ranks end")
    desk.wait_idle(30)
    desk.shoot("interrupt_after")
    desk.run_cell(4)
    desk.page.get_by_text("[0, 10]").wait_for(timeout=60_000)
    cells = [cell for cell in desk.save(file).cells if cell.cell_type == "code"]
    assert [[error.ename for error in errors([cell])] for cell in cells[:5]] == [
        [], ["RunInterrupted"], [], ["RunInterrupted"], [],
    ]  # fmt: skip

    ranks = begin_lingering(lab, desk)
    assert len(lab.beside_kernels()) >= 2
    desk.shoot("restart_before")
    desk.menu("Kernel", "Restart Kernel…")
    desk.answer("restart the kernel", "Restart")
    lab.until(lambda: not any(rank.is_running() for rank in ranks), 20, "the ranks end")
    lab.until(lambda: not lab.beside_kernels(), 20, "the restart leaves nothing but the new kernel")
    desk.wait_idle(60)
    desk.shoot("restart_after")


def a_button_kills_a_rank_and_the_run_goes_on_until_it_is_stopped(lab, desk):
    desk.run_cell(0)
    killed, progress = desk.page.get_by_text("kill -9 rank 1"), lab.folder / "hurt/metrics.jsonl"
    killed.wait_for(timeout=60_000)
    lab.until(lambda: last_step(progress) > 20, 60, "the run begins")
    killed.click()
    desk.page.get_by_text("rank 1 was killed after step").wait_for(timeout=30_000)
    lab.until(lambda: len(starts := rows(progress, "start")) == 2 and last_step(progress) > starts[1]["step"], 90, "on")
    desk.shoot("button_pressed")
    desk.run_cell(1)
    desk.page.wait_for_timeout(500)
    desk.menu("Kernel", "Interrupt Kernel")
    desk.wait_idle(60)
    desk.run_cell(2)
    desk.page.get_by_text("'status': 'stopped'").wait_for(timeout=30_000)
    assert rows(progress, "start")[1]["step"] >= 10


def begin_lingering(lab, desk):
    """Start LINGER; when both of its ranks run, give their processes."""
    files = [lab.folder / f"rank{rank}.pid" for rank in range(2)]
    for file in files:
        file.unlink(missing_ok=True)
    desk.run_cell(3)
    lab.until(lambda: all(file.exists() and file.read_text() for file in files), 60, "two ranks run")
    return [psutil.Process(int(file.read_text())) for file in files]


def rows(file, event):
    """Of metrics.jsonl; the last line may be half written."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [row for row in map(json.loads, lines) if row["event"] == event]


def last_step(file):
    return max((row["step"] for row in rows(file, "train")), default=0)
