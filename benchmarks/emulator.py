"""How fast the emulator is: warp instructions a second on real W4A16 layers, with every check on and with none.

python benchmarks/emulator.py [--m 16] [--n 4096] [--k 4096] [--arch sm_80]
"""

from __future__ import annotations

import resource
import time

import click
import numpy as np

import cupyq
from cupyq import compiler, devices, emulator, kernels


@click.command()
@click.option("--m", default=16, show_default=True)
@click.option("--n", default=4096, show_default=True)
@click.option("--k", default=4096, show_default=True)
@click.option("--arch", default="sm_80", show_default=True)
@click.option("--device", default="a100-sxm", show_default=True)
def main(m: int, n: int, k: int, arch: str, device: str) -> None:
    """Emulate the default kernel of one W4A16 layer and print seconds, warp instructions a second, and memory."""
    rng = np.random.default_rng(0)
    problem = kernels.Problem(op="w4a16", m=m, n=n, k=k, group_size=128, symmetric=True, dtype="float16")
    config = kernels.default(problem, devices.get(device))
    compiled = compiler.compile_kernel(config, problem, arch=arch)
    weights = cupyq.quantize(rng.standard_normal((k, n), dtype=np.float32) * 0.02, "w4a16", group_size=128)
    call = kernels.call(config, problem, rng.standard_normal((m, k)).astype(np.float16), weights)
    start = time.perf_counter()
    program = emulator.load(compiled.ptx, compiled.entry)
    print(f"{config}\nload: {len(program.code)} instructions in {time.perf_counter() - start:.3f} s")
    for checks in (("memory", "race", "init", "sync"), ("memory",)):
        start = time.perf_counter()
        result = emulator.launch(
            compiled.ptx, compiled.entry, call.grid, call.block, call.args, call.shared_bytes, checks=checks
        )
        seconds = time.perf_counter() - start
        count = result.counters.total_instructions
        print(
            f"checks {', '.join(checks):30} {seconds:6.2f} s   {count:>10,} warp instructions   "
            f"{count / seconds / 1e6:5.2f} M/s"
        )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
