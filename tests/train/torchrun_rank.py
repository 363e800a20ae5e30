"""What a rank under the zygote's torchrun runs: as `python -m course_lib.train`, after the test's own lines."""

import os
import signal
import sys

from course_lib.train.main import main

for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(_number, signal.SIG_DFL)  # a forked rank inherits torchrun's handlers
before, *words = sys.argv[1:]
exec(before, {"rank": int(os.environ["RANK"]), "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"])})
sys.exit(main(words))
