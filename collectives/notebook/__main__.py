"""``python -m collectives.notebook`` is a rank of a notebook; see `collectives.notebook.rank`."""

from collectives.notebook.rank import main

if __name__ == "__main__":
    main()
