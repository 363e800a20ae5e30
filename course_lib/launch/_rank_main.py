"""The script that torchrun starts for `run`; its argument is the run folder."""

import json
import sys
from pathlib import Path

# Under plain torchrun sys.path begins with this file's folder; the notebook's own path is what counts.
sys.path[:] = json.loads(Path(sys.argv[1], "plan.json").read_text())["path"]

from course_lib.launch.rank import main  # noqa: E402

main(sys.argv[1])
