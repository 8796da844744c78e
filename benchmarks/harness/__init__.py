"""What every operator's benchmark shares: checking, timing, the ceilings, the result files.

An operator fills in `harness.case.Operator`; `harness.run.measure` does the rest.
"""
