"""Make a process cheap to fork: put what it has imported into huge pages (Linux).

A fork copies the page table, entry by entry, and the end of the child takes it down again. After `import torch` there
are about 100,000 entries of 4 KiB. Pages of 2 MiB need 512 times fewer; a child that writes gets small ones there.
"""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

_MADV_COLLAPSE = 25  # linux/mman.h, since Linux 6.1; it needs no setting of the system
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_AT_ONCE = 4  # huge pages in one step: 10 ms on a virtual machine, where copying is slow


def huge_pages() -> Iterator[int]:
    """Move the process's own memory into huge pages, a few at each step.

    Yields bytes that were moved. Nothing is to be done, and nothing yielded, where the system has no such pages or
    does not give any: all works as well without.
    """
    if sys.platform != "linux" or not _SIZE.exists():
        return
    libc, size = ctypes.CDLL(None), int(_SIZE.read_text())
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end in _regions():
        first, last = -(-begin // size) * size, end // size * size
        for at in range(first, last, _AT_ONCE * size):
            length = min(_AT_ONCE * size, last - at)
            if libc.madvise(at, length, _MADV_COLLAPSE) == 0:
                yield length


def _regions() -> list[tuple[int, int]]:
    """Addresses of memory that no file stands behind, of which most is in use: not the stacks of threads."""
    found: list[tuple[int, int]] = []
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # a header: addresses, permissions, offset, device, inode, perhaps a name
            begin, end = (int(address, 16) for address in name.split("-"))
            ours = rest[0] == "rw-p" and (len(rest) == 4 or rest[4] == "[heap]")
        elif ours and name == "Anonymous:" and int(rest[0]) * 1024 > (end - begin) // 2:
            found.append((begin, end))
    return found
