"""The `hfai demo` job: a small but real pre-training run that compares hfai with plain torch.

`job.py` is the whole run, top to bottom. Around it: `request.py` and `settings.py` (what is asked
for), `corpus.py` and `batches.py` (the data), `train.py` (one step, and the loop), `compare.py`
(torch and hfai in turn), `check.py` (back to torch), `state.py` (stop and resume), `interrupt.py`
(signals), `team.py` and `helpers.py` (several processes), and `outcome.py`, `progress.py`,
`report.py`, `plot.py`, `figures.py`, `machine.py` (what the user sees).
"""
