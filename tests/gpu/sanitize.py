"""Every kernel once, on few rows, for a sanitizer to watch.

    python tests/gpu/sanitize.py              compiles all, and says which kernels ran
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        --show-backtrace no python tests/gpu/sanitize.py

racecheck, initcheck and synccheck likewise. The first run keeps what it compiled in Triton's cache,
so that the sanitizer watches no compiler. Without torch's caching allocator every tensor is an
allocation of its own: nothing hides behind it.
`--only NAME` takes the kind of this name, or else those with this word in their name.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import Tensor

from dash_portable.trial.feed import settle
from tests.device import DEVICE, INTERPRETED
from tests.gpu.kinds import Prepared, every_kernel, kinds, launched
from tests.gpu.served import Served, Shape, prompts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    seen: set[str] = set()
    begin = time.perf_counter()
    fed: dict[Shape, Tensor] = {}
    texts = prompts() if INTERPRETED else prompts(page=60, text=500, small=8)
    made = kinds(texts)
    wanted = [options.only] if options.only in made else [k for k in made if options.only in k]
    for name in wanted:
        kind = made[name]
        with launched(kind) as kernels:
            if kind.shape not in fed:
                served = Served(kind.texts, shape=kind.shape, answer=8)
                fed[kind.shape] = served.fed(served.cache(), served.lengths)
            done = Prepared(kind, fed[kind.shape]).run()
        settle(DEVICE)
        for what, x in done.results.items():
            if not bool(x.isfinite().all()):
                sys.stdout.write(f"{name}: {what} is not finite\n")
                return 1
        seen |= kernels
        sys.stdout.write(f"{time.perf_counter() - begin:6.1f} s  {name}\n")
        sys.stdout.flush()
    left_out = every_kernel() - seen
    whole = f"not {' '.join(sorted(left_out))}" if left_out else "every kernel"
    sys.stdout.write(f"{len(seen)} kernels: {' '.join(sorted(seen))}; {whole}\n")
    return 1 if left_out and not options.only else 0


if __name__ == "__main__":
    sys.exit(main())
