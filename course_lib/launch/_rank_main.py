"""The script that torchrun starts for `run`; its argument is the run folder."""

import sys

from course_lib.launch.rank import main

main(sys.argv[1])
