"""`python -P -m homeserve.worker BOOT_FD`: what the fleet starts, once for each rank."""

import sys

from homeserve.worker.child import main

sys.exit(main(sys.argv[1:]))
