"""What `hfai doctor` looks at: which parts of hfai are ready on this machine.

Each check is a function without arguments that returns a `Check`; a new part adds its own to the
list in `checks.py`. A broken installation is what this is for, so nothing heavy is imported here:
every check imports what it looks at by itself, and one that raises becomes a broken part.
"""

from hfai.doctor.check import Check, all_ready, diagnose
from hfai.doctor.checks import CHECKS

__all__ = ["CHECKS", "Check", "all_ready", "diagnose"]
