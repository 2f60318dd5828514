"""The devices, the problem and the environment that the tests of the database share."""

from __future__ import annotations

import cupyq.db
from cupyq import devices
from cupyq.kernels.problem import Problem


def generated(config, problem):
    """Stand for `kernels.source_hash`: the source depends on the config's tile and on the op."""
    return f"{problem['op']}-{config.get('tile')}-v1"


HERE = cupyq.db.Environment("13.0", "13.0", "library-1", generated, cupy_version="14.0", cupyq_version="0.1.0")

H100 = devices.get("h100-sxm")
A100 = devices.get("a100-sxm")
PROBLEM = Problem("w4a16", 16, 4096, 8192)


def adder(store):
    def add(time_us=10.0, tile=1, **fields):
        usual = {"device": H100, "problem": PROBLEM, "source": "measured", "verified": True, "config": {"tile": tile}}
        return store.add_trial(time_us=time_us, **(usual | fields))

    return add
