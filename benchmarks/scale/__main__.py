"""``python -m benchmarks.scale``."""

from benchmarks.scale.running import main

if __name__ == "__main__":
    main()
