"""One case, measured in one process."""

import time

BEGAN = time.monotonic()
"""When the first line of a worker's process ran, in s."""
