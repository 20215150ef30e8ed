"""How often the hosts of elastic jobs are looked for on Ray."""

import sys

from choros.ray import discovery

sys.modules[__name__] = discovery  # so that a value that is set here is the one that counts
