"""`python -m localkv`."""

from localkv.cli import main

if __name__ == "__main__":
    main()
