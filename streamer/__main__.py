"""``python -m streamer``: the command line, also where the script is not on the path."""

from streamer.cli import main

if __name__ == "__main__":
    main()
