import sys

from tests.fakes.engine.pod import main

if __name__ == "__main__":
    sys.exit(main("decode"))
