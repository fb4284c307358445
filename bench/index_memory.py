"""Whether memory stays flat under distinct prompts without end, and what an insert costs.

    .venv/bin/python bench/index_memory.py [--prompts 10000000]

Each prompt is new, 4 blocks long after a system prompt that a hundred others have too; eight nodes hold
400,000 blocks between them. A line every tenth of the way.
"""

import argparse
import resource
import time
from pathlib import Path

from extproc.routing.blocks import BLOCK_BYTES, PromptBlocks
from extproc.routing.prefix import PrefixIndex

NODES = 8
BLOCKS = 400_000
OWN_BLOCKS = 4
SHARED_BY = 100


def prompt(number: int) -> PromptBlocks:
    """A system prompt of one block, and blocks that no other prompt has."""
    first = number * (OWN_BLOCKS + 1) + 1
    hashes = (-(number // SHARED_BY) - 1, *range(first, first + OWN_BLOCKS))
    scattered = tuple(block * 0x9E3779B97F4A7C15 % (1 << 64) for block in hashes)
    ends = tuple(BLOCK_BYTES * (place + 1) for place in range(OWN_BLOCKS + 1))
    return PromptBlocks(scattered, ends, ends[-1], 1)


def resident_mb() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10_000_000)
    prompts = parser.parse_args().prompts
    index = PrefixIndex()
    for _ in range(NODES):
        index.add_node(BLOCKS // NODES * BLOCK_BYTES)
    print(f"{'prompts':>12}{'blocks':>10}{'resident MB':>13}{'reported MB':>13}{'us an insert':>14}")
    print(f"{0:12,}{0:10,}{resident_mb():13.1f}{index.memory_bytes() / (1 << 20):13.1f}")
    step = prompts // 10
    for start in range(0, step * 10, step):
        began_s = time.perf_counter()
        for number in range(start, start + step):
            index.insert(number % NODES, prompt(number), pin=True)
        spent_us = (time.perf_counter() - began_s) / step * 1e6
        reported_mb = index.memory_bytes() / (1 << 20)
        print(
            f"{start + step:12,}{len(index):10,}{resident_mb():13.1f}{reported_mb:13.1f}{spent_us:14.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
