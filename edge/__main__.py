"""`python -m edge`, the same as `outrider-edge`."""

from edge.cli import main

main()
