"""Light parallel training over native torch.

from haiscale.ddp import DistributedDataParallel
from haiscale.host_adamw import HostAdamW
"""
