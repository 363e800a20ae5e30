"""Data parallelism, by hand and with torch's DistributedDataParallel."""

from course_lib.parallel.bucketed import BucketedDDP
from course_lib.parallel.naive import NaiveDDP
from course_lib.parallel.overlapped import OverlappedDDP

__all__ = ["BucketedDDP", "NaiveDDP", "OverlappedDDP"]
