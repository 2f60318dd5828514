"""The search for the fastest right kernel of each problem: space, samplers, objectives, verification, studies.

`python -m cupyq.tune` is its command line; `study.Tuner` is what that runs.
"""
