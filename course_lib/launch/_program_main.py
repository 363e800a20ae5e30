"""What a forked rank of `torchrun()` runs: the module or script that the arguments name, as `python` would."""

import runpy
import signal
import sys

from course_lib.launch.dying import die_with_parent

die_with_parent()
for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(_number, signal.SIG_DFL)  # a forked rank inherits torchrun's handlers
for _stream in (sys.stdout, sys.stderr):
    _stream.reconfigure(line_buffering=True)
if sys.argv[1] == "-m":
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
