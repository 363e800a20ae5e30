"""`python -m course_lib.train RECIPE --optim.lr 0.1 ...`, alone or under torchrun."""

import os
import sys

# Before torch is imported: ranks share the cores, and more threads than cores made them 10 times slower and
# more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from course_lib.startup import importing

with importing():
    from course_lib.train.main import main

if __name__ == "__main__":
    sys.exit(main())
