"""Starts ranks in half a second: imports torch and the loop once, then forks the ranks of each request.

Requests and answers are JSON lines on stdin and stdout. This process has one thread and opens no connection,
so forking it is safe. The ranks run `course_lib.train.main.main`, as `python -m course_lib.train` does;
`before` is Python source that each rank runs first, to observe or to break something. With `restarts` the ranks are
those of a real torchrun, whose process id and exit code are the only ones of the answer.
"""

import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import course_lib.train.warm  # noqa: F401
from course_lib.launch.agent import warm_up, warm_up_fully
from course_lib.launch.dying import die_with_parent
from course_lib.launch.huge_pages import huge_pages
from course_lib.train.main import main

warm_up()
warm_up_fully()
die_with_parent()
gc.freeze()  # forks then neither scan nor copy what is here
list(huge_pages())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def settle(request: dict, number: int) -> None:
    """In a fork: a session, a log and a folder of its own."""
    os.setsid()
    die_with_parent()
    out = os.open(f"{request['log']}.{number}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(request["cwd"])


def torchrun_main(request: dict) -> int:
    from torch.distributed.run import main as torchrun

    settle(request, 0)
    torchrun(
        [
            *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(request["ranks"])),
            *("--max-restarts", str(request["restarts"]), "--run-path", "--start-method", "fork"),
            *("--log-dir", request["cwd"], str(Path(__file__).with_name("torchrun_rank.py"))),
            *(request["before"], *request["words"]),
        ]
    )
    return 0


def rank_main(request: dict, rank: int, port: int) -> int:
    settle(request, rank)
    if request["ranks"] > 0:  # 0: one process without a launcher
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(request["ranks"]),
            "LOCAL_WORLD_SIZE": str(request["ranks"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    exec(request["before"], {"rank": rank})
    return main(request["words"])


def exit_code(work: Callable[..., int], *args: object) -> int:
    try:
        return work(*args)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001  reported as Python itself would
        sys.excepthook(*sys.exc_info())
        return 1


def serve(request: dict) -> dict:
    port, pids, elastic = free_port(), [], request["restarts"] is not None
    # Imported once here, not in each fork:
    if any(word.startswith(("--data.augment", "imagefolder:", "mnist", "cifar10")) for word in request["words"]):
        import torchvision.datasets
        import torchvision.transforms.v2  # noqa: F401
    for rank in range(1 if elastic else max(request["ranks"], 1)):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = exit_code(torchrun_main, request) if elastic else exit_code(rank_main, request, rank, port)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    print(json.dumps({"pids": pids}), flush=True)
    codes: dict[int, int] = {}
    deadline, killed = time.monotonic() + request["timeout"], False
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif pid == 0:
            time.sleep(0.01)
            failed = any(code not in (0, 75) for code in codes.values())
            if failed and not killed:  # as a launcher does: the others are told to go, and get a while
                deadline, killed = min(deadline, time.monotonic() + 10), True
                for other in set(pids) - codes.keys():
                    os.kill(other, signal.SIGTERM)
            if time.monotonic() > deadline:
                for other in set(pids) - codes.keys():
                    os.killpg(other, signal.SIGKILL)
    return {"codes": [codes[pid] for pid in pids]}


if __name__ == "__main__":
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
