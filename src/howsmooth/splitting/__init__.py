"""When does splitting a token do more than moving it?"""

from howsmooth.splitting.decide import Splitting, splitting
from howsmooth.splitting.verify import Check, verify

__all__ = ["Check", "Splitting", "splitting", "verify"]
