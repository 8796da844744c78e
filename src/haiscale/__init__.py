"""Light parallel training over native torch.

from haiscale.ddp import DistributedDataParallel
"""
