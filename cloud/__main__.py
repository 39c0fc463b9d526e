"""`python -m cloud`, the same as `outrider-cloud`."""

from cloud.cli import main

main()
