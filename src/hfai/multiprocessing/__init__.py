"""One process for each GPU of a machine, and which rank it has among all machines.

import hfai

def main(local_rank, epochs):
place = hfai.multiprocessing.place(local_rank, nprocs)
...

hfai.multiprocessing.spawn(main, args=(10,), nprocs=8)
"""

from hfai.multiprocessing.launch import spawn
from hfai.multiprocessing.places import Place, place

__all__ = ["Place", "place", "spawn"]
