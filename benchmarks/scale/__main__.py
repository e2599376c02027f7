"""``python -m benchmarks.scale``."""

from benchmarks.scale.running import main

main()
