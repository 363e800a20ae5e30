"""Data parallelism, third version: a bucket's all-reduce starts as soon as backward has filled it.

While the bytes of the last layers travel, backward computes the gradients of the first ones. So does torch's DDP (Li
et al., "PyTorch Distributed", VLDB 13(12), 2020, section 3.2.3), which moreover learns in its first backward in which
order gradients really arrive, and fills its buckets anew.

All-reduces a step: those of BucketedDDP, earlier.
"""

from course_lib.parallel.bucketed import BucketedDDP
from course_lib.parallel.link import Work


class OverlappedDDP(BucketedDDP):
    """One all-reduce a bucket, during backward. See DataParallelByHand for the arguments.

    One synchronised backward before each `synchronize()`: a second one would write into a bucket under way, and
    raises a RuntimeError. Put all but the last in `no_sync()`.
    """

    def prepare(self, capacity: int) -> None:
        """Make the buckets."""
        super().prepare(capacity)
        places = [(n, b, place) for b, bucket in enumerate(self.buckets) for place, n in enumerate(bucket.numbers)]
        self._place = {n: (b, place) for n, b, place in places}
        self._begin_again()

    def _begin_again(self) -> None:
        self._missing = [set(bucket.numbers) for bucket in self.buckets]
        self._started: list[Work] = []  # of the first buckets, in order

    def arrived(self, number: int) -> None:
        """Called by backward: put the gradient into its bucket, and start the buckets that are full.

        Always in order, since ranks that start different sums would add what does not belong together: a bucket
        that is full early waits for those before it. One that does not get full in this backward, because this
        rank took another branch, is started by `average`, and with it all after it.
        """
        b, place = self._place[number]
        if b < len(self._started):
            raise RuntimeError(
                f"{self.names[number]} got another gradient when its all-reduce had already started. Call "
                "synchronize() after each backward, or put all backwards but the last in `with model.no_sync():`."
            )
        self.buckets[b].take(place)
        if self.syncing:
            self._missing[b].discard(number)
            while len(self._started) < len(self.buckets) and not self._missing[len(self._started)]:
                self._start_next()

    def _start_next(self) -> None:
        bucket = self.buckets[len(self._started)]
        self._started.append(self.link.start(bucket.buffer))

    def average(self) -> None:
        """Start what could not start before, and wait for all."""
        try:
            while len(self._started) < len(self.buckets):
                self.buckets[len(self._started)].pack()  # zeros where there is no gradient
                self._start_next()
            for bucket, work in zip(self.buckets, self._started, strict=True):
                work.wait()
                bucket.buffer.div_(self.link.size)
        finally:
            self._begin_again()
